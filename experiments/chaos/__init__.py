"""Kill processes and cause faults at random moments of real queries, and check that not one row differs."""

from experiments.chaos.command import chaos

__all__ = ["chaos"]
