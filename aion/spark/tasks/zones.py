"""The plan in the tasks of a query, with what its definition has been before, and with the rules of time zones that it
has known (:mod:`aion.execute.files.zone_rules`). Call these inside a task.

If a query has no calendar windows, its tasks import only this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext

from aion.core.query.evolved import evolved, of_shard
from aion.core.query.history import Evolution
from aion.core.query.plan import Plan
from aion.spark.tasks.running import Running, lasting_checkpoint_of
from aion.spark.tasks.shards import past_here

if TYPE_CHECKING:
    from aion.execute.files.zone_rules import ZoneFiles


def plan_here(plan: Plan, name: str) -> Plan:
    """Returns the plan with the windows that finish. ``name``: of the operator."""
    past = past_here(name)
    return plan if past is None else evolved(plan, _evolution(past))


@lru_cache(maxsize=16)
def _evolution(past: str) -> Evolution:
    return Evolution.of(json.loads(past))


def slicing_plan(plan: Plan, name: str) -> Plan:
    """Returns the plan for a task that makes or merges blocks. ``name``: of the operator."""
    plan = plan_here(plan, name)
    if not plan.calendars:
        return plan
    checkpoint, run = _query()
    return _files(checkpoint, name, run).sliced(plan)


def record_rules(plan: Plan, name: str) -> None:
    """Makes the plan's rules durable, once in each worker and run."""
    if plan.calendars:
        checkpoint, run = _query()
        digests = frozenset(window.edges.rules.digest for window in plan.calendars.values())
        if (checkpoint, name, run, digests) not in _recorded:
            _files(checkpoint, name, run).add(plan)
            _recorded.add((checkpoint, name, run, digests))


def shard_plan(plan: Plan, snapshot: Mapping[str, Any] | None, name: str) -> Plan:
    """Returns the plan for a shard: windows that live keep their edges. ``plan``: of :func:`plan_here`. Raises
    StateError.
    """
    plan = of_shard(plan, snapshot)
    if not plan.calendars:
        return plan
    from aion.core.timed.calendar_state import plan_of_snapshot

    found = plan_of_snapshot(plan, snapshot)
    if found is not plan:
        checkpoint, run = _query()
        _files(checkpoint, name, run).check(snapshot)
    return found


_recorded: set[tuple[str, str, str, frozenset[str]]] = set()


def _query() -> tuple[str, str]:
    """Returns the query's checkpoint, and its run."""
    context = TaskContext.get()
    assert context is not None
    return lasting_checkpoint_of(context), Running.of(context).run


@lru_cache(maxsize=64)
def _files(checkpoint: str, name: str, run: str) -> ZoneFiles:
    from aion.execute.files.zone_rules import ZoneFiles

    return ZoneFiles(checkpoint, name)
