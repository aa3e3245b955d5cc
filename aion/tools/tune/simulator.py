"""Replays a trace under a policy: the real operator, executor and store over a simulated disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import pyarrow as pa

from aion.config import Policy
from aion.core.life.lifecycle import EXECUTED
from aion.errors import ConfigError
from aion.execute.assembly import store_config
from aion.execute.panes.block_compactor import compaction_bytes
from aion.execute.record.trace import Batch, Cost, Trace
from aion.execute.windows import Windows
from aion.tools.tune.disk import Machine, SimulatedDisk
from aion.tools.tune.files import ShardDisk, SimulatedFiles, sized
from aion.tools.tune.sizes import SizesOnly, compaction_ratio
from policies.sizing import processing_bytes_per_s
from state_backends.backends import StoreConfig
from state_backends.files.names import SstFile
from state_backends.format.block import Block, Compression
from state_backends.store.attempt import StoreAttempt
from state_backends.store.io import Priority
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.p_bucket import cache_bytes
from state_backends.store.pressure import PressureManager
from state_backends.store.protocol import Only, StagingStats
from state_backends.store.tiered import TieredStore
from state_backends.versions.manifest import FileEntry, Identity, Manifest
from state_backends.versions.retention import Retention

_NOBODY = Identity("", "", 0, 1, {})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy would have cost.

    ``memory_bytes``: the most memory that blocks took at once. ``blocked_s``: how long executions and appends waited
    for the disk. ``staleness``: each purged window that got late events has a largest staleness; this is the mean of
    those, and ``stalest`` is their maximum. ``coverage``: the share of late events that was not dropped. ``dropped``:
    events that came too late; those without an event time are not among them. ``execution_s``: how long all executions
    took together, with their waiting.
    """

    memory_bytes: int
    blocked_s: float
    staleness: float
    stalest: float
    executions: dict[str, int]
    written_bytes: int
    read_bytes: int
    hits: int
    late: int
    misses: int
    coverage: float
    dropped: int
    execution_s: float = 0.0

    @property
    def all_executions(self) -> int:
        return sum(self.executions.values())


def simulate(
    trace: Trace, policy: Policy, machine: Machine, *, machine_share: float = 0.0, paced: bool = True
) -> Outcome:
    """Replays the whole trace, without Spark, threads or files. The same arguments give the same outcome.

    ``machine_share``: how much of the machine's memory is in use, 0 to 1. ``paced``: a batch begins when it did, or
    when the one before is over; otherwise at once. Raises ConfigError unless the store is tiered.
    """
    if policy.state.backend != "tiered":
        raise ConfigError(f"state.backend: {policy.state.backend} has nothing to tune; set it to tiered")
    machine = as_recorded(machine, trace)
    host = _Host(trace, policy, machine, machine_share)
    begin_us = min((batch.at_us for batch in trace.batches), default=0)
    groups: dict[int, list[Batch]] = {}
    for batch in trace.batches:
        groups.setdefault(batch.number, []).append(batch)
    for group in groups.values():
        if paced:
            host.disk.pass_to(max(host.disk.now_s, (min(b.at_us for b in group) - begin_us) / 1e6))
        for batch in group:
            host.shards[batch.shard].run(batch, paced=paced)
    host.disk.finish()
    return host.outcome()


def as_recorded(machine: Machine, trace: Trace) -> Machine:
    """Returns the machine with the speeds that the trace recorded, where it has them."""
    if trace.processing is not None:
        fixed_s, bytes_per_s, _ = trace.processing
        machine = replace(machine, processing_bytes_per_s=bytes_per_s, execution_s=fixed_s)
    if trace.staging is not None:
        fixed_s, bytes_per_s, _ = trace.staging
        machine = replace(machine, read_bytes_per_s=bytes_per_s, read_block_s=0.0, staging_s=fixed_s)
    if trace.writing is not None:
        fixed_s, bytes_per_s, _ = trace.writing
        machine = replace(machine, write_bytes_per_s=bytes_per_s, write_file_s=fixed_s)
    return machine


class _Host:
    """The parts that shards share."""

    def __init__(self, trace: Trace, policy: Policy, machine: Machine, machine_share: float) -> None:
        config = store_config(policy, windows=trace.definition.windows.values(), blocking=trace.definition.blocking)
        self.disk = SimulatedDisk(config.rate_limit_bytes_per_s)
        self.machine = machine
        if config.budget_bytes is None:
            raise ConfigError("memory.budget: a share needs a host, and a replay has none; give bytes")
        self.budget = MemoryBudget(config.budget_bytes)
        self.budget.reserve(cache_bytes(self.budget.limit_bytes))
        self._pressure = PressureManager(
            self.budget, config.make_destage(), lambda: machine_share, clock=lambda: self.disk.now_s
        )
        self.plan = trace.definition.plan()
        self._untimed = trace.untimed
        self.compaction_ratio = compaction_ratio(trace.compactions)
        self.staging_times = trace.staging.times if trace.staging is not None else (1.0,)
        self.processing_times = trace.processing.times if trace.processing is not None else (1.0,)
        self.shards = {shard: _Shard(self, trace, policy, config) for shard in trace.shards}
        self.seconds: list[float] = []

    def tick(self) -> None:
        self._pressure.tick(
            [(number, shard.store) for number, shard in self.shards.items()],
            median(self.seconds) if self.seconds else None,
        )

    def outcome(self) -> Outcome:
        counters = [shard.operator.counters for shard in self.shards.values()]
        kept = [c.staleness for c in counters]
        windows = sum(k.windows for k in kept)
        late, dropped = sum(c.late_events for c in counters), sum(c.dropped for c in counters) - self._untimed
        moved = self.disk.bytes
        staging = StagingStats()
        for shard in self.shards.values():
            staging.add(shard.store.stats().staging)
        return Outcome(
            memory_bytes=self.budget.peak_bytes,
            blocked_s=self.disk.waited_s,
            staleness=sum(k.total for k in kept) / windows if windows else 0.0,
            stalest=max((k.largest for k in kept), default=0.0),
            executions={kind: sum(c.executions[kind] for c in counters) for kind in EXECUTED},
            written_bytes=moved[Priority.WRITE] + moved[Priority.LATE_WRITE] + moved[Priority.DESTAGE],
            read_bytes=moved[Priority.READ] + moved[Priority.PRESTAGE],
            hits=staging.hits,
            late=staging.late,
            misses=staging.misses,
            coverage=1.0 - dropped / late if late else 1.0,
            dropped=dropped,
            execution_s=sum(self.seconds),
        )


