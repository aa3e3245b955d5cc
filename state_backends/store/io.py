"""The protocols that a store is built on: I/O requests with a clock, and the files of blocks. Pure.

In production they are :class:`state_backends.store.io_thread.IoThread` and
:class:`state_backends.store.p_bucket.PBucket`. ``aion tune`` runs the same store with a simulated clock, and files
without bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from state_backends.thresholds import threshold

if TYPE_CHECKING:
    from state_backends.files.names import SstFile
    from state_backends.format.block import Block, BodyAt
    from state_backends.store.file_index import Indexed

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

MOST_TOGETHER_BYTES = threshold(4 << 20, 4096)
"""The most bytes of neighbours in a file that are read at once: a seek costs as much as reading half a megabyte."""
SWITCH_SECONDS = 0.0005
"""How long a thread of the state server keeps the interpreter while another one wants it (docs/inside/store.md)."""
Steps = Generator[int, None, T]
"""Steps of I/O. Each step yields the number of bytes that it moved. The generator returns the request's result."""


class Priority(IntEnum):
    """Priorities of I/O, the most urgent first.

    The paper puts prestaging first. Here it comes after ``READ`` and ``WRITE``, for which a task waits.
    ``PRESTAGE_LATER``: for batches after a shard's next one. ``LATE_WRITE``: writes of late blocks. They become a
    ``WRITE`` when a task waits for them.
    """

    READ = 0
    WRITE = 1
    PRESTAGE = 2
    PRESTAGE_LATER = 3
    LATE_WRITE = 4
    DESTAGE = 5
    MAINTENANCE = 6


BACKGROUND = frozenset({Priority.LATE_WRITE, Priority.DESTAGE, Priority.MAINTENANCE})
"""Work that no task waits for. A rate limit slows it down."""
LIMITED = BACKGROUND | {Priority.WRITE}
"""Work that counts towards a rate limit. A ``WRITE`` is never slowed down, but delays background work."""


class Pending(Protocol[T_co]):
    """A request. It is over when it is done, has failed, or has been cancelled."""

    def raise_to(self, priority: Priority) -> None:
        """Makes a waiting request more urgent. Among others of that priority it keeps its place by arrival."""

    def cancel(self) -> None:
        """Cancels the request. A step that is under way is finished; no other begins."""

    def over(self) -> bool: ...

    def error(self) -> BaseException | None:
        """Returns the exception of a request that is over: CancelledError if it was cancelled, None if it succeeded."""

    def result(self) -> T_co:
        """Waits until the request is over, and returns its result. Raises what it raised."""

    def when_over(self, callback: Callable[[BaseException | None], None]) -> None:
        """Calls ``callback`` with the error, or None, when the request is over. At once if it is over already."""


class Io(Protocol):
    """A queue of requests, and a clock. The next step is always one of the most urgent request."""

    def submit(self, priority: Priority, steps: Steps[T]) -> Pending[T]: ...

    def wait(self, requests: Iterable[Pending[Any]]) -> None:
        """Waits until all of these requests, submitted here, are over. Does not raise their errors."""

    def wait_for_room(self) -> None:
        """Waits while the queue is full. Call it before adding work, and hold no lock that a request may need."""

    def busy(self) -> bool:
        """Returns whether any request is under way."""

    def now(self) -> float:
        """Seconds since some fixed instant. Never goes back."""


class NewBlocks(Protocol):
    """A file that is being written."""

    def put(self, slice_us: int, seq: int, value: bytes) -> None: ...
    def sync_due(self) -> bool: ...
    def sync(self) -> None: ...
    def seal(self) -> Steps[None]: ...

    @property
    def file(self) -> SstFile:
        """Known when the file is complete."""


class BlockBodies(Protocol):
    """The bodies of handed-over blocks: see :class:`state_backends.store.body_files.BodyFiles`."""

    def resident(self, references: Sequence[Block]) -> list[bool]: ...
    def is_near(self, file: str) -> bool: ...
    def expect(self, reference: Block) -> None: ...
    def forget(self, reference: Block) -> None: ...
    def read(self, reference: Block) -> Steps[Block]: ...
    def stage(self, reference: Block) -> Steps[bool]: ...
    def unstage(self, at: BodyAt) -> None: ...


class BlockFiles(Protocol):
    """The persistent side of a store: see :class:`state_backends.store.p_bucket.PBucket`."""

    @property
    def bodies(self) -> BlockBodies:
        """Of the references among the blocks."""

    def write(self, blocks: Sequence[tuple[int, Block]]) -> Steps[SstFile]: ...
    def writing(self, index: Sequence[Indexed], mark: str = "") -> AbstractContextManager[NewBlocks]: ...
    def fetch(self, file_no: int, blocks: Sequence[tuple[int, int]], size_bytes: int = 0) -> Steps[list[Block]]: ...
    def complete(self, files: Sequence[SstFile]) -> Steps[None]: ...
    def trim(self) -> Steps[None]: ...
    def adopt(self, files: Sequence[SstFile]) -> Steps[list[list[Indexed]]]: ...
    def is_near(self, file_no: int, slice_us: int, seq: int) -> bool: ...
    def drop(self, *file_nos: int) -> Steps[None]: ...
    def delete(self, file: SstFile) -> None: ...
    def close(self) -> None: ...
