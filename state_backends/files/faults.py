"""Turns errors of a disk into DiskError, which names the folder and the cause."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from state_backends.format.errors import AionError, DiskError

_HINTS = {
    errno.ENOSPC: "make room on the disk, and it continues",
    errno.EDQUOT: "the user's quota is used up; make room, and it continues",
    errno.EROFS: "the filesystem is read-only; mount it writable, or set state.dir to another one",
    errno.EACCES: "give this user the right to write there, or set state.dir to another folder",
    errno.EPERM: "give this user the right to write there, or set state.dir to another folder",
    errno.ENOENT: "the folder was removed, or its disk is not mounted: bring it back, and start the query again",
    errno.ENOTDIR: "a file is where a folder must be: move it away, or set state.dir to another folder",
    errno.EEXIST: "a file is where a folder must be: move it away, or set state.dir to another folder",
    errno.EIO: "the disk is failing: see the log of the system, and set state.dir to a copy on another disk",
    errno.ESTALE: "the network disk was mounted anew: start the executors again",
    errno.ENAMETOOLONG: "set state.dir to a folder with a shorter path",
    errno.EFBIG: "files must not be that large: see ulimit -f",
    errno.EMFILE: "too many files are open: see ulimit -n",
}

_OTHERWISE = "nothing that was committed is lost: mend the disk, and start the query again from its checkpoint"


@contextmanager
def disk_errors(doing: str, folder: Path) -> Iterator[None]:
    """Turns errors of the system and of RocksDB into DiskError. ``doing``: for the message, like "writing state"."""
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
    """Returns whether an error comes from RocksDB: rocksdict raises plain Exceptions."""
    return type(error) is Exception


def is_rocksdb_io(error: BaseException) -> bool:
    """Returns whether RocksDB failed to do I/O. Its other errors say that the data is wrong."""
    return from_rocksdb(error) and str(error).startswith("IO error")


def is_missing(error: DiskError) -> bool:
    """Returns whether the cause is that a file or folder does not exist."""
    return isinstance(error.__cause__, FileNotFoundError) or os.strerror(errno.ENOENT) in str(error)


def disk_error(doing: str, folder: Path, cause: BaseException) -> DiskError:
    return DiskError(f"{doing} in {folder} failed: {cause} ({_hint(cause)})")


def _hint(cause: BaseException) -> str:
    if isinstance(cause, OSError) and cause.errno is not None:
        return _HINTS.get(cause.errno, _OTHERWISE)
    text = str(cause)
    return next((hint for number, hint in _HINTS.items() if os.strerror(number) in text), _OTHERWISE)
