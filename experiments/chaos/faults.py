"""Real faults for the chaos experiment, only ever to its own processes.

It finds all processes from the child that the experiment started: the child's JVM and its executors, the Python
workers below them, and the state servers in the folders of the child's Spark application.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from aion.errors import AionError
from experiments.shared.tree import python_workers
from state_backends.files.names import HANDED_FOLDER, SST
from state_backends.server import processes, server_folder
from state_backends.server.client import StateClient, runtime_dir
from state_backends.server.processes import Process
from state_backends.server.server_folder import SOCKET

if TYPE_CHECKING:
    from experiments.chaos.places import Bucket
    from experiments.shared.host_cluster import Cluster

KILLS = {"server": 40, "worker": 40, "hung server": 5, "daemon": 5, "JVM": 10}
"""How many of 100 kills hit what. A hung server is stopped (SIGSTOP), and its clients then kill it. The daemon is the
process from which Spark forks its Python workers; they die with it."""

KILLS_OF_HOSTS = {"executor": 10, "host": 5}
"""More kinds, where Spark runs on a cluster. A host that is killed loses all its processes, and sometimes its disk."""

FAULTS = {"full disk": 40, "no descriptors": 15, "pause": 20, "socket gone": 15, "live folder": 20}
"""Faults between the kills that kill nothing, and their weights. A live folder is the working folder of a server, or of
one shard in it: somebody removes it."""

FAULTS_OF_BUCKETS = {"busy bucket": 25, "slow bucket": 20, "silent bucket": 10, "damaged copy": 25}
"""More of them, where state is in a bucket. A copy is a local one of a file in the bucket."""

SILENT_SECONDS = 20.0

FAULT_SHARE = 0.2

BURSTS = {1: 30, 2: 25, 3: 20, 4: 15, 5: 10}
"""How many faults follow each other closely, in how many of 100 cases. All but the first hit queries that still recover
from the one before."""

HUNG_SECONDS = 60.0
LIVE = ".live"


@dataclass(frozen=True)
class Application:
    """The processes of one life of the child. ``cluster``: where its executors are; None: in the JVM of the driver.

    ``local``: the folder below which its state servers have their working folders. ``bucket``: that of its state, if
    it is in one.
    """

    name: str
    driver: Process
    jvm: Process
    local: Path
    bucket: Bucket | None = None
    cluster: Cluster | None = None

    @property
    def places(self) -> list[Path]:
        """The folders of the state servers, one for each host with executors."""
        here = runtime_dir(self.name)
        if self.cluster is None:
            return [here]
        return [host.temporary / here.relative_to(tempfile.gettempdir()) for host in self.cluster.workers]

    def executors(self) -> list[psutil.Process]:
        """The JVMs of the executors on a cluster."""
        found = []
        for host in self.cluster.workers if self.cluster else ():
            for pid in host.processes:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    words = process.cmdline()
                    if self.name in words and any(word.endswith("CoarseGrainedExecutorBackend") for word in words):
                        found.append(process)
        return found

    def workers(self) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """Spark's Python daemons, and the workers that they forked."""
        jvms = self.executors() if self.cluster else [psutil.Process(self.jvm.pid)]
        return python_workers(process for jvm in jvms for process in _children(jvm))

    def servers(self) -> list[tuple[Process, Path]]:
        """The state servers that run, and their folders."""
        found = []
        for place in self.places:
            with contextlib.suppress(Exception):  # it is just starting
                if (server := server_folder.occupant(place)) is not None:
                    found.append((server, place))
        return found

    def server(self, rng: random.Random) -> Process | None:
        """One of the state servers."""
        found = self.servers()
        return rng.choice(found)[0] if found else None


@dataclass(frozen=True)
class Done:
    """A fault that was caused, and the process that it hit."""

    kind: str
    pid: int
    note: str = ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def kill_kind(rng: random.Random, on_hosts: bool) -> str:
    kinds = {**KILLS, **KILLS_OF_HOSTS} if on_hosts else KILLS
    return rng.choices(list(kinds), list(kinds.values()))[0]


def fault_kind(rng: random.Random, in_bucket: bool) -> str:
    kinds = {**FAULTS, **FAULTS_OF_BUCKETS} if in_bucket else FAULTS
    return rng.choices(list(kinds), list(kinds.values()))[0]


def burst(rng: random.Random) -> int:
    """How many faults follow each other now."""
    return rng.choices(list(BURSTS), list(BURSTS.values()))[0]


