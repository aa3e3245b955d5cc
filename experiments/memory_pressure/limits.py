"""A real limit on the memory of a process tree, by whatever this machine allows. Effect: processes, control groups.

Control groups have one manager, and what others put into them gets in its way. So one is only used where it is given:
by systemd, which is asked for a scope, or by the user, as ``cgroup:PATH`` (version 1 or 2, writable). Otherwise the
tree is watched, four times a second, and killed as a whole when two looks in a row are above its limit. In every case
the JVM has a heap limit of its own. RLIMIT_AS is not used: it limits each process and not their sum, and address space,
of which JVM and Arrow reserve many times what they use.
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
    """``prefix``: what starts the tree inside the limit. ``watched``: whether whoever watches has to enforce it."""

    kind: str
    limit_bytes: int
    prefix: tuple[str, ...] = ()
    group: Path | None = None
    watched: bool = False

    @property
    def words(self) -> str:
        return {
            "watched": "the tree's memory is watched, and the whole tree killed above the limit",
            "systemd": "a scope of systemd's (control group)",
            "cgroup": "a control group",
        }[self.kind] + "; the JVM has a heap limit besides"

    def kills(self) -> int:
        """How many processes the kernel killed for it."""
        if self.group is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                lines = [line.split() for line in (self.group / name).read_text().splitlines()]
                return next(int(line[1]) for line in lines if line[0] == "oom_kill")
        return 0


@contextmanager
def limited(how: str, limit_bytes: int, name: str) -> Iterator[Limit]:
    """The limit for one tree; a control group made for it is gone afterwards. Raises ConfigError."""
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
    """A control group below one that is the user's, with a limit and no swap beyond it. Raises ConfigError."""
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
        raise ConfigError(f"limit: {group.parent} is no control group for memory that can be used: {error}") from None


def enter(group: Path) -> tuple[str, ...]:
    """The shell moves itself into the group, and then becomes the command."""
    return ("/bin/sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group))


def systemd_scope(limit_bytes: int) -> tuple[str, ...]:
    """How to start something in a scope of its own; empty where there is no systemd that would."""
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
