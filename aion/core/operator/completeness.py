"""How complete the rows of an execution are, by what the operator knows of their windows. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aion.core.lateness.completeness import Completeness, Panes
from aion.core.life.actions import PaneKind
from aion.core.life.window_table import WindowTable

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class PaneFacts(NamedTuple):
    """Rows of the panes of one order as columns, (N,): a hash of the key, the window, and the events of the row."""

    key: Ints
    definition: Ints
    start_us: Ints
    end_us: Ints
    events: Ints
    late_events: Ints


def rate(
    completeness: Completeness, windows: WindowTable, watermark_us: int, kind: PaneKind, rows: PaneFacts
) -> tuple[Floats, Floats]:
    """``completeness`` and ``completeness_low`` of rows, (N,), of an execution that was just ordered. NaN: unknown.

    Both are 1 for a window that is over, because nothing comes any more. They are unknown before the window's end:
    there, the rest of the window depends on how many events are still to happen. They are also unknown for a row
    without events, which is no example either: nothing is no share of what may come.
    """
    over = windows.find(rows.definition, rows.end_us) < 0
    lateness_us = watermark_us - rows.end_us
    panes = Panes(
        rows.key,
        rows.definition,
        rows.end_us,
        -1 - lateness_us if kind is PaneKind.ON_TIME else lateness_us,
        rows.events,
        rows.late_events,
        windows.late_share_before(rows.definition, rows.start_us, rows.end_us),
    )
    share, low = np.full(len(over), np.nan), np.full(len(over), np.nan)
    share[over] = low[over] = 1.0
    completeness.update(panes.some(over))
    ended = ~over & (lateness_us >= 0) & (rows.events > 0)
    share[ended], low[ended] = completeness.estimate(panes.some(ended))
    return share, low
