"""Memory pressure on a host (paper 3.2): the policy makes suggestions, the manager carries them out or refuses them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, cast, overload

from policies.destage import DestagePolicy, MemoryView, WindowView
from state_backends.store.m_bucket import MemoryBudget

log = logging.getLogger(__name__)

_AGAIN_S = 0.05
LocalName = tuple[Hashable, int]


class Shrinkable(Protocol):
    """What the manager needs of a store."""

    def views(self) -> list[dict[str, Any]]:
        """Returns the fields of a WindowView for each slice that has anything in memory. The slice is the name."""

    def shrink(self, slice_us: int, keep_bytes: int) -> str | None:
        """Frees a slice's memory except for its first ``keep_bytes``. Returns the reason if it refuses."""


class _Windows(Sequence[WindowView]):
    """The windows of all stores, collected only if the policy looks at them. Most of the time it does not."""

    def __init__(self, stores: Mapping[Hashable, Shrinkable]) -> None:
        self._stores = stores

    @cached_property
    def _views(self) -> list[WindowView]:
        return [
            WindowView(**{**view, "name": (name, view["name"])})
            for name, store in self._stores.items()
            for view in store.views()
        ]

    @cached_property
    def names(self) -> set[Hashable]:
        return {view.name for view in self._views}

    def __len__(self) -> int:
        return len(self._views)

    @overload
    def __getitem__(self, index: int) -> WindowView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WindowView]: ...
    def __getitem__(self, index: int | slice) -> WindowView | Sequence[WindowView]:
        return self._views[index]


class Cached:
    """Repeats its last reading for ``every_s`` seconds: memory does not fill up in a quarter of a second."""

    def __init__(self, read: Callable[[], float], every_s: float = 0.25) -> None:
        self._read, self._every_s = read, every_s
        self._value, self._until = 0.0, 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        if now >= self._until:
            self._value, self._until = self._read(), now + self._every_s
        return self._value


class PressureManager:
    """Carries out what the destage policy suggests for the stores of a host, and logs what it refuses.

    ``machine_share``: the share of the machine's (or container's) memory that is in use, 0 to 1.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        policy: DestagePolicy,
        machine_share: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget = budget
        self._policy = policy
        self._machine_share = Cached(machine_share)
        self._clock = clock
        self._tick_lock = threading.Lock()
        self.destaged = 0
        self.refused = 0

    def tick(self, stores: Iterable[tuple[Hashable, Shrinkable]], median_execution_s: float | None = None) -> None:
        """Asks the policy once. ``stores``: (name, store); each name is unique.

        ``median_execution_s``: see policies.destage.MemoryView.
        """
        with self._tick_lock:
            by_name = dict(stores)
            windows = _Windows(by_name)
            view = MemoryView(
                now_s=self._clock(),
                used_bytes=self._budget.used_bytes,
                limit_bytes=self._budget.limit_bytes,
                machine_share=self._machine_share(),
                median_execution_s=median_execution_s,
                windows=windows,
            )
            for suggestion in self._policy.suggest(view):
                if suggestion.name not in windows.names:
                    refusal: str | None = "no such window is in memory"
                else:
                    store_name, slice_us = cast(LocalName, suggestion.name)
                    refusal = by_name[store_name].shrink(slice_us, suggestion.keep_bytes)
                if refusal is None:
                    self.destaged += 1
                    log.debug("destaged %s: %s", suggestion.name, suggestion.reason)
                else:
                    self.refused += 1
                    log.debug("refused to destage %s (%s): %s", suggestion.name, suggestion.reason, refusal)


class Sampler:
    """A thread that calls ``tick`` every ``every_s`` seconds, until :meth:`stop`, and earlier when there is a reason.

    ``next_s``: in how many seconds there is one, or None if there is none. Call :meth:`wake` when that gets less.
    """

    def __init__(
        self, tick: Callable[[], None], next_s: Callable[[], float | None] = lambda: None, every_s: float = 0.25
    ) -> None:
        self._tick, self._next_s = tick, next_s
        self._every_s = every_s
        self._stop = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aion-pressure", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        self._stop = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            next_s = self._next_s()
            if next_s is not None and next_s <= 0:  # it could not be done yet: a shard is busy
                next_s = _AGAIN_S
            self._woken.wait(self._every_s if next_s is None else min(next_s, self._every_s))
            self._woken.clear()
            if self._stop:
                return
            try:
                self._tick()
            except Exception:
                log.exception("cannot check memory pressure; it is tried again")
