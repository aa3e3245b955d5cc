"""The newest right row of each left one, for an as-of join. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aion.core.join.matching import Sorted
from aion.core.join.plan import LEFT, JoinPlan
from aion.core.join.rows import NO_KEY, Hashes, Rows, SideRows, together

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Newest:
    """Finds partners. ``right``: the kept rows of the right side."""

    def __init__(self, plan: JoinPlan, right: SideRows) -> None:
        self._interval, self._right = plan.interval(LEFT), right

    def partners(self, left: Rows, *, without: Rows | None = None) -> tuple[Rows, Ints]:
        """For each row of the left side the newest kept row of the right side, as rows and the number of each; -1:
        there is none. ``without``: kept rows that do not count.
        """
        best = Rows.stored(self._right.schema.empty_table())
        which = np.full(len(left), -1)
        hashes = Hashes(left.hash)
        for part in self._right.pages.parts(self._right.around(left, *self._interval)):
            _, others = hashes.among(part)
            if without is not None:
                others = others.take(np.flatnonzero(~others.are_among(np.column_stack(without.identity))))
            best, which = self.better(left, best, which, others)
        return best, which

    def better(self, left: Rows, best: Rows, which: Ints, others: Rows) -> tuple[Rows, Ints]:
        """The newest of the best partners so far and of others."""
        first, last = self._interval
        usable = np.flatnonzero(~others.has(NO_KEY))
        # Of rows at one time, the one with the largest identity is the newest, so that each run chooses the same.
        by_id = usable[np.lexsort((others.identity[1][usable], others.identity[0][usable]))]
        others = others.take(by_id)
        at = Sorted(others.hash, others.time).newest(left.hash, left.time + first, left.time + last)
        at = np.where((at >= 0) & ~left.has(NO_KEY), at, -1)
        there = np.flatnonzero(at >= 0)
        there = there[others.second[at[there]] == left.second[there]]
        had = there[which[there] >= 0]
        newer = np.zeros(len(left), np.bool_)
        newer[there] = True
        if len(had):
            old, new = best.take(which[had]), others.take(at[had])
            keys = [(rows.time, *rows.identity) for rows in (old, new)]
            newer[had] = _exceeds(keys[1], keys[0])
        if not newer.any():
            return best, which
        chosen = np.flatnonzero(newer)
        both = together([best, others.take(at[chosen])]) if len(best) else others.take(at[chosen])
        which = which.copy()
        which[chosen] = len(best) + np.arange(len(chosen))
        kept = np.flatnonzero(which >= 0)
        result = both.take(which[kept])
        which[kept] = np.arange(len(kept))
        return result, which


def _exceeds(new: tuple[Ints, ...], old: tuple[Ints, ...]) -> Flags:
    """Whether rows of numbers come after others, by the first number that differs."""
    result, equal = np.zeros(len(new[0]), np.bool_), np.ones(len(new[0]), np.bool_)
    for new_column, old_column in zip(new, old, strict=True):
        result |= equal & (new_column > old_column)
        equal &= new_column == old_column
    return result


def differ(old: Rows, was: Ints, new: Rows, now: Ints) -> Flags:
    """Whether partners are others than before. -1: there is none."""
    result: Flags = np.not_equal(was < 0, now < 0)
    both = np.flatnonzero((was >= 0) & (now >= 0))
    for a, b in zip(old.identity, new.identity, strict=True):
        result[both] |= a[was[both]] != b[now[both]]
    return result
