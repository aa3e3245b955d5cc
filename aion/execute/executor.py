"""Carries out the operator's orders: reads blocks, computes windows, and tells the attempt what to do with blocks.

It also replaces blocks by fewer, as compaction orders (docs/inside/window-costs.md), and says of result rows how
complete they are (docs/inside/lateness.md).

LocalOperator, Spark's root and the replay of ``aion tune`` use the same executor. The attempt knows where blocks are
(:mod:`state_backends.store.attempt`), the contents what is in them (:mod:`aion.execute.panes.contents`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from secrets import token_bytes
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from aion.aggregates.values import Ints, combined
from aion.base.hashing import hash_rows
from aion.base.identity import SECRET_BYTES
from aion.base.numbers import LATEST_US, NEVER, within
from aion.core.compaction import BlockFact, Compact, CompactionDone
from aion.core.ingest.key_ranges import Keys, equal_ranges
from aion.core.keyed.orders import EmitDroppedRows, ExecuteKeyed, Order, Retract
from aion.core.life.actions import (
    Action,
    Append,
    Arrived,
    BatchEnded,
    Destage,
    EmitDropped,
    EmitUntimed,
    Execute,
    FillGaps,
    Forget,
    ForgetFilled,
    KeepFilled,
    PaneKind,
    Prestage,
    Purge,
    WatermarkAdvanced,
)
from aion.core.operator.completeness import PaneFacts, rate
from aion.core.operator.operator import Operator
from aion.core.operator.unique import Unique
from aion.core.query.columns import COMPLETENESS_COLUMNS, PANE_SEQ
from aion.core.query.plan import Plan
from aion.core.slicing.grid import start_of
from aion.execute.panes.applying import Seen
from aion.execute.panes.block_compactor import Owners
from aion.execute.panes.combining import windows_at_once
from aion.execute.panes.contents import Contents, RowContents
from aion.execute.panes.filling import Filler, Shown
from aion.execute.record.recorder import Recorder
from aion.execute.spill.waiting import WaitingOrders
from policies.sizing import Execution
from state_backends.format.block import Block, numbered
from state_backends.store.attempt import ShardAttempt
from state_backends.store.protocol import Only, StoredBlock

T = TypeVar("T")
_Release = Destage | Purge


class Executor:
    """One shard's operator at work. Every method yields rows of ``plan.result_schema``.

    ``contents``: by default the rows in the blocks, decoded in the caller's thread and never compacted. ``secret``: the
    key of the identities of events; by default a new one. ``forgotten``: the orders to forget windows, for a caller who
    keeps something for windows. ``over``: the numbers of definitions that have had no windows since the last batch.
    """

    def __init__(
        self,
        plan: Plan,
        operator: Operator,
        attempt: ShardAttempt,
        contents: Contents | None = None,
        secret: bytes | None = None,
        over: Sequence[int] = (),
    ) -> None:
        self.plan = plan
        self.operator = operator
        self.attempt = attempt
        self._contents: Contents = RowContents(plan) if contents is None else contents
        if operator.keyed:
            operator.keep_in(attempt)
        secret = token_bytes(SECRET_BYTES) if secret is None else secret
        self._unique = Unique(plan.unique, plan.time, secret) if plan.unique else None
        self._filler = Filler(plan, attempt, over) if plan.fills or over else None
        self.forgotten: list[Forget] = []
        self._purged = False  # in this batch
        self._seeks = self._contents.compacts and bool(plan.key)
        self._keyed = [self._contents.keyed(each, attempt, self._timed) for each in plan.plans]
        self._keyed_of = {
            number: keyed for keyed, each in zip(self._keyed, plan.plans, strict=True) for number in each.keyed
        }
        for windows in operator.keyed:
            operator.wait_in(windows.definition, self._keyed_of[windows.definition].waiting())
        # Encoded bytes and seconds of each execution so far. Sizing and idle destaging learn from them. Windows that
        # are computed together count as one.
        self.executions: list[Execution] = []
        # Notes the input without payload if the user asked for a trace (docs/operate/tuning.md).
        self.recorder: Recorder | None = None

    def advance(self, watermark_us: int) -> Iterator[pa.RecordBatch]:
        """The on-time and final executions that this watermark makes due."""
        watermark_us = within(watermark_us)
        if self.recorder is not None:
            self.recorder.advanced(watermark_us)
        yield from self._carry_out(self.operator.actions(WatermarkAdvanced(watermark_us)), ())
        self._dealt()

    def fresh(self, events: pa.RecordBatch) -> pa.RecordBatch:
        """Returns events without those that have come before, if each event counts once. Make blocks of these."""
        return events if self._unique is None else self._unique.of(events, self.attempt)

    def arrive(self, blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        """Keeps what is in time or late. Yields what is too late as dropped rows."""
        slices = self._contents.slices(blocks) if self.plan.grid.has_segments and blocks else None
        if self.recorder is not None:
            self.recorder.arrived(blocks, slices)
        facts = [_fact(b) for b in blocks]
        arrived = Arrived(facts, [keyed.arrivals(blocks) for keyed in self._keyed], slices)
        yield from self._carry_out(self.operator.actions(arrived), blocks)
        self._dealt()

    def end_batch(self, *, ends_run: bool = False, batch_follows: bool = False) -> Iterator[pa.RecordBatch]:
        """The late executions that the trigger asks for. With ``ends_run``, all windows with pending events.

        ``batch_follows``: see :class:`aion.core.life.actions.BatchEnded`.
        """
        yield from self._carry_out(self.operator.actions(BatchEnded(ends_run, batch_follows)), ())

    def save(self) -> None:
        """At the end of a batch: writes what the operator keeps in the attempt's map."""
        self.operator.write()
        if self._filler is not None:
            self._filler.end_batch()
        if self._unique is not None and self._purged:
            # What is accepted is in a block, so nothing is accepted where no block is left.
            first = min(map(start_of, self.operator.segments), default=LATEST_US)
            self._unique.forget(first, self.attempt)
            self._purged = False

    def due_next(self, watermark_us: int | None, surely_us: int | None = None) -> tuple[int, ...]:
        """The slices to stage for the windows that are executed when the watermark gets there. See Operator.plan."""
        plan = self.operator.plan(watermark_us, surely_us) if watermark_us is not None else None
        return plan.slices if plan is not None else ()

    def due_later(self, watermark_us: int | None) -> tuple[int, ...]:
        """The slices to stage after those, if memory has room. See Operator.plan_ahead."""
        return self.operator.plan_ahead(watermark_us) if watermark_us is not None else ()

    def _dealt(self) -> None:
        if self.recorder is not None:
            self.recorder.dealt()

    def _carry_out(self, actions: Iterable[Action | Order], blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        """Carries out the actions in the operator's order. Neighbours of one kind go together where that saves work."""
        arrived: list[StoredBlock] = []
        for kind, neighbours in groupby(actions, _kind):
            if kind is Append:
                appends = _all(Append, neighbours)
                stored = [(a.seq, a.late, numbered(blocks[a.index], a.seq)) for a in appends]
                arrived += [StoredBlock(seq, block) for seq, _, block in stored]
                self.attempt.append(stored)
            elif isinstance(kind, _OfKeys):
                yield from self._of_keys(kind.definition, neighbours)
            elif kind is EmitUntimed:
                yield from self._contents.untimed(_all(EmitUntimed, neighbours), blocks)
            elif kind is KeepFilled:
                assert self._filler is not None
                self._filler.came(_all(KeepFilled, neighbours), blocks)
            elif kind is Compact:
                self._compact(_all(Compact, neighbours))
            elif kind is _Release:
                releases = list(neighbours)
                destage = [s for a in _all(Destage, releases) for s in a.slices]
                purge = [s for a in _all(Purge, releases) for s in a.slices]
                self.attempt.release(destage, purge)
                self._purged |= bool(purge)
            else:
                for action in neighbours:
                    match action:
                        case Execute():
                            yield from self._numbered(self._execute(action))
                        case EmitDropped():
                            yield from self._contents.dropped(action, blocks)
                        case EmitDroppedRows():
                            yield self._keyed_of[action.definition].dropped(action, blocks[action.index])
                        case FillGaps():
                            assert self._filler is not None
                            rows = self._filler.gaps(action)
                            yield from self._numbered(self._complete(action.order, rows))
                        case ForgetFilled():
                            assert self._filler is not None
                            self._filler.forget(action)
                        case Forget():
                            self._forget(action)
                        case Prestage():
                            self._prestage(action.slices, arrived)

    def _of_keys(self, definition: int, orders: Iterable[object]) -> Iterator[pa.RecordBatch]:
        """Carries out the orders for windows of keys of a definition: those of one kind together."""
        keyed = self._keyed_of[definition]
        decided: dict[PaneKind, WaitingOrders] = {}
        for order in orders:
            match order:
                case Forget():
                    self._forget(order)
                case Retract():
                    # A pane comes after those that it replaces are taken back.
                    yield from self._numbered(iter([keyed.retract(order)]))
                case ExecuteKeyed():
                    if order.kind not in decided:
                        decided[order.kind] = keyed.orders()
                    decided[order.kind].add(order)
        for kind in [kind for kind in PaneKind if kind in decided]:
            yield from self._numbered(keyed.execute(decided.pop(kind)))

    def _forget(self, order: Forget) -> None:
        if self.plan.changes:
            self.forgotten.append(order)

    # -- executions ---------------------------------------------------------------------------------------

    def _numbered(self, panes: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives the rows of an order a number. An order has at most one pane of a key and window."""
        number = self.operator.number_panes()
        for rows in panes:
            at = rows.schema.get_field_index(PANE_SEQ)
            yield rows.set_column(at, rows.schema.field(at), pa.array(np.full(rows.num_rows, number)))

    def _execute(self, order: Execute) -> Iterator[pa.RecordBatch]:
        if self._filler is None or not self._filler.fills(order):
            yield from self._computed(order)
            return
        self._filler.settle()
        shown = Shown(self.plan)
        for rows in self._computed(order.some(order.events > 0)):
            shown.add(rows)
            yield rows
        yield from self._complete(order, self._filler.rows(order, shown))

    def _computed(self, order: Execute) -> Iterator[pa.RecordBatch]:
        for some in self._at_once(order):
            with self._timed(order.kind) as seen:
                blocks, keys = self._read(some, seen)
                yield from self._complete(some, self._contents.panes(some, blocks, keys))

    def _complete(self, order: Execute, panes: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (with_completeness(self.plan, self.operator, order, rows) for rows in panes)

    def _at_once(self, order: Execute) -> Iterator[Execute]:
        """The windows that are computed together: they read and decode each segment once.

        Windows that keep events are computed one by one. A window that was executed before reads less than one that
        was not, so these two are never together. Neither are windows that were closed at different times.
        """
        if self.plan.layout is None:
            for i, (start_us, end_us) in enumerate(zip(order.start_us.tolist(), order.end_us.tolist(), strict=True)):
                yield order.some(slice(i, i + 1), tuple(s for s in order.slices if start_us <= s < end_us))
            return
        before = order.changed_since >= 0
        for until in np.unique(order.until).tolist():
            for among in (~before, before):
                if (among := among & (order.until == until)).any():
                    yield from windows_at_once(self.plan, order.some(among))

    def _read(self, order: Execute, seen: Seen) -> tuple[Iterator[StoredBlock], Keys | None]:
        """The blocks of windows and, if all of them were executed before, the keys that have changed since."""
        slices, until = order.slices, int(order.until[0])
        blocking = self.plan.blocking
        spans = None if until == NEVER else dict.fromkeys(slices, (-1, until))
        if not self._seeks or bool((order.changed_since < 0).any()):
            return seen(self.attempt.read(slices, blocking=blocking, only=None if spans is None else Only(spans))), None
        since: dict[int, tuple[int, int]] = {}
        for s, end_us in zip(slices, self.plan.grid.ends(np.array(slices, np.int64)).tolist(), strict=True):
            seen_up_to = order.changed_since[(order.start_us < end_us) & (order.end_us > s)]
            since[s] = (int(seen_up_to.min(initial=NEVER)), until)
        keys = self._contents.keys(seen(self.attempt.read(slices, only=Only(since))))
        return seen(self.attempt.read(slices, blocking=blocking, only=Only(spans, keys.ranges))), keys

    @contextmanager
    def _timed(self, pane: str | None = None) -> Iterator[Seen]:
        """Notes the bytes that an execution reads, how many seconds it takes, and how many of them it waits."""
        clock = self._contents.clock
        size, waited_s = 0, 0.0

        def seen(blocks: Iterator[StoredBlock]) -> Iterator[StoredBlock]:
            nonlocal size, waited_s
            asked_s = clock()
            for stored in blocks:
                waited_s += clock() - asked_s
                size += stored.block.header.size_bytes
                yield stored
                asked_s = clock()

        begin_s = clock()
        yield seen
        self.executions.append(Execution(size, clock() - begin_s, waited_s))
        if self.recorder is not None:
            self.recorder.executed(*self.executions[-1], pane)

    # -- staging and compaction ---------------------------------------------------------------------------

    def _prestage(self, slices: Sequence[int], arrived: Sequence[StoredBlock]) -> None:
        """Stages what late events announce (paper 3.2): for windows executed before, the blocks of their keys."""
        if not self._seeks:
            self.attempt.prestage(slices)
            return
        wanted = frozenset(slices)
        keys = self._contents.keys_of_arrived([a for a in arrived if a.block.header.slice_us in wanted])
        self.attempt.prestage(slices, Only(keys=keys.ranges))

    def _compact(self, compactions: Sequence[Compact]) -> None:
        if not self._contents.compacts:
            return
        # The owners as they are now: the compactions were decided from the same index.
        owners = self.operator.owners if self.plan.keyed else None
        with (
            nullcontext(self.operator) if self.recorder is None else self.recorder.compactions(self.operator)
        ) as operator:
            carry_out(compactions, operator, self.attempt, self._contents, owners)


class _OfKeys(NamedTuple):
    """Orders for windows of keys of one definition."""

    definition: int


def _kind(action: object) -> object:
    """What actions of one kind have in common. Memory and disk let go of slices in one request."""
    if isinstance(action, ExecuteKeyed | Retract) or (isinstance(action, Forget) and action.keys is not None):
        return _OfKeys(action.definition)
    return _Release if isinstance(action, _Release) else type(action)


def _fact(block: Block) -> BlockFact:
    header = block.header
    keys = None if header.compacted is None else header.compacted[1:]
    return BlockFact(header.slice_us, header.events, header.size_bytes, keys)


def _all(kind: type[T], actions: Iterable[object]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


class CompactionOperator(Protocol):
    """The part of an operator that compaction needs."""

    @property
    def next_seq(self) -> int: ...
    def number(self, blocks: int) -> int: ...
    def handle(self, event: CompactionDone) -> Sequence[object]: ...


class Compacting(Protocol):
    """The part of :class:`aion.execute.panes.contents.Contents` that compaction needs."""

    @property
    def compaction_bytes(self) -> int: ...
    def compacted(
        self,
        group: Mapping[int, Compact],
        blocks: Iterator[StoredBlock],
        part: tuple[int, int] | None,
        owners: Owners | None,
    ) -> list[tuple[Compact, Block]]: ...


def carry_out(
    compactions: Sequence[Compact],
    operator: CompactionOperator,
    attempt: ShardAttempt,
    contents: Compacting,
    owners: Owners | None = None,
) -> None:
    """Carries out compactions, and those that the operator orders after them.

    It holds about ``contents.compaction_bytes`` at once.

    New blocks are in place before the old ones go. If it fails half-way, all old blocks are still there, and the new
    ones are abandoned. ``owners``: see :meth:`aion.execute.panes.block_compactor.BlockCompactor.compact`.
    """
    waiting = deque(compactions)
    while waiting:
        group = _next_group(waiting, contents.compaction_bytes)
        below = operator.next_seq
        try:
            sizes = _compact(group, below, operator, attempt, contents, owners)
            attempt.replace({s: (compaction.after, compaction.until) for s, compaction in group.items()}, below)
        except BaseException:
            attempt.abandon(below)
            raise
        for compaction in group.values():
            actions = operator.handle(CompactionDone(compaction, sizes[compaction.slice_us]))
            # The answer is all that is due in this slice now. What was ordered before does not know the new run.
            waiting = deque(other for other in waiting if other.slice_us != compaction.slice_us)
            waiting += [action for action in actions if isinstance(action, Compact)]


def _next_group(waiting: deque[Compact], limit_bytes: int) -> dict[int, Compact]:
    """The next compactions of different slices that are small enough together. At least one."""
    first = waiting.popleft()
    group, size = {first.slice_us: first}, first.size_bytes
    while waiting and waiting[0].slice_us not in group and size + waiting[0].size_bytes <= limit_bytes:
        compaction = waiting.popleft()
        group[compaction.slice_us] = compaction
        size += compaction.size_bytes
    return group


def _compact(
    group: Mapping[int, Compact],
    below: int,
    operator: CompactionOperator,
    attempt: ShardAttempt,
    contents: Compacting,
    owners: Owners | None,
) -> dict[int, int]:
    """Appends the blocks that replace those of the group. Returns their bytes by slice."""
    sizes = dict.fromkeys(group, 0)
    spans = {s: (compaction.after, compaction.until) for s, compaction in group.items()}
    parts = -(-sum(compaction.size_bytes for compaction in group.values()) // contents.compaction_bytes)
    # Runs are sorted by key, so each part reads only its own blocks of a run.
    for low, high in equal_ranges(max(parts, 1)):
        only = Only(spans, None if parts <= 1 else [(low, high)], below)
        blocks = attempt.read(list(group), only=only)
        made = contents.compacted(group, blocks, None if parts <= 1 else (low, high), owners)
        if not made:  # sessions needed none of these rows
            continue
        first = operator.number(len(made))
        attempt.append([(first + i, compaction.late, block) for i, (compaction, block) in enumerate(made)])
        for compaction, block in made:
            sizes[compaction.slice_us] += block.size_bytes
    return sizes


_SEED = 0x636F6D70  # the rows that are learnt from must not depend on how keys are spread over shards


def with_completeness(plan: Plan, operator: Operator, order: Execute, rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows of an execution, with the columns of :data:`COMPLETENESS_COLUMNS` if the plan has them."""
    if not plan.completeness or not rows.num_rows:
        return rows
    watermark_us = operator.watermark.at_us
    if operator.completeness is None or watermark_us is None:
        return rows
    start_us, end_us = (
        combined(rows.column(f"window_{edge}")).cast(pa.int64()).to_numpy() for edge in ("start", "end")
    )
    definition = plan.numbers_of(rows.column("window"), start_us)
    events, late_events = (rows.column(name).to_numpy() for name in ("events", "late_events"))
    facts = PaneFacts(_keys(plan, rows), definition, start_us, end_us, events, late_events)
    rated = rate(operator.completeness, operator.windows, watermark_us, order.kind, facts)
    for name, values in zip(COMPLETENESS_COLUMNS, rated, strict=True):
        known = pa.array(values, mask=np.isnan(values))
        rows = rows.set_column(rows.schema.get_field_index(name), name, known)
    return rows


def _keys(plan: Plan, rows: pa.RecordBatch) -> Ints:
    if not plan.key:
        return np.zeros(rows.num_rows, np.int64)
    hashes = hash_rows([combined(rows.column(name)) for name in plan.key], _SEED)
    return (hashes >> np.uint64(1)).astype(np.int64)
