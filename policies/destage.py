"""Decides what leaves memory, and when: the local and global policies of the paper's section 3.2. Pure.

A policy makes suggestions. The store's manager carries them out, or refuses them and logs why. A window that expires is
always destaged, without a policy (docs/start/concepts.md).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Victim = Literal["largest", "slowest"]


@dataclass(frozen=True, slots=True)
class WindowView:
    """What a policy sees of a window that has anything in memory.

    ``m_bytes``: bytes in memory, including those being written to disk. ``p_bytes``: bytes that are only on disk.
    ``keep_bytes``: its bootstrap part, which should stay. ``expired``: it was destaged because it expired.
    ``last_append_s``: when it last got events, expired, or was fetched for an execution, whichever is latest.
    ``append_rate_bytes_per_s``: how fast events come in. ``due``: its place in the order in which its shard's next
    batches read windows; 0 is read first. It is None if none of them reads it, as far as is known.
    """

    name: Hashable
    m_bytes: int
    p_bytes: int
    keep_bytes: int
    expired: bool
    last_append_s: float
    append_rate_bytes_per_s: float
    due: int | None = None

    @property
    def gain_bytes(self) -> int:
        """How many bytes leave memory if the window is destaged, except for its bootstrap part."""
        return max(0, self.m_bytes - self.keep_bytes)


@dataclass(frozen=True, slots=True)
class MemoryView:
    """What a policy sees of a host.

    ``used_bytes``: bytes of all blocks in memory. ``limit_bytes``: the budget. ``machine_share``: the share of the
    machine's or container's memory that any process uses, 0 to 1. ``median_execution_s``: the median time of the latest
    executions of all operators on the host, or None if there was none yet. Windows that are computed together count as
    one execution.
    """

    now_s: float
    used_bytes: int
    limit_bytes: int
    machine_share: float
    median_execution_s: float | None
    windows: Sequence[WindowView]

    @property
    def pressure(self) -> float:
        """The share of the budget or of the machine's memory in use, whichever is larger.

        It may exceed 1. With a budget of 0 bytes, it is infinite if any memory is used.
        """
        if self.limit_bytes > 0:
            return max(self.used_bytes / self.limit_bytes, self.machine_share)
        return float("inf") if self.used_bytes > 0 else self.machine_share


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A suggestion to destage a window, except for its first ``keep_bytes``. ``reason`` is for the log."""

    name: Hashable
    keep_bytes: int
    reason: str


class DestagePolicy(Protocol):
    """The interface of a class that ``destage.class`` in a policy file names.

    It may remember what it has seen, but must not act by itself.
    """

    def suggest(self, view: MemoryView) -> list[Suggestion]:
        """Returns what should leave memory now, in this order. Called periodically. The same answer twice does no
        harm.
        """


