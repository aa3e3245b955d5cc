"""The four workloads of the Aion paper (section 5, table 1) as Spark applications, each in a module of its own.

A module has the generator of its events, the application as a user would write it with ``aion.windowed`` and with stock
Spark, the later stages that work on panes, and the true results from a batch computation over all events.
"""

from __future__ import annotations

from importlib import import_module

from experiments.workloads.model import Workload

NAMES = ("average", "bigrams", "stock", "linear-road")


def load(name: str) -> Workload:
    """A workload by its name on the command line. Raises ValueError."""
    if name not in NAMES:
        raise ValueError(f"unknown workload {name!r}; use {', '.join(NAMES)}")
    found: Workload = import_module(f"experiments.workloads.{name.replace('-', '_')}").WORKLOAD
    return found
