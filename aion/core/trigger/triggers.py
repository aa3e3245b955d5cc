"""When: whether a late window runs again now (paper 3.4). Pure; knows nothing of how windows are laid out.

A trigger is asked about one late window at a time, by a view of it. The on-time execution before it is not a trigger's,
nor is the final one: a window that is purged runs once more if and only if something came since its last execution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from aion.core.trigger.distribution import LateDistribution
from aion.core.trigger.planner import Solver, TriggerPlan, check, plan

REMEMBERED_PLANS = 50_000
"""That a staleness trigger keeps at most, for windows last executed at so many latenesses: some 300 bytes each."""
REMEMBERED_DISTRIBUTIONS = 64
"""The same, for windows with so many different bounds: some 40 kB each."""
MOST_PLANNED = 20
"""Executions that :meth:`Trigger.planned` tells of."""
NEARLY = 1 - 1e-9
"""A level counts as reached this close to it: instants are rounded to microseconds, and so is arithmetic."""
CAUTION = 2.0
"""Standard deviations (of a Poisson number) by which a window may get fewer late events than are expected of it.

Tried on streams of 20 to 200 events and a bound of 0.05 (those of `aion experiment staleness`): with none, 62 to 100 %
of the windows keep the bound, with two 91 to 100 %, for at most 0.7 executions more.
"""


class LateView(NamedTuple):
    """A late window as its trigger sees it. Lateness is the watermark minus the window's end, in microseconds.

    ``lateness_us``: now. ``executed_us``: that of the last execution, 0 for the on-time one. ``pending``: events since
    then. ``late_events``: all so far, also the pending ones. ``bound_us``: the lateness at which the window is
    purged, the horizon T. ``on_time_events``: those the on-time execution saw. ``executions``: late executions so
    far. ``step_us``: how far the watermark typically moves from one look to the next; 0: not known, or so often that
    it does not matter.
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
        """Whether the window runs now. Asked at the end of a batch, and at what ``next_due_us`` said."""

    def next_due_us(self, view: LateView) -> int | None:
        """The lateness at which to look again even if no event comes; None: only events can make it due.

        For a window that is not due now. Always later than now and before the bound.
        """

    def planned(self, view: LateView) -> tuple[int, ...]:
        """The latenesses at which it will run if events come as expected, the next at most ``MOST_PLANNED`` of them.

        Empty where only events decide. Always later than now and before the bound.
        """

    def to_json(self) -> dict[str, Any]:
        """What :func:`trigger_from_json` makes the same trigger of."""


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
    """Once in each interval of ``every_us`` after the window's end in which events are pending (the paper's deltat).

    At its start, unless events come only later in it: then as soon as one comes.
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
    """As soon as ``every`` events have come since the last execution (the paper's deltaev)."""

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
    """What is known of the late events that a window will get."""

    @property
    def version(self) -> int:
        """Another number whenever what follows has moved enough to plan again."""

    def late_share(self, lateness_us: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of late events that have come by each lateness: never descending, in [0, 1]; nothing before 0.

        Beyond a window's bound it is not asked; what comes up to the bound is then taken for the whole.
        """

    def expected_late(self, on_time_events: int) -> float:
        """The number of late events to expect, up to where ``late_share`` is 1, of a window with so many on time."""


class NothingKnown:
    """The forecast before anything is learnt: late events come evenly up to the bound, and no number is expected."""

    version = 0

    def late_share(self, lateness_us: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(lateness_us / 2**63, dtype=np.float64)

    def expected_late(self, on_time_events: int) -> float:
        return 0.0


class _Rest(NamedTuple):
    """The plan for what follows an execution: the next one, in shares of the horizon, and its largest staleness."""

    instant: float
    level: float


class _Known(NamedTuple):
    """Of windows with one bound: when their late events come, and which share of all late events those are."""

    late: LateDistribution
    within: float


class StalenessTrigger:
    """As few executions as keep staleness below a bound, or the best so many of them (paper 3.4).

    The plan is made for the forecast, from the last execution on. What really comes differs from it: a window runs

    - at the planned instant, if it is as stale then as planned. Where less came, it waits for that; so nothing is run
      where nothing came;
    - earlier, once one more event would take its actual staleness above the bound, or the events expected until the
      next look would.

    Actual staleness is measured against ``expected_total``, which is cautious: a window that gets fewer events than
    that was staler than it seemed. Before anything is learnt it is the events that came, which is never too many: the
    bound then holds whatever comes, at the price of more executions.

    With ``executions``, the final one among them, there is no bound: a window runs once it is as stale as the plan for
    the rest of its executions must allow, and that is planned again after each.

    What no trigger can help: events that come together count for the time since the last execution, however early
    that was, and when they are executed at once.

    Plans are kept as long as the forecast's version stays, for all windows that were last executed at one lateness.
    """

    def __init__(
        self,
        bound: float | None = None,
        *,
        executions: int | None = None,
        solver: Solver = "exact",
        forecast: Forecast | None = None,
    ) -> None:
        """Without a ``forecast`` nothing is known. Raises ValueError as ``aion.core.trigger.planner.check`` does."""
        check(bound, executions, solver)
        self.bound = bound
        self.executions = executions
        self.solver: Solver = solver
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
            # Too early or too late: whichever leaves the smaller maximum.
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
        return {"kind": "staleness", "bound": self.bound, "executions": self.executions, "solver": self.solver}

    def staleness(self, view: LateView) -> float:
        """The staleness of the window now, against ``expected_total``."""
        total = self.expected_total(view)
        return (view.lateness_us - view.executed_us) / view.bound_us * view.pending / total if total else 0.0

    def expected_total(self, view: LateView) -> float:
        """N: the late events that came, and those that will: nearly always at least so many, where there is a bound.

        A number that is merely expected is too large in every other window, and the bound is not kept there.
        """
        late, sure = self._distribution(view.bound_us).late, self._sure(view)
        return view.late_events + sure * (1.0 - late.at(view.lateness_us / view.bound_us))

    # -- what follows from the forecast -------------------------------------------------------------------

    def _after_one_more(self, view: LateView) -> float:
        """StalenessTrigger if another event came now: after it, it would be too late to have executed before it."""
        return self.staleness(view._replace(pending=view.pending + 1, late_events=view.late_events + 1))

    def _at_next_look(self, view: LateView) -> float:
        """StalenessTrigger one step of the watermark ahead, or at the purge, with the events expected until then.

        With a bound one standard deviation more of them: what comes at the next look cannot be kept from it any more.
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
        """The lateness, as a share of the bound, at which staleness is ``level`` if no event comes but ``more`` then.

        (u - last) * pending = level * (came + sure * (1 - F(u))): every moment without an event, fewer are expected.
        """
        late, sure = self._distribution(view.bound_us).late, self._sure(view)
        pending, came = view.pending + more, view.late_events + more
        last = view.executed_us / view.bound_us
        return late.first(pending, level * sure, level * (came + sure) + last * pending)

    def _last(self, view: LateView) -> int | None:
        """The lateness of the last late execution; None: there was none yet."""
        return view.executed_us if view.executions or view.executed_us else None

    def _left(self, view: LateView) -> int:
        """Executions that may still be made, the final one among them; 0: as many as the bound asks for."""
        return 0 if self.executions is None else max(self.executions - view.executions, 1)

    def _expected(self, view: LateView) -> float:
        return self.forecast.expected_late(view.on_time_events) * self._distribution(view.bound_us).within

    def _sure(self, view: LateView) -> float:
        """The late events of the whole window to count on."""
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
            # Of so many executions one is left for the end: what is not expected after it may come all the same.
            late = late.to_horizon() if self.bound is None else late
            known = self._known[bound_us] = _Known(late, within)
        return known

    def _rest(self, bound_us: int, last_us: int | None, left: int) -> _Rest:
        """The plan for what follows an execution; ``last_us`` as of ``_last``, ``left`` as of ``_left``."""
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
        return plan(late, bound=self.bound, executions=left or None, after=after, solver=self.solver)


def trigger_from_json(value: Mapping[str, Any], forecast: Forecast | None = None) -> Trigger:
    """The trigger that said so. Raises ValueError for a kind that there is not."""
    match value["kind"]:
        case "every_batch":
            return EveryBatchTrigger()
        case "interval":
            return IntervalTrigger(value["every_us"])
        case "count":
            return CountTrigger(value["every"])
        case "staleness":
            return StalenessTrigger(
                value["bound"], executions=value["executions"], solver=value["solver"], forecast=forecast
            )
    raise ValueError(f"there is no trigger {value['kind']!r}")


def _make_room(kept: dict[Any, Any], at_most: int) -> None:
    """The oldest goes."""
    if len(kept) >= at_most:
        del kept[next(iter(kept))]
