"""Temporary folders of state servers, with RocksDB's own files, beside the versions. Effect: files, locks.

A server removes its folder when it ends. A folder whose server was killed is left over, and the next server removes it.
The parent folder may be a mount that other hosts share, and this host cannot see their processes. So a folder's name
contains its host, and its server locks a file in it and touches that file now and then. A folder is left over if the
lock is free and either the folder is this host's and its process has ended, or nobody has touched the file for a day.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from pathlib import Path
from typing import IO

from state_backends.server import processes

LOCK = "lock"
ABANDONED_SECONDS = 86_400.0


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", os.uname().nodename)[:40] or "host"


def own_name() -> str:
    """Returns the name of this process's folder. It is unique over all processes and hosts."""
    return f"{_host()}-{processes.me()}"


class LiveFolder:
    """This process's folder in ``parent``. Close it to remove it. Raises OSError if it cannot be made."""

    def __init__(self, parent: Path, name: str) -> None:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = parent / name
        # No other process has this name. So a folder that has it, and is not locked, was copied from somewhere else.
        if _is_free(self.path / LOCK):
            shutil.rmtree(self.path, ignore_errors=True)
        # The folder gets its name only after its lock is held, so that no sweep removes it.
        making = parent / f".{name}"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(mode=0o700)
        self._lock = _locked(making)
        making.rename(self.path)

    def touch(self) -> None:
        """Shows that the server is alive. Call it every few hours at least. Locks a folder that was removed anew."""
        with contextlib.suppress(OSError):
            try:
                os.utime(self.path / LOCK)
            except FileNotFoundError:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock.close()
                self._lock = _locked(self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()


def _locked(folder: Path) -> IO[str]:
    """Returns the file that says that this process lives, locked."""
    lock = (folder / LOCK).open("w")
    # Some file systems have no locks. Then the process, or the time of the last touch, decides.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def sweep(parent: Path, now_s: float | None = None) -> None:
    """Removes the folders of servers that have ended. ``now_s``: seconds since the epoch."""
    now_s = time.time() if now_s is None else now_s
    for folder in parent.glob("*-*"):
        with contextlib.suppress(OSError):
            if _is_left_over(folder, now_s):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left_over(folder: Path, now_s: float) -> bool:
    host, _, process = folder.name.lstrip(".").partition("-")
    known = processes.parse(process)
    lock = folder / LOCK
    if known is not None and host == _host() and known.space == processes.space():
        # The lock matters too, because another host with the same name may share the mount.
        return not processes.is_alive(known) and _is_free(lock)
    touched_s = (lock if lock.exists() else folder).stat().st_mtime
    return now_s - touched_s > ABANDONED_SECONDS and _is_free(lock)


def _is_free(lock: Path) -> bool:
    try:
        with lock.open("r+") as file:  # NFS refuses an exclusive lock on a file that is open for reading
            _try_lock(file)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def _try_lock(file: IO[str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # this file system has no locks, so the file counts as free
        pass
