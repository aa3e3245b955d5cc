"""Which windows the events of each key make: one assigner for each kind of definition. Pure.

An assigner works on the *index* of its definition, as far as it is in memory, with all rows of a key or none: rows with
``first, last, events, late_events, seq, row, mark``, and ``hash``, that of the key. For sessions, a row is a session,
in any order. For the others, a row is a row of a block (an event): the rows of a key come one after the other, in the
order of (first, arrival). There ``first`` and ``last`` are the same instant, and ``seq`` and ``row`` say in which block
the event is, and where in it.

The definition is *closed* up to an instant, ``closed_us``: windows that end by then are gone. An event comes too late
if it would be alone in such a window, unless it falls into a window that still exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aion.base.numbers import MOST, NEVER, sum_of, sums_by
from aion.core.keyed.table import Ints, Places, Table, codes_of, stacked
from aion.core.slicing.event_windows import count_windows, record_windows
from aion.core.slicing.sessions import Intervals, merge_intervals, merge_sessions
from aion.core.slicing.tree import ranges
from aion.core.windows import Count

Flags = npt.NDArray[np.bool_]

LEAST_CELL_US = 1_000_000
"""Windows that end within the same second always wait together for the trigger."""
INDEX = ("id", "first", "last", "events", "late_events", "seq", "row", "mark", "hash")


def completed(index: Table) -> Table:
    """Rows with the columns that their assigner does not store. An event happens at an instant."""
    nothing = np.zeros(len(index), np.int64)
    missing = {name: index["first"] if name == "last" else nothing for name in INDEX if name not in index.columns}
    return Table(index.keys, {name: (index.columns | missing)[name] for name in INDEX})


class AssignedWindows(NamedTuple):
    """All windows of an index, by key. Element ``i`` of each array is about window ``i``.

    ``begins``, ``ends``: its rows in the index, ``[begins[i], ends[i])``. ``starts_us``, ``ends_us``: as a pane shows
    them. ``over_us``: the watermark from which on only late events can still join it. NEVER while it is not complete.
    ``numbers``: distinguishes windows with the same key, start and end.
    """

    begins: Ints
    ends: Ints
    starts_us: Ints
    ends_us: Ints
    over_us: Ints
    numbers: Ints


class Added(NamedTuple):
    """An index with new rows.

    ``late_ends_us`` and ``late_events``: for each new row that came late, the end of its window as of now, and the
    number of its events.
    """

    grown: Table
    late_ends_us: Ints
    late_events: Ints


class Assigner(Protocol):
    by_event: bool
    """Whether a row of the index is a single row of a block. Otherwise it stands for any number of events of a key."""
    cell_us: int
    """The width of a cell in microseconds. Windows that end in the same cell wait together for the trigger."""
    reach_us: int
    """How long before a window's end an event may be if the window has no other event. Microseconds.

    For sessions whose events bring their gaps: as far as known before any event. :meth:`reaches` says more.
    """
    outlives: bool
    """Whether events of a window that is gone are kept for later windows. The gone window must not run again."""
    arrives_closed: bool
    """Whether the event that completes a window may arrive when that window is already closed."""
    stored: tuple[str, ...]
    """The columns of the index that must be kept. The others follow from them."""

    def alone(self, new: Table) -> tuple[Ints, Ints]:
        """The start and end of the window that each row would be alone in, as a pane shows them."""

    def unusable(self, new: Table) -> Iterator[tuple[str, Flags]]:
        """Why some rows cannot be in any window: each reason with a mask of its rows. They are not accepted, either."""

    def accepted(self, index: Table, new: Table, closed_us: int, settled_us: int) -> Flags:
        """A mask of the new rows that do not come too late.

        ``settled_us``: blocks before then may be gone, unless rows of the index need them.
        """

    def doubtful(self, new: Table, closed_us: int) -> Flags:
        """Returns a mask of the new rows that may come too late. Only the index can decide that."""

    def misses_own(self, new: Table, closed_us: int) -> Flags:
        """A mask of the rows that come too late for the window that ends at them. Later windows may still take them."""

    def reaches(self, new: Table) -> int:
        """``reach_us``, as far as these rows show it."""

    def add(self, index: Table, new: Table, now_us: int | None) -> Added:
        """Adds rows to the index. Events that come late are counted in the rows' ``late_events``."""

    def windows(self, index: Table) -> AssignedWindows:
        """All windows, complete or not."""

    def needed(self, index: Table, windows: AssignedWindows, gone: Flags, closed_us: int) -> Flags:
        """A mask of the rows of the index that are still needed after some windows are gone. ``gone``: their mask."""

    def kept_until(self, index: Table, windows: AssignedWindows, closed_us: int) -> tuple[Ints, Ints]:
        """The rows that are needed only as long as a window might have been: what ``needed`` keeps after all is gone.

        Returns them, and for each the closed instant from which on it is not needed.
        """

    def lasts(self, index: Table) -> Ints:
        """For each row of the index, the instant up to which it makes the operator accept and keep events.

        Without such a row, events before the closed instant would come too late. In microseconds.
        """


