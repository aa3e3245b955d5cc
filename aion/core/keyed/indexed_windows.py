"""Which windows an index has now, and which of those that were executed no longer exist. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from aion.aggregates.groups import number
from aion.core.keyed.assigners import AssignedWindows, Assigner, Flags, newest
from aion.core.keyed.table import Ints, Table, codes_of
from aion.core.slicing.tree import ranges


class IndexedWindows(NamedTuple):
    """The windows of an index, and the last execution of each.

    ``codes``, ``yielded_codes``: the keys of the windows and of the rows of ``yielded``, as numbers. ``pane``: the
    number of the window's next pane. ``newest``: its newest block. ``news``: whether its last pane does not have that.
    ``early``: whether that pane was an early one, so that one follows when it has ended, even without news. ``at``: its
    row in ``yielded``. -1: it has not run yet.
    """

    windows: AssignedWindows
    codes: Ints
    yielded_codes: Ints
    pane: Ints
    newest: Ints
    news: Flags
    early: Flags
    at: Ints


def indexed_windows(assigner: Assigner, index: Table, yielded: Table) -> IndexedWindows:
    """Finds the windows of ``index`` in ``yielded``, which has a row for each window that was executed."""
    windows = assigner.windows(index)
    index_codes, yielded_codes = codes_of(index, yielded)
    codes = index_codes[windows.begins]
    n = len(codes)
    at = np.full(n, -1, np.int64)
    if n and len(yielded):
        y = yielded
        identities = number(
            [
                pa.array(np.concatenate(pair))
                for pair in (
                    (codes, yielded_codes),
                    (windows.starts_us, y["start"]),
                    (windows.ends_us, y["end"]),
                    (windows.numbers, y["number"]),
                )
            ],
            n + len(y),
        )
        row_of = np.full(identities.count, -1, np.int64)
        row_of[identities.ids[n:]] = np.arange(len(y))
        at = row_of[identities.ids[:n]]
    known = at >= 0
    pane, latest = np.zeros(n, np.int64), newest(index["seq"], windows)
    news, early = np.ones(n, np.bool_), np.zeros(n, np.bool_)
    last = yielded.take(at[known])
    pane[known], news[known], early[known] = last["pane"] + 1, latest[known] > last["seq"], last["early"] > 0
    return IndexedWindows(windows, codes, yielded_codes, pane, latest, news, early, at)


def orphans(now: IndexedWindows, yielded: Table) -> Ints:
    """The rows of ``yielded`` whose windows no longer exist."""
    gone = np.ones(len(yielded), np.bool_)
    gone[now.at[now.at >= 0]] = False
    return np.flatnonzero(gone)


def replaced(now: IndexedWindows, yielded: Table, rows: Ints) -> Ints:
    """The rows of ``yielded`` whose windows no longer exist, and that meet a window of ``rows`` of the same key."""
    lost = orphans(now, yielded)
    if not len(lost):
        return lost
    order = rows[np.argsort(now.codes[rows], kind="stable")]
    codes = now.codes[order]
    begins = np.searchsorted(codes, now.yielded_codes[lost])
    lengths = np.searchsorted(codes, now.yielded_codes[lost], side="right") - begins
    orphan_of = np.repeat(lost, lengths)
    windows = order[ranges(begins, lengths)]
    starts, ends = now.windows.starts_us[windows], now.windows.over_us[windows]
    # A window of a single instant is an empty interval, so intervals that touch count.
    meets = (starts <= yielded["end"][orphan_of]) & (ends >= yielded["start"][orphan_of])
    return np.unique(orphan_of[meets])
