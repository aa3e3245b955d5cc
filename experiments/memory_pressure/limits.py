"""A real limit on the memory of a process tree, by the best means on this machine. Effect: processes, control groups.

Control groups have a single manager, which others must not interfere with. So a control group is used only if systemd
provides it (as a scope), or the user (as ``cgroup:PATH``, version 1 or 2, writable). Otherwise the tree's memory is
sampled four times a second, and the whole tree is killed when two samples in a row are above the limit. In all cases
the JVM also has a heap limit. RLIMIT_AS is not used: it limits each process, not their sum, and it limits address
space, and the JVM and Arrow reserve many times what they use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aion.errors import ConfigError

PROBE_S = 10.0


@dataclass(frozen=True)
class Limit:
    """``prefix``: the command that starts the tree inside the limit. ``watched``: the sweep itself enforces it."""

    kind: str
    limit_bytes: int
    prefix: tuple[str, ...] = ()
    group: Path | None = None
    watched: bool = False

    @property
    def words(self) -> str:
        return {
            "watched": "sampling the tree's memory, and killing the whole tree above the limit",
            "systemd": "a systemd scope (control group)",
            "cgroup": "a control group",
        }[self.kind] + "; the JVM also has a heap limit"

    def kills(self) -> int:
        """How many processes the kernel has killed because of the limit."""
        if self.group is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                lines = [line.split() for line in (self.group / name).read_text().splitlines()]
                return next(int(line[1]) for line in lines if line[0] == "oom_kill")
        return 0


@contextmanager
def limited(how: str, limit_bytes: int, name: str) -> Iterator[Limit]:
    """The limit for one tree. Removes its control group afterwards, if it made one. Raises ConfigError."""
    if how.startswith("cgroup:"):
        group = Path(how.removeprefix("cgroup:")) / f"aion-{os.getpid()}-{name}"
        make_group(group, limit_bytes)
        try:
            yield Limit("cgroup", limit_bytes, enter(group), group)
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    elif how == "auto" and (scope := systemd_scope(limit_bytes)):
        yield Limit("systemd", limit_bytes, scope)
    elif how in ("auto", "watched"):
        yield Limit("watched", limit_bytes, watched=True)
    else:
        raise ConfigError(f"limit: {how!r}; write auto, watched, or cgroup:PATH")


def make_group(group: Path, limit_bytes: int) -> None:
    """Makes a control group below the user's, with a memory limit and no swap. Raises ConfigError."""
    try:
        group.mkdir()
        if (group / "memory.max").exists() or not (group / "memory.limit_in_bytes").exists():
            (group / "memory.max").write_text(str(limit_bytes))
            with contextlib.suppress(OSError):
                (group / "memory.swap.max").write_text("0")
            with contextlib.suppress(OSError):
                (group / "memory.oom.group").write_text("1")
        else:
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
            with contextlib.suppress(OSError):
                (group / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        raise ConfigError(f"limit: cannot use {group.parent} as a control group for memory: {error}") from None


def enter(group: Path) -> tuple[str, ...]:
    """A command prefix: a shell that moves itself into the group, then becomes the command."""
    return ("/bin/sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group))


def systemd_scope(limit_bytes: int) -> tuple[str, ...]:
    """A command prefix that starts something in a systemd scope; empty if that does not work here."""
    if shutil.which("systemd-run") is None:
        return ()
    user = () if os.geteuid() == 0 else ("--user",)
    limits = ("-p", f"MemoryMax={limit_bytes}", "-p", "MemorySwapMax=0")
    command = ("systemd-run", *user, "--scope", "--quiet", "--collect", *limits)
    return command if _works((*command, "true")) else ()


def _works(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=PROBE_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
