"""The time to the first pane after a restart of a query: with a large state, and with nearly none.

There are two folders, each with input, checkpoint and state. A first run of the query writes a large state into one and
nearly none into the other. Then both queries restart several times, in turns: from their checkpoints, in a new JVM with
a new state server, and with none of their state in the page cache. Each time there is one new file, with events of a
small window that the first batch executes. The windows with the large state lie in the future and are never executed.

With ``--request-ms`` the states are in buckets of an S3 server (moto's, in this process), which takes this much longer
for each request of the restarts. Then a host has nothing of the state when it starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.chaos.places import Bucket
from experiments.restore.command import check_room
from experiments.shared.bench import wide_console

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.restart.query import Answer

MIB = 1 << 20
ALLOWED = 1.5
"""The most time with a large state, as a multiple of that with an empty state."""
ALLOWED_FAR = 2.0
"""The same for states in an object store."""
FAR_MINUTES = 10_000
BULK_WINDOWS = 8
SMALL_EVENTS = 100
BATCH_MIB = 256
STATES = {"large": "large state", "empty": "empty state"}
CHILD_TIMEOUT_S = 1_500
ENDING_S = 60.0
ATTEMPTS = 4
SLOW_START = "Python worker failed to connect back"
PACKAGES = ("aion", "pyspark", "pyarrow", "rocksdict")


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one run of the experiment."""

    size_mib: int
    payload_bytes: int
    runs: int
    policy: str
    cores: int
    request_ms: float | None = None
    hands_over: bool = True
    forks: bool = False

    @property
    def allowed(self) -> float:
        return ALLOWED if self.request_ms is None else ALLOWED_FAR


def restart(
    size_mib: Annotated[int, typer.Option(min=1, help="Size of the large state.")] = 5_120,
    payload: Annotated[int, typer.Option(min=128, help="Bytes in each event, rounded down to a multiple of 128.")] = (
        16_384
    ),
    runs: Annotated[int, typer.Option(min=1, max=8, help="Measured restarts of each query.")] = 3,
    policy: Annotated[str, typer.Option(help="Aion's policy: a preset or a file.")] = "standard",
    cores: Annotated[int, typer.Option(min=1, help="Cores, and shuffle partitions.")] = 2,
    request_ms: Annotated[
        float | None, typer.Option(min=0, help="Keep the states in an S3 server whose requests take this much longer.")
    ] = None,
    hand_over: Annotated[
        bool, typer.Option(help="Whether large blocks are in files of the children, or in those of RocksDB.")
    ] = True,
    fork: Annotated[
        bool, typer.Option(help="Also fork both queries, as aion fork does. Their states are in folders.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for results, and for the state during the runs.", file_okay=False)
    ] = Path("out/restart"),
) -> None:
    """Seconds from the restart of a query to its first pane, with a large and with an empty state."""
    # Here, not above: `aion --help` imports this module and needs none of it.
    from experiments.shared import bench

    if fork and request_ms is not None:
        raise typer.BadParameter("it is only for states in folders; leave --request-ms out", param_hint="--fork")
    settings = Settings(size_mib, payload // 128 * 128, runs, policy, cores, request_ms, hand_over, fork)
    console = wide_console()
    check_room(out, 2 * size_mib * MIB)  # merging writes part of it again
    record = {
        "experiment": "restart",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
    }
    work = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        bucket = None if request_ms is None else stack.enter_context(contextlib.closing(Bucket()))
        results = measure(settings, work, console, bucket)
    report(settings, results, record, out, console)


def measure(settings: Settings, work: Path, console: Console, bucket: Bucket | None = None) -> dict[str, Any]:
    """Writes both states and measures all restarts. Raises RuntimeError if a state or a pane is not as expected.

    ``bucket``: the server for the states. None: each is in a folder.
    """
    from experiments.shared import bench
    from experiments.store.common import drop_page_cache

    results: dict[str, Any] = {state: {"starts": []} for state in STATES}
    uris = {state: None if bucket is None else bucket.new() for state in STATES}
    for state in STATES:
        with console.status(f"writing the {STATES[state]}"):
            results[state] |= fill(settings, work / state, settings.size_mib if state == "large" else 0, uris[state])
        size, files = results[state]["state_bytes"] / MIB, results[state]["files"]
        console.print(
            f"{STATES[state]}: {size:,.0f} MiB in {files} files, {results[state]['fill_s']:.0f} s", highlight=False
        )
    for turn in bench.turns(list(STATES), settings.runs, 0):
        folder = work / turn.contender
        drop_page_cache(folder)
        slow = contextlib.nullcontext() if bucket is None else bucket.slow((settings.request_ms or 0) / 1e3)
        with console.status(f"run {turn.round}: {STATES[turn.contender]}"), slow:
            answer = start_again(settings, folder, turn.round, uris[turn.contender])
        results[turn.contender]["starts"].append(asdict(answer))
        first = answer.batches[0]["durationMs"]
        console.print(
            f"run {turn.round}  {STATES[turn.contender]}: first pane after {answer.first_pane_s:.2f} s "
            f"({first['addBatch'] / 1e3:.2f} s of that in the batch); {answer.blocks:,} blocks{requests(answer)}",
            highlight=False,
        )
    for state in STATES if settings.forks else ():
        results[state]["fork_s"] = forked(work / state)
        console.print(f"aion fork, {STATES[state]}: {results[state]['fork_s']:.1f} s", highlight=False)
    return results


def forked(folder: Path) -> float:
    """Forks a query as a user does, with a JVM of its own. Returns the seconds. Raises RuntimeError if that fails."""
    command = [
        sys.executable,
        "-m",
        "aion",
        "fork",
        f"{folder}/checkpoint",
        f"{folder}/fork",
        "--state",
        f"{folder}/state",
    ]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"aion fork failed:\n{done.stderr[-4000:]}")
    return time.perf_counter() - begin


