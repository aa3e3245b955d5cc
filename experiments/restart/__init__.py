"""The time to the first pane after a restart of a query: with a large state, and with nearly none."""

from experiments.restart.command import restart

__all__ = ["restart"]
