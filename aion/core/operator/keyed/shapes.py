"""What windows the events of each key make: one shape per kind of definition. Pure.

A shape works on the *index* of its definition: rows ``first, last, events, late_events, seq, row, mark``. Of sessions a
row is a session, in order of ``id``. Of the others it is a row of a block (an event), in order of (key, first,
arrival): there ``first`` and ``last`` are the same instant, and ``seq`` and ``row`` say which block it is in and where.

What is *closed* is over: windows that end by then are gone, and an event comes too late that would be alone in such a
window, unless it falls into one that is still there.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aion.core.numbers import MOST, sum_of, sums_by
from aion.core.operator.keyed.table import Ints, Places, Table, codes_of, stacked
from aion.core.operator.lifecycle import NEVER
from aion.core.slicing.counts import count_windows
from aion.core.slicing.per_record import record_windows
from aion.core.slicing.sessions import Intervals, merge_intervals, merge_sessions
from aion.core.slicing.tree import ranges
from aion.core.windows import Count, Definition, PerRecord, Punctuated, Session

Flags = npt.NDArray[np.bool_]

LEAST_CELL_US = 1_000_000
"""Windows that end within a second wait together, however short they are."""
INDEX = ("id", "first", "last", "events", "late_events", "seq", "row", "mark")


class Windows(NamedTuple):
    """All windows of an index, by key. Row ``i`` of each array is a window.

    ``begins``, ``ends``: the rows of the index that it holds. ``starts_us``, ``ends_us``: as a pane shows them.
    ``over_us``: the watermark at which nothing more belongs to it but late events; NEVER while it is not complete.
    ``numbers``: tells windows of the same key, start and end apart.
    """

    begins: Ints
    ends: Ints
    starts_us: Ints
    ends_us: Ints
    over_us: Ints
    numbers: Ints


class Added(NamedTuple):
    """An index with more rows; and of those that came late, the end of their window (by now) and how many events."""

    grown: Table
    late_ends_us: Ints
    late_events: Ints


class Shape(Protocol):
    by_event: bool
    """Whether a row of the index is a row of a block, and not any number of events of a key."""
    cell_us: int
    """Windows that end within one stretch of so many microseconds wait together for the trigger."""
    reach_us: int
    """How long before its window's end an event may be that it is alone in."""
    outlives: bool
    """Whether events stay, for later windows, when a window of theirs is gone, which must not be executed again."""

    def alone(self, new: Table) -> tuple[Ints, Ints]:
        """Start and end, as a pane shows them, of the window that each row would be in by itself."""

    def accepted(self, index: Table, new: Table, closed_us: int) -> Flags:
        """Which new rows do not come too late."""

    def add(self, index: Table, new: Table, now_us: int | None) -> Added:
        """Takes rows in; those that come late are counted as ``late_events`` of theirs."""

    def windows(self, index: Table) -> Windows:
        """The windows there are, complete or not."""

    def needed(self, index: Table, windows: Windows, gone: Flags, closed_us: int) -> Flags:
        """The rows of the index that are still needed when some windows are gone."""

    def lasts(self, index: Table) -> Ints:
        """Up to when a row of the index has events be taken, and kept, that come before what is closed."""

    def sorted(self, index: Table) -> Table:
        """The rows of an index in its order."""


def shape_of(window: Definition) -> Shape:
    match window:
        case Session():
            return Sessions(window.gap_us)
        case Count():
            return Counts(window)
        case PerRecord():
            return Records(window.size_us)
        case Punctuated():
            return Punctuations()
    raise AssertionError(f"{window} is the same for all keys")


