"""What Aion asks of the Python worker that runs its tasks."""

from __future__ import annotations

import gc
import sys

_modules = 0


def begin_task() -> None:
    """Call this when a task begins. It makes the time between two tasks shorter.

    After each task Spark's worker looks for cycles among all objects (``gc.collect()``). Nearly all of them belong to
    modules and stay, and with the modules that Aion loads a look takes 25 to 40 ms of a processor. So a task
    that finds more modules than the one before tells Python to leave out all objects that exist at that moment. Those
    that belong to no module are few; only they would stay if they became garbage in a cycle.
    """
    global _modules
    if len(sys.modules) != _modules:
        gc.freeze()
        _modules = len(sys.modules)
