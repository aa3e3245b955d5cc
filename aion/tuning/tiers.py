"""The tiered store as a model: which blocks are where, how many bytes move when, who waits (paper section 3.1, 3.2).

The decisions are those of :class:`state_backends.tiered.TieredStore`, block for block; the budget and the manager of
memory pressure are the real ones. What is left out: merging files, and restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.tuning.disk import Cost, Machine, Priority, Request, SimulatedDisk
from policies.sizing import m_bucket_bytes
from state_backends.m_bucket import MemoryBudget

OUTBOX_BYTES = 32 << 20
READ_AHEAD = 4

Floats = npt.NDArray[np.float64]


class Place(Enum):
    MEMORY = 0
    WRITING = 1
    DISK = 2
    STAGING = 3
    BOTH = 4


IN_MEMORY = (Place.MEMORY, Place.WRITING, Place.BOTH)


@dataclass(slots=True, eq=False)
class Entry:
    """``arrival``: the number under which the last of it came. ``keys``: the part of all keys that it holds, 0 to 1."""

    seq: int
    slice_us: int
    size: int
    arrival: int
    keys: tuple[float, float] | None = None
    place: Place = Place.MEMORY
    leaves: bool = False
    unread: bool = False
    staging: Request | None = None
    reserved: bool = False


@dataclass(slots=True)
class Staged:
    """As :class:`state_backends.store.StagingStats`; ``blocked_s`` is of all that executions and writers waited for."""

    hits: int = 0
    late: int = 0
    misses: int = 0
    staged_bytes: int = 0
    read_bytes: int = 0
    blocked_s: float = 0.0


class Tiers:
    """The blocks of one shard. ``budget``, ``disk`` and ``stats`` are the host's."""

    def __init__(
        self,
        disk: SimulatedDisk,
        machine: Machine,
        budget: MemoryBudget,
        stats: Staged,
        *,
        bucket_limit_bytes: int,
        keep_fraction: float,
        prestages: bool,
        blocking: bool,
        staging_times: Sequence[float] = (1.0,),
        processing_times: Sequence[float] = (1.0,),
    ) -> None:
        # Nothing always takes as long as mostly, and what a store learns of its speed hangs on that: so one prestage
        # after another, and one execution after another, is as slow as those that were recorded were, again and again.
        self._staging_times, self._processing_times = cycle(staging_times), cycle(processing_times)
        self._disk, self._machine, self._budget, self._stats = disk, machine, budget, stats
        self._bucket_limit = bucket_limit_bytes
        self._keep = keep_fraction
        self._prestages = prestages
        self._blocking = blocking
        self._outbox_limit = min(OUTBOX_BYTES, budget.limit_bytes // 8)
        self._slices: dict[int, dict[int, Entry]] = {}
        self._held: dict[int, int] = {}  # slice -> bytes in memory
        self._outbox: dict[int, Entry] = {}
        self._outbox_bytes = 0
        self._writes: list[Request] = []
        self._appended: dict[int, tuple[float, float, int]] = {}
        self._touched: dict[int, float] = {}
        self._expired: set[int] = set()
        self._staging_bytes_per_s: float | None = None
        self.processing_bytes_per_s: float | None = None

    # -- what comes ---------------------------------------------------------------------------------------

    def append(
        self, seq: int, slice_us: int, size: int, *, late: bool, arrival: int, keys: tuple[float, float] | None = None
    ) -> None:
        entry = Entry(seq, slice_us, size, arrival, keys)
        self._slices.setdefault(slice_us, {})[seq] = entry
        self._hold(entry)
        now = self._disk.now_s
        first, _, before = self._appended.get(slice_us, (now, now, 0))
        self._appended[slice_us] = (first, now, before + size)
        left = self._budget.left()
        if left < self._outbox_limit or late or self._held[slice_us] > self._bucket_limit:
            self._post(entry)
        if self._outbox and (left < 0 or self._outbox_bytes >= self._outbox_limit):
            self._write(list(self._outbox.values()), Priority.LATE_WRITE, leave=True)
        if left < 0:
            self._wait(self._writes)

    def flush(self) -> None:
        if self._outbox:
            self._write(list(self._outbox.values()), Priority.DESTAGE, leave=True)

    def persist(self) -> None:
        """A version is made: waits until all is on disk."""
        leaving = set(self._outbox)
        pending = [e for entries in self._slices.values() for e in entries.values() if e.place is Place.MEMORY]
        if pending:
            for entry in pending:
                entry.leaves = entry.seq in leaving
            self._write(pending, Priority.LATE_WRITE, leave=False)
        self._wait(self._writes)

    def destage(self, slices: Iterable[int]) -> None:
        for slice_us in slices:
            self._expired.add(slice_us)
            self._touched[slice_us] = self._disk.now_s
            self._shrink(slice_us, None)

    def purge(self, slices: Iterable[int]) -> None:
        for slice_us in slices:
            for entry in self._slices.pop(slice_us, {}).values():
                self._forget(entry)
            self._appended.pop(slice_us, None)
            self._touched.pop(slice_us, None)
            self._expired.discard(slice_us)

    def supersede(self, slice_us: int, after: int, until: int, below: int) -> None:
        entries = self._slices.get(slice_us, {})
        for entry in [e for e in entries.values() if after < e.arrival <= until and e.seq < below]:
            del entries[entry.seq]
            self._forget(entry)

    # -- reading ------------------------------------------------------------------------------------------

    def entries(
        self,
        slices: Iterable[int],
        *,
        spans: Mapping[int, tuple[int, int]] | None = None,
        below: int | None = None,
        keys: Floats | None = None,
    ) -> list[Entry]:
        """As :class:`state_backends.store.Only` says; ``keys``: sorted positions, of which None are all."""
        found = []
        for slice_us in sorted(set(slices)):
            after, until = (spans or {}).get(slice_us, (-1, 1 << 62))
            for entry in sorted(self._slices.get(slice_us, {}).values(), key=lambda e: (e.arrival, e.seq)):
                if not after < entry.arrival <= until or (below is not None and entry.seq >= below):
                    continue
                if keys is not None and entry.keys is not None:
                    low, high = np.searchsorted(keys, entry.keys)
                    if low == high:
                        continue
                found.append(entry)
        return found

    def read(self, entries: Sequence[Entry], *, blocking: bool, cost: Cost | None = None) -> int:
        """Reads blocks as an execution does, which works on each for a while, or as something else at that cost.

        Returns their bytes.
        """
        if cost is None:
            cost = Cost(0.0, self._machine.processing_bytes_per_s)
        ahead: dict[int, Request] = {}
        limit = max(READ_AHEAD, self._fitting(entries) if blocking else 0)
        at = total = 0
        for number, entry in enumerate(entries):
            at = max(at, number)
            while at < len(entries) and len(ahead) < limit:
                if entries[at].place is Place.DISK:
                    ahead[entries[at].seq] = self._fetch(entries[at])
                at += 1
            if blocking:
                self._wait(ahead.values())
                blocking = False
            self._take(entry, ahead.pop(entry.seq, None))
            total += entry.size
            self._disk.pass_to(self._disk.now_s + entry.size / cost.bytes_per_s)
        self._disk.pass_to(self._disk.now_s + cost.fixed_s)
        self._stats.read_bytes += total
        return total

    def work(self, size: int) -> None:
        """What an execution of so many bytes takes beyond reading them."""
        least = size / self._machine.processing_bytes_per_s
        all_of_it = next(self._processing_times) * (least + self._machine.execution_s)
        self._disk.pass_to(self._disk.now_s + max(0.0, all_of_it - least))

    def prestage(self, entries: Sequence[Entry]) -> None:
        if not self._prestages:
            return
        begin, size = self._disk.now_s, 0
        room, wanted = self._budget.left() - self._outbox_limit, self._wanted(entries)
        last: Entry | None = None
        times = next(self._staging_times)
        for entry in entries:
            if entry.place is not Place.DISK:
                continue
            if size >= wanted or size + entry.size > room:
                break
            seconds, step_bytes = self._reading(entry)
            if last is None:
                seconds += self._machine.staging_s
            entry.place, entry.reserved, last = Place.STAGING, True, entry
            self._budget.reserve(entry.size)
            size += entry.size
            entry.staging = self._disk.submit(Priority.PRESTAGE, [(times * seconds, step_bytes)], self._staged(entry))
        if last is not None and last.staging is not None:
            request, done = last.staging, last.staging.done

            def learnt() -> None:
                done()
                assert request.finished_at_s is not None
                speed = size / max(request.finished_at_s - begin, 1e-6)
                known = self._staging_bytes_per_s
                self._staging_bytes_per_s = speed if known is None else 0.7 * known + 0.3 * speed

            request.done = learnt

    # -- memory pressure ----------------------------------------------------------------------------------

    def views(self) -> list[dict[str, Any]]:
        found = []
        for slice_us, m_bytes in self._held.items():
            first, last, size = self._appended.get(slice_us, (0.0, 0.0, 0))
            p_bytes = sum(e.size for e in self._slices.get(slice_us, {}).values() if e.place not in IN_MEMORY)
            found.append(
                {
                    "name": slice_us,
                    "m_bytes": m_bytes,
                    "p_bytes": p_bytes,
                    "keep_bytes": int(self._keep * (m_bytes + p_bytes)),
                    "expired": slice_us in self._expired,
                    "last_append_s": max(last, self._touched.get(slice_us, 0.0)),
                    "append_rate_bytes_per_s": size / max(last - first, 1.0),
                }
            )
        return found

    def shrink(self, slice_us: int, keep_bytes: int) -> str | None:
        if not self._held.get(slice_us):
            return "it has nothing in memory"
        if not self._shrink(slice_us, keep_bytes):
            return "it holds no more than its bootstrap part"
        self.flush()
        return None

    # -- within -------------------------------------------------------------------------------------------

    def _hold(self, entry: Entry) -> None:
        self._held[entry.slice_us] = self._held.get(entry.slice_us, 0) + entry.size
        self._budget.add(entry.size)

    def _let_go(self, entry: Entry) -> None:
        self._held[entry.slice_us] -= entry.size
        if not self._held[entry.slice_us]:
            del self._held[entry.slice_us]
        self._budget.add(-entry.size)

    def _forget(self, entry: Entry) -> None:
        self._unpost(entry)
        self._staging_over(entry)
        if entry.place in IN_MEMORY:
            self._let_go(entry)
        entry.place = Place.DISK
        entry.leaves = False
        entry.size = -abs(entry.size)  # gone: a write under way changes nothing any more

    def _post(self, entry: Entry) -> None:
        if entry.seq not in self._outbox:
            self._outbox[entry.seq] = entry
            self._outbox_bytes += entry.size

    def _unpost(self, entry: Entry) -> None:
        if self._outbox.pop(entry.seq, None) is not None:
            self._outbox_bytes -= entry.size

    def _write(self, entries: list[Entry], priority: Priority, *, leave: bool) -> None:
        for entry in entries:
            entry.place = Place.WRITING
            entry.leaves = entry.leaves or leave
            self._unpost(entry)
        # Blocks are put together in memory within no time; what takes long comes at once: to sync, and to ingest.
        size = sum(entry.size for entry in entries)
        steps = [(size / self._machine.write_bytes_per_s, size), (self._machine.write_file_s, 0)]

        def written() -> None:
            self._writes.remove(request)
            for entry in entries:
                if entry.size < 0:
                    continue
                entry.place = Place.BOTH
                if entry.leaves:
                    self._evict(entry)

        request = self._disk.submit(priority, steps, written)
        self._writes.append(request)

    def _evict(self, entry: Entry) -> None:
        entry.place, entry.leaves, entry.unread = Place.DISK, False, False
        self._let_go(entry)

    def _shrink(self, slice_us: int, keep_bytes: int | None) -> bool:
        entries = sorted(self._slices.get(slice_us, {}).values(), key=lambda e: (e.arrival, e.seq))
        if keep_bytes is None:
            keep_bytes = int(self._keep * sum(e.size for e in entries))
        went = False
        for entry in entries:
            if entry.place is Place.STAGING:
                self._staging_over(entry)
                entry.place = Place.DISK
            if entry.place not in IN_MEMORY:
                continue
            keep_bytes -= entry.size
            if keep_bytes >= 0:
                continue
            went = True
            if entry.place is Place.MEMORY:
                self._post(entry)
            elif entry.place is Place.WRITING:
                entry.leaves = True
            else:
                self._evict(entry)
        return went

    def _reading(self, entry: Entry) -> tuple[float, int]:
        return self._machine.read_block_s + entry.size / self._machine.read_bytes_per_s, entry.size

    def _fetch(self, entry: Entry) -> Request:
        return self._disk.submit(Priority.READ, [self._reading(entry)], lambda: None)

    def _take(self, entry: Entry, fetched: Request | None) -> None:
        if fetched is None and entry.place is Place.DISK:
            fetched = self._fetch(entry)
        if fetched is not None:
            self._wait([fetched])
            self._stats.misses += 1
            return
        late = entry.staging
        if entry.place is Place.STAGING and late is not None:
            self._disk.raise_to(late, Priority.READ)
            self._wait([late])
            self._stats.late += 1
        elif entry.unread:
            self._stats.hits += 1
        entry.unread = False

    def _staged(self, entry: Entry) -> Callable[[], None]:
        def staged() -> None:
            self._staging_over(entry)
            if entry.place is Place.STAGING:
                entry.place, entry.unread = Place.BOTH, True
                self._hold(entry)
                self._stats.staged_bytes += entry.size

        return staged

    def _staging_over(self, entry: Entry) -> None:
        if entry.reserved:
            self._budget.reserve(-entry.size)
            entry.reserved = False
        if entry.staging is not None:
            if entry.staging.finished_at_s is None:
                entry.staging.cancelled = True
            entry.staging = None

    def _wait(self, requests: Iterable[Request]) -> None:
        begin = self._disk.now_s
        for request in list(requests):
            self._disk.wait(request)
        self._stats.blocked_s += self._disk.now_s - begin

    def _fitting(self, entries: Sequence[Entry]) -> int:
        room, number = self._budget.left(), 0
        for entry in entries:
            if entry.place is Place.DISK:
                room -= entry.size
                if room < 0:
                    break
            number += 1
        return number

    def _wanted(self, entries: Sequence[Entry]) -> int:
        size = m_bucket_bytes(
            sum(e.size for e in entries),
            self._staging_bytes_per_s,
            self.processing_bytes_per_s,
            blocking=self._blocking,
            block_bytes=max((e.size for e in entries), default=1),
        )
        return size - sum(e.size for e in entries if e.place in IN_MEMORY)
