"""Where the windows of keys are kept between batches: in pages of a map, with an index of what is due. Pure.

A page has the windows of some keys. The hash of a key says in which page it is, by linear hashing (Litwin 1980): with
n pages, the lowest bits of the hash. Pages are split one after the other as rows come, and put together again as rows
go, so a page has about :data:`ROWS` rows however many there are. Other pages than those that a batch touches are
neither read nor written.

The *due index* says which pages a batch must touch although no event of their keys came. Its entries are keys of the
map, (kind, time, page), so they are read in the order of time. A page names its own entries, so that they can be
deleted with it. An entry may be too early: if the windows of its page end later than they did, as sessions do with each
event, it stays, and costs one look at the page when its time comes. That is cheaper than to move it in every batch.

What the operator asks about all windows is answered by what it has in memory, and by :class:`Rest`: sums over the
pages that are not in memory. A page that is read leaves these sums, and joins them again when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from aion.base.numbers import NEVER, at_once, plus, sum_of, sums_by
from aion.core.keyed.assigners import Flags, completed
from aion.core.keyed.pages import HEAD, PageFormat, WindowPages
from aion.core.keyed.table import Ints, Table
from aion.core.packing import table, untable
from state_backends.format.ordered_map import Change, MemoryMap, OrderedMap
from state_backends.thresholds import threshold

ROWS = threshold(32, 1)
"""About how many rows a page has. Fewer make a batch of few keys cheaper, more a batch that touches all."""
_SPARSE = threshold(8, 1)  # pages are put together if they have fewer rows on average
PAGES_AT_ONCE = threshold(1 << 13, 2)
"""If a batch needs more pages than this, because rows came or windows are due, this many at a time are in memory."""
_SHRINKS = PAGES_AT_ONCE // 8 or 1  # pages that are put together with others in one batch
OPEN, CLOSED, KEPT, EARLY, WAITING = range(1, 6)
"""Kinds of entries, and their times.

