"""Computes how much of a window must be in memory when its execution starts (paper section 3.3). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple


class Execution(NamedTuple):
    """Encoded bytes that an execution read, the seconds that it took, and how many of these it waited for blocks."""

    size_bytes: int
    seconds: float
    waited_s: float


def processing_bytes_per_s(executions: Iterable[Execution]) -> float | None:
    """Returns how fast a function processes blocks that are in memory, or None if it is too fast to measure, or no
    executions.

    The time that it waited for blocks does not count. Otherwise a function that waits all the time would seem as slow
    as staging, so staging would seem fast enough, and nothing would be staged ahead.
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
    """Returns the smallest m-bucket, in bytes, with which the function never waits for the disk.

    A *blocking* function needs all of its input before it starts, so it needs the whole window. A *non-blocking* one
    processes block after block at ``processing_bytes_per_s`` (P), while the rest of the ``window_bytes`` (B) is staged
    at ``staging_bytes_per_s`` (S). Let the m-bucket have M bytes. At time t the function has processed P t bytes, and
    M + S t bytes have been in memory. It never waits if P t <= M + S t until it ends, at t = B / P. So

        M >= B (1 - S / P)   if P > S,   otherwise the first block is enough.

    Staging brings whole blocks of at most ``block_bytes`` (b). The last block must be in memory when the function has
    processed all others, at (B - b) / P. So M >= B - (B - b) S / P, rounded up to whole blocks. The blocks in memory
    must be the first ones of the window, with *at least* M bytes together.

    If a speed is unknown (None, or not positive), the result is the whole window, which is safe. Raises ValueError if
    ``block_bytes`` is below 1.
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
