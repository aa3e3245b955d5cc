"""The numbers of a batch that windows on Spark yield beside its panes."""

from __future__ import annotations

from aion.core.life.lifecycle import EXECUTED

COUNTED = "counted"
"""The kind of a row that carries a number of its shard: its name in ``reason``, its value in ``events``."""
STALE = "stale_windows"
COUNTS = (*(f"{kind}_executions" for kind in EXECUTED), STALE, "judged_events", "missed_events")
