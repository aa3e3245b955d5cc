"""The bound that follows the data, and the forecast of late events for the staleness trigger (paper section 3.4). Pure.

It observes arrivals and watermark advances. Every epoch or two (every batch while history is short) it recomputes what
history supports. In between, new windows get the same bound, unless the latest windows show that lateness has drifted
(:mod:`aion.core.lateness.drift`). Its decisions depend only on its snapshot and its inputs: there is no clock and no
randomness.

Shards that learn together read what other shards have published on the same host. Two attempts of one batch may read
different things. So a shared result, and all else that an evaluation changes, takes effect only from the shard's next
snapshot on, never in the batch that found it. That keeps a batch deterministic: what it does depends only on the
version it starts from and on its events.

Observations fade (:mod:`aion.core.lateness.observe`), but the counts of a Prometheus histogram must never decrease. So
the histogram for the metrics counts beside them, since the query began.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from aion.base.numbers import plus
from aion.core.lateness.change import change
from aion.core.lateness.conformal import Conformal
from aion.core.lateness.drift import Drift
from aion.core.lateness.estimate import LateArrivals, arrivals
from aion.core.lateness.models import FAMILIES, NAMES, choose, fit, modelled
from aion.core.lateness.observe import HALF_LIFE_US, Ahead, Floats, Lateness, room_us
from aion.core.lateness.shared import LearntBound, Outlook, newest, observations, usable
from aion.core.lateness.sketch import Ints
from aion.core.trigger.staleness import NothingKnown
from aion.errors import FormatError
from policies.cleanup import BoundDecision, Cleanup, Reason, carried, cut_to_room, decide

EDGES_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0)
"""The largest lateness of each bucket, in seconds. One more bucket, ``+Inf``, holds everything later."""

_EDGES_US = tuple(int(edge * 1e6) for edge in EDGES_S)
LABELS = (*(f"{edge:g}" for edge in EDGES_S), "+Inf")


class LatenessHistogram:
    """``events``: counts by bucket, not cumulated. ``seconds``: the sum of all latenesses."""

    def __init__(self, snapshot: Mapping[str, Any] | None = None) -> None:
        known = snapshot or {"events": {}, "seconds": 0.0}
        self.events: dict[str, int] = {label: known["events"].get(label, 0) for label in LABELS}
        self.seconds: float = known["seconds"]

    def observe(self, lateness_us: int, events: int) -> None:
        """Count ``events`` events of one lateness. A negative lateness counts as zero."""
        lateness_us = max(0, lateness_us)
        label = LABELS[bisect_left(_EDGES_US, lateness_us)]
        self.events[label] = plus(self.events[label], events)
        self.seconds += lateness_us / 1e6 * events

    def to_json(self) -> dict[str, Any]:
        return {"events": dict(self.events), "seconds": self.seconds}


SNAPSHOT_VERSION = 1
MOVED = 0.05
"""The outlook is replaced when a share of late events, or their number, differs by more than this from the old one."""
FEW_EVENTS = 30
"""The fewest late events that make an outlook."""
ASKED_PER_SPAN = 32
"""History is evaluated again after it has grown by one part in this many."""
LARGE_MARGIN = 0.25
"""A margin is large if the expected losses are below this part of the allowed ones."""
_POINTS = 48
_HALVINGS = 12


class Expected:
    """The outlook of a bound as the staleness trigger's :class:`aion.core.trigger.staleness.Forecast`.

    Version 0: nothing is known yet. Late events are then assumed to come evenly, and none is expected.
    """

    def __init__(self, bound: AdaptiveBound) -> None:
        self._bound = bound
        self._nothing = NothingKnown()

    @property
    def version(self) -> int:
        return 0 if self._bound.outlook is None else self._bound.outlook.version

    def late_share(self, lateness_us: Floats) -> Floats:
        outlook = self._bound.outlook
        return self._nothing.late_share(lateness_us) if outlook is None else 1.0 - outlook.later_than(lateness_us)

    def expected_late(self, on_time_events: Ints) -> Floats:
        outlook = self._bound.outlook
        return on_time_events.astype(np.float64) * (0.0 if outlook is None else outlook.late_per_on_time)


class AdaptiveBound:
    """Learns lateness and decides the bound of new windows.

    ``model``: one of :data:`aion.core.lateness.models.NAMES`. ``of_all``: ``asked.coverage`` is a share of all events,
    not of the late ones. ``ahead_us``: the event time that is kept besides the bound: the longest window. ``max_state``
    has to hold that too, and what lies ahead of the watermark. ``together``: decide with the other shards of the query
    (see :meth:`receive`); a decision then takes effect from the next snapshot on. ``snapshot``: from :meth:`to_json`,
    written with the same or other settings. Raises ValueError for an unknown model, FormatError for a snapshot that a
    newer Aion wrote.
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
        self.ahead = Ahead(half_life_us, asked.max_bound_us)
        self.histogram = LatenessHistogram()
        self.conformal = None if asked.coverage is None else Conformal(1.0 - asked.coverage)
        self.drift = None if asked.coverage is None else Drift()
        self._others: list[Lateness] = []
        self._shards = 1
        self._room_us: int | None = None
        # The current result, and the one that takes effect from the next snapshot on. They differ only where shards
        # decide together.
        self._current = self._next = LearntBound(decide(asked, None))
        self.decision: BoundDecision = self._current.decision
        if snapshot is not None:
            self._restore(snapshot)

    @classmethod
    def of_snapshot(cls, snapshot: Mapping[str, Any]) -> AdaptiveBound:
        """Returns the bound as it was when it wrote the snapshot, with the settings it had then."""
        settings = dict(snapshot["learnt_bound"]["settings"])
        asked = Cleanup(**{field.name: settings.pop(field.name) for field in fields(Cleanup)})
        return cls(asked, **settings, snapshot=snapshot)

    # -- observations -------------------------------------------------------------------------------------

    def observe(self, end_us: int, at_us: int, events: int) -> None:
        """See :meth:`aion.core.lateness.observe.Lateness.observe`."""
        self.lateness.observe(end_us, at_us, events)
        self.histogram.observe(at_us - end_us, events)
        if self.conformal is not None:
            self.conformal.observe(end_us - self.ahead_us, at_us - end_us, events)
        if self.drift is not None:
            self.drift.observe(end_us, at_us, events)

    def observe_on_time(self, end_us: int, events: int) -> None:
        """See :meth:`aion.core.lateness.observe.Lateness.observe_on_time`."""
        self.lateness.observe_on_time(end_us, events)

    def observe_all_on_time(self, ends_us: Ints, events: Ints) -> None:
        """See :meth:`aion.core.lateness.observe.Lateness.observe_all_on_time`."""
        self.lateness.observe_all_on_time(ends_us, events)

    def observe_state(self, slice_us: int, at_us: int, size_bytes: int) -> None:
        """See :meth:`aion.core.lateness.observe.Lateness.observe_state`."""
        self.lateness.observe_state(slice_us, at_us, size_bytes)
        self.ahead.observe(slice_us, at_us, size_bytes)

    def advance(self, from_us: int | None, to_us: int) -> None:
        """The watermark is about to move to ``to_us``. ``from_us`` is None the first time.

        Everything that arrived while the watermark was at ``from_us`` has been observed. So history is complete up to
        ``from_us``, but not yet up to ``to_us``.
        """
        if from_us is None:
            # Windows that end before the first watermark had all their events in time, whenever those came.
            self.lateness.forget_before(to_us)
            if self.drift is not None:
                self.drift.forget_before(to_us)
        else:
            if self.together:
                # Whether this shard evaluates depends on what others have published. So the decision comes first.
                self._follow(from_us, anew=False)
            if self.asks(from_us):
                self._next = self._evaluate(from_us)
            if not self.together:
                anew, self._current = self._current is not self._next, self._next
                self._follow(from_us, anew)
            self.ahead.fade(to_us - from_us)
        if self.conformal is not None:
            self.conformal.advance(to_us, self.decision.bound_us, self.ahead_us)
        self._others = []

    # -- what other shards publish ------------------------------------------------------------------------

    def receive(self, shards: int, published: Iterable[Any]) -> None:
        """Read what the ``shards`` other shards of the query have published: the ``learnt_bound`` of their snapshots.

        A newer result than its own is adopted, from the next snapshot on. Results that cannot be read, or that were
        found with other settings, are ignored.
        """
        self._shards = 1 + shards
        best = newest([self._next, *usable(published, self._settings())])
        if best.restarted_us is not None and best.restarted_us != self._next.restarted_us:
            self.lateness.forget_before(best.restarted_us)
            if not self.lateness.epochs:
                self.lateness.restart(best.restarted_us)
        self._next = best

    def asks(self, at_us: int | None) -> bool:
        """Returns whether history is evaluated when the watermark moves on from ``at_us``. If so, call :meth:`learn`
        first.
        """
        if at_us is None:
            return False
        if self._next.next_us is None or self._next.asked_us is None:
            return True
        # Fewer shards than before means that some are still coming back, as after a restart of their server: wait once.
        patience_us = self._next.next_us - self._next.asked_us if self._shards < self._next.shards else 0
        return at_us >= self._next.next_us + patience_us

    def learn(self, shards: int, published: Iterable[Any], learnt: Iterable[Any]) -> None:
        """:meth:`receive`, plus ``learnt``: the ``lateness`` of the same snapshots, used at the next advance only.

        If another shard has evaluated history in the meantime, its result is adopted: both used the same observations.
        """
        self.receive(shards, published)
        self._others = observations(learnt, self.lateness.half_life_us, self._next.restarted_us)

    # -- results ------------------------------------------------------------------------------------------

    @property
    def outlook(self) -> Outlook | None:
        """How late late events are expected to be. None until enough is known."""
        return self._current.outlook

    @property
    def restarts(self) -> int:
        """Changes of regime so far."""
        return self._next.restarts

    def bound_for_new_window(self) -> int:
        return self.decision.bound_us

    def reason_for_new_window(self) -> int:
        """Returns the code of the reason for that bound."""
        return self.decision.reason.code

    def still_to_come(self, bound_us: int, lateness_us: int = -1) -> float | None:
        """Returns the expected share of a window's events that come later than ``lateness_us`` and still within its
        bound.

        The share is of all events of the window. -1: everything after the end of the window. None until enough is
        known.
        """
        if self.outlook is None:
            return None
        after, lost = self.outlook.later_than([lateness_us, bound_us - 1])
        return float(self.outlook.late_share * max(0.0, after - lost))

    # -- deciding -----------------------------------------------------------------------------------------

    def _follow(self, at_us: int, anew: bool) -> None:
        """Compare the latest windows with history, if that is due or history was evaluated ``anew``, and decide."""
        usual, decision = self._current.usual, self._current.decision
        if self.drift is not None and self.conformal is not None and usual is not None and self._carries():
            anew = anew or self.drift.due(at_us)
            if anew:
                miss = self.conformal.miss / (max(1e-9, usual.late_share) if decision.of_all else 1.0)
                suffices = decision.reason is Reason.LEARNT
                self.drift.follow(at_us, usual, self._current.usual_us, min(1.0, miss), suffices=suffices)
        if anew:
            self._decide()

    def _carries(self) -> bool:
        """Returns whether the latest windows count: beside a history that supports a bound, or until there is one
        again.
        """
        return self._current.decision.reason is Reason.LEARNT or self._current.relearning

    def _decide(self) -> None:
        decision, drift = self._current.decision, self.drift
        if drift is not None and drift.bound_us is not None and self._carries():
            decision = carried(self.asked, decision, drift.bound_us, drift.later)
        self.decision = cut_to_room(self.asked, decision, self._room_us, self._current.later_than)

    def _evaluate(self, at_us: int) -> LearntBound:
        before, lateness = self._next, self.lateness
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
            outlook = _updated_outlook(outlook, known)
        if self.asked.max_state_bytes is not None:
            # Each shard limits its own state, so only its own observations count here.
            own = cohorts if lateness is self.lateness else self.lateness.cohorts(at_us)
            room = room_us(own, self.asked.max_state_bytes, self.ahead_us + self.ahead.mean_us)
            self._room_us = self._room_us if room is None else room
        miss = None if self.conformal is None else self.conformal.miss
        decision = decide(self.asked, known, at_least_us=before.at_least_us, miss=miss)
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
        if learnt and known is not None:
            # A history with a change inside has a large margin. What was usual before it says more.
            later = float(known.later_than(decision.bound_us - 1))
            if before.usual is None or later >= LARGE_MARGIN * (1.0 - (self.asked.coverage or 0.0)):
                after = replace(after, usual=_curve(known, 0), usual_us=decision.bound_us)
        return replace(after, decision=_explained(after, decision))

    def _start_again(self, at_us: int, span_us: int, changed: str) -> LearntBound:
        before = self._next
        at_least_us = max(before.at_least_us, before.decision.bound_us)
        self.lateness.restart(at_us)
        if self.conformal is not None:
            self.conformal.restart()
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
        return replace(after, decision=_explained(after, decide(self.asked, None, at_least_us=at_least_us)))

    def _modelled(self, known: LateArrivals) -> LateArrivals:
        if self.model == "empirical" or known.watched_us < self.asked.initial_bound_us:
            return known
        if self.model == "auto":
            found = choose(known)
        else:
            found = fit(known, (self.model,)).get(self.model) if self.model in FAMILIES else None
        return known if found is None or found.covariance is None else modelled(known, found)

    # -- snapshot -----------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as JSON values. ``learnt_bound`` is what other shards read."""
        return {
            "version": SNAPSHOT_VERSION,
            "lateness": self.lateness.to_json(),
            "histogram": self.histogram.to_json(),
            "learnt_bound": {"settings": self._settings(), **self._next.to_json()},
            "room_us": self._room_us,
            "ahead": self.ahead.to_json(),
            "conformal": None if self.conformal is None else self.conformal.to_json(),
            "drift": None if self.drift is None else self.drift.to_json(),
        }

    def _settings(self) -> dict[str, Any]:
        return {**asdict(self.asked), "half_life_us": self.lateness.half_life_us, "model": self.model,
                "of_all": self.of_all, "ahead_us": self.ahead_us, "together": self.together}  # fmt: skip

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        if snapshot["version"] != SNAPSHOT_VERSION:
            raise FormatError(f"a bound of format {snapshot['version']}: this Aion reads {SNAPSHOT_VERSION}")
        self.lateness = Lateness.from_json(snapshot["lateness"], self.lateness.half_life_us)
        self.ahead = Ahead(self.lateness.half_life_us, self.asked.max_bound_us, snapshot.get("ahead"))
        self.histogram = LatenessHistogram(snapshot.get("histogram"))
        if self.conformal is not None and snapshot.get("conformal") is not None:
            self.conformal = Conformal(self.conformal.allowed, snapshot["conformal"])
        if self.drift is not None and snapshot.get("drift") is not None:
            self.drift = Drift(snapshot["drift"])
        learnt = LearntBound.from_json(snapshot["learnt_bound"])
        if snapshot["learnt_bound"]["settings"] == self._settings():
            self._room_us = snapshot["room_us"]
        else:
            # With other settings, use the conservative decision until history is evaluated at the next advance.
            learnt = replace(learnt, decision=self._current.decision, asked_us=None, next_us=None, shards=1)
            if self.drift is not None:
                self.drift.bound_us = None
        self._current = self._next = learnt
        self._decide()


