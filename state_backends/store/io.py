"""What a store stands on, as protocols: requests of I/O with a clock, and the files that keep blocks. Pure.

In production they are :class:`state_backends.store.io_thread.IoThread` and
:class:`state_backends.store.p_bucket.PBucket`. ``aion tune`` runs the same store on ``aion.tools.tune.disk`` and
``aion.tools.tune.files``: a simulated clock, and files without bytes.
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
"""Steps of I/O. Each yields the bytes that it moved; the generator returns the request's result."""


class Priority(IntEnum):
    """The most urgent first. The paper puts prestaging first; here it is the first among what nobody waits for.

    ``READ``, ``WRITE``: a task waits for it. ``LATE_WRITE``: late blocks; a task that waits for them makes it a WRITE.
    """

    READ = 0
    WRITE = 1
    PRESTAGE = 2
    LATE_WRITE = 3
    DESTAGE = 4
    MAINTENANCE = 5


BACKGROUND = frozenset({Priority.LATE_WRITE, Priority.DESTAGE, Priority.MAINTENANCE})
"""Work that nobody waits for. A rate limit slows it down."""
LIMITED = BACKGROUND | {Priority.WRITE}
"""What counts towards a rate limit. Background work makes up for the writes that a task waits for."""


class Pending(Protocol[T_co]):
    """A request. It is over when it is done, has failed, or was cancelled."""

    def raise_to(self, priority: Priority) -> None:
        """Makes a waiting request more urgent. It keeps its place in the order of arrival."""

    def cancel(self) -> None:
        """Cancels the request. A step under way is finished, and no other begins."""

    def over(self) -> bool: ...

    def error(self) -> BaseException | None:
        """What a request that is over raised; CancelledError if it was cancelled."""

    def result(self) -> T_co:
        """Waits until it is over. Raises what it raised."""

    def when_over(self, callback: Callable[[BaseException | None], None]) -> None:
        """Calls ``callback`` with the error when the request is over; at once if it is."""


class Io(Protocol):
    """A queue of requests with a clock. The most urgent request has the next step."""

    def submit(self, priority: Priority, steps: Steps[T]) -> Pending[T]: ...

    def wait(self, requests: Iterable[Pending[Any]]) -> None:
        """Waits until all of these requests are over. They were submitted here. Does not raise their errors."""

    def wait_for_room(self) -> None:
        """Waits while the queue is full. Call it before adding work, without a lock that a request may need."""

    def busy(self) -> bool:
        """Whether any request is under way."""

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
        """Known once the file is whole."""


class BlockFiles(Protocol):
    """The persistent side of a store: see :class:`state_backends.store.p_bucket.PBucket`."""

    def write(self, blocks: Sequence[tuple[int, Block]]) -> Steps[SstFile]: ...
    def writing(self, index: Sequence[Indexed], mark: str = "") -> AbstractContextManager[NewBlocks]: ...
    def fetch(self, file_no: int, slice_us: int, seq: int) -> Steps[Block]: ...
    def adopt(self, files: Sequence[SstFile]) -> Steps[list[list[Indexed]]]: ...
    def drop(self, *file_nos: int) -> Steps[None]: ...
    def delete(self, file: SstFile) -> None: ...
    def close(self) -> None: ...
