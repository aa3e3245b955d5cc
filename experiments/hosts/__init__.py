"""A standalone Spark cluster of several hosts. One host is lost, with everything on it, while a query runs."""

from experiments.hosts.command import hosts

__all__ = ["hosts"]
