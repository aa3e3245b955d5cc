"""Identifies processes, so that no later process with the same pid is mistaken for one. Effect: reads /proc, kills.

A process is identified by its pid, its start time, and its PID namespace (container). :func:`kill` opens a descriptor
of the process before it checks the identity, so it cannot kill another process.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import NamedTuple

import psutil

_PROC = Path("/proc")


class Process(NamedTuple):
    """``started``: clock ticks since boot, which do not change when the clock is set. ``space``: the PID namespace."""

    pid: int
    started: int
    space: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


def parse(text: str) -> Process | None:
    """Returns the inverse of ``str``. None if the text is not a process."""
    parts = text.strip().split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdecimal() and len(part) < 20 for part in parts):
        return None
    return Process(*map(int, parts))


def space() -> int:
    """Returns the PID namespace of this process. 0 on systems without namespaces."""
    try:
        return (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def find(pid: int) -> Process | None:
    """Returns the process with this pid. None if there is none, or if it is a zombie."""
    try:
        # The program's name is in parentheses, and may contain any characters.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return Process(pid, int(fields[19]), space()) if fields[0] not in "ZX" else None
    except (FileNotFoundError, ProcessLookupError):
        if _PROC.is_dir():
            return None
    try:  # not on Linux
        process = psutil.Process(pid)
        return Process(pid, int(process.create_time() * 100), 0) if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, OverflowError, ValueError):
        return None


def me() -> Process:
    found = find(os.getpid())
    assert found is not None
    return found


def is_alive(process: Process) -> bool:
    return find(process.pid) == process


def owner(pid: int) -> int | None:
    """Returns the user id of a process. None if there is no such process."""
    try:
        return psutil.Process(pid).uids().effective
    except (psutil.Error, OverflowError, ValueError):
        return None


def kill(process: Process, wait_s: float) -> bool:
    """Sends SIGKILL to exactly this process. Returns whether it ends within ``wait_s``. Kills stopped processes too."""
    if not hasattr(os, "pidfd_open"):
        if is_alive(process):
            os.kill(process.pid, signal.SIGKILL)
        return not is_alive(process)
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        # The descriptor belongs to the process that has this pid now. Check that it is the right one.
        if not is_alive(process):
            return True
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))
    except ProcessLookupError:
        return True
    finally:
        os.close(fd)