@dataclass(slots=True, kw_only=True)
class StandardDestage:
    """The paper's policies. The thresholds are values of :attr:`MemoryView.pressure`, 0 to 1.

    - Local: destages a window after it has been idle for ``idle_after_s``, or for ``idle_multiple`` times the median
      execution time (tau). If both are None, idle windows stay.
    - Global, from the pressure ``moderate`` on: destages windows one by one, the ``victim`` first, until the pressure
      will fall to ``resume``. Victims are the largest window, which frees most at once, or the one with the slowest
      appends, whose execution suffers least. Windows that the next batches read leave after all others, and the one
      that is read first leaves last, and only while the pressure is at least ``moderate``. Destaging of the others
      continues with each call until the pressure has really fallen to ``resume``. Two thresholds keep it from starting
      and stopping all the time.
    - Global, from the pressure ``scarce`` on: destages all windows.

    The bootstrap part of a window always stays: ``keep_fraction`` of it (rho_min), given as ``keep_bytes``. Raises
    ValueError for thresholds that are out of range or out of order.
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
            return []  # without looking at the windows, because there may be many
        windows = [w for w in view.windows if w.gain_bytes > 0]
        if pressure >= self.scarce:
            why = f"memory is scarce: {pressure:.0%} of it is in use, and the limit is {self.scarce:.0%}"
            return [self._suggestion(w, why) for w in windows]
        idle = self._idle(view, windows)
        suggestions = [self._suggestion(w, why) for w, why in idle]
        if self.pressed:
            idle_names = {w.name for w, _ in idle}
            projected_bytes = view.used_bytes - sum(w.gain_bytes for w, _ in idle)
            why = f"the {self.victim} window; {pressure:.0%} of memory is in use, the aim is {self.resume:.0%}"
            may_leave = [w for w in windows if w.due is None or pressure >= self.moderate]
            for window in self._victims([w for w in may_leave if w.name not in idle_names]):
                if projected_bytes <= self._target_bytes(view):
                    break
                projected_bytes -= window.gain_bytes
                suggestions.append(self._suggestion(window, why))
            # Where nothing may leave, looking at all windows again and again would be in vain.
            self.pressed = pressure >= self.moderate or bool(suggestions)
        return suggestions

    def _idle(self, view: MemoryView, windows: Sequence[WindowView]) -> list[tuple[WindowView, str]]:
        """Returns the windows that have been idle for too long, with the reason. The longest idle comes first."""
        after_s = self.idle_after_s
        if self.idle_multiple is not None and view.median_execution_s is not None:
            after_s = self.idle_multiple * view.median_execution_s
        if after_s is None:
            return []
        # A window that the next batches read is not idle, however far apart these are.
        idle = [(w, view.now_s - w.last_append_s) for w in windows if w.due is None]
        idle = sorted(((w, idle_s) for w, idle_s in idle if idle_s > after_s), key=lambda pair: -pair[1])
        return [(w, f"idle for {idle_s:.3g} s, more than {after_s:.3g} s") for w, idle_s in idle]

    def _victims(self, windows: Sequence[WindowView]) -> list[WindowView]:
        """Returns the windows in the order in which they leave. Ties are broken by the other criterion."""

        def order(window: WindowView) -> tuple[bool, int, float, float]:
            by = (-window.gain_bytes, window.append_rate_bytes_per_s)
            return (window.due is not None, -(window.due or 0), *(by if self.victim == "largest" else by[::-1]))

        return sorted(windows, key=order)

    def _target_bytes(self, view: MemoryView) -> float:
        """Returns the bytes of blocks in memory at which the pressure should be ``resume``.

        It is unknown how much of the machine's memory in use is ours. So if the machine's memory causes the pressure,
        our use shrinks by the ratio by which the pressure should shrink. The next call sees whether that was enough.
        """
        target_bytes = self.resume * view.limit_bytes
        if view.machine_share > 0:
            target_bytes = min(target_bytes, view.used_bytes * self.resume / view.machine_share)
        return target_bytes

    def _suggestion(self, window: WindowView, why: str) -> Suggestion:
        staying = f"; the first {self.keep_fraction:.2%} stay" if window.keep_bytes and self.keep_fraction else ""
        return Suggestion(window.name, window.keep_bytes, why + staying)


def leaving(
    least_recent_first: Iterable[bytes], needed_ms: Mapping[bytes, int], expected_ms: int | None
) -> Iterator[bytes]:
    """Yields keys in the order in which their values should leave memory. Lazy.

    ``needed_ms``: when a value is needed next, for the keys that have such a time. ``expected_ms``: the next attempt
    needs values up to this time, or None if it is unknown. The values that it needs leave last.
    """
    if expected_ms is None or not needed_ms:
        yield from least_recent_first
        return
    never = expected_ms + 1
    needed_soon = []
    for key in least_recent_first:
        if needed_ms.get(key, never) <= expected_ms:
            needed_soon.append(key)
        else:
            yield key
    yield from needed_soon
