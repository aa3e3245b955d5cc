"""Sessions that single events decide: each event brings its own gap, or no session is longer than a maximum. Pure.

An event at ``t`` reaches up to ``t`` plus its gap. In the order of event time, an event belongs to the session before
it if any event of that session reaches it, and if less than the maximum lies between it and the session's first event.
Otherwise it begins a new session. So a late event may move all later cuts of its key. That is why the index needs a row
for each event. Here the column ``mark`` of the index is the gap of the row's event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from aion.core import gaps
from aion.core.keyed.assigners import (
    LEAST_CELL_US,
    Added,
    AssignedWindows,
    Assigner,
    ByEvent,
    Counts,
    Flags,
    Punctuations,
    Records,
    Sessions,
    largest,
)
from aion.core.keyed.table import Ints, Places, Table, codes_of, stacked
from aion.core.slicing.grid import LEAST_KEYED_US
from aion.core.slicing.sessions import running_max
from aion.core.slicing.tree import ranges
from aion.core.windows import Count, Definition, PerRecord, Punctuated, Session


class Cuts(NamedTuple):
    """Sessions in order of (key, first). Session i has the rows ``[begins[i], ends[i])`` and ends at ``ends_us[i]``."""

    begins: Ints
    ends: Ints
    ends_us: Ints


def cut(keys: Ints, times_us: Ints, gaps_us: Ints, most_us: int | None) -> Cuts:
    """The sessions of events, which are in order of (key, time). ``most_us``: no session is longer.

    Without a maximum, a session begins where no earlier event of the key reaches. With one, a session's end depends on
    where it begins. So the next session is found for each event, as if one began there. Then the sessions that begin at
    a key's first event are followed, in steps that double: a pass for one, two, four and more sessions at once.
    """
    n = len(keys)
    if not n:
        return Cuts(keys, keys, keys)
    other_key = keys[1:] != keys[:-1]
    reach = times_us + gaps_us
    if most_us is None:
        begins = np.flatnonzero(_unreached(times_us, running_max(reach, other_key), other_key))
    else:
        begins = _followed(_next(other_key, times_us, reach, most_us))
    ends = np.append(begins[1:], n)
    ends_us = np.maximum.reduceat(reach, begins)
    return Cuts(begins, ends, ends_us if most_us is None else np.minimum(ends_us, times_us[begins] + most_us))


def _unreached(times_us: Ints, reached: Ints, other_key: Flags) -> Flags:
    """A mask of the events that begin a session although none is cut. ``reached``: by all events up to each."""
    return np.concatenate(([True], other_key | (times_us[1:] > reached[:-1])))


def _next(other_key: Flags, times_us: Ints, reach: Ints, most_us: int) -> Ints:
    """For each event: the number of the first event after a session that begins with it."""
    keys = np.concatenate(([0], np.cumsum(other_key)))
    places = Places(keys, times_us)
    if (other_key | (reach[1:] >= reach[:-1])).all():
        # Nobody reaches further than the event before. So the gaps between sessions are the same wherever they begin.
        gaps_at = np.append(np.flatnonzero(_unreached(times_us, reach, other_key)), len(keys))
        following = gaps_at[np.searchsorted(gaps_at, np.arange(len(keys)), side="right")]
    else:
        following = _doubled(places.after(keys, reach))
    return np.asarray(np.minimum(following, places.before(keys, times_us + most_us)))


def _doubled(following: Ints) -> Ints:
    """How far a chain gets from each event. ``following``: the number of the first event that each does not reach.

    Each pass goes on from the events that the pass before has reached, so a chain of n events takes log(n) passes.
    """
    while True:
        further: Ints = largest(following, np.arange(len(following)), following)
        if np.array_equal(further, following):
            return following
        following = further


def _followed(following: Ints) -> Ints:
    """The events that begin sessions: the first one, and those that follow from it."""
    n = len(following)
    step = np.append(following, n)
    begins = np.zeros(n + 1, np.bool_)
    begins[[0, n]] = True
    while True:
        to = step[np.flatnonzero(begins)]
        if begins[to].all():
            return np.flatnonzero(begins[:n])
        begins[to] = True
        step = step[step]


class CutSessions(ByEvent):
    """Sessions with a maximal duration, or with a gap from a column. A row of the index is an event."""

    # Late events that belong to a session that is gone and was cut must not begin another one. So its rows stay in the
    # index until no event can be so late any more.
    outlives = True

    def __init__(self, window: Session) -> None:
        self._gap_us = window.gap_us
        self._most_us = window.max_duration_us
        self._from_column = window.gap_column is not None
        self.reach_us = (window.max_duration_us or 0) if self._from_column else window.gap_us
        self.cell_us = LEAST_KEYED_US if self._from_column else max(window.gap_us, LEAST_CELL_US)

    def _gaps(self, rows: Table) -> Ints:
        return rows["mark"] if self._from_column else np.full(len(rows), self._gap_us)

    def unusable(self, new: Table) -> Iterator[tuple[str, Flags]]:
        return gaps.unusable(self._gaps(new))

    def alone(self, new: Table) -> tuple[Ints, Ints]:
        longest = np.maximum(self._gaps(new), 0)
        return new["first"], new["first"] + (longest if self._most_us is None else np.minimum(longest, self._most_us))

    def reaches(self, new: Table) -> int:
        if self._most_us is not None or not self._from_column:
            return self.reach_us
        return int(new["mark"].max(initial=0))

    def accepted(self, index: Table, new: Table, closed_us: int, settled_us: int) -> Flags:
        """Accepts rows whose own end is not closed, and rows that belong to an existing session.

        Rows that belong to a session that was cut and is gone come too late: with another session instead, all sessions
        after it would be cut elsewhere.
        """
        times = new["first"]
        accepted = (self.alone(new)[1] > closed_us) & (times >= settled_us)
        doubtful = np.flatnonzero(self.doubtful(new, closed_us))
        if not len(doubtful) or not len(index):
            return np.asarray(accepted)
        windows = self.windows(index)
        codes, new_codes = codes_of(index, new)
        window_codes = codes[windows.begins]
        order, places = Places.ordering(window_codes, windows.starts_us, windows.begins)
        at = places.after(new_codes[doubtful], times[doubtful]) - 1
        before = order[np.maximum(at, 0)]
        inside = (at >= 0) & (window_codes[before] == new_codes[doubtful])
        inside &= times[doubtful] < windows.ends_us[before]
        gone = windows.over_us[before] <= closed_us
        own = accepted[doubtful]
        accepted[doubtful] = np.where(inside & ~gone, True, own & ~(inside & self._were_cut(windows)[before]))
        return np.asarray(accepted)

    def add(self, index: Table, new: Table, now_us: int | None) -> Added:
        nothing = np.zeros(len(new), np.int64)
        if now_us is None or not (new["first"] <= now_us).any():
            return Added(self.sorted(stacked([index, new.replaced(late_events=nothing)])), nothing[:0], nothing[:0])
        # An event is late if its session has ended, and also if it prolongs a session that had ended without it.
        before = self.windows(index)
        ended = np.repeat(before.over_us <= now_us, before.ends - before.begins)
        tables = [index.replaced(ended=ended.astype(np.int64), new=np.zeros(len(index), np.int64))]
        tables += [new.replaced(ended=nothing, new=np.ones(len(new), np.int64))]
        both = self.sorted(stacked(tables))
        windows = self.windows(both)
        of = np.repeat(np.arange(len(windows.begins)), windows.ends - windows.begins)
        had_ended = np.maximum.reduceat(both["ended"], windows.begins) > 0
        late = (windows.over_us <= now_us)[of] | (had_ended[of] & (both["first"] <= now_us))
        late &= both["new"] > 0
        columns = {name: both[name] for name in index.columns}
        columns["late_events"] = np.where(late, both["events"], both["late_events"])
        return Added(Table(both.keys, columns), np.minimum(windows.ends_us[of[late]], now_us), both["events"][late])

    def lasts(self, index: Table) -> Ints:
        return self.alone(index)[1]

    def windows(self, index: Table) -> AssignedWindows:
        cuts = cut(codes_of(index)[0], index["first"], self._gaps(index), self._most_us)
        starts = index["first"][cuts.begins]
        return AssignedWindows(
            cuts.begins, cuts.ends, starts, cuts.ends_us, cuts.ends_us, np.zeros(len(starts), np.int64)
        )

    def needed(self, index: Table, windows: AssignedWindows, gone: Flags, closed_us: int) -> Flags:
        """Needs the rows of sessions that are not gone, and of those that were cut, as long as late events may belong.

        The latter are only there to be recognised: their windows never run again.
        """
        gone = gone & ~(self._were_cut(windows) & (windows.ends_us > closed_us - self.reach_us))
        needed = np.ones(len(index), np.bool_)
        needed[ranges(windows.begins[gone], (windows.ends - windows.begins)[gone])] = False
        return needed

    def kept_until(self, index: Table, windows: AssignedWindows, closed_us: int) -> tuple[Ints, Ints]:
        gone = np.flatnonzero((windows.over_us <= closed_us) & self._were_cut(windows))
        return windows.begins[gone], windows.ends_us[gone] + self.reach_us

    def _were_cut(self, windows: AssignedWindows) -> Flags:
        if self._most_us is None:
            return np.zeros(len(windows.begins), np.bool_)
        return np.asarray(windows.ends_us - windows.starts_us == self._most_us)


def assigner_of(window: Definition, *, shows_open: bool = False) -> Assigner:
    """The assigner of a definition. ``shows_open``: windows that are not complete yet run, too, as early ones.

    Without it, windows of a number of events only exist once they are complete.
    """
    match window:
        case Session():
            return CutSessions(window) if window.by_event else Sessions(window.gap_us)
        case Count():
            return Counts(window, shows_open=shows_open)
        case PerRecord():
            return Records(window.size_us)
        case Punctuated():
            return Punctuations(shows_open=shows_open)
    raise AssertionError(f"{window} is the same for all keys")
