"""A set of window starts, stored as runs of neighbours: it stays small however many windows it holds. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class Runs:
    """A set of multiples of ``step`` (plus a constant), stored as ``[first, last]`` runs."""

    __slots__ = ("_firsts", "_lasts", "_step")

    def __init__(self, step: int, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._step = step
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in runs:
            self._firsts.append(first)
            self._lasts.append(last)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __contains__(self, value: int) -> bool:
        i = bisect_right(self._firsts, value) - 1
        return i >= 0 and value <= self._lasts[i]

    def add(self, value: int) -> None:
        if value in self:
            return
        i = bisect_right(self._firsts, value)
        joins_before = i > 0 and self._lasts[i - 1] == value - self._step
        joins_after = i < len(self._firsts) and self._firsts[i] == value + self._step
        if joins_before and joins_after:
            self._lasts[i - 1] = self._lasts[i]
            del self._firsts[i], self._lasts[i]
        elif joins_before:
            self._lasts[i - 1] = value
        elif joins_after:
            self._firsts[i] = value
        else:
            self._firsts.insert(i, value)
            self._lasts.insert(i, value)

    def forget_to(self, value: int) -> None:
        """Remove everything up to and including ``value``."""
        gone = bisect_right(self._lasts, value)
        del self._firsts[:gone], self._lasts[:gone]
        if self._firsts and self._firsts[0] <= value:
            self._firsts[0] += (value - self._firsts[0]) // self._step * self._step + self._step

    def to_json(self) -> list[list[int]]:
        return [list(pair) for pair in zip(self._firsts, self._lasts, strict=True)]
