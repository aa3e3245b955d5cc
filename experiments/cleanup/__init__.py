"""Predictive cleanup, tested on streams whose true lateness is known and on real flights."""

from experiments.cleanup.command import cleanup

__all__ = ["cleanup"]