class _Plain:
    """What most assigners have in common."""

    reach_us = 0
    outlives = False
    arrives_closed = False

    def unusable(self, new: Table) -> Iterator[tuple[str, Flags]]:
        return iter(())

    def misses_own(self, new: Table, closed_us: int) -> Flags:
        return np.zeros(len(new), np.bool_)

    def reaches(self, new: Table) -> int:
        return self.reach_us

    def kept_until(self, index: Table, windows: AssignedWindows, closed_us: int) -> tuple[Ints, Ints]:
        return _NONE, _NONE


_NONE = np.empty(0, np.int64)


class Sessions(_Plain):
    """Sessions of one gap. A row of the index is a session."""

    by_event = False
    stored: tuple[str, ...] = ("id", "first", "last", "events", "late_events", "seq", "hash")

    def __init__(self, gap_us: int) -> None:
        self.reach_us = self._gap_us = gap_us
        self.cell_us = max(gap_us, LEAST_CELL_US)

    def alone(self, new: Table) -> tuple[Ints, Ints]:
        return new["first"], new["last"] + self._gap_us

    def accepted(self, index: Table, new: Table, closed_us: int, settled_us: int) -> Flags:
        """Accepts rows whose own end is not closed, and rows that begin inside an existing session.

        Such a row may extend that session to later instants: the session is not closed, so they are not, either. No
        session is extended to instants before ``closed_us``: another session may have been there that is gone.
        """
        accepted = ~self.doubtful(new, closed_us)
        if accepted.all() or not len(index):
            return accepted
        doubtful = np.flatnonzero(~accepted)
        accepted[doubtful[self.owners(index, new.take(doubtful)) >= 0]] = True
        return accepted

    def doubtful(self, new: Table, closed_us: int) -> Flags:
        return np.asarray(new["first"] <= closed_us - self._gap_us)

    def owners(self, index: Table, rows: Table) -> Ints:
        """The id of the session that each row begins in, found by its key and ``first``. -1: no existing session.

        Sessions grow and are merged, but never split, so rows of the same session stay together. A stored row without
        a session never gets one: it lies before the closed instant, and no session is extended to there.
        """
        if not len(index):
            return np.full(len(rows), -1, np.int64)
        codes, row_codes = codes_of(index, rows)
        order, places = Places.ordering(codes, index["first"], index["id"])
        at = places.after(row_codes, rows["first"]) - 1
        before = order[np.maximum(at, 0)]
        inside = (at >= 0) & (codes[before] == row_codes) & (rows["first"] <= index["last"][before])
        return np.where(inside, index["id"][before], -1)

    def add(self, index: Table, new: Table, now_us: int | None) -> Added:
        if now_us is not None:
            # An event that is not behind the watermark is not late, whatever it joins.
            new = new.replaced(late_events=np.where(new["first"] <= now_us, new["events"], 0))
        new = self._joined(new)
        old_codes, new_codes = codes_of(index, new)
        # Sessions of other keys do not change.
        touched = np.zeros(int(max(old_codes.max(initial=0), new_codes.max(initial=0))) + 1, np.bool_)
        touched[new_codes] = True
        places = np.flatnonzero(touched[old_codes])
        old = index.take(places)
        merge = merge_sessions(
            Intervals(old_codes[places], old["first"], old["last"]),
            Intervals(new_codes, new["first"], new["last"]),
            self._gap_us,
        )
        made = len(merge.sessions.keys)
        session_of = np.concatenate((merge.of_old, merge.of_new))
        both = stacked([old, new])
        # A session keeps the id of one of its parts. Each session has a part, so every element is overwritten.
        source = np.full(made, len(session_of), np.int64)
        np.minimum.at(source, session_of, np.arange(len(session_of)))
        late = np.zeros(len(new), np.bool_)
        if now_us is not None:
            ended = merge.sessions.lasts + self._gap_us <= now_us
            ended[merge.of_old[old["last"] + self._gap_us <= now_us]] = True
            late = ended[merge.of_new] & (new["late_events"] > 0)
        came_late = np.concatenate((old["late_events"], np.where(late, new["late_events"], 0)))
        sums = {
            "events": sums_by(session_of, both["events"], made),
            "late_events": sums_by(session_of, came_late, made),
        }
        seqs = np.full(made, -1, np.int64)
        np.maximum.at(seqs, session_of, both["seq"])
        changed = both.take(source).replaced(first=merge.sessions.firsts, last=merge.sessions.lasts, seq=seqs, **sums)
        touched_rows = np.zeros(len(index), np.bool_)
        touched_rows[places] = True
        grown = stacked([index.take(~touched_rows), changed])
        if now_us is None:
            return _nothing_late(grown)
        ends = np.minimum(merge.sessions.lasts[merge.of_new[late]] + self._gap_us, now_us)
        return Added(grown, ends, new["late_events"][late])

    def lasts(self, index: Table) -> Ints:
        return index["last"]

    def _joined(self, new: Table) -> Table:
        """Merges new rows of the same session, so that fewer rows are compared with the index."""
        codes = codes_of(new)[0]
        made, interval_of = merge_intervals(Intervals(codes, new["first"], new["last"]), self._gap_us)
        if len(made.keys) == len(new):
            return new
        source, seqs = (np.full(len(made.keys), v, np.int64) for v in (len(interval_of), -1))
        np.minimum.at(source, interval_of, np.arange(len(interval_of)))
        sums = {name: sums_by(interval_of, new[name], len(made.keys)) for name in ("events", "late_events")}
        np.maximum.at(seqs, interval_of, new["seq"])
        return new.take(source).replaced(first=made.firsts, last=made.lasts, seq=seqs, **sums)

    def windows(self, index: Table) -> AssignedWindows:
        rows = np.arange(len(index))
        ends = index["last"] + self._gap_us
        return AssignedWindows(rows, rows + 1, index["first"], ends, ends, np.zeros(len(index), np.int64))

    def needed(self, index: Table, windows: AssignedWindows, gone: Flags, closed_us: int) -> Flags:
        return ~gone


