"""The free memory inside this process's heap, and how it goes back to the system. Effect: asks the C library.

Values of keys come and go in sizes of a few kilobytes. So the heap gets holes, which the C library keeps for itself:
with two million open sessions and a budget of 256 MiB, the holes of a state server took 106 MiB. Only glibc can say how
large they are. Elsewhere there are none, as far as this module knows. Nothing here raises.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import psutil

_SHARE = 16
"""Holes of less than this part of the budget stay. To give them back takes a few milliseconds, in which all wait."""


class _Info(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@functools.cache
def _library() -> Any:
    """The C library if it is glibc 2.33 or newer, or None if it is another one."""
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Info
        library.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError, TypeError):
        return None
    return library


def free_bytes() -> int:
    """Returns the bytes of the heap that nothing uses. Some of them may have gone back to the system already."""
    library = _library()
    return 0 if library is None else int(library.mallinfo2().fordblks)


def give_back() -> None:
    """Gives all whole pages that nothing uses back to the system."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


class Holes:
    """Gives the holes back when the process has grown.

    A hole that went back counts as free as before, so only the growth of the process says that there are new ones.
    """

    def __init__(self) -> None:
        self._before_bytes = 0

    def tick(self, budget_bytes: int) -> None:
        """Call it often."""
        resident_bytes = psutil.Process().memory_info().rss
        self._before_bytes = min(self._before_bytes or resident_bytes, resident_bytes)
        enough = budget_bytes // _SHARE
        if resident_bytes - self._before_bytes > enough and free_bytes() > enough:
            give_back()
            self._before_bytes = psutil.Process().memory_info().rss
