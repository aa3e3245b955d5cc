"""How complete is a row? What `completeness=True` says, against the truth: simulated delays, and real flights."""

from experiments.completeness.command import completeness

__all__ = ["completeness"]