def wait_for_moment(
    app: Application, state: Path | None, moments: Mapping[str, int], rng: random.Random, timeout_s: float = 4.0
) -> str:
    """Waits for a random kind of moment, and returns its name.

    ``state``: the folder of the versions, or None if they are in a bucket, where nobody watches for new files.
    ``moments``: the weight of each kind. At ``any`` time; just after a child began a file of blocks that it hands over
    (``hand-over``); just after the server got blocks or values (``append``); just after a version got a new file
    (``commit``).
    """
    if state is None:
        moments = {name: weight for name, weight in moments.items() if name in ("any", "append")}
    moment = rng.choices(list(moments), list(moments.values()))[0]
    extra_s = rng.uniform(0.0, 0.02)
    if moment != "any":
        with contextlib.closing(StateClient(rng.choice(app.places), None)) as client:
            before, deadline = 1 << 62, time.monotonic() + timeout_s
            count = {"hand-over": _handed, "append": lambda _: _held_by(client), "commit": _files_of}[moment]
            while (now := count(state or app.local)) <= before:
                if time.monotonic() > deadline:
                    return "at any time"
                before = now
                time.sleep(0.002)
        time.sleep(extra_s)
    return "at any time" if moment == "any" else f"at {'an' if moment == 'append' else 'a'} {moment}"


def _held_by(client: StateClient) -> int:
    try:
        stats = client.stats()
        return int(stats["blocks"]) + int(stats["values"])
    except AionError:  # no server is running just now
        return 0


def _handed(state: Path) -> int:
    """How many files of handed-over blocks children have begun or completed and nobody has swept yet."""
    return sum(1 for _ in state.glob(f"*/*/{HANDED_FOLDER}/*"))


def _files_of(state: Path) -> int:
    """The sum over all shards of the newest file's number. Any new file makes it larger."""
    newest = 0
    for kind in ("files", "manifests"):
        for path in state.glob(f"*/*/shard-*/{kind}/*"):
            with contextlib.suppress(ValueError):
                newest += int(path.name.partition("-")[0])
    return newest


def do(kind: str, app: Application, rng: random.Random) -> Done | None:
    """Causes a fault of this kind now. None if there is no process for it."""
    actions: dict[str, Callable[[Application, random.Random], Done | None]] = {
        "server": _kill_server,
        "worker": _kill_worker,
        "daemon": _kill_daemon,
        "JVM": _kill_jvm,
        "executor": _kill_executor,
        "host": _kill_host,
        "hung server": _hang_server,
        "full disk": _fill_disk,
        "no descriptors": _use_up_descriptors,
        "pause": _pause,
        "socket gone": _remove_socket,
        "live folder": _remove_live_folder,
        "busy bucket": _refuse_requests,
        "slow bucket": _delay_requests,
        "silent bucket": _answer_nothing,
        "damaged copy": _damage_copy,
    }
    return actions[kind](app, rng)


def _kill_server(app: Application, rng: random.Random) -> Done | None:
    server = app.server(rng)
    if server is None or not processes.kill(server, 30.0):
        return None
    return Done("server", server.pid)


def _kill_worker(app: Application, rng: random.Random) -> Done | None:
    return _kill_one("worker", app.workers()[1], rng)


def _kill_daemon(app: Application, rng: random.Random) -> Done | None:
    return _kill_one("daemon", app.workers()[0], rng)


def _kill_one(kind: str, found: list[psutil.Process], rng: random.Random) -> Done | None:
    if not found:
        return None
    chosen = rng.choice(sorted(found, key=lambda process: process.pid))
    try:
        chosen.kill()  # psutil checks that the pid still belongs to that process
    except psutil.NoSuchProcess:
        return None
    return Done(kind, chosen.pid)


def _kill_jvm(app: Application, rng: random.Random) -> Done | None:
    return Done("JVM", app.jvm.pid) if processes.is_alive(app.jvm) and processes.kill(app.jvm, 30.0) else None


def _kill_executor(app: Application, rng: random.Random) -> Done | None:
    return _kill_one("executor", app.executors(), rng)


def _kill_host(app: Application, rng: random.Random) -> Done | None:
    """Kills all processes of a host at once. It comes back, in half of the cases with an empty disk."""
    executors = app.executors()
    if app.cluster is None or not executors:
        return None
    chosen = rng.choice(sorted(executors, key=lambda process: process.pid))
    host = next((host for host in app.cluster.workers if chosen.pid in host.processes), None)
    if host is None:
        return None
    host.end()
    loses_disk = rng.random() < 0.5
    if loses_disk:
        shutil.rmtree(host.temporary)
        host.temporary.mkdir()
    app.cluster.start_worker(host)
    return Done("host", chosen.pid, f"{host.address}{' with its disk' if loses_disk else ''}")


def _hang_server(app: Application, rng: random.Random) -> Done | None:
    """Stops the server. Its clients have to notice that, and to kill it."""
    server = app.server(rng)
    if server is None:
        return None
    os.kill(server.pid, signal.SIGSTOP)
    begin = time.monotonic()
    while processes.is_alive(server) and time.monotonic() < begin + HUNG_SECONDS:
        time.sleep(0.05)
    took_s = time.monotonic() - begin
    if processes.is_alive(server):
        os.kill(server.pid, signal.SIGCONT)
        return Done("hung server", server.pid, f"NOT killed by its clients within {took_s:.0f} s")
    return Done("hung server", server.pid, f"killed by its clients after {took_s:.1f} s")


