"""The folder of an application's state server on a host, and which process is the server. Effect: files, locks.

The folder is ``$TMPDIR/aion-<uid>/<digest>``, mode 0700. It has ``socket``, ``pid``, ``lease``, ``log`` (all output of
the process), ``log.1`` (older output), and ``ended-<run>`` for each run of a query that has just ended. The process
that holds the lock of the lease is the server. The kernel frees the lock when the process ends, for whatever reason, so
a lease is never stale. Beside the folder is ``<digest>.lock``. A process locks it while it starts or removes a server.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from state_backends.format.errors import ServerError
from state_backends.server import processes
from state_backends.server.processes import Process

SOCKET, PID, LOG, OLD_LOG, LEASE = "socket", "pid", "log", "log.1", "lease"
ENDED = "ended-"
ENDED_SECONDS = 10.0  # if a query is started again within this time, its shards are still open
LOG_BYTES = 1 << 20
ELECTION_SECONDS = 90.0  # more than client.START_SECONDS


def runtime_dir(application: str) -> Path:
    """Returns the folder of an application on this host or in this container. It is short, because a socket's path must
    be.
    """
    # Containers may share /tmp, but they do not share processes. So each has its own server.
    digest = hashlib.sha256(f"{application}|{processes.space()}".encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"aion-{os.getuid()}" / digest


def private(folder: Path) -> None:
    """Raises ServerError unless this is a folder, not a link, that only this user can enter.

    A server's folder is trusted only if the folder that it is in is private, too.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ServerError(f"{folder} must be a folder, not a link, that only this user can enter (mode 0700)")


def trusted(folder: Path, timeout_s: float) -> bool:
    """Returns whether a process of this user listens on the socket of a server's folder. Sends nothing to it.

    Raises ServerError if somebody else could have put the socket there, or if another user's process listens on it.
    """
    try:
        private(folder.parent)
        private(folder)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(folder / SOCKET))
            uid = _peer(connection)
    except OSError:
        return False
    if uid != os.getuid():
        raise ServerError(f"a process of another user ({uid}) listens on {folder / SOCKET}; remove {folder}")
    return True


def _peer(connection: socket.socket) -> int:
    """Returns the user id of the process that listens at the other end."""
    if hasattr(socket, "SO_PEERCRED"):
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    else:  # macOS and BSD: LOCAL_PEERCRED of SOL_LOCAL; the structure begins with its version
        _, uid = struct.unpack("2I", connection.getsockopt(0, 1, 8))
    return int(uid)


@contextlib.contextmanager
def elected(folder: Path, timeout_s: float = ELECTION_SECONDS) -> Iterator[None]:
    """Holds the lock of a server's folder, so that only one of several workers starts a server.

    A server that ends removes the lock file. So after waiting for the lock, this checks that the locked file is still
    the one that others see. Raises ServerError if the lock does not become free in time.
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
            while not _try_lock(lock, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise ServerError(f"another process has locked {path} for {timeout_s:g} s; is it stopped?")
                time.sleep(0.02)
            if _is_open_file(path, lock.fileno()):
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
        while not _try_lock(self._file, fcntl.LOCK_EX):  # another process may be in occupant()
            if time.monotonic() > deadline:
                self._file.close()
                raise ServerError(f"another state server uses {folder}")
            time.sleep(0.01)
        self._file.truncate(0)
        self._file.write(str(processes.me()))
        self._file.flush()

    @property
    def is_valid(self) -> bool:
        """Whether the lease file is still the one that other processes find."""
        return _is_open_file(self._path, self._file.fileno())

    def close(self) -> None:
        self._file.close()


def occupant(folder: Path) -> Process | None:
    """Returns the server of a folder. None if there is none. Raises ServerError if the lease does not name its
    process.
    """
    try:
        with (folder / LEASE).open() as lease:
            if _try_lock(lease, fcntl.LOCK_SH):
                return None
            found = processes.parse(lease.read())
    except FileNotFoundError:
        return None
    if found is None:
        raise ServerError(f"a process has locked {folder / LEASE} but has not written its name into it")
    return found


def evict(folder: Path, wait_s: float = 10.0) -> None:
    """Kills the server of a folder, if there is one. Call it inside :func:`elected`. Raises ServerError if it fails."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            found = occupant(folder)
        except ServerError:  # it has just started and has not written its lease yet
            if time.monotonic() > deadline:
                raise
        else:
            if found is None:
                return
            if found.space != processes.space() or not processes.kill(found, wait_s) or time.monotonic() > deadline:
                raise ServerError(f"the state server {found.pid} in {folder} does not answer and cannot be killed")
        time.sleep(0.01)


def leave(folder: Path, lease: Lease) -> None:
    """Removes the folder of a server, unless another server uses it now."""
    with contextlib.suppress(ServerError), elected(folder, 10.0):
        if lease.is_valid:
            _remove(folder)


def trim_log(folder: Path) -> None:
    """Moves the end of a log that is too long to ``log.1``, and empties the log.

    It copies, because the process appends to the same open file until it ends.
    """
    log = folder / LOG
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_BYTES:
            with log.open("rb") as file:
                file.seek(-LOG_BYTES, os.SEEK_END)
                (folder / OLD_LOG).write_bytes(file.read(LOG_BYTES))
            os.truncate(log, 0)


def note_end(folder: Path, run: str) -> None:
    """Leaves a note for the server of a folder, if there is one, that this run of a query has ended.

    Raises ServerError if the folder belongs to another user.
    """
    with contextlib.suppress(FileNotFoundError):
        private(folder.parent)
        private(folder)
        (folder / f"{ENDED}{run}").touch(mode=0o600)


def ended(folder: Path) -> set[str]:
    """Returns the runs that ended at least ``ENDED_SECONDS`` ago. Removes their notes, so it returns each run once."""
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
        # A process that starts a server holds the lock. If the lock is free, a folder without a server is left over.
        with contextlib.suppress(ServerError), elected(folder, 0.0):
            if occupant(folder) is None:
                _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _lock_of(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.lock"


def _try_lock(file: IO[str], how: int) -> bool:
    """Locks a file without waiting. Returns whether it did."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_open_file(path: Path, fd: int) -> bool:
    """Returns whether the file at this path is the one that is open as ``fd``."""
    try:
        found, ours = path.stat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)
