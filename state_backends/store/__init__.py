"""Stores the blocks of a shard, in memory and on disk, and moves them between the two."""
