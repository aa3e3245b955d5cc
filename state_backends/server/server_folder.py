"""The folder of an application's state server on a host, and which process is the server. Effect: files, locks.

``/tmp/aion-<user>/<digest>``, mode 0700, has ``socket``, ``pid``, ``lease``, ``log`` (all output of the process),
``log.1`` (its older part), and ``ended-<run>`` for a run of a query that has just ended. The process that holds the
lock of the lease is the server. The kernel frees the lock when the process ends, however it ends, so a lease cannot be
stale. Beside the folder lies ``<digest>.lock``; a process holds it while it starts or removes a server.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from aion.errors import ServerError
from state_backends.server import processes
from state_backends.server.processes import Process

SOCKET, PID, LOG, OLD_LOG, LEASE = "socket", "pid", "log", "log.1", "lease"
ENDED = "ended-"
ENDED_SECONDS = 10.0  # a query that is started again at once finds its shards as it left them
LOG_BYTES = 1 << 20
ELECTION_SECONDS = 90.0  # longer than a server may take to start, see the client


def runtime_dir(application: str) -> Path:
    """The folder of an application on this host or in this container. A socket's path is limited, so it is short."""
    # Containers may share /tmp, but not processes. So each has a server of its own.
    digest = hashlib.sha256(f"{application}|{processes.space()}".encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"aion-{os.getuid()}" / digest


def private(folder: Path) -> None:
    """Raises ServerError unless this is a folder that only this user can enter, and no link."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ServerError(f"{folder} must be a folder of this user alone (mode 0700); it is not")


@contextlib.contextmanager
def elected(folder: Path, timeout_s: float = ELECTION_SECONDS) -> Iterator[None]:
    """Holds the lock of a server's folder. So if several workers want to start a server, one does.

    A server that ends removes the lock file. So after waiting for the lock, this checks that the locked file is still
    the one that others see. Raises ServerError if the lock is not free in time.
    """
    path = _lock_of(folder)
    deadline = time.monotonic() + timeout_s
    while True:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private(folder.parent)
        try:
            lock = path.open("a+")
        except FileNotFoundError:
            continue
        with lock:
            while not _locks(lock, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise ServerError(f"somebody else has held {path} for {timeout_s:g} s; is that process stopped?")
                time.sleep(0.02)
            if _is(path, lock.fileno()):
                yield
                return


class Lease:
    """The right to be the server of a folder, until this process ends or calls :meth:`close`.

    Raises ServerError if another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEASE
        self._file = self._path.open("a+")
        deadline = time.monotonic() + 2.0
        while not _locks(self._file, fcntl.LOCK_EX):  # occupant() of another process may hold it for a moment
            if time.monotonic() > deadline:
                self._file.close()
                raise ServerError(f"another state server lives in {folder}")
            time.sleep(0.01)
        self._file.truncate(0)
        self._file.write(str(processes.me()))
        self._file.flush()

    @property
    def holds(self) -> bool:
        """Whether others still find this folder."""
        return _is(self._path, self._file.fileno())

    def close(self) -> None:
        self._file.close()


def occupant(folder: Path) -> Process | None:
    """The server of a folder; None if there is none. Raises ServerError if the lease names no process."""
    try:
        with (folder / LEASE).open() as lease:
            if _locks(lease, fcntl.LOCK_SH):
                return None
            found = processes.parse(lease.read())
    except FileNotFoundError:
        return None
    if found is None:
        raise ServerError(f"somebody holds {folder / LEASE} and does not say who")
    return found


def evict(folder: Path, wait_s: float = 10.0) -> None:
    """Kills the server of a folder, if there is one. Call it :func:`elected`. Raises ServerError if it cannot."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            found = occupant(folder)
        except ServerError:  # it has just started and not written its lease yet
            if time.monotonic() > deadline:
                raise
        else:
            if found is None:
                return
            if found.space != processes.space() or not processes.kill(found, wait_s) or time.monotonic() > deadline:
                raise ServerError(f"the state server {found.pid} in {folder} does not answer and cannot be ended")
        time.sleep(0.01)


def leave(folder: Path, lease: Lease) -> None:
    """Removes the folder of a server, unless another server uses it now."""
    with contextlib.suppress(ServerError), elected(folder, 10.0):
        if lease.holds:
            _remove(folder)


def bound_log(folder: Path) -> None:
    """Moves a log that has become long to the older one, which it replaces.

    It copies: everything that writes to the log appends to the same open file until the process ends.
    """
    log = folder / LOG
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_BYTES:
            with log.open("rb") as file:
                file.seek(-LOG_BYTES, os.SEEK_END)
                (folder / OLD_LOG).write_bytes(file.read(LOG_BYTES))
            os.truncate(log, 0)


def note_end(folder: Path, run: str) -> None:
    """Lets the server of a folder, if there is one, know that this run of a query has ended.

    Raises ServerError if the folder is another user's.
    """
    with contextlib.suppress(FileNotFoundError):
        private(folder)
        (folder / f"{ENDED}{run}").touch(mode=0o600)


def ended(folder: Path) -> set[str]:
    """The runs that ended some seconds ago. Each is named once."""
    found = set()
    for note in folder.glob(f"{ENDED}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - note.stat().st_mtime >= ENDED_SECONDS:
                note.unlink()
                found.add(note.name.removeprefix(ENDED))
    return found


def sweep(parent: Path) -> None:
    """Removes the folders of servers that were killed and not started again."""
    for lock in parent.glob("*.lock"):
        folder = lock.with_suffix("")
        # A process that starts a server holds the lock. Otherwise a folder without a server is left over.
        with contextlib.suppress(ServerError), elected(folder, 0.0):
            if occupant(folder) is None and not _has_an_older_server(folder):
                _remove(folder)


def _has_an_older_server(folder: Path) -> bool:
    """Whether a server of a version without leases may use the folder."""
    try:
        return not (folder / LEASE).exists() and processes.find(int((folder / PID).read_text())) is not None
    except (FileNotFoundError, ValueError):
        return False


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _lock_of(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.lock"


def _locks(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, fd: int) -> bool:
    try:
        found, ours = path.stat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)
