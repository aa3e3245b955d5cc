"""What a store stands on: requests of I/O and their clock, and the files that keep blocks, as protocols. Pure.

With :class:`state_backends.store.io_thread.IoThread` and :class:`state_backends.store.p_bucket.PBucket` a store does
its work; with ``aion.tools.tune.disk`` and ``aion.tools.tune.files`` the same store takes its decisions on a simulated
clock, over no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from aion.core.ingest.block import Block
    from state_backends.files.names import SstFile
    from state_backends.store.sst_file import Indexed

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Steps = Generator[int, None, T]
"""Steps of I/O: each yields the bytes it moved; the generator's return value is the request's result."""


class Priority(IntEnum):
    """What comes first: what a task waits for. The paper puts prestaging first; that is first of what nobody waits for.

    ``READ``, ``WRITE``: a task waits for it. ``LATE_WRITE``: on its own way to the disk, until a task waits for it.
    """

    READ = 0
    WRITE = 1
    PRESTAGE = 2
    LATE_WRITE = 3
    DESTAGE = 4
    MAINTENANCE = 5


BACKGROUND = frozenset({Priority.LATE_WRITE, Priority.DESTAGE, Priority.MAINTENANCE})
"""Work that nobody waits for: what a rate limit slows down."""
LIMITED = BACKGROUND | {Priority.WRITE}
"""What counts towards a rate limit: background work makes up for the writes that a task waits for."""


class Pending(Protocol[T_co]):
    """A request, until it is over: done, failed, or given up."""

    def raise_to(self, priority: Priority) -> None:
        """Makes a waiting request more urgent; it keeps its place in the order of arrival."""

    def cancel(self) -> None:
        """Gives the request up; a step under way is finished, and no other begins."""

    def over(self) -> bool: ...

    def error(self) -> BaseException | None:
        """Of one that is over: what it raised, or that it was given up."""

    def result(self) -> T_co:
        """Waits until it is over. Raises what it raised."""

    def when_over(self, told: Callable[[BaseException | None], None]) -> None:
        """Has ``told`` called with its error once it is over; at once if it is."""


class Io(Protocol):
    """A queue of requests, of which the most urgent has the next step, and the clock of all who wait for it."""

    def submit(self, priority: Priority, steps: Steps[T]) -> Pending[T]: ...

    def wait(self, requests: Iterable[Pending[Any]]) -> None:
        """Waits until all of these, which were submitted here, are over. Raises nothing of theirs."""

    def wait_for_room(self) -> None:
        """Waits while the queue is full. Call it without a lock that a request may need, before adding work."""

    def busy(self) -> bool:
        """Whether any request is not over."""

    def now(self) -> float:
        """Seconds since some instant; never less than before."""


class NewBlocks(Protocol):
    """A file that is being written."""

    def put(self, slice_us: int, seq: int, value: bytes) -> None: ...
    def sync_due(self) -> bool: ...
    def sync(self) -> None: ...
    def seal(self) -> Steps[None]: ...

    @property
    def file(self) -> SstFile:
        """Once it is whole."""


class BlockFiles(Protocol):
    """The persistent side of a store: see :class:`state_backends.store.p_bucket.PBucket`."""

    def write(self, blocks: Sequence[tuple[int, Block]]) -> Steps[SstFile]: ...
    def writing(self, index: Sequence[Indexed], mark: str = "") -> AbstractContextManager[NewBlocks]: ...
    def fetch(self, file_no: int, slice_us: int, seq: int) -> Steps[Block]: ...
    def adopt(self, files: Sequence[SstFile]) -> Steps[list[list[Indexed]]]: ...
    def drop(self, *file_nos: int) -> Steps[None]: ...
    def delete(self, file: SstFile) -> None: ...
    def close(self) -> None: ...
