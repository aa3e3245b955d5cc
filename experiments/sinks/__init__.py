"""What a table of newest results costs: ``aion.sinks.upsert`` beside the database's own bulk load of the same rows."""

from experiments.sinks.command import sinks

__all__ = ["sinks"]
