"""The bound that follows the data, and what the staleness trigger is to expect (paper section 3.4). Pure.

It is told what comes and when the watermark moves; once per epoch or two, or per batch while history is young, it asks
again what history supports. Between, new windows get the same bound. All that it will decide follows from its snapshot
and what it is told: no clock, no chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.arrivals import Arrivals, arrivals
from aion.errors import FormatError
from aion.lateness import HALF_LIFE_US, Floats, Lateness, room_us
from aion.models import FAMILIES, NAMES, choose, fit, modelled
from aion.regimes import change
from aion.trigger import NothingKnown
from policies.cleanup import Cleanup, Decision, Reason, decide

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
class Outlook:
    """How late the late events of a window are, thinned to a few dozen points; stays until it has moved enough.

    ``lateness_us``: (P,), ascending from -1. ``later``: the share of late events that is later, (P,), from 1.
    ``late_share``: the share of all events that is late. ``per_window``: events in time per window.
    """

    version: int
    lateness_us: npt.NDArray[np.int64]
    later: Floats
    late_share: float
    per_window: float

    def later_than(self, lateness_us: Any) -> Floats:
        return np.asarray(np.interp(lateness_us, self.lateness_us, self.later))

    @property
    def late_per_on_time(self) -> float:
        return self.late_share / max(1e-9, 1.0 - self.late_share)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "lateness_us": self.lateness_us.tolist(),
            "later": self.later.tolist(),
            "late_share": self.late_share,
            "per_window": self.per_window,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Outlook:
        return cls(
            value["version"],
            np.array(value["lateness_us"], np.int64),
            np.array(value["later"], np.float64),
            value["late_share"],
            value["per_window"],
        )


@dataclass(frozen=True, slots=True)
class Forecast:
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
    """What the staleness trigger is told of a window's late events: an :class:`aion.trigger.Forecast`."""

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

    ``model``: one of :data:`aion.models.NAMES`. ``of_all``: whether ``asked.coverage`` is of all events instead of the
    late ones. ``ahead_us``: how much event time is kept besides the bound, which ``max_state`` has to hold as well: the
    longest window and the watermark's delay. ``snapshot``: of :meth:`to_json`, with the same or other settings. Raises
    ValueError for an unknown model, FormatError for a snapshot that a newer Aion wrote.
    """

    def __init__(
        self,
        asked: Cleanup,
        *,
        half_life_us: int = HALF_LIFE_US,
        model: str = "auto",
        of_all: bool = False,
        ahead_us: int = 0,
        snapshot: Mapping[str, Any] | None = None,
    ) -> None:
        if model not in NAMES:
            raise ValueError(f"model {model!r}: there are {', '.join(NAMES)}")
        self.asked = asked
        self.model = model
        self.of_all = of_all
        self.ahead_us = ahead_us
        self.lateness = Lateness(half_life_us)
        self.decision: Decision = decide(asked, None)
        self.outlook: Outlook | None = None
        self.restarts = 0
        self.last_change: str | None = None
        # The watermark from which on it is asked again; None: at the next advance.
        self._next_us: int | None = None
        # No change of regime is looked for in a history that is shorter: each one that was found doubles it, so that
        # what repeats, as day and night do, is in the end seen to.
        self._patience_us = 0
        self._at_least_us = 0
        self._room_us: int | None = None
        self._relearning = False
        if snapshot is not None:
            self._restore(snapshot)

    # -- what it is told ----------------------------------------------------------------------------------

    def observe(self, end_us: int, at_us: int, events: int) -> None:
        """See :meth:`aion.lateness.Lateness.observe`."""
        self.lateness.observe(end_us, at_us, events)

    def observe_on_time(self, end_us: int, events: int) -> None:
        """See :meth:`aion.lateness.Lateness.observe_on_time`."""
        self.lateness.observe_on_time(end_us, events)

    def observe_state(self, slice_us: int, at_us: int, size_bytes: int) -> None:
        """See :meth:`aion.lateness.Lateness.observe_state`."""
        self.lateness.observe_state(slice_us, at_us, size_bytes)

    def advance(self, from_us: int | None, to_us: int, others: Lateness | None = None) -> None:
        """The watermark moves; before anything is done about it. ``from_us`` is None the first time.

        All that came while it was at ``from_us`` has been observed, so history is complete up to there, and not to
        ``to_us``. ``others``: what other shards know, if the bound is to be the query's and not the shard's.
        """
        if from_us is None:
            # Windows that end before the first watermark had all their events in time, whenever they came.
            self.lateness.forget_before(to_us)
        elif self._next_us is None or from_us >= self._next_us:
            self._ask(from_us, others)

    # -- what it says -------------------------------------------------------------------------------------

    def bound_for_new_window(self) -> int:
        return self.decision.bound_us

    def forecast(self, bound_us: int) -> Forecast:
        """For a window with that bound."""
        return Forecast(bound_us, self.outlook)

    def still_to_come(self, bound_us: int, lateness_us: int = -1) -> float | None:
        """The share of all events of a window that is expected after ``lateness_us``, and in time for its bound.

        -1: after the end of the window. None as long as nothing is known.
        """
        if self.outlook is None:
            return None
        after, lost = self.outlook.later_than([lateness_us, bound_us - 1])
        return float(self.outlook.late_share * max(0.0, after - lost))

    # -- deciding -----------------------------------------------------------------------------------------

    def _ask(self, at_us: int, others: Lateness | None) -> None:
        lateness = self.lateness
        if others is not None:
            lateness = lateness.copy()
            lateness.merge(others)
        cohorts = lateness.cohorts(at_us)
        of_all = arrivals(cohorts, of_all=True)
        if of_all is not None and lateness.span_us(at_us) >= self._patience_us:
            changed = change(cohorts, of_all)
            if changed is not None:
                self._start_again(at_us, lateness.span_us(at_us), changed)
                return
        known = of_all if self.of_all else arrivals(cohorts)
        if known is not None:
            known = self._modelled(known)
            self._look_out(known)
        if self.asked.max_state_bytes is not None:
            room = room_us(cohorts, self.asked.max_state_bytes, self.ahead_us)
            self._room_us = self._room_us if room is None else room
        self.decision = decide(self.asked, known, at_least_us=self._at_least_us, room_us=self._room_us)
        if self.decision.reason is Reason.LEARNT:
            self._at_least_us, self._relearning = 0, False
        self.decision = self._said(self.decision)
        self._next_us = at_us + max(lateness.width_us, lateness.span_us(at_us) // ASKED_PER_SPAN)

    def _start_again(self, at_us: int, span_us: int, changed: str) -> None:
        self.restarts += 1
        self.last_change = changed
        self._patience_us = min(2 * span_us, self.lateness.half_life_us)
        if self.decision.reason is not Reason.MAX_STATE:
            self._at_least_us = max(self._at_least_us, self.decision.bound_us)
        self.lateness.restart(at_us)
        self._relearning, self._next_us = True, None
        self.decision = self._said(decide(self.asked, None, at_least_us=self._at_least_us, room_us=self._room_us))

    def _said(self, decision: Decision) -> Decision:
        """With the change of regime that made it, until there is history again."""
        if not self._relearning:
            return decision
        return replace(decision, why=f"lateness has changed: {self.last_change}; {decision.why}")

    def _modelled(self, known: Arrivals) -> Arrivals:
        if self.model == "empirical" or known.watched_us < self.asked.initial_bound_us:
            return known
        if self.model == "auto":
            found = choose(known)
        else:
            found = fit(known, (self.model,)).get(self.model) if self.model in FAMILIES else None
        return known if found is None or found.covariance is None else modelled(known, found)

    def _look_out(self, known: Arrivals) -> None:
        """A new outlook if the old one is not good any more."""
        late = float(known.later[0])
        if late * known.events < FEW_EVENTS:
            return
        edges, later = known.edges_us, known.later / late
        before = self.outlook
        if before is not None:
            moved = float(np.abs(before.later_than(edges) - later).max())
            more = abs(before.late_per_on_time * (1 - known.late_share) / max(1e-9, known.late_share) - 1)
            if moved <= MOVED and more <= MOVED:
                return
        levels = np.concatenate([1 - np.arange(1, _POINTS) / _POINTS, 0.5 ** np.arange(1, _HALVINGS) / _POINTS])
        at = np.unique(np.concatenate([[0], np.searchsorted(-later, -levels), [len(later) - 1]]))
        at = at[at < len(later)]
        version = 1 if before is None else before.version + 1
        self.outlook = Outlook(version, edges[at], later[at], known.late_share, known.per_window)

    # -- snapshot -----------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Everything that later decisions follow from, as JSON values."""
        return {
            "version": SNAPSHOT_VERSION,
            "settings": self._settings(),
            "lateness": self.lateness.to_json(),
            "decision": asdict(self.decision),
            "outlook": None if self.outlook is None else self.outlook.to_json(),
            "restarts": self.restarts,
            "last_change": self.last_change,
            "next_us": self._next_us,
            "patience_us": self._patience_us,
            "at_least_us": self._at_least_us,
            "room_us": self._room_us,
            "relearning": self._relearning,
        }

    def _settings(self) -> dict[str, Any]:
        return {**asdict(self.asked), "half_life_us": self.lateness.half_life_us, "model": self.model,
                "of_all": self.of_all, "ahead_us": self.ahead_us}  # fmt: skip

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        if snapshot["version"] != SNAPSHOT_VERSION:
            raise FormatError(f"a bound of format {snapshot['version']}: this Aion reads {SNAPSHOT_VERSION}")
        self.lateness = Lateness.from_json(snapshot["lateness"], self.lateness.half_life_us)
        self.outlook = None if snapshot["outlook"] is None else Outlook.from_json(snapshot["outlook"])
        self.restarts = snapshot["restarts"]
        self.last_change = snapshot["last_change"]
        self._patience_us = snapshot["patience_us"]
        self._at_least_us = snapshot["at_least_us"]
        self._relearning = snapshot["relearning"]
        if snapshot["settings"] == self._settings():
            # With other settings it is asked again at the next advance; until then what is asked now is conservative.
            decision = snapshot["decision"]
            self.decision = Decision(**{**decision, "reason": Reason(decision["reason"])})
            self._next_us = snapshot["next_us"]
            self._room_us = snapshot["room_us"]
