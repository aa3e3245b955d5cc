"""Which events have come before, by the columns that identify an event. Pure.

A source that delivers at least once repeats an event with its time. So what is known of an event, its identity, lies in
a bin of event time, and goes when no window needs that time any more. The bins are in a map, in pages of
hashes: a batch reads the pages that its own events fall into, and writes those that got new ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.base.identity import Identities, identify
from aion.base.numbers import EARLIEST_US, LATEST_US
from state_backends.format.ordered_map import Change, OrderedMap
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
BIN_US = threshold(1_000_000, 3)
"""How long a bin is. Events of one time are often in one batch, so they share pages."""
_PAGE = threshold(512, 1)  # a page has about as many events at most
_SPACE, _BIN, _IDS = b"u", b"b", b"i"
_SIGN = 1 << 63
_ODD = -7046029254386353131  # any odd number with many bits


class Unique:
    """Leaves out events that have come before. ``columns``: identify an event, together with its time.

    ``secret``: the key of identities (:func:`aion.base.identity.identify`).
    """

    def __init__(self, columns: Sequence[str], time: str, secret: bytes) -> None:
        self._secret = secret
        self._columns = tuple(dict.fromkeys((*columns, time)))
        self._time = time

    def of(self, events: pa.RecordBatch, values: OrderedMap) -> pa.RecordBatch:
        """Returns the events that have not come before. ``values``: the map of the shard.
        Those without a usable time are among them."""
        times = events.column(self._time).cast(pa.int64())
        at = times.fill_null(LATEST_US + 1).to_numpy(zero_copy_only=False)
        timed = np.flatnonzero((at >= EARLIEST_US) & (at <= LATEST_US))
        if not len(timed):
            return events
        ids = Identities(identify([*map(events.column, self._columns)], self._secret)[timed])
        fresh = np.ones(events.num_rows, np.bool_)
        fresh[timed] = _Bins(values).add(at[timed] // BIN_US, ids)
        return events if fresh.all() else events.filter(pa.array(fresh))

    def forget(self, before_us: int, values: OrderedMap) -> None:
        """Forgets events before this time, which no window takes any more."""
        _Bins(values).drop(before_us // BIN_US)


class _Bins:
    """The bins in a map. Of each bin, how many events it has, and in how many pages; and its pages."""

    def __init__(self, values: OrderedMap) -> None:
        self._values = values

    def add(self, bins: Ints, identities: Identities) -> Flags:
        """Returns a mask of the events that are new, each once, and adds these."""
        ids: Ints = identities
        rows = len(bins)
        first, mixed = _distinct(bins, ids)
        bins, ids = bins[first], ids[first]
        distinct, of_bin = np.unique(bins, return_inverse=True)
        keys = [_bin_key(number) for number in distinct.tolist()]
        heads = np.array([(0, 1) if head is None else np.frombuffer(head, np.int64) for head in self._values.get(keys)])
        places, page_of = _places(of_bin, ids, heads[:, 1])
        stored = self._pages(distinct, places)
        new = ~_among(bins, ids, mixed, distinct[places[:, 0]], stored)
        self._write(distinct, heads, places, page_of[new], ids[new], stored)
        fresh = np.zeros(rows, np.bool_)
        fresh[first[new]] = True
        return fresh

    def drop(self, before: int) -> None:
        """Deletes all bins before this one."""
        changes: list[Change] = []
        for key, head in self._values.scan(_SPACE + _BIN, _bin_key(before)):
            number, pages = key[2:], int(np.frombuffer(head, np.int64)[1])
            changes.append((key, None, None))
            changes += [(_page_key(number, page), None, None) for page in range(pages)]
        if changes:
            self._values.put(changes)

    def _pages(self, bins: Ints, places: Ints) -> list[Ints]:
        numbers = map(_number, bins[places[:, 0]].tolist())
        keys = [_page_key(number, page) for number, page in zip(numbers, places[:, 1].tolist(), strict=True)]
        return [_ids(page) for page in self._values.get(keys)]

    def _write(self, bins: Ints, heads: Ints, places: Ints, page_of: Ints, ids: Ints, stored: Sequence[Ints]) -> None:
        if not len(ids):
            return
        order = np.argsort(page_of, kind="stable")
        changed, begins = np.unique(page_of[order], return_index=True)
        added = dict(zip(changed.tolist(), np.split(ids[order], begins[1:]), strict=True))
        counts = np.bincount(places[page_of, 0], minlength=len(bins))
        first = np.searchsorted(places[:, 0], np.arange(len(bins) + 1)).tolist()
        changes: list[Change] = []
        for at in np.flatnonzero(counts).tolist():
            number, (count, pages) = _number(int(bins[at])), heads[at].tolist()
            count += int(counts[at])
            mine = [place for place in range(first[at], first[at + 1]) if place in added]
            grown = {int(places[p, 1]): np.concatenate((stored[p], added[p])) for p in mine}
            if count > _PAGE * pages:
                grown, pages = self._split(number, pages, count, grown)
            changes.append((_SPACE + _BIN + number, np.array([count, pages]).tobytes(), None))
            changes += [(_page_key(number, page), of_page.tobytes() or None, None) for page, of_page in grown.items()]
        self._values.put(changes)

    def _split(self, number: bytes, pages: int, count: int, grown: dict[int, Ints]) -> tuple[dict[int, Ints], int]:
        """Spreads the events of a bin over twice as many pages as they need."""
        others = [page for page in range(pages) if page not in grown]
        stored = map(_ids, self._values.get([_page_key(number, page) for page in others]))
        ids = np.concatenate([*grown.values(), *stored])
        more = 1 << (2 * count // _PAGE).bit_length()
        page_of = ids[:, 0] & (more - 1)
        order = np.argsort(page_of, kind="stable")
        there, begins = np.unique(page_of[order], return_index=True)
        spread = dict.fromkeys(range(pages), np.empty((0, 2), np.int64))
        return spread | dict(zip(there.tolist(), np.split(ids[order], begins[1:]), strict=True)), more


def _mixed(bins: Ints, ids: Ints) -> Ints:
    """One number for bin and hashes. Different events have the same one only by chance."""
    with np.errstate(over="ignore"):
        return np.asarray(ids[:, 0] ^ (bins * _ODD))


def _distinct(bins: Ints, ids: Ints) -> tuple[Ints, Ints]:
    """The first row of each event, sorted by its mixed number, and that number."""
    mixed = _mixed(bins, ids)
    order = np.argsort(mixed, kind="stable")
    begins = _begins(mixed[order], bins[order], ids[order])
    if int(begins.sum()) != int(_begins(mixed[order]).sum()):  # by chance, so sort by all that there is
        order = np.lexsort((ids[:, 1], bins, mixed))
        begins = _begins(mixed[order], bins[order], ids[order])
    first = order[begins]
    return first, mixed[first]


def _begins(*columns: Ints) -> Flags:
    """A mask of the rows that differ from the one before."""
    differs = [(c[1:] != c[:-1]) if c.ndim == 1 else (c[1:] != c[:-1]).any(axis=1) for c in columns]
    return np.append(np.ones(1, np.bool_), np.logical_or.reduce(differs))[: len(columns[0])]


def _places(of_bin: Ints, ids: Ints, pages: Ints) -> tuple[Ints, Ints]:
    """The pages of some events, as rows of (bin, page), and for each event which of them. ``pages``: of each bin."""
    most = int(pages.max())
    codes, page_of = np.unique(of_bin * most + (ids[:, 0] & (pages[of_bin] - 1)), return_inverse=True)
    return np.column_stack(np.divmod(codes, most)), page_of


def _among(bins: Ints, ids: Ints, mixed: Ints, bins_of: Ints, stored: Sequence[Ints]) -> Flags:
    """A mask of the events that are stored. ``mixed``: sorted. ``bins_of``: the bin of each page of ``stored``."""
    found = np.zeros(len(bins), np.bool_)
    there = np.concatenate([np.empty((0, 2), np.int64), *stored])
    of_bin = np.repeat(bins_of, [len(page) for page in stored])
    theirs = _mixed(of_bin, there)
    at = np.searchsorted(mixed, theirs)
    while True:
        left = np.flatnonzero(at < len(mixed))
        left = left[mixed[at[left]] == theirs[left]]
        if not len(left):
            return found
        at, theirs, of_bin, there = at[left], theirs[left], of_bin[left], there[left]
        same = (bins[at] == of_bin) & (ids[at] == there).all(axis=1)
        found[at[same]] = True
        at = at + 1  # another event may have this number, by chance


def _number(bin_: int) -> bytes:
    return (bin_ + _SIGN).to_bytes(8, "big")


def _bin_key(bin_: int) -> bytes:
    return _SPACE + _BIN + _number(bin_)


def _page_key(number: bytes, page: int) -> bytes:
    return _SPACE + _IDS + number + page.to_bytes(4, "big")


def _ids(page: bytes | None) -> Ints:
    return np.frombuffer(page or b"", np.int64).reshape(-1, 2)
