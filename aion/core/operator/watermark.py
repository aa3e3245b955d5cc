"""Monotone progress of event time. Pure."""

from __future__ import annotations

from aion.core.numbers import within


class Watermark:
    """The instant up to which events are assumed complete; never goes back.

    ``at_us`` is None until the first advance: nothing is late yet, whatever its time. ``step_us`` is how far the last
    advance went: its velocity per batch.
    """

    __slots__ = ("at_us", "step_us")

    def __init__(self, at_us: int | None = None, step_us: int = 0) -> None:
        self.at_us = at_us
        self.step_us = step_us

    def advance(self, to_us: int) -> bool:
        """Whether ``to_us`` is progress; an older one is ignored, as Spark does. One out of range stops at its end."""
        to_us = within(to_us)
        if self.at_us is not None and to_us <= self.at_us:
            return False
        if self.at_us is not None:
            self.step_us = to_us - self.at_us
        self.at_us = to_us
        return True

    def expected_next(self) -> int | None:
        """Where it will be after another step like the last one; None before there was one."""
        return self.at_us + self.step_us if self.at_us is not None and self.step_us else None

    def passed(self, t_us: int) -> bool:
        return self.at_us is not None and self.at_us >= t_us