class ByEvent(_Plain):
    """The common part of assigners whose index has one row for each event."""

    by_event = True
    cell_us = LEAST_CELL_US
    stored: tuple[str, ...] = ("id", "first", "events", "late_events", "seq", "row", "mark", "hash")

    def alone(self, new: Table) -> tuple[Ints, Ints]:
        return new["first"], new["last"] + 1

    def accepted(self, index: Table, new: Table, closed_us: int, settled_us: int) -> Flags:
        """Accepts rows that are not closed, and rows that are not before the first kept event of their key."""
        accepted = ~self.doubtful(new, closed_us)
        if accepted.all() or not len(index):
            return accepted
        codes, new_codes = codes_of(index, new)
        earliest = np.full(max(int(codes.max()), int(new_codes.max())) + 1, NEVER, np.int64)
        np.minimum.at(earliest, codes, index["first"])
        return np.asarray(accepted | (new["first"] >= earliest[new_codes]))

    def doubtful(self, new: Table, closed_us: int) -> Flags:
        return np.asarray(new["first"] < closed_us)

    def lasts(self, index: Table) -> Ints:
        return np.full(len(index), NEVER, np.int64)

    def sorted(self, index: Table) -> Table:
        return index.take(np.lexsort((index["id"], index["first"], codes_of(index)[0])))

    def add(self, index: Table, new: Table, now_us: int | None) -> Added:
        late = np.zeros(len(new), np.bool_) if now_us is None else new["first"] < now_us
        both = stacked([index, new.replaced(late_events=np.where(late, new["events"], 0))])
        return Added(self.sorted(both), new["first"][late] + 1, new["events"][late])


