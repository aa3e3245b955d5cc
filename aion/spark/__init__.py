"""Aion on Spark: the only package that imports pyspark."""

from aion.spark.configure import configure
from aion.spark.windowed import dropped, panes, windowed

__all__ = ["configure", "dropped", "panes", "windowed"]
