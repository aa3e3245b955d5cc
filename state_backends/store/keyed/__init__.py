"""Keyed values: the part of a shard that is updated and deleted by key, for Spark's stateful processors."""
