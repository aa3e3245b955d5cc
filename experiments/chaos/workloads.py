"""The workloads of the chaos experiment."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from experiments.chaos.data import Workload

WORKLOADS: Mapping[str, str] = {
    "windows": "chaos.windows:Windows",
    "sessions": "chaos.sessions:Sessions",
    "joins": "chaos.joins:Joins",
    "stateful": "chaos.stateful:Stateful",
}


def workload_of(name: str) -> Workload:
    """The workload of this name. It is imported when it is asked for, because it may need pyspark."""
    module, _, kind = WORKLOADS[name].partition(":")
    found: Workload = getattr(import_module(f"experiments.{module}"), kind)()
    return found
