"""Which runs of keyed values are worth merging: neighbours of similar size, the newest first. Pure.

Every commit writes a run, and a key is looked up in all runs until it is found. So the runs must stay few. Only
neighbours are merged, because the newest value of a key counts.

- Runs: :data:`FAN_IN` neighbours are merged as soon as each of them is at most as large as the newer ones together. So
  if commits are of about the same size, there are at most three runs more than the binary logarithm of their number. In
  any case there are at most :data:`MOST_RUNS` when nothing is left to merge.
- Writing: such a merge at least doubles the size of the run that a byte is in, unless values were replaced. So a byte
  is written O(log) times.
"""

from __future__ import annotations

from collections.abc import Sequence

from state_backends.thresholds import threshold

FAN_IN = threshold(4, 2)
"""The fewest runs that are worth a merge."""
MOST_RUNS = threshold(10, 3)
"""If there are more, some are merged whatever their sizes are."""


def choose(sizes: Sequence[int]) -> tuple[int, int] | None:
    """The next merge, as (first, one after the last), or None if no merge is worth it. ``sizes``: oldest first."""
    for end in range(len(sizes), FAN_IN - 1, -1):
        begin, total = end - 1, sizes[end - 1]
        while begin > 0 and sizes[begin - 1] <= total:
            begin -= 1
            total += sizes[begin]
        if end - begin >= FAN_IN:
            return begin, end
    if len(sizes) <= MOST_RUNS:
        return None
    width = len(sizes) - MOST_RUNS + 2
    begin = min(range(len(sizes) - width + 1), key=lambda first: sum(sizes[first : first + width]))
    return begin, begin + width
