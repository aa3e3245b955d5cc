"""A summary of the windows of keys, for people: totals, and the windows that end first. Pure.

It is stored with the snapshot, so that nobody has to read pages to see it. Nothing is restored from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aion.base.numbers import NEVER
from aion.core.keyed.assigners import AssignedWindows, Flags, total
from aion.core.keyed.table import Table

LISTED = 20
"""How many windows of each definition and shard are listed: those that end first.

If there are many more, and they still take events, others may end somewhat earlier: see the due index in kept.py."""


def summary(
    index: Table, windows: AssignedWindows, live: Flags, executed: Flags, sums: Mapping[str, int], last_end_us: int
) -> dict[str, Any]:
    """JSON values. The first arguments: see :meth:`aion.core.keyed.windows.KeyedWindows.first_to_end`.

    ``sums``: over all pages. ``last_end_us``: no complete window ends later.

    ``events``: all events that are kept for the definition, also those that are in no window yet. ``executed``: how
    many windows have run before. ``first_end_us``: of complete windows, None if there are none. ``last_end_us``: no
    window ends later, None if there are none. A punctuated window is not complete until the next punctuation. Its end
    is None, and it is listed after the others.
    """
    rows = np.flatnonzero(live)
    ends = np.where(windows.over_us[rows] < NEVER, windows.ends_us[rows], NEVER)
    order = rows[np.lexsort((windows.starts_us[rows], ends))[:LISTED]]
    keys = index.take(windows.begins[order]).keys
    first_us = int(ends.min(initial=NEVER))
    return {
        "windows": sums["live"],
        "executed": sums["executed"],
        "events": sums["events"],
        "first_end_us": first_us if first_us < NEVER else None,
        "last_end_us": last_end_us if first_us < NEVER else None,
        "listed": {
            "key": [[str(value) for value in row] for row in zip(*(key.to_pylist() for key in keys), strict=True)]
            or [[] for _ in order],
            "start_us": windows.starts_us[order].tolist(),
            "end_us": [
                end_us if over_us < NEVER else None
                for end_us, over_us in zip(
                    windows.ends_us[order].tolist(), windows.over_us[order].tolist(), strict=True
                )
            ],
            "events": total(index["events"], windows)[order].tolist(),
            "late_events": total(index["late_events"], windows)[order].tolist(),
            "executed": executed[order].tolist(),
        },
    }
