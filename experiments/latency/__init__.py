"""The time of a small batch: what a batch costs however few events it has, Aion beside stock Spark."""

from experiments.latency.command import latency

__all__ = ["latency"]
