"""Planned executions with prestaging: how much late executions find in memory, and how long they wait for disk."""

from experiments.planned.command import planned

__all__ = ["planned"]
