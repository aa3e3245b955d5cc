"""What a slicer yields: panes as columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.slicing.folds import Fold, Values

Micros = npt.NDArray[np.int64]


class Kind(IntEnum):
    """Why a pane is yielded; the words are those of ``aion.core.operator.operator.Kind``."""

    ON_TIME = 0
    LATE = 1
    RETRACTED = 2
    """The window is no longer there: a late event changed its bounds. The pane is the last one yielded for it."""


@dataclass(frozen=True, slots=True)
class Panes:
    """One row per execution of a window.

    ``definition``: its number in the order given. ``number``: of a count window, 0 otherwise; two count windows may
    have the same bounds. ``end_us`` is exclusive, but for windows per record. ``values``: one result column per
    aggregate.
    """

    definition: Micros
    number: Micros
    start_us: Micros
    end_us: Micros
    kind: npt.NDArray[np.int8]
    events: Micros
    values: dict[str, Values] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.definition)

    def rows(self) -> list[tuple[Any, ...]]:
        """(definition, number, start, end, kind, events, values ...) of each pane, as Python values."""
        columns = [getattr(self, name) for name in _COLUMNS]
        return list(zip(*(column.tolist() for column in (*columns, *self.values.values())), strict=True))


@dataclass(frozen=True, slots=True)
class Computed:
    """Panes before ``lower``: partials by the name of their ufunc."""

    definition: Micros
    number: Micros
    start_us: Micros
    end_us: Micros
    kind: npt.NDArray[np.int8]
    events: Micros
    partials: dict[str, Values]

    def __len__(self) -> int:
        return len(self.definition)

    def take(self, which: npt.NDArray[Any]) -> Computed:
        columns: dict[str, Any] = {name: getattr(self, name)[which] for name in _COLUMNS}
        return Computed(**columns, partials={name: column[which] for name, column in self.partials.items()})

    def as_kind(self, kind: Kind) -> Computed:
        return replace(self, kind=np.full(len(self), kind, np.int8))

    def of_definition(self, number: int) -> Computed:
        return replace(self, definition=np.full(len(self), number, np.int64))


_COLUMNS = ("definition", "number", "start_us", "end_us", "kind", "events")


def computed(
    definition: int | Micros,
    start_us: Micros,
    end_us: Micros,
    on_time: npt.NDArray[np.bool_] | bool,
    events: Values,
    partials: dict[str, Values],
    number: Micros | None = None,
) -> Computed:
    """Panes of one definition, or of several; ``on_time`` decides between the two kinds of execution."""
    size = len(start_us)
    return Computed(
        np.full(size, definition, np.int64) if isinstance(definition, int) else definition,
        np.zeros(size, np.int64) if number is None else number,
        start_us,
        end_us,
        np.broadcast_to(np.where(on_time, np.int8(Kind.ON_TIME), np.int8(Kind.LATE)), size),
        events,
        partials,
    )


def stacked(parts: Sequence[Computed]) -> Computed:
    """All of them, in order; there has to be one."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    partials = {name: np.concatenate([part.partials[name] for part in parts]) for name in parts[0].partials}
    return Computed(**columns, partials=partials)


def lowered(panes: Computed, folds: Mapping[str, Fold]) -> Panes:
    """The results, by the names of the aggregates."""
    values = {}
    for name, fold in folds.items():
        partial = panes.partials[fold.combine.__name__]
        values[name] = partial if fold.lower is None else fold.lower(partial, panes.events)
    return Panes(panes.definition, panes.number, panes.start_us, panes.end_us, panes.kind, panes.events, values)
