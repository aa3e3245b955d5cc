"""The cost of windows of keys by how many are open: a small batch, a restart, and a batch that touches all."""

from experiments.sessions.command import sessions

__all__ = ["sessions"]
