"""Windows as a tenant of a shard: the operator that decides, and the executor that carries it out."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from aion.base.identity import SECRET_BYTES
from aion.config import Policy
from aion.core.query.history import EVOLUTION
from aion.core.query.plan import Plan
from aion.core.slicing.grid import NO_SLICE
from aion.execute.assembly import (
    PANES_KEPT,
    longest_bound_us,
    make_bound,
    make_operator,
    panes_kept_us,
    predicts,
    room_of,
)
from aion.execute.executor import Executor
from aion.execute.panes.changing import Changes
from aion.execute.panes.contents import Contents
from aion.execute.record.recorder import Recorder
from aion.execute.tenant import Saved
from policies.sizing import Execution
from state_backends.format.block import Block
from state_backends.store.attempt import ShardAttempt

SECRET = "identity_secret"
"""The field of a snapshot with the key of identities."""
log = logging.getLogger(__name__)


class Windows:
    """See :class:`aion.execute.tenant.Tenant`. ``snapshot``: of the shard's version, or None if it has none yet.

    ``contents``: what is in the blocks. ``shards``: how many the query has. ``others``, ``learnt``: what the others on
    this host have observed of lateness, when the shard was opened and now; see
    :class:`state_backends.server.remote_attempt.RemoteAttempt`. ``delay_us``: how far the watermark stays behind the
    latest event, or None if it does not depend on the events' times.
    """

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        attempt: ShardAttempt,
        snapshot: Mapping[str, Any] | None,
        contents: Contents,
        *,
        shards: int = 1,
        others: tuple[int, Sequence[Any]] = (0, ()),
        learnt: Callable[[], tuple[int, Sequence[Any], Sequence[Any]]] | None = None,
        delay_us: int | None = None,
    ) -> None:
        self._bound = make_bound(plan, policy, snapshot, shards=shards)
        if self._bound.together:
            self._bound.receive(*others)
        self._learnt = learnt
        self.plan = plan
        self.operator = make_operator(plan, policy, snapshot, self._bound)
        self._secret = _secret(plan, snapshot)
        self._kept_us = max(panes_kept_us(plan, snapshot), longest_bound_us(plan, policy))
        over = _newly_over(plan, snapshot)
        self.executor = Executor(plan, self.operator, attempt, contents, self._secret, over)
        self._predicts = predicts(policy)
        self._delay_us = delay_us
        self._latest_us: int | None = None
        self._changes = None
        if plan.changes:
            assert self._secret is not None
            self._changes = Changes(plan, attempt, self._secret, over, room_of(policy))

    def record(self, recorder: Recorder) -> None:
        """Lets a recorder note what comes, from now on."""
        self.executor.recorder = recorder

    def advance(self, at_us: int | None) -> Iterator[pa.RecordBatch]:
        if at_us is None:
            return
        before_us = self.operator.watermark.at_us
        if self._learnt is not None and self._bound.together and before_us != at_us and self._bound.asks(before_us):
            self._bound.learn(*self._learnt())
        yield from self._taken(self.executor.advance(at_us))

    def fresh(self, events: pa.RecordBatch) -> pa.RecordBatch:
        """Returns events without those that have come before, if each counts once. Make blocks of these."""
        return self.executor.fresh(events)

    def arrive(self, rows: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        times = [block.header.max_us for block in rows if block.header.slice_us != NO_SLICE]
        self._latest_us = max([*times, self._latest_us] if self._latest_us is not None else times, default=None)
        yield from self._taken(self.executor.arrive(rows))

    def end_batch(self, *, ends_run: bool = False, batch_follows: bool | None = None) -> Iterator[pa.RecordBatch]:
        """With ``ends_run``, late windows are executed even if their triggers would wait.

        ``batch_follows`` says whether another batch comes even if no event does. If it is None, another one comes
        exactly if the events of this one move the watermark.
        """
        batch_follows = self._moves_watermark if batch_follows is None else batch_follows
        yield from self._taken(
            self.executor.end_batch(ends_run=ends_run, batch_follows=batch_follows and self._predicts)
        )
        forgotten, self.executor.forgotten = self.executor.forgotten, []
        if self._changes is not None:
            yield from self._changes.end_batch(forgotten)

    def _taken(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return rows if self._changes is None else self._changes.take(rows)

    @property
    def due_ms(self) -> int | None:
        """The next watermark that makes something due."""
        due = self.operator.next_due_us
        return None if due is None else -(-due // 1000)

    @property
    def _reached_us(self) -> int | None:
        """Where the events of this batch alone bring the watermark. None if that is unknown."""
        latest_us, delay_us = self._latest_us, self._delay_us
        return None if latest_us is None or delay_us is None else latest_us - delay_us

    @property
    def _moves_watermark(self) -> bool:
        now, reached = self.operator.watermark.at_us, self._reached_us
        return reached is not None and (now is None or reached > now)

    def plan_next(self) -> tuple[int, ...]:
        """Plans at the end of a batch what the next one will read, and returns the slices to stage.

        The next batch's watermark follows from the events of this one. See docs/start/concepts.md.
        """
        return self.executor.due_next(self._expected_us, self._reached_us)

    def plan_ahead(self) -> tuple[int, ...]:
        """Returns the slices that the batches after the next one will read. See Operator.plan_ahead."""
        return self.executor.due_later(self._expected_us)

    @property
    def _expected_us(self) -> int | None:
        """The watermark of the next batch. None if it is unknown, or if nothing is staged before it is needed."""
        expected = (self.operator.watermark.expected_next(), self._reached_us) if self._predicts else ()
        return max((e for e in expected if e is not None), default=None)

    def save(self) -> Saved:
        next_slices = self.plan_next()
        self.executor.save()
        if self.executor.recorder is not None:
            try:
                self.executor.recorder.write()
            except OSError as error:
                # A query does not fail because its trace cannot be written.
                log.warning("a batch was not recorded: %s", error)
        snapshot = self.operator.snapshot()
        if self.plan.history is not None:
            snapshot[EVOLUTION] = self.plan.history.to_json(set(self.operator.segments))
        if self.plan.of_panes:
            snapshot[PANES_KEPT] = self._kept_us
        if self._secret is not None:
            snapshot[SECRET] = self._secret.hex()
        first = frozenset(next_slices)
        later = [slice_us for slice_us in self.plan_ahead() if slice_us not in first]
        return Saved(snapshot, next_slices, self.take_executions(), later)

    def take_executions(self) -> list[Execution]:
        """Returns the executions since the last call."""
        executed, self.executor.executions = self.executor.executions, []
        return executed


def _secret(plan: Plan, snapshot: Mapping[str, Any] | None) -> bytes | None:
    """Returns the key of the shard's identities, a new one for a new shard. None if the plan needs none."""
    if not plan.unique and not plan.changes:
        return None
    known = None if snapshot is None else snapshot.get(SECRET)
    return secrets.token_bytes(SECRET_BYTES) if known is None else bytes.fromhex(known)


def _newly_over(plan: Plan, snapshot: Mapping[str, Any] | None) -> list[int]:
    """Returns the definitions that ended with changes that the shard has not had a batch after."""
    if plan.history is None or snapshot is None:
        return []
    evolution = plan.history.evolution
    if snapshot.get(EVOLUTION, {"steps": 0})["steps"] >= evolution.changes:
        return []
    return [number for number, kept in enumerate(evolution.windows) if kept.over]
