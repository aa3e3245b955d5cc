"""Versions of a shard: what one consists of, who may still need it, and what may go."""
