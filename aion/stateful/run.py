"""One batch of a stateful processor on one shard: rows and timers in, results out, changes of state to the store.

Keys are processed in chunks. The records of a chunk are read at once, the processor's calls are local, and what changed
is written at once. Records that are on disk are asked for all together, and come as they are read: while keys are
processed, the store reads the next ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues

from aion.errors import FormatError
from aion.execute.tenant import Saved
from aion.stateful.handle import Handle
from aion.stateful.keys import Group, Keys
from aion.stateful.layout import MIN_MS, pages_of, record_key, wake_of, wakes
from aion.stateful.record import KeyRecord
from aion.stateful.restore import Declaration, Restored, restore
from aion.stateful.variables import Variables
from state_backends.format.ordered_map import LazyMap, MapValue
from state_backends.thresholds import threshold

CHUNK_KEYS = threshold(8192, 2)
VERSION = 3
"""The format of a snapshot, and of records."""


def variables_of(snapshot: Mapping[str, Any] | None, by_name: bool = False) -> Variables:
    """Returns the state variables of a shard. ``snapshot``: see ShardRun. Raises FormatError if another Aion wrote it.

    ``by_name``: see Variables; for those who define variables.
    """
    if snapshot is not None and snapshot["version"] != VERSION:
        raise FormatError(
            f"the state of the processor was written in format {snapshot['version']}; this Aion reads format "
            f"{VERSION}: use the Aion that wrote it"
        )
    return Variables(None if snapshot is None else snapshot["stateful"], by_name)


class ShardRun:
    """A batch on a shard: see :class:`aion.execute.tenant.Tenant`. ``due_ms``: timers and state that expire up to this
    time are due, or None if there are no timers.

    ``snapshot``: as :meth:`save` made it, or None if the shard has no version yet. ``reads_ahead``: whether the records
    of the next keys are fetched while keys are processed. ``backwards``: whether keys whose records are on disk come in
    descending order. Let each batch take the other order: what one has processed last is still in memory, and the next
    one reads it first. Always in the same order, it would have left memory just before it is read.
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        handle: Handle,
        variables: Variables,
        store: LazyMap,
        keys: Keys,
        times: TimerValues,
        due_ms: int | None,
        snapshot: Mapping[str, Any] | None,
        reads_ahead: bool = True,
        backwards: bool = False,
    ) -> None:
        self._processor, self._handle, self._variables = processor, handle, variables
        self._store, self._keys = store, keys
        self._times, self._due_ms = times, due_ms
        self._reads_ahead, self._backwards = reads_ahead, backwards
        self._counters: dict[str, int] = {"events": 0, "dropped": 0, "keys": 0, "timers": 0, "fired_timers": 0}
        self._before_ms: int | None = None
        # No key is in the index of times under an earlier time, and none at all if it is None.
        self._earliest_ms: int | None = None
        if snapshot is not None:
            self._earliest_ms = snapshot["earliest_ms"]
            self._counters.update(snapshot["counters"])
            self._before_ms = snapshot["at_ms"]

    @property
    def names(self) -> frozenset[str]:
        """The state variables of the shard: as its version has them, and after the batch, as it leaves them."""
        return self._variables.names

    def advance(self, at_us: int | None) -> Iterator[Any]:
        """Makes this the shard that the processor's handle is about. The time is that of ``times``."""
        self._handle.begin_shard(self._variables)
        return iter(())

    def dropped(self, rows: int) -> None:
        """Counts rows that came too late."""
        self._counters["dropped"] += rows

    def initial(self, groups: Iterable[Group]) -> None:
        """Hands the initial state of keys to the processor."""
        for group, record in self._each(groups):
            for rows in group.rows:
                self._handle.enter(record)
                self._processor.handleInitialState(group.values, rows, self._times)

    def arrive(self, rows: Iterable[Group]) -> Iterator[Any]:
        """Yields what the processor returns for the rows of keys."""
        for group, record in self._each(rows):
            self._handle.enter(record)
            self._counters["events"] += group.events
            yield from self._processor.handleInputRows(group.values, group.rows, self._times)

    def end_batch(self) -> Iterator[Any]:
        """Yields what the processor returns for timers that have expired. Also removes state that has expired."""
        if self._due_ms is None:
            return
        due_ms, earliest_ms = self._due_ms, self._earliest_ms
        if earliest_ms is None or earliest_ms > due_ms:
            return
        # Not from the beginning: entries that were deleted cost time until their runs are merged.
        entries = self._store.scan(*wakes(earliest_ms, due_ms))
        self._earliest_ms = None
        # The processor may set timers that are due already. They expire in the next batch, whether or not the scan sees
        # their entries, which depends on how much memory there is.
        again: set[bytes] = set()
        keys = (key for entry, _ in entries if (key := wake_of(entry)[1]) not in again)
        while chunk := list(islice(keys, CHUNK_KEYS)):
            records = self._records(chunk)
            due = sorted(
                (time_ms, at) for at, record in enumerate(records) for time_ms in record.timers if time_ms <= due_ms
            )
            for time_ms, at in due:
                self._handle.enter(records[at])
                yield from self._processor.handleExpiredTimer(
                    key=self._keys.to_row(chunk[at]),
                    timerValues=self._times,
                    expiredTimerInfo=ExpiredTimerInfo(time_ms),
                )
                records[at].remove_timer(time_ms)
                self._counters["fired_timers"] += 1
            for record in records:
                if record.expires is not None and record.expires <= self._handle.now_ms:
                    record.expire(self._handle.now_ms, self._handle.variables)
            self._write(records)
            again.update(record.key for record in records if record.wake is not None and record.wake <= due_ms)
        later = [wake_of(entry)[0] for entry, _ in islice(self._store.scan(*wakes(due_ms + 1)), 1)]
        self._saw(later)

    def restore(self, states: Mapping[bytes, Restored], declared: Sequence[Declaration]) -> None:
        """Puts state from elsewhere into the shard, which has no keys yet."""
        remaining = iter(states.items())
        while chunk := list(islice(remaining, CHUNK_KEYS)):
            records = self._records([key for key, _ in chunk])
            for record, (_, state) in zip(records, chunk, strict=True):
                restore(record, self._handle.variables, declared, state)
            self._write(records)

    @property
    def due_ms(self) -> int | None:
        """A time before which no timer expires, and no state does, or None if there are neither."""
        if self._due_ms is None:
            return None
        expires = any(variable.ttl_ms is not None for variable in self._handle.variables)
        return self._earliest_ms if expires or self._counters["timers"] else None

    def save(self) -> Saved:
        at_ms, before_ms = self._due_ms, self._before_ms
        snapshot = {
            "version": VERSION,
            "next_seq": 0,
            "counters": self._counters,
            "stateful": self._variables.to_json(),
            "at_ms": at_ms,
            "earliest_ms": self._earliest_ms,
        }
        if at_ms is not None and before_ms is not None:
            # The store keeps in memory what is needed until then, if time goes on as it did.
            snapshot["expected_ms"] = max(0, at_ms, 2 * at_ms - before_ms)
        return Saved(snapshot)

    def _each(self, groups: Iterable[Group]) -> Iterator[tuple[Group, KeyRecord]]:
        remaining, ahead = iter(groups), None
        if self._store.on_disk:
            # On disk, neighbours are in one block. In the order of keys, they are read together.
            ordered = sorted(remaining, key=attrgetter("key"), reverse=self._backwards)
            remaining = iter(ordered)
            if self._reads_ahead:
                ahead = self._store.stream([record_key(group.key) for group in ordered])
        while chunk := list(islice(remaining, CHUNK_KEYS)):
            found = (
                self._store.get([record_key(group.key) for group in chunk])
                if ahead is None
                else islice(ahead, len(chunk))
            )
            records = []
            for group, data in zip(chunk, found, strict=True):
                records.append(self._record(group.key, data))
                yield group, records[-1]
            self._write(records)

    def _saw(self, wakes_ms: Iterable[int]) -> None:
        """The index of times has keys under these times."""
        found = min(wakes_ms, default=None)
        if found is not None and (self._earliest_ms is None or found < self._earliest_ms):
            self._earliest_ms = found

    def _records(self, keys: Sequence[bytes]) -> list[KeyRecord]:
        found = self._store.get([record_key(key) for key in keys])
        return list(map(self._record, keys, found))

    def _record(self, key: bytes, data: bytes | None) -> KeyRecord:
        record = KeyRecord(key, data, self._store)
        self._counters["timers"] -= len(record.timers)
        return record

    def _write(self, records: Sequence[KeyRecord]) -> None:
        self._handle.leave()
        known, scanned_ms = self._variables.numbers, MIN_MS if self._due_ms is None else self._due_ms
        changes = []
        for record in records:
            values, grown = record.changes(known, scanned_ms)
            changes += values
            for number in record.forgotten:
                changes += [MapValue(page, None) for page, _ in self._store.scan(*pages_of(record.key, number))]
            self._counters["keys"] += grown
        self._saw(record.wake for record in records if record.wake is not None)
        self._counters["timers"] += sum(len(record.timers) for record in records)
        if changes:
            self._store.put(changes)