def _explained(learnt: LearntBound, decision: BoundDecision) -> BoundDecision:
    """Returns the decision; while lateness is learnt anew after a change of regime, its reason names that change."""
    if not learnt.relearning:
        return decision
    conservative = decision.reason in (Reason.NO_HISTORY, Reason.UNSUPPORTED)
    return replace(
        decision,
        reason=Reason.CHANGED if conservative else decision.reason,
        why=f"lateness has changed: {learnt.last_change}; {decision.why}",
    )


def _updated_outlook(before: Outlook | None, known: LateArrivals) -> Outlook | None:
    """Returns the old outlook, or a new one if ``known`` has moved too far from it."""
    late = float(known.later[0])
    if late * known.events < FEW_EVENTS:
        return before
    edges, later = known.edges_us, known.later / late
    if before is not None:
        moved = float(np.abs(before.later_than(edges) - later).max())
        more = abs(before.late_per_on_time * (1 - known.late_share) / max(1e-9, known.late_share) - 1)
        if moved <= MOVED and more <= MOVED:
            return before
    return _curve(known, 1 if before is None else before.version + 1)


def _curve(known: LateArrivals, version: int) -> Outlook:
    """Returns the estimate at a few dozen points, as shares of the late events. There are some."""
    edges, later = known.edges_us, known.later
    later = later / later[0]
    levels = np.concatenate([1 - np.arange(1, _POINTS) / _POINTS, 0.5 ** np.arange(1, _HALVINGS) / _POINTS])
    at = np.unique(np.concatenate([[0], np.searchsorted(-later, -levels), [len(later) - 1]]))
    at = at[at < len(later)]
    return Outlook(version, edges[at], later[at], known.late_share)
