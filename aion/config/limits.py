"""Limits of memory in bytes, on a host of a known size."""

from __future__ import annotations

from aion.config.model import Policy
from aion.config.values import Share


def budget_bytes(policy: Policy, limit_bytes: int) -> int:
    """Returns the memory budget on a host whose processes may use ``limit_bytes`` (see
    state_backends.server.machine).
    """
    budget = policy.memory.budget
    return budget.of(limit_bytes) if isinstance(budget, Share) else budget


def bucket_limit_bytes(policy: Policy, limit_bytes: int) -> int:
    """Returns the limit of one m-bucket on such a host: the policy's value, but at most the budget."""
    return min(policy.memory.bucket_limit_bytes, budget_bytes(policy, limit_bytes))
