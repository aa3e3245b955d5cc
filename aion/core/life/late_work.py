"""Late and early executions do not delay on-time results: a batch does a limited share of them. Pure.

The events that are read for windows that run late, early or for the last time in a batch are at most ``share`` times
those for the windows that run on time, plus :data:`FLOOR`. Overlapping windows that are combined from shared slices
count a part of their events each. The rest waits: windows whose bound has passed go first, then the oldest. A window
waits for at most ``batches`` batches. A batch without data runs all that waits, and so does the end of the input. So
what runs depends only on the version that a batch starts from, and on the batch.

A late window that its own event makes due has no gap in which its blocks could be brought into memory. If it is *far*
(:class:`~aion.core.life.window_table.WindowTable`) and large, it waits for the next batch, and they are staged in
the gap before that (paper 3.2). Whether they really are in memory does not count: a batch that runs again after a
failure has to do the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from aion.core.life.actions import PaneKind
from aion.core.life.window_table import WindowTable

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Numbers: TypeAlias = Ints | Floats

FLOOR = 1_000_000
"""This many events are always allowed. Reading them takes little time, unless a function looks at each event."""
LEAST_AWAITED_BYTES = 1 << 20
"""A late window with fewer bytes does not wait for its blocks. Reading them takes little time from any disk."""


class LateWork:
    """The budget of one batch. It begins anew with :meth:`end_batch`.

    ``alone``: for some definitions, by number, the part of a window's events that it does not share with its
    neighbours. 1 for the others.
    """

    def __init__(self, share: float = math.inf, batches: int = 0, alone: Mapping[int, float] | None = None) -> None:
        self._share = share
        self._batches = batches
        self._alone = np.ones(max(alone, default=-1) + 1) if alone else np.ones(0)
        for number, share in (alone or {}).items():
            self._alone[number] = share
        self.end_batch()

    def end_batch(self) -> None:
        self._on_time = 0.0
        self._spent = 0.0
        self._has_data = False

    def arrived(self) -> None:
        """Notes that the batch has data."""
        self._has_data = True

    def read(self, definitions: Ints, events: Ints) -> Floats:
        """How many events are read for windows. ``events``: in each."""
        known = definitions < len(self._alone)
        if not known.any():
            return events.astype(np.float64)
        return np.asarray(events * np.where(known, self._alone[np.where(known, definitions, 0)], 1.0))

    def on_time(self, events: Numbers) -> None:
        """Notes windows that run on time, by the events that are read for each."""
        self._on_time += float(events.sum(dtype=np.float64))

    def spend(self, events: Numbers) -> None:
        """Notes windows that run late and cannot wait, by the events that are read for each."""
        self._spent += float(events.sum(dtype=np.float64))

    def take(self, events: Numbers, owed: Ints, *, all_: bool = False) -> Flags:
        """A mask of the windows that run now. They are given in the order in which they should run.

        ``events``: that are read for each. ``owed``: 1 more than the number of batches for which it has waited.
        ``all_``: nothing waits.
        """
        if all_:
            chosen = np.ones(len(events), np.bool_)
        else:
            left = self._share * self._on_time + FLOOR - self._spent if self._share < math.inf else math.inf
            chosen = (np.cumsum(events.astype(np.float64)) <= left) | (owed > self._batches)
        self.spend(events[chosen])
        return chosen

    def take_rows(self, windows: WindowTable, rows: Ints, *, all_: bool) -> Flags:
        """The same for windows of a table, in the order of ``rows``."""
        read = self.read(windows["definition"][rows], windows["events"][rows])
        return self.take(read, windows["owed"][rows], all_=all_)

    def runs(self, windows: WindowTable, late: int, now_us: int, *, all_: bool, patient: Ints) -> dict[PaneKind, Ints]:
        """The rows of the windows that run now, by what their pane is. The others wait for another batch.

        ``late``: the number of late windows. They are at the front of the table, which has the oldest windows first.
        ``patient``: rows that wait in any case, unless all run.
        """
        owed = np.flatnonzero(windows["owed"] > 0)
        is_over, is_late = windows.over(owed, now_us), owed < late
        all_ = all_ or self.is_idle
        order = np.argsort(~is_over, kind="stable")
        order = order if all_ else order[~np.isin(owed[order], patient)]
        run = np.zeros(len(owed), np.bool_)
        run[order] = self.take_rows(windows, owed[order], all_=all_)
        windows["owed"][owed[~run]] += 1
        windows.look(owed[is_late & ~run], now_us)
        kinds = {PaneKind.FINAL: is_over, PaneKind.LATE: is_late & ~is_over, PaneKind.EARLY: ~is_late}
        return {kind: owed[run & which] for kind, which in kinds.items() if (run & which).any()}

    @property
    def is_idle(self) -> bool:
        """Whether the batch has no data so far. At its end, it does all that waits."""
        return not self._has_data
