"""Processes, told apart from others that get the same number after them. Effect: reads /proc, sends signals.

A process is known by its number, by when it was started, and by the PID namespace (container) in which the number
means it. Whoever kills holds on to the process while it looks, so that nothing else can be hit.
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
    """``started``: clock ticks since boot, which no clock that is set can change; ``space``: the PID namespace."""

    pid: int
    started: int
    space: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


def parse(text: str) -> Process | None:
    """What :class:`Process` was written as; None for anything else."""
    parts = text.strip().split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdecimal() and len(part) < 20 for part in parts):
        return None
    return Process(*map(int, parts))


def space() -> int:
    """The PID namespace of this process; 0 where there are none."""
    try:
        return (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def find(pid: int) -> Process | None:
    """The process of that number here; None if there is none, or it is over and only waits to be noticed."""
    try:
        # The name of the program is in parentheses, and may hold anything.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return Process(pid, int(fields[19]), space()) if fields[0] not in "ZX" else None
    except (FileNotFoundError, ProcessLookupError):
        if _PROC.is_dir():
            return None
    try:  # no Linux
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
    """The user that runs a process; None if there is no such process."""
    try:
        return psutil.Process(pid).uids().effective
    except (psutil.Error, OverflowError, ValueError):
        return None


def kill(process: Process, wait_s: float) -> bool:
    """SIGKILL, to exactly this process; whether it is over within ``wait_s``. A stopped one dies as well."""
    if not hasattr(os, "pidfd_open"):
        if is_alive(process):
            os.kill(process.pid, signal.SIGKILL)
        return not is_alive(process)
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        # The descriptor keeps meaning the process that had the number just now: is it the one?
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
