"""Which rows are new: equal ones are numbered or left out, and later versions replace earlier ones. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aion.core.join.matching import Sorted
from aion.core.join.rows import GONE, Hashes, Rows, SideRows, together
from aion.core.paged_rows import Pages, Part

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class New(NamedTuple):
    """What is new of the rows that came. ``rows``: these, and ``found``: their pages. ``first``: the first chunks of
    the pages. ``replaced``: kept rows of which a later version has come. ``their_places``: in which parts they are, and
    a mask of the rows there.
    """

    rows: Rows
    found: Pages
    first: Part | None
    replaced: Rows | None = None
    their_places: tuple[tuple[Part, Flags], ...] = ()


def numbered(stored: SideRows, rows: Rows, found: Pages, *, unique: bool) -> New:
    """Numbers rows that are equal to others. ``unique``: leaves them out. ``found``: the pages of the rows."""
    if not len(rows):
        return New(rows, found, None)
    ids = np.column_stack((rows.id, rows.id2))
    _, firsts, of = np.unique(ids, axis=0, return_index=True, return_inverse=True)
    of = of.reshape(-1)
    before = np.zeros(len(firsts), np.int64)
    by_id = Sorted(rows.id[firsts], np.zeros(len(firsts), np.int64))
    first_part = None
    hashes = Hashes(rows.hash)
    for part in stored.pages.parts(found):
        first_part = part if first_part is None else first_part
        _, there = hashes.among(part)
        zeros = np.zeros(len(there), np.int64)
        for search, of_new in by_id.pairs(there.id, zeros, zeros):
            same = there.id2[search] == rows.id2[firsts[of_new]]
            np.maximum.at(before, of_new[same], there.rank[search[same]] + 1)
    order = np.argsort(of, kind="stable")
    counts = np.bincount(of)
    rank = np.empty(len(rows), np.int64)
    rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows.rank = before[of] + rank
    if not unique or not rows.rank.any():
        return New(rows, found, first_part)
    fresh = np.flatnonzero(rows.rank == 0)
    return New(rows.take(fresh), found._replace(page_of=found.page_of[fresh]), first_part)


def newest(stored: SideRows, rows: Rows, found: Pages) -> New:
    """Keeps the newest version of each row. Its ``rank`` is the number of the version, so each is a row of its own.

    Versions may come in any order, so the page also keeps the newest version of a row that has gone.
    """
    if not len(rows):
        return New(rows, found, None)
    order = np.lexsort((rows.rank, rows.id2, rows.id))
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = (np.diff(rows.id[order]) != 0) | (np.diff(rows.id2[order]) != 0)
    rows, found = _some(rows, found, np.sort(order[is_last]))
    by_id, hashes = Sorted(rows.id, np.zeros(len(rows), np.int64)), Hashes(rows.hash)
    known = np.zeros(len(rows), np.bool_)
    replaced: list[Rows] = []
    places: list[tuple[Part, Flags]] = []
    for part in stored.pages.parts(found):
        at, there = hashes.among(part, also_gone=True)
        mask = np.zeros(part.rows.num_rows, np.bool_)
        zeros = np.zeros(len(there), np.int64)
        for search, of_new in by_id.pairs(there.id, zeros, zeros):
            same = there.id2[search] == rows.id2[of_new]
            search, of_new = search[same], of_new[same]
            is_older = there.rank[search] < rows.rank[of_new]
            known[of_new[~is_older]] = True
            older = search[is_older]
            mask[at[older]] = True
            replaced.append(there.take(older[~there.has(GONE)[older]]))
        if mask.any():
            places.append((part, mask))
    rows, found = _some(rows, found, np.flatnonzero(~known))
    replaced = [some for some in replaced if len(some)]
    return New(rows, found, None, together(replaced) if replaced else None, tuple(places))


def _some(rows: Rows, found: Pages, at: Ints) -> tuple[Rows, Pages]:
    if len(at) == len(rows):
        return rows, found
    return rows.take(at), found._replace(page_of=found.page_of[at])