def _limited(
    app: Application, rng: random.Random, kind: str, what: int, soft: int, seconds: float, note: str
) -> Done | None:
    """Sets a kernel limit on the running server for a while."""
    server = app.server(rng)
    if server is None:
        return None
    try:
        process = psutil.Process(server.pid)
        before = process.rlimit(what)
        process.rlimit(what, (soft, before[1]))
        time.sleep(seconds)
        process.rlimit(what, before)
    except psutil.Error:
        return Done(kind, server.pid, note + "; it has ended")
    return Done(kind, server.pid, note)


def _fill_disk(app: Application, rng: random.Random) -> Done | None:
    """No file may grow beyond some size: writes fail with EFBIG, much as they fail with ENOSPC on a full disk."""
    size, seconds = rng.choice([0, 200, 5_000, 20_000, 60_000]), rng.uniform(0.2, 1.5)
    note = f"files limited to {size:,} bytes for {seconds:.1f} s"
    return _limited(app, rng, "full disk", psutil.RLIMIT_FSIZE, size, seconds, note)


def _use_up_descriptors(app: Application, rng: random.Random) -> Done | None:
    """Opening anything fails with EMFILE: files, folders, connections."""
    seconds = rng.uniform(0.2, 1.0)
    return _limited(app, rng, "no descriptors", psutil.RLIMIT_NOFILE, 8, seconds, f"no file opens for {seconds:.1f} s")


def _pause(app: Application, rng: random.Random) -> Done | None:
    server = app.server(rng)
    if server is None:
        return None
    seconds = rng.uniform(0.05, 1.5)
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(server.pid, signal.SIGCONT)
    return Done("pause", server.pid, f"paused for {seconds:.1f} s")


def _remove_socket(app: Application, rng: random.Random) -> Done | None:
    found = app.servers()
    if not found:
        return None
    server, place = rng.choice(found)
    (place / SOCKET).unlink(missing_ok=True)
    return Done("socket gone", server.pid)


def _remove_live_folder(app: Application, rng: random.Random) -> Done | None:
    """Removes what a state server works with: its whole folder, or that of one shard."""
    server = app.server(rng)
    depth = rng.choice(["*", "*/[0-9]*"])
    found = [folder for folder in sorted(app.local.glob(f"**/{LIVE}/{depth}")) if folder.is_dir()]
    if server is None or not found:
        return None
    chosen = rng.choice(found)
    shutil.rmtree(chosen, ignore_errors=True)
    return Done("live folder", server.pid, "of a server" if depth == "*" else "of a shard")


def _damage_copy(app: Application, rng: random.Random) -> Done | None:
    server = app.server(rng)
    found = [path for path in sorted(app.local.glob(f"**/{LIVE}/**/*{SST}")) if path.is_file() and path.stat().st_size]
    if server is None or not found:
        return None
    chosen = rng.choice(found)
    with contextlib.suppress(FileNotFoundError):
        data = bytearray(chosen.read_bytes())
        at = rng.randrange(len(data))
        data[at] ^= 0xFF
        with chosen.open("r+b") as file:  # the same file, which RocksDB may have open
            file.write(data)
    return Done("damaged copy", server.pid, f"byte {at:,} of {chosen.name}")


def _refuse_requests(app: Application, rng: random.Random) -> Done | None:
    share, seconds = rng.choice([0.2, 0.5, 1.0]), rng.uniform(0.5, 6.0)
    return _at_bucket(app, rng, "busy bucket", "failing", seconds, share, note=f"refuses {share:.0%}")


def _delay_requests(app: Application, rng: random.Random) -> Done | None:
    wait_s, seconds = rng.uniform(0.05, 1.0), rng.uniform(2.0, 8.0)
    return _at_bucket(app, rng, "slow bucket", "slow", seconds, wait_s, note=f"each request waits {wait_s:.2f} s")


def _answer_nothing(app: Application, rng: random.Random) -> Done | None:
    return _at_bucket(app, rng, "silent bucket", "silent", SILENT_SECONDS, note="no answer")


def _at_bucket(
    app: Application, rng: random.Random, kind: str, how: str, seconds: float, *arguments: float, note: str
) -> Done | None:
    server = app.server(rng)
    if app.bucket is None or server is None:
        return None
    with getattr(app.bucket, how)(*arguments):
        time.sleep(seconds)
    return Done(kind, server.pid, f"{note} for {seconds:.1f} s")


def end(process: Process) -> None:
    """Kills a process of the experiment."""
    processes.kill(process, 30.0)
