"""What the driver hands to the tasks of the root."""

from __future__ import annotations

from dataclasses import dataclass

from aion.core.plan import Plan


@dataclass(frozen=True)
class RootConfig:
    """The same for every task.

    Plain values: Spark also sends it to a process that must start fast, so it has to load without pydantic.
    """

    plan: Plan
    policy: str
    """As JSON text, which a worker parses once."""
    name: str
    uid: str
    application: str
    state_dir: str
    ids: tuple[int, ...]
    """The ids of all shards."""
    key_types: tuple[str, ...]
    """The types as which keys are hashed."""
    retain_versions: int
    watermark_delay_us: int | None
    """The delay given to withWatermark. None if the watermark is on another column than the event time."""
    task_failures: int
    """How many times a task may fail before Spark stops the query."""
    record: str | None = None
    """The folder for a trace of the input. None: no trace."""
