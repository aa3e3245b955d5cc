"""What a query stands on: the decision that holds, what is expected of late events, and when to ask again. Pure.

With ``lateness.per: query`` this is what its shards tell each other. Each keeps what itself has observed, and nobody
else's; the one that asks next asks of all observations together (:class:`aion.core.lateness.bound.AdaptiveBound`), and
the others take over what it found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.core.lateness.observe import Floats, Lateness
from aion.core.numbers import MOST
from aion.errors import FormatError
from policies.cleanup import BoundDecision, Reason

_NEVER = -(2**63)


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
        """Raises ValueError, TypeError, KeyError, OverflowError for what is none."""
        at, later = np.array(value["lateness_us"]), np.array(value["later"], np.float64)
        late_share, per_window = float(value["late_share"]), float(value["per_window"])
        if at.dtype != np.int64 or at.ndim != 1 or at.shape != later.shape or not at.size or (np.diff(at) <= 0).any():
            raise ValueError("an outlook has latenesses in ascending order, and a share for each")
        if not (np.isfinite(later).all() and 0 <= late_share <= 1 and 0 <= per_window < np.inf):
            raise ValueError("an outlook has shares from 0 to 1")
        return cls(_whole(value["version"]), at, later, late_share, per_window)


@dataclass(frozen=True, slots=True)
class LearntBound:
    """What was found when history was last asked.

    ``decision``: of new windows, before ``max_state`` cuts it, which each shard does for itself. ``asked_us``: the
    watermark then; None: not yet. ``next_us``: that from which on it is asked again; None: at the next advance.
    ``shards``: from how many it had observations. ``restarts``: changes of regime so far, the last at watermark
    ``restarted_us``, in words ``last_change``; as long as it is ``relearning``, no bound is below ``at_least_us``.
    ``patience_us``: no change is looked for in a history that is shorter: each one that was found doubles it, so that
    what repeats, as day and night do, is in the end seen to.
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

    @property
    def age(self) -> tuple[int, int, int, int]:
        """Of two, the greater one is to be trusted: the newer change, the newer question, more shards, more caution."""
        changed = _NEVER if self.restarted_us is None else self.restarted_us
        asked = _NEVER if self.asked_us is None else self.asked_us
        return changed, asked, self.shards, self.decision.bound_us

    def later_than(self, lateness_us: int) -> float | None:
        """The share that is later, of the events that the decision is to cover; None as long as nothing is known."""
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
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LearntBound:
        """What is besides its fields is passed over. Raises KeyError, TypeError, ValueError, OverflowError for what is
        none.
        """
        decision, outlook, words = value["decision"], value["outlook"], value["last_change"]
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
        )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or not -MOST <= value <= MOST:
        raise ValueError(f"{value!r:.50} is not an integer of at most 63 bits")
    return value


def _instant(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _share(value: Any) -> float | None:
    return None if value is None else float(value)


def heard(told: Iterable[Any], settings: Mapping[str, Any]) -> list[LearntBound]:
    """What other shards told that is of use: with the same settings, and nothing that cannot be read."""
    found = []
    for value in told:
        try:
            if value["settings"] == settings:
                found.append(LearntBound.from_json(value))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue  # of another version of Aion: it will say it again once it is the same
    return found


def observations(learnt: Iterable[Any], half_life_us: int, from_us: int | None) -> list[Lateness]:
    """What other shards observed of windows that ended at ``from_us`` or later; what cannot be read is passed over."""
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
