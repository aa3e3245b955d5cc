"""The ingest rate of Aion, with partials and with events kept, compared with stock Spark."""

from experiments.ingest.command import ingest

__all__ = ["ingest"]
