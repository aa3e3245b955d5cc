"""Predictive cleanup: how late an event may be before its window is gone (paper section 3.4). Pure.

The paper: start with a conservatively large bound, and once a representative history was observed, give newly created
windows the bound that is estimated to cover a specified percentage of the events, with a certain confidence.

**Of which events.** Of the late ones, unless told otherwise: it is their distribution that the paper has the system
observe, and a bound covers nothing else. Who covers 99 % of the late events covers at least 99 % of all; of all events
99 % may be covered by forgetting a window at its end, which is what late events are kept from here.

**The bound** is the smallest from which on an upper confidence bound on the share that comes later is at most
``1 - coverage``. It is an edge of the sketch, at which counts are exact: the sketch's error can only make it longer, by
at most 2 %.

**A representative history** is one that

- goes back, for a quarter of its epochs, at least as far as ``initial_bound``, which is what the user took to be long,
  and twice as far as the bound that it asks for;
- has at least eight epochs with events, so that one can tell how much they differ;
- leaves at most a tenth of what may be lost to what is later than anything could yet have been seen; and
- shows enough events for the order statistic: 299 independent ones for 99 % with confidence 95 %.

If a coverage asks for more, nothing is guessed: the conservative bound stays. That is ``initial_bound``, or a longer
one if that is what is supported for the highest coverage that is; and if history shows that even ``initial_bound``
loses too much, it is the longest lateness seen. ``max_bound`` is never exceeded. So more coverage never gives a
shorter bound: each of these steps can only grow with it.

``max_state`` trades coverage for room: a bound with which the windows that are kept would have taken more is cut, and
the decision says what that costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from aion.core.time import short_duration

TIMES_THE_BOUND = 2
FEWEST_EPOCHS = 8
MOST_UNSEEN = 0.1


class History(Protocol):
    """What is known of when events come: :class:`aion.core.lateness.estimate.Arrivals`, perhaps with a model."""

    @property
    def edges_us(self) -> npt.NDArray[np.int64]:
        """Latenesses that a bound may be laid behind, ascending, -1 ("in time") first; (K,)."""

    @property
    def later(self) -> npt.NDArray[np.float64]:
        """The share of events that is later than each, estimated; (K,)."""

    def at_most(self, confidence: float) -> npt.NDArray[np.float64]:
        """An upper confidence bound on that, descending; (K,)."""

    def later_than(self, lateness_us: Any) -> npt.NDArray[np.float64]:
        """The estimated share that is later than any lateness."""

    @property
    def unseen(self) -> float:
        """The part of these shares that is later than anything could have been seen."""

    @property
    def watched_us(self) -> int:
        """Up to which lateness one could see."""

    @property
    def events(self) -> int:
        """How many events the shares rest on."""

    @property
    def epochs(self) -> int:
        """From how many stretches of time."""

    @property
    def late_share(self) -> float:
        """The share of all events that is late."""

    @property
    def of_all(self) -> bool:
        """Whether shares are of all events, and not of the late ones."""

    @property
    def source(self) -> str:
        """What the shares come from: "empirical", or a model's name."""


class Reason(StrEnum):
    """What decided a bound. A window keeps its place in this order, as a number: new ones come last."""

    FIXED = "fixed"
    NO_HISTORY = "no_history"
    UNSUPPORTED = "unsupported"
    LEARNT = "learnt"
    MAX_BOUND = "max_bound"
    MAX_STATE = "max_state"
    CHANGED = "changed"

    @property
    def code(self) -> int:
        return _CODES[self]

    @classmethod
    def of_code(cls, code: int) -> Reason:
        """Raises IndexError for one that there is not."""
        return list(cls)[code]


_CODES = {reason: code for code, reason in enumerate(Reason)}


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What the user asked for. Shares are above 0 and below 1, durations in microseconds.

    ``coverage`` None: nothing, every window gets ``initial_bound``. Raises ValueError for what cannot be.
    """

    initial_bound_us: int
    coverage: float | None = 0.99
    confidence: float = 0.95
    max_bound_us: int = 7 * 86_400_000_000
    max_state_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("coverage", "confidence"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{name} {value}: must be above 0 and below 1")
        if not 0 <= self.initial_bound_us <= self.max_bound_us:
            raise ValueError(f"initial_bound_us {self.initial_bound_us}: must be from 0 to max_bound_us")
        if self.max_state_bytes is not None and self.max_state_bytes < 1:
            raise ValueError(f"max_state_bytes {self.max_state_bytes}: must be 1 or more")


@dataclass(frozen=True, slots=True)
class BoundDecision:
    """The bound of the windows that are made from now on.

    ``why``: a sentence. ``late_share``: the share of a window's events expected after its end; ``lost_share``: of those
    the ones expected after its bound; both of all its events, None as long as nothing is known. ``of_all``: whether
    coverage was asked for of all events, and not of the late ones.
    """

    bound_us: int
    reason: Reason
    why: str
    late_share: float | None = None
    lost_share: float | None = None
    of_all: bool = False

    @property
    def expected_share(self) -> float | None:
        """The share of a window's events that is expected to come late, but in time for its bound."""
        return None if self.late_share is None or self.lost_share is None else self.late_share - self.lost_share


