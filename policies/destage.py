"""What leaves memory, and when: the local and global policies of the paper's section 3.2. Pure.

A policy suggests; the store's manager disposes, and logs what it refused. That a window is destaged when it expires
is the life of a window, not a matter of policy (docs/concepts.md).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Victim = Literal["largest", "slowest"]


@dataclass(frozen=True, slots=True)
class WindowView:
    """What a policy may know of a window that has anything in memory.

    ``m_bytes``: in memory, with what is on its way to the disk: it counts until it has left. ``p_bytes``: on disk
    only. ``keep_bytes``: its bootstrap part, which no policy asks to leave. ``last_append_s``: when it last got new
    events or a watermark, or was last fetched for an execution, whichever is latest. ``append_rate_bytes_per_s``: how
    fast events come to it.
    """

    name: Hashable
    m_bytes: int
    p_bytes: int
    keep_bytes: int
    expired: bool
    last_append_s: float
    append_rate_bytes_per_s: float

    @property
    def gain_bytes(self) -> int:
        """What leaves memory if the window is destaged but for its bootstrap part."""
        return max(0, self.m_bytes - self.keep_bytes)


@dataclass(frozen=True, slots=True)
class MemoryView:
    """What a policy may know of a host.

    ``used_bytes``: what all blocks in memory take, of ``limit_bytes``, the budget. ``machine_share``: the share of
    the machine's memory, or the container's, that is in use, by whomever: 0 to 1. ``median_execution_s``: of the latest
    executions of all operators on the host, of aggregates and of functions; windows that are computed together are one
    execution. None as long as there was none.
    """

    now_s: float
    used_bytes: int
    limit_bytes: int
    machine_share: float
    median_execution_s: float | None
    windows: Sequence[WindowView]

    @property
    def pressure(self) -> float:
        """The larger of the budget's use and the machine's; may exceed 1, and is infinite without a budget."""
        if self.limit_bytes > 0:
            return max(self.used_bytes / self.limit_bytes, self.machine_share)
        return float("inf") if self.used_bytes > 0 else self.machine_share


@dataclass(frozen=True, slots=True)
class Suggestion:
    """To destage a window but for its first ``keep_bytes``; ``reason`` is for the log."""

    name: Hashable
    keep_bytes: int
    reason: str


class DestagePolicy(Protocol):
    """What ``destage.class`` in a policy file names. It may remember what it saw, but must not act by itself."""

    def suggest(self, view: MemoryView) -> list[Suggestion]:
        """What should leave memory now, in that order. Called now and then; the same answer twice does no harm."""


@dataclass(slots=True, kw_only=True)
class StandardDestage:
    """The paper's policies; every threshold is a share, 0 to 1, of the pressure.

    - Local: a window to which nothing came for longer than ``idle_after_s``, or ``idle_multiple`` times the median
      execution time (tau), is destaged. Neither: none is.
    - Global, moderate pressure: windows are destaged one by one, the ``victim`` first (the largest, which frees most
      at once, or the one with the slowest appends, whose execution suffers least), until the use that is to be
      expected lies at ``resume``. This goes on, look for look, until the pressure really is at ``resume``: what
      starts at one threshold and ends at another does not flap.
    - Global, scarce memory: all windows are destaged.

    Always but for the bootstrap part, ``keep_fraction`` of a window (rho_min), which comes as ``keep_bytes``.
    Raises ValueError for thresholds that are out of range or out of order.
    """

    keep_fraction: float = 0.0
    idle_after_s: float | None = None
    idle_multiple: float | None = None
    moderate: float = 0.75
    resume: float = 0.60
    scarce: float = 0.90
    victim: Victim = "largest"
    pressed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.resume < self.moderate <= self.scarce <= 1:
            found = f"resume {self.resume}, moderate {self.moderate}, scarce {self.scarce}"
            raise ValueError(f"{found}: must be 0 <= resume < moderate <= scarce <= 1")
        if not 0 <= self.keep_fraction <= 1:
            raise ValueError(f"keep_fraction {self.keep_fraction}: must be between 0 and 1")
        if self.idle_after_s is not None and self.idle_multiple is not None:
            raise ValueError("idle_after_s and idle_multiple: give one of them")
        if not all(limit is None or limit > 0 for limit in (self.idle_after_s, self.idle_multiple)):
            raise ValueError(f"idle after {self.idle_after_s} s or {self.idle_multiple} times: must be above 0")
        if self.victim not in ("largest", "slowest"):
            raise ValueError(f"victim {self.victim!r}: must be 'largest' or 'slowest'")

    def suggest(self, view: MemoryView) -> list[Suggestion]:
        pressure = view.pressure
        self.pressed = pressure >= self.moderate or (self.pressed and pressure > self.resume)
        if not self.pressed and self.idle_after_s is None and self.idle_multiple is None:
            return []  # without a look at the windows, which may be many
        windows = [w for w in view.windows if w.gain_bytes > 0]
        if pressure >= self.scarce:
            why = f"memory is scarce: {pressure:.0%} of it is used, {self.scarce:.0%} or more"
            return [self._suggestion(w, why) for w in windows]
        idle = self._idle(view, windows)
        suggestions = [self._suggestion(w, why) for w, why in idle]
        if self.pressed:
            gone = {w.name for w, _ in idle}
            projected_bytes = view.used_bytes - sum(w.gain_bytes for w, _ in idle)
            why = f"{self.victim} window, and {pressure:.0%} of memory is used: down to {self.resume:.0%}"
            for window in self._victims([w for w in windows if w.name not in gone]):
                if projected_bytes <= self._target_bytes(view):
                    break
                projected_bytes -= window.gain_bytes
                suggestions.append(self._suggestion(window, why))
        return suggestions

    def _idle(self, view: MemoryView, windows: Sequence[WindowView]) -> list[tuple[WindowView, str]]:
        """Windows to which nothing came for long, the longest idle first, and since when."""
        after_s = self.idle_after_s
        if self.idle_multiple is not None and view.median_execution_s is not None:
            after_s = self.idle_multiple * view.median_execution_s
        if after_s is None:
            return []
        idle = [(w, view.now_s - w.last_append_s) for w in windows]
        idle = sorted(((w, idle_s) for w, idle_s in idle if idle_s > after_s), key=lambda pair: -pair[1])
        return [(w, f"idle for {idle_s:.3g} s, more than {after_s:.3g} s") for w, idle_s in idle]

    def _victims(self, windows: Sequence[WindowView]) -> list[WindowView]:
        """In the order in which they go; the larger first among equally slow ones, and the other way round."""
        if self.victim == "largest":
            return sorted(windows, key=lambda w: (-w.gain_bytes, w.append_rate_bytes_per_s))
        return sorted(windows, key=lambda w: (w.append_rate_bytes_per_s, -w.gain_bytes))

    def _target_bytes(self, view: MemoryView) -> float:
        """The use at which the pressure is expected to lie at ``resume``.

        How much of the machine's memory is ours is not known: if that is what presses, our use shrinks by the same
        ratio as the pressure should, and the next look tells whether it was enough.
        """
        target_bytes = self.resume * view.limit_bytes
        if view.machine_share > 0:
            target_bytes = min(target_bytes, view.used_bytes * self.resume / view.machine_share)
        return target_bytes

    def _suggestion(self, window: WindowView, why: str) -> Suggestion:
        kept = f"; the first {self.keep_fraction:.2%} stay" if window.keep_bytes and self.keep_fraction else ""
        return Suggestion(window.name, window.keep_bytes, why + kept)
