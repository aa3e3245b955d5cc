"""Sessions of many keys at once, from intervals instead of events (Scotty section IV, Disco section 3.2). Pure.

An interval is a stretch of events of one key without a gap in it: a cell of a batch, a slice, or an existing session.
Two intervals of a key belong to one session if at most the gap lies between the last event of the first and the first
event of the second. Merging is associative and commutative. So it works for events, blocks, partitions and any tree of
them, and sessions of a larger gap can be made from those of a smaller one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Micros = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


class Intervals(NamedTuple):
    """Intervals: the number of the key, and the times of the first and the last event, both inclusive."""

    keys: Micros
    firsts: Micros
    lasts: Micros


class Grouped(NamedTuple):
    """``made``: the merged intervals, in order of (key, first). ``of``: for each input, the number of its interval."""

    made: Intervals
    of: Index


class SessionMerge(NamedTuple):
    """Old sessions merged with new intervals.

    ``sessions``: in order of (key, first). ``of_old``, ``of_new``: the number of the session that each old session and
    each new interval is now part of. ``changed``: sessions that got a new interval. ``replaced``: old sessions whose
    bounds have changed; a pane that was yielded for one has to be retracted.
    """

    sessions: Intervals
    of_old: Index
    of_new: Index
    changed: Flags
    replaced: Flags


def merge_intervals(intervals: Intervals, gap_us: int) -> Grouped:
    """Merge intervals into sessions. Intervals may be in any order, and may overlap."""
    keys, firsts, lasts = intervals
    if not len(keys):
        return Grouped(intervals, np.empty(0, np.intp))
    order = np.lexsort((firsts, keys))
    keys, firsts, lasts = keys[order], firsts[order], lasts[order]
    other_key = keys[1:] != keys[:-1]
    reach = running_max(lasts, other_key)
    starts = np.concatenate(([True], other_key | (firsts[1:] - reach[:-1] > gap_us)))
    begins = np.flatnonzero(starts)
    of = np.empty(len(keys), np.intp)
    of[order] = np.cumsum(starts) - 1
    ends = np.append(begins[1:], len(keys))
    return Grouped(Intervals(keys[begins], firsts[begins], reach[ends - 1]), of)


def merge_sessions(old: Intervals, new: Intervals, gap_us: int) -> SessionMerge:
    """Returns the sessions there are now, which of them changed, and which old ones they replaced.

    ``old``: sessions of the same gap. Leave out purged ones: they must not come back.
    """
    both = Intervals(*(np.concatenate(pair) for pair in zip(old, new, strict=True)))
    made, of = merge_intervals(both, gap_us)
    of_old, of_new = of[: len(old.keys)], of[len(old.keys) :]
    changed = np.zeros(len(made.keys), np.bool_)
    changed[of_new] = True
    replaced = (made.firsts[of_old] != old.firsts) | (made.lasts[of_old] != old.lasts)
    return SessionMerge(made, of_old, of_new, changed, replaced)


def _reached(values: Micros) -> Micros:
    """Returns the running maximum. Most inputs are sorted already, and then it is the input."""
    return values if (values[1:] >= values[:-1]).all() else np.maximum.accumulate(values)


def running_max(values: Micros, restarts: Flags) -> Micros:
    """Returns the running maximum. It starts again after each place where ``restarts`` (one shorter) is set."""
    group = np.concatenate(([0], np.cumsum(restarts)))
    if not group[-1]:
        return _reached(values)
    low, high = int(values.min()), int(values.max())
    if int(group[-1] + 1) * (high - low + 1) < 2**62:
        # Shift each group above all groups before it, so that one pass is enough.
        lift = group * (high - low + 1) - low
        return np.asarray(_reached(values + lift) - lift)
    distinct, ranks = np.unique(values, return_inverse=True)
    ranks = _reached(ranks + group * len(distinct)) - group * len(distinct)
    return np.asarray(distinct[ranks])
