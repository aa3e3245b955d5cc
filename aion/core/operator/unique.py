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
from aion.core.paged_rows import ArrowPages, PagedRows
from state_backends.format.ordered_map import OrderedMap
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
BIN_US = threshold(1_000_000, 3)
"""How long a bin is. Events of one time are often in one batch, so they share pages."""
_PAGE = threshold(512, 1)  # a page has about as many events at most
_IDS = pa.schema([("first", pa.int64()), ("second", pa.int64())])
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
        fresh[timed] = _added(_rows(values), at[timed] // BIN_US, ids)
        return events if fresh.all() else events.filter(pa.array(fresh))

    def forget(self, before_us: int, values: OrderedMap) -> None:
        """Forgets events before this time, which no window takes any more."""
        _rows(values).drop(before_us // BIN_US)


class _IdPages(ArrowPages):
    """Chunks with two numbers for each event, as bytes."""

    def decode(self, values: Sequence[bytes]) -> tuple[pa.Table, Ints]:
        ids = np.frombuffer(b"".join(values), np.int64).reshape(-1, 2)
        return pa.table([*ids.T], schema=self.schema), np.array([len(value) // 16 for value in values], np.int64)

    def encode(self, rows: pa.RecordBatch, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        ids = np.column_stack([column.to_numpy() for column in rows.columns])
        return [ids[begin:end].tobytes() for begin, end in zip(begins, ends, strict=True)]


def _rows(values: OrderedMap) -> PagedRows:
    return PagedRows(values, b"u", _IDS.names[0], _IdPages(_IDS), page_rows=_PAGE)


def _added(stored: PagedRows, bins: Ints, identities: Identities) -> Flags:
    """Keeps events that are new. Returns a mask of them, each once. ``bins``: of each event."""
    ids: Ints = identities
    first, mixed = _distinct(bins, ids)
    fresh = np.zeros(len(bins), np.bool_)
    bins, ids = bins[first], ids[first]
    found = stored.pages(bins, ids[:, 0], grow=True)
    (read,) = stored.chunks_of(found)  # identities differ, so a page has one chunk
    there = np.column_stack([column.to_numpy() for column in read.rows.columns])
    distinct = np.unique(bins)
    new = np.flatnonzero(~_among(bins, ids, mixed, distinct[found.places[read.of_chunk, 0]], there))
    if len(new):
        page_of = found.page_of[new]
        both = pa.concat_tables([read.rows, pa.table([*ids[new].T], schema=_IDS)])
        changed = np.zeros(len(read.pages), np.bool_)
        changed[page_of] = True
        stored.write(found, read, both, np.concatenate((read.of_chunk, page_of)), changed)
    fresh[first[new]] = True
    return fresh


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


def _among(bins: Ints, ids: Ints, mixed: Ints, of_bin: Ints, there: Ints) -> Flags:
    """A mask of the events that are stored. ``mixed``: sorted. ``there``: what is stored, and ``of_bin``: its bins."""
    found = np.zeros(len(bins), np.bool_)
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
