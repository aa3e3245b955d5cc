"""The keyed values of one shard: what an attempt has put, values in memory, and runs on disk.

A batch's changes become one sorted file, a *run*, when the attempt commits. A key is looked up in what the attempt has
put, then in memory, then in the runs, the newest first. The parts, each with one job:

    overlay.py        what the attempt has put
    cache.py          values in memory that are also on disk
    run_files.py      writes and reads runs: their contents, and a RocksDB that has ingested them
    merging.py        keeps the number of runs low

Invariants: a committed value is in the runs, and in memory it is the same; what an attempt has put is in the overlay,
or in a run that is deleted if the attempt is undone.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from state_backends.files.names import SstFile
from state_backends.format.ordered_map import Change
from state_backends.store.io import Io, Pending, Priority, Steps
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.map.cache import VALUE_BYTES, ValueCache
from state_backends.store.map.merging import RunMerger
from state_backends.store.map.overlay import Overlay
from state_backends.store.map.run_files import RunFiles
from state_backends.store.protocol import StoreStats
from state_backends.thresholds import threshold

PAGE_BYTES = threshold(1 << 20, 64)
"""About the most that one page of a get reads from disk. Nobody counts it in the budget until it is sent."""
_PAGE_KEYS = threshold(1 << 10, 2)
"""The most keys of a page. They are all looked up in memory again if the disk answers for only some of them."""
_EXPECTED_KEYS = threshold(1 << 10, 2)  # come to memory between two looks at what is there already
_EXPECTED_SHARE = 2  # expected values take this part of a shard's memory: the rest is for what it has already
_OVERLAY_SHARE = 4  # an attempt's changes may take this part of the budget,
_LEAST_SHARE = 32  # and this part even if memory is full
_LARGE_SHARE = 8  # without versions, they go to disk when they take this part


class MapStore:
    """See :class:`state_backends.format.ordered_map.LazyMap` for what an attempt asks of it.

    One thread puts, commits and undoes. Gets and scans may run beside it. Raises DiskError, and CorruptState naming a
    damaged file. ``keeps_all``: values stay in memory, even beyond the budget. ``keeps_none``: none stays after the
    commit.
    """

    def __init__(
        self, files: RunFiles, io: Io, budget: MemoryBudget, *, keeps_all: bool = False, keeps_none: bool = False
    ) -> None:
        self._files, self._io, self._budget = files, io, budget
        self._lock = threading.RLock()  # never held during I/O
        self._cache = ValueCache(budget, keeps_all=keeps_all, keeps_none=keeps_none)
        self._merger = RunMerger(files, io, self._lock)
        self._committed: tuple[SstFile, ...] = ()
        self._overlay = Overlay()
        self._spilling = Overlay()  # a part of the overlay that is being written to disk
        self._spilled: list[SstFile] = []
        self._last: SstFile | None = None  # the run of a commit that has not ended, with the whole overlay
        self._generation = 0  # what a read found on disk may be kept in memory only if this has not changed
        self._under_way: list[Pending[Any]] = []
        self._closed = False
        self._hits = self._misses = 0
        self._read_bytes = self._read_before = 0  # of values that were read from disk: since the last commit, before it

    # -- what an attempt asks for -------------------------------------------------------------------------

    def get(self, keys: Sequence[bytes]) -> Iterator[list[bytes | None]]:
        """The value of each key, in pages: in the order of the keys, as many as are read at once. Lazy."""
        at = 0
        while at < len(keys):
            part = keys[at : at + _PAGE_KEYS] if at or len(keys) > _PAGE_KEYS else keys
            page = self._get(part)
            at += len(page)
            yield page

    def _get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._lock:
            generation = self._generation
            values, complete = self._cache.get(keys)
            mine: set[int] = set()
            for changes in (self._spilling.changes, self._overlay.changes):
                if changes:
                    for at, key in enumerate(keys):
                        if key in changes:
                            values[at] = changes[key]
                            mine.add(at)
            # A key that is nowhere in memory may be on disk.
            missing = [at for at, value in enumerate(values) if value is None and at not in mine]
            if complete or not self._files.runs:
                missing = []
            self._hits += len(keys) - len(missing)
        if not missing:
            return values
        wanted = [keys[at] for at in missing]
        found = self._io.submit(Priority.READ, self._files.get(wanted, PAGE_BYTES)).result()
        self._keep(wanted, found, generation)
        self._misses += len(found)
        for at, value in zip(missing, found, strict=False):
            values[at] = value
        return values if len(found) == len(missing) else values[: missing[len(found)]]

    def _keep(self, keys: Sequence[bytes], values: Sequence[bytes | None], generation: int) -> None:
        """Keeps in memory what was read from disk."""
        found = [(key, value) for key, value in zip(keys, values, strict=False) if value is not None]
        with self._lock:
            self._read_bytes += _size(found)
            if generation == self._generation and not self._closed:
                self._cache.put(found)

    def put(self, values: Iterable[Change]) -> None:
        """Sets values, given as MapValue. Waits for the disk if the attempt's changes take too much memory."""
        left = iter(values)
        full = True
        while full:
            limit = self._budget.limit_bytes
            most = limit // (_OVERLAY_SHARE if self._budget.left() >= 0 else _LEAST_SHARE)
            with self._lock:
                self._discard_last()
                grown = self._overlay.put(left, most)
                full = self._overlay.size_bytes > most
            self._budget.add(grown)
            if full:
                self._spill()

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        with self._lock:
            mine = self._overlay.between(begin, end)
            if older := self._spilling.between(begin, end):
                mine = sorted((dict(older) | dict(mine)).items())
        # What is put or written to disk from now on does not change these.
        return self._scan(begin, end, mine)

    def _scan(
        self, begin: bytes, end: bytes | None, mine: list[tuple[bytes, bytes | None]]
    ) -> Iterator[tuple[bytes, bytes]]:
        at: bytes | None = begin
        used = 0
        while at is not None and self._files.runs:
            page, at = self._io.submit(Priority.READ, self._files.page(at, end)).result()
            upto = used
            while upto < len(mine) and (at is None or mine[upto][0] < at):
                upto += 1
            if upto == used:
                yield from page
                continue
            entries: dict[bytes, bytes | None] = dict(page)
            entries.update(mine[used:upto])
            used = upto
            for key in sorted(entries):
                if (value := entries[key]) is not None:
                    yield key, value
        for key, value in mine[used:]:
            if value is not None:
                yield key, value

    @property
    def is_large(self) -> bool:
        """Whether what was put since the last version takes much memory, or is on disk partly."""
        with self._lock:
            return bool(self._spilled) or self._overlay.size_bytes > self._budget.limit_bytes // _LARGE_SHARE

    @property
    def on_disk(self) -> bool:
        """Whether this attempt or the last one read values from disk."""
        return bool(self._read_bytes or self._read_before)

    def expect(self, keys: Sequence[bytes]) -> bool:
        """Starts bringing the values of these keys to memory, for the next attempt. Does not wait.

        Returns whether that is of use. It is not if the last attempt found everything in memory. Nor is it if that
        attempt read more than memory holds: then values that come early leave before they are read, and are read twice.
        """
        with self._lock:
            generation = self._generation
            room = self._budget.share() // _EXPECTED_SHARE
            useful = self.on_disk and max(self._read_bytes, self._read_before) <= room
            if not useful or self._closed or not self._files.runs or self._cache.keeps_none:
                return False
            missing = self._cache.missing(keys)
            if missing:
                self._under_way = [request for request in self._under_way if not request.over()]
                self._under_way.append(self._io.submit(Priority.PRESTAGE, self._prestage(missing, generation)))
            return True

    def _prestage(self, keys: Sequence[bytes], generation: int) -> Steps[None]:
        while keys and self._read_bytes < self._budget.share() // _EXPECTED_SHARE and generation == self._generation:
            part = self._cache.missing(keys[:_EXPECTED_KEYS])  # a get may have been faster
            keys = keys[_EXPECTED_KEYS:]
            while part and generation == self._generation:
                found = yield from self._files.get(part, PAGE_BYTES)
                self._keep(part, found, generation)
                part = part[len(found) :]
        yield 0

    # -- versions -----------------------------------------------------------------------------------------

    def persist(self) -> list[SstFile]:
        """Writes what the attempt has put. Returns the runs of the new version, oldest first.

        Raises DiskError; then everything is as before.
        """
        with self._lock:
            write = None
            if self._overlay.changes and self._last is None:
                # One thread puts and persists, so the overlay does not change meanwhile.
                write = self._io.submit(Priority.WRITE, self._files.write(self._overlay.entries()))
        if write is not None:
            self._last = write.result()
        with self._lock:
            new = [*self._spilled, *filter(None, [self._last])]
            return [*self._merger.applied(self._committed), *new]

    def end(self, runs: Sequence[SstFile], expected_ms: int | None = None) -> None:
        """Ends the attempt: a version has these runs now, at these paths. ``expected_ms``: see policies.destage."""
        with self._lock:
            self._generation += 1
            self._read_before, self._read_bytes = self._read_bytes, 0
            overlay, self._overlay = self._overlay, Overlay()
            for run in (*self._spilled, *filter(None, [self._last])):
                self._files.delete(run)  # the version has a link to it
            self._spilled, self._last = [], None
            self._merger.named(runs)
            self._committed = self._files.runs = tuple(runs)
            self._cache.expected_ms = expected_ms
            self._budget.add(-overlay.size_bytes)
            self._cache.put(overlay.changes.items(), overlay.needed_ms)
            if runs and not self._closed:
                self._io.submit(Priority.WRITE, self._files.refresh())

    def undo(self) -> None:
        """Forgets everything that the attempt has put."""
        with self._lock:
            self._generation += 1
            self._budget.add(-self._overlay.size_bytes)
            self._overlay = Overlay()
            self._discard_last()
            if self._spilled:
                self._files.runs = self._committed
                self._cache.clear()  # it may have values of these runs
                for run in self._spilled:
                    self._files.delete(run)
                self._spilled = []

    def restore(self, runs: Sequence[SstFile]) -> None:
        """Fills an empty store with the values of existing runs, oldest first. Raises CorruptState, DiskError."""
        self._committed = self._files.runs = tuple(runs)
        if runs:
            self._cache.clear()
            self._io.submit(Priority.READ, self._files.adopt()).result()
            self._under_way.append(self._io.submit(Priority.MAINTENANCE, self._files.complete()))

    def compact(self) -> None:
        """Starts merging runs in the background, if that is worth it. Call it after each commit."""
        self._merger.compact(self._committed)

    def close(self) -> None:
        """Waits for I/O that is under way, then frees all memory. Published files stay."""
        self._merger.stop()
        with self._lock:
            self._closed = True
            self._generation += 1
            under_way, self._under_way = self._under_way, []
        for request in under_way:
            request.cancel()
        self._io.submit(Priority.READ, _call(self._files.close)).result()
        with self._lock:
            self._budget.add(-self._overlay.size_bytes - self._spilling.size_bytes)
            self._overlay, self._spilling = Overlay(), Overlay()
            self._cache.close()

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                values=len(self._cache) + len(self._overlay),
                value_bytes=self._cache.size_bytes + self._overlay.size_bytes,
                value_hits=self._hits,
                value_misses=self._misses,
                runs=len(self._files.runs),
                run_bytes=sum(run.size_bytes for run in self._files.runs),
                merges=self._merger.merges,
                merged_bytes=self._merger.merged_bytes,
                failed_merges=self._merger.failed_merges,
            )

    def validate(self) -> None:
        """Raises AssertionError if the counted bytes are wrong."""
        self._cache.validate()

    # -- an attempt with more changes than memory may take ------------------------------------------------

    def _spill(self) -> None:
        """Writes the overlay to disk as a run of its own, before the commit. Raises DiskError."""
        with self._lock:
            spilling, self._overlay = self._overlay, Overlay()
            self._spilling = spilling
            write = self._io.submit(Priority.WRITE, self._files.write(spilling.entries()))
        try:
            run = write.result()
        except BaseException:
            with self._lock:
                self._overlay, self._spilling = spilling, Overlay()
            raise
        with self._lock:
            self._generation += 1
            self._spilled.append(run)
            self._files.runs = (*self._files.runs, run)
            self._spilling = Overlay()
            self._budget.add(-spilling.size_bytes)
            self._cache.put(spilling.changes.items(), spilling.needed_ms)

    def _discard_last(self) -> None:
        """Forgets the run of a commit that failed. Hold the lock."""
        last, self._last = self._last, None
        if last is not None:
            self._files.delete(last)


def _size(values: Iterable[tuple[bytes, bytes]]) -> int:
    """The bytes that values take in memory."""
    return sum(len(key) + len(value) + VALUE_BYTES for key, value in values)


def _call(function: Any) -> Steps[None]:
    function()
    return
    yield 0


class LocalValues:
    """Writes what was put to disk when it takes too much memory. It is a version that nobody can go back to."""

    def __init__(self, store: MapStore) -> None:
        self.store = store
        self._numbers = itertools.count()
        self._runs: dict[int, SstFile] = {}

    def settle(self) -> None:
        """Between two attempts: what was put stays."""
        if not self.store.is_large:
            return
        found = self.store.persist()
        before, self._runs = self._runs, {run.file_no: self._runs.get(run.file_no) or self._kept(run) for run in found}
        self.store.end([*self._runs.values()])
        for file_no in before.keys() - self._runs.keys():
            Path(before[file_no].path).unlink(missing_ok=True)
        self.store.compact()

    def _kept(self, run: SstFile) -> SstFile:
        """The same file under a name of its own: the store deletes the one that it has written."""
        path = Path(run.path).with_name(f"{run.name}.{next(self._numbers)}.kept")
        os.link(run.path, path)
        return SstFile(run.file_no, str(path), *run[2:])
