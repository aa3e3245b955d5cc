"""Threads that encode and decode blocks beside the thread that needs them (paper section 4: not the I/O thread).

Arrow's serialising and compressing, and ISA-L's checksums, release the GIL, so these overlap with Python and
with each other. orjson holds it: with the json codec, threads gain only what compression takes.
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
    """``threads`` threads, started when first needed. With 0 everything happens in line, in the caller.

    Several callers may share it. Close it, or use it as a context manager. A function that runs in the pool must not
    use the pool itself: all threads could end up waiting for each other.
    """

    def __init__(self, threads: int = 0) -> None:
        if threads < 0:
            raise ValueError(f"threads: {threads} is negative; 0 works in line")
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
        """``function`` of each item, lazily and in order, as ``map`` does, but worked on ahead of the reader.

        At most ``ahead`` (default: two for each thread) items are in flight: taken from ``items`` and not yet yielded.
        Only the reader's thread reads ``items``. It also works on the items for which ``inline`` is true, when they are
        due: some are quicker done than handed to a thread.

        An exception of ``function`` or of ``items`` comes out in its place, after all results before it. A reader that
        stops early closes the generator, or forgets it. Then calls that have not begun are cancelled, and the others
        are waited for. Raises RuntimeError if the pool is closed.
        """
        if self._closed:
            raise RuntimeError("the codec pool is closed")
        if self._executor is None:
            return _map_in_line(function, items)
        if ahead is None:
            ahead = 2 * self.threads
        if ahead < 1:
            raise ValueError(f"ahead: {ahead} items in flight are none; 1 or more")
        return _map_ahead(self._executor, function, items, ahead, inline)

    def close(self) -> None:
        """Cancels what has not begun, and waits for the threads to end. Readers get an exception."""
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
        taken = [item]
        del item  # or it would live for as long as the reader takes
        yield function(taken.pop())


@dataclass(frozen=True, slots=True)
class _Inline(Generic[T, R]):
    """Stands in for a future: the reader works on the item when it asks for the result."""

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
    flying: deque[Future[R] | _Inline[T, R]] = deque()
    broken: Exception | None = None
    more = True
    try:
        while True:
            while more and len(flying) < ahead:
                try:
                    item = next(source)
                except StopIteration:
                    more = False
                except Exception as error:  # comes out when all before it have
                    more, broken = False, error
                else:
                    small = inline is not None and inline(item)
                    flying.append(_Inline(function, item) if small else executor.submit(function, item))
                    del item  # or it would live for as long as the reader takes over those before it
            if not flying:
                break
            first = flying[0]
            if isinstance(first, Future):
                wait([first])  # still among the flying ones, should this be interrupted
            del first
            yield flying.popleft().result()  # and held by nobody here while the reader works on it
        if broken is not None:
            raise broken
    finally:
        broken = None  # its traceback holds this frame
        begun = [f for f in flying if isinstance(f, Future) and not f.cancel()]
        flying.clear()
        wait(begun)
