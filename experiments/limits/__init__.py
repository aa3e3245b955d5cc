"""Things that must stay small: memory of readers and workers, a commit during a prestage, requests, a version."""

from experiments.limits.command import limits

__all__ = ["limits"]
