"""A join of two streams on Aion beside stock Spark's: its rate, and what becomes of late rows."""

from experiments.joins.command import joins

__all__ = ["joins"]
