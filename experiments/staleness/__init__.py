"""Figure 9 of the Aion paper: how few executions keep late windows fresh, and whether fewer could."""

from experiments.staleness.command import staleness

__all__ = ["staleness"]
