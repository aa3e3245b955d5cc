"""Many windows over one stream, and sessions: Aion and stock Spark's ``window()`` and ``session_window()``."""

from experiments.windows.command import windows

__all__ = ["windows"]
