"""What was learnt of lateness: the decision, the outlook on late events, and when to evaluate history again. Pure.

With ``lateness.per: query`` the shards of a query share this. Each shard keeps only its own observations. The shard
that evaluates history next uses the observations of all shards (:class:`aion.core.lateness.bound.AdaptiveBound`), and
the others adopt its result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.base.numbers import MOST
from aion.core.lateness.observe import Floats, Lateness
from aion.errors import FormatError
from policies.cleanup import BoundDecision, Reason

_NEVER = -(2**63)


@dataclass(frozen=True, slots=True)
class Outlook:
    """How late the late events of a window are expected to be, as a curve of a few dozen points.

    It is replaced only when lateness has moved far enough; ``version`` then goes up. ``lateness_us``: (P,), ascending
    from -1. ``later``: the share of late events that are later, (P,), from 1 downwards. ``late_share``: the share of
    all events that are late.
    """

    version: int
    lateness_us: npt.NDArray[np.int64]
    later: Floats
    late_share: float

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
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Outlook:
        """Raises ValueError, TypeError, KeyError or OverflowError for a value that is not an outlook."""
        at, later = np.array(value["lateness_us"]), np.array(value["later"], np.float64)
        late_share = float(value["late_share"])
        if at.dtype != np.int64 or at.ndim != 1 or at.shape != later.shape or not at.size or (np.diff(at) <= 0).any():
            raise ValueError("an outlook needs latenesses in ascending order, and a share for each")
        if not (np.isfinite(later).all() and 0 <= late_share <= 1):
            raise ValueError("an outlook needs shares from 0 to 1")
        return cls(_whole(value["version"]), at, later, late_share)


@dataclass(frozen=True, slots=True)
class LearntBound:
    """The result of the last evaluation of history.

    ``decision``: for new windows, before ``max_state`` cuts it (each shard does that for itself). ``asked_us``: the
    watermark at the evaluation, or None if there was none yet. ``next_us``: the watermark from which history is
    evaluated again, or None for the next advance. ``shards``: how many shards' observations went in. ``restarts``:
    changes of regime so far. The last one was at watermark ``restarted_us``; ``last_change`` describes it. While
    ``relearning`` after it, no bound is below ``at_least_us``. ``patience_us``: the shortest history in which a change
    is looked for. A change sets it to twice the history it was found in (at most the half-life), so that a pattern that
    repeats, as day and night do, in the end counts as normal. ``usual``: how late late events were in the history from
    which a bound was last learnt, and ``usual_us``, that bound. They survive a change
    (:mod:`aion.core.lateness.drift`).
    """

    decision: BoundDecision
    outlook: Outlook | None = None
    asked_us: int | None = None
    next_us: int | None = None
    shards: int = 1
    restarts: int = 0
    restarted_us: int | None = None
    last_change: str | None = None
    relearning: bool = False
    patience_us: int = 0
    at_least_us: int = 0
    usual: Outlook | None = None
    usual_us: int = 0

    @property
    def age(self) -> tuple[int, int, int, int]:
        """A sort key, the largest wins: the newer change, then the newer evaluation, more shards, the longer bound."""
        changed = _NEVER if self.restarted_us is None else self.restarted_us
        asked = _NEVER if self.asked_us is None else self.asked_us
        return changed, asked, self.shards, self.decision.bound_us

    def later_than(self, lateness_us: int) -> float | None:
        """Returns the share that is later, of the events that the decision has to cover. None until something is
        known.
        """
        if self.outlook is None:
            return None
        share = self.outlook.late_share if self.decision.of_all else 1.0
        return share * float(self.outlook.later_than(lateness_us))

    def to_json(self) -> dict[str, Any]:
        value = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **value,
            "decision": asdict(self.decision),
            "outlook": None if self.outlook is None else self.outlook.to_json(),
            "usual": None if self.usual is None else self.usual.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LearntBound:
        """Ignores unknown fields. Raises KeyError, TypeError, ValueError or OverflowError for any other value."""
        decision, outlook, words = value["decision"], value["outlook"], value["last_change"]
        usual = value.get("usual")  # None in what Aion wrote before there was one
        return cls(
            BoundDecision(
                _whole(decision["bound_us"]),
                Reason(decision["reason"]),
                str(decision["why"]),
                _share(decision["late_share"]),
                _share(decision["lost_share"]),
                bool(decision["of_all"]),
            ),
            None if outlook is None else Outlook.from_json(outlook),
            _instant(value["asked_us"]),
            _instant(value["next_us"]),
            shards=_whole(value["shards"]),
            restarts=_whole(value["restarts"]),
            restarted_us=_instant(value["restarted_us"]),
            last_change=None if words is None else str(words),
            relearning=bool(value["relearning"]),
            patience_us=_whole(value["patience_us"]),
            at_least_us=_whole(value["at_least_us"]),
            usual=None if usual is None else Outlook.from_json(usual),
            usual_us=_whole(value.get("usual_us", 0)),
        )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or not -MOST <= value <= MOST:
        raise ValueError(f"{value!r:.50} is not an integer of at most 63 bits")
    return value


def _instant(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _share(value: Any) -> float | None:
    return None if value is None else float(value)


def newest(results: Sequence[LearntBound]) -> LearntBound:
    """Returns the result that all shards of a query use.

    Attempts that ran again may have found different results of one age, because they received different things. Then
    what the results contain decides, so that every shard that sees both chooses the same one.
    """
    age = max(learnt.age for learnt in results)
    return max((learnt for learnt in results if learnt.age == age), key=lambda learnt: json.dumps(learnt.to_json()))


def usable(published: Iterable[Any], settings: Mapping[str, Any]) -> list[LearntBound]:
    """Returns those results of other shards that can be read and were found with the same settings."""
    found = []
    for value in published:
        try:
            if value["settings"] == settings:
                found.append(LearntBound.from_json(value))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue  # another version of Aion wrote it: that shard will publish again once the versions agree
    return found


def observations(learnt: Iterable[Any], half_life_us: int, from_us: int | None) -> list[Lateness]:
    """Returns what other shards observed of windows that ended at ``from_us`` or later. Skips what cannot be read."""
    found = []
    for value in learnt:
        try:
            lateness = Lateness.from_json(value, half_life_us)
            if from_us is not None:
                lateness.forget_before(from_us)
        except (KeyError, TypeError, ValueError, OverflowError, FormatError):
            continue
        found.append(lateness)
    return found