def decide(asked: Cleanup, known: History | None, *, at_least_us: int = 0, room_us: int | None = None) -> BoundDecision:
    """The bound for new windows.

    ``at_least_us``: what the conservative bound may not fall below, as after a change of regime. ``room_us``: the bound
    with which windows take ``max_state_bytes``; None as long as that is not known.
    """
    conservative_us = max(asked.initial_bound_us, at_least_us)
    if asked.coverage is None:
        reason, bound_us, why = Reason.FIXED, asked.initial_bound_us, "the initial bound: no coverage is asked for"
    elif known is None:
        reason, bound_us = Reason.NO_HISTORY, conservative_us
        why = f"no late event yet of a window watched long enough: the conservative bound, {short_duration(bound_us)}"
    else:
        bound_us, missing = _learnt(asked, asked.coverage, known)
        if missing:
            reason, (bound_us, which) = Reason.UNSUPPORTED, _conservative(asked, asked.coverage, known, conservative_us)
            why = f"{missing}: {which}, {short_duration(bound_us)}"
        else:
            reason, why = Reason.LEARNT, _why_learnt(asked, asked.coverage, known, bound_us)
    if bound_us > asked.max_bound_us:
        reason, bound_us = Reason.MAX_BOUND, asked.max_bound_us
        why = f"cut to max_bound, {short_duration(bound_us)}, from: {why}"
    if known is None:
        decision = BoundDecision(bound_us, reason, why)
    else:
        share = known.late_share if not known.of_all else 1.0
        later = float(known.later_than(bound_us - 1))
        if reason is Reason.MAX_BOUND:
            why += f"; {1 - later:.2%} of {_whom(known)} are expected in time"
        decision = BoundDecision(
            bound_us, reason, why, known.late_share, min(known.late_share, share * later), known.of_all
        )
    if known is None:
        return cut_to_room(asked, decision, room_us)
    return cut_to_room(asked, decision, room_us, lambda us: float(known.later_than(us)))


def cut_to_room(
    asked: Cleanup,
    decision: BoundDecision,
    room_us: int | None,
    later_than: Callable[[int], float | None] = lambda us: None,
) -> BoundDecision:
    """The decision, with a bound of at most ``room_us`` where ``max_state`` is asked for.

    ``later_than``: the share of the events that are covered, of which ``decision`` tells, that is later than any
    lateness; None as long as that is not known.
    """
    if room_us is None or asked.max_state_bytes is None or decision.bound_us <= room_us:
        return decision
    bound_us = max(0, room_us)
    room = f"{asked.max_state_bytes:,} bytes of max_state have room for"
    why = f"cut to what {room}, {short_duration(bound_us)}, from: {decision.why}"
    later = later_than(bound_us - 1)
    if decision.late_share is None or later is None:
        return BoundDecision(bound_us, Reason.MAX_STATE, why)
    why += f"; {1 - later:.2%} of {'all' if decision.of_all else 'late'} events are expected in time"
    lost = later if decision.of_all else decision.late_share * later
    return BoundDecision(
        bound_us, Reason.MAX_STATE, why, decision.late_share, min(decision.late_share, lost), decision.of_all
    )


def _learnt(asked: Cleanup, coverage: float, known: History) -> tuple[int, str]:
    """The smallest bound that covers enough, and what history lacks for it to count; "" if nothing."""
    allowed = 1.0 - coverage
    fits = known.at_most(asked.confidence) <= allowed
    first = int(np.argmax(fits))
    if known.watched_us < asked.initial_bound_us:
        back = short_duration(max(0, known.watched_us))
        return 0, f"a history of {back}, shorter than initial_bound ({short_duration(asked.initial_bound_us)})"
    if known.epochs < FEWEST_EPOCHS:
        return 0, f"events in only {known.epochs} stretches of time"
    if not fits[first]:
        events = f"{known.events:,} {'' if known.of_all else 'late '}events"
        return 0, f"{events} do not support {coverage:.6g} with confidence {asked.confidence:.6g}"
    bound_us = int(known.edges_us[first]) + 1
    if known.unseen > MOST_UNSEEN * allowed:
        return 0, f"{known.unseen:.2g} of {_whom(known)} may be later than anything one could have seen yet"
    if known.watched_us < TIMES_THE_BOUND * bound_us:
        back = short_duration(known.watched_us)
        return 0, f"a history of {back}, too short to see all that is later than {short_duration(bound_us)}"
    return bound_us, ""


def _conservative(asked: Cleanup, coverage: float, known: History, least_us: int) -> tuple[int, str]:
    """At least as long as what would be supported for any smaller coverage; and what it is."""
    losing, longest_us = float(known.later_than(least_us - 1)), int(known.edges_us[-1])
    if losing > 1.0 - coverage and longest_us >= least_us:
        return longest_us + 1, f"{short_duration(least_us)} lose {losing:.2%}, so the longest seen"
    conservative = "the conservative bound"
    # An edge is somebody's bound if the one before it leaves too much to some coverage that is supported.
    before = np.concatenate([[np.inf], known.at_most(asked.confidence)[:-1]])
    supported = (TIMES_THE_BOUND * (known.edges_us + 1) <= known.watched_us) & (MOST_UNSEEN * before > known.unseen)
    if known.epochs < FEWEST_EPOCHS or known.watched_us < asked.initial_bound_us or not supported.any():
        return least_us, conservative
    return max(least_us, int(known.edges_us[np.flatnonzero(supported)[-1]]) + 1), conservative


def _why_learnt(asked: Cleanup, coverage: float, known: History, bound_us: int) -> str:
    later = float(known.later_than(bound_us - 1))
    return (
        f"covers {coverage:.6g} of {_whom(known)} with confidence {asked.confidence:.6g}: of {known.events:,} "
        f"that were watched for up to {short_duration(known.watched_us)}, {later:.2%} came later ({known.source})"
    )


def _whom(known: History) -> str:
    return "all events" if known.of_all else "late events"