class Sessions:
    by_event = False
    outlives = False

    def __init__(self, gap_us: int) -> None:
        self.reach_us = self._gap_us = gap_us
        self.cell_us = max(gap_us, LEAST_CELL_US)

    def alone(self, new: Table) -> tuple[Ints, Ints]:
        return new["first"], new["last"] + self._gap_us

    def accepted(self, index: Table, new: Table, closed_us: int) -> Flags:
        """Those whose own end is not closed, and those that begin inside a session that is there.

        What such a row holds behind that session's last event is not closed either, since the session is not. But none
        is extended to before what is closed: there may have been another one, that is gone.
        """
        accepted = new["first"] > closed_us - self._gap_us
        if accepted.all() or not len(index):
            return accepted
        doubtful = np.flatnonzero(~accepted)
        accepted[doubtful[self.owners(index, new.take(doubtful)) >= 0]] = True
        return accepted

    def owners(self, index: Table, rows: Table) -> Ints:
        """The id of the session that each row begins in, by its key and ``first``; -1: in none that is there.

        Sessions grow and are joined, but never divided: rows of one session are so for good. Rows of none remain so,
        too: whatever is still taken comes after what is closed, where they are not.
        """
        if not len(index):
            return np.full(len(rows), -1, np.int64)
        codes, row_codes = codes_of(index, rows)
        order, places = Places.ordering(codes, index["first"], index["id"])
        at = places.after(row_codes, rows["first"]) - 1
        found = order[np.maximum(at, 0)]
        inside = (at >= 0) & (codes[found] == row_codes) & (rows["first"] <= index["last"][found])
        return np.where(inside, index["id"][found], -1)

    def add(self, index: Table, new: Table, now_us: int | None) -> Added:
        new = self._joined(new)
        old_codes, new_codes = codes_of(index, new)
        # Of all other keys nothing changes.
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
        of = np.concatenate((merge.of_old, merge.of_new))
        both = stacked([old, new])
        # A session keeps the number of the oldest part of it; every one has a part, so all places are taken.
        source = np.full(made, len(of), np.int64)
        np.minimum.at(source, of, np.arange(len(of)))
        late = np.zeros(len(new), np.bool_)
        if now_us is not None:
            ended = merge.sessions.lasts + self._gap_us <= now_us
            ended[merge.of_old[old["last"] + self._gap_us <= now_us]] = True
            late = ended[merge.of_new]
        came_late = np.concatenate((old["late_events"], np.where(late, new["events"], 0)))
        sums = {"events": sums_by(of, both["events"], made), "late_events": sums_by(of, came_late, made)}
        seqs = np.full(made, -1, np.int64)
        np.maximum.at(seqs, of, both["seq"])
        changed = both.take(source).replaced(first=merge.sessions.firsts, last=merge.sessions.lasts, seq=seqs, **sums)
        grown = _spliced(index, places, changed, source)
        if now_us is None:
            return _nothing_late(grown)
        ends = np.minimum(merge.sessions.lasts[merge.of_new[late]] + self._gap_us, now_us)
        return Added(grown, ends, new["events"][late])

    def lasts(self, index: Table) -> Ints:
        return index["last"]

    def sorted(self, index: Table) -> Table:
        return index.take(np.argsort(index["id"], kind="stable"))

    def _joined(self, new: Table) -> Table:
        """Rows of events made into as few intervals as they are, so that little is compared with the index."""
        codes = codes_of(new)[0]
        made, of = merge_intervals(Intervals(codes, new["first"], new["last"]), self._gap_us)
        if len(made.keys) == len(new):
            return new
        source, seqs = (np.full(len(made.keys), v, np.int64) for v in (len(of), -1))
        np.minimum.at(source, of, np.arange(len(of)))
        events = sums_by(of, new["events"], len(made.keys))
        np.maximum.at(seqs, of, new["seq"])
        return new.take(source).replaced(first=made.firsts, last=made.lasts, events=events, seq=seqs)

    def windows(self, index: Table) -> Windows:
        rows = np.arange(len(index))
        ends = index["last"] + self._gap_us
        return Windows(rows, rows + 1, index["first"], ends, ends, np.zeros(len(index), np.int64))

    def needed(self, index: Table, windows: Windows, gone: Flags, closed_us: int) -> Flags:
        return ~gone


class _ByEvent:
    """What shapes have in common of which a row of the index is an event."""

    by_event = True
    cell_us = LEAST_CELL_US
    reach_us = 0
    outlives = False

    def alone(self, new: Table) -> tuple[Ints, Ints]:
        return new["first"], new["last"] + 1

    def accepted(self, index: Table, new: Table, closed_us: int) -> Flags:
        """Those that are not closed, and those behind the first event of their key that is there."""
        accepted = new["first"] >= closed_us
        if accepted.all() or not len(index):
            return accepted
        codes, new_codes = codes_of(index, new)
        earliest = np.full(max(int(codes.max()), int(new_codes.max())) + 1, NEVER, np.int64)
        np.minimum.at(earliest, codes, index["first"])
        return np.asarray(accepted | (new["first"] >= earliest[new_codes]))

    def lasts(self, index: Table) -> Ints:
        return np.full(len(index), NEVER, np.int64)

    def sorted(self, index: Table) -> Table:
        return index.take(np.lexsort((index["id"], index["first"], codes_of(index)[0])))

    def add(self, index: Table, new: Table, now_us: int | None) -> Added:
        late = np.zeros(len(new), np.bool_) if now_us is None else new["first"] < now_us
        both = stacked([index, new.replaced(late_events=np.where(late, new["events"], 0))])
        return Added(self.sorted(both), new["first"][late] + 1, new["events"][late])


class Counts(_ByEvent):
    def __init__(self, window: Count) -> None:
        self._window = window

    def windows(self, index: Table) -> Windows:
        codes = codes_of(index)[0]
        found = count_windows(codes, np.zeros(len(index), np.bool_), self._window)
        firsts = index["first"]
        starts, ends = firsts[found.begins], firsts[found.ends - 1] + 1
        # Several events of one instant may begin a window each. The id of the first event names the window.
        return Windows(found.begins, found.ends, starts, ends, ends, index["id"][found.begins])

    def needed(self, index: Table, windows: Windows, gone: Flags, closed_us: int) -> Flags:
        """All from the first window on that is not gone: the next ones are counted from there."""
        codes = codes_of(index)[0]
        removed = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
        np.add.at(removed, codes[windows.begins[gone]], self._window.slide)
        begins = np.flatnonzero(np.diff(codes, prepend=-1))
        nth = np.arange(len(codes)) - np.repeat(begins, np.diff(np.append(begins, len(codes))))
        return np.asarray(nth >= removed[codes])


