"""Runs policies that a user wrote (``destage.class``, ``prestage.class``) so that they do no harm.

They run in the state server, in a thread of their own. If one raises, the error is logged and the built-in policy
answers instead; also if it does not return in time. A policy only suggests what should be in memory, so no answer can
lose anything.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from aion.errors import PolicyError
from policies.destage import DestagePolicy, MemoryView, StandardDestage, Suggestion
from policies.prestage import JustInTimePrestage, PrestagePolicy
from state_backends.store.backends import StoreConfig

log = logging.getLogger(__name__)
T = TypeVar("T")

MAKING_SECONDS = 20.0
ANSWER_SECONDS = 1.0
_SUGGESTIONS = 1_000_000
_WAITING = 64  # observations that may wait for a slow policy


class Guard:
    """The thread in which a user's policies run. Close it. A policy that hangs keeps its thread."""

    def __init__(self, answer_s: float = ANSWER_SECONDS) -> None:
        self._answer_s = answer_s
        self._calls: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue(_WAITING)
        self._asked: Future[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="aion-policy", daemon=True)
        self._thread.start()

    def make(self, build: Callable[[], T]) -> T:
        """Imports and calls the user's class. Raises what that raises, and ValueError if it hangs."""
        self._asked = future = self._submit(build)
        try:
            return future.result(MAKING_SECONDS)
        except TimeoutError:
            raise ValueError(f"the policy's class was not made within {MAKING_SECONDS:g} s") from None
        except (KeyboardInterrupt, SystemExit) as error:  # the user's module raised it; this process goes on
            raise ValueError(f"the policy's class wants to end the process: {error!r}") from None

    def ask(self, what: str, call: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """The policy's answer. If there is none in time, the answer of ``otherwise``, the built-in policy."""
        if self._asked is not None and not self._asked.done():
            return otherwise()  # it still works on the question before
        try:
            self._asked = future = self._submit(call)
            wait([future], self._answer_s)
            if future.done():
                return future.result()
            log.error("%s has not answered within %g s: the built-in policy does until then", what, self._answer_s)
        except BaseException as error:
            log.error("%s failed, the built-in policy answers instead: %s: %s", what, type(error).__name__, error)
        return otherwise()

    def notify(self, what: str, call: Callable[[], None]) -> None:
        """Makes a call without waiting for it. A policy that cannot keep up misses some calls."""

        def logged() -> None:
            try:
                call()
            except BaseException as error:
                log.error("%s failed: %s: %s", what, type(error).__name__, error)

        try:
            self._calls.put_nowait((logged, Future()))
        except queue.Full:
            log.info("%s cannot keep up", what)

    def close(self) -> None:
        try:
            self._calls.put(None, timeout=self._answer_s)
        except queue.Full:
            return
        self._thread.join(self._answer_s)

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((call, future), timeout=self._answer_s)
        return future

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:  # also SystemExit: it would end only this thread
                future.set_exception(error)


def make_policies(config: StoreConfig) -> tuple[DestagePolicy, PrestagePolicy, Guard | None]:
    """The memory policies of a configuration, and the guard of those that a user wrote. Raises PolicyError."""
    guard = Guard() if config.destage_class or config.prestage_class else None
    try:
        if guard is None:
            return config.make_destage(), config.make_prestage(), None
        destage, prestage = guard.make(config.make_destage), guard.make(config.make_prestage)
    except ValueError as error:
        if guard is not None:
            guard.close()
        raise PolicyError(str(error)) from error
    if config.destage_class:
        destage = GuardedDestage(guard, config.destage_class, destage)
    if config.prestage_class:
        prestage = GuardedPrestage(guard, config.prestage_class, prestage)
    return destage, prestage, guard


class GuardedDestage:
    """A user's :class:`policies.destage.DestagePolicy`, with the built-in one to fall back on."""

    def __init__(self, guard: Guard, name: str, policy: DestagePolicy) -> None:
        self._guard, self._name, self._policy = guard, name, policy
        self._built_in = StandardDestage()

    def suggest(self, view: MemoryView) -> list[Suggestion]:
        def call() -> list[Suggestion]:
            # Read here, so that an error in it counts as the policy's.
            suggested = itertools.islice(self._policy.suggest(view), _SUGGESTIONS)
            answer = [Suggestion(s.name, int(s.keep_bytes), str(s.reason)) for s in suggested]
            for suggestion in answer:
                hash(suggestion.name)
            return answer

        return self._guard.ask(f"{self._name}.suggest()", call, lambda: self._built_in.suggest(view))


class GuardedPrestage:
    """A user's :class:`policies.prestage.PrestagePolicy`, with the built-in one to fall back on."""

    def __init__(self, guard: Guard, name: str, policy: PrestagePolicy) -> None:
        self._guard, self._name, self._policy = guard, name, policy
        self._built_in = JustInTimePrestage()

    def start_at_s(self, due_s: float, size_bytes: int, pessimistic_s: float) -> float:
        def call() -> float:
            answer = float(self._policy.start_at_s(due_s, size_bytes, pessimistic_s))
            if not math.isfinite(answer):
                raise ValueError(f"{answer} is no time")
            return answer

        return self._guard.ask(
            f"{self._name}.start_at_s()", call, lambda: self._built_in.start_at_s(due_s, size_bytes, pessimistic_s)
        )

    def observe(self, size_bytes: int, seconds: float) -> None:
        self._built_in.observe(size_bytes, seconds)
        self._guard.notify(f"{self._name}.observe()", lambda: self._policy.observe(size_bytes, seconds))
