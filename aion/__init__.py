"""Aion: windowed aggregation for PySpark Structured Streaming that includes late events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aion.installation import check_packages

# First, because the imports below need these packages, and others of the same names would fail in a confusing way.
check_packages("state_backends", "policies")

import state_backends  # noqa: E402, F401 (before the rest, because it refuses a platform that cannot work)
from aion import aggregates, errors  # noqa: E402
from aion.core.periodic import Cumulative, Sliding, Tumbling  # noqa: E402
from aion.core.query.functions import Apply, Window  # noqa: E402
from aion.core.windows import Count, PerRecord, Punctuated, Session  # noqa: E402
from aion.spec import Spec  # noqa: E402
from aion.zones import Calendar  # noqa: E402

if TYPE_CHECKING:
    from aion import metrics, plot, sinks, state
    from aion.local import LocalOperator
    from aion.spark.api.configure import configure
    from aion.spark.api.files import read_files
    from aion.spark.api.group_by import group_by
    from aion.spark.api.join import join
    from aion.spark.api.newest import table
    from aion.spark.api.stream import changes, dropped, explain, panes, windowed
    from aion.spark.api.watermarks import watermark
    from aion.spark.session.undo import unconfigure
    from aion.spark.start.progress import progress
    from aion.spark.taking_over.migrate import migrate
    from aion.spark.taking_over.read_state import read_state, restoring

__version__ = "0.3.0"
__all__ = [
    "Apply",
    "Calendar",
    "Count",
    "Cumulative",
    "LocalOperator",
    "PerRecord",
    "Punctuated",
    "Session",
    "Sliding",
    "Spec",
    "Tumbling",
    "Window",
    "aggregates",
    "changes",
    "configure",
    "dropped",
    "errors",
    "explain",
    "group_by",
    "join",
    "metrics",
    "migrate",
    "panes",
    "plot",
    "progress",
    "read_files",
    "read_state",
    "restoring",
    "sinks",
    "state",
    "table",
    "unconfigure",
    "watermark",
    "windowed",
]

# Imported on first use: Spark is slow to import, and LocalOperator does not need it.
_LAZY = {
    "LocalOperator": "aion.local",
    "changes": "aion.spark.api.stream",
    "configure": "aion.spark.api.configure",
    "dropped": "aion.spark.api.stream",
    "explain": "aion.spark.api.stream",
    "group_by": "aion.spark.api.group_by",
    "join": "aion.spark.api.join",
    "migrate": "aion.spark.taking_over.migrate",
    "panes": "aion.spark.api.stream",
    "progress": "aion.spark.start.progress",
    "read_files": "aion.spark.api.files",
    "read_state": "aion.spark.taking_over.read_state",
    "restoring": "aion.spark.taking_over.read_state",
    "table": "aion.spark.api.newest",
    "unconfigure": "aion.spark.session.undo",
    "watermark": "aion.spark.api.watermarks",
    "windowed": "aion.spark.api.stream",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("metrics", "plot", "sinks", "state"):
        return importlib.import_module(f"aion.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'aion' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns what users write, also what is imported on first use."""
    return [*__all__, "__version__"]
