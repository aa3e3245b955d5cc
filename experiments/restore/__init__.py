"""The time to open a shard on a host that has none of it in memory: does it depend on its files, or on their bytes?"""

from experiments.restore.command import restore

__all__ = ["restore"]
