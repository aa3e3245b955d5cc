"""The bound that follows the data, and what the staleness trigger is to expect (paper section 3.4). Pure.

It is told what comes and when the watermark moves; once per epoch or two, or per batch while history is young, it asks
again what history supports. Between, new windows get the same bound. All that it will decide follows from its snapshot
and what it is told: no clock, no chance.

Shards that learn together hear of each other whatever happens to be known where they are: other attempts hear other
things. So what is found together never counts in the batch in which it is found, but from the shard's next snapshot on:
what a batch does follows from the version that it starts from and from its events, however often it is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from aion.core.lateness.change import change
from aion.core.lateness.estimate import Arrivals, arrivals
from aion.core.lateness.histogram import LatenessHistogram
from aion.core.lateness.models import FAMILIES, NAMES, choose, fit, modelled
from aion.core.lateness.observe import HALF_LIFE_US, Floats, Lateness, room_us
from aion.core.lateness.shared import LearntBound, Outlook, heard, observations
from aion.core.lateness.sketch import Ints
from aion.core.trigger.triggers import NothingKnown
from aion.errors import FormatError
from policies.cleanup import BoundDecision, Cleanup, Reason, cut_to_room, decide

SNAPSHOT_VERSION = 1
MOVED = 0.05
"""By so much of the late events, anywhere, or by so much of their number, a distribution is another one."""
FEW_EVENTS = 30
"""Fewer late events make no outlook."""
ASKED_PER_SPAN = 32
"""By so much of itself history has to grow before it is asked again."""
_POINTS = 48
_HALVINGS = 12


@dataclass(frozen=True, slots=True)
class LearntForecast:
    """What is expected of a window with a given bound, for planning its executions.

    Two forecasts of the same ``version`` and ``bound_us`` are the same. Version 0: nothing is known; late events are
    taken to come evenly until the bound, and none is expected.
    """

    bound_us: int
    outlook: Outlook | None

    @property
    def version(self) -> int:
        return 0 if self.outlook is None else self.outlook.version

    def late_share(self, lateness_us: Any) -> Floats:
        """The share of the late events that come in time for the bound that has come by then, of any shape; 0 to 1."""
        at = np.asarray(lateness_us, np.float64)
        # The last lateness that is in time is one microsecond below the bound.
        last = max(0, self.bound_us - 1)
        if self.outlook is None:
            return np.clip((at + 1.0) / (last + 1.0), 0.0, 1.0)
        within = 1.0 - float(self.outlook.later_than(last))
        if within <= 0.0:
            return np.where(at >= last, 1.0, 0.0)
        return np.where(at >= last, 1.0, np.clip((1.0 - self.outlook.later_than(at)) / within, 0.0, 1.0))

    def expected_late(self, on_time_events: float | None = None) -> float:
        """How many events will come late but in time for the bound to a window that had so many; None: as usual."""
        if self.outlook is None or self.bound_us == 0:
            return 0.0
        usual = self.outlook.per_window if on_time_events is None else on_time_events
        return usual * self.outlook.late_per_on_time * (1.0 - float(self.outlook.later_than(self.bound_us - 1)))


class Expected:
    """What the staleness trigger is told of a window's late events: an :class:`aion.core.trigger.triggers.Forecast`."""

    def __init__(self, bound: AdaptiveBound) -> None:
        self._bound = bound
        self._nothing = NothingKnown()

    @property
    def version(self) -> int:
        return 0 if self._bound.outlook is None else self._bound.outlook.version

    def late_share(self, lateness_us: Floats) -> Floats:
        outlook = self._bound.outlook
        return self._nothing.late_share(lateness_us) if outlook is None else 1.0 - outlook.later_than(lateness_us)

    def expected_late(self, on_time_events: int) -> float:
        outlook = self._bound.outlook
        return 0.0 if outlook is None else on_time_events * outlook.late_per_on_time


