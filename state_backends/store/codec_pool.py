"""Threads that encode and decode blocks beside the thread that needs them (paper section 4: not the I/O thread).

Arrow's serialisation and compression and ISA-L's checksums release the GIL, so they overlap with Python code and with
each other. orjson holds the GIL: with the json codec only compression runs in parallel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class CodecPool:
    """A pool of threads, which start when they are first needed. With 0 threads, all work is done in the caller.

    Several callers may share it. Close it, or use it as a context manager. A function that runs in the pool must not
    use the pool itself: all threads could end up waiting for each other.
    """

    def __init__(self, threads: int = 0) -> None:
        if threads < 0:
            raise ValueError(f"threads: {threads} is negative; 0 does all work in the caller")
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="aion-codec") if threads else None
        self._closed = False

    def map_ordered(
        self,
        function: Callable[[T], R],
        items: Iterable[T],
        *,
        ahead: int | None = None,
        inline: Callable[[T], bool] | None = None,
    ) -> Generator[R, None, None]:
        """Yields ``function(item)`` for each item, lazily and in order like ``map``, but computes ahead of the reader.

        At most ``ahead`` items (default: two for each thread) are in flight: taken from ``items`` and not yet yielded.
        Only the reader's thread reads ``items``. That thread also handles the items for which ``inline`` is true, when
        their turn comes: some items take less time than handing them to another thread.

        An exception from ``function`` or ``items`` is raised in its place, after all results before it. A reader that
        stops early closes the generator, or drops it. Then calls that have not begun are cancelled, and the others are
        waited for. Raises RuntimeError if the pool is closed.
        """
        if self._closed:
            raise RuntimeError("the codec pool is closed")
        if self._executor is None:
            return _map_in_line(function, items)
        if ahead is None:
            ahead = 2 * self.threads
        if ahead < 1:
            raise ValueError(f"ahead: {ahead} is too few items in flight; give 1 or more")
        return _map_ahead(self._executor, function, items, ahead, inline)

    def close(self) -> None:
        """Cancels calls that have not begun, and waits for the threads to end. Readers get an exception."""
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> CodecPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map_in_line(function: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    for item in items:
        only_reference = [item]
        del item  # otherwise it would stay alive while the reader works on the result
        yield function(only_reference.pop())


@dataclass(frozen=True, slots=True)
class _Inline(Generic[T, R]):
    """Takes the place of a future: the reader's thread calls the function when it asks for the result."""

    function: Callable[[T], R]
    item: T

    def result(self) -> R:
        return self.function(self.item)


def _map_ahead(
    executor: ThreadPoolExecutor,
    function: Callable[[T], R],
    items: Iterable[T],
    ahead: int,
    inline: Callable[[T], bool] | None,
) -> Generator[R, None, None]:
    source = iter(items)
    in_flight: deque[Future[R] | _Inline[T, R]] = deque()
    broken: Exception | None = None
    more = True
    try:
        while True:
            while more and len(in_flight) < ahead:
                try:
                    item = next(source)
                except StopIteration:
                    more = False
                except Exception as error:  # raised after all results before it
                    more, broken = False, error
                else:
                    small = inline is not None and inline(item)
                    in_flight.append(_Inline(function, item) if small else executor.submit(function, item))
                    del item  # otherwise it would stay alive while the reader works on earlier results
            if not in_flight:
                break
            first = in_flight[0]
            if isinstance(first, Future):
                # It stays in the queue meanwhile, in case this is interrupted. wait() would never return if the pool is
                # closed: what that cancels does not count as done for it.
                first.exception()
            del first
            yield in_flight.popleft().result()  # nothing here refers to it while the reader works on it
        if broken is not None:
            raise broken
    finally:
        broken = None  # its traceback refers to this frame
        begun = [f for f in in_flight if isinstance(f, Future) and not f.cancel()]
        in_flight.clear()
        wait(begun)
