"""Which windows without events have rows: those of definitions with a :class:`~aion.core.filling.Fill`. Pure.

An event in a slice gives its key a row in each window that ends after the slice begins, up to ``for_us`` after the end
of the last window with the event. So the windows of a key are *spans* of ends ``(first, until]``, whatever order events
come in. Here are the spans of all keys together: the operator knows from them which windows to open. Those of each key
are in the map (:mod:`aion.core.operator.filled_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aion.base.numbers import NEVER
from aion.core.slicing.aligned import AlignedWindows
from aion.core.slicing.sessions import Intervals, merge_intervals
from aion.core.windows import Aligned

Ints = npt.NDArray[np.int64]


class Spans(NamedTuple):
    """Spans ``(first, until]`` of the ends of windows, in µs, as columns."""

    firsts_us: Ints
    untils_us: Ints

    @classmethod
    def none(cls) -> Spans:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    def merged(self) -> Spans:
        """Returns the same instants as spans that are apart, in order."""
        _, firsts, untils = merge_intervals(Intervals(np.zeros(len(self.firsts_us), np.int64), *self), 0).made
        return Spans(firsts, untils)

    def within(self, after_us: int, by_us: int) -> Spans:
        """Returns the part after one instant and up to another."""
        firsts, untils = np.maximum(self.firsts_us, after_us), np.minimum(self.untils_us, by_us)
        there = firsts < untils
        return Spans(firsts[there], untils[there])

    def __add__(self, other: Any) -> Spans:
        return Spans(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


def spans_of(aligned: AlignedWindows, number: int, for_us: int, slices_us: Ints) -> Spans:
    """Returns the span of an event in each of these slices. ``for_us``: of the definition's fill."""
    return Spans(slices_us, aligned.last_ends(number, slices_us) + for_us)


class Filled:
    """The spans of all keys of a shard together, by definition. ``snapshot``: of the operator."""

    def __init__(
        self, windows: Mapping[int, Aligned], aligned: AlignedWindows, snapshot: Mapping[str, Any] | None = None
    ) -> None:
        self.for_us = {number: w.fill.for_us for number, w in windows.items() if w.fill is not None}
        self._aligned = aligned
        known = {} if snapshot is None else snapshot.get("filled", {})
        self._spans = {
            number: Spans(*np.array(known.get(str(number), []), np.int64).reshape(-1, 2).T) for number in self.for_us
        }

    def __bool__(self) -> bool:
        return bool(self.for_us)

    def of_slices(self, number: int, slices_us: Ints) -> Spans:
        """Returns the spans of events in these slices, and adds them."""
        found = spans_of(self._aligned, number, self.for_us[number], slices_us).merged()
        self._spans[number] = (self._spans[number] + found).merged()
        return found

    def ending(self, number: int, after_us: int, by_us: int, among: Spans | None = None) -> tuple[Ints, Ints]:
        """Returns the start and end of each window in the spans that ends after an instant, up to another.

        ``among``: spans to look at in place of those of all keys.
        """
        spans = (self._spans[number] if among is None else among).within(after_us, by_us)
        first, last = self._aligned.ending(number, *spans)
        counts = last - first + 1
        before = np.cumsum(counts) - counts
        numbers = np.arange(int(counts.sum())) + np.repeat(first - before, counts)
        return self._aligned.existing(number, numbers)

    def next_end_us(self, at_us: int) -> int:
        """Returns the first end after a watermark of a window in the spans. NEVER: there is none."""
        soonest = NEVER
        for number, spans in self._spans.items():
            left = spans.within(at_us, NEVER)
            first, last = self._aligned.ending(number, *left)
            _, ends = self._aligned.existing(number, first[first <= last])
            soonest = min(soonest, int(ends.min(initial=NEVER)))
        return soonest

    def close(self, closed_us: Ints) -> dict[int, bool]:
        """Forgets windows that end by an instant, and each definition has its own. Returns which definitions have
        fewer spans now, and whether they have none any more.
        """
        gone = {}
        for number, spans in self._spans.items():
            left = spans.within(int(closed_us[number]), NEVER)
            if len(left.firsts_us) < len(spans.firsts_us) or bool((left.firsts_us > spans.firsts_us).any()):
                gone[number] = not len(left.firsts_us)
            self._spans[number] = left
        return gone

    def to_json(self) -> dict[str, Any]:
        """Its part of the operator's snapshot."""
        there = {n: spans for n, spans in self._spans.items() if len(spans.firsts_us)}
        return {"filled": {str(n): np.column_stack(s).tolist() for n, s in there.items()}} if self.for_us else {}
