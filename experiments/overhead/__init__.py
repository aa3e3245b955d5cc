"""The cost of versions and recovery: the ingest queries with normal commits, and with commits that do nothing."""

from experiments.overhead.command import overhead

__all__ = ["overhead"]
