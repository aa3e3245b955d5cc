"""A trace replayed: the real operator under a policy, over a model of the tiers and of the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from aion.actions import (
    Action,
    Append,
    Arrived,
    BatchEnded,
    BlockFact,
    Destage,
    Execute,
    Fold,
    Folded,
    Prestage,
    Purge,
    WatermarkAdvanced,
)
from aion.block_folder import MOST_BYTES
from aion.config import Policy
from aion.errors import ConfigError
from aion.key_ranges import MOST_KEYS
from aion.keyed.orders import Order
from aion.plan import Plan
from aion.runtime import make_operator, predicts, store_config
from aion.tuning.disk import Cost, Machine, Priority, SimulatedDisk
from aion.tuning.tiers import Floats, Staged, Tiers
from aion.tuning.trace import Batch, Int64s, Trace
from state_backends.m_bucket import MemoryBudget
from state_backends.p_bucket import cache_bytes
from state_backends.pressure import PressureManager

_NO_END = 1 << 62


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
    for shard in host.shards.values():
        shard.end()
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
        config = store_config(policy, blocking=trace.definition.blocking)
        self.disk = SimulatedDisk(config.rate_limit_bytes_per_s)
        if config.budget_bytes is None:
            raise ConfigError("memory.budget: a share is of a host that is not known here; give bytes")
        self.budget = MemoryBudget(config.budget_bytes)
        self.budget.reserve(cache_bytes(self.budget.limit_bytes))
        self.stats = Staged()
        self._pressure = PressureManager(
            self.budget, config.make_destage(), lambda: machine_share, clock=lambda: self.disk.now_s
        )
        plan = trace.definition.plan()
        self.fold_ratio = _fold_ratio(trace.folds)
        self.folding = trace.folding or Cost(0.0, machine.processing_bytes_per_s)
        self.shards = {
            shard: _Shard(
                self,
                plan,
                policy,
                Tiers(
                    self.disk,
                    machine,
                    self.budget,
                    self.stats,
                    bucket_limit_bytes=min(config.bucket_limit_bytes, self.budget.limit_bytes),
                    keep_fraction=config.keep_fraction,
                    prestages=config.prestages,
                    blocking=config.blocking,
                    staging_times=trace.staging.times if trace.staging is not None else (1.0,),
                    processing_times=trace.processing.times if trace.processing is not None else (1.0,),
                ),
                commits=trace.definition.commits,
            )
            for shard in trace.shards
        }
        self.seconds: list[float] = []

    def tick(self) -> None:
        self._pressure.tick(
            [(number, shard.tiers) for number, shard in self.shards.items()],
            median(self.seconds) if self.seconds else None,
        )

    def outcome(self) -> Outcome:
        counters = [shard.operator.counters for shard in self.shards.values()]
        kept = [c.staleness for c in counters]
        windows = sum(k.windows for k in kept)
        late, dropped = sum(c.late_events for c in counters), sum(c.dropped for c in counters)
        kinds = ("on_time", "late", "final")
        moved = self.disk.bytes
        return Outcome(
            memory_bytes=self.budget.peak_bytes,
            blocked_s=self.stats.blocked_s,
            staleness=sum(k.total for k in kept) / windows if windows else 0.0,
            stalest=max((k.largest for k in kept), default=0.0),
            executions={kind: sum(c.executions[kind] for c in counters) for kind in kinds},
            written_bytes=moved[Priority.LATE_WRITE] + moved[Priority.DESTAGE],
            read_bytes=moved[Priority.READ] + moved[Priority.PRESTAGE],
            hits=self.stats.hits,
            late=self.stats.late,
            misses=self.stats.misses,
            coverage=1.0 - dropped / late if late else 1.0,
            dropped=dropped,
        )


class _Shard:
    """An operator and its blocks, as the executor has them carried out (aion.executor), sizes in the place of rows."""

    def __init__(self, host: _Host, plan: Plan, policy: Policy, tiers: Tiers, *, commits: bool) -> None:
        self.operator = make_operator(plan, policy, None)
        self.tiers = tiers
        self._host, self._plan, self._commits = host, plan, commits
        self._folds = (plan.layout is not None or bool(plan.key)) and not plan.by_event
        self._piece_bytes = min(policy.blocks.target_bytes, MOST_BYTES)
        self._predicts = predicts(policy)
        self._rows: dict[int, int] = {}  # of each block that came, by its number
        self._read: list[tuple[int, float]] = []
        self._destage: list[int] = []
        self._purge: list[int] = []
        self._open = False

    def run(self, batch: Batch, *, paced: bool) -> None:
        self.end()
        at_us = batch.watermark_us
        if at_us is not None and at_us != self.operator.watermark.at_us:
            self._carry_out(self.operator.handle(WatermarkAdvanced(at_us)))
            if not self._commits:
                self._end_call()
        start = 0
        for count, before_s in batch.handed:
            if paced:
                self._host.disk.pass_to(self._host.disk.now_s + before_s)
            blocks = batch.blocks[start : start + count]
            self._carry_out(self.operator.handle(Arrived(blocks)), blocks, batch.rows[start : start + count])
            start += count
        if start and not self._commits:
            self._end_call()
        if self._commits or batch.last:
            self._carry_out(self.operator.handle(BatchEnded(batch.last)))
            self._end_call()
        else:
            # Without Spark nobody says that a batch is over, but the next call.
            self._open = True

    def end(self) -> None:
        """The end of the batch before, if it was left open."""
        if self._open:
            self._open = False
            self._carry_out(self.operator.handle(BatchEnded()))

    def _end_call(self) -> None:
        """What follows a batch on Spark, and a call without it."""
        if self._read:
            size, seconds = (sum(column) for column in zip(*self._read, strict=True))
            self.tiers.processing_bytes_per_s = size / max(seconds, 1e-6)
            self._host.seconds += [took for _, took in self._read]
            self._read.clear()
        if self._commits:
            self.tiers.persist()
            self.tiers.destage(self._destage)
            self.tiers.purge(self._purge)
            self._destage, self._purge = [], []
        self.tiers.flush()
        expected = self.operator.watermark.expected_next()
        plan = self.operator.plan(expected) if self._predicts and expected is not None else None
        if plan is not None:
            self.tiers.prestage(self.tiers.entries(plan.slices))
        self._host.tick()

    def _carry_out(
        self, actions: Sequence[Action | Order], blocks: Sequence[BlockFact] = (), rows: Sequence[int] | Int64s = ()
    ) -> None:
        appends = [a for a in actions if isinstance(a, Append)]
        for append in appends:
            size = blocks[append.index].size_bytes
            if self._folds:
                self._rows[append.seq] = int(rows[append.index])
            self.tiers.append(append.seq, append.slice_us, size, late=append.late, arrival=append.seq)
        for action in actions:
            if isinstance(action, Prestage):
                self.tiers.prestage(self.tiers.entries(action.slices, keys=self._announced(action, appends)))
        executes = [a for a in actions if isinstance(a, Execute)]
        if self._plan.layout is not None:
            for among in ([e for e in executes if e.changed_since < 0], [e for e in executes if e.changed_since >= 0]):
                if among:
                    self._execute(among)
        else:
            for execute in executes:
                self._execute([execute])
        self._fold([a for a in actions if isinstance(a, Fold)])
        self._release(
            [s for a in actions if isinstance(a, Destage) for s in a.slices],
            [s for a in actions if isinstance(a, Purge) for s in a.slices],
        )

    def _release(self, destage: list[int], purge: list[int]) -> None:
        if self._commits:
            self._destage += destage
            self._purge += purge
        else:
            self.tiers.destage(destage)
            self.tiers.purge(purge)

    def _execute(self, executes: Sequence[Execute]) -> None:
        begin = self._host.disk.now_s
        slices = sorted({s for e in executes for s in e.slices})
        keys: Floats | None = None
        size = 0
        if self._folds and self._plan.key and all(e.changed_since >= 0 for e in executes):
            since: dict[int, int] = {}
            for execute in executes:
                for s in execute.slices:
                    since[s] = min(execute.changed_since, since.get(s, execute.changed_since))
            news = self.tiers.entries(slices, spans={s: (seq, _NO_END) for s, seq in since.items()})
            size += self.tiers.read(news, blocking=False)
            keys = self._keys(sorted({entry.arrival for entry in news}))
        entries = self.tiers.entries(slices, keys=keys)
        size += self.tiers.read(entries, blocking=self._plan.blocking)
        if self._plan.layout is None:
            self.tiers.work(size)
            self._read.append((size, self._host.disk.now_s - begin))

    def _announced(self, action: Prestage, appends: Sequence[Append]) -> Floats | None:
        if not self._folds or not self._plan.key:
            return None
        wanted = frozenset(action.slices)
        return self._keys([a.seq for a in appends if a.slice_us in wanted])

    def _keys(self, seqs: Sequence[int]) -> Floats | None:
        """Where the keys of these blocks lie among all, 0 to 1: anywhere, but for a block always the same places."""
        rows = [(seq, self._rows.get(seq, MOST_KEYS + 1)) for seq in seqs]
        if sum(n for _, n in rows) > MOST_KEYS:
            return None
        places = [np.random.default_rng(seq).random(n) for seq, n in rows]
        return np.sort(np.concatenate(places)) if places else np.zeros(0)

    def _fold(self, folds: Sequence[Fold]) -> None:
        waiting = list(folds)
        while waiting:
            fold = waiting.pop(0)
            spans = {fold.slice_us: (fold.after, fold.until)}
            below = self.operator.next_seq
            entries = self.tiers.entries([fold.slice_us], spans=spans, below=below)
            self.tiers.read(entries, blocking=False, cost=self._host.folding)
            made = max(1, round(fold.size_bytes * self._host.fold_ratio(fold.size_bytes)))
            pieces = max(1, round(made / self._piece_bytes))
            first = self.operator.number(pieces)
            for i in range(pieces):
                size = made * (i + 1) // pieces - made * i // pieces
                part = (i / pieces, (i + 1) / pieces)
                self.tiers.append(first + i, fold.slice_us, size, late=fold.late, arrival=fold.until, keys=part)
            self.tiers.supersede(fold.slice_us, fold.after, fold.until, below)
            rows = [self._rows.pop(entry.seq, 0) for entry in entries]
            self._rows[fold.until] = sum(rows)
            actions = self.operator.handle(Folded(fold, made))
            waiting += [a for a in actions if isinstance(a, Fold)]


def _fold_ratio(folds: Sequence[tuple[int, int]]) -> Callable[[int], float]:
    """What is left of bytes that are folded, as recorded for those of about that size: within a factor of two."""
    by_class: dict[int, list[float]] = {}
    for size, made in folds:
        by_class.setdefault(size.bit_length(), []).append(made / size)
    ratios = {size_class: median(found) for size_class, found in by_class.items()}

    def ratio(size: int) -> float:
        if not ratios:
            return 1.0
        return ratios[min(ratios, key=lambda c: (abs(c - size.bit_length()), c))]

    return ratio
