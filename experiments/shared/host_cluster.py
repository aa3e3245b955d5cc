"""A standalone Spark cluster whose hosts are Linux network namespaces of one machine.

A host has an address, its processes reach others only over the network, and they have a folder for temporary files of
their own. The first host runs the master and the drivers, the others a worker each. Needs Linux, root and ``ip``
(Debian: iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

PORT = 7077
SPARE_MIB = 512
"""Memory of a worker beyond that of its executors."""


def is_possible() -> bool:
    """Whether this process may make hosts."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0


class Host:
    """A network namespace with one address. ``name``: the name of the namespace."""

    def __init__(self, name: str, address: str, temporary: Path) -> None:
        self.name = name
        self.address = address
        self.temporary = temporary
        temporary.mkdir(parents=True)

    def start(
        self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str] | None = None, **pipes: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a process on this host, with these variables on top. Its standard error goes to ``log``."""
        variables = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "SPARK_LOCAL_DIRS": str(self.temporary),
            "SPARK_LOCAL_IP": self.address,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])),
            **(environment or {}),
        }
        # `ip` becomes the command, so the process id is that of the command.
        words = ["ip", "netns", "exec", self.name, *command]
        return subprocess.Popen(words, env=variables, stderr=log, **{"stdout": log, **pipes})

    @property
    def processes(self) -> list[int]:
        return [int(pid) for pid in output_of("ip", "netns", "pids", self.name).split()]

    def cut(self) -> None:
        """Cuts the network."""
        output_of("ip", "-n", self.name, "link", "set", "e0", "down")

    def end(self) -> None:
        """Kills all processes."""
        while pids := self.processes:
            subprocess.run(["kill", "-9", *map(str, pids)], check=False, capture_output=True)


@dataclass(frozen=True)
class Cluster:
    """``driver``: the host of the master and the drivers. ``workers``: the hosts of the executors.

    ``cores`` and ``memory_mib``: of all executors on one host. ``environment``: of Spark's own daemons.
    """

    driver: Host
    workers: tuple[Host, ...]
    log: IO[bytes]
    cores: int
    memory_mib: int
    environment: Mapping[str, str]
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def master(self) -> str:
        return f"spark://{self.driver.address}:{PORT}"

    def start_master(self) -> None:
        options = ["--host", self.driver.address, "--port", str(PORT)]
        self._start(self.driver, "master.Master", options)

    def start_worker(self, host: Host) -> None:
        """Starts the worker of a host, or starts it again after :meth:`Host.end`."""
        folder = ["-d", str(host.temporary)]
        self._start(host, "worker.Worker", ["-c", str(self.cores), "-m", f"{self.memory_mib}M", *folder, self.master])

    def end(self) -> None:
        for host in (self.driver, *self.workers):
            host.end()
        for daemon in self._daemons.values():
            daemon.wait()

    def _start(self, host: Host, name: str, options: Sequence[str]) -> None:
        import pyspark

        if name != "master.Master":
            options = ["--host", host.address, *options]
        spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        if host.name in self._daemons:
            self._daemons[host.name].wait()
        command = [spark_class, f"org.apache.spark.deploy.{name}", *options]
        self._daemons[host.name] = host.start(command, self.log, self.environment)


@contextmanager
def cluster(
    workers: int, work: Path, *, cores: int, memory_mib: int, environment: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """Starts a cluster with its log in ``work``. On exit everything else is removed.

    ``cores`` and ``memory_mib``: of all executors on one host.
    """
    # No two runs share a name; the kernel allows 15 characters.
    tag = f"aion{os.getpid()}"
    with ExitStack() as stack:
        # Not in ``work``, which may have a long path: the path of a socket has at most 107 bytes.
        disks = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aion-", ignore_cleanup_errors=True)))
        output_of("ip", "link", "add", tag, "type", "bridge")
        stack.callback(output_of, "ip", "link", "del", tag)
        output_of("ip", "link", "set", tag, "up")
        hosts = []
        for number in range(workers + 1):
            name, wire = f"{tag}-{number}", f"{tag}v{number}"
            output_of("ip", "netns", "add", name)
            stack.callback(output_of, "ip", "netns", "del", name)
            output_of("ip", "link", "add", wire, "type", "veth", "peer", "name", "e0", "netns", name)
            # A namespace, and with it the wire, exists until its last process is reaped. So delete the wire explicitly.
            stack.callback(output_of, "ip", "link", "del", wire)
            output_of("ip", "link", "set", wire, "master", tag, "up")
            # The bridge has no address, so these addresses cannot clash with any outside.
            host = Host(name, f"10.77.0.{number + 1}", disks / f"host-{number}")
            output_of("ip", "-n", name, "addr", "add", f"{host.address}/24", "dev", "e0")
            for device in ("e0", "lo"):
                output_of("ip", "-n", name, "link", "set", device, "up")
            hosts.append(host)
        log = stack.enter_context((work / "cluster.log").open("wb"))
        made = Cluster(hosts[0], tuple(hosts[1:]), log, cores, memory_mib + SPARE_MIB, environment or {})
        stack.callback(made.end)
        made.start_master()
        for host in made.workers:
            made.start_worker(host)
        yield made


def output_of(*command: str) -> str:
    """The output of a command. Raises RuntimeError with its standard error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
