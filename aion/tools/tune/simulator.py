"""A trace replayed: the real operator and the real store under a policy, over a simulated disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import median

import numpy as np

from aion.config import Policy
from aion.core.compaction.blocks import Compact, CompactionDone
from aion.core.ingest.block import Compacted
from aion.core.ingest.key_ranges import MOST_KEYS, TOP, Keys, equal_ranges
from aion.core.operator.actions import (
    Action,
    Append,
    Arrived,
    BatchEnded,
    BlockFact,
    Destage,
    Execute,
    Prestage,
    Purge,
    WatermarkAdvanced,
)
from aion.core.operator.keyed.orders import Order
from aion.core.plan import Plan
from aion.errors import ConfigError
from aion.execute.assembly import make_operator, predicts, store_config
from aion.execute.block_compactor import MOST_BYTES
from aion.execute.trace import Batch, Cost, Int64s, Trace
from aion.tools.tune.disk import Machine, SimulatedDisk
from aion.tools.tune.files import ShardDisk, SimulatedFiles, sized
from policies.sizing import Execution, processing_bytes_per_s
from state_backends.files.names import SstFile
from state_backends.store.backends import StoreConfig
from state_backends.store.io import Priority
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.p_bucket import cache_bytes
from state_backends.store.pressure import PressureManager
from state_backends.store.protocol import Only, StagingStats, StoredBlock
from state_backends.store.tiered import TieredStore
from state_backends.versions.manifest import FileEntry, Identity, Manifest
from state_backends.versions.retention import Retention

_NO_END = 1 << 62
_NOBODY = Identity("", "", 0, 1, {})

Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy would have cost. ``memory_bytes``: the most that blocks took at once.

    ``blocked_s``: that executions and appends waited for the disk. ``staleness``: of windows that got late events, the
    mean of each one's largest, among those that are gone; ``stalest`` the largest. ``coverage``: of late events, the
    share that was not dropped.
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

    @property
    def all_executions(self) -> int:
        return sum(self.executions.values())


def simulate(
    trace: Trace, policy: Policy, machine: Machine, *, machine_share: float = 0.0, paced: bool = True
) -> Outcome:
    """Replays all of it; the same for the same arguments, and no Spark, thread or file.

    ``machine_share``: of the machine's memory in use, by whomever. ``paced``: batches begin when they did, or when the
    one before is over; otherwise at once. Raises ConfigError for a store that is no tiered one.
    """
    if policy.state.backend != "tiered":
        raise ConfigError(f"state.backend: {policy.state.backend} has nothing to tune; a replay is of tiered")
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
    """With the speeds of the machine on which the trace was recorded, as far as it has them."""
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
    """What shards share."""

    def __init__(self, trace: Trace, policy: Policy, machine: Machine, machine_share: float) -> None:
        config = store_config(policy, windows=trace.definition.windows.values(), blocking=trace.definition.blocking)
        self.disk = SimulatedDisk(config.rate_limit_bytes_per_s)
        self.machine = machine
        if config.budget_bytes is None:
            raise ConfigError("memory.budget: a share is of a host that is not known here; give bytes")
        self.budget = MemoryBudget(config.budget_bytes)
        self.budget.reserve(cache_bytes(self.budget.limit_bytes))
        self._pressure = PressureManager(
            self.budget, config.make_destage(), lambda: machine_share, clock=lambda: self.disk.now_s
        )
        plan = trace.definition.plan()
        self.compaction_ratio = _compaction_ratio(trace.compactions)
        self.compaction = trace.compaction or Cost(0.0, machine.processing_bytes_per_s)
        self.staging_times = trace.staging.times if trace.staging is not None else (1.0,)
        self.processing_times = trace.processing.times if trace.processing is not None else (1.0,)
        self.shards = {
            shard: _Shard(self, plan, policy, config, commits=trace.definition.commits) for shard in trace.shards
        }
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
        late, dropped = sum(c.late_events for c in counters), sum(c.dropped for c in counters)
        kinds = ("on_time", "late", "final")
        moved = self.disk.bytes
        staging = StagingStats()
        for shard in self.shards.values():
            staging.add(shard.store.stats().staging)
        return Outcome(
            memory_bytes=self.budget.peak_bytes,
            blocked_s=self.disk.waited_s,
            staleness=sum(k.total for k in kept) / windows if windows else 0.0,
            stalest=max((k.largest for k in kept), default=0.0),
            executions={kind: sum(c.executions[kind] for c in counters) for kind in kinds},
            written_bytes=moved[Priority.WRITE] + moved[Priority.LATE_WRITE] + moved[Priority.DESTAGE],
            read_bytes=moved[Priority.READ] + moved[Priority.PRESTAGE],
            hits=staging.hits,
            late=staging.late,
            misses=staging.misses,
            coverage=1.0 - dropped / late if late else 1.0,
            dropped=dropped,
        )


class _Versions:
    """The versions of one shard, each of which keeps its files: how much merging may write hangs on that."""

    def __init__(self, retain: int) -> None:
        self._retention = Retention(retain + 1)
        self._held: Manifest | None = None
        self._known: dict[int, SstFile] = {}
        self._number = 0

    def commit(self, store: TieredStore, purge: Sequence[int]) -> None:
        """As :meth:`state_backends.versions.shard.Shard.commit`; waits until all is on disk."""
        self._known |= {file.file_no: file for file in store.persist(skip=purge)}
        store.purge(purge)
        store.drop_replaced()
        self._known = {no: self._known[no] for no in store.files()}
        files = tuple(FileEntry(no, f.path, f.size_bytes, 0, 0, f.blocks) for no, f in self._known.items())
        self._number += 1
        past = self._retention.following(self._held, files)
        self._held = Manifest(f"{self._number:010d}", None, self._number, _NOBODY, files, (), 0, {})
        self._retention.committed(self._held, past, self._number)
        held_bytes, disk_bytes = self._retention.held_bytes, self._retention.disk_bytes
        store.compact(self._known, held_bytes=held_bytes, disk_bytes=disk_bytes)


class _Shard:
    """An operator and its store, as the executor has them work (aion.execute.executor), sizes in the place of rows."""

    def __init__(self, host: _Host, plan: Plan, policy: Policy, config: StoreConfig, *, commits: bool) -> None:
        self.operator = make_operator(plan, policy, None)
        self._disk = ShardDisk(host.disk, host.machine, host.staging_times)
        self.store = config.make_store(SimulatedFiles(host.machine, host.disk), self._disk, host.budget)
        self._host, self._plan = host, plan
        self._versions = _Versions(config.retain_versions) if commits else None
        self._times = cycle(host.processing_times)
        self._compactions = (plan.layout is not None or bool(plan.key)) and not plan.by_event
        self._piece_bytes = min(policy.blocks.target_bytes, MOST_BYTES)
        self._predicts = predicts(policy)
        self._rows: dict[int, int] = {}  # of each block that came, by its number
        self._executed: list[Execution] = []
        self._purge: list[int] = []

    def run(self, batch: Batch, *, paced: bool) -> None:
        at_us = batch.watermark_us
        if at_us is not None and at_us != self.operator.watermark.at_us:
            self._carry_out(self.operator.handle(WatermarkAdvanced(at_us)))
        start = 0
        for count, before_s in batch.handed:
            if paced:
                self._pass(before_s)
            blocks = batch.blocks[start : start + count]
            arrived = Arrived(blocks, (), batch.facts(start, count))
            self._carry_out(self.operator.handle(arrived), blocks, batch.rows[start : start + count])
            start += count
        self._carry_out(self.operator.handle(BatchEnded(batch.last)))
        self._end_batch()

    def _pass(self, seconds: float) -> None:
        self._host.disk.pass_to(self._host.disk.now_s + seconds)

    def _end_batch(self) -> None:
        """What follows a batch on Spark, and a call without it."""
        if self._executed:
            self.store.processing_bytes_per_s = processing_bytes_per_s(self._executed)
            self._host.seconds += [execution.seconds for execution in self._executed]
            self._executed.clear()
        if self._versions is not None:
            self._versions.commit(self.store, self._purge)
            self._purge = []
        else:
            self.store.flush()
            self.store.compact()
        expected = self.operator.watermark.expected_next()
        plan = self.operator.plan(expected) if self._predicts and expected is not None else None
        if plan is not None:
            self._prestage(plan.slices)
        self._host.tick()

    def _carry_out(
        self, actions: Sequence[Action | Order], blocks: Sequence[BlockFact] = (), rows: Sequence[int] | Int64s = ()
    ) -> None:
        appends = [a for a in actions if isinstance(a, Append)]
        for append in appends:
            size = blocks[append.index].size_bytes
            if self._compactions:
                self._rows[append.seq] = int(rows[append.index])
            self.store.append(append.seq, sized(append.slice_us, size), late=append.late)
        for action in actions:
            if isinstance(action, Prestage):
                self._prestage(action.slices, self._announced(action, appends))
        for order in actions:
            if isinstance(order, Execute):
                for some in self._at_once(order):
                    self._execute(some)
        self._compact([a for a in actions if isinstance(a, Compact)])
        self.store.destage([s for a in actions if isinstance(a, Destage) for s in a.slices])
        purge = [s for a in actions if isinstance(a, Purge) for s in a.slices]
        if self._versions is not None:
            self._purge += purge  # when the version is made
        else:
            self.store.purge(purge)

    def _prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        # To see what is to be staged takes longer than it takes an idle I/O thread to begin with what is queued.
        self._pass(0.0)
        self._disk.prestage_begins()
        self.store.prestage(slices, only)

    def _read(
        self, slices: Sequence[int], bytes_per_s: float, *, blocking: bool = False, only: Only | None = None
    ) -> tuple[list[StoredBlock], int, float]:
        """What an execution reads, which works on each block for a while; its bytes, and seconds of waiting."""
        found, size, waited_s = [], 0, 0.0
        asked_s = self._host.disk.now_s
        for stored in self.store.read(slices, blocking=blocking, only=only):
            waited_s += self._host.disk.now_s - asked_s
            found.append(stored)
            size_bytes = stored.block.size_bytes
            size += size_bytes
            self._pass(size_bytes / bytes_per_s)
            asked_s = self._host.disk.now_s
        return found, size, waited_s

    def _at_once(self, order: Execute) -> Iterator[Execute]:
        """Windows that are computed together, as the executor has it."""
        if self._plan.layout is not None:
            before = order.changed_since >= 0
            yield from (order.some(among) for among in (~before, before) if among.any())
            return
        for i, (start, end) in enumerate(zip(order.start_us.tolist(), order.end_us.tolist(), strict=True)):
            yield order.some(slice(i, i + 1), tuple(s for s in order.slices if start <= s < end))

    def _execute(self, order: Execute) -> None:
        machine = self._host.machine
        begin = self._host.disk.now_s
        ends = self._plan.grid.ends(np.array(order.slices, np.int64)).tolist()
        slices = [
            s for s, end in zip(order.slices, ends, strict=True) if ((order.start_us < end) & (order.end_us > s)).any()
        ]
        keys: Ranges | None = None
        size, waited_s = 0, 0.0
        if self._compactions and self._plan.key and bool((order.changed_since >= 0).all()):
            since: dict[int, tuple[int, int]] = {}
            for s, end in zip(order.slices, ends, strict=True):
                of = order.changed_since[(order.start_us < end) & (order.end_us > s)]
                since |= {s: (int(of.min()), _NO_END)} if len(of) else {}
            only = Only(since)
            news, size, waited_s = self._read(slices, machine.processing_bytes_per_s, only=only)
            keys = self._keys(sorted({stored.arrival for stored in news}))
        blocking = self._plan.blocking
        _, rest, waiting_s = self._read(slices, machine.processing_bytes_per_s, blocking=blocking, only=Only(keys=keys))
        size += rest
        # What an execution of so many bytes takes beyond working on each block.
        least = size / machine.processing_bytes_per_s
        self._pass(max(0.0, next(self._times) * (least + machine.execution_s) - least))
        self._executed.append(Execution(size, self._host.disk.now_s - begin, waited_s + waiting_s))

    def _announced(self, action: Prestage, appends: Sequence[Append]) -> Only | None:
        if not self._compactions or not self._plan.key:
            return None
        wanted = frozenset(action.slices)
        return Only(keys=self._keys([a.seq for a in appends if a.slice_us in wanted]))

    def _keys(self, seqs: Sequence[int]) -> Ranges | None:
        """Where the keys of these blocks lie among all: anywhere, but for a block always the same places."""
        rows = [(seq, self._rows.get(seq, MOST_KEYS + 1)) for seq in seqs]
        if sum(n for _, n in rows) > MOST_KEYS:
            return None
        hashes = [np.random.default_rng(seq).integers(0, TOP, n, endpoint=True) for seq, n in rows]
        return Keys(np.concatenate(hashes) if hashes else np.zeros(0, np.int64)).ranges

    def _compact(self, compactions: Sequence[Compact]) -> None:
        waiting = list(compactions)
        while waiting:
            compaction = waiting.pop(0)
            spans = {compaction.slice_us: (compaction.after, compaction.until)}
            below = self.operator.next_seq
            old, _, _ = self._read(
                [compaction.slice_us], self._host.compaction.bytes_per_s, only=Only(spans, below=below)
            )
            self._pass(self._host.compaction.fixed_s)
            made = max(1, round(compaction.size_bytes * self._host.compaction_ratio(compaction.size_bytes)))
            pieces = max(1, round(made / self._piece_bytes))
            first = self.operator.number(pieces)
            for i, (low, high) in enumerate(equal_ranges(pieces)):
                size = made * (i + 1) // pieces - made * i // pieces
                block = sized(compaction.slice_us, size, Compacted(compaction.until, low, high))
                self.store.append(first + i, block, late=compaction.late)
            self.store.replace(spans, below)
            if self._versions is None:
                self.store.drop_replaced()
            rows = [self._rows.pop(stored.seq, 0) for stored in old]
            self._rows[compaction.until] = sum(rows)
            actions = self.operator.handle(CompactionDone(compaction, made))
            waiting += [a for a in actions if isinstance(a, Compact)]


def _compaction_ratio(compactions: Sequence[tuple[int, int]]) -> Callable[[int], float]:
    """What is left of bytes that are compacted, as recorded for those of about that size: within a factor of two."""
    by_class: dict[int, list[float]] = {}
    for size, made in compactions:
        by_class.setdefault(size.bit_length(), []).append(made / size)
    ratios = {size_class: median(found) for size_class, found in by_class.items()}

    def ratio(size: int) -> float:
        if not ratios:
            return 1.0
        return ratios[min(ratios, key=lambda c: (abs(c - size.bit_length()), c))]

    return ratio