class Counts(ByEvent):
    """Windows of a number of events of a key."""

    arrives_closed = True

    def __init__(self, window: Count, *, shows_open: bool = False) -> None:
        self._window = window
        self._shows_open = shows_open

    def windows(self, index: Table) -> AssignedWindows:
        codes = codes_of(index)[0]
        counted = count_windows(codes, np.zeros(len(index), np.bool_), self._window)
        begins, limits = counted.begins, counted.ends
        firsts = index["first"]
        over = firsts[limits - 1] + 1
        if self._shows_open:
            begins, limits, over = self._with_open(codes, begins, limits, over)
        # Several windows may begin with events of the same instant. The id of the first event distinguishes them.
        return AssignedWindows(begins, limits, firsts[begins], firsts[limits - 1] + 1, over, index["id"][begins])

    def _with_open(self, codes: Ints, begins: Ints, limits: Ints, over: Ints) -> tuple[Ints, Ints, Ints]:
        """Adds the windows that have begun but are not full yet. They hold the rows up to the last one of their key."""
        edges = np.flatnonzero(np.diff(codes, prepend=-1))
        lasts = np.append(edges[1:], len(codes))[: len(edges)]
        nth = np.arange(len(codes)) - np.repeat(edges, lasts - edges)
        left = np.repeat(lasts, lasts - edges) - np.arange(len(codes))
        open_ = np.flatnonzero((nth % self._window.slide == 0) & (left < self._window.n))
        both = np.concatenate((begins, open_))
        order = np.argsort(both, kind="stable")
        ends = np.concatenate((limits, open_ + left[open_]))
        whole = np.concatenate((over, np.full(len(open_), NEVER)))
        return both[order], ends[order], whole[order]

    def needed(self, index: Table, windows: AssignedWindows, gone: Flags, closed_us: int) -> Flags:
        """Needs all rows from the first window that is not gone. Later windows are counted from there."""
        codes = codes_of(index)[0]
        removed = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
        np.add.at(removed, codes[windows.begins[gone]], self._window.slide)
        begins = np.flatnonzero(np.diff(codes, prepend=-1))
        nth = np.arange(len(codes)) - np.repeat(begins, np.diff(np.append(begins, len(codes))))
        return np.asarray(nth >= removed[codes])


class Records(ByEvent):
    """A window for each event: it ends at the event, and holds the events of its key up to a size before it."""

    outlives = True

    def __init__(self, size_us: int) -> None:
        self.reach_us = self._size_us = size_us
        self.cell_us = max(size_us, LEAST_CELL_US)

    def alone(self, new: Table) -> tuple[Ints, Ints]:
        return new["first"] - self._size_us, new["last"]

    def lasts(self, index: Table) -> Ints:
        return index["last"]

    def accepted(self, index: Table, new: Table, closed_us: int, settled_us: int) -> Flags:
        """Accepts rows that may be in a window that is not gone."""
        return np.asarray(new["first"] >= closed_us - self._size_us)

    def doubtful(self, new: Table, closed_us: int) -> Flags:
        return np.zeros(len(new), np.bool_)

    def misses_own(self, new: Table, closed_us: int) -> Flags:
        return np.asarray(new["last"] < closed_us)

    def windows(self, index: Table) -> AssignedWindows:
        records = record_windows(codes_of(index)[0], index["first"], self._size_us)
        over = records.ends_us + 1
        return AssignedWindows(
            records.begins, records.ends, records.starts_us, records.ends_us, over, np.zeros_like(over)
        )

    def needed(self, index: Table, windows: AssignedWindows, gone: Flags, closed_us: int) -> Flags:
        return np.asarray(index["first"] >= closed_us - self._size_us)

    def kept_until(self, index: Table, windows: AssignedWindows, closed_us: int) -> tuple[Ints, Ints]:
        return np.arange(len(index)), index["first"] + (self._size_us + 1)


