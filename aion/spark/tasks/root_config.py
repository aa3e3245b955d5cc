"""What the driver hands to the tasks of a root."""

from __future__ import annotations

from dataclasses import dataclass

from aion.core.query.plan import Plan
from aion.spark.session.group_counter import GroupCounter


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The same for every task of an operator. It describes where the operator's shards are.

    Plain values: Spark also sends it to a process that must start fast, so it has to load without pydantic.
    """

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
    task_failures: int
    """How many times a task may fail before Spark stops the query."""


@dataclass(frozen=True, kw_only=True)
class RootConfig(TaskConfig):
    """For :class:`aion.spark.tasks.windows.WindowsDefinition`."""

    plan: Plan
    watermark_delay_us: int | None
    """The delay given to withWatermark. None if the watermark is on another column than the event time."""
    rows_first: bool = False
    """Whether the rows of a batch come before its watermark moves."""
    counter: GroupCounter | None = None
    """What counts the groups that reach the root without a child. It is None if all blocks come from children."""
    trace_folder: str | None = None
    """The folder for a trace of the input, or None without a trace."""
