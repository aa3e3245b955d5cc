"""What the driver tells the tasks of the root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aion.core.plan import Plan


@dataclass(frozen=True)
class RootConfig:
    """For every task; plain values."""

    plan: Plan
    policy: dict[str, Any]
    name: str
    uid: str
    application: str
    state_dir: str
    ids: tuple[int, ...]
    """Those of all shards."""
    key_types: tuple[str, ...]
    """What keys are hashed as."""
    retain_versions: int
    watermark_delay_us: int | None
    """What withWatermark was told, where the watermark is on the event time itself."""
    task_failures: int
    """How often a task may fail before Spark gives the query up."""
    record: str | None = None
    """A folder for a trace of what comes; None: there is none."""
