"""Stateful processors: Aion compared with stock Spark's ``transformWithState``, and with the floor."""

from experiments.stateful.command import stateful

__all__ = ["stateful"]