class AdaptiveBound:
    """Learns lateness and decides the bound of new windows.

    ``model``: one of :data:`aion.core.lateness.models.NAMES`. ``of_all``: whether ``asked.coverage`` is of all events
    instead of the late ones. ``ahead_us``: how much event time is kept besides the bound, which ``max_state`` has to
    hold as well: the longest window and the watermark's delay. ``together``: whether it decides with others of its
    query, see :meth:`hear`; what it decides counts from the next ``snapshot`` on. ``snapshot``: of :meth:`to_json`,
    with the same or other settings. Raises ValueError for an unknown model, FormatError for a snapshot that a newer
    Aion wrote.
    """

    def __init__(
        self,
        asked: Cleanup,
        *,
        half_life_us: int = HALF_LIFE_US,
        model: str = "auto",
        of_all: bool = False,
        ahead_us: int = 0,
        together: bool = False,
        snapshot: Mapping[str, Any] | None = None,
    ) -> None:
        if model not in NAMES:
            raise ValueError(f"model {model!r}: there are {', '.join(NAMES)}")
        self.asked = asked
        self.model = model
        self.of_all = of_all
        self.ahead_us = ahead_us
        self.together = together
        self.lateness = Lateness(half_life_us)
        self.histogram = LatenessHistogram()
        self._others: list[Lateness] = []
        self._shards = 1
        self._room_us: int | None = None
        # What holds, and what will from the next snapshot on: the same unless shards decide together.
        self._holding = self._coming = LearntBound(decide(asked, None))
        self.decision: BoundDecision = self._holding.decision
        if snapshot is not None:
            self._restore(snapshot)

    @classmethod
    def of_snapshot(cls, snapshot: Mapping[str, Any]) -> AdaptiveBound:
        """As it was when it said so, with the settings that it had then."""
        told = dict(snapshot["learnt_bound"]["settings"])
        asked = Cleanup(**{field.name: told.pop(field.name) for field in fields(Cleanup)})
        return cls(asked, **told, snapshot=snapshot)

    # -- what it is told ----------------------------------------------------------------------------------

    def observe(self, end_us: int, at_us: int, events: int) -> None:
        """See :meth:`aion.core.lateness.observe.Lateness.observe`."""
        self.lateness.observe(end_us, at_us, events)
        self.histogram.observe(at_us - end_us, events)

    def observe_on_time(self, end_us: int, events: int) -> None:
        """See :meth:`aion.core.lateness.observe.Lateness.observe_on_time`."""
        self.lateness.observe_on_time(end_us, events)

    def observe_all_on_time(self, ends_us: Ints, events: Ints) -> None:
        """See :meth:`aion.core.lateness.observe.Lateness.observe_all_on_time`."""
        self.lateness.observe_all_on_time(ends_us, events)

    def observe_state(self, slice_us: int, at_us: int, size_bytes: int) -> None:
        """See :meth:`aion.core.lateness.observe.Lateness.observe_state`."""
        self.lateness.observe_state(slice_us, at_us, size_bytes)

    def advance(self, from_us: int | None, to_us: int) -> None:
        """The watermark moves; before anything is done about it. ``from_us`` is None the first time.

        All that came while it was at ``from_us`` has been observed, so history is complete up to there, and not to
        ``to_us``.
        """
        if from_us is None:
            # Windows that end before the first watermark had all their events in time, whenever they came.
            self.lateness.forget_before(to_us)
        elif self.asks(from_us):
            self._coming = self._ask(from_us)
            if not self.together:
                self._hold(self._coming)
        self._others = []

    # -- what others tell ---------------------------------------------------------------------------------

    def hear(self, shards: int, told: Iterable[Any]) -> None:
        """``told``: the ``learnt_bound`` of the snapshots of the query's other shards; ``shards``: how many those are.

        What is newer than what this one stands on is taken over, from the next snapshot on. Whatever cannot be read, or
        was found with other settings, is passed over.
        """
        self._shards = 1 + shards
        best = max([self._coming, *heard(told, self._settings())], key=lambda learnt: learnt.age)
        if best.restarted_us is not None and best.restarted_us != self._coming.restarted_us:
            self.lateness.forget_before(best.restarted_us)
            if not self.lateness.epochs:
                self.lateness.restart(best.restarted_us)
        self._coming = best

    def asks(self, at_us: int | None) -> bool:
        """Whether history is asked again when the watermark moves on from ``at_us``: then :meth:`learn` before that."""
        coming = self._coming
        if at_us is None:
            return False
        if coming.next_us is None or coming.asked_us is None:
            return True
        # Where fewer shards are heard than before they are only coming back, as after a restart of their server.
        patience_us = coming.next_us - coming.asked_us if self._shards < coming.shards else 0
        return at_us >= coming.next_us + patience_us

    def learn(self, shards: int, told: Iterable[Any], learnt: Iterable[Any]) -> None:
        """As :meth:`hear`, and ``learnt``: the ``lateness`` of the same snapshots. It counts at the next advance only.

        If one of them has asked meanwhile, that is taken over: whoever asks at all asks of the same observations.
        """
        self.hear(shards, told)
        self._others = observations(learnt, self.lateness.half_life_us, self._coming.restarted_us)

    # -- what it says -------------------------------------------------------------------------------------

    @property
    def outlook(self) -> Outlook | None:
        """What is expected of late events; None as long as too little is known."""
        return self._holding.outlook

    @property
    def restarts(self) -> int:
        """Changes of regime so far."""
        return self._coming.restarts

    @property
    def last_change(self) -> str | None:
        """The last of them, in words."""
        return self._coming.last_change

    def bound_for_new_window(self) -> int:
        return self.decision.bound_us

    def reason_for_new_window(self) -> int:
        """The code of what decided that bound."""
        return self.decision.reason.code

    def forecast(self, bound_us: int) -> LearntForecast:
        """For a window with that bound."""
        return LearntForecast(bound_us, self.outlook)

    def still_to_come(self, bound_us: int, lateness_us: int = -1) -> float | None:
        """The share of all events of a window that is expected after ``lateness_us``, and in time for its bound.

        -1: after the end of the window. None as long as nothing is known.
        """
        if self.outlook is None:
            return None
        after, lost = self.outlook.later_than([lateness_us, bound_us - 1])
        return float(self.outlook.late_share * max(0.0, after - lost))

    # -- deciding -----------------------------------------------------------------------------------------

    def _hold(self, learnt: LearntBound) -> None:
        """From now on."""
        self._holding = learnt
        self.decision = cut_to_room(self.asked, learnt.decision, self._room_us, learnt.later_than)

    def _ask(self, at_us: int) -> LearntBound:
        before, lateness = self._coming, self.lateness
        if self._others:
            lateness = lateness.copy()
            for other in self._others:
                lateness.merge(other)
        cohorts = lateness.cohorts(at_us)
        of_all = arrivals(cohorts, of_all=True)
        if of_all is not None and lateness.span_us(at_us) >= before.patience_us:
            changed = change(cohorts, of_all)
            if changed is not None:
                return self._start_again(at_us, lateness.span_us(at_us), changed)
        known = of_all if self.of_all else arrivals(cohorts)
        outlook = before.outlook
        if known is not None:
            known = self._modelled(known)
            outlook = _looked_out(outlook, known)
        if self.asked.max_state_bytes is not None:
            # What a shard has room for is its own matter.
            own = cohorts if lateness is self.lateness else self.lateness.cohorts(at_us)
            room = room_us(own, self.asked.max_state_bytes, self.ahead_us)
            self._room_us = self._room_us if room is None else room
        decision = decide(self.asked, known, at_least_us=before.at_least_us)
        learnt = decision.reason is Reason.LEARNT
        after = replace(
            before,
            outlook=outlook,
            asked_us=at_us,
            next_us=at_us + max(lateness.width_us, lateness.span_us(at_us) // ASKED_PER_SPAN),
            shards=self._shards,
            at_least_us=0 if learnt else before.at_least_us,
            relearning=before.relearning and not learnt,
        )
        return replace(after, decision=_said(after, decision))

    def _start_again(self, at_us: int, span_us: int, changed: str) -> LearntBound:
        before = self._coming
        at_least_us = max(before.at_least_us, before.decision.bound_us)
        self.lateness.restart(at_us)
        after = replace(
            before,
            asked_us=at_us,
            next_us=None,
            shards=self._shards,
            restarts=before.restarts + 1,
            restarted_us=at_us,
            last_change=changed,
            relearning=True,
            patience_us=min(2 * span_us, self.lateness.half_life_us),
            at_least_us=at_least_us,
        )
        return replace(after, decision=_said(after, decide(self.asked, None, at_least_us=at_least_us)))

    def _modelled(self, known: Arrivals) -> Arrivals:
        if self.model == "empirical" or known.watched_us < self.asked.initial_bound_us:
            return known
        if self.model == "auto":
            found = choose(known)
        else:
            found = fit(known, (self.model,)).get(self.model) if self.model in FAMILIES else None
        return known if found is None or found.covariance is None else modelled(known, found)

    # -- snapshot -----------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Everything that later decisions follow from, as JSON values. ``learnt_bound`` is what others are told."""
        return {
            "version": SNAPSHOT_VERSION,
            "lateness": self.lateness.to_json(),
            "histogram": self.histogram.to_json(),
            "learnt_bound": {"settings": self._settings(), **self._coming.to_json()},
            "room_us": self._room_us,
        }

    def _settings(self) -> dict[str, Any]:
        return {**asdict(self.asked), "half_life_us": self.lateness.half_life_us, "model": self.model,
                "of_all": self.of_all, "ahead_us": self.ahead_us, "together": self.together}  # fmt: skip

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        if snapshot["version"] != SNAPSHOT_VERSION:
            raise FormatError(f"a bound of format {snapshot['version']}: this Aion reads {SNAPSHOT_VERSION}")
        self.lateness = Lateness.from_json(snapshot["lateness"], self.lateness.half_life_us)
        self.histogram = LatenessHistogram(snapshot.get("histogram"))
        learnt = LearntBound.from_json(snapshot["learnt_bound"])
        if snapshot["learnt_bound"]["settings"] == self._settings():
            self._room_us = snapshot["room_us"]
        else:
            # With other settings it is asked again at the next advance; until then what is asked now is conservative.
            learnt = replace(learnt, decision=self._holding.decision, asked_us=None, next_us=None, shards=1)
        self._coming = learnt
        self._hold(learnt)


def _said(learnt: LearntBound, decision: BoundDecision) -> BoundDecision:
    """With the change of regime that made it, until there is history again."""
    if not learnt.relearning:
        return decision
    conservative = decision.reason in (Reason.NO_HISTORY, Reason.UNSUPPORTED)
    return replace(
        decision,
        reason=Reason.CHANGED if conservative else decision.reason,
        why=f"lateness has changed: {learnt.last_change}; {decision.why}",
    )


def _looked_out(before: Outlook | None, known: Arrivals) -> Outlook | None:
    """A new outlook if the old one is not good any more."""
    late = float(known.later[0])
    if late * known.events < FEW_EVENTS:
        return before
    edges, later = known.edges_us, known.later / late
    if before is not None:
        moved = float(np.abs(before.later_than(edges) - later).max())
        more = abs(before.late_per_on_time * (1 - known.late_share) / max(1e-9, known.late_share) - 1)
        if moved <= MOVED and more <= MOVED:
            return before
    levels = np.concatenate([1 - np.arange(1, _POINTS) / _POINTS, 0.5 ** np.arange(1, _HALVINGS) / _POINTS])
    at = np.unique(np.concatenate([[0], np.searchsorted(-later, -levels), [len(later) - 1]]))
    at = at[at < len(later)]
    version = 1 if before is None else before.version + 1
    return Outlook(version, edges[at], later[at], known.late_share, known.per_window)
