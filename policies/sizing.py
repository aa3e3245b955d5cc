"""How much of a window must be in memory when its execution starts (paper section 3.3). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple


class Execution(NamedTuple):
    """Encoded bytes that an execution read, and the seconds that it took, of which it waited so many for blocks."""

    size_bytes: int
    seconds: float
    waited_s: float


def processing_bytes_per_s(executions: Iterable[Execution]) -> float | None:
    """How fast a function gets through blocks that are there. None: too fast to say, or there were no executions.

    Without what it waited for: one that waits all the time would seem as slow as staging, which then would seem to
    keep up with it, and nothing would be staged ahead.
    """
    size_bytes, worked_s = 0, 0.0
    for execution in executions:
        size_bytes += execution.size_bytes
        worked_s += execution.seconds - execution.waited_s
    return size_bytes / worked_s if size_bytes and worked_s > 0 else None


def m_bucket_bytes(
    window_bytes: int,
    staging_bytes_per_s: float | None,
    processing_bytes_per_s: float | None,
    *,
    blocking: bool,
    block_bytes: int,
) -> int:
    """The smallest m-bucket with which the function never waits for the disk.

    A *blocking* function needs all of its input before it starts: the whole window. A *non-blocking* one takes block
    after block, at ``processing_bytes_per_s`` (P), while the rest of the ``window_bytes`` (B) is staged at
    ``staging_bytes_per_s`` (S). At time t it has taken P t, and there are M + S t: it never waits if P t <= M + S t
    until it ends, at t = B / P. So

        M >= B (1 - S / P)   if P > S,   else what hides the first block.

    Staging comes in whole blocks of at most ``block_bytes`` (b): the last one must be there when all but it was
    taken, at (B - b) / P, which asks for B - (B - b) S / P, and that is rounded up to whole blocks. In memory must be
    the first blocks of the window that together have *at least* that many bytes.

    A speed that is not known (None, or not positive) means the whole window: the safe default. Raises ValueError
    for ``block_bytes`` below 1.
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes {block_bytes}: must be 1 or more")
    window_bytes = max(0, window_bytes)
    if blocking or not staging_bytes_per_s or not processing_bytes_per_s:
        return window_bytes
    if staging_bytes_per_s <= 0 or processing_bytes_per_s <= 0:
        return window_bytes
    if processing_bytes_per_s <= staging_bytes_per_s:
        return min(block_bytes, window_bytes)
    ratio = staging_bytes_per_s / processing_bytes_per_s
    needed_bytes = window_bytes - max(0, window_bytes - block_bytes) * ratio
    return min(window_bytes, ceil(needed_bytes / block_bytes) * block_bytes)
