"""Gives the disk of a part of a file back: the part becomes a hole, and the file keeps its size. Effect: the disk."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from uuid import uuid4

from state_backends.files.names import PART

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_PROBE_BYTES = 1 << 18  # more than a block of any usual file system
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def punch(fd: int, begin: int, end: int) -> None:
    """Makes a hole. Raises OSError, also where the system or the file system has no holes."""
    if _fallocate is None:
        raise OSError(0, "this system cannot make holes in files")
    if _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, begin, end - begin):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def can_punch(folder: Path) -> bool:
    """Whether the file system of a folder gives disk back for a hole. Writes a small file to find out."""
    probe = folder / f"{uuid4().hex}{PART}"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.pwrite(fd, b"\1" * _PROBE_BYTES, 0)
            os.fsync(fd)  # otherwise some file systems have given it no disk yet
            before = os.fstat(fd).st_blocks
            punch(fd, 0, _PROBE_BYTES)
            return os.fstat(fd).st_blocks < before and not any(os.pread(fd, _PROBE_BYTES, 0))
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
