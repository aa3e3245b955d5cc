"""What the machine, or the container, has of memory, and how much of it is in use. Effect: reads /proc and /sys.

A process lies in a tree of control groups, each of which may have a limit of its own: cgroup v2, its hybrid form,
and v1. ``root`` is where ``proc`` and ``sys`` are, for tests. What cannot be read counts as not there: nothing here
raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class _Files(NamedTuple):
    """What one version of cgroups calls things."""

    limit: str
    used: str
    inactive: str  # a line of memory.stat


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")
_MOUNTS = {_V1: ("sys/fs/cgroup/memory",), _V2: ("sys/fs/cgroup", "sys/fs/cgroup/unified")}


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """What this process may use at most: the smallest limit of its control groups, or the machine's memory."""
    machine_bytes = int(psutil.virtual_memory().total)
    limits = (_number(group / files.limit) for group, files in _groups(root))
    return min([machine_bytes, *(limit for limit in limits if limit)])


def memory_share_used(root: Path = Path("/")) -> float:
    """How full memory is, 0 to 1: that of the fullest control group with a limit, or else of the machine.

    File pages that were not used for long (``inactive_file``) are given back by the kernel before anything is
    killed: they do not count.
    """
    memory = psutil.virtual_memory()
    shares = []
    for group, files in _groups(root):
        limit_bytes, used_bytes = _number(group / files.limit), _number(group / files.used)
        # A limit beyond the machine's memory limits nothing: that is how v1 says "none".
        if limit_bytes and used_bytes is not None and limit_bytes <= memory.total:
            used_bytes -= _stat(group / "memory.stat", files.inactive)
            shares.append(min(1.0, max(0, used_bytes) / limit_bytes))
    return max(shares, default=float(memory.percent) / 100)


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The control groups of this process, the innermost first, in every version that is mounted."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        lines = []
    paths = {_V1: "/", _V2: "/"}
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[_V2] = path
        elif "memory" in controllers.split(","):
            paths[_V1] = path
    for files, mounts in _MOUNTS.items():
        # In a container the path may be the host's, and only the top of what is mounted is ours.
        parts = [part for part in paths[files].split("/") if part]
        if ".." in parts:
            parts = []
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield root.joinpath(mount, *parts[:depth]), files


def _number(file: Path) -> int | None:
    """The number in a file; None for "max", and if there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _stat(file: Path, name: str) -> int:
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        return next(int(line[1]) for line in lines if len(line) == 2 and line[0] == name)
    except (OSError, ValueError, StopIteration):
        return 0
