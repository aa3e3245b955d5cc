"""Decides when windows of single keys are executed, retracted and removed. Pure.

They live like other windows (docs/start/concepts.md), but one object manages all windows of a definition. A window runs
on time when the watermark reaches its end. If it changes after that, it waits for the trigger. Windows of the shard
that end in the same stretch of time (a cell) wait together, and no longer than the bound. A late event may change which
windows there are. If an executed window no longer exists, it is retracted when the windows that replaced it run.

The bound says which windows are *closed*: those that ended at least a bound before the watermark. That instant never
goes back, so a window that is gone does not return when bounds get longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aion.base.numbers import NEVER, plus, sum_of, sums_by
from aion.core.keyed.arriving import ArrivingRows
from aion.core.keyed.assigners import AssignedWindows, Flags, total
from aion.core.keyed.closing import BEFORE_ALL
from aion.core.keyed.in_memory import Orders, WindowsInMemory
from aion.core.keyed.indexed_windows import IndexedWindows, indexed_windows, replaced
from aion.core.keyed.orders import ExecuteKeyed, Members, Retract, RowArrivals
from aion.core.keyed.page_store import (
    CLOSED,
    EARLY,
    KEPT,
    OPEN,
)
from aion.core.keyed.summary import LISTED, summary
from aion.core.keyed.table import Ints, Table, stacked
from aion.core.life.actions import Forget, PaneKind
from aion.core.life.arrival import Arrival
from aion.core.life.definition import ALL_ROWS, Claim, Distinguished, TimeRanges, Turn
from aion.core.life.late_work import LateWork
from aion.core.life.lifecycle import Counters, StalenessKept
from aion.core.life.segments import overlapping

_NOTHING = np.empty(0, np.int64), np.empty(0, np.int64)


class KeyedWindows:
    """The windows of one definition in one shard: those in ``memory``, and the rows that are ``arriving``.

    ``on_arrival``: open windows run in the batch in which an event of them arrives, and not only when they have ended.
    """

    def __init__(
        self, memory: WindowsInMemory, snapshot: Mapping[str, Any] | None = None, *, on_arrival: bool = False
    ) -> None:
        self.memory, self.definition, self.assigner = memory, memory.definition, memory.assigner
        self.arriving = ArrivingRows(memory, snapshot)
        self._rules, self._bound, self._early = memory.rules, memory.bound, memory.rules.early
        self._early_owed = 0  # as "owed" of a window, for all early executions of the definition together
        self._on_arrival = on_arrival
        self._staleness = StalenessKept()
        # No open window needs events that end by then. It is restored with the segments.
        self.open_from_us = -NEVER
        self._left: tuple[int, int] | None = None
        self._frees = False
        # The first and last events of the rows removed up to the last watermark, and of those removed since then.
        self._gone: tuple[Ints, Ints] = _NOTHING
        self._gone_since: tuple[Ints, Ints] = _NOTHING
        if snapshot is not None:
            self._restore(snapshot)

    # -- arrivals -----------------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival, rows: RowArrivals | None, turn: Turn) -> Claim:
        return self.arriving.arrive(rows, turn)

    def keep(self, claim: Claim, seqs: Mapping[int, int], turn: Turn) -> TimeRanges:
        """Adds the rows that were taken to those of the batch."""
        self.arriving.keep(claim, seqs)
        return TimeRanges.of()

    def join(self, turn: Turn) -> int:
        return self.arriving.join(turn)

    def write(self) -> None:
        self.arriving.write()

    # -- executions ---------------------------------------------------------------------------------------

    def advance(self, turn: Turn) -> Orders:
        """Orders on-time executions, and final ones of windows that are closed now. Removes the closed windows.

        Final executions never wait: a closed session that is kept would take events that come too late.
        """
        before_us, to_us, late_work = turn.before_us, turn.at_us, turn.late_work
        assert to_us is not None, "the watermark has moved"
        self.memory.at_us, was_closed_us = to_us, self.memory.closed_us
        self.memory.closing.advance(to_us, self._bound.bound_for_new_window())
        self.arriving.settled_us = max(self.arriving.settled_us, self.memory.closed_us - self.arriving.reach_us)
        due = [
            self.memory.kept.due(kind, upto)
            for kind, upto in ((OPEN, to_us), (CLOSED, self.memory.closed_us), (KEPT, self.memory.closed_us))
        ]
        for _ in self.memory.some_of(np.unique(np.concatenate(due))):
            yield from self._ended(before_us, to_us, was_closed_us, late_work)
        self._forget_cells()
        self._gone, self._gone_since = self._gone_since, _NOTHING
        open_from_us = self.active_from_us(to_us)
        self._left = (self.open_from_us if self._left is None else self._left[0], open_from_us)
        self.open_from_us, self._frees = open_from_us, True

    def _ended(self, before_us: int | None, to_us: int, was_closed_us: int, late_work: LateWork) -> Orders:
        now = self.memory.now()
        over = now.windows.over_us
        there = self.memory.there(over, was_closed_us)
        # Windows that ended before the old watermark are late. Those that ended since then run on time.
        passed = over <= to_us if before_us is None else (over <= to_us) & (over > before_us)
        passed &= there
        sizes = total(self.memory.index["events"], now.windows)
        if passed.any():
            for end_us, events in self.memory.cells.came_on_time(over[passed], sizes[passed]):
                self._bound.observe_on_time(end_us, events)
        on_time = passed & ((now.at < 0) | now.early) & (not self._rules.final_only)
        late_work.on_time(sizes[on_time])
        yield from self._execute(on_time, PaneKind.ON_TIME)
        yield from self._close(was_closed_us, late_work)

    def _close(self, was_closed_us: int, late_work: LateWork) -> Orders:
        """Orders final executions of the closed windows that have news, and removes them.

        ``was_closed_us``: windows that end by then are gone already.
        """
        now = self.memory.now()
        over = now.windows.over_us
        closed = over <= self.memory.closed_us
        final = closed & (now.news | now.early) & self.memory.there(over, was_closed_us)
        sizes = total(self.memory.index["events"], now.windows)[final]
        if self._rules.final_only:
            late_work.on_time(sizes)
        else:
            late_work.spend(sizes)
        yield from self._execute(final, PaneKind.FINAL)
        yield from self._retract_closed()
        yield from self._let_go(closed)

    def end_batch(self, turn: Turn, *, ends_run: bool = False, batch_follows: bool = False) -> Orders:
        """Orders the late executions that the trigger asks for, and early ones, as far as ``late_work`` allows.

        Before that, orders final executions of windows whose last events arrived after they had been closed.
        ``ends_run``: orders all late ones, because the input ends here. With ``on_arrival``, orders the windows that no
        pane has shown since their newest event. Those that ended before their first pane do not wait for the trigger,
        either.
        """
        self.memory.at_us = now_us = turn.at_us
        left = self.arriving.pages_left()
        if now_us is not None and self.assigner.arrives_closed:
            pages = self.memory.kept.due(CLOSED, self.memory.closed_us) if len(left) else left
            yield from self._close_arrived(now_us, pages, turn.late_work)
        if self._rules.final_only:
            self._early_owed = 0
            return
        if self._on_arrival:
            for _ in self.memory.some_of(left):
                yield from self._arrived(now_us)
        if now_us is not None:
            yield from self._late(now_us, turn.step_us, turn.late_work, ends_run=ends_run)

    def _close_arrived(self, now_us: int, pages: Ints, late_work: LateWork) -> Orders:
        """Orders final executions of the windows in memory, and in these pages, that were closed when they arrived.

        If they waited for the next watermark, they could change after the instant that their panes promise.
        """
        cells = [_NOTHING[0]]
        for _ in self.memory.some_of(pages):
            over = self.memory.now().windows.over_us
            closed = over[over <= self.memory.closed_us]
            if len(closed):
                cells.append(self.memory.cells.of(closed))
                yield from self._close(self.memory.closed_us, late_work)
        if len(cells) > 1:
            self.memory.cells.table.executed(self.memory.cells.rows(np.unique(np.concatenate(cells))), now_us, 0)

    def _arrived(self, now_us: int | None) -> Orders:
        now = self.memory.now()
        over = now.windows.over_us
        new = now.news & self.memory.there(over, self.memory.closed_us)
        ended = np.zeros(len(new), np.bool_) if now_us is None else over <= now_us
        first = new & ended & (now.at < 0)
        yield from self._execute(new & ~ended, PaneKind.ON_TIME)
        # The numbers of windows stay the same: an execution changes what was yielded, but no event.
        yield from self._execute(first, PaneKind.LATE)

    def _late(self, now_us: int, step_us: int, late_work: LateWork, *, ends_run: bool) -> Orders:
        cells, events = self._waiting(now_us)
        rows = self.memory.cells.rows(cells)
        self.memory.cells.table["pending"][rows] = np.maximum(self.memory.cells.table["pending"][rows], 1)
        due = np.ones(len(rows), np.bool_)
        if not ends_run:
            due = self._rules.trigger.due(self.memory.cells.table.late(rows, now_us, step_us)) | (
                self.memory.cells.table["owed"][rows] > 0
            )
        self.memory.cells.table.owe(rows[due])
        waited = self.memory.cells.table["owed"][rows[due]]
        runs = np.zeros(len(rows), np.bool_)
        at_once = ends_run or late_work.is_idle
        runs[due] = late_work.take(events[due], waited, all_=at_once)
        self.memory.cells.table["owed"][rows[due & ~runs]] += 1
        self.memory.cells.table.executed(rows[runs], now_us, 0)
        self.memory.cells.table.look(rows[~runs], now_us)
        if runs.any():
            for _ in self.memory.some_of(self.memory.kept.waiting(cells[runs])):
                yield from self._execute_late(now_us, cells[runs])
        if self._early is not None and self._early.is_due:
            self._early_owed = max(self._early_owed, 1)
        if self._early_owed:
            size = np.array([plus(self.memory.kept.rest.sums["early_events"], sum_of(self._open_news(now_us)[1]))])
            if late_work.take(size, np.array([self._early_owed]), all_=at_once)[0]:
                for _ in self.memory.some_of(self.memory.kept.early()):
                    yield from self._execute(self._open_news(now_us)[0], PaneKind.EARLY)
                self._early_owed = 0
            else:
                self._early_owed += 1

    def _waiting(self, now_us: int) -> tuple[Ints, Ints]:
        """The cells with windows that wait for the trigger, and the events of these windows."""
        waiting = self._changed(now_us)
        events = total(self.memory.index["events"], self.memory.now().windows)[waiting]
        rest = self.memory.kept.rest.waiting
        cells = np.concatenate(
            (self.memory.cells.of(self.memory.now().windows.over_us[waiting]), np.array([*rest], np.int64))
        )
        events = np.concatenate((events, np.array([more for _, more in rest.values()], np.int64)))
        distinct, cell_of = np.unique(cells, return_inverse=True)
        return distinct, sums_by(cell_of, events, len(distinct))

    def _changed(self, now_us: int) -> Flags:
        """A mask of the windows in memory that have ended, and whose last pane shows less than they hold."""
        now = self.memory.now()
        over = now.windows.over_us
        return (over <= now_us) & (now.news | now.early) & self.memory.there(over, self.memory.closed_us)

    def _execute_late(self, now_us: int, cells_us: Ints) -> Orders:
        runs = np.isin(self.memory.cells.of(self.memory.now().windows.over_us), cells_us)
        return self._execute(self._changed(now_us) & runs, PaneKind.LATE)

    def _open_news(self, now_us: int) -> tuple[Flags, Ints]:
        """A mask of the windows in memory that have not ended and have news, and the events of these windows."""
        now = self.memory.now()
        news = (now.windows.over_us > now_us) & now.news
        return news, total(self.memory.index["events"], now.windows)[news]

    @property
    def waits(self) -> bool:
        """Whether an execution that is due waits for a later batch."""
        return self._early_owed > 1 or bool((self.memory.cells.table["owed"] > 0).any())

    def _forget_cells(self) -> None:
        gone = self.memory.cells.forget(self.memory.closed_us)
        if not self._rules.final_only:
            gone.count_in(self._staleness, lambda _: self._rules.staleness_bound)

    def count_in(self, counters: Counters) -> None:
        self._staleness = counters.staleness

    def _execute(self, which: Flags, kind: PaneKind) -> Orders:
        """Orders to run some windows, and to retract those that they replace. Notes both in ``yielded``."""
        rows = np.flatnonzero(which)
        if not len(rows):
            return
        now = self.memory.now()
        windows = now.windows
        retract = replaced(now, self.memory.yielded, rows)
        bound_us = self._bound.bound_for_new_window()
        table = Table(
            self.memory.index.take(windows.begins[rows]).keys,
            {
                "start": windows.starts_us[rows],
                "end": windows.ends_us[rows],
                "last": self.memory.index["last"][windows.ends[rows] - 1],
                "pane": now.pane[rows],
                "events": total(self.memory.index["events"], windows)[rows],
                "late_events": total(self.memory.index["late_events"], windows)[rows],
                "closes": self.memory.closing.promise(windows.over_us[rows], bound_us),
            },
        )
        replaces = self.memory.yielded.take(retract)
        self._note_yielded(now, rows, retract, kind)
        if len(retract):
            yield Retract(self.definition, replaces)
        yield ExecuteKeyed(self.definition, kind, table, self._members(windows, rows))

    def _members(self, windows: AssignedWindows, rows: Ints) -> Members | None:
        if not self.assigner.by_event:
            return None
        return Members(
            windows.begins[rows],
            (windows.ends - windows.begins)[rows],
            self.memory.index["seq"],
            self.memory.index["row"],
        )

    def _retract_closed(self) -> Orders:
        """Orders to retract windows that no longer exist, and that would be closed now.

        They became a part of a longer session. Its next pane may come too late to keep what theirs promised.
        """
        lost = self.memory.lost()
        due = lost[self.memory.yielded["end"][lost] <= self.memory.closed_us]
        if len(due):
            retract = Retract(self.definition, self.memory.yielded.take(due))
            self.memory.replace(yielded=self.memory.yielded.take(np.delete(np.arange(len(self.memory.yielded)), due)))
            yield retract

    def _note_yielded(self, now: IndexedWindows, rows: Ints, retracted: Ints, kind: PaneKind) -> None:
        windows = now.windows
        kept = np.ones(len(self.memory.yielded), np.bool_)
        kept[retracted] = False
        again = now.at[rows]
        kept[again[again >= 0]] = False
        firsts = self.memory.index.take(windows.begins[rows])
        fresh = Table(
            firsts.keys,
            {
                "start": windows.starts_us[rows],
                "end": windows.ends_us[rows],
                "number": windows.numbers[rows],
                "pane": now.pane[rows],
                "seq": now.newest[rows],
                "early": np.full(len(rows), kind is PaneKind.EARLY, np.int64),
                "hash": firsts["hash"],
            },
        )
        self.memory.replace(yielded=stacked([self.memory.yielded.take(kept), fresh]))

    def _let_go(self, closed: Flags) -> Orders:
        """Lets closed windows go, and the rows that no window needs. Orders to forget those that were shown."""
        now = self.memory.now()
        kept = np.ones(len(self.memory.yielded), np.bool_)
        kept[now.at[closed & (now.at >= 0)]] = False
        needed = self.assigner.needed(self.memory.index, now.windows, closed, self.memory.closed_us)
        if not (kept.all() and needed.all()):
            firsts, lasts = self._gone_since
            self._gone_since = (
                np.concatenate((firsts, self.memory.index["first"][~needed])),
                np.concatenate((lasts, self.memory.index["last"][~needed])),
            )
            gone = self.memory.yielded.take(~kept)
            self.memory.replace(self.memory.index.take(needed), self.memory.yielded.take(kept))
            if len(gone):
                yield Forget(self.definition, gone["start"], gone["end"], gone.keys)

    # -- what the operator asks -----------------------------------------------------------------------------

    def needed_in(self, starts_us: Ints, ends_us: Ints) -> Ints:
        """How many rows of the index overlap each stretch that ends by ``settled_us``. If none does, none ever will."""
        needed, settled = np.full(len(starts_us), ALL_ROWS), np.flatnonzero(ends_us <= self.arriving.settled_us)
        starts_us, ends_us = starts_us[settled], ends_us[settled]
        rest = self.memory.kept.rest.overlapping(starts_us, ends_us, self.memory.kept.bins)
        needed[settled] = rest + overlapping(
            self.memory.index["first"], self.assigner.lasts(self.memory.index), starts_us, ends_us
        )
        return needed

    def are_open(self, starts_us: Ints, ends_us: Ints, turn: Turn) -> Flags:
        """As of the last watermark."""
        return np.asarray(ends_us > self.open_from_us)

    def first_ends(self, starts_us: Ints, ends_us: Ints, turn: Turn) -> Ints:
        """Open windows of keys end some time: which first, only pages know that are not in memory."""
        return np.where(ends_us > self.active_from_us(turn.at_us), NEVER - 1, NEVER)

    def left(self) -> TimeRanges:
        left, self._left = self._left, None
        return TimeRanges.of() if left is None else TimeRanges.of((left[0], left[1] + 1))

    def freed(self) -> TimeRanges:
        """A watermark may remove rows anywhere."""
        frees, self._frees = self._frees, False
        return TimeRanges.of((-NEVER, NEVER)) if frees else TimeRanges.of()

    def removed(self) -> TimeRanges:
        return TimeRanges(*self._gone)

    def distinguished(self, start_us: int, end_us: int, turn: Turn) -> Distinguished:
        """They tell rows apart, not blocks."""
        return Distinguished(ended=end_us <= self.open_from_us, by_rows=True)

    def first_to_end(self, most: int) -> tuple[Table, AssignedWindows, Flags, Flags]:
        """Some windows, and among them about the ``most`` that end first. Call it when no page is in memory.

        Returns their rows, the windows, a mask of those that are not gone, and a mask of those that have run before.
        """
        index, yielded = self.memory.kept.peek(self.memory.kept.soonest(most))
        now = indexed_windows(self.assigner, index, yielded)
        return index, now.windows, self.memory.there(now.windows.over_us, self.memory.closed_us), now.at >= 0

    def active_from_us(self, now_us: int | None) -> int:
        """Events from then on may be in windows that have not ended. In microseconds. It may be somewhat earlier."""
        if now_us is None:
            return BEFORE_ALL
        now = self.memory.now()
        open_ = now.windows.over_us > now_us
        firsts = self.memory.index["first"][now.windows.begins[open_]]
        return int(min(firsts.min(initial=NEVER), self.memory.kept.rest.first_open_us, now_us - self.arriving.reach_us))

    def due(self, turn: Turn, watermark_us: int) -> list[TimeRanges]:
        """One stretch that spans the events of all windows that run then."""
        firsts, lasts = self._due_by(turn.at_us, watermark_us)
        return [TimeRanges.of((int(firsts.min()), int(lasts.max()) + 1))] if len(firsts) else []

    def leave(self, turn: Turn, watermark_us: int) -> None:
        """Blocks of windows of keys are awaited by nobody."""

    def _due_by(self, now_us: int | None, watermark_us: int) -> tuple[Ints, Ints]:
        """The first and last events of the windows that run when the watermark reaches ``watermark_us``.

        If they are in many pages, it is one pair that spans all of them.
        """
        shows_early = self._early is not None and self._early.next_us <= watermark_us
        closed_us = self.memory.closing.closed_at(watermark_us, self._bound.bound_for_new_window())
        pages = [self.memory.kept.due(OPEN, watermark_us), self.memory.kept.due(CLOSED, closed_us)]
        pages += [self.memory.kept.early()] if shows_early else []
        pages_due = np.unique(np.concatenate(pages))
        group, *others = self.memory.kept.groups(pages_due)
        if others:
            return np.array([self.memory.kept.rest.first_us]), np.array([watermark_us])
        self.memory.read(group.pages)
        now = self.memory.now()
        over = now.windows.over_us
        ended = over <= watermark_us
        due = ended & (now.news | now.early) & self.memory.there(over, self.memory.closed_us)
        if self._rules.final_only:
            due &= self._closes(over) <= watermark_us
        elif now_us is not None:
            due &= (over > now_us) | (self._closes(over) <= watermark_us)
        if shows_early:
            due |= ~ended & now.news
        rows = np.flatnonzero(due)
        return self.memory.index["first"][now.windows.begins[rows]], self.memory.index["last"][
            now.windows.ends[rows] - 1
        ]

    def next_due_us(self, turn: Turn) -> int:
        self.write()
        now_us = turn.at_us
        open_us, closed_us = self.memory.kept.first[OPEN], self.memory.kept.first[CLOSED]
        candidates = [] if open_us is None or open_us == NEVER else [open_us]
        news_us = self.memory.kept.first[EARLY]
        if now_us is None:
            # The first watermark makes early ones run, whatever it is.
            candidates += [] if news_us is None else [-NEVER]
            return min(candidates, default=NEVER)
        if closed_us is not None:
            closes_us = int(self._closes(np.array([closed_us], np.int64))[0])
            candidates += [max(closes_us, now_us + 1)] if closes_us < NEVER else []
        if news_us is not None:
            assert self._early is not None, "no other windows have news that may be shown early"
            candidates.append(max(self._early.next_us, now_us + 1))
        rows = np.flatnonzero(self.memory.cells.table["pending"] > 0)
        waits_us = self.memory.cells.table.dues_us(rows, self._rules.trigger, now_us, turn.step_us)
        candidates += waits_us[waits_us < NEVER].tolist()
        return min(candidates, default=NEVER)

    def _closes(self, ends_us: Ints) -> Ints:
        return self.memory.closing.closes(ends_us, max(self._bound.bound_for_new_window(), 0))

    # -- snapshot -----------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """JSON values. What the map holds belongs to them."""
        self.write()
        return {
            **self.memory.snapshot(),
            **self.arriving.snapshot(),
            "early_us": None if self._early is None else self._early.last_us,
            "early_owed": self._early_owed,
            "live": summary(*self.first_to_end(LISTED), self.memory.kept.rest.sums, self.memory.last_end_us),
        }

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        self._early_owed = snapshot["early_owed"]
        if self._early is not None:
            self._early.last_us = snapshot["early_us"]
