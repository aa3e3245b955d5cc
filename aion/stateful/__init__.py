"""Spark's stateful processors (``transformWithState``) on Aion's store."""