def requests(answer: Answer) -> str:
    """What was asked of the object store before the first pane."""
    counts = {name: n for name, n in answer.requests.items() if not name.endswith("_bytes")}
    if not counts:
        return ""
    listed = ", ".join(f"{n:,} {name}" for name, n in counts.items() if n)
    return f"; {sum(counts.values()):,} requests ({listed}) read {answer.requests['read_bytes'] / MIB:,.1f} MiB"


def fill(settings: Settings, folder: Path, size_mib: int, uri: str | None = None) -> dict[str, Any]:
    """The first run of a query. It leaves a state of ``size_mib`` MiB, plus a few events.

    ``uri``: where the state is. None: in ``folder``.
    """
    from experiments.restart.query import MINUTE_US, ORIGIN_US, events

    (folder / "input").mkdir(parents=True)
    of_batches = [min(BATCH_MIB, size_mib - mib) * MIB for mib in range(0, size_mib, BATCH_MIB)]
    rows = [SMALL_EVENTS, *(-(-size // settings.payload_bytes) for size in of_batches)]
    for number, count in enumerate(rows):
        table = events(sum(rows[:number]), count, ORIGIN_US + FAR_MINUTES * MINUTE_US, BULK_WINDOWS, ORIGIN_US)
        write_file(folder / "input", number, table, settings.cores)
    begin = time.perf_counter()
    answer = child(settings, folder, uri)
    if answer.panes:
        raise RuntimeError(f"{answer.panes} panes came out while the state was written; expected none")
    if answer.disk_bytes < size_mib * MIB:
        raise RuntimeError(f"the state has {answer.disk_bytes / MIB:,.0f} MiB; expected at least {size_mib:,}")
    files = len(list((folder / "state").glob("[!.]*/*/shard-*/files/*.sst"))) if uri is None else objects(uri)
    return {"state_bytes": answer.disk_bytes, "files": files, "fill_s": time.perf_counter() - begin}


def objects(uri: str) -> int:
    """The files of RocksDB that are in a bucket."""
    import pyarrow.fs as pafs

    fs, path = pafs.FileSystem.from_uri(uri)
    return sum(info.path.endswith(".sst") for info in fs.get_file_info(pafs.FileSelector(path, recursive=True)))


def start_again(settings: Settings, folder: Path, run: int, uri: str | None = None) -> Answer:
    """Restarts the query with a new file. Its events are of a new, small window, which is executed in that batch."""
    from experiments.restart.query import MINUTE_US, ORIGIN_US, events

    due_us = ORIGIN_US + (run - 1) * MINUTE_US
    number = len(list((folder / "input").iterdir()))
    table = events(0, SMALL_EVENTS, due_us, 1, ORIGIN_US + (run + 1) * MINUTE_US)
    write_file(folder / "input", number, table, settings.cores)
    answer = child(settings, folder, uri)
    if answer.windows_us != [due_us] or answer.first_pane_s is None:
        raise RuntimeError(f"got panes of the windows {answer.windows_us}; expected only {due_us}")
    if answer.rebuilds != settings.cores:
        raise RuntimeError(f"{answer.rebuilds} shards were opened; expected {settings.cores}")
    return answer


def write_file(folder: Path, number: int, table: Any, row_groups: int) -> None:
    import pyarrow.parquet as pq

    path = folder / f"{number:06d}.parquet"
    pq.write_table(table, path, row_group_size=-(-len(table) // row_groups))  # a part for every core
    # The source reads files in the order of their modification times.
    os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def child(settings: Settings, folder: Path, uri: str | None = None) -> Answer:
    """One run of the query, with its own JVM and state server. Raises RuntimeError with its output if it fails.

    Spark gives a Python process ten seconds to start, which may be too short on a busy machine. Then it tries again,
    and the query continues where it was.
    """
    from experiments.restart.query import Answer, Task
    from state_backends.server.server_folder import occupant, runtime_dir

    hands_over = settings.hands_over
    request = Task(str(folder), settings.payload_bytes, settings.policy, settings.cores, uri, hands_over)
    command = [sys.executable, "-m", "experiments.restart.query", json.dumps(asdict(request))]
    for left in reversed(range(ATTEMPTS)):
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S)
        if done.returncode == 0:
            break
        if not left or SLOW_START not in done.stderr:
            raise RuntimeError(f"the query failed:\n{done.stderr[-4000:]}")
    answer = Answer(**json.loads(done.stdout.splitlines()[-1]))
    deadline = time.monotonic() + ENDING_S
    while occupant(runtime_dir(answer.application)) is not None:
        if time.monotonic() > deadline:
            raise RuntimeError("the state server still runs after its JVM has ended")
        time.sleep(0.05)
    return answer


def report(settings: Settings, results: dict[str, Any], record: dict[str, Any], out: Path, console: Console) -> None:
    from rich.table import Table

    from experiments.shared import bench

    first = {state: [start["first_pane_s"] for start in results[state]["starts"]] for state in STATES}
    batch = {
        state: [s["batches"][0]["durationMs"]["addBatch"] / 1e3 for s in results[state]["starts"]] for state in first
    }
    table = Table(title="restarted from the checkpoint: seconds to the first pane", title_justify="left")
    for heading in ("", "MiB", "files", "first pane", "lowest", "highest", "in the batch"):
        table.add_column(heading, justify="right")
    for state, words in STATES.items():
        times = (statistics.median(first[state]), min(first[state]), max(first[state]), statistics.median(batch[state]))
        size, files = results[state]["state_bytes"] / MIB, results[state]["files"]
        table.add_row(words, f"{size:,.0f}", f"{files:,}", *(f"{s:.2f}" for s in times))
    console.print(table)
    ratio, within = (statistics.median(f["large"]) / statistics.median(f["empty"]) for f in (first, batch))
    verdict = "holds" if ratio <= settings.allowed else "does not hold"
    record = {**record, "results": results, "ratio": ratio, "ratio_of_batches": within, "verdict": verdict}
    bench.write_json(out / "restart.json", record)
    console.print(
        f"{settings.size_mib:,} MiB of state: {ratio:.2f} times the time to the first pane "
        f"(target: at most {settings.allowed:g}; {verdict}); the batch alone {within:.2f} times",
        highlight=False,
    )
    console.print(f"written: {out / 'restart.json'}", highlight=False)
