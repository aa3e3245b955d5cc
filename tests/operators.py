"""Gives facts to an operator without a shell, and returns its orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aion.config import Policy
from aion.core.compaction import BlockFact
from aion.core.lateness.bound import AdaptiveBound
from aion.core.lateness.observe import NewBounds
from aion.core.life.actions import (
    Action,
    Append,
    Arrived,
    BatchEnded,
    Destage,
    EmitDropped,
    EmitUntimed,
    Event,
    Execute,
    Execution,
    Purge,
    WatermarkAdvanced,
    WindowRef,
)
from aion.core.life.rules import PolicyRules, Rules
from aion.core.operator.operator import GridWindows, Operator
from aion.core.periodic import Periodic, Tumbling
from aion.core.query.plan import Plan
from aion.core.slicing.grid import SliceGrid
from aion.core.trigger.triggers import EveryBatchTrigger, Trigger
from aion.execute.assembly import make_contents
from aion.execute.executor import Executor
from policies.cleanup import Cleanup
from state_backends.store.attempt import ShardAttempt
from state_backends.store.codec_pool import CodecPool
from tests.durations import us


def bound_of(bound_us: int, snapshot: dict[str, Any] | None = None, coverage: float | None = None) -> AdaptiveBound:
    """Gives every window the same bound. With a coverage: until it has learned another one."""
    return AdaptiveBound(Cleanup(bound_us, coverage=coverage), snapshot=snapshot["lateness"] if snapshot else None)


def make_executor(plan: Plan, operator: Operator, attempt: ShardAttempt, codec: CodecPool, policy: Policy) -> Executor:
    """Carries out the operator's orders."""
    return Executor(plan, operator, attempt, make_contents(plan, codec, policy))


def make(
    *windows: Periodic,
    bound: int = 100,
    snapshot: dict[str, Any] | None = None,
    segmented: bool = False,
    coverage: float | None = None,
) -> Operator:
    grid = SliceGrid(windows or (Tumbling(us(10)),), segmented=segmented)
    return operator_of(grid, bound_of(bound, snapshot, coverage), snapshot=snapshot)


def operator_of(grid: SliceGrid, bound: NewBounds, trigger: Trigger | None = None, **more: Any) -> Operator:
    """An operator without windows of keys, whose definitions decide nothing for themselves.

    ``more``: the other fields of :class:`Shared`, and the other arguments of :class:`Operator`.
    """
    own = {name: more.pop(name) for name in PolicyRules._fields if name in more}
    shared = PolicyRules(bound, trigger or EveryBatchTrigger(), **own)
    return Operator([GridWindows(grid)], Rules(shared, {}, max(grid.aligned, default=0) + 1), **more)


def arrive(operator: Operator, *slices: int, events: int = 1) -> list[Action]:
    return handle(operator, Arrived([BlockFact(s, events, 64) for s in slices]))


def advance(operator: Operator, to: int) -> list[Action]:
    return handle(operator, WatermarkAdvanced(to))


def end_batch(operator: Operator) -> list[Action]:
    return handle(operator, BatchEnded())


def handle(operator: Operator, event: Event) -> list[Action]:
    """Returns the orders, without hints about what will be read soon: these change no pane."""
    actions = operator.handle(event)
    operator.validate()
    return [a for a in actions if isinstance(a, Append | EmitUntimed | EmitDropped | Execute | Destage | Purge)]


def executes(actions: Sequence[Action]) -> list[Execution]:
    return [execution for a in actions if isinstance(a, Execute) for execution in a]


def said(actions: Sequence[Action]) -> list[Any]:
    """Turns actions into values that tests can compare."""
    plain = [(a.kind, a.slices, *a) if isinstance(a, Execute) else a for a in actions]
    return [(a.blocks, windows_of(a), a.lateness_us.tolist()) if isinstance(a, EmitDropped) else a for a in plain]


def executed(actions: Sequence[Action]) -> list[tuple[str, int, int]]:
    """Returns (kind, window start, pane) of each execution, in order."""
    return [(a.kind.value, a.window.start_us, a.pane) for a in executes(actions)]


def kinds(actions: Sequence[Action]) -> list[type]:
    return [type(a) for a in actions]


def windows_of(drop: EmitDropped) -> list[WindowRef]:
    columns = (drop.definition.tolist(), drop.start_us.tolist(), drop.end_us.tolist())
    return [WindowRef(*row) for row in zip(*columns, strict=True)]


def dropped(actions: Sequence[Action]) -> list[EmitDropped]:
    return [a for a in actions if isinstance(a, EmitDropped)]


def purged(actions: Sequence[Action]) -> list[int]:
    return [s for a in actions if isinstance(a, Purge) for s in a.slices]
