"""Triggers decide whether a late window runs again now (paper 3.4). Pure; independent of how windows are laid out.

A trigger decides about one late window at a time, from a view of it. It does not decide the on-time execution, nor the
final one: a window that is purged runs once more if and only if events came since its last execution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from aion.core.trigger.distribution import LateDistribution
from aion.core.trigger.planner import TriggerPlan, check, plan

REMEMBERED_PLANS = 50_000
"""The most plans that a staleness trigger caches: one for each lateness of a last execution, about 300 bytes each."""
REMEMBERED_DISTRIBUTIONS = 64
"""The most distributions that it caches: one for each different bound, about 40 kB each."""
MOST_PLANNED = 20
"""The most executions that :meth:`Trigger.planned` returns."""
NEARLY = 1 - 1e-9
"""A level counts as reached this close to it, since instants are rounded to microseconds."""
CAUTION = 2.0
"""How many standard deviations (Poisson) below the expected number of late events the trigger plans for.

Measured with `aion experiment staleness`, on streams of 20 to 200 events and a bound of 0.05: with 0, 62 to 100 % of
the windows keep the bound; with 2, 91 to 100 % do, for at most 0.7 more executions.
"""


class LateView(NamedTuple):
    """A late window as its trigger sees it. Lateness is the watermark minus the window's end, in microseconds.

    ``lateness_us``: the lateness now. ``executed_us``: the lateness of the last execution, 0 for the on-time one.
    ``pending``: events since then. ``late_events``: all late events so far, including the pending ones. ``bound_us``:
    the lateness at which the window is purged, the horizon T. ``on_time_events``: events that the on-time execution
    saw. ``executions``: late executions so far. ``step_us``: how far the watermark typically moves from one check to
    the next; 0 if unknown, or if it moves so often that it does not matter.
    """

    lateness_us: int
    executed_us: int
    pending: int
    late_events: int
    bound_us: int
    on_time_events: int = 0
    executions: int = 0
    step_us: int = 0


class Trigger(Protocol):
    def due(self, view: LateView) -> bool:
        """Whether the window runs now. Called at the end of a batch, and at the lateness from ``next_due_us``."""

    def next_due_us(self, view: LateView) -> int | None:
        """The lateness at which to check again even if no event comes. None: only events can make the window due.

        For a window that is not due now. Always later than now and before the bound.
        """

    def planned(self, view: LateView) -> tuple[int, ...]:
        """The next latenesses at which it will run if events come as expected, at most ``MOST_PLANNED``.

        Empty if only events decide. Always later than now and before the bound.
        """

    def to_json(self) -> dict[str, Any]:
        """JSON values from which :func:`trigger_from_json` makes the same trigger."""


class EveryBatchTrigger:
    """A late window runs once in each batch that brought it late events."""

    def planned(self, view: LateView) -> tuple[int, ...]:
        return ()

    def to_json(self) -> dict[str, Any]:
        return {"kind": "every_batch"}

    def due(self, view: LateView) -> bool:
        return view.pending > 0

    def next_due_us(self, view: LateView) -> int | None:
        return None


class IntervalTrigger:
    """A late window runs once in each interval of ``every_us`` after its end (the paper's deltat).

    It runs at the start of the interval if events are pending, otherwise as soon as one comes.
    """

    def __init__(self, every_us: int) -> None:
        if every_us < 1:
            raise ValueError(f"an interval of {every_us} µs is not above 0")
        self.every_us = every_us

    def due(self, view: LateView) -> bool:
        return view.pending > 0 and view.lateness_us // self.every_us > view.executed_us // self.every_us

    def next_due_us(self, view: LateView) -> int | None:
        if not view.pending:
            return None
        return next(iter(self.planned(view)), None)

    def planned(self, view: LateView) -> tuple[int, ...]:
        start_us = (max(view.executed_us, view.lateness_us) // self.every_us + 1) * self.every_us
        return tuple(range(start_us, view.bound_us, self.every_us)[:MOST_PLANNED])

    def to_json(self) -> dict[str, Any]:
        return {"kind": "interval", "every_us": self.every_us}


class CountTrigger:
    """A late window runs as soon as ``every`` events have come since its last execution (the paper's deltaev)."""

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"a count of {every} events is less than 1")
        self.every = every

    def due(self, view: LateView) -> bool:
        return view.pending >= self.every

    def next_due_us(self, view: LateView) -> int | None:
        return None

    def planned(self, view: LateView) -> tuple[int, ...]:
        return ()

    def to_json(self) -> dict[str, Any]:
        return {"kind": "count", "every": self.every}


class Forecast(Protocol):
    """The expected late events of a window."""

    @property
    def version(self) -> int:
        """Changes whenever the forecast has moved enough to plan again."""

    def late_share(self, lateness_us: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of late events that have come by each lateness: never descending, in [0, 1], 0 before lateness 0.

        It is only called up to a window's bound. The share up to the bound then counts as the whole.
        """

    def expected_late(self, on_time_events: int) -> float:
        """The expected number of late events, however late, of a window with ``on_time_events`` events in time."""


class NothingKnown:
    """The forecast before anything is learnt: late events come evenly up to the bound, and their number is 0."""

    version = 0

    def late_share(self, lateness_us: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(lateness_us / 2**63, dtype=np.float64)

    def expected_late(self, on_time_events: int) -> float:
        return 0.0


class _Rest(NamedTuple):
    """The plan after an execution: the next instant, as a share of the horizon, and the plan's largest staleness."""

    instant: float
    level: float


class _Known(NamedTuple):
    """For windows with one bound: when late events come within it, and which share of all late events that is."""

    late: LateDistribution
    within: float


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
        self._rests: dict[tuple[int, int | None, int], _Rest] = {}

    def due(self, view: LateView) -> bool:
        left = self._left(view)
        if not view.pending or left == 1:
            return False
        rest = self._rest(view.bound_us, self._last(view), left)
        most = rest.level if self.bound is None else self.bound
        staleness = self.staleness(view)
        if (staleness if self.bound is None else self._after_one_more(view)) >= most * NEARLY:
            return True
        if staleness >= rest.level * NEARLY and view.lateness_us >= rest.instant * view.bound_us:
            return True
        if not view.step_us:
            return False
        next_look = self._at_next_look(view)
        if self.bound is None and next_look > most:
            # Now is too early and the next check is too late: choose the one with the smaller maximum.
            most = max(most, self._rest(view.bound_us, view.lateness_us, left - 1).level)
        return next_look > most

    def next_due_us(self, view: LateView) -> int | None:
        left = self._left(view)
        if not view.pending or left == 1:
            return None
        rest = self._rest(view.bound_us, self._last(view), left)
        as_planned = self._reaches(view, 0, rest.level)
        if self.bound is None:
            at = as_planned
        else:
            latest = self._reaches(view, 1, self.bound) - view.step_us / view.bound_us
            at = min(latest, max(as_planned, rest.instant))
        if at >= 1:  # never, or when the final execution comes anyway
            return None
        at_us = max(math.ceil(at * view.bound_us), view.lateness_us + 1)
        return at_us if at_us < view.bound_us else None

    def planned(self, view: LateView) -> tuple[int, ...]:
        left = self._left(view)
        if left == 1:
            return ()
        late = self._distribution(view.bound_us).late
        found = self._plan(late, view.bound_us, self._last(view), left)
        planned = found.instants_us(view.bound_us)[:MOST_PLANNED].tolist()
        next_us = self.next_due_us(view)
        from_us = view.lateness_us if next_us is None else next_us
        later = tuple(us for us in planned if from_us < us < view.bound_us)
        return later if next_us is None else (next_us, *later)[:MOST_PLANNED]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "staleness", "bound": self.bound, "executions": self.executions}

    def staleness(self, view: LateView) -> float:
        """The staleness of the window now, against ``expected_total``."""
        total = self.expected_total(view)
        return (view.lateness_us - view.executed_us) / view.bound_us * view.pending / total if total else 0.0

    def expected_total(self, view: LateView) -> float:
        """N: the late events that came, plus those that will still come. With a bound, a cautious number.

        The plain expectation is too high for every other window, and those would not keep the bound.
        """
        late, cautious = self._distribution(view.bound_us).late, self._cautious(view)
        return view.late_events + cautious * (1.0 - late.at(view.lateness_us / view.bound_us))

    # -- what follows from the forecast -------------------------------------------------------------------

    def _after_one_more(self, view: LateView) -> float:
        """The staleness if one more event came now. Checked beforehand, since after the event it is too late."""
        return self.staleness(view._replace(pending=view.pending + 1, late_events=view.late_events + 1))

    def _at_next_look(self, view: LateView) -> float:
        """The staleness one step of the watermark ahead, or at the purge, with the events expected until then.

        With a bound, plus one standard deviation: at the next check it is too late to react to these events.
        """
        late = self._distribution(view.bound_us).late
        at_us = min(view.lateness_us + view.step_us, view.bound_us)
        share = late.at(at_us / view.bound_us) - late.at(view.lateness_us / view.bound_us)
        more = self._expected(view) * max(share, 0.0)
        if self.bound is not None:
            more += math.sqrt(more)
        total = max(self.expected_total(view), view.late_events + more)
        return (at_us - view.executed_us) / view.bound_us * (view.pending + more) / total

    def _reaches(self, view: LateView, more: int, level: float) -> float:
        """The lateness at which staleness reaches ``level`` if no event comes before, and ``more`` come then.

        The lateness is a share of the bound. It solves (u - last) * pending = level * (came + cautious * (1 - F(u))):
        the longer no event comes, the fewer are still expected.
        """
        late, cautious = self._distribution(view.bound_us).late, self._cautious(view)
        pending, came = view.pending + more, view.late_events + more
        last = view.executed_us / view.bound_us
        return late.first(pending, level * cautious, level * (came + cautious) + last * pending)

    def _last(self, view: LateView) -> int | None:
        """The lateness of the last late execution; None if there was none yet."""
        return view.executed_us if view.executions or view.executed_us else None

    def _left(self, view: LateView) -> int:
        """The remaining executions, including the final one; 0: no limit, the bound decides."""
        return 0 if self.executions is None else max(self.executions - view.executions, 1)

    def _expected(self, view: LateView) -> float:
        return self.forecast.expected_late(view.on_time_events) * self._distribution(view.bound_us).within

    def _cautious(self, view: LateView) -> float:
        """How many late events the whole window will get; with a bound, a cautious number."""
        expected = self._expected(view)
        if self.bound is None:
            return expected
        return max(expected - CAUTION * math.sqrt(expected), 0.0)

    def _distribution(self, bound_us: int) -> _Known:
        if self.forecast.version != self._version:
            self._version = self.forecast.version
            self._known.clear()
            self._rests.clear()
        known = self._known.get(bound_us)
        if known is None:
            _make_room(self._known, REMEMBERED_DISTRIBUTIONS)
            within = float(self.forecast.late_share(np.array([bound_us], dtype=np.float64))[0])
            late = LateDistribution.uniform()
            if within > 0:
                late = LateDistribution.sampled(self.forecast.late_share, horizon=bound_us)
            # With a fixed number the last execution is at the purge, since events may come later than expected.
            late = late.to_horizon() if self.bound is None else late
            known = self._known[bound_us] = _Known(late, within)
        return known

    def _rest(self, bound_us: int, last_us: int | None, left: int) -> _Rest:
        """The plan after an execution. ``last_us``: from :meth:`_last`. ``left``: from :meth:`_left`."""
        late = self._distribution(bound_us).late
        key = (bound_us, last_us, left)
        rest = self._rests.get(key)
        if rest is None:
            _make_room(self._rests, REMEMBERED_PLANS)
            found = self._plan(late, bound_us, last_us, left)
            instant = float(found.instants[0]) if found.executions else 1.0
            rest = self._rests[key] = _Rest(instant, found.maximum)
        return rest

    def _plan(self, late: LateDistribution, bound_us: int, last_us: int | None, left: int) -> TriggerPlan:
        after = None if last_us is None else last_us / bound_us
        return plan(late, bound=self.bound, executions=left or None, after=after)


def trigger_from_json(value: Mapping[str, Any], forecast: Forecast | None = None) -> Trigger:
    """The trigger that wrote ``value``. Raises ValueError for an unknown kind."""
    match value["kind"]:
        case "every_batch":
            return EveryBatchTrigger()
        case "interval":
            return IntervalTrigger(value["every_us"])
        case "count":
            return CountTrigger(value["every"])
        case "staleness":
            return StalenessTrigger(value["bound"], executions=value["executions"], forecast=forecast)
    raise ValueError(f"unknown trigger {value['kind']!r}")


def _make_room(kept: dict[Any, Any], at_most: int) -> None:
    """Remove the oldest entry if there are ``at_most``."""
    if len(kept) >= at_most:
        del kept[next(iter(kept))]
