"""The cost of the tiered store compared with memory and with a plain file, without Spark."""

from experiments.store.command import store

__all__ = ["store"]
