"""Decides when the next merge of a store may begin: one at a time, in the background, and less often after failures."""

from __future__ import annotations

from typing import Any

from state_backends.store.io import Io, Pending, Priority, Steps

OVERDUE_COMMITS = 16
"""A merge that has not ended after this number of commits gets the priority of late writes."""
_LONGEST_PAUSE = 64


class MergeTurns:
    """It owns the merge under way. It has no lock: hold the store's lock around every call."""

    def __init__(self, io: Io) -> None:
        self._io = io
        self._request: Pending[Any] | None = None
        self._age = self._pause = self._failures_in_a_row = 0  # age and pause are in calls of due
        self.closing = False

    def due(self) -> bool:
        """Returns whether a merge may begin now. Call it once for each commit. Makes a merge that takes long more
        urgent.
        """
        if self._request is not None and not self._request.over():
            self._age += 1
            if self._age >= OVERDUE_COMMITS:
                self._request.raise_to(Priority.LATE_WRITE)
            return False
        if self._pause:
            self._pause -= 1
            return False
        return not self.closing

    def begin(self, steps: Steps[Any]) -> None:
        self._age = 0
        self._request = self._io.submit(Priority.MAINTENANCE, steps)

    def failed(self) -> None:
        """The same error is likely to come again, so the pauses between tries grow."""
        self._failures_in_a_row += 1
        self._pause = min(2**self._failures_in_a_row, _LONGEST_PAUSE)

    def succeeded(self) -> None:
        self._failures_in_a_row = 0

    def stop(self) -> None:
        """Cancels the merge under way. No other begins."""
        self.closing = True
        if self._request is not None:
            self._request.cancel()
