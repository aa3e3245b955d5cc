"""Takes files out of the page cache, so that what is read from disk is read from disk. Effect: writes files back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)


class Evictor:
    """Evicts a folder's files in a thread of its own, whenever :meth:`wake` was called meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.found = {"times": 0, "files": 0, "cached": 0}
        self._folder, self._wake, self._ended = folder, threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="evictor", daemon=True)

    def __enter__(self) -> Evictor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join()

    def wake(self) -> None:
        self._wake.set()

    def _run(self) -> None:
        while self._wake.wait() and not self._ended:
            self._wake.clear()
            for name, count in {"times": 1, **evict(self._folder)}.items():
                self.found[name] += count


def evict(folder: Path) -> dict[str, int]:
    """Writes all files below ``folder`` to disk and drops their pages.

    Returns the number of ``files``, and how many are still ``cached``: some file systems keep them, or a process has
    them mapped.
    """
    found = {"files": 0, "cached": 0}
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # files come and go meanwhile
                file = os.open(Path(place, name), os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    if not os.fstat(file).st_size:
                        continue
                    os.fsync(file)
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                    found["files"] += 1
                    found["cached"] += is_cached(file)
                finally:
                    os.close(file)
    return found


def is_cached(file: int) -> bool:
    """Whether the page in the middle of an open file is in the page cache. It does not read the page."""
    middle = os.fstat(file).st_size // 2 // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    found = (ctypes.c_ubyte * 1)()
    with mmap.mmap(file, 1, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED, offset=middle) as mapped:
        page = np.frombuffer(mapped, np.uint8)
        failed = _LIBC.mincore(ctypes.c_void_p(page.ctypes.data), ctypes.c_size_t(1), found)
        del page
    return not failed and bool(found[0] & 1)
