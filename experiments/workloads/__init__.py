"""The four workloads of the Aion paper (section 5, table 1) as Spark applications, each in a module of its own.

A module says how its events are made, how a user would write it with ``aion.windowed`` and with stock Spark, what later
stages make of the panes, and what a batch computation over all events would say.
"""

from __future__ import annotations

from importlib import import_module

from experiments.workloads.model import Workload

NAMES = ("average", "bigrams", "stock", "linear-road")


def load(name: str) -> Workload:
    """A workload by its name on the command line. Raises ValueError."""
    if name not in NAMES:
        raise ValueError(f"there is no workload {name!r}; there are {', '.join(NAMES)}")
    found: Workload = import_module(f"experiments.workloads.{name.replace('-', '_')}").WORKLOAD
    return found
