"""What Aion asks of the Python worker that runs its tasks."""

from __future__ import annotations

import gc
import sys

_modules = 0


def begin_task() -> None:
    """Call this when a task begins. It makes the time between two tasks shorter.

    After each task Spark's worker looks for cycles among all objects (``gc.collect()``). Nearly all of them belong to
    modules and stay, and with the modules that Aion loads a look takes 50 ms of a processor. So Python is told not to
    look at them again, whenever more modules were loaded. What else is alive when a task begins is little. Only that
    would stay if it became garbage in a cycle.
    """
    global _modules
    if len(sys.modules) != _modules:
        gc.freeze()
        _modules = len(sys.modules)
