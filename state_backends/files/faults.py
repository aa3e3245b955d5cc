"""Errors of a disk under one name: DiskError, with the folder and the cause."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aion.errors import AionError, DiskError

_HINTS = {
    errno.ENOSPC: "make room, and it goes on",
    errno.EDQUOT: "the user's quota is used up; make room, and it goes on",
    errno.EROFS: "the filesystem is read-only; mount it writable, or set state.dir to another one",
    errno.EACCES: "give this user the right to write there, or set state.dir to another folder",
    errno.EPERM: "give this user the right to write there, or set state.dir to another folder",
    errno.EFBIG: "files may not be as large as that: see ulimit -f",
    errno.EMFILE: "too many files are open: see ulimit -n",
}


@contextmanager
def disk_errors(doing: str, folder: Path) -> Iterator[None]:
    """Turns what the system or RocksDB raises inside into DiskError. ``doing``: for example "writing state"."""
    try:
        yield
    except AionError:
        raise
    except OSError as error:
        raise disk_error(doing, folder, error) from error
    except Exception as error:
        if not from_rocksdb(error):
            raise
        raise disk_error(doing, folder, error) from error


def from_rocksdb(error: BaseException) -> bool:
    """Whether an error comes from RocksDB: rocksdict raises plain Exceptions."""
    return type(error) is Exception


def is_rocksdb_io(error: BaseException) -> bool:
    """Whether RocksDB could not do I/O. Otherwise it refused what it read."""
    return from_rocksdb(error) and str(error).startswith("IO error")


def disk_error(doing: str, folder: Path, cause: BaseException) -> DiskError:
    hint = _hint(cause)
    return DiskError(f"{doing} in {folder} failed: {cause}" + (f" ({hint})" if hint else ""))


def _hint(cause: BaseException) -> str | None:
    if isinstance(cause, OSError) and cause.errno is not None:
        return _HINTS.get(cause.errno)
    text = str(cause)
    return next((hint for number, hint in _HINTS.items() if os.strerror(number) in text), None)