class Records(_ByEvent):
    outlives = True

    def __init__(self, size_us: int) -> None:
        self.reach_us = self._size_us = size_us
        self.cell_us = max(size_us, LEAST_CELL_US)

    def alone(self, new: Table) -> tuple[Ints, Ints]:
        return new["first"] - self._size_us, new["last"]

    def lasts(self, index: Table) -> Ints:
        return index["last"]

    def accepted(self, index: Table, new: Table, closed_us: int) -> Flags:
        """Those that a window may hold that is still there."""
        return np.asarray(new["first"] >= closed_us - self._size_us)

    def windows(self, index: Table) -> Windows:
        found = record_windows(codes_of(index)[0], index["first"], self._size_us)
        over = found.ends_us + 1
        return Windows(found.begins, found.ends, found.starts_us, found.ends_us, over, np.zeros_like(over))

    def needed(self, index: Table, windows: Windows, gone: Flags, closed_us: int) -> Flags:
        return np.asarray(index["first"] >= closed_us - self._size_us)


class Punctuations(_ByEvent):
    def windows(self, index: Table) -> Windows:
        codes, firsts = codes_of(index)[0], index["first"]
        begins = np.flatnonzero((np.diff(codes, prepend=-1) != 0) | (index["mark"] > 0))
        ends = np.append(begins[1:], len(codes))[: len(begins)]
        following = np.append(begins[1:], -1)[: len(begins)]
        complete = (following >= 0) & (codes[following] == codes[begins]) if len(begins) else np.empty(0, np.bool_)
        over = np.where(complete, firsts[following], NEVER) if len(begins) else np.empty(0, np.int64)
        return Windows(begins, ends, firsts[begins], over, over, index["id"][begins])

    def needed(self, index: Table, windows: Windows, gone: Flags, closed_us: int) -> Flags:
        needed = np.ones(len(index), np.bool_)
        needed[ranges(windows.begins[gone], (windows.ends - windows.begins)[gone])] = False
        return needed


def _spliced(index: Table, places: Ints, changed: Table, source: Ints) -> Table:
    """The index with other rows at some places: row i of ``changed`` comes to ``places[source[i]]``, or else behind.

    Places that none comes to go. The index stays in order of ``id``, so that little is sorted where it is compared.
    """
    stays = source < len(places)
    at = places[source[stays]]
    columns = {name: column.copy() for name, column in index.columns.items()}
    for name, column in columns.items():
        column[at] = changed[name][stays]
    gone = np.zeros(len(index), np.bool_)
    gone[places] = True
    gone[at] = False
    new = changed.take(np.flatnonzero(~stays))
    return stacked([Table(index.keys, columns).take(~gone), new.take(np.argsort(new["id"]))])


def _nothing_late(index: Table) -> Added:
    nothing = np.empty(0, np.int64)
    return Added(index, nothing, nothing)


def total(values: Ints, windows: Windows) -> Ints:
    """The sum over the rows of each window, which may overlap."""
    if _are_rows(windows, len(values)):
        return values
    if sum_of(values) < MOST:
        upto = np.concatenate(([0], np.cumsum(values)))
        return np.asarray(upto[windows.ends] - upto[windows.begins])
    lengths = windows.ends - windows.begins
    rows = ranges(windows.begins, lengths)
    return sums_by(np.repeat(np.arange(len(lengths)), lengths), values[rows], len(lengths))


def newest(values: Ints, windows: Windows) -> Ints:
    """The largest value over the rows of each window, all of which hold some."""
    if not len(windows.begins):
        return np.empty(0, np.int64)
    if _are_rows(windows, len(values)):
        return values
    # Two stretches of 2**k rows cover a window of up to twice as many; windows may overlap as much as they like.
    lengths = windows.ends - windows.begins
    powers = np.frexp(lengths.astype(np.float64))[1] - 1
    found = np.empty(len(lengths), np.int64)
    of_stretches = values
    for power in range(int(powers.max()) + 1):
        which = powers == power
        last = windows.ends[which] - (1 << power)
        found[which] = np.maximum(of_stretches[windows.begins[which]], of_stretches[last])
        half = 1 << power
        of_stretches = np.maximum(of_stretches[:-half], of_stretches[half:])
    return found


def _are_rows(windows: Windows, rows: int) -> bool:
    """Whether each window is just the row of its number."""
    if len(windows.begins) != rows:
        return False
    numbers = np.arange(rows)
    return bool((windows.begins == numbers).all() and (windows.ends == numbers + 1).all())
