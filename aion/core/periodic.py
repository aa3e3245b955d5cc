"""Windows of fixed lengths: tumbling, sliding and cumulative ones. Pure.

All three are made of the same slices, and one formula says which of them a window has. Window number ``k`` ends where
``offset + k * slide + shortest`` is, and begins at the last multiple of ``start_every`` (plus ``offset``) that is not
after ``offset + k * slide``. Tumbling and sliding windows all have one length, and each begins at an instant of its
own. Cumulative windows share their starts. No two windows of a definition have the same end, so its end identifies a
window among those of its definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from aion.base.time import format_duration
from aion.core.filling import Fill, Value
from aion.core.timing import NO_TIMING, Duration, DurationOrZero, Timing, When, checked_us, positive_us
from aion.errors import WindowError

Ints = npt.NDArray[np.int64]


class Family(NamedTuple):
    """Evenly spaced edges: ``phase_us + k * period_us`` for every integer k."""

    period_us: int
    phase_us: int

    def floor(self, t_us: int) -> int:
        """Returns the last edge at or before ``t_us``."""
        return t_us - (t_us - self.phase_us) % self.period_us

    def after(self, t_us: int) -> int:
        """Returns the first edge after ``t_us``."""
        return self.floor(t_us) + self.period_us


@dataclass(frozen=True, slots=True)
class Periodic:
    """Windows ``[start, start + size)`` whose starts are ``offset + k * slide``.

    :class:`Cumulative` windows have several lengths, and ``size`` is the longest.
    """

    size_us: int
    slide_us: int
    offset_us: int
    timing: Timing = NO_TIMING
    fill: Fill | None = None

    @property
    def shortest_us(self) -> int:
        """The length of the shortest window."""
        return self.size_us

    @property
    def start_every_us(self) -> int:
        """How far apart the starts of windows are."""
        return self.slide_us

    @property
    def overlap(self) -> int:
        """In how many windows an event is at most."""
        return -(-self.size_us // self.slide_us)

    def covering(self, t_us: int) -> Iterator[tuple[int, int]]:
        """Yields the start and the end of each window that contains the instant ``t_us``, the latest end first."""
        newest = (t_us - self.offset_us) // self.start_every_us * self.start_every_us + self.start_every_us
        instant = self.offset_us + newest - self.slide_us
        while instant + self.shortest_us > t_us:
            yield instant - (instant - self.offset_us) % self.start_every_us, instant + self.shortest_us
            instant -= self.slide_us

    @property
    def reach_us(self) -> int:
        """The length of the longest window."""
        return self.size_us

    def stretches(self) -> tuple[int, int, int]:
        """Size, slide and offset of evenly spaced stretches; each window lies in one of them."""
        return self.size_us, self.start_every_us, self.offset_us

    # A set of windows is stored as runs of numbers in equal steps (:class:`aion.core.timed.purged.Runs`).

    @property
    def run_step(self) -> int:
        return self.slide_us

    def run_values(self, starts_us: Ints, ends_us: Ints) -> Ints:
        """Returns what stands for each window in a run."""
        return ends_us - self.shortest_us

    def ended_run_value(self, us: int) -> int:
        """Runs up to this value hold windows that end at ``us`` or before."""
        return us - self.shortest_us

    def families(self) -> set[Family]:
        """Returns the edges of these windows: their starts and their ends."""
        return {
            Family(self.slide_us, self.offset_us % self.slide_us),
            Family(self.slide_us, (self.offset_us + self.shortest_us) % self.slide_us),
        }

    def spec(self) -> dict[str, int | str]:
        """Returns what identifies this definition after a restart."""
        return {
            "type": "periodic",
            "size_us": self.size_us,
            "slide_us": self.slide_us,
            "offset_us": self.offset_us,
            **(self.fill.spec() if self.fill is not None else {}),
        }


class Tumbling(Periodic):
    """Windows of ``size`` that neither overlap nor leave gaps.

    ``Tumbling("1 minute")``. ``offset`` shifts all windows, e.g. ``Tumbling("1 day", offset="-5 hours")``.

    ``fill``: a key has a row for each window from that of its first event on, also if no event lies in it. With
    ``"zero"``, its counts and sums are 0 and its other results null; with ``"null"``, all are null. ``fill_for``: how
    long that goes on after the last window with an event, e.g. ``"1 day"``. Then the next event begins it anew.
    ``Sliding``, ``Cumulative`` and ``Calendar`` take both, too (docs/reference/panes.md).

    Raises WindowError for a size of zero or less, and for one of ``fill`` and ``fill_for`` without the other.
    """

    __slots__ = ()

    def __init__(
        self,
        size: Duration,
        offset: DurationOrZero = 0,
        *,
        fill: Value | None = None,
        fill_for: Duration | None = None,
        **when: Unpack[When],
    ) -> None:
        size_us = positive_us(size, "Tumbling: size")
        filled = Fill.of("Tumbling", fill, fill_for)
        Periodic.__init__(self, size_us, size_us, _offset(offset, size_us), Timing.of("Tumbling", when), filled)

    def __str__(self) -> str:
        return f"tumbling {format_duration(self.size_us)}{_offset_suffix(self.offset_us)}"

    __repr__ = __str__


class Sliding(Periodic):
    """Windows of ``size``, a new one every ``slide``. ``slide`` need not divide ``size``.

    ``Sliding("5 minutes", "1 minute")``. Raises WindowError if a duration is not positive, or if ``slide`` is longer
    than ``size`` (events between windows would belong to none).
    """

    __slots__ = ()

    def __init__(
        self,
        size: Duration,
        slide: Duration,
        offset: DurationOrZero = 0,
        *,
        fill: Value | None = None,
        fill_for: Duration | None = None,
        **when: Unpack[When],
    ) -> None:
        size_us, slide_us = positive_us(size, "Sliding: size"), positive_us(slide, "Sliding: slide")
        if slide_us > size_us:
            raise WindowError(
                f"Sliding: a slide of {format_duration(slide_us)} is longer than the size of "
                f"{format_duration(size_us)}, so events between windows would be lost; "
                "use a slide of at most the size"
            )
        filled = Fill.of("Sliding", fill, fill_for)
        Periodic.__init__(self, size_us, slide_us, _offset(offset, slide_us), Timing.of("Sliding", when), filled)

    def __str__(self) -> str:
        return (
            f"sliding {format_duration(self.size_us)} by {format_duration(self.slide_us)}"
            f"{_offset_suffix(self.offset_us)}"
        )

    __repr__ = __str__


class Cumulative(Periodic):
    """Windows that grow: each period of ``size`` has a window for each ``step``, from its start to the step's end.

    ``Cumulative("10 minutes", "1 hour")`` has the windows 12:00 to 12:10, 12:00 to 12:20, and so on up to 12:00 to
    13:00, and then 13:00 to 13:10. So its rows are the running total of the hour, and each hour begins anew. Flink
    calls this CUMULATE. ``offset`` shifts all windows, e.g. ``Cumulative("1 minute", "1 day", offset="-5 hours")``.
    Raises WindowError if a duration is not positive, or if ``size`` is not a multiple of ``step``.
    """

    __slots__ = ()

    def __init__(
        self,
        step: Duration,
        size: Duration,
        offset: DurationOrZero = 0,
        *,
        fill: Value | None = None,
        fill_for: Duration | None = None,
        **when: Unpack[When],
    ) -> None:
        step_us, size_us = positive_us(step, "Cumulative: step"), positive_us(size, "Cumulative: size")
        if size_us % step_us:
            raise WindowError(
                f"Cumulative: a size of {format_duration(size_us)} is not a multiple of the step of "
                f"{format_duration(step_us)}, so no window would be as long as the size; use a step that divides the "
                "size, e.g. Cumulative('10 minutes', '1 hour')"
            )
        filled = Fill.of("Cumulative", fill, fill_for)
        Periodic.__init__(self, size_us, step_us, _offset(offset, size_us), Timing.of("Cumulative", when), filled)

    @property
    def shortest_us(self) -> int:
        return self.slide_us

    @property
    def start_every_us(self) -> int:
        return self.size_us

    def spec(self) -> dict[str, int | str]:
        return {
            "type": "cumulative",
            "step_us": self.slide_us,
            "size_us": self.size_us,
            "offset_us": self.offset_us,
            **(self.fill.spec() if self.fill is not None else {}),
        }

    def __str__(self) -> str:
        return (
            f"cumulative {format_duration(self.size_us)} by {format_duration(self.slide_us)}"
            f"{_offset_suffix(self.offset_us)}"
        )

    __repr__ = __str__


def is_periodic(spec: Mapping[str, Any]) -> bool:
    """Returns whether a stored definition is one of windows of fixed lengths."""
    return spec.get("type") in ("periodic", "cumulative")


def periodic_of(spec: Mapping[str, Any], timing: Timing = NO_TIMING) -> Periodic:
    """Returns windows of fixed lengths from what :meth:`Periodic.spec` says of them."""
    if spec["type"] == "periodic":
        return Periodic(spec["size_us"], spec["slide_us"], spec["offset_us"], timing, Fill.of_spec(spec))
    step, size, offset = (timedelta(microseconds=spec[name]) for name in ("step_us", "size_us", "offset_us"))
    made = Cumulative(step, size, offset)
    object.__setattr__(made, "timing", timing)
    object.__setattr__(made, "fill", Fill.of_spec(spec))
    return made


def _offset(value: DurationOrZero, period_us: int) -> int:
    # Modulo the period, so that equal definitions compare equal: an offset of a whole period changes nothing.
    return checked_us(value, "offset") % period_us


def _offset_suffix(offset_us: int) -> str:
    return f" offset {format_duration(offset_us)}" if offset_us else ""
