"""What a policy means in objects: the operator and the store that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aion.config import Policy
from aion.lateness import FixedBound
from aion.operator import Operator
from aion.plan import Plan
from aion.trigger import EveryBatch
from state_backends.stores import StoreConfig


def make_operator(plan: Plan, policy: Policy, snapshot: Mapping[str, Any] | None) -> Operator:
    """The operator of one shard, new or as it was at ``snapshot``."""
    return Operator(
        plan.grid,
        bound=FixedBound(policy.lateness.initial_bound_us),
        trigger=EveryBatch(),
        snapshot=snapshot,
    )


def store_config(policy: Policy, *, retain_versions: int = 100) -> StoreConfig:
    return StoreConfig(
        backend=policy.state.backend,
        budget_bytes=policy.memory.budget_bytes,
        bucket_limit_bytes=policy.memory.bucket_limit_bytes,
        retain_versions=retain_versions,
    )
