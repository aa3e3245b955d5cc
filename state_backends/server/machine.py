"""The memory of the machine or the container, and how much of it is in use. Effect: reads /proc and /sys.

A process is in a tree of control groups, and each group may have a limit. This reads cgroup v1, v2, and the hybrid
form. ``root``: the folder with ``proc`` and ``sys``, for tests. A file that cannot be read counts as missing. Nothing
here raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class _Files(NamedTuple):
    """The names of files in one version of cgroups."""

    limit: str
    used: str
    inactive: str  # a line of memory.stat


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")
_MOUNTS = {_V1: ("sys/fs/cgroup/memory",), _V2: ("sys/fs/cgroup", "sys/fs/cgroup/unified")}


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Returns the most that this process may use: the smallest limit of its control groups, or the machine's memory."""
    machine_bytes = int(psutil.virtual_memory().total)
    limits = (_number(group / files.limit) for group, files in _groups(root))
    return min([machine_bytes, *(limit for limit in limits if limit)])


def memory_share_used(root: Path = Path("/")) -> float:
    """Returns the share of memory in use, 0 to 1: of the fullest control group with a limit, otherwise of the machine.

    File pages that have not been used for long (``inactive_file``) do not count, because the kernel frees them before
    it kills a process.
    """
    memory = psutil.virtual_memory()
    shares = []
    for group, files in _groups(root):
        limit_bytes, used_bytes = _number(group / files.limit), _number(group / files.used)
        # A limit above the machine's memory means "no limit": cgroup v1 has no other way to say that.
        if limit_bytes and used_bytes is not None and limit_bytes <= memory.total:
            used_bytes -= _stat(group / "memory.stat", files.inactive)
            shares.append(min(1.0, max(0, used_bytes) / limit_bytes))
    return max(shares, default=float(memory.percent) / 100)


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yields the control groups of this process, innermost first, for each cgroup version."""
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
        # In a container the path may be that of the host. Then only the mounted folder itself is this process's group.
        parts = [part for part in paths[files].split("/") if part]
        if ".." in parts:
            parts = []
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield root.joinpath(mount, *parts[:depth]), files


def _number(file: Path) -> int | None:
    """Returns the number in a file. None if the file has "max" or cannot be read."""
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
