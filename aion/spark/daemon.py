"""Spark's Python daemon, with what Aion's tasks need loaded, for ``spark.python.daemon.module`` on a cluster."""

from __future__ import annotations

from pyspark.daemon import manager

from aion.spark.tasks.preload import load

if __name__ == "__main__":
    load()
    manager()
