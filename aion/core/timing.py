"""When the windows of a definition run, and how long they are kept, if the definition says so itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypedDict

from aion.base.numbers import LONGEST_US
from aion.base.time import EACH_BATCH_US, duration_us
from aion.errors import WindowError
from policies.durations import short_duration

Duration: TypeAlias = str | timedelta
DurationOrZero: TypeAlias = Duration | Literal[0]


class When(TypedDict, total=False):
    """Keywords of every definition: when its windows run, and how long they are kept. They outrank the policy.

    ``early``: how far the watermark moves between two early panes of an open window, or ``"batch"``: they come at the
    end of each batch that brings news (``trigger.early`` of the policy).
    ``bound``: how long a window is kept after its end, in the place of the bound that the policy learns.
    ``trigger``: when a late window runs again: a kind, e.g. ``"every_batch"``, or the keys of ``trigger`` of the
    policy, e.g. ``{"kind": "count", "count": 10}``.
    """

    early: Duration | Literal["batch"] | None
    bound: DurationOrZero | None
    trigger: str | Mapping[str, Any] | None


_GONE = {"lateness": "bound=", "emit_on": "on_arrival='emit'"}


@dataclass(frozen=True, slots=True)
class Timing:
    """What a definition says about its own executions. The policy decides what is None. A restart may change it.

    ``trigger``: the items of the mapping, so that a definition can be hashed.
    """

    early_us: int | None = None
    bound_us: int | None = None
    trigger: tuple[tuple[str, Any], ...] | None = None

    @classmethod
    def of(cls, what: str, when: When) -> Timing:
        """Checks the keywords of a definition. ``what``: its name, for errors. Raises WindowError and TypeError."""
        for name in when:
            if name in _GONE:
                raise TypeError(f"{what}() has no keyword {name!r} any more; write {_GONE[name]}")
            if name not in When.__annotations__:
                raise TypeError(f"{what}() got an unexpected keyword argument {name!r}")
        early, bound, trigger = when.get("early"), when.get("bound"), when.get("trigger")
        if isinstance(trigger, str):
            trigger = {"kind": trigger}
        if trigger is not None and not isinstance(trigger, Mapping):
            raise WindowError(
                f"{what}: trigger of {trigger!r} is neither a kind nor a mapping; give e.g. 'every_batch' or "
                "{'kind': 'count', 'count': 10}"
            )
        if trigger is not None and not trigger:
            raise WindowError(f"{what}: trigger of {{}} is empty; give e.g. {{'kind': 'count', 'count': 10}}")
        if trigger is not None and "early" in trigger:
            raise WindowError(f"{what}: trigger of {dict(trigger)!r}: give early= beside trigger=")
        return cls(
            None if early is None else early_us(early, f"{what}: early"),
            None if bound is None else not_negative_us(bound, f"{what}: bound"),
            None if trigger is None else tuple(trigger.items()),
        )


NO_TIMING = Timing()


def early_us(value: Duration, what: str) -> int:
    if isinstance(value, str) and value.strip().lower() == "batch":
        return EACH_BATCH_US
    return positive_us(value, what)


def positive_us(value: Duration, what: str) -> int:
    us = checked_us(value, what)
    if us <= 0:
        raise WindowError(f"{what} of {value!r} is not positive; give e.g. '1 minute'")
    return _bounded(us, value, what)


def not_negative_us(value: DurationOrZero, what: str) -> int:
    us = checked_us(value, what)
    if us < 0:
        raise WindowError(f"{what} of {value!r} is negative; give e.g. '1 minute'")
    return _bounded(us, value, what)


def _bounded(us: int, value: DurationOrZero, what: str) -> int:
    if us > LONGEST_US:
        raise WindowError(f"{what} of {value!r} is longer than {short_duration(LONGEST_US)}")
    return us


def checked_us(value: DurationOrZero, what: str) -> int:
    try:
        return duration_us(value, what=what)
    except ValueError as error:
        raise WindowError(str(error)) from None
