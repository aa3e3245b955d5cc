"""Aion on Spark: the only package that imports pyspark."""

from aion.spark.session import configure
from aion.spark.stream import dropped, explain, panes, windowed

__all__ = ["configure", "dropped", "explain", "panes", "windowed"]