``OPEN``: the first end of the page's windows that have not ended. ``CLOSED``: of those that have ended and are not
closed, and of those that no longer exist and must be retracted. ``KEPT``: the closed instant from which on the page
needs fewer rows. ``EARLY``: the first event of open windows that have news and may run early. ``WAITING``: a cell with
late windows that wait for the trigger. Only this time is exact; the others are never too late.
"""
_PAGE = 0
_KEY = np.dtype([("space", "S1"), ("definition", ">u2"), ("kind", "u1"), ("time", ">u8"), ("page", ">u8")])
_PAGE_KEY = np.dtype([("space", "S1"), ("definition", ">u2"), ("kind", "u1"), ("page", ">u8")])
_SPACE = b"w"
_SIGN = 1 << 63
_SCAN_ONLY = (1 << 63) - 1  # state_backends.format.ordered_map.NEVER_MS
_PRESENT = b"\1"

Bins = Callable[[Ints], tuple[Ints, Ints]]
"""The bin that each instant lies in: its start, and its end."""


class Facts(NamedTuple):
    """What the pages in memory say about themselves, by window or by row of the index.

    ``begins``: the first row of each window. ``live``, ``executed``, ``open_``, ``early``: masks of the windows that
    are not gone, that have run, that have not ended, and that have not ended and have news. ``events``: of each window.
    ``entries``: (kind, time, events) of each entry in the due index. ``entry_row``: a row of the index whose page has
    that entry, or -1 - a row of what was yielded. ``passed``: for the kinds whose entries may stay, the time up to
    which they are due by now.
    """

    begins: Ints
    live: Flags
    executed: Flags
    open_: Flags
    early: Flags
    events: Ints
    entries: Ints
    entry_row: Ints
    passed: dict[int, int]


class PageGroup(NamedTuple):
    """Items that are worked on together. ``pages``: they need these, which are not in memory. ``items``: numbers."""

    pages: Ints
    items: Ints


class Rest:
    """Sums over the pages that are not in memory.

    ``rows``: of both tables. ``waiting``: for each cell, how many pages have late windows in it that wait, and the
    events of these windows. ``firsts`` and ``lasts``: how many rows begin and end in each bin. ``opens``: how many
    pages have their first open event in each bin.
    """

    def __init__(self, snapshot: Mapping[str, Any] | None = None) -> None:
        state = dict.fromkeys(_SUMS, 0) if snapshot is None else snapshot
        self.sums: dict[str, int] = {name: state[name] for name in _SUMS}
        self.waiting: dict[int, tuple[int, int]] = {}
        self.firsts: dict[int, int] = {}
        self.lasts: dict[int, int] = {}
        self.opens: dict[int, int] = {}
        if snapshot is not None:
            cells = untable(snapshot["waiting"])
            pairs = zip(cells["pages"], cells["events"], strict=True)
            self.waiting = dict(zip(cells["cell"], pairs, strict=True))
            for name in _BINS:
                bins = untable(snapshot[name])
                setattr(self, name, dict(zip(bins["bin"], bins["count"], strict=True)))

    def add(self, pages: WindowPages, lasts: Ints, bins: Bins, sign: int) -> None:
        """Adds the sums of pages, or with ``sign`` -1 takes them away."""
        heads = dict(zip(HEAD, pages.heads.T, strict=True))
        self.sums["rows"] += sign * int(heads["rows"].sum() + heads["yielded"].sum())
        for name in _SUMS[1:]:
            # A sum of events that has saturated is too small afterwards. It only says how much there is to read.
            self.sums[name] = max(0, plus(self.sums[name], sign * sum_of(heads[name])))
        _count(self.firsts, bins(pages.index["first"])[0], sign)
        _count(self.lasts, bins(lasts[lasts < NEVER])[0], sign)
        _count(self.opens, bins(heads["open_first"][heads["open_first"] < NEVER])[0], sign)
        kinds, cells, events = pages.entries.T
        for cell, more in zip(cells[kinds == WAITING].tolist(), events[kinds == WAITING].tolist(), strict=True):
            before = self.waiting.get(cell, (0, 0))
            after = before[0] + sign, max(0, plus(before[1], sign * more))
            if after[0]:
                self.waiting[cell] = after
            else:
                del self.waiting[cell]

    def overlapping(self, starts_us: Ints, ends_us: Ints, bins: Bins) -> Ints:
        """How many rows overlap each stretch, or a few more: see :func:`aion.core.keyed.windows.overlapping`.

        Exact if each stretch begins and ends where bins do.
        """
        firsts, counts = _sorted(self.firsts)
        begun = np.concatenate(([0], np.cumsum(counts)))[np.searchsorted(firsts, ends_us)]
        lasts, counts = _sorted(self.lasts)
        ended = np.concatenate(([0], np.cumsum(counts)))[np.searchsorted(bins(lasts)[1], starts_us, side="right")]
        return np.asarray(begun - ended)

    @property
    def first_us(self) -> int:
        """No row begins before then. NEVER: there is none."""
        return min(self.firsts, default=NEVER)

    @property
    def first_open_us(self) -> int:
        """No open window begins before then. NEVER: there is none."""
        return min(self.opens, default=NEVER)

    def to_json(self) -> dict[str, Any]:
        waiting = sorted(self.waiting.items())
        packed = {
            name: table({"bin": bins.tolist(), "count": counts.tolist()})
            for name in _BINS
            for bins, counts in [_sorted(getattr(self, name))]
        }
        cells = {"cell": [c for c, _ in waiting], "pages": [v[0] for _, v in waiting]}
        return {**self.sums, **packed, "waiting": table({**cells, "events": [v[1] for _, v in waiting]})}


_SUMS = ("rows", "live", "executed", "early_events", "events")
_BINS = ("firsts", "lasts", "opens")


class PageStore:
    """The pages of one definition. ``definition``: its number. ``bins``: of the segments of its grid.

    ``values``: the map. ``lasts``: see Assigner.lasts. ``snapshot``: from :meth:`to_json`.
    """

    def __init__(
        self,
        definition: int,
        format_: PageFormat,
        lasts: Callable[[Table], Ints],
        bins: Bins,
        snapshot: Mapping[str, Any] | None = None,
    ) -> None:
        self._definition = definition
        self._format = format_
        self._lasts = lasts
        self.bins = bins
        self.values: OrderedMap = MemoryMap()
        self.pages: int = 1 if snapshot is None else snapshot["pages"]
        self.rest = Rest(None if snapshot is None else snapshot["rest"])
        self.first: dict[int, int | None] = dict.fromkeys((OPEN, CLOSED, KEPT, EARLY))
        """For these kinds, the time of the first entry, as of the last :meth:`write`.

        Scans begin there: what was deleted before it costs time until the runs of the map are merged.
        """
        if snapshot is not None:
            self.first = dict(zip(self.first, snapshot["first"], strict=True))
        self._held: dict[int, bytes | None] = {}  # the pages in memory, as they are in the map
        self._entries: list[Ints] = []  # and their entries: kind, time and page

    @property
    def held(self) -> int:
        """How many pages are in memory."""
        return len(self._held)

    # -- which pages --------------------------------------------------------------------------------------

    def of(self, hashes: Ints) -> Ints:
        """The page of each of these hashes of keys."""
        return place_of(hashes, self.pages)

    def each_of(self, hashes: Ints) -> Ints:
        """The pages of these hashes of keys, each once."""
        return _distinct(self.of(hashes))

    def groups(self, pages: Ints) -> list[PageGroup]:
        """Groups of some items, by the pages that they need. ``pages``: of each item, a row that came or a page itself.

        All items are one group if they fit. Otherwise those whose pages are in memory come first. All items of a page
        are in the same group. :data:`ROWS` items of a page weigh as much as a page.
        """
        distinct, counts = _counted(pages)
        weights = np.maximum(counts // ROWS, 1)
        here = self._are_here(distinct)
        if len(self._held) + int(weights[~here].sum()) <= PAGES_AT_ONCE:
            return [PageGroup(distinct[~here], np.arange(len(pages)))]
        away = np.flatnonzero(~here)
        stretches = [away[some] for some in at_once(weights[away], PAGES_AT_ONCE)]
        # Numpy sorts small integers by radix, so the items are sorted by group, and not by page.
        part_of = np.zeros(int(distinct.max(initial=-1)) + 1, np.min_scalar_type(len(stretches)))
        for number, which in enumerate(stretches, start=1):
            part_of[distinct[which]] = number
        part_of_item = part_of[pages]
        order = np.argsort(part_of_item, kind="stable")
        ends = np.cumsum(np.bincount(part_of_item, minlength=len(stretches) + 1))
        found = [PageGroup(distinct[:0], order[: ends[0]])] if self._held else []
        others = zip(stretches, pairwise(ends.tolist()), strict=True)
        return found + [PageGroup(distinct[which], order[begin:end]) for which, (begin, end) in others]

    def _are_here(self, pages: Ints) -> Flags:
        """A mask of the pages that are in memory."""
        if not self._held:
            return np.zeros(len(pages), np.bool_)
        return np.fromiter(map(self._held.__contains__, pages.tolist()), np.bool_, len(pages))

    def missing(self, pages: Ints) -> Ints:
        """The pages, out of these, that are not in memory, each once."""
        distinct = _distinct(pages)
        return distinct[~self._are_here(distinct)]

    # -- reading ------------------------------------------------------------------------------------------

    def due(self, kind: int, upto: int) -> Ints:
        """The pages with an entry of this kind up to this time that are not in memory."""
        first = self.first[kind]
        if first is None or first > upto:
            return np.empty(0, np.int64)
        return self._pages_between(self._prefix(kind, first), self._prefix(kind, upto + 1))

    def early(self) -> Ints:
        """The pages that are not in memory and have open windows with news."""
        return self.due(EARLY, NEVER - 1)

    def waiting(self, cells_us: Ints) -> Ints:
        """The pages that are not in memory and have late windows in these cells that wait."""
        cells = [cell for cell in cells_us.tolist() if cell in self.rest.waiting]
        found = [self._pages_between(self._prefix(WAITING, c), self._prefix(WAITING, c + 1)) for c in cells]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def soonest(self, most: int) -> Ints:
        """The pages with the ``most`` windows that end first by the due index: closed ones first.

        There may be more of them. Windows that took events after their entry was made end later than it says.
        """
        kinds = (CLOSED, OPEN) if self.rest.sums["live"] else ()
        firsts = ((kind, first) for kind in kinds if (first := self.first[kind]) is not None)
        scans = (self.values.scan(self._prefix(kind, first), self._prefix(kind + 1)) for kind, first in firsts)
        return np.unique(_pages_of([key for scan in scans for key, _ in islice(scan, most)]))

    def read(self, numbers: Ints) -> tuple[Table, Table]:
        """Brings pages into memory. Returns their rows, and the windows in them that were executed."""
        stored = self.values.get(self._page_keys(numbers))
        self._held.update(zip(numbers.tolist(), stored, strict=True))
        there = [i for i, page in enumerate(stored) if page is not None]
        pages = self._decoded(stored)
        self.rest.add(pages, self._lasts(pages.index), self.bins, -1)
        kinds, times, _ = pages.entries.T
        self._entries.append(np.column_stack((kinds, times, numbers[there][pages.entry_place])))
        return pages.index, pages.yielded

    def peek(self, numbers: Ints) -> tuple[Table, Table]:
        """The same rows, but the pages are not in memory afterwards."""
        pages = self._decoded(self.values.get(self._page_keys(numbers)))
        return pages.index, pages.yielded

    def _decoded(self, stored: Sequence[bytes | None]) -> WindowPages:
        pages = self._format.decode([page for page in stored if page is not None])
        return replace(pages, index=completed(pages.index))

    # -- writing ------------------------------------------------------------------------------------------

    def wanted(self, rows: int) -> int:
        """How many pages there should be. ``rows``: all that there are."""
        if rows > ROWS * self.pages:
            return max(rows // ROWS, 1)
        if rows < _SPARSE * self.pages:
            return max(rows // _SPARSE, self.pages - _SHRINKS, 1)
        return self.pages

    def resize(self, wanted: int) -> tuple[int, Ints]:
        """The next number of pages on the way to ``wanted``, and the pages that must be in memory for that."""
        n = self.pages
        if wanted > n:
            m = min(wanted, n + PAGES_AT_ONCE)
            return m, self.missing(place_of(np.arange(n, m), n) if self.rest.sums["rows"] else np.empty(0, np.int64))
        gone = np.arange(wanted, n)
        return wanted, self.missing(np.concatenate((gone, place_of(gone, wanted))))

    def write(self, pages: int, index: Table, yielded: Table, facts: Facts) -> None:
        """Writes what changed of the pages in memory, and forgets them. ``pages``: their number from now on."""
        self.pages = pages
        of_rows, of_yielded = place_of(index["hash"], pages), place_of(yielded["hash"], pages)
        held = np.fromiter((page for page in self._held if page < pages), np.int64)
        numbers = _distinct(np.concatenate((held, of_rows, of_yielded)))
        places = np.searchsorted(numbers, of_rows), np.searchsorted(numbers, of_yielded)
        entries, entry_place = _entries(facts, places)
        before = np.concatenate((np.empty((0, 3), np.int64), *self._entries))
        deleted, added = _moved(before, entries, numbers[entry_place], facts.passed)
        heads = self._heads(len(numbers), index, facts, places[0])
        encoded, heads = self._format.encode(heads, (index, yielded), places, entries, entry_place)
        written = zip(numbers.tolist(), self._page_keys(numbers), encoded, heads[:, 0] + heads[:, 1], strict=True)
        changes: list[Change] = []
        for page, key, data, rows in written:
            after = data if rows else None
            if after != self._held.get(page):
                changes.append((key, after, None))
        gone = [page for page, stored in self._held.items() if page >= pages and stored is not None]
        changes += [(key, None, None) for key in self._page_keys(np.array(gone, np.int64))]
        changes += [(key, None, None) for key in self._entry_keys(deleted)]
        changes += [(key, _PRESENT, _SCAN_ONLY) for key in self._entry_keys(added)]
        if changes:
            self.values.put(changes)
        made = WindowPages(heads, index, yielded, entries, entry_place)
        self.rest.add(made, self._lasts(index), self.bins, 1)
        self._note_first(entries[:, 0], entries[:, 1], deleted)
        self._held, self._entries = {}, []

    def _heads(self, pages: int, index: Table, facts: Facts, place: Ints) -> Ints:
        of_window = place[facts.begins]
        opens = np.full(pages, NEVER, np.int64)
        np.minimum.at(opens, of_window[facts.open_], index["first"][facts.begins[facts.open_]])

        def count(which: Any) -> Ints:
            return np.bincount(of_window[which], minlength=pages)

        early = sums_by(of_window[facts.early], facts.events[facts.early], pages)
        events = sums_by(place, index["events"], pages)
        return np.column_stack([count(facts.live), count(facts.executed & facts.live), opens, early, events])

    def _note_first(self, kinds: Ints, times: Ints, deleted: Ints) -> None:
        for kind, before in self.first.items():
            first = int(times[kinds == kind].min(initial=NEVER if before is None else before))
            if before is not None and bool(((deleted[:, 0] == kind) & (deleted[:, 1] == before)).any()):
                # Only the map knows which entry is the first one now.
                found = next(iter(self.values.scan(self._prefix(kind, first), self._prefix(kind + 1))), None)
                self.first[kind] = None if found is None else int.from_bytes(found[0][-16:-8], "big") - _SIGN
            else:
                self.first[kind] = first if (kinds == kind).any() or before is not None else None

    def to_json(self) -> dict[str, Any]:
        """JSON values, as of the last :meth:`write`."""
        return {"pages": self.pages, "rest": self.rest.to_json(), "first": list(self.first.values())}

    # -- keys of the map ----------------------------------------------------------------------------------

    def _pages_between(self, begin: bytes, end: bytes) -> Ints:
        return self.missing(_pages_of([key for key, _ in self.values.scan(begin, end)]))

    def _prefix(self, kind: int, time_us: int | None = None) -> bytes:
        prefix = _SPACE + self._definition.to_bytes(2, "big") + kind.to_bytes(1, "big")
        return prefix if time_us is None else prefix + (min(time_us, NEVER) + _SIGN).to_bytes(8, "big")

    def _page_keys(self, numbers: Ints) -> list[bytes]:
        keys = np.zeros(len(numbers), _PAGE_KEY)
        keys["space"], keys["definition"], keys["page"] = _SPACE, self._definition, numbers
        return _split(keys.tobytes(), _PAGE_KEY.itemsize)

    def _entry_keys(self, entries: Ints) -> list[bytes]:
        """``entries``: kind, time and page of each."""
        kinds, times_us, numbers = entries.T
        keys = np.zeros(len(kinds), _KEY)
        keys["space"], keys["definition"], keys["kind"] = _SPACE, self._definition, kinds
        keys["time"], keys["page"] = times_us.astype(np.uint64) ^ np.uint64(_SIGN), numbers
        return _split(keys.tobytes(), _KEY.itemsize)


def place_of(hashes: Ints, pages: int) -> Ints:
    """Returns the page of each hash. ``pages``: their number."""
    low = 1 << (pages.bit_length() - 1)
    place: Ints = hashes & (2 * low - 1)
    return np.where(place < pages, place, place & (low - 1))


def _distinct(pages: Ints) -> Ints:
    """The different numbers, sorted."""
    return _counted(pages)[0]


def _counted(pages: Ints) -> tuple[Ints, Ints]:
    """The different numbers, sorted, and how many there are of each."""
    if int(pages.max(initial=0)) > _COUNTED * len(pages):
        return np.unique(pages, return_counts=True)
    of_page = np.bincount(pages)
    distinct = np.flatnonzero(of_page)
    return distinct, of_page[distinct]


_COUNTED = threshold(16, 1)  # with at most this many possible numbers for each one, counting is faster than sorting


def _entries(facts: Facts, places: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """The entries of each page: one for each kind, with the first time, and one for each waiting cell.

    Also the place of each entry's page.
    """
    rows = facts.entry_row
    place = np.empty(len(rows), np.int64)
    of_index = rows >= 0
    place[of_index], place[~of_index] = places[0][rows[of_index]], places[1][-1 - rows[~of_index]]
    kinds, times, events = facts.entries.T
    waits = kinds == WAITING
    # The first time of each kind and page, in a table of all of them.
    kind_of = place[~waits] * WAITING + kinds[~waits]
    firsts = np.full((int(place.max(initial=-1)) + 1) * WAITING, NEVER, np.int64)
    there = np.zeros(len(firsts), np.bool_)
    np.minimum.at(firsts, kind_of, times[~waits])
    there[kind_of] = True
    at = np.flatnonzero(there)
    found = np.column_stack([at % WAITING, firsts[at], np.zeros(len(at), np.int64)])
    order = np.lexsort((times[waits], place[waits]))
    place_w, times_w = place[waits][order], times[waits][order]
    begins = np.flatnonzero(np.append(True, (np.diff(place_w) != 0) | (np.diff(times_w) != 0))[: len(order)])
    cell_of = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(order))))
    sums = sums_by(cell_of, events[waits][order], len(begins))
    cells = np.column_stack([np.full(len(begins), WAITING), times_w[begins], sums])
    return np.concatenate((found, cells)), np.concatenate((at // WAITING, place_w[begins]))


def _moved(before: Ints, entries: Ints, numbers: Ints, passed: Mapping[int, int]) -> tuple[Ints, Ints]:
    """What was in the due index and goes, and what comes to it: kind, time and page of each entry.

    ``before``: the same of those that were there. ``entries``: those that pages have now, whose times this sets back to
    the times before if these are early enough, and not due yet. ``numbers``: of the page of each.
    """
    after = np.column_stack((entries[:, 0], entries[:, 1], numbers))
    waits, waited = after[:, 0] == WAITING, before[:, 0] == WAITING
    # A page has one entry of each other kind.
    old, new = before[~waited], after[~waits]
    old = old[np.argsort(old[:, 2] * WAITING + old[:, 0])]
    of_old, of_new = old[:, 2] * WAITING + old[:, 0], new[:, 2] * WAITING + new[:, 0]
    at = np.searchsorted(of_old, of_new)
    was_there = at < len(old)
    was_there[was_there] = of_old[at[was_there]] == of_new[was_there]
    before_us = old[at[was_there], 1]
    due_us = np.zeros(WAITING, np.int64)
    due_us[list(passed)] = list(passed.values())
    here = np.flatnonzero(was_there)
    stays = here[(before_us <= new[here, 1]) & (before_us > due_us[new[here, 0]])]
    new[stays, 1] = old[at[stays], 1]
    same = here[new[here, 1] == before_us]
    entries[~waits, 1] = new[:, 1]
    goes, comes = np.ones(len(old), np.bool_), np.ones(len(new), np.bool_)
    goes[at[same]] = comes[same] = False
    # There are few cells, so few pages have windows that wait in more than one.
    cells_before, cells_after = set(map(tuple, before[waited].tolist())), set(map(tuple, after[waits].tolist()))
    gone, came = (
        np.array(sorted(cells), np.int64).reshape(-1, 3)
        for cells in (cells_before - cells_after, cells_after - cells_before)
    )
    return np.concatenate((old[goes], gone)), np.concatenate((new[comes], came))


def _pages_of(keys: Sequence[bytes]) -> Ints:
    return np.frombuffer(b"".join(keys), _KEY)["page"].astype(np.int64)


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _sorted(counts: Mapping[int, int]) -> tuple[Ints, Ints]:
    bins = np.array(sorted(counts), np.int64)
    return bins, np.array([counts[at] for at in bins.tolist()], np.int64)


def _count(counts: dict[int, int], bins: Ints, sign: int) -> None:
    distinct, found = np.unique(bins, return_counts=True) if len(bins) else (bins, bins)
    for at, n in zip(distinct.tolist(), found.tolist(), strict=True):
        left = counts.get(at, 0) + sign * n
        if left:
            counts[at] = left
        else:
            del counts[at]
