"""The blocks of a shard: in memory, on disk, or on the way between the two."""
