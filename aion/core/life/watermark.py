"""The watermark: it only moves forward. Pure."""

from __future__ import annotations

from aion.base.numbers import within


class Watermark:
    """The instant up to which events are assumed to be complete. It never goes back.

    ``at_us``: None until the first advance. Until then no event is late, whatever its time. ``step_us``: how far the
    last advance went, which is its speed per batch.
    """

    __slots__ = ("at_us", "step_us")

    def __init__(self, at_us: int | None = None, step_us: int = 0) -> None:
        self.at_us = at_us
        self.step_us = step_us

    def advance(self, to_us: int) -> bool:
        """Moves the watermark. Returns whether it moved: an older instant is ignored, as Spark does.

        An instant out of range counts as the end of the range.
        """
        to_us = within(to_us)
        if self.at_us is not None and to_us <= self.at_us:
            return False
        if self.at_us is not None:
            self.step_us = to_us - self.at_us
        self.at_us = to_us
        return True

    def expected_next(self) -> int | None:
        """Where it will be after another step like the last one. None before the first step."""
        return self.at_us + self.step_us if self.at_us is not None and self.step_us else None

    def passed(self, t_us: int) -> bool:
        return self.at_us is not None and self.at_us >= t_us
