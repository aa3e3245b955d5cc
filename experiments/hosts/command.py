"""A standalone Spark cluster of several hosts. One host is lost, with everything on it, while a query runs.

The hosts are network namespaces (``host_cluster``). All share one folder, as with NFS, which holds the events, Spark's
checkpoint and Aion's state. A host is lost by cutting its network and killing all its processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.hosts.query import NOBODY, Request
from experiments.shared.bench import wide_console
from experiments.shared.host_cluster import Cluster, Host, cluster, is_possible

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = ("aion", "pyspark", "pyarrow", "rocksdict")
EXECUTOR_MIB = 1024
KEYS = 7
SECONDS_OF_A_BATCH = 30
START_S = 1_700_000_000
TIMEOUT_S = 900.0
# How long Spark waits for a silent executor before it gives it up. Spark's default is two minutes.
SILENCE_S = 60


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one run of the experiment."""

    hosts: int
    batches: int
    events: int
    lose_after: int
    seed: int


def hosts(
    hosts: Annotated[
        int, typer.Option(min=2, max=8, help="Hosts with an executor; master and driver have another host.")
    ] = 2,
    batches: Annotated[int, typer.Option(min=4, help="Files of events, one for each batch.")] = 8,
    events: Annotated[int, typer.Option(min=10, help="Events in a file.")] = 300,
    lose_after: Annotated[int, typer.Option(min=0, help="The batch after which the first host is lost.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the events.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Folder for results, and for the hosts' shared folder.", file_okay=False)
    ] = Path("out/hosts"),
) -> None:
    """Lose one host of a cluster while a query runs, and check that all windows are still right.

    Needs Linux, root and `ip` (Debian: iproute2) for network namespaces. Exits with 1 if windows differ.
    """
    # Here, not above: `aion --help` imports this module and needs none of it.
    from experiments.shared import bench

    if not is_possible():
        raise typer.BadParameter("hosts are network namespaces: this needs Linux, root, and the command `ip`")
    if lose_after >= batches - 1:
        raise typer.BadParameter(f"--lose-after {lose_after}: no batch comes after that; there are {batches} batches")
    settings = Settings(hosts, batches, events, lose_after, seed)
    console = wide_console()
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    try:
        write_events(settings, work / "in")
        with cluster(settings.hosts, work, cores=1, memory_mib=EXECUTOR_MIB) as places:
            found = run(settings, work, places, console)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    record = {
        "experiment": "hosts",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
        **found,
    }
    bench.write_json(out / "hosts.json", record)
    differences = found["differences"]
    console.print(
        f"{found['panes']:,} windows, {len(differences)} differences, {found['dropped']} events dropped; "
        f"one of {settings.hosts} hosts lost after batch {settings.lose_after}, the next batch after "
        f"{found['lost_s']:.1f} s (it takes Spark up to {SILENCE_S} s to notice)",
        highlight=False,
    )
    console.print(f"written: {out / 'hosts.json'}", highlight=False)
    if differences or found["dropped"]:
        raise typer.Exit(1)


def write_events(settings: Settings, folder: Path) -> None:
    """Writes files of 30 seconds each. A fifth of the events come up to a minute late."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    draw = np.random.default_rng(settings.seed)
    for file in range(settings.batches):
        late = np.where(draw.random(settings.events) < 0.2, draw.integers(0, 60, settings.events), 0)
        begin = START_S + SECONDS_OF_A_BATCH * file
        seconds = begin + draw.integers(0, SECONDS_OF_A_BATCH, settings.events) - late
        keys = draw.integers(0, KEYS, settings.events)
        if file == settings.batches - 1:
            seconds, keys = np.append(seconds, begin + 3600), np.append(keys, NOBODY)
        path = folder / f"{file:06d}.parquet"
        pq.write_table(pa.table({"ts": pa.array(seconds * 1_000_000, pa.timestamp("us", "UTC")), "k": keys}), path)
        os.utime(path, (START_S + file, START_S + file))  # the order in which Spark reads them


def run(settings: Settings, work: Path, places: Cluster, console: Console) -> dict[str, Any]:
    """Runs the query and loses the second host. Raises RuntimeError with Spark's output if the query fails."""
    first, lost = places.driver, places.workers[0]
    conf = {
        "spark.driver.host": first.address,
        "spark.driver.bindAddress": first.address,
        "spark.executor.memory": f"{EXECUTOR_MIB}m",
        "spark.executor.cores": "1",
        "spark.executorEnv.PYTHONPATH": str(Path.cwd()),
        "spark.network.timeout": f"{SILENCE_S}s",
        "spark.executor.heartbeatInterval": "5s",
        "spark.sql.shuffle.partitions": str(2 * settings.hosts),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    request = Request(str(work), places.master, settings.hosts, conf)
    batches: list[dict[str, Any]] = []
    with (work / "driver.log").open("w+b") as log:
        command = [sys.executable, "-m", "experiments.hosts.query", json.dumps(asdict(request))]
        driver = first.start(command, log, stdout=subprocess.PIPE)
        patience = threading.Timer(TIMEOUT_S, driver.kill)
        patience.daemon = True  # after Ctrl-C nobody waits for it
        patience.start()
        assert driver.stdout is not None
        last: Mapping[str, Any] = {}
        for line in driver.stdout:
            if not line.startswith(b"{"):
                continue
            last = json.loads(line)
            if "batch" in last:
                batches.append({**last, "servers": servers(places.workers)})
                # On the first host it is the driver.
                counted = [place for place in last["places"] if not place.startswith(f"{first.address}:")]
                took = last["seconds"] - (batches[-2]["seconds"] if len(batches) > 1 else 0.0)
                console.print(
                    f"batch {last['batch']}: {took:5.1f} s, executors {', '.join(counted)}, "
                    f"state servers on {batches[-1]['servers']} hosts",
                    highlight=False,
                )
                if last["batch"] == settings.lose_after:
                    lost.cut()
                    lost.end()
                    console.print(f"{lost.address} is lost", highlight=False)
        patience.cancel()
        if driver.wait() != 0 or "panes" not in last:
            log.seek(0)
            raise RuntimeError(f"the query failed:\n{log.read().decode(errors='replace')[-4000:]}")
    after = [b["seconds"] for b in batches if b["batch"] > settings.lose_after]
    before = next(b["seconds"] for b in batches if b["batch"] == settings.lose_after)
    if any(place.startswith(f"{lost.address}:") for place in batches[-1]["places"]):
        raise RuntimeError("Spark still lists the lost host, so the run proves nothing")
    return {**last, "batches": batches, "lost_s": after[0] - before}


def servers(places: Sequence[Host]) -> int:
    """The number of hosts on which a state server runs."""
    import psutil

    def serves(pid: int) -> bool:
        try:
            return "state_backends.server.main" in psutil.Process(pid).cmdline()
        except psutil.Error:
            return False

    return sum(any(map(serves, host.processes)) for host in places)
