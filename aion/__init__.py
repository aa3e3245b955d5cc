"""Aion: windowed aggregation for PySpark Structured Streaming that includes late events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aion.installation import check_packages

# First, because the imports below need these packages, and others of the same names would fail in a confusing way.
check_packages("state_backends", "policies")

import state_backends  # noqa: E402, F401 (before the rest, because it refuses a platform that cannot work)
from aion import aggregates, errors  # noqa: E402
from aion.core.query.plan import Window  # noqa: E402
from aion.core.windows import (  # noqa: E402
    Count,
    PerRecord,
    Punctuated,
    Session,
    Sliding,
    Tumbling,
)
from aion.spec import Spec  # noqa: E402
from aion.zones import Calendar  # noqa: E402

if TYPE_CHECKING:
    from aion import metrics, plot, sinks
    from aion.local import LocalOperator
    from aion.spark.files import read_files
    from aion.spark.group_by import group_by
    from aion.spark.migrate import migrate
    from aion.spark.newest import table
    from aion.spark.progress import progress
    from aion.spark.read_state import read_state, restoring
    from aion.spark.session import configure
    from aion.spark.stream import changes, dropped, explain, panes, windowed
    from aion.spark.touched import unconfigure
    from aion.spark.watermarks import watermark

__version__ = "0.3.0"
__all__ = [
    "Calendar",
    "Count",
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
    "metrics",
    "migrate",
    "panes",
    "plot",
    "progress",
    "read_files",
    "read_state",
    "restoring",
    "sinks",
    "table",
    "unconfigure",
    "watermark",
    "windowed",
]

# Imported on first use: Spark is slow to import, and LocalOperator does not need it.
_LAZY = {
    "LocalOperator": "aion.local",
    "changes": "aion.spark.stream",
    "configure": "aion.spark.session",
    "dropped": "aion.spark.stream",
    "explain": "aion.spark.stream",
    "group_by": "aion.spark.group_by",
    "migrate": "aion.spark.migrate",
    "panes": "aion.spark.stream",
    "progress": "aion.spark.progress",
    "read_files": "aion.spark.files",
    "read_state": "aion.spark.read_state",
    "restoring": "aion.spark.read_state",
    "table": "aion.spark.newest",
    "unconfigure": "aion.spark.touched",
    "watermark": "aion.spark.watermarks",
    "windowed": "aion.spark.stream",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("metrics", "plot", "sinks"):
        return importlib.import_module(f"aion.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'aion' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns what users write, also what is imported on first use."""
    return [*__all__, "__version__"]
