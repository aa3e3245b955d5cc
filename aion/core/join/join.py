"""Joins the rows of two sides in one shard, late ones included. Pure: the shard's map is given.

One line for each side decides what is too late: a row before it is dropped. The line follows the watermark at the
distance of the side's bound, and never goes back. All else follows from the two lines: a row is kept as long as one
that may still come could match it or repeat it, and a row without a partner is final when the other line has passed
all that could match it.

A batch is processed in portions. In a portion, new rows meet the new rows and the kept rows of the other side, and are
kept then. So each pair comes out once, in the portion of its second row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.base.numbers import EARLIEST_US, LATEST_US
from aion.core.join.matching import Sorted
from aion.core.join.plan import ASOF, FINAL, LEFT, RIGHT, JoinPlan, holds
from aion.core.join.results import Results
from aion.core.join.rows import CAME_AFTER, MATCHED, NO_KEY, Hashes, Rows, SideRows, together
from aion.core.lateness.observe import NewBounds, observe_late
from aion.core.life.actions import PaneKind
from aion.core.life.arrival import UNTIMED
from aion.core.life.lifecycle import Counters
from aion.core.paged_rows import Pages, Part
from aion.core.slicing.grid import BEYOND_SLICE, NO_SLICE
from aion.errors import FormatError
from state_backends.format.ordered_map import OrderedMap
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
VERSION = 1
"""Of a snapshot, and of what the map has."""
TOO_LATE = "later than the bound of its side"
_PORTION_ROWS = threshold(1 << 16, 5)
_PIECE_ROWS = threshold(1 << 14, 3)
_NOWHERE = -(1 << 62)
_SECOND_US = 1_000_000
_REVERSED = np.array([int(f"{n:016b}"[::-1], 2) for n in range(1 << 16)])


class Join:
    """The join in one shard. ``bounds``: of the left and the right side. ``secret``: the key of identities.

    ``texts``: makes a text of each row, for dropped ones. ``snapshot``: of the version that the map has; None: there is
    none. Rows come by :meth:`arrive`, after :meth:`advance`; then comes :meth:`end_batch`. Each yields results.
    """

    def __init__(
        self,
        plan: JoinPlan,
        values: OrderedMap,
        bounds: tuple[NewBounds, NewBounds],
        secret: bytes,
        texts: Callable[[pa.RecordBatch], pa.Array],
        snapshot: Mapping[str, Any] | None = None,
    ) -> None:
        self._plan, self._bounds, self._secret = plan, bounds, secret
        self._sides = SideRows(plan, LEFT, values), SideRows(plan, RIGHT, values)
        self._waiting: tuple[list[pa.Table], list[pa.Table]] = [], []
        self._rows = 0
        self.counters = Counters()
        self.at_us: int | None = None
        self._lines = [_NOWHERE, _NOWHERE]
        self._shown = [_NOWHERE, _NOWHERE]  # rows due up to then that had no partner have been shown
        self._dropped = [_NOWHERE, _NOWHERE]  # bins before these are gone
        self._due_us: list[int | None] = [None, None]
        seq = 0
        # The rows of this batch that are due already. They are shown at its end.
        self._fresh: tuple[list[Rows], list[Rows]] = [], []
        if snapshot is not None:
            if snapshot["version"] != VERSION:
                raise FormatError(
                    f"the state of the join was written in format {snapshot['version']}; this Aion reads format "
                    f"{VERSION}: use the Aion that wrote it"
                )
            self.counters = Counters.from_json(snapshot["counters"])
            self.at_us = snapshot["watermark_us"]
            self._lines, self._shown, self._dropped = (
                list(snapshot[name]) for name in ("lines_us", "shown_us", "dropped_bins")
            )
            self._due_us = list(snapshot["due_us"])
            seq = snapshot["next_pane_seq"]
        self._results = Results(plan, texts, self.counters, seq)

    def snapshot(self) -> dict[str, Any]:
        """What the next batch needs besides the map, as JSON values."""
        return {
            "version": VERSION,
            "watermark_us": self.at_us,
            "lines_us": self._lines,
            "shown_us": self._shown,
            "dropped_bins": self._dropped,
            "due_us": self._due_us,
            "next_pane_seq": self._results.seq,
            "counters": self.counters.to_json(),
        }

    # -- a batch ------------------------------------------------------------------------------------------

    def advance(self, to_us: int) -> None:
        """Moves the watermark, and with it the lines. It never goes back."""
        if self.at_us is not None and to_us <= self.at_us:
            return
        for side, bound in enumerate(self._bounds):
            bound.advance(self.at_us, to_us)
            self._lines[side] = max(self._lines[side], to_us - bound.bound_for_new_window())
        self.at_us = to_us

    def arrive(self, side: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        """Takes rows of a side. ``rows``: with the columns of that side."""
        if rows.num_rows:
            self._waiting[side].append(rows)
            self._rows += rows.num_rows
            if self._rows >= _PORTION_ROWS:
                yield from self._portion()

    def end_batch(self) -> Iterator[pa.RecordBatch]:
        """Yields what is left of the rows, then the rows that stay without a partner. Lets go of what is not needed."""
        yield from self._portion()
        for side in (LEFT, RIGHT):
            if self._plan.outer[side] and self.at_us is not None:
                yield from self._single(side)
            self._fresh[side].clear()
        self._forget()

    @property
    def due_us(self) -> int | None:
        """Returns the watermark at which the next row without a partner is shown, or None if no row waits for that."""
        found = [due for side, due in enumerate(self._due_us) if due is not None and self._plan.outer[side]]
        if not found or self._plan.emit != FINAL:
            return min(found, default=None)
        return min(
            due + self._bounds[1 - side].bound_for_new_window() + 1
            for side, due in enumerate(self._due_us)
            if due is not None and self._plan.outer[side]
        )

    # -- rows that come -----------------------------------------------------------------------------------

    def _portion(self) -> Iterator[pa.RecordBatch]:
        new: list[Rows] = []
        for side in (LEFT, RIGHT):
            waiting = self._waiting[side]
            table = pa.concat_tables([self._plan.sides[side].schema.empty_table(), *waiting])
            waiting.clear()
            rows, dropped = self._accepted(side, table)
            yield from dropped
            new.append(rows)
        self._rows = 0
        # Pages are chosen by the last bits of a hash. In this order, a page is needed in one or two pieces.
        hashes = np.concatenate([rows.hash for rows in new])
        order = np.argsort(_REVERSED[hashes & 0xFFFF], kind="stable")
        first_right = len(new[LEFT])
        for at in range(0, len(order), _PIECE_ROWS):
            some = order[at : at + _PIECE_ROWS]
            yield from self._pieces(
                new[LEFT].take(some[some < first_right]), new[RIGHT].take(some[some >= first_right] - first_right)
            )

    def _accepted(self, side: int, table: pa.Table) -> tuple[Rows, list[pa.RecordBatch]]:
        """Takes the rows apart that are dropped: those without a time that can be used, and those that are too late."""
        said, bound = self._plan.sides[side], self._bounds[side]
        times = table.column(said.time).cast(pa.int64()).combine_chunks()
        none = times.is_null().to_numpy(zero_copy_only=False)
        at = times.fill_null(0).to_numpy()
        beyond = ~none & ((at < EARLIEST_US) | (at > LATEST_US))
        timed = ~(none | beyond)
        late = timed & (at <= self.at_us) if self.at_us is not None else np.zeros(len(at), np.bool_)
        too_late = timed & (at < self._lines[side])
        self.counters.came(len(at))
        self.counters.came_late(int(late.sum()))
        self.counters.drop_untimed(int((~timed).sum()))
        self.counters.drop(int(too_late.sum()))
        seconds = at // _SECOND_US * _SECOND_US
        if self.at_us is not None and late.any():
            observe_late(bound, *np.unique(seconds[late], return_counts=True), self.at_us)
        if (in_time := timed & ~late).any():
            bound.observe_all_on_time(*np.unique(seconds[in_time], return_counts=True))
        dropped = [
            self._results.dropped(side, table.filter(pa.array(mask)), reason, lateness)
            for mask, reason, lateness in (
                (none, UNTIMED[NO_SLICE], None),
                (beyond, UNTIMED[BEYOND_SLICE], None),
                (too_late, TOO_LATE, None if self.at_us is None else self.at_us - at[too_late]),
            )
            if mask.any()
        ]
        kept = timed & ~too_late
        rows = Rows.of(self._plan, side, table if kept.all() else table.filter(pa.array(kept)), self._secret)
        _, last = self._plan.interval(side)
        rows.flags[rows.time + last <= self._limit(side)] |= CAME_AFTER
        return rows, dropped

    def _limit(self, side: int) -> int:
        """Rows of a side are shown without a partner if none can come with a time up to this one."""
        if self._plan.emit == FINAL:
            return self._lines[1 - side] - 1
        return _NOWHERE if self.at_us is None else self.at_us

    def _pieces(self, left: Rows, right: Rows) -> Iterator[pa.RecordBatch]:
        """Processes some rows of both sides: they meet, and are kept."""
        new = [left, right]
        own: list[tuple[Pages, Part | None]] = []
        for side, stored in enumerate(self._sides):
            bins = stored.bins(new[side].time)
            stored.pages.make_room(bins)
            found = stored.pages.pages(bins, new[side].hash)
            new[side], found, first = self._ranked(side, new[side], found)
            own.append((found, first))
        if self._plan.how == ASOF:
            yield from self._corrected(new[RIGHT])
        else:
            yield from self._matched(new)
        for side, (rows, (found, first), stored) in enumerate(zip(new, own, self._sides, strict=True)):
            outer = self._plan.outer[side]
            if outer:
                _, last = self._plan.interval(side)
                noted = rows.take(np.flatnonzero(~rows.has(MATCHED)))
                if (fresh := np.flatnonzero(noted.time + last <= self._shown[side])).size:
                    self._fresh[side].append(noted.take(fresh))
                due = stored.note(noted, noted.time + last, self._results.seq)
                self._due_us[side] = min((d for d in (due, self._due_us[side]) if d is not None), default=None)
                self._results.seq += 1
            elif not self._plan.sides[side].unique and rows.has(NO_KEY).any():
                kept = np.flatnonzero(~rows.has(NO_KEY))
                rows, found = rows.take(kept), found._replace(page_of=found.page_of[kept])
            # What has a partner now was marked after the pages were read.
            stored.add(found, rows, read=None if outer else first)

    def _ranked(self, side: int, rows: Rows, found: Pages) -> tuple[Rows, Pages, Part | None]:
        """Numbers rows that are equal to others, or leaves them out. ``found``: their pages. Also returns the first
        chunks of these.
        """
        if not len(rows):
            return rows, found, None
        ids = np.column_stack((rows.id, rows.id2))
        _, firsts, of = np.unique(ids, axis=0, return_index=True, return_inverse=True)
        of = of.reshape(-1)
        before = np.zeros(len(firsts), np.int64)
        by_id = Sorted(rows.id[firsts], np.zeros(len(firsts), np.int64))
        first_part = None
        hashes = Hashes(rows.hash)
        for part in self._sides[side].pages.parts(found):
            first_part = part if first_part is None else first_part
            _, there = hashes.among(part)
            zeros = np.zeros(len(there), np.int64)
            for search, of_new in by_id.pairs(there.id, zeros, zeros):
                same = there.id2[search] == rows.id2[firsts[of_new]]
                np.maximum.at(before, of_new[same], there.rank[search[same]] + 1)
        order = np.argsort(of, kind="stable")
        counts = np.bincount(of)
        rank = np.empty(len(rows), np.int64)
        rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows.rank = before[of] + rank
        if not self._plan.sides[side].unique or not rows.rank.any():
            return rows, found, first_part
        fresh = np.flatnonzero(rows.rank == 0)
        return rows.take(fresh), found._replace(page_of=found.page_of[fresh]), first_part

    def _matched(self, new: list[Rows]) -> Iterator[pa.RecordBatch]:
        """Yields the pairs of new rows with each other and with those that are kept. Marks what has a partner."""
        first, last = self._plan.interval(RIGHT)
        left, right = new
        lefts = Sorted(left.hash, left.time)
        for b, a in lefts.pairs(right.hash, right.time + first, right.time + last):
            yield from self._paired(left, a, right, b)
        for side in (LEFT, RIGHT):
            rows, stored = new[1 - side], self._sides[side]
            if not len(rows):
                continue
            # Where the new rows are that a kept one matches. They are fewer, so they are sorted.
            first, last = self._plan.interval(side)
            searched, hashes = Sorted(rows.hash, rows.time), Hashes(rows.hash)
            found = stored.around(rows, *self._plan.interval(1 - side))
            for part in stored.pages.parts(found):
                at, there = hashes.among(part)
                for kept, come in searched.pairs(there.hash, there.time + first, there.time + last):
                    if side == LEFT:
                        yield from self._paired(there, kept, rows, come, kept=LEFT)
                    else:
                        yield from self._paired(rows, come, there, kept, kept=RIGHT)
                if self._plan.outer[side]:
                    stored.mark(found, part, at, there.flags)

    def _paired(
        self, left: Rows, a: Ints, right: Rows, b: Ints, *, kept: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields those rows of both sides that are pairs. ``kept``: the side whose rows came in earlier portions."""
        same = (left.second[a] == right.second[b]) & ~left.has(NO_KEY)[a] & ~right.has(NO_KEY)[b]
        a, b = a[same], b[same]
        if self._plan.condition is not None and len(a):
            mask = holds(self._plan.condition, self._results.columns(left, a, right, b))
            a, b = a[mask], b[mask]
        if not len(a):
            return
        for side, rows, at in ((LEFT, left, a), (RIGHT, right, b)):
            if self._plan.outer[side]:
                at = np.unique(at)
                if kept == side:
                    # What was shown without a partner has one now.
                    _, last = self._plan.interval(side)
                    shown = at[~rows.has(MATCHED)[at] & (rows.time[at] + last <= self._shown[side])]
                    shown = shown[self._were_there(side, rows.take(shown))]
                    yield from self._alone(side, rows, shown, PaneKind.RETRACTED.value)
                rows.flags[at] |= MATCHED
        late = np.zeros(len(a), np.bool_)
        for side, rows, at in ((LEFT, left, a), (RIGHT, right, b)):
            if kept != side and self.at_us is not None:
                late |= rows.time[at] <= self.at_us
        yield self._results.rows(left, a, right, b, self._kinds(late))

    def _were_there(self, side: int, rows: Rows) -> Flags:
        """A mask of the rows that came before this batch."""
        there = np.ones(len(rows), np.bool_)
        for fresh in self._fresh[side]:
            both = [np.column_stack(some.identity) for some in (fresh, rows)]
            of = np.unique(np.concatenate(both), axis=0, return_inverse=True)[1].reshape(-1)
            there &= ~np.isin(of[len(fresh) :], of[: len(fresh)])
        return there

    def _kinds(self, late: Flags) -> pa.Array:
        if self._plan.emit == FINAL:
            return pa.repeat(PaneKind.FINAL.value, len(late))
        return pa.array(np.where(late, PaneKind.LATE.value, PaneKind.ON_TIME.value), pa.string())

    # -- rows without a partner, and the newest partner ---------------------------------------------------

    def _single(self, side: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows for which it is known now that no partner comes in time."""
        limit, stored = self._limit(side), self._sides[side]
        due_us = self._due_us[side]
        if due_us is None or due_us > limit:
            self._shown[side] = max(self._shown[side], limit)
            return
        for due in stored.due(limit):
            for at in range(0, len(due), _PIECE_ROWS):
                some = due[at : at + _PIECE_ROWS]
                rows = self._found(side, some)
                if not len(rows):
                    continue
                if self._plan.how == ASOF:
                    yield from self._newest(rows, rows.has(CAME_AFTER))
                else:
                    alone = np.flatnonzero(~rows.has(MATCHED))
                    kinds = self._kinds(rows.has(CAME_AFTER)[alone])
                    yield from self._alone(side, rows, alone, kinds)
        self._shown[side] = max(self._shown[side], limit)
        self._due_us[side] = stored.next_due_us()

    def _found(self, side: int, due: Ints) -> Rows:
        """The rows that an index of what is due has, as they are kept."""
        stored = self._sides[side]
        some = [Rows.stored(stored.schema.empty_table())]
        found = stored.pages.pages(stored.bins(due[:, 1]), due[:, 0])
        wanted = due[np.lexsort((due[:, 3], due[:, 2]))][:, 2:]
        by_id, hashes = Sorted(wanted[:, 0], np.zeros(len(wanted), np.int64)), Hashes(due[:, 0])
        for part in stored.pages.parts(found):
            _, there = hashes.among(part)
            first, second = there.identity
            zeros = np.zeros(len(there), np.int64)
            for search, at in by_id.pairs(first, zeros, zeros):
                some.append(there.take(np.unique(search[second[search] == wanted[at, 1]])))
        return together([rows for rows in some if len(rows)] or some)

    def _newest(self, left: Rows, late: Flags) -> Iterator[pa.RecordBatch]:
        partner, which = self._partners(left)
        kinds = self._kinds(late)
        yield self._results.rows(left, np.arange(len(left)), partner, which, kinds)

    def _partners(self, left: Rows) -> tuple[Rows, Ints]:
        """For each row of the left side the newest kept row of the right side, as rows and the number of each; -1:
        there is none.
        """
        stored = self._sides[RIGHT]
        first, last = self._plan.interval(LEFT)
        best = Rows.stored(stored.schema.empty_table())
        which = np.full(len(left), -1)
        hashes = Hashes(left.hash)
        for part in stored.pages.parts(stored.around(left, first, last)):
            best, which = self._better(left, best, which, hashes.among(part)[1])
        return best, which

    def _better(self, left: Rows, best: Rows, which: Ints, others: Rows) -> tuple[Rows, Ints]:
        """The newest of the best partners so far and of others."""
        first, last = self._plan.interval(LEFT)
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

    def _corrected(self, right: Rows) -> Iterator[pa.RecordBatch]:
        """Takes back the pairs of left rows that have been shown and get a newer partner, and yields the new ones."""
        if not len(right) or self._shown[LEFT] == _NOWHERE:
            return
        _, reach = self._plan.interval(LEFT)
        first, last = self._plan.interval(RIGHT)
        stored, hashes = self._sides[LEFT], Hashes(right.hash)
        for part in stored.pages.parts(stored.around(right, first, last)):
            _, there = hashes.among(part)
            there = there.take(np.flatnonzero(there.time + reach <= self._shown[LEFT]))
            there = there.take(np.flatnonzero(self._were_there(LEFT, there)))
            touched = [np.empty(0, np.int64)]
            for _, at in Sorted(there.hash, there.time).pairs(right.hash, right.time + first, right.time + last):
                touched.append(np.unique(at))
            rows = there.take(np.unique(np.concatenate(touched)))
            for begin in range(0, len(rows), _PIECE_ROWS):
                some = rows.take(np.arange(begin, min(begin + _PIECE_ROWS, len(rows))))
                old, was = self._partners(some)
                new, now = self._better(some, old, was, right)
                changed = np.flatnonzero(_differ(old, was, new, now))
                if len(changed):
                    some_changed = some.take(changed)
                    each = np.arange(len(changed))
                    retracted = pa.repeat(PaneKind.RETRACTED.value, len(changed))
                    yield self._results.rows(some_changed, each, old, was[changed], retracted)
                    yield self._results.rows(
                        some_changed, each, new, now[changed], self._kinds(np.ones(len(changed), bool))
                    )

    # -- results ------------------------------------------------------------------------------------------

    def _alone(self, side: int, rows: Rows, at: Ints, kind: Any) -> Iterator[pa.RecordBatch]:
        """Yields rows without a partner. ``kind``: one for all, or one for each."""
        if len(at):
            kinds = pa.repeat(kind, len(at)) if isinstance(kind, str) else kind
            other = Rows.stored(self._sides[1 - side].schema.empty_table())
            none = np.full(len(at), -1)
            if side == LEFT:
                yield self._results.rows(rows, at, other, none, kinds)
            else:
                yield self._results.rows(other, none, rows, at, kinds)

    # -- what is not needed any more ----------------------------------------------------------------------

    def _forget(self) -> None:
        """Deletes the rows that nothing can match or repeat that may still come."""
        if self.at_us is None:
            return
        for side, before_us in enumerate(self._plan.needed_from(self._lines)):
            bin_ = before_us // self._sides[side].bin_us
            if bin_ > self._dropped[side]:
                self._sides[side].pages.drop(bin_)
                self._dropped[side] = bin_


def _exceeds(new: tuple[Ints, ...], old: tuple[Ints, ...]) -> Flags:
    """Whether rows of numbers come after others, by the first number that differs."""
    result, equal = np.zeros(len(new[0]), np.bool_), np.ones(len(new[0]), np.bool_)
    for new_column, old_column in zip(new, old, strict=True):
        result |= equal & (new_column > old_column)
        equal &= new_column == old_column
    return result


def _differ(old: Rows, was: Ints, new: Rows, now: Ints) -> Flags:
    """Whether partners are others than before. A row has one now if it had one before."""
    differ = (was < 0) & (now >= 0)
    both = np.flatnonzero(was >= 0)
    for a, b in zip(old.identity, new.identity, strict=True):
        differ[both] |= a[was[both]] != b[now[both]]
    return differ
