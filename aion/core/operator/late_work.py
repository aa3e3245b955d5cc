"""Late and early executions do not delay on-time results: a batch does a limited share of them. Pure.

The events in the windows that run late, early or for the last time in a batch are at most ``share`` times the events in
the windows that run on time, plus :data:`FLOOR`. The rest waits: windows whose bound has passed go first, then the
oldest. A window waits for at most ``batches`` batches. A batch without data, and the end of the input, do all that
waits. So what runs is a function of the version that a batch starts from, and of the batch.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from aion.core.numbers import sum_of
from aion.core.operator.actions import PaneKind
from aion.core.operator.window_table import WindowTable

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FLOOR = 1_000_000
"""So many events are always allowed: they take well below a second, unless a function looks at each of them."""


class LateWork:
    """The budget of one batch. It begins anew with :meth:`end_batch`."""

    def __init__(self, share: float = math.inf, batches: int = 0) -> None:
        self._share = share
        self._batches = batches
        self.end_batch()

    def end_batch(self) -> None:
        self._on_time = 0.0
        self._spent = 0.0
        self._has_data = False

    def arrived(self) -> None:
        """Notes that the batch has data."""
        self._has_data = True

    def on_time(self, events: Ints) -> None:
        """Notes windows that run on time, by their events."""
        self._on_time += sum_of(events)

    def spend(self, events: Ints) -> None:
        """Notes windows that run late and cannot wait, by their events."""
        self._spent += sum_of(events)

    def take(self, events: Ints, owed: Ints, *, all_: bool = False) -> Flags:
        """A mask of the windows that run now. They are given in the order in which they should run.

        ``events``: in each window. ``owed``: 1 more than the number of batches for which it has waited. ``all_``:
        nothing waits.
        """
        if all_:
            chosen = np.ones(len(events), np.bool_)
        else:
            left = self._share * self._on_time + FLOOR - self._spent if self._share < math.inf else math.inf
            chosen = (np.cumsum(events.astype(np.float64)) <= left) | (owed > self._batches)
        self.spend(events[chosen])
        return chosen

    def runs(self, windows: WindowTable, late: int, now_us: int, *, all_: bool) -> dict[PaneKind, Ints]:
        """The rows of the windows that run now, by what their pane is. The others wait for another batch.

        ``late``: the number of late windows. They are at the front of the table, which has the oldest windows first.
        """
        owed = np.flatnonzero(windows["owed"] > 0)
        is_over, is_late = windows.over(owed, now_us), owed < late
        order = np.argsort(~is_over, kind="stable")
        run = np.zeros(len(owed), np.bool_)
        waiting = owed[order]
        run[order] = self.take(windows["events"][waiting], windows["owed"][waiting], all_=all_ or self.is_idle)
        windows["owed"][owed[~run]] += 1
        windows.look(owed[is_late & ~run], now_us)
        kinds = {PaneKind.FINAL: is_over, PaneKind.LATE: is_late & ~is_over, PaneKind.EARLY: ~is_late}
        return {kind: owed[run & which] for kind, which in kinds.items() if (run & which).any()}

    @property
    def is_idle(self) -> bool:
        """Whether the batch has no data so far. At its end, it does all that waits."""
        return not self._has_data
