"""A tenant keeps state in a shard: windows, or a stateful processor. This is what those who drive one know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from policies.sizing import Execution


class Saved(NamedTuple):
    """What a commit needs. ``snapshot``: what the version keeps beside blocks and values.

    ``next_slices``: those that the next batch will probably read. ``executions``: of this batch. ``later_slices``:
    those that the batches after the next one will probably read, the soonest first. ``next_keys``: of the values that
    the next batch will probably read, if they are not in memory.
    """

    snapshot: dict[str, Any]
    next_slices: Sequence[int] = ()
    executions: Sequence[Execution] = ()
    later_slices: Sequence[int] = ()
    next_keys: Sequence[bytes] = ()


class Tenant(Protocol):
    """A tenant in one attempt of one batch. It was opened at the snapshot of a version.

    First :meth:`advance`, then :meth:`arrive` any number of times, then :meth:`end_batch` and :meth:`save`. Rows and
    results are the tenant's own: blocks and record batches, or what a processor takes and returns.
    """

    def advance(self, at_us: int | None) -> Iterator[Any]:
        """Moves the watermark, and yields what it makes due. It is None as long as there is none."""

    def arrive(self, rows: Any) -> Iterator[Any]:
        """Takes rows, and yields their results."""

    def end_batch(self) -> Iterator[Any]:
        """Yields what comes after all rows of the batch."""

    @property
    def due_ms(self) -> int | None:
        """The next time at which the shard has something to do even if no row comes, or None if there is none."""

    def save(self) -> Saved:
        """Writes what is to be kept. The attempt can be committed with what this returns."""
