"""Runs policies that a user wrote (``destage.class``, ``prestage.class``) so that they can do no harm.

They run in the state server, in their own thread. If one raises or does not answer in time, that is logged and the
built-in policy answers instead. A policy only suggests what should be in memory, so no answer can lose data.
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

from policies.destage import DestagePolicy, MemoryView, StandardDestage, Suggestion
from policies.prestage import JustInTimePrestage, PrestagePolicy
from state_backends.backends import StoreConfig
from state_backends.format.errors import PolicyError

log = logging.getLogger(__name__)
T = TypeVar("T")

MAKING_SECONDS = 20.0
ANSWER_SECONDS = 1.0
_SUGGESTIONS = 1_000_000
_WAITING = 64  # observations that may wait for a slow policy


class Guard:
    """The thread in which a user's policies run. Close it. A policy that hangs blocks the thread."""

    def __init__(self, answer_s: float = ANSWER_SECONDS) -> None:
        self._answer_s = answer_s
        self._calls: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue(_WAITING)
        self._question: Future[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="aion-policy", daemon=True)
        self._thread.start()

    def make(self, build: Callable[[], T]) -> T:
        """Imports and calls the user's class. Raises what that raises, and ValueError if it hangs."""
        self._question = future = self._submit(build)
        try:
            return future.result(MAKING_SECONDS)
        except TimeoutError:
            raise ValueError(f"the policy's class was not made within {MAKING_SECONDS:g} s") from None
        except (KeyboardInterrupt, SystemExit) as error:  # the user's module raised it; the server must not end
            raise ValueError(f"the policy's class tried to end the process: {error!r}") from None

    def ask(self, what: str, call: Callable[[], T], built_in: Callable[[], T]) -> T:
        """Returns the policy's answer, or that of the built-in policy if it raises or does not answer in time."""
        if self._question is not None and not self._question.done():
            return built_in()  # it still works on the previous question
        try:
            self._question = future = self._submit(call)
            wait([future], self._answer_s)
            if future.done():
                return future.result()
            log.error(
                "%s has not answered within %g s; until it does, the built-in policy answers", what, self._answer_s
            )
        except BaseException as error:
            log.error("%s failed, so the built-in policy answers instead: %s: %s", what, type(error).__name__, error)
        return built_in()

    def notify(self, what: str, call: Callable[[], None]) -> None:
        """Calls the policy without waiting. A policy that cannot keep up misses some calls."""

        def logged() -> None:
            try:
                call()
            except BaseException as error:
                log.error("%s failed: %s: %s", what, type(error).__name__, error)

        try:
            self._calls.put_nowait((logged, Future()))
        except queue.Full:
            log.debug("%s cannot keep up, and misses a call", what)

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
            except BaseException as error:  # SystemExit too: otherwise it would end this thread
                future.set_exception(error)


def make_policies(config: StoreConfig) -> tuple[DestagePolicy, PrestagePolicy, Guard | None]:
    """Returns the memory policies of a configuration, and the guard if a user wrote one of them. Raises PolicyError."""
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
    """A user's :class:`policies.destage.DestagePolicy`. If it fails, the built-in policy answers."""

    def __init__(self, guard: Guard, name: str, policy: DestagePolicy) -> None:
        self._guard, self._name, self._policy = guard, name, policy
        self._built_in = StandardDestage()

    def suggest(self, view: MemoryView) -> list[Suggestion]:
        def call() -> list[Suggestion]:
            # The answer is read here, so that an error in it counts as the policy's.
            suggested = itertools.islice(self._policy.suggest(view), _SUGGESTIONS)
            answer = [Suggestion(s.name, int(s.keep_bytes), str(s.reason)) for s in suggested]
            for suggestion in answer:
                hash(suggestion.name)
            return answer

        return self._guard.ask(f"{self._name}.suggest()", call, lambda: self._built_in.suggest(view))


class GuardedPrestage:
    """A user's :class:`policies.prestage.PrestagePolicy`. If it fails, the built-in policy answers."""

    def __init__(self, guard: Guard, name: str, policy: PrestagePolicy) -> None:
        self._guard, self._name, self._policy = guard, name, policy
        self._built_in = JustInTimePrestage()

    def start_at_s(self, due_s: float, size_bytes: int, pessimistic_s: float) -> float:
        def call() -> float:
            answer = float(self._policy.start_at_s(due_s, size_bytes, pessimistic_s))
            if not math.isfinite(answer):
                raise ValueError(f"{answer} is not a time")
            return answer

        return self._guard.ask(
            f"{self._name}.start_at_s()", call, lambda: self._built_in.start_at_s(due_s, size_bytes, pessimistic_s)
        )

    def observe(self, size_bytes: int, seconds: float) -> None:
        self._built_in.observe(size_bytes, seconds)
        self._guard.notify(f"{self._name}.observe()", lambda: self._policy.observe(size_bytes, seconds))
