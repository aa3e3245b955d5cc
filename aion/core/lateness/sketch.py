"""How late events were: a quantile sketch of latenesses with a guaranteed relative error. Pure.

A histogram whose bins grow by 2 % in width, in the manner of DDSketch (Masson, Rim, Lee: "DDSketch: A fast and fully
mergeable quantile sketch with relative-error guarantees", VLDB 2019). It is our own, because of what the ones that are
published do not do together (looked at: `datasketches` 5.2.0, Apache; `ddsketch` 3.0.1, Datadog; both Apache-2.0):

- The core must decide the same after a replay or a restart. KLL and REQ of `datasketches` throw coins that cannot be
  seeded (four KLL sketches of the same 100,000 numbers gave four 99.9 % quantiles, from 14.9 to 21.8 where 22.2 is
  true), and its maintainers decline to change that (datasketches-cpp, issue 361).
- A block brings n events of one lateness: one call, not n. `datasketches` takes no weights for KLL, REQ or t-digest.
- Old observations fade and censored ones are left out, so counts must stay counts that can be weighed, bin by bin,
  when they are asked for. Here that is a vector times a weight; in a rank sketch it is none of its operations.
- Tails are what is asked of it. An error relative to the value holds there as anywhere; one relative to the rank does
  not. Bins have integer edges, so that the share of events up to an *edge* is exact, and nothing of what is said of a
  bound at an edge is approximate.

`ddsketch` has the same guarantee and is deterministic, but keeps its counts in Python lists between the smallest and
the largest bin, needs `six` and protobuf to be written down, and had its last release in April 2024; what would be left
of it to use is the twenty lines below.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from aion.core.numbers import plus

ACCURACY = 0.01
"""A quantile is off by at most this share of itself."""

Ints = npt.NDArray[np.int64]

_LONGEST_US = 2**63 - 1


def _edges() -> list[int]:
    """The largest lateness of every bin: 0, 1, 2, ... and, where that is coarser, 101 / 99 of the one before.

    In integers, so that every machine has the same. A bin ``(low, high]`` with ``high <= 101 / 99 low`` has a value
    that is within 1 % of all that is in it: their harmonic mean.
    """
    edges = [0]
    while edges[-1] < _LONGEST_US:
        edges.append(min(_LONGEST_US, max(edges[-1] + 1, edges[-1] * 101 // 99)))
    return edges


_EDGES = _edges()
EDGES_US: Ints = np.array(_EDGES)
"""Bin b holds latenesses above ``EDGES_US[b - 1]`` and up to ``EDGES_US[b]``, in µs; bin 0 those of exactly zero."""
EDGES_US.flags.writeable = False


def bin_of(lateness_us: int) -> int:
    """The bin of a lateness of 0 or more; negative ones count as zero."""
    return bisect_left(_EDGES, lateness_us)


class LatenessSketch:
    """Counts of late events by bin. Counts are integers: sketches merge to the same in any order.

    ``counts``: only the bins that have some, so its size follows the data: at most 2,067 bins for any data, and about
    115 for each factor of ten between the smallest and the largest lateness.
    """

    __slots__ = ("_columns", "_columns_total", "counts", "total")

    def __init__(self, counts: Mapping[int, int] | Iterable[tuple[int, int]] = ()) -> None:
        self.counts: dict[int, int] = dict(counts)
        self.total = sum(self.counts.values())
        self._columns: tuple[Ints, Ints] = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._columns_total = 0

    def observe(self, lateness_us: int, events: int = 1) -> None:
        if events:
            bin_ = bin_of(lateness_us)
            self.counts[bin_] = plus(self.counts.get(bin_, 0), events)
            self.total += events

    def merge(self, other: LatenessSketch) -> None:
        for bin_, events in other.counts.items():
            self.counts[bin_] = plus(self.counts.get(bin_, 0), events)
        self.total += other.total

    def columns(self) -> tuple[Ints, Ints]:
        """Bins that have events, ascending, and their counts; kept until there are more, so leave them as they are."""
        # Counts only grow, and the total with them.
        if self._columns_total != self.total:
            bins = np.fromiter(self.counts.keys(), np.int64, len(self.counts))
            counts = np.fromiter(self.counts.values(), np.int64, len(self.counts))
            order = np.argsort(bins)
            self._columns, self._columns_total = (bins[order], counts[order]), self.total
        return self._columns

    def quantile_us(self, share: float) -> float:
        """The lateness that ``share`` of the events did not exceed, within 1 % of itself; 0 without any."""
        if not self.total:
            return 0.0
        bins, counts = self.columns()
        cumulated = np.cumsum(counts, dtype=np.float64)
        position = int(np.searchsorted(cumulated, share * cumulated[-1]))
        at = int(bins[min(position, len(bins) - 1)])
        if at == 0:
            return 0.0
        low, high = _EDGES[at - 1] + 1, _EDGES[at]
        return 2.0 * low * high / (low + high)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LatenessSketch) and self.counts == other.counts

    __hash__ = None  # type: ignore[assignment]
