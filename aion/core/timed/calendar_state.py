"""Calendar windows keep their edges when the rules of their zone change. Pure.

The rules may be others after a restart. A snapshot therefore has the edges of all calendar windows that live, of those
that the operator remembers as gone, and of those that stored segments lie in. The windows before these are all gone,
and the snapshot has the end of the last one. After a restart these edges are fixed, and the rules of the day decide
all others. A window beside a fixed one is longer or shorter, so that nothing lies between them or in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from aion.base.numbers import NEVER
from aion.core.calendars import CalendarEdges, Ints
from aion.core.life.window_table import WindowTable
from aion.core.packing import table, untable
from aion.core.query.plan import Plan
from aion.core.slicing.grid import SliceGrid
from aion.core.timed.purged import Purged
from aion.core.windows import Calendar


def calendars_to_json(grid: SliceGrid, windows: WindowTable, gone: Purged, segments: Iterable[int]) -> dict[str, Any]:
    """What a snapshot says about calendars: by the number of each definition, edges, and the rules they came from.

    ``segments``: the starts of the stored ones, in µs.
    """
    calendars = {number: window.edges for number, window in grid.aligned.items() if isinstance(window, Calendar)}
    if not calendars:
        return {"calendars": {}}
    segments_us = np.array(list(segments), np.int64)
    ends_us = grid.ends(segments_us)
    found: dict[str, Any] = {}
    for number, edges in calendars.items():
        firsts, lasts = edges.numbers(segments_us), edges.numbers(ends_us - 1)
        live = edges.numbers(windows["start_us"][windows["definition"] == number])
        needed = np.concatenate((live, _ranges(firsts, lasts), np.array(gone.remembered(number), np.int64)))
        # With other rules, the last of the windows that are gone could end later, and come back.
        closed_us = gone.closed_us[number : number + 1]
        last_end = edges.numbers(closed_us[closed_us > -NEVER])
        numbers = np.unique(np.concatenate((needed, needed + 1, last_end)))
        found[str(number)] = {
            "rules": sorted({edges.rules.digest, *edges.fixed.rules}),
            "edges": table({"number": numbers.tolist(), "start_us": edges.starts(numbers).tolist()}),
        }
    return {"calendars": found}


def plan_of_snapshot(plan: Plan, snapshot: Mapping[str, Any] | None) -> Plan:
    """The plan for a shard with this snapshot. It is the same if the rules of the zones still say the same."""
    kept = {} if snapshot is None else snapshot.get("calendars", {})
    changed = {n: w.with_edges(fixed) for n, w in plan.calendars.items() if (fixed := _fixed(w, kept.get(str(n))))}
    return plan.with_windows(changed) if changed else plan


def _fixed(window: Calendar, kept: Mapping[str, Any] | None) -> CalendarEdges | None:
    """Returns the edges with those that the snapshot fixes, or None if the rules give the same ones."""
    if kept is None:
        return None
    columns = untable(kept["edges"])
    numbers, starts_us = (np.array(columns[name], np.int64) for name in ("number", "start_us"))
    if (window.edges.starts(numbers) == starts_us).all():
        return None
    return window.edges.with_starts(numbers, starts_us, kept["rules"])


def _ranges(firsts: Ints, lasts: Ints) -> Ints:
    """All numbers from each first to its last."""
    counts = lasts - firsts + 1
    before = np.cumsum(counts) - counts
    return np.asarray(np.arange(int(counts.sum())) - np.repeat(before - firsts, counts))
