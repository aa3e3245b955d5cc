"""When: whether a late window runs again now. Pure; knows nothing of how windows are laid out."""

from __future__ import annotations

from typing import Protocol


class Trigger(Protocol):
    def due(self, *, news: int) -> bool:
        """Whether a late window runs at the end of this batch, given the events since its last execution."""


class EveryBatch:
    """A late window runs once in each batch that brought it late events."""

    def due(self, *, news: int) -> bool:
        return news > 0