class _Versions:
    """The versions of one shard. Each keeps its files, and how much merging may write depends on that."""

    def __init__(self, retain: int) -> None:
        self._retention = Retention(retain + 1)
        self._held: Manifest | None = None
        self._known: dict[int, SstFile] = {}
        self._number = 0

    def commit(self, attempt: StoreAttempt) -> None:
        """Does the same to the store as :meth:`state_backends.versions.shard.Shard.commit`."""
        store = attempt.store
        self._known |= {file.file_no: file for file in store.persist(skip=attempt.purging)}
        attempt.end()
        self._known = {no: self._known[no] for no in store.files()}
        files = tuple(FileEntry(no, f.path, f.size_bytes, 0, 0, f.blocks) for no, f in self._known.items())
        self._number += 1
        past = self._retention.following(self._held, files)
        self._held = Manifest(f"{self._number:010d}", None, self._number, _NOBODY, files, 0, {})
        self._retention.committed(self._held, past, self._number)
        held_bytes, disk_bytes = self._retention.held_bytes, self._retention.disk_bytes
        store.compact(self._known, held_bytes=held_bytes, disk_bytes=disk_bytes)


class _Attempt(StoreAttempt):
    """An attempt whose prestages begin on the simulated disk."""

    def __init__(self, store: TieredStore, disk: ShardDisk, host: SimulatedDisk) -> None:
        super().__init__(store)
        self._disk, self._host = disk, host
        self.dealing_s = 0.0
        """How long the work on the next block takes."""

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        for block in blocks:
            # The I/O thread writes the blocks before this one meanwhile.
            self._host.pass_to(self._host.now() + self.dealing_s)
            super().append([block])

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        # An idle I/O thread begins with what is queued before anybody has found out what to stage.
        self._host.pass_to(self._host.now())
        self._disk.prestage_begins()
        super().prestage(slices, only)


class _Shard:
    """The real executor with the real operator, over blocks without rows and a store on a simulated disk."""

    def __init__(self, host: _Host, trace: Trace, policy: Policy, config: StoreConfig) -> None:
        disk, plan = ShardDisk(host.disk, host.machine, host.staging_times), host.plan
        self.store = config.make_blocks(SimulatedFiles(host.machine, host.disk), disk, host.budget)
        self._attempt = _Attempt(self.store, disk, host.disk)
        self._contents = SizesOnly(
            plan,
            host.disk,
            Cost(host.machine.execution_s, host.machine.processing_bytes_per_s, host.processing_times),
            trace.compaction or Cost(0.0, host.machine.processing_bytes_per_s),
            host.compaction_ratio,
            target_bytes=policy.blocks.target_bytes,
            compaction_bytes=compaction_bytes(policy.apply.memory_bytes, Compression[policy.state.compression.upper()]),
        )
        self._windows = Windows(plan, policy, self._attempt, None, self._contents)
        self.operator = self._windows.operator
        self._host = host
        self._versions = _Versions(config.retain_versions) if trace.definition.commits else None

    def run(self, batch: Batch, *, paced: bool) -> None:
        self._attempt.begin(self.operator.next_seq)
        for rows in self._rows(batch, paced):
            raise AssertionError(f"a replay computes no rows, and got {rows.num_rows}")
        self._end_batch()

    def _rows(self, batch: Batch, paced: bool) -> Iterator[pa.RecordBatch]:
        if batch.watermark_us is not None:
            yield from self._windows.advance(batch.watermark_us)
        start = 0
        for handed in batch.handed:
            if paced:
                self._host.disk.pass_to(self._host.disk.now_s + handed.after_s)
                self._attempt.dealing_s = handed.dealt_s / handed.blocks
            self._contents.facts = batch.facts(start, handed.blocks)
            end = start + handed.blocks
            yield from self._windows.arrive(
                [
                    sized(fact.slice_us, fact.size_bytes, events=fact.events, rows=rows)
                    for fact, rows in zip(batch.blocks[start:end], batch.rows[start:end].tolist(), strict=True)
                ]
            )
            start = end
        yield from self._windows.end_batch(ends_run=batch.ends_run, batch_follows=not batch.ends_run)

    def _end_batch(self) -> None:
        """Does what follows a batch on Spark, and a call of LocalOperator."""
        if executed := self._windows.take_executions():
            self.store.processing_bytes_per_s = processing_bytes_per_s(executed)
            self._host.seconds += [execution.seconds for execution in executed]
        if self._versions is not None:
            self._versions.commit(self._attempt)
        else:
            self._attempt.end()
            self.store.flush()
            self.store.compact()
        due = self._windows.plan_next()
        self.store.plan(due)
        if due:
            self._attempt.prestage(due)
        self._host.tick()
