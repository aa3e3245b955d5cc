"""Predictive cleanup: decides how late an event may be before its window is gone (paper section 3.4). Pure.

The paper: start with a conservatively large bound. After observing a representative history, give each new window the
bound that will cover a given percentage of the events, with a given confidence.

**Which events?** The late ones, unless ``of_all`` says all. The paper observes the distribution of late events, and a
bound matters only to them. A bound that covers 99 % of the late events covers at least 99 % of all events. The reverse
is not true: to cover 99 % of all events, it may be enough to forget each window at its end, and then every late event
is lost.

**The bound** is the smallest one for which an upper confidence bound on the share of later events is at most
``1 - coverage``. It is always an edge of the sketch, where counts are exact. So the error of the sketch can only make
the bound longer, by at most 2 %.

**A history is representative** if

- for a quarter of its epochs it goes back at least as far as ``initial_bound``, which the user considers long, and
  twice as far as the bound that it leads to;
- at least eight of its epochs have events, so that their differences can be measured;
- events that are later than anything that could have been seen yet are at most a tenth of the events that may be lost;
- it has enough events for the order statistic: 299 independent ones for 99 % with confidence 95 %.

If the history does not support the coverage, nothing is guessed: windows get the conservative bound. That is
``initial_bound``, or the bound of the highest coverage that the history does support, if that is longer. If the history
shows that even this loses too much, it is the longest lateness seen. No bound exceeds ``max_bound``. Each of these
bounds grows with the coverage, so a higher coverage never gives a shorter bound.

``max_state`` trades coverage for room: the bound is cut to one with which the windows would have taken at most that
much room, and the decision says what that costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from policies.durations import short_duration

TIMES_THE_BOUND = 2
FEWEST_EPOCHS = 8
MOST_UNSEEN = 0.1
MOST_CARRIED = 4


class History(Protocol):
    """What is known about lateness: from the arrivals so far, perhaps with a model."""

    @property
    def edges_us(self) -> npt.NDArray[np.int64]:
        """The values of lateness for which shares are known, ascending; the first is -1, "in time". Shape (K,).

        A bound is one microsecond more than such a value.
        """

    @property
    def later(self) -> npt.NDArray[np.float64]:
        """The estimated share of events that are later than each edge. Shape (K,)."""

    def at_most(self, confidence: float) -> npt.NDArray[np.float64]:
        """Returns an upper confidence bound on each of these shares, descending. Shape (K,)."""

    def later_than(self, lateness_us: Any) -> npt.NDArray[np.float64]:
        """Returns the estimated share of events that are later than given values of lateness, which need not be
        edges.
        """

    @property
    def unseen(self) -> float:
        """The part of these shares that is later than anything that could have been observed yet."""

    @property
    def watched_us(self) -> int:
        """The largest lateness that could have been observed."""

    @property
    def events(self) -> int:
        """The number of events behind the shares."""

    @property
    def epochs(self) -> int:
        """The number of stretches of time with events."""

    @property
    def late_share(self) -> float:
        """The share of late events among all events."""

    @property
    def of_all(self) -> bool:
        """Whether the shares are of all events. Otherwise they are of late events."""

    @property
    def source(self) -> str:
        """Where the shares come from: "empirical", or the name of a model."""


class Reason(StrEnum):
    """What decided a bound. Stored windows have the index of a reason, so add new reasons at the end."""

    FIXED = "fixed"
    NO_HISTORY = "no_history"
    UNSUPPORTED = "unsupported"
    LEARNT = "learnt"
    MAX_BOUND = "max_bound"
    MAX_STATE = "max_state"
    CHANGED = "changed"
    OWN = "own"

    @property
    def code(self) -> int:
        return _CODES[self]

    @classmethod
    def of_code(cls, code: int) -> Reason:
        """Returns the reason with this index. Raises IndexError if there is none."""
        return list(cls)[code]


_CODES = {reason: code for code, reason in enumerate(Reason)}


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What the user asked for. Shares are above 0 and below 1; durations are in microseconds.

    Without ``coverage``, every window gets ``initial_bound``. Raises ValueError for values out of range.
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
    """The bound of new windows.

    ``why``: the reason as a sentence. ``late_share``: the expected share of a window's events that come after its end.
    ``lost_share``: the expected share that come after its bound. Both are shares of all its events, and None if
    nothing is known. ``of_all``: whether the coverage is of all events. Otherwise it is of late events.
    """

    bound_us: int
    reason: Reason
    why: str
    late_share: float | None = None
    lost_share: float | None = None
    of_all: bool = False


def decide(
    asked: Cleanup,
    known: History | None,
    *,
    at_least_us: int = 0,
    room_us: int | None = None,
    miss: float | None = None,
) -> BoundDecision:
    """Decides the bound of new windows.

    ``at_least_us``: the shortest conservative bound, for example after a change of the lateness distribution.
    ``room_us``: the bound with which windows take ``max_state_bytes``, or None if it is unknown. ``miss``: the share of
    events that a learnt bound may lose, as adapted to what bounds have lost so far, or None for ``1 - coverage``.
    """
    conservative_us = max(asked.initial_bound_us, at_least_us)
    if asked.coverage is None:
        reason, bound_us = Reason.FIXED, asked.initial_bound_us
        why = "given by bound=, or by lateness.initial_bound without coverage"
    elif known is None:
        reason, bound_us = Reason.NO_HISTORY, conservative_us
        why = f"no late event yet in a window observed long enough: the conservative bound, {short_duration(bound_us)}"
    else:
        bound_us, missing = _learn(asked, asked.coverage, known)
        if missing:
            reason, (bound_us, which) = Reason.UNSUPPORTED, _conservative(asked, asked.coverage, known, conservative_us)
            why = f"{missing}: {which}, {short_duration(bound_us)}"
        else:
            bound_us = bound_us if miss is None else _adapted(asked, known, bound_us, miss)
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
            why += f"; {1 - later:.2%} of {_covered(known)} are expected in time"
        decision = BoundDecision(
            bound_us, reason, why, known.late_share, min(known.late_share, share * later), known.of_all
        )
    if known is None:
        return cut_to_room(asked, decision, room_us)
    return cut_to_room(asked, decision, room_us, lambda us: float(known.later_than(us)))


def carried(asked: Cleanup, decision: BoundDecision, bound_us: int, later: float) -> BoundDecision:
    """Returns the decision with the bound that fits the latest windows, because lateness has drifted.

    A learnt bound grows to four times itself or to the initial bound, whichever is longer; a conservative one does not
    grow. ``later``: the share of late events that are expected after ``bound_us``.
    """
    longest_us, reason = decision.bound_us, decision.reason
    if reason is Reason.LEARNT:
        longest_us = max(MOST_CARRIED * longest_us, asked.initial_bound_us)
    bound_us = min(bound_us, longest_us)
    why = f"{short_duration(bound_us)} for late events like those of the latest windows, in place of: {decision.why}"
    if bound_us > asked.max_bound_us:
        reason, bound_us = Reason.MAX_BOUND, asked.max_bound_us
        why = f"cut to max_bound, {short_duration(bound_us)}, from: {why}"
    lost = None if decision.late_share is None else decision.late_share * later
    return replace(decision, bound_us=bound_us, reason=reason, why=why, lost_share=lost)


def cut_to_room(
    asked: Cleanup,
    decision: BoundDecision,
    room_us: int | None,
    later_than: Callable[[int], float | None] = lambda us: None,
) -> BoundDecision:
    """Cuts the bound of a decision to ``room_us``, if ``max_state`` is set.

    ``later_than``: the share of events that are later than a lateness; of all events if ``decision.of_all``, otherwise
    of late ones, or None if it is unknown.
    """
    if room_us is None or asked.max_state_bytes is None or decision.bound_us <= room_us:
        return decision
    bound_us = max(0, room_us)
    why = (
        f"cut to {short_duration(bound_us)}, because max_state is {asked.max_state_bytes:,} bytes, from: {decision.why}"
    )
    later = later_than(bound_us - 1)
    if decision.late_share is None or later is None:
        return BoundDecision(bound_us, Reason.MAX_STATE, why)
    why += f"; {1 - later:.2%} of {'all' if decision.of_all else 'late'} events are expected in time"
    lost = later if decision.of_all else decision.late_share * later
    return BoundDecision(
        bound_us, Reason.MAX_STATE, why, decision.late_share, min(decision.late_share, lost), decision.of_all
    )


def _learn(asked: Cleanup, coverage: float, known: History) -> tuple[int, str]:
    """Returns the smallest bound that covers enough, and what the history lacks to support it ("" if nothing)."""
    allowed = 1.0 - coverage
    fits = known.at_most(asked.confidence) <= allowed
    first = int(np.argmax(fits))
    if known.watched_us < asked.initial_bound_us:
        back = short_duration(max(0, known.watched_us))
        return 0, f"the history of {back} is shorter than initial_bound ({short_duration(asked.initial_bound_us)})"
    if known.epochs < FEWEST_EPOCHS:
        return 0, f"only {known.epochs} stretches of time had events"
    if not fits[first]:
        events = f"{known.events:,} {'' if known.of_all else 'late '}events"
        return 0, f"{events} do not support {coverage:.6g} with confidence {asked.confidence:.6g}"
    bound_us = int(known.edges_us[first]) + 1
    if known.unseen > MOST_UNSEEN * allowed:
        return 0, f"{known.unseen:.2g} of {_covered(known)} may be later than anything that could be observed yet"
    if known.watched_us < TIMES_THE_BOUND * bound_us:
        back = short_duration(known.watched_us)
        return 0, f"the history of {back} is too short to see what comes later than {short_duration(bound_us)}"
    return bound_us, ""


def _adapted(asked: Cleanup, known: History, bound_us: int, miss: float) -> int:
    """Returns the bound at another level than the one that was asked, as far as the history shows what comes later."""
    fits = known.at_most(asked.confidence) <= miss
    first = int(np.argmax(fits)) if fits.any() else len(fits) - 1
    adapted_us = int(known.edges_us[first]) + 1
    return min(adapted_us, max(bound_us, known.watched_us // TIMES_THE_BOUND))


def _conservative(asked: Cleanup, coverage: float, known: History, least_us: int) -> tuple[int, str]:
    """Returns the conservative bound, and its name. It is at least as long as the bound of any coverage that is
    supported.
    """
    losing, longest_us = float(known.later_than(least_us - 1)), int(known.edges_us[-1])
    if losing > 1.0 - coverage and longest_us >= least_us:
        return longest_us + 1, f"{short_duration(least_us)} would lose {losing:.2%}, so the longest lateness seen"
    conservative = "the conservative bound"
    # An edge is the bound of some supported coverage if the edge before it loses too much for that coverage.
    before = np.concatenate([[np.inf], known.at_most(asked.confidence)[:-1]])
    supported = (TIMES_THE_BOUND * (known.edges_us + 1) <= known.watched_us) & (MOST_UNSEEN * before > known.unseen)
    if known.epochs < FEWEST_EPOCHS or known.watched_us < asked.initial_bound_us or not supported.any():
        return least_us, conservative
    return max(least_us, int(known.edges_us[np.flatnonzero(supported)[-1]]) + 1), conservative


def _why_learnt(asked: Cleanup, coverage: float, known: History, bound_us: int) -> str:
    later = float(known.later_than(bound_us - 1))
    return (
        f"covers {coverage:.6g} of {_covered(known)} with confidence {asked.confidence:.6g}: of {known.events:,} "
        f"that were observed for up to {short_duration(known.watched_us)}, {later:.2%} came later ({known.source})"
    )


def _covered(known: History) -> str:
    return "all events" if known.of_all else "late events"
