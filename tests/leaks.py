"""What a test leaves behind: threads, processes, open files, temporary files. Linux: reads /proc."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from aion.errors import ServerError
from state_backends.server import server_folder

PATIENCE = 10.0  # seconds for what is ending to end


@contextmanager
def nothing_is_left_behind(folders: Sequence[Path], open_under: Sequence[Path]) -> Iterator[None]:
    """AssertionError that names what was not there before: threads, child processes, what lies in ``folders``, and
    files anywhere below ``open_under`` that are still open. What is ending has ``PATIENCE`` to end."""
    looks: dict[str, Callable[[], dict[Hashable, str]]] = {
        "thread": threads,
        "process": children,
        "open file": lambda: open_files(open_under),
        "temporary file": lambda: entries(folders),
    }
    before = {what: look() for what, look in looks.items()}
    yield
    for what, look in looks.items():
        left = _left(look, before[what])
        assert not left, f"outlives the test: {what} {', '.join(sorted(left))}"


def _left(look: Callable[[], dict[Hashable, str]], before: dict[Hashable, str]) -> list[str]:
    deadline = time.monotonic() + PATIENCE
    collected = False
    while True:
        left = [name for key, name in look().items() if key not in before]
        if not left or time.monotonic() > deadline:
            return left
        if not collected:
            collected = True
            gc.collect()  # what only a cycle holds is not leaked
        time.sleep(0.01)


def threads() -> dict[Hashable, str]:
    """All but those of pyspark, which serve a JVM for as long as this process lives, and of an S3 server for tests."""
    others = ("py4j", "pyspark", "socketserver", "werkzeug")
    return {t: t.name for t in threading.enumerate() if not _module(t).startswith(others)}


def _module(thread: threading.Thread) -> str:
    target = getattr(thread, "_target", None)  # it has none when it ends, or if its class has a run() of its own
    owner = getattr(target, "__self__", target)
    return str(getattr(owner, "__module__", "")) if target is not None else type(thread).__module__


def children() -> dict[Hashable, str]:
    """Processes that this one started, and that run; but for pyspark's JVM."""
    found: dict[Hashable, str] = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for pid in (task / "children").read_text().split():
                with suppress(psutil.Error):
                    process = psutil.Process(int(pid))
                    if process.status() != psutil.STATUS_ZOMBIE and not process.name().startswith("java"):
                        found[pid] = f"{pid} ({' '.join(process.cmdline())[:200]})"
    return found


def open_files(under: Sequence[Path]) -> dict[Hashable, str]:
    found: dict[Hashable, str] = {}
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(fd.readlink())
            if any(target.startswith(f"{folder}/") for folder in under):
                found[fd, target] = target
    return found


def entries(folders: Sequence[Path]) -> dict[Hashable, str]:
    return {path: str(path) for folder in folders for path in folder.iterdir()}


def descendants(mark: str) -> dict[Hashable, str]:
    """Running processes, but for this one, that inherited an environment with ``mark`` ("NAME=value") in it."""
    name, _, value = mark.partition("=")
    found: dict[Hashable, str] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found[process.pid] = f"{process.pid} ({' '.join(process.cmdline())[:200]})"
    return found


def wait_for_the_end_of(mark: str) -> list[str]:
    """What of :func:`descendants` does not end."""
    return _left(lambda: descendants(mark), {})


def wait_for_the_servers_in(folder: Path) -> list[str]:
    """State servers that do not end: what they inherit is chosen, and no mark is in it."""

    def serving() -> dict[Hashable, str]:
        found: dict[Hashable, str] = {}
        for lease in folder.glob(f"*/{server_folder.LEASE}"):
            with suppress(ServerError):
                if (server := server_folder.occupant(lease.parent)) is not None:
                    found[server] = f"{server.pid} (the state server in {lease.parent})"
        return found

    return _left(serving, {})
