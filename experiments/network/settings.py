"""The settings of `aion experiment network`, and what one run of it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.network.streams import Run, Sources


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one run of the experiment. ``levels``: hops between a child and the root."""

    events_per_batch: int
    batches: int
    keys: int
    children: int
    fan_in: int
    levels: tuple[int, ...]
    partitions: tuple[int, ...]
    cores: tuple[int, ...]
    runs: int
    seed: int
    decimals: int = 2
    span_s: int = 20

    def sources(self, children: int, batches: int) -> Sources:
        from experiments.network.streams import Sources

        return Sources(
            children, self.events_per_batch // children, batches, self.keys, self.span_s, self.seed, self.decimals
        )


@dataclass(frozen=True, slots=True)
class Rate:
    """A run for figure 5, with its number of cores and children."""

    cores: int
    children: int
    run: Run
