"""A batch of events to the slices they are in, each with its partial aggregates, in a few passes (Scotty). Pure.

Events are counted into bins so narrow that every edge begins one, and the bins between two edges are added up: the cost
per event depends neither on the number of windows nor, much, on the order of events. Where such bins would be too many,
the slice of each event is looked up instead, or the batch is sorted.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import numpy as np
import numpy.typing as npt

from aion.core.slicing.edges import CELLS_PER_EVENT, MIN_CELLS, EdgeSet, Micros, assign, is_sorted
from aion.core.slicing.ranges import identity
from aion.slicing.folds import Fold, Values
from aion.slicing.rows import Rows

Index = npt.NDArray[np.intp]

# Adding to one place again and again, the processor waits for itself; so bins are few only where they have to be.
_BINS_PER_EVENT, _BINS_AT_MOST = 1 / 4, 1 << 15


def slice_batch(
    times_us: Micros,
    values: Values | None,
    edges: EdgeSet,
    gap_us: int | None,
    folds: Mapping[str, Fold],
    extent: tuple[int, int] | None = None,
) -> Rows:
    """``edge``, ``events`` and the partials of every slice with an event, in order; with a gap, ``first`` and ``last``.

    With ``gap_us`` slices are cut as well where a session of that gap may end, so that every slice lies in one session:
    at gaps between events where the batch is sorted, otherwise at multiples of the gap, because in a cell as wide as
    the gap nothing can split a session. ``values`` may be None if ``folds`` is empty. ``extent``: the first and last
    time, for whom it is known.
    """
    if is_sorted(times_us):
        return _of_sorted(times_us, values, edges, gap_us, folds)
    low, high = extent or (int(times_us.min()), int(times_us.max()))
    unit = gcd(edges.unit_us, gap_us or 0)
    affordable = CELLS_PER_EVENT * len(times_us) + MIN_CELLS
    if (high - low) // unit < affordable and edges.density * (high - low) < affordable:
        unit = _finer(unit, high - low, min(int(len(times_us) * _BINS_PER_EVENT), _BINS_AT_MOST))
        return _by_bins(times_us, values, (low, high, unit), edges, gap_us, folds)
    known = edges.covering(times_us) if gap_us is None else None
    if known is not None:
        return _by_slots(assign(times_us, known), values, known, folds)
    order = np.argsort(times_us, kind="stable")
    return _of_sorted(times_us[order], None if values is None else values[order], edges, gap_us, folds)


def _by_bins(
    times_us: Micros,
    values: Values | None,
    extent: tuple[int, int, int],
    edges: EdgeSet,
    gap_us: int | None,
    folds: Mapping[str, Fold],
) -> Rows:
    low, high, unit = extent
    base = (low - edges.origin_us) // unit * unit + edges.origin_us
    bins = times_us - base
    np.floor_divide(bins, unit, out=bins)
    size = (high - base) // unit + 1
    begins = np.zeros(1, np.intp)
    of_begin = np.zeros(1, np.int64)
    if edges.families:
        of_begin = edges.between(low, high)
        begins = np.maximum(of_begin - base, 0) // unit
    if gap_us is not None:
        step = gap_us // unit
        marks = np.zeros(size, np.int8)
        marks[(edges.origin_us - base) // unit % step :: step] = 1
        marks[begins] = 2
        begins = np.flatnonzero(marks)
        of_begin = of_begin[np.cumsum(marks[begins] == 2) - 1]
    counts = np.zeros(size, np.int64)
    np.add.at(counts, bins, 1)
    events = np.add.reduceat(counts, begins)
    kept = np.flatnonzero(events)
    rows: Rows = {"edge": of_begin[kept], "events": events[kept]}
    if gap_us is not None:
        rows["first"], rows["last"] = _bounds(times_us, bins, counts, begins[kept])
    for name, fold in folds.items():
        assert values is not None
        rows[name] = fold.stretches(fold.at(bins, values, size), begins)[kept]
    return rows


def _bounds(times_us: Micros, bins: Index, counts: Values, begins: Index) -> tuple[Micros, Micros]:
    """The first and last event time from each of ``begins`` to the next; only the outermost bins are looked into."""
    taken = np.flatnonzero(counts)
    ends = np.cumsum(np.add.reduceat((counts > 0).astype(np.int64), begins))
    outer = taken[np.concatenate(([0], ends[:-1]))], taken[ends - 1]
    marks = np.zeros(len(counts), np.bool_)
    for of_slices in outer:
        marks[of_slices] = True
    some = np.flatnonzero(marks[bins])
    found = []
    for of_slices, ufunc in zip(outer, (np.minimum, np.maximum), strict=True):
        extremes = np.full(len(counts), identity(ufunc, np.int64))
        ufunc.at(extremes, bins[some], times_us[some])
        found.append(extremes[of_slices])
    return found[0], found[1]


def _by_slots(slots: Index, values: Values | None, edges: Micros, folds: Mapping[str, Fold]) -> Rows:
    events = np.bincount(slots, minlength=len(edges))
    kept = np.flatnonzero(events)
    rows: Rows = {"edge": edges[kept], "events": events[kept]}
    for name, fold in folds.items():
        assert values is not None
        rows[name] = fold.at(slots, values, len(edges))[kept]
    return rows


def _of_sorted(
    times_us: Micros, values: Values | None, edges: EdgeSet, gap_us: int | None, folds: Mapping[str, Fold]
) -> Rows:
    cuts = [np.zeros(1, np.intp)]
    known = of_event = None
    if edges.families:
        known = edges.covering(times_us)
        if known is not None:
            cuts.append(np.searchsorted(times_us, known))
        else:
            of_event = edges.floors(times_us)
            cuts.append(np.flatnonzero(of_event[1:] != of_event[:-1]) + 1)
    if gap_us is not None:
        cuts.append(np.flatnonzero(times_us[1:] - times_us[:-1] > gap_us) + 1)
    begins = np.unique(np.concatenate(cuts))
    begins = begins[: np.searchsorted(begins, len(times_us))]
    ends = np.append(begins[1:], len(times_us))
    firsts = times_us[begins]
    rows: Rows = {"events": ends - begins}
    if known is not None:
        rows["edge"] = known[np.searchsorted(known, firsts, side="right") - 1]
    else:
        rows["edge"] = np.zeros(len(begins), np.int64) if of_event is None else of_event[begins]
    if gap_us is not None:
        rows |= {"first": firsts, "last": times_us[ends - 1]}
    for name, fold in folds.items():
        assert values is not None
        rows[name] = fold.stretches(values, begins)
    return rows


def _finer(unit_us: int, span_us: int, bins_wanted: int) -> int:
    """A divisor of the unit that makes about so many bins, if it has one."""
    for factor in (2, 3, 5):
        while unit_us % factor == 0 and span_us // unit_us * factor < bins_wanted:
            unit_us //= factor
    return unit_us
