"""The staleness trigger (paper 3.4): it keeps results fresh with few executions. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from aion.base.numbers import NEVER
from aion.core.trigger.distribution import Floats, LateDistribution
from aion.core.trigger.planner import TriggerPlan, check, plan
from aion.core.trigger.triggers import MOST_PLANNED, Flags, Ints, LateWindows, never

REMEMBERED_PLANS = 50_000
"""The most plans that a staleness trigger caches: one for each lateness of a last execution, 24 bytes each."""
REMEMBERED_DISTRIBUTIONS = 64
"""The most distributions that it caches: one for each different bound, about 40 kB each."""
NEARLY = 1 - 1e-9
"""A level counts as reached this close to it, since instants are rounded to microseconds."""
ON_TIME = -1
"""Instead of the lateness of the last late execution: there was only the on-time one."""
CAUTION = 2.0
"""How many standard deviations (Poisson) below the expected number of late events the trigger plans for.

Measured with `aion experiment staleness`, on streams of 20 to 200 events and a bound of 0.05: with 0, 62 to 100 % of
the windows keep the bound; with 2, 91 to 100 % do, for at most 0.7 more executions.
"""


class Forecast(Protocol):
    """The expected late events of a window."""

    @property
    def version(self) -> int:
        """Changes whenever the forecast has moved enough to plan again."""

    def late_share(self, lateness_us: Floats) -> Floats:
        """Returns the share of late events that have come by each lateness: never descending, in [0, 1], 0 before
        lateness 0.

        It is only called up to a window's bound. The share up to the bound then counts as the whole.
        """

    def expected_late(self, on_time_events: Ints) -> Floats:
        """Returns the expected number of late events, however late, of windows with ``on_time_events`` events in
        time.
        """


class NothingKnown:
    """The forecast before anything is learnt: late events come evenly up to the bound, and their number is 0."""

    version = 0

    def late_share(self, lateness_us: Floats) -> Floats:
        return np.asarray(lateness_us / 2**63, dtype=np.float64)

    def expected_late(self, on_time_events: Ints) -> Floats:
        return np.zeros(len(on_time_events))


class _Plans(NamedTuple):
    """Plans after executions of different lateness: columns with one row for each, in the order of ``last_us``.

    ``last_us``: the lateness of the execution; ``ON_TIME`` for the on-time one. ``instant``: the next instant, as a
    share of the horizon. ``level``: the plan's largest staleness.
    """

    last_us: Any
    instant: Any
    level: Any


class _Known:
    """For windows with one bound: when late events come within it, and which share of all late events that is.

    ``plans``: by the number of executions that are left.
    """

    def __init__(self, late: LateDistribution, within: float) -> None:
        self.late = late
        self.within = within
        self.plans: dict[int, _Plans] = {}


_NO_PLANS = _Plans(np.empty(0, np.int64), np.empty(0), np.empty(0))


class StalenessTrigger:
    """The fewest executions that keep staleness below a bound, or a given number at the best instants (paper 3.4).

    The plan follows the forecast, from the last execution on. Since the real events differ from it, a window runs

    - at the planned instant, if it is then as stale as planned. If fewer events came, it waits until it is. So a window
      without new events does not run;
    - earlier, as soon as one more event, or the events expected until the next check, would take its actual staleness
      above the bound.

    Actual staleness is relative to ``expected_total``, which is cautious: a window that gets fewer events than that was
    staler than it seemed. Before anything is learnt, it is the number of events that came, which is never too large. So
    the bound then holds whatever comes, at the price of more executions.

    With ``executions``, which includes the final one, there is no bound. A window runs once it is as stale as the plan
    for its remaining executions has to allow. After each execution a new plan is made.

    No trigger can avoid this: events that come together count for the whole time since the last execution, even if they
    are executed at once.

    Plans are cached until the forecast's version changes, and shared by all windows last executed at one lateness.
    """

    def __init__(
        self,
        bound: float | None = None,
        *,
        executions: int | None = None,
        forecast: Forecast | None = None,
    ) -> None:
        """Without a ``forecast`` it uses :class:`NothingKnown`. Raises ValueError as ``planner.check`` does."""
        check(bound, executions)
        self.bound = bound
        self.executions = executions
        self.forecast: Forecast = forecast if forecast is not None else NothingKnown()
        self._version = self.forecast.version
        self._known: dict[int, _Known] = {}

    def due(self, windows: LateWindows) -> Flags:
        due: Flags = (windows.bound_us == 0) & (windows.pending > 0)  # there is no time in which it could become stale
        for rows, some, known in self._by_bound(windows):
            due[rows] = self._due(some, known)
        return due

    def next_due_us(self, windows: LateWindows) -> Ints:
        next_us = never(windows)
        for rows, some, known in self._by_bound(windows):
            next_us[rows] = self._next_due_us(some, known)
        return next_us

    def planned(self, windows: LateWindows) -> list[list[int]]:
        columns = (windows.lateness_us, windows.bound_us, self._last(windows), self._left(windows))
        states = zip(*(column.tolist() for column in columns), self.next_due_us(windows).tolist(), strict=True)
        found: list[list[int]] = []
        for lateness_us, bound_us, last_us, left, next_us in states:
            if left == 1 or bound_us == 0:
                found.append([])
                continue
            rest = self._plan(self._distribution(bound_us).late, bound_us, last_us, left)
            first = [next_us] if next_us != NEVER else []
            from_us = first[0] if first else lateness_us
            planned = rest.instants_us(bound_us)[:MOST_PLANNED].tolist()
            found.append([*first, *(us for us in planned if from_us < us < bound_us)][:MOST_PLANNED])
        return found

    def to_json(self) -> dict[str, Any]:
        return {"kind": "staleness", "bound": self.bound, "executions": self.executions}

    def staleness(self, windows: LateWindows) -> Floats:
        """Returns the staleness of each window now, against ``expected_total``."""
        return _stale(windows, windows.lateness_us, windows.pending, self.expected_total(windows))

    def expected_total(self, windows: LateWindows) -> Floats:
        """N: the late events that came, plus those that will still come. With a bound, a cautious number.

        The plain expectation is too high for every other window, and those would not keep the bound.
        """
        total = np.zeros(len(windows))
        for rows, some, known in self._by_bound(windows):
            total[rows] = some.late_events + self._to_come(some, known)
        return total

    # -- windows with one bound ---------------------------------------------------------------------------

    def _by_bound(self, windows: LateWindows) -> Iterator[tuple[Ints, LateWindows, _Known]]:
        """Groups the windows by their bounds, which are few: the rows of each group, its windows, and what is known.

        Windows with a bound of zero are in no group.
        """
        for bound_us in np.unique(windows.bound_us[windows.bound_us > 0]).tolist():
            rows = np.flatnonzero(windows.bound_us == bound_us)
            yield rows, windows.some(rows), self._distribution(bound_us)

    def _due(self, windows: LateWindows, known: _Known) -> Flags:
        left = self._left(windows)
        due = np.zeros(len(windows), np.bool_)
        waiting = np.flatnonzero((windows.pending > 0) & (left != 1))
        if not len(waiting):
            return due
        windows, left = windows.some(waiting), left[waiting]
        instant, level = self._rests(known, windows.bound_us[0], self._last(windows), left)
        to_come = self._to_come(windows, known)
        staleness = _stale(windows, windows.lateness_us, windows.pending, windows.late_events + to_come)
        most = level
        reached = staleness
        if self.bound is not None:
            most = np.full(len(windows), self.bound)
            # The staleness if one more event came now. Checked beforehand, since after the event it is too late.
            total = windows.late_events + 1.0 + to_come
            reached = _stale(windows, windows.lateness_us, windows.pending + 1.0, total)
        now = reached >= most * NEARLY
        now |= (staleness >= level * NEARLY) & (windows.lateness_us >= instant * windows.bound_us)
        if windows.step_us:
            next_look = self._at_next_look(windows, known, to_come)
            late = np.flatnonzero(~now & (next_look > most))
            if self.bound is None and len(late):
                # Now is too early and the next check is too late: choose the one with the smaller maximum.
                _, after = self._rests(known, windows.bound_us[0], windows.lateness_us[late], left[late] - 1)
                late = late[next_look[late] > np.maximum(most[late], after)]
            now[late] = True
        due[waiting] = now
        return due

    def _next_due_us(self, windows: LateWindows, known: _Known) -> Ints:
        left = self._left(windows)
        next_us = never(windows)
        waiting = np.flatnonzero((windows.pending > 0) & (left != 1))
        if not len(waiting):
            return next_us
        windows = windows.some(waiting)
        instant, level = self._rests(known, windows.bound_us[0], self._last(windows), left[waiting])
        at = self._reaches(windows, known, 0.0, level)
        if self.bound is not None:
            latest = self._reaches(windows, known, 1.0, np.full(len(windows), self.bound))
            at = np.minimum(latest - windows.step_us / windows.bound_us, np.maximum(at, instant))
        # Otherwise it is never due, or only when the final execution comes anyway.
        soon = at < 1
        at_us = np.ceil(at[soon] * windows.bound_us[soon]).astype(np.int64)
        at_us = np.maximum(at_us, windows.lateness_us[soon] + 1)
        next_us[waiting[soon]] = np.where(at_us < windows.bound_us[soon], at_us, NEVER)
        return next_us

    def _at_next_look(self, windows: LateWindows, known: _Known, to_come: Floats) -> Floats:
        """Returns the staleness one step of the watermark ahead, or at the purge, with the events expected until then.

        With a bound, plus one standard deviation: at the next check it is too late to react to these events.
        """
        at_us = windows.lateness_us + np.minimum(windows.step_us, windows.bound_us - windows.lateness_us)
        share = known.late.at_all(at_us / windows.bound_us) - known.late.at_all(windows.lateness_us / windows.bound_us)
        more = self._expected(windows, known) * np.maximum(share, 0.0)
        if self.bound is not None:
            more += np.sqrt(more)
        total = windows.late_events + np.maximum(to_come, more)
        return _stale(windows, at_us, windows.pending + more, total)

    def _reaches(self, windows: LateWindows, known: _Known, more: float, level: Floats) -> Floats:
        """Returns the lateness at which staleness reaches ``level`` if no event comes before, and ``more`` come then.

        The lateness is a share of the bound. It solves (u - last) * pending = level * (came + cautious * (1 - F(u))):
        the longer no event comes, the fewer are still expected.
        """
        cautious = self._cautious(windows, known)
        pending, came = windows.pending + more, windows.late_events + more
        last = windows.executed_us / windows.bound_us
        return known.late.first(pending, level * cautious, level * (came + cautious) + last * pending)

    def _last(self, windows: LateWindows) -> Ints:
        """Returns the lateness of the last late execution; ON_TIME if there was none yet."""
        return np.where((windows.executions > 0) | (windows.executed_us != 0), windows.executed_us, ON_TIME)

    def _left(self, windows: LateWindows) -> Ints:
        """Returns the remaining executions, including the final one; 0: no limit, the bound decides."""
        if self.executions is None:
            return np.zeros(len(windows), np.int64)
        return np.maximum(self.executions - windows.executions, 1)

    def _expected(self, windows: LateWindows, known: _Known) -> Floats:
        return self.forecast.expected_late(windows.on_time_events) * known.within

    def _cautious(self, windows: LateWindows, known: _Known) -> Floats:
        """Returns how many late events each window will get in all; with a bound, a cautious number."""
        expected = self._expected(windows, known)
        if self.bound is None:
            return expected
        return np.maximum(expected - CAUTION * np.sqrt(expected), 0.0)

    def _to_come(self, windows: LateWindows, known: _Known) -> Floats:
        """Returns how many late events each window will still get; with a bound, a cautious number."""
        return self._cautious(windows, known) * (1.0 - known.late.at_all(windows.lateness_us / windows.bound_us))

    # -- what follows from the forecast -------------------------------------------------------------------

    def _distribution(self, bound_us: int) -> _Known:
        if self.forecast.version != self._version:
            self._version = self.forecast.version
            self._known.clear()
        known = self._known.get(bound_us)
        if known is None:
            if len(self._known) >= REMEMBERED_DISTRIBUTIONS:
                del self._known[next(iter(self._known))]
            within = float(self.forecast.late_share(np.array([bound_us], dtype=np.float64))[0])
            late = LateDistribution.uniform()
            if within > 0:
                late = LateDistribution.sampled(self.forecast.late_share, horizon=bound_us)
            # With a fixed number the last execution is at the purge, since events may come later than expected.
            late = late.to_horizon() if self.bound is None else late
            known = self._known[bound_us] = _Known(late, within)
        return known

    def _rests(self, known: _Known, bound_us: int, last_us: Ints, left: Ints) -> tuple[Floats, Floats]:
        """Returns, for each window, ``instant`` and ``level`` of the plan after its last execution.

        ``last_us``: from :meth:`_last`. ``left``: from :meth:`_left`.
        """
        instant, level = np.empty(len(left)), np.empty(len(left))
        for number in np.unique(left).tolist():
            rows = np.flatnonzero(left == number)
            plans = self._plans(known, int(bound_us), last_us[rows], number)
            at = np.searchsorted(plans.last_us, last_us[rows])
            instant[rows], level[rows] = plans.instant[at], plans.level[at]
        return instant, level

    def _plans(self, known: _Known, bound_us: int, last_us: Ints, left: int) -> _Plans:
        """Plans that include those for ``last_us``."""
        wanted = np.unique(last_us)
        plans = known.plans.get(left, _NO_PLANS)
        at = np.searchsorted(plans.last_us, wanted)
        missing = wanted[np.append(plans.last_us, NEVER)[at] != wanted]
        if not len(missing):
            return plans
        found = [self._plan(known.late, bound_us, us, left) for us in missing.tolist()]
        new = _Plans(
            missing,
            np.array([rest.instants[0] if rest.executions else 1.0 for rest in found]),
            np.array([rest.maximum for rest in found]),
        )
        at = np.searchsorted(plans.last_us, missing)
        plans = _Plans(*(np.insert(old, at, more) for old, more in zip(plans, new, strict=True)))
        kept = sum(len(p.last_us) for k in self._known.values() for p in k.plans.values())
        if kept + len(missing) <= REMEMBERED_PLANS:
            known.plans[left] = plans
            return plans
        # Keep what is wanted now: it is likely to be wanted again.
        for k in self._known.values():
            k.plans.clear()
        at = np.searchsorted(plans.last_us, wanted)
        known.plans[left] = _Plans(*(column[at[:REMEMBERED_PLANS]] for column in plans))
        return plans

    def _plan(self, late: LateDistribution, bound_us: int, last_us: int, left: int) -> TriggerPlan:
        after = None if last_us == ON_TIME else last_us / bound_us
        return plan(late, bound=self.bound, executions=left or None, after=after)


def _stale(windows: LateWindows, at_us: Ints, events: Any, total: Any) -> Floats:
    """(t * n) / (T * N) at a lateness, with ``events`` since the last execution. 0 if the ``total`` is 0."""
    waited = (at_us - windows.executed_us) / windows.bound_us * events
    return np.asarray(np.divide(waited, total, out=np.zeros(len(windows)), where=total > 0))
