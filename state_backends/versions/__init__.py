"""Versions of a shard: what each consists of, how one is opened and committed, and when it is deleted."""
