"""The policy: what is kept where, for how long, and what runs when. A frozen model without side effects.

A policy file has the shape of :class:`Policy`. Its keys are declared in :mod:`aion.config.sections`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from aion.config.section import Section
from aion.config.sections import (
    ApplyPolicy,
    BlocksPolicy,
    DestagingPolicy,
    DistributionPolicy,
    ExecutionPolicy,
    IoPolicy,
    LatenessPolicy,
    MemoryPolicy,
    MetricsPolicy,
    PrestagingPolicy,
    StatefulPolicy,
    StatePolicy,
    TracePolicy,
    TriggerPolicy,
)
from aion.config.values import Share

KeyPath = tuple[str, ...]

GONE: dict[KeyPath, str] = {
    ("memory", "resume"): "windows move to disk until four fifths of memory.moderate are in use",
    ("execution", "late_batches"): "late work waits for at most 10 batches; with execution.late_share: null none waits",
    ("apply", "spill_dir"): "temporary files go where Spark's go; set spark.local.dir, or TMPDIR without Spark",
    ("lateness", "half_life"): "it is 7 days, and a change of lateness is noticed without it",
}
"""Keys that policies had once, and why nothing is lost without them."""


class Policy(Section):
    """What Aion keeps where, for how long, and when windows run."""

    state: StatePolicy = StatePolicy()
    memory: MemoryPolicy = MemoryPolicy()
    destage: DestagingPolicy = DestagingPolicy()
    prestage: PrestagingPolicy = PrestagingPolicy()
    io: IoPolicy = IoPolicy()
    blocks: BlocksPolicy = BlocksPolicy()
    distribution: DistributionPolicy = DistributionPolicy()
    execution: ExecutionPolicy = ExecutionPolicy()
    apply: ApplyPolicy = ApplyPolicy()
    lateness: LatenessPolicy = LatenessPolicy()
    trigger: TriggerPolicy = TriggerPolicy()
    stateful: StatefulPolicy = StatefulPolicy()
    trace: TracePolicy = TracePolicy()
    metrics: MetricsPolicy = MetricsPolicy()


def policy_to_json(policy: Policy) -> dict[str, Any]:
    """Returns a plain dict in the shape of the YAML file. ``policy_from_json`` reads it back to an equal policy."""
    return policy.model_dump(mode="json", by_alias=True)


def setting_text(value: object) -> str:
    """Returns a value of :func:`policy_to_json` as text for a Spark setting. ``resolve`` reads it back."""
    return json.dumps(value) if value is None or isinstance(value, dict | bool) else str(value)


def leaves(model: type[BaseModel] = Policy, path: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Yields every key as it is written in a file, with its field, in the order of the model."""
    for name, field in model.model_fields.items():
        inner = (*path, field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, inner)
        else:
            yield inner, field


def budget_bytes(policy: Policy, limit_bytes: int) -> int:
    """Returns the memory budget on a host whose processes may use ``limit_bytes`` (see
    state_backends.server.machine).
    """
    budget = policy.memory.budget
    return budget.of(limit_bytes) if isinstance(budget, Share) else budget


def bucket_limit_bytes(policy: Policy, limit_bytes: int) -> int:
    """Returns the limit of one m-bucket on such a host: the policy's value, but at most the budget."""
    return min(policy.memory.bucket_limit_bytes, budget_bytes(policy, limit_bytes))
