"""A summary of the live windows of single keys, for people: totals, and the windows that end first. Pure.

It is stored with the snapshot, so that nobody has to read the index to see it. Nothing is restored from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aion.base.numbers import NEVER, sum_of
from aion.core.operator.keyed.shapes import total
from aion.core.operator.keyed.windows import KeyedWindows

LISTED = 20
"""How many windows of each definition and shard are listed: those that end first."""


def summary(keyed: KeyedWindows) -> dict[str, Any]:
    """JSON values. ``events``: all events that are kept for the definition, also those that are in no window yet.

    ``executed``: how many windows have run before. ``first_end_us``, ``last_end_us``: of complete windows, None if
    there are none. A punctuated window is not complete until the next punctuation. Its end is None, and it is listed
    after the others.
    """
    index, (windows, live, executed) = keyed.index, keyed.live()
    rows = np.flatnonzero(live)
    complete = windows.over_us[rows] < NEVER
    ends = np.where(complete, windows.ends_us[rows], NEVER)
    known = ends[complete]
    if len(rows) > LISTED:
        first = ends <= np.partition(ends, LISTED - 1)[LISTED - 1]
        rows, ends = rows[first], ends[first]
    order = rows[np.lexsort((windows.starts_us[rows], ends))[:LISTED]]
    keys = index.take(windows.begins[order]).keys
    return {
        "windows": int(live.sum()),
        "executed": int((executed & live).sum()),
        "events": sum_of(index["events"]),
        "first_end_us": int(known.min()) if len(known) else None,
        "last_end_us": int(known.max()) if len(known) else None,
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
