"""What Aion asks of the Python worker that runs its tasks."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from aion.errors import AionError, ApplyError, TransformError

_FOLDERS = tuple(str(Path(__file__).parents[3] / package) for package in ("aion", "state_backends", "policies"))
_DAEMON = str(Path("pyspark") / "daemon.py")
_FIRST_CALLS, _LAST_CALLS = 3, 3
_modules = 0
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
"""Gives back the C library's free memory. It is None if the library has no such function."""


def begin_task() -> None:
    """Call this when a task begins. It makes the time between two tasks shorter, and the errors of tasks.

    After each task Spark's worker looks for cycles among all objects (``gc.collect()``). Nearly all of them belong to
    modules and stay, and with the modules that Aion loads a look takes 25 to 40 ms of a processor. So a task
    that finds more modules than the one before tells Python to leave out all objects that exist at that moment. Those
    that belong to no module are few; only they would stay if they became garbage in a cycle.
    """
    global _modules
    if len(sys.modules) != _modules:
        _report_briefly()
        gc.freeze()
        _modules = len(sys.modules)
    if _give_back not in gc.callbacks:
        gc.callbacks.append(_give_back)


def _give_back(phase: str, _: Any) -> None:
    """Gives back free memory after a task: a worker waits for the next one, which may go to another worker.

    Arrow and the C library keep what they free. So a worker is as large as its largest task, for as long as the query
    runs, and Spark has more workers than tasks at a time. Spark's daemon looks for cycles when a task is over and
    everything it held is free. Other looks are in the middle of a task, which would ask for the memory again.
    """
    caller = sys._getframe().f_back  # it is None when Python ends
    if phase == "stop" and caller is not None and caller.f_code.co_filename.endswith(_DAEMON):
        pa.default_memory_pool().release_unused()
        if _trim is not None:
            _trim(0)


def _report_briefly() -> None:
    """Makes Spark's worker report an error of Aion by its message, without the calls inside Spark and Aion.

    All other errors are reported as before. Spark's worker is a module, or the program itself if there is no daemon.
    """
    for name in ("pyspark.worker", "__main__"):
        stock = getattr(sys.modules.get(name), "handle_worker_exception", None)
        if stock is not None and not hasattr(stock, "__wrapped__"):
            sys.modules[name].handle_worker_exception = _brief(stock)  # type: ignore[attr-defined]


def _brief(stock: Callable[..., None]) -> Callable[..., None]:
    @wraps(stock)
    def handle_worker_exception(error: BaseException, outfile: IO[bytes], hide_traceback: bool | None = None) -> None:
        if isinstance(error, AionError):
            hide_traceback = True
            if calls := users_calls(error):
                error.add_note(calls)
        stock(error, outfile, hide_traceback)

    return handle_worker_exception


def users_calls(error: AionError) -> str:
    """Returns the traceback of what the user's function raised, without Aion's calls. Empty if there is none.

    Only the first and last calls of many are in it.
    """
    cause = error.__cause__
    if cause is None or not isinstance(error, ApplyError | TransformError):
        return ""
    calls: list[Any] = [
        # Without columns, so that a call takes two lines.
        traceback.FrameSummary(call.filename, call.lineno, call.name, line=call.line)
        for call in traceback.extract_tb(cause.__traceback__)
        if not call.filename.startswith(_FOLDERS)
    ]
    lines = traceback.format_list(calls)
    if len(lines) > _FIRST_CALLS + _LAST_CALLS:
        lines[_FIRST_CALLS:-_LAST_CALLS] = [f"  ... {len(lines) - _FIRST_CALLS - _LAST_CALLS} more calls\n"]
    return "".join(["Traceback (most recent call last):\n", *lines]).rstrip() if lines else ""
