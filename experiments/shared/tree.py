"""The processes of one cell, and their memory. Effect: reads /proc, sends signals to processes that it started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from state_backends.server.server_folder import occupant, runtime_dir

KINDS = ("jvm", "workers", "server", "driver")
_DAEMONS = ("pyspark.daemon", "aion.spark.daemon")


class Tree:
    """A process, its descendants, and the state server of its Spark application, which may outlive its parent."""

    def __init__(self, pid: int) -> None:
        self.application: str | None = None
        self._root = psutil.Process(pid)
        self._known: dict[int, psutil.Process] = {}

    def look(self) -> dict[str, int]:
        """Resident bytes by kind of process. Pages shared by several processes are divided among them."""
        for process in self._found():
            self._known.setdefault(process.pid, process)
        used = dict.fromkeys(KINDS, 0)
        for pid, process in list(self._known.items()):
            try:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    raise psutil.NoSuchProcess(pid)
                # Determine the kind every time: a launcher becomes the JVM.
                kind = kind_of(process.name(), process.cmdline(), is_root=pid == self._root.pid)
                used[kind] += resident_bytes(process)
            except psutil.Error:
                self._known.pop(pid, None)
        return used

    def end(self) -> None:
        """Kills all processes that are left."""
        with contextlib.suppress(psutil.Error):
            self.look()
        left = list(self._known.values())
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil checks that the pid still belongs to that process
        psutil.wait_procs(left, timeout=30)

    def _found(self) -> Iterable[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            yield self._root
            yield from self._root.children(recursive=True)
        if self.application is not None:
            with contextlib.suppress(Exception):  # it may be just starting or ending
                server = occupant(runtime_dir(self.application))
                if server is not None:
                    yield psutil.Process(server.pid)


def kind_of(name: str, command: Iterable[str], *, is_root: bool) -> str:
    line = " ".join(command)
    if "state_server" in line:
        return "server"
    if is_root or " -m experiments." in line:
        return "driver"
    if name.startswith("java") or Path(line.split(" ")[0]).name == "java":
        return "jvm"
    return "server" if "state_backends" in line else "workers"


def python_workers(of: Iterable[psutil.Process]) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Those of these processes that are Spark's Python daemons, and the workers that they forked."""
    daemons: list[psutil.Process] = []
    workers: list[psutil.Process] = []
    for process in of:
        with contextlib.suppress(psutil.Error):
            if _is_daemon_or_fork(process):
                parent = process.parent()
                (workers if parent is not None and _is_daemon_or_fork(parent) else daemons).append(process)
    return daemons, workers


def _is_daemon_or_fork(process: psutil.Process) -> bool:
    """A fork has the command line of its daemon."""
    return any(word in _DAEMONS for word in process.cmdline())


def resident_bytes(process: psutil.Process) -> int:
    """The proportional set size of a process; its resident set size if that cannot be read."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return int(process.memory_info().rss)


def my_environment() -> dict[str, str]:
    """The environment for a child that imports the same modules as this process."""
    root = str(Path(__file__).parent.parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