class Punctuations(ByEvent):
    """Windows that end at the next punctuation of their key."""

    arrives_closed = True

    def __init__(self, *, shows_open: bool = False) -> None:
        self._shows_open = shows_open

    def windows(self, index: Table) -> AssignedWindows:
        codes, firsts = codes_of(index)[0], index["first"]
        begins = np.flatnonzero((np.diff(codes, prepend=-1) != 0) | (index["mark"] > 0))
        ends = np.append(begins[1:], len(codes))[: len(begins)]
        following = np.append(begins[1:], -1)[: len(begins)]
        complete = (following >= 0) & (codes[following] == codes[begins]) if len(begins) else np.empty(0, np.bool_)
        over = np.where(complete, firsts[following], NEVER) if len(begins) else np.empty(0, np.int64)
        # An early pane of a window that is not complete shows what it holds so far.
        shown = np.where(complete, over, firsts[ends - 1] + 1) if self._shows_open else over
        return AssignedWindows(begins, ends, firsts[begins], shown, over, index["id"][begins])

    def needed(self, index: Table, windows: AssignedWindows, gone: Flags, closed_us: int) -> Flags:
        needed = np.ones(len(index), np.bool_)
        needed[ranges(windows.begins[gone], (windows.ends - windows.begins)[gone])] = False
        return needed


def _nothing_late(index: Table) -> Added:
    nothing = np.empty(0, np.int64)
    return Added(index, nothing, nothing)


def total(values: Ints, windows: AssignedWindows) -> Ints:
    """The sum of ``values`` over the rows of each window. Windows may overlap."""
    if _are_rows(windows, len(values)):
        return values
    if sum_of(values) < MOST:
        upto = np.concatenate(([0], np.cumsum(values)))
        return np.asarray(upto[windows.ends] - upto[windows.begins])
    lengths = windows.ends - windows.begins
    rows = ranges(windows.begins, lengths)
    return sums_by(np.repeat(np.arange(len(lengths)), lengths), values[rows], len(lengths))


def newest(values: Ints, windows: AssignedWindows) -> Ints:
    """The largest of ``values`` over the rows of each window. Each window must have rows, and windows may overlap."""
    if not len(windows.begins):
        return np.empty(0, np.int64)
    if _are_rows(windows, len(values)):
        return values
    return largest(values, windows.begins, windows.ends)


def largest(values: Ints, begins: Ints, ends: Ints) -> Ints:
    """The largest of each stretch of values, ``[begins[i], ends[i])``. None may be empty, and they may overlap."""
    # Two stretches of 2**k rows cover any stretch of up to twice as many rows. Compute each maximum once.
    lengths = ends - begins
    powers = np.frexp(lengths.astype(np.float64))[1] - 1
    found = np.empty(len(lengths), np.int64)
    for power in range(int(powers.max(initial=-1)) + 1):
        half = 1 << power
        which = powers == power
        found[which] = np.maximum(values[begins[which]], values[ends[which] - half])
        values = np.maximum(values[:-half], values[half:])
    return found


def _are_rows(windows: AssignedWindows, rows: int) -> bool:
    """Whether window i has exactly row i, for all rows."""
    if len(windows.begins) != rows:
        return False
    numbers = np.arange(rows)
    return bool((windows.begins == numbers).all() and (windows.ends == numbers + 1).all())
