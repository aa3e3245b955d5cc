"""The state of all kept windows as columns: one row for each window, in the order of their ends. Pure.

Windows with the same end are in the order of their definitions. So the window that ends next is at the front, and the
order of the rows is the order of executions. A row is ACTIVE until the watermark reaches its end, and LATE from then
on. The status is not stored: it follows from the watermark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.base.numbers import MOST, NEVER
from aion.core.life.actions import Execute, PaneKind, WindowRef
from aion.core.life.lifecycle import StalenessKept, Status
from aion.core.packing import table, untable
from aion.core.trigger.triggers import LateWindows, Trigger

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

_KEY = ("definition", "start_us", "end_us")
_STATE = {
    "bound_us": 0,
    "panes": 0,
    "executed_seq": -1,
    "executed_us": 0,
    "last_seq": -1,
    "late_from_seq": NEVER,
    "events": 0,
    "late_events": 0,
    "pending": 0,
    "reason": 0,
    "early_panes": 0,
    "owed": 0,
    "size_bytes": 0,
    "far": 0,
}
_MEASURED = ("stalest", "stalest_before", "looked")
_ADDED = ("size_bytes", "far")
"""Columns that older snapshots of the same version do not have."""


class WindowTable:
    """Columns by name: ``definition, start_us, end_us`` identify a window, and the others are its state.

    ``bound_us``: the window's bound. ``panes``: the number of executions so far. ``executed_seq``: the newest block
    that the last execution saw. ``last_seq``: the newest block of the window; once its bound has passed, the newest one
    of then. ``late_from_seq``: the first late block.
    ``executed_us``: the lateness of the last execution. ``events``, ``late_events``: all so far. ``pending``: events
    since the last execution. ``stalest``: time times events of the stalest interval between two executions.
    ``stalest_before``: the value at the last look before that interval ended. ``looked``: the value of the current
    interval at the last look. ``reason``: the code of the :class:`policies.cleanup.Reason` that decided the bound.
    ``early_panes``: the number of executions before the window's end. ``owed``: 0, or 1 more than the number of batches
    for which an execution that is due has waited (:mod:`aion.core.life.late_work`). ``size_bytes``: encoded bytes
    of all events so far. ``far``: 1 if the window is late, and nothing was planned to bring its blocks into memory for
    the next batch.
    """

    def __init__(self, definitions: int) -> None:
        """``definitions``: all numbers of definitions are below it."""
        self._definitions = max(definitions, 1)
        self.columns: dict[str, Any] = {name: np.empty(0, np.int64) for name in (*_KEY, *_STATE)}
        self.columns |= {name: np.empty(0, np.float64) for name in _MEASURED}
        self._codes: tuple[Ints, Ints] | None = None

    def __len__(self) -> int:
        return len(self.columns["end_us"])

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    # -- which windows there are --------------------------------------------------------------------------

    def find(self, definition: Ints, end_us: Ints) -> Ints:
        """The row of each of these windows. -1 for a window that is not in the table."""
        if not len(self):
            return np.full(len(end_us), -1, np.int64)
        if self._codes is None:
            ends = self["end_us"]
            new = np.concatenate(([True], ends[1:] != ends[:-1]))
            self._codes = ends[new], (np.cumsum(new) - 1) * self._definitions + self["definition"]
        ends, codes = self._codes
        rank = np.minimum(np.searchsorted(ends, end_us), len(ends) - 1)
        wanted = rank * self._definitions + definition
        row = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        return np.where((ends[rank] == end_us) & (codes[row] == wanted), row, -1)

    def ended_by(self, us: int) -> int:
        """How many windows end by then. They are all at the front."""
        return int(np.searchsorted(self["end_us"], us, side="right"))

    def add(self, **columns: Any) -> None:
        """Adds windows, in any order. Columns that are not given get the values of a new window."""
        count = len(columns["end_us"])
        if not count:
            return
        for name, initial in _STATE.items():
            columns.setdefault(name, np.full(count, initial, np.int64))
        for name in _MEASURED:
            columns.setdefault(name, np.zeros(count))
        joined = {name: np.concatenate((old, columns[name])) for name, old in self.columns.items()}
        ends = self["end_us"]
        added = columns["end_us"]
        if (len(ends) and added.min() <= ends[-1]) or (added[1:] <= added[:-1]).any():
            order = np.lexsort((joined["definition"], joined["end_us"]))
            joined = {name: column[order] for name, column in joined.items()}
        self.columns, self._codes = joined, None

    def drop(self, rows: Flags) -> WindowTable:
        """Removes the windows of this mask. Returns them as a table of their own."""
        gone = WindowTable(self._definitions)
        gone.columns = {name: column[rows] for name, column in self.columns.items()}
        self.columns, self._codes = {name: column[~rows] for name, column in self.columns.items()}, None
        return gone

    def refs(self, rows: Any = slice(None)) -> list[WindowRef]:
        return [WindowRef(*ref) for ref in zip(*(self[name][rows].tolist() for name in _KEY), strict=True)]

    def needed(self, starts_us: Ints, ends_us: Ints, first: int = 0) -> Flags:
        """A mask of the intervals ``[start, end)`` that overlap any window from row ``first`` on."""
        ends, starts = self["end_us"][first:], self["start_us"][first:]
        if not len(ends):
            return np.zeros(len(starts_us), np.bool_)
        earliest = np.append(np.minimum.accumulate(starts[::-1])[::-1], NEVER)
        needed: Flags = earliest[np.searchsorted(ends, starts_us, side="right")] < ends_us
        return needed

    def first_ends(self, starts_us: Ints, ends_us: Ints, first: int = 0) -> Ints:
        """For each interval: the first end of the windows from row ``first`` on that overlap it. NEVER: none does."""
        starts, ends = self["start_us"][first:], self["end_us"][first:]
        found = np.full(len(starts_us), NEVER)
        for place, (start_us, end_us) in enumerate(zip(starts_us.tolist(), ends_us.tolist(), strict=True)):
            found[place] = ends[(ends > start_us) & (starts < end_us)].min(initial=NEVER)
        return found

    def overlapping(self, start_us: int, end_us: int) -> Ints:
        """The rows of the windows that overlap ``[start, end)``."""
        first = int(np.searchsorted(self["end_us"], start_us, side="right"))
        return first + np.flatnonzero(self["start_us"][first:] < end_us)

    def cuts(self, rows: Ints, watermark_us: int | None) -> set[int]:
        """The blocks that these windows distinguish from those before: not executed yet, late, or too late."""
        over = rows[self.over(rows, watermark_us)]
        seqs = (self["executed_seq"][rows] + 1, self["late_from_seq"][rows], self["last_seq"][over] + 1)
        return {seq for seq in np.unique(np.concatenate(seqs)).tolist() if 0 < seq < NEVER}

    # -- what happens to them -----------------------------------------------------------------------------

    def came(self, rows: Ints, events: Ints, late: Flags, seq: int, size_bytes: Ints | None = None) -> None:
        """Notes that windows got events from blocks up to ``seq``. Each row occurs at most once."""
        self["last_seq"][rows] = seq
        late_events = np.where(late, events, 0)
        more = {"events": events, "pending": events, "late_events": late_events}
        for name, values in (more if size_bytes is None else more | {"size_bytes": size_bytes}).items():
            self[name][rows] = _plus(self[name][rows], values)

    def lengthen(self, bounds_us: Ints) -> None:
        """Gives each window this bound, unless its own is longer."""
        self.columns["bound_us"] = np.maximum(self["bound_us"], bounds_us)

    def add_events(self, rows: Ints, events: Ints) -> None:
        """Adds events that came in time and that an execution has already seen. Each row occurs at most once."""
        self["events"][rows] = _plus(self["events"][rows], events)

    def stale(self, rows: Ints, watermark_us: int) -> Floats:
        """t * n (paper 3.4): microseconds since the last execution, up to the bound, times the events since then."""
        until = np.minimum(watermark_us - self["end_us"][rows], self["bound_us"][rows])
        stale: Floats = (until - self["executed_us"][rows]).astype(np.float64) * self["pending"][rows]
        return stale

    def all_staleness(self, rows: Any = slice(None)) -> Floats:
        """T * N (paper 3.4) as of now: the bound times all late events. ``stale`` is divided by it."""
        product: Floats = self["bound_us"][rows].astype(np.float64) * self["late_events"][rows]
        return product

    def look(self, rows: Ints, watermark_us: int) -> None:
        """Notes how stale these windows are, although they do not run now."""
        self["looked"][rows] = _coarse(self.stale(rows, watermark_us))

    def over(self, rows: Ints, watermark_us: int | None) -> Flags:
        """A mask of the windows whose bound has passed."""
        if watermark_us is None or not len(self):
            return np.zeros(len(rows), np.bool_)
        return np.asarray(self["end_us"][rows] + self["bound_us"][rows] <= watermark_us)

    def close(self, rows: Ints, before_us: int | None, seq: int) -> None:
        """Notes that the bound of these windows has passed, so that their final execution is due.

        Those whose bound had not passed at the watermark before take no events from blocks above ``seq``.
        """
        self["last_seq"][rows[~self.over(rows, before_us)]] = seq
        self.owe(rows)

    def leave(self, late: int, but: Ints) -> None:
        """Notes that the first ``late`` windows are far, but for these rows and for those that wait already."""
        near = self["owed"][:late] == 0
        self["far"][:late][near] = 1
        self["far"][but[self["owed"][but] == 0]] = 0

    def owe(self, rows: Ints) -> None:
        """Notes that an execution of these windows is due."""
        self["owed"][rows] = np.maximum(self["owed"][rows], 1)

    def executed(self, rows: Ints, watermark_us: int, seq: int, *, kind: PaneKind = PaneKind.LATE) -> None:
        """Notes an execution over all blocks up to ``seq``.

        Events before an early or on-time execution do not count as waiting for it. Blocks without events of a window
        also count as seen: compaction merges them with older blocks of the same segment, and the new block has the
        newest number.
        """
        if kind in (PaneKind.LATE, PaneKind.FINAL):
            stale = _coarse(self.stale(rows, watermark_us))
            staler = stale > self["stalest"][rows]
            self["stalest"][rows[staler]] = stale[staler]
            self["stalest_before"][rows[staler]] = self["looked"][rows[staler]]
        self["panes"][rows] += 1
        self["early_panes"][rows] += kind is PaneKind.EARLY
        self["executed_seq"][rows] = self["last_seq"][rows] = seq
        self["executed_us"][rows] = watermark_us - self["end_us"][rows]
        self["pending"][rows] = self["owed"][rows] = 0
        self["looked"][rows] = 0.0

    def execution(self, rows: Ints, kind: PaneKind, slices: tuple[int, ...], watermark_us: int) -> Execute:
        """The order to run these windows now. ``slices``: the segments that they overlap.

        The on-time pane comes for each key, also if nothing came since the last early one.
        """
        stale, all_staleness = self.stale(rows, watermark_us), self.all_staleness(rows)
        is_late = kind in (PaneKind.LATE, PaneKind.FINAL)
        return Execute(
            kind,
            slices,
            self["definition"][rows],
            self["start_us"][rows],
            self["end_us"][rows],
            self["panes"][rows],
            np.full(len(rows), -1) if kind is PaneKind.ON_TIME else self["executed_seq"][rows],
            self["late_from_seq"][rows],
            self["events"][rows],
            self["late_events"][rows],
            np.divide(stale, all_staleness, out=np.zeros(len(rows)), where=(all_staleness > 0) & is_late),
            self["end_us"][rows] + self["bound_us"][rows],
            self["last_seq"][rows] if kind is PaneKind.FINAL else np.full(len(rows), NEVER),
        )

    def late_share_before(self, definition: Ints, start_us: Ints, end_us: Ints) -> Floats:
        """For each window, the share of late events so far in the windows of its definition that ended before it.

        Those that ended up to one length of the window before it count. 0: none of them is in the table.
        """
        found = np.zeros(len(end_us))
        for number in np.unique(definition).tolist():
            rows, own = np.flatnonzero(definition == number), np.flatnonzero(self["definition"] == number)
            ends = self["end_us"][own]
            first = np.searchsorted(ends, start_us[rows])
            last = np.searchsorted(ends, end_us[rows])
            late, events = (
                np.concatenate((np.zeros(1), np.cumsum(self[name][own], dtype=np.float64)))
                for name in ("late_events", "events")
            )
            whole = events[last] - events[first]
            found[rows] = np.divide(late[last] - late[first], whole, out=np.zeros(len(rows)), where=whole > 0)
        return found

    def late(self, rows: Ints, watermark_us: int, step_us: int) -> LateWindows:
        """The late windows of these rows as their trigger sees them."""
        return LateWindows(
            lateness_us=watermark_us - self["end_us"][rows],
            executed_us=self["executed_us"][rows],
            pending=self["pending"][rows],
            late_events=self["late_events"][rows],
            bound_us=self["bound_us"][rows],
            on_time_events=self["events"][rows] - self["late_events"][rows],
            # A window that was late when it was created had no on-time execution.
            executions=self["panes"][rows] - self["early_panes"][rows] - (self["late_from_seq"][rows] > 0),
            step_us=step_us,
        )

    def dues_us(self, rows: Ints, trigger: Trigger, watermark_us: int, step_us: int) -> Ints:
        """The watermarks at which the trigger checks these late windows again even if no event comes. NEVER: none."""
        later = trigger.next_due_us(self.late(rows, watermark_us, step_us))
        return np.where(later < NEVER, self["end_us"][rows] + np.minimum(later, self["bound_us"][rows]), NEVER)

    def count_in(self, kept: StalenessKept, bound_of: Callable[[int], float | None]) -> None:
        """Notes how stale the windows of this table became. They are gone.

        ``bound_of``: the bound of the trigger of each definition, if it has one.
        """
        measured = self.all_staleness()
        for row in np.flatnonzero(measured).tolist():
            stalest, before = float(self["stalest"][row]), float(self["stalest_before"][row])
            kept.note(stalest, before, float(measured[row]), bound_of(int(self["definition"][row])))

    # -- snapshot -----------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """JSON values. They do not include the watermark."""
        columns = {name: self[name] for name in (*_KEY, *_STATE, *_MEASURED)}
        # Most windows have seen all their blocks, so most differences are 0.
        columns["executed_seq"] = self["last_seq"] - self["executed_seq"]
        return table(columns, _MEASURED)

    @classmethod
    def from_json(cls, value: Mapping[str, Any], definitions: int, among: Collection[int] | None = None) -> WindowTable:
        """``among``: the numbers of the definitions whose windows are wanted, or None for all."""
        columns: dict[str, Any] = {
            name: np.array(column, np.float64 if name in _MEASURED else np.int64)
            for name, column in untable(value).items()
        }
        columns["executed_seq"] = columns["last_seq"] - columns["executed_seq"]
        for name in _ADDED:
            columns.setdefault(name, np.full(len(columns["end_us"]), _STATE[name], np.int64))
        windows = cls(definitions)
        windows.columns = {name: columns[name] for name in windows.columns}
        if among is not None and not (wanted := np.isin(windows["definition"], list(among))).all():
            windows.drop(~wanted)
        return windows


def status_of(end_us: int, watermark_us: int | None) -> Status:
    """The status of a kept window."""
    return Status.LATE if watermark_us is not None and watermark_us >= end_us else Status.ACTIVE


def _plus(counts: Ints, more: Ints) -> Ints:
    """Sums of counts. A sum that does not fit in 64 bits becomes ``MOST``."""
    sums: Ints = counts + more
    return np.where(sums < 0, MOST, sums)


def _coarse(values: Floats) -> Floats:
    """The same as :func:`aion.base.numbers.coarse`, for an array."""
    mantissa, exponent = np.frexp(values)
    rounded: Floats = np.ldexp(np.floor(mantissa * 2**24), exponent - 24)
    return rounded
