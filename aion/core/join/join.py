"""Joins the rows of two sides in one shard, late ones included. Pure: the shard's map is given.

One line for each side decides what is too late: a row before it is dropped. The line follows the watermark at the
distance of the side's bound, and never goes back. All else follows from the two lines: a row is kept as long as one
that may still come could match it or repeat it, and a row without a partner is final when the other line has passed
all that could match it.

A batch is processed in portions. In a portion, new rows meet the new rows and the kept rows of the other side, and are
kept then. So each pair comes out once, in the portion of its second row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.core.join.arrivals import JoinArrivals
from aion.core.join.matching import Sorted
from aion.core.join.plan import ASOF, CHANGES, FINAL, LEFT, RIGHT, JoinPlan
from aion.core.join.results import Newest, Results, differ
from aion.core.join.rows import (
    CAME_AFTER,
    GONE,
    LATE,
    MATCHED,
    NO_KEY,
    NOTED,
    Hashes,
    JoinRows,
    New,
    SideRows,
    newest,
    numbered,
    together,
)
from aion.core.lateness.observe import NewBounds
from aion.core.life.actions import PaneKind
from aion.core.life.lifecycle import Counters
from aion.errors import FormatError
from state_backends.format.ordered_map import OrderedMap
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
VERSION = 1
"""Of a snapshot, and of what the map has."""
_PORTION_ROWS = threshold(1 << 16, 5)
_PIECE_ROWS = threshold(1 << 14, 3)
_NOWHERE = -(1 << 62)
_REVERSED = np.array([int(f"{n:016b}"[::-1], 2) for n in range(1 << 16)])


class Join:
    """The join in one shard. ``bounds``: of the left and the right side. ``secret``: the key of identities.

    ``texts``: makes a text of each row, for dropped ones. ``snapshot``: of the version that the map has, or None if
    there is none. Rows come by :meth:`arrive`, after :meth:`advance`, or before it if they are results of another
    operator that had this watermark; then comes :meth:`end_batch`. Each yields results.
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
        self._plan, self._bounds = plan, bounds
        self._sides = SideRows(plan, LEFT, values), SideRows(plan, RIGHT, values)
        self._waiting: tuple[list[pa.Table], list[pa.Table]] = [], []
        self._rows = 0
        self.counters = Counters()
        self.at_us: int | None = None
        self._step_us = 0  # how far the watermark went in this batch
        self._lines = [_NOWHERE, _NOWHERE]
        self._shown = [_NOWHERE, _NOWHERE]  # rows due up to then that had no partner have been shown
        self._dropped = [_NOWHERE, _NOWHERE]  # bins before these are gone
        self._due_us: list[int | None] = [None, None]
        # The rows of this batch that are to be shown at its end: the due time, hash, time and identity of each.
        self._fresh: tuple[list[Ints], list[Ints]] = [], []
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
        seq = 0 if snapshot is None else snapshot["next_pane_seq"]
        self._results = Results(plan, texts, self.counters, seq)
        self._arrivals = JoinArrivals(plan, bounds, secret, self._results)
        self._newest = Newest(plan, self._sides[RIGHT])

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

    def advance(self, to_us: int) -> Iterator[pa.RecordBatch]:
        """Moves the watermark, and with it the lines. It never goes back. Rows that have come are processed before."""
        if self._rows:
            yield from self._portion()
        if self.at_us is not None and to_us <= self.at_us:
            return
        for side, bound in enumerate(self._bounds):
            bound.advance(self.at_us, to_us)
            self._lines[side] = max(self._lines[side], to_us - bound.bound_for_new_window())
        self._step_us = 0 if self.at_us is None else to_us - self.at_us
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
            if self._plan.early and self._plan.outer[side]:
                yield from self._early(side)
            self._fresh[side].clear()
        self._forget()

    @property
    def due_us(self) -> int | None:
        """Returns the watermark at which the next row without a partner is shown, or None if no row waits for that."""
        found = [(side, due) for side, due in enumerate(self._due_us) if due is not None and self._plan.outer[side]]
        if self._plan.emit == FINAL:
            found = [(side, due + self._bounds[1 - side].bound_for_new_window() + 1) for side, due in found]
        return min((due for _, due in found), default=None)

    def next_keys(self) -> Iterator[bytes]:
        """Yields the keys that the next batch reads for what is due, if the watermark goes as far as in this one."""
        for side, stored in enumerate(self._sides):
            if self._plan.outer[side] and self._step_us:
                for due in stored.soon(self._limit(side) + self._step_us):
                    yield from stored.pages.all_keys(stored.found(due))
                    if self._plan.how == ASOF:
                        yield from self._newest.keys(due)

    # -- rows that come -----------------------------------------------------------------------------------

    def _portion(self) -> Iterator[pa.RecordBatch]:
        new: list[JoinRows] = []
        for side in (LEFT, RIGHT):
            waiting = self._waiting[side]
            table = pa.concat_tables([self._plan.sides[side].arriving.empty_table(), *waiting])
            waiting.clear()
            rows, dropped = self._arrivals.accepted(side, table, self._lines[side], self.at_us)
            rows.flags[self._due(side, rows) <= self._limit(side)] |= CAME_AFTER
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

    def _due(self, side: int, rows: JoinRows) -> Ints:
        """When it is known of each row that no partner comes on time any more."""
        return rows.time + self._plan.due_after(side)

    def _is_shown(self, side: int, rows: JoinRows) -> Flags:
        """Whether kept rows of a side are shown if they have no partner."""
        if self._plan.early:
            return np.ones(len(rows), np.bool_)
        return np.asarray(self._due(side, rows) <= self._shown[side])

    def _limit(self, side: int) -> int:
        """Rows of a side that are due up to this time are shown without a partner."""
        if self._plan.emit == FINAL:
            return self._lines[1 - side] - 1
        return _NOWHERE if self.at_us is None else self.at_us

    def _pieces(self, left: JoinRows, right: JoinRows) -> Iterator[pa.RecordBatch]:
        """Processes some rows of both sides: they meet, and are kept."""
        came: list[New] = []
        for side, rows in enumerate((left, right)):
            stored, said = self._sides[side], self._plan.sides[side]
            found = stored.pages.pages(stored.bins(rows.time), rows.hash, grow=True)
            if said.changes:
                came.append(newest(stored, rows, found))
            else:
                came.append(numbered(stored, rows, found, unique=said.unique))
        # A row that only says that earlier ones are gone is kept, and meets nobody.
        live = [
            new.rows.take(np.flatnonzero(~new.rows.has(GONE))) if new.rows.has(GONE).any() else new.rows for new in came
        ]
        if self._plan.how == ASOF:
            yield from self._exchanged(came, live)
        else:
            for new, stored in zip(came, self._sides, strict=True):
                stored.remove(new)
            yield from self._matched(live)
            yield from self._withdrawn(came, live)
        for side, (new, rows, stored) in enumerate(zip(came, live, self._sides, strict=True)):
            found, outer = new.found, self._plan.outer[side]
            if rows is not new.rows:
                is_gone = new.rows.has(GONE)
                gone, found = (
                    found._replace(page_of=found.page_of[is_gone]),
                    found._replace(page_of=found.page_of[~is_gone]),
                )
                stored.add(gone, new.rows.take(np.flatnonzero(is_gone)), read=None)
            if outer:
                alone = np.flatnonzero(~rows.has(MATCHED))
                self._note(side, rows, alone)
                fresh = rows.take(alone[self._is_shown(side, rows)[alone]])
                if len(fresh):
                    self._fresh[side].append(fresh.noted(self._due(side, fresh)))
            elif not self._plan.sides[side].unique and rows.has(NO_KEY).any():
                kept = np.flatnonzero(~rows.has(NO_KEY))
                rows, found = rows.take(kept), found._replace(page_of=found.page_of[kept])
            stored.add(found, rows, read=new.first)

    def _note(self, side: int, rows: JoinRows, at: Ints) -> None:
        """Notes when rows without a partner are due."""
        some = rows.take(at)
        due = self._sides[side].note(some, self._due(side, some), self._results.seq)
        self._due_us[side] = min((d for d in (due, self._due_us[side]) if d is not None), default=None)
        self._results.seq += 1
        rows.flags[at] |= NOTED

    def _matched(self, new: list[JoinRows]) -> Iterator[pa.RecordBatch]:
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
            found = stored.around(rows.hash, rows.time, *self._plan.interval(1 - side))
            for read in stored.pages.chunks_of(found):
                at, there = hashes.among(read)
                for kept, come in searched.pairs(there.hash, there.time + first, there.time + last):
                    if side == LEFT:
                        yield from self._paired(there, kept, rows, come, kept=LEFT)
                    else:
                        yield from self._paired(rows, come, there, kept, kept=RIGHT)
                if self._plan.outer[side]:
                    stored.mark(found, read, at, there.flags)

    def _paired(
        self, left: JoinRows, a: Ints, right: JoinRows, b: Ints, *, kept: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields those rows of both sides that are pairs. ``kept``: the side whose rows came in earlier portions."""
        a, b = self._results.agreeing(left, a, right, b)
        if not len(a):
            return
        for side, rows, at in ((LEFT, left, a), (RIGHT, right, b)):
            if self._plan.outer[side]:
                at = np.unique(at)
                if kept == side:
                    yield from self._not_alone(side, rows, at)
                rows.flags[at] |= MATCHED
        late = np.zeros(len(a), np.bool_)
        for side, rows, at in ((LEFT, left, a), (RIGHT, right, b)):
            if kept != side:
                late |= rows.has(LATE)[at]
        yield self._results.rows(left, a, right, b, self._kinds(late))

    def _not_alone(self, side: int, rows: JoinRows, at: Ints) -> Iterator[pa.RecordBatch]:
        """Takes back what was shown of rows without a partner."""
        shown = at[~rows.has(MATCHED)[at] & self._is_shown(side, rows)[at]]
        shown = shown[self._were_there(side, rows.take(shown))]
        yield from self._alone(side, rows, shown, PaneKind.RETRACTED.value)

    def _withdrawn(self, came: Sequence[New], live: Sequence[JoinRows]) -> Iterator[pa.RecordBatch]:
        """Takes back what was shown of rows that are replaced."""
        olds = [new.replaced for new in came]
        for side, old in enumerate(olds):
            if old is None:
                continue
            if self._plan.outer[side]:
                yield from self._not_alone(side, old, np.arange(len(old)))
            other = 1 - side
            stored, searched, hashes = self._sides[other], Sorted(old.hash, old.time), Hashes(old.hash)
            first, last = self._plan.interval(other)
            found = stored.around(old.hash, old.time, *self._plan.interval(side))
            for read in stored.pages.chunks_of(found):
                at, there = hashes.among(read)
                lost = [np.empty(0, np.int64)]
                for kept, gone in searched.pairs(there.hash, there.time + first, there.time + last):
                    kept, gone = self._results.agreeing_of(side, old, gone, there, kept)
                    yield from self._taken_back(side, old, gone, there, kept)
                    lost.append(np.unique(kept))
                if self._plan.outer[other]:
                    yield from self._alone_again(other, there, np.unique(np.concatenate(lost)), live[side])
                    stored.mark(found, read, at, there.flags)
        left, right = olds
        if left is not None and right is not None:
            first, last = self._plan.interval(RIGHT)
            for b, a in Sorted(left.hash, left.time).pairs(right.hash, right.time + first, right.time + last):
                b, a = self._results.agreeing_of(LEFT, left, a, right, b)
                yield from self._taken_back(LEFT, left, a, right, b)

    def _taken_back(
        self, side: int, rows: JoinRows, at: Ints, others: JoinRows, their: Ints
    ) -> Iterator[pa.RecordBatch]:
        if len(at):
            kinds = pa.repeat(PaneKind.RETRACTED.value, len(at))
            pairs = (rows, at, others, their) if side == LEFT else (others, their, rows, at)
            yield self._results.rows(*pairs, kinds)

    def _alone_again(self, side: int, rows: JoinRows, at: Ints, new: JoinRows) -> Iterator[pa.RecordBatch]:
        """Shows kept rows that have lost a partner and have no other. ``new``: rows of the other side that come now."""
        if not len(at):
            return
        rest = at[~self._have_partners(side, rows.take(at), new)]
        rows.flags[rest] &= ~np.uint8(MATCHED)
        # If they came in this batch without a partner, they are shown at its end.
        shown = rest[self._is_shown(side, rows)[rest]]
        shown = shown[self._were_there(side, rows.take(shown))]
        yield from self._alone(side, rows, shown, self._late_or_early(side, rows.take(shown)))
        is_due = self._due(side, rows)[rest] <= self._shown[side]
        if (later := rest[~is_due & ~rows.has(NOTED)[rest]]).size:
            self._note(side, rows, later)

    def _have_partners(self, side: int, rows: JoinRows, new: JoinRows) -> Flags:
        """A mask of the rows of a side that have a partner, among those that are kept or come now."""
        found = np.zeros(len(rows), np.bool_)
        first, last = self._plan.interval(side)
        stored, hashes = self._sides[1 - side], Hashes(rows.hash)
        chunks = stored.pages.chunks_of(stored.around(rows.hash, rows.time, first, last))
        for others in chain([new], (hashes.among(read)[1] for read in chunks)):
            searched = Sorted(others.hash, others.time)
            for mine, their in searched.pairs(rows.hash, rows.time + first, rows.time + last):
                found[self._results.agreeing_of(side, rows, mine, others, their)[1]] = True
        return found

    def _were_there(self, side: int, rows: JoinRows) -> Flags:
        """A mask of the rows that came before this batch."""
        there = np.ones(len(rows), np.bool_)
        for fresh in self._fresh[side]:
            there &= ~rows.are_among(fresh[:, -2:])
        return there

    def _kinds(self, late: Flags) -> pa.Array:
        if self._plan.emit == FINAL:
            return pa.repeat(PaneKind.FINAL.value, len(late))
        return pa.array(np.where(late, PaneKind.LATE.value, PaneKind.ON_TIME.value), pa.string())

    def _late_or_early(self, side: int, rows: JoinRows) -> pa.Array:
        """The kinds of rows that are shown again: late, or early if they are not due yet."""
        early = self._due(side, rows) > self._shown[side]
        return pc.if_else(pa.array(early), PaneKind.EARLY.value, self._kinds(np.ones(len(rows), np.bool_)))

    # -- rows without a partner, and the newest partner ---------------------------------------------------

    def _single(self, side: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows for which it is known now that no partner comes in time."""
        limit, stored = self._limit(side), self._sides[side]
        due_us = self._due_us[side]
        if due_us is None or due_us > limit:
            self._shown[side] = max(self._shown[side], limit)
            return
        for rows in chain.from_iterable(self._found(side, due) for due in stored.due(limit)):
            if self._plan.early and self._plan.emit == CHANGES:  # those that have been shown early are the same
                rows = rows.take(np.flatnonzero(~self._were_there(side, rows)))
            yield from self._without_match(side, rows, self._kinds(rows.has(CAME_AFTER)))
        self._shown[side] = max(self._shown[side], limit)
        self._due_us[side] = stored.next_due_us()

    def _early(self, side: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of this batch that have no partner yet. Those that are due are shown already."""
        for fresh in self._fresh[side]:
            waiting = fresh[fresh[:, 0] > self._shown[side], 1:]
            for rows in self._found(side, waiting):
                yield from self._without_match(side, rows, pa.repeat(PaneKind.EARLY.value, len(rows)))

    def _found(self, side: int, every: Ints) -> Iterator[JoinRows]:
        """Yields the rows that an index of what is due has, as they are kept."""
        stored = self._sides[side]
        for begin in range(0, len(every), _PIECE_ROWS):
            due = every[begin : begin + _PIECE_ROWS]
            some = [JoinRows.stored(stored.schema.empty_table())]
            wanted = due[np.lexsort((due[:, 3], due[:, 2]))][:, 2:]
            by_id, hashes = Sorted(wanted[:, 0], np.zeros(len(wanted), np.int64)), Hashes(due[:, 0])
            for read in stored.pages.chunks_of(stored.found(due)):
                _, there = hashes.among(read)
                first, second = there.identity
                zeros = np.zeros(len(there), np.int64)
                for search, at in by_id.pairs(first, zeros, zeros):
                    some.append(there.take(np.unique(search[second[search] == wanted[at, 1]])))
            yield together([rows for rows in some if len(rows)] or some)

    def _without_match(self, side: int, rows: JoinRows, kinds: pa.Array) -> Iterator[pa.RecordBatch]:
        """Yields those of the rows that have no partner, or each with its newest partner. ``kinds``: of each row."""
        if self._plan.how != ASOF:
            alone = np.flatnonzero(~rows.has(MATCHED))
            yield from self._alone(side, rows, alone, kinds.take(pa.array(alone)))
        elif len(rows):
            yield from self._of_newest(rows, kinds)

    def _of_newest(self, left: JoinRows, kinds: pa.Array) -> Iterator[pa.RecordBatch]:
        partner, which = self._newest.partners(left)
        yield self._results.rows(left, np.arange(len(left)), partner, which, kinds)

    def _exchanged(self, came: Sequence[New], live: Sequence[JoinRows]) -> Iterator[pa.RecordBatch]:
        """Takes back what is not right any more of what was shown, and yields what is right instead."""
        if (old := came[LEFT].replaced) is not None:
            shown = old.take(np.flatnonzero(self._is_shown(LEFT, old)))
            shown = shown.take(np.flatnonzero(self._were_there(LEFT, shown)))
            for some in shown.pieces(_PIECE_ROWS):
                yield from self._of_newest(some, pa.repeat(PaneKind.RETRACTED.value, len(some)))
        self._sides[LEFT].remove(came[LEFT])
        yield from self._corrected(live[RIGHT], came[RIGHT].replaced)
        self._sides[RIGHT].remove(came[RIGHT])

    def _corrected(self, right: JoinRows, gone: JoinRows | None) -> Iterator[pa.RecordBatch]:
        """Takes back the pairs of left rows that have been shown and get another partner, and yields the new ones."""
        touching = right if gone is None else together([right, gone])
        if not len(touching) or (self._shown[LEFT] == _NOWHERE and not self._plan.early):
            return
        first, last = self._plan.interval(RIGHT)
        stored, hashes = self._sides[LEFT], Hashes(touching.hash)
        for read in stored.pages.chunks_of(stored.around(touching.hash, touching.time, first, last)):
            _, there = hashes.among(read)
            there = there.take(np.flatnonzero(self._is_shown(LEFT, there)))
            there = there.take(np.flatnonzero(self._were_there(LEFT, there)))
            touched = [np.empty(0, np.int64)]
            searched = Sorted(there.hash, there.time)
            for _, at in searched.pairs(touching.hash, touching.time + first, touching.time + last):
                touched.append(np.unique(at))
            for some in there.take(np.unique(np.concatenate(touched))).pieces(_PIECE_ROWS):
                old, was = self._newest.partners(some)
                rest = (old, was) if gone is None else self._newest.partners(some, without=gone)
                new, now = self._newest.better(some, *rest, right)
                changed = np.flatnonzero(differ(old, was, new, now))
                if len(changed):
                    some_changed = some.take(changed)
                    each = np.arange(len(changed))
                    retracted = pa.repeat(PaneKind.RETRACTED.value, len(changed))
                    yield self._results.rows(some_changed, each, old, was[changed], retracted)
                    kinds = self._late_or_early(LEFT, some_changed)
                    yield self._results.rows(some_changed, each, new, now[changed], kinds)

    # -- results ------------------------------------------------------------------------------------------

    def _alone(self, side: int, rows: JoinRows, at: Ints, kind: Any) -> Iterator[pa.RecordBatch]:
        """Yields rows without a partner. ``kind``: one for all, or one for each."""
        if len(at):
            kinds = pa.repeat(kind, len(at)) if isinstance(kind, str) else kind
            other = JoinRows.stored(self._sides[1 - side].schema.empty_table())
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
