"""What windows of keys cost by how many are open: a batch of few events, a restart, one that touches all, and one that
closes all.

A run fills a query with keys, each with one event, then sends small batches that touch some of the keys, and then one
event of every key. On Spark the query then stops, its state server is killed, and it starts again with one more small
batch. At last comes one event days later, which closes all windows. Every number of keys is a run of its own in the
same JVM. The watermark reaches no end before that, so all windows are open.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from experiments.limits.workers import DAEMONS
from experiments.sessions.worker import Worker, windows_of

if TYPE_CHECKING:
    import pyarrow as pa

FILL = 250_000
"""Keys of a batch that fills."""
MOST = {"spark": 1.1, "local": 2.0, "worker": 2.0}
"""How much longer a batch of few events may take with the most windows open than with the fewest, up to a million."""
MOST_OF_MORE = 2.0
MOST_OF_RESTART = 2.0
"""How much longer a restart may take with the most windows open than with the fewest."""
MILLION = 1_000_000
BUDGET_SHARE = 1.25
"""How much of the budget the memory of the server may grow to."""
SECOND_US = 1_000_000
ORIGIN_US = 1_767_225_600 * SECOND_US
SPREAD_S = 600
MIB = 1 << 20
LEGS = ("local", "worker", "spark")
WARM = 4  # small batches that are not measured
AGAIN = 2  # more small batches after the restart, before all windows close, so that what starts is not measured with it


@dataclass(frozen=True, slots=True)
class Settings:
    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    legs: tuple[str, ...]
    events: int
    batches: int
    budget_mib: int
    cores: int
    seed: int
    ends: bool


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a small batch (the median), of the batch that touches all windows, and of the one that closes them.

    ``restart_s``: from the start of a query without a state server to the end of its first batch, a small one.
    ``server_mib``: the largest resident memory of the state server over its memory before the first batch.
    ``worker_mib``: the largest of a Python worker. ``panes``: that came out at the end.
    """

    fill_s: float
    small_s: float
    restart_s: float
    all_s: float
    close_s: float
    server_mib: float
    worker_mib: float
    panes: int


def sessions(
    sizes: Annotated[str, typer.Option(help="Numbers of keys with an open window, from the fewest on.")] = (
        "10000,1000000"
    ),
    kinds: Annotated[str, typer.Option(help="Some of: session,cut,count,record.")] = "",
    legs: Annotated[str, typer.Option(help="Some of: local,worker,spark.")] = "",
    events: Annotated[int, typer.Option(min=1, help="Events in a small batch.")] = 1_000,
    batches: Annotated[int, typer.Option(min=WARM + 1, help="Small batches; the first four are not measured.")] = 24,
    budget_mib: Annotated[int, typer.Option(min=16, help="The memory budget.")] = 256,
    cores: Annotated[int, typer.Option(min=1, help="Cores, and shuffle partitions.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the events.")] = 1,
    ends: Annotated[bool, typer.Option(help="Touch and close all windows at the end.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/sessions"),
) -> None:
    """What sessions, counts and windows per record cost, by how many of them are open."""
    from experiments.shared import bench
    from experiments.shared.bench import PACKAGES, wide_console

    console = wide_console()
    chosen = tuple(bench.pick(kinds, list(windows_of())))
    settings = Settings(
        bench.numbers(sizes), chosen, tuple(bench.pick(legs, LEGS)), events, batches, budget_mib, cores, seed, ends
    )
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    try:
        costs = measure(settings, work, lambda text: console.print(text, highlight=False))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    bench.write_json(
        out / "sessions.json",
        {
            "experiment": "sessions",
            "settings": asdict(settings),
            "versions": bench.versions(PACKAGES),
            "machine": bench.machine(),
            "costs": {" ".join(map(str, place)): asdict(cost) for place, cost in costs.items()},
        },
    )
    for text in verdicts(settings, costs):
        console.print(text, highlight=False)
    console.print(f"written: {out / 'sessions'}.json", highlight=False)


Place = tuple[str, str, int]


def measure(settings: Settings, work: Path, say: Callable[[str], None]) -> dict[Place, Cost]:
    """The costs by leg, kind and number of keys."""
    costs: dict[Place, Cost] = {}
    for leg in settings.legs:
        run: _Local | _InWorker | _OnSpark
        if leg == "spark":
            run = _OnSpark(settings, work)
        else:
            run = _Local(settings) if leg == "local" else _InWorker(settings, work)
        with run:
            for kind in settings.kinds:
                for keys in settings.sizes:
                    cost = costs[leg, kind, keys] = run.cost(kind, keys)
                    restart = f"restart {cost.restart_s:.2f} s; " if leg == "spark" else ""
                    memory = f"server {cost.server_mib:+,.0f} MiB, worker {cost.worker_mib:,.0f} MiB; "
                    say(
                        f"{leg:<5} {kind:<7} {keys:>10,} keys: a batch of {settings.events:,} events "
                        f"{cost.small_s * 1e3:,.0f} ms; {restart}"
                        f"all of them {cost.all_s:.2f} s; closing {cost.close_s:.2f} s; "
                        f"filling {cost.fill_s:.1f} s; {memory if leg != 'local' else ''}{cost.panes:,} panes"
                    )
    return costs


def verdicts(settings: Settings, costs: dict[Place, Cost]) -> list[str]:
    """For each leg and kind, what the largest number of keys costs beside the smallest, and whether that holds."""
    from experiments.shared import bench

    few, found = min(settings.sizes), []
    for (leg, kind, keys), cost in costs.items():
        if keys > few:
            ratio = cost.small_s / costs[leg, kind, few].small_s
            limit = MOST[leg] if keys <= MILLION else MOST_OF_MORE
            holds = "holds" if ratio <= limit else "does not hold"
            found.append(
                f"{leg}, {kind}: a small batch with {keys:,} keys over one with {few:,}: "
                f"{bench.beside(ratio, limit)} (at most {limit}: {holds})"
            )
        if leg == "spark" and keys > few:
            ratio = cost.restart_s / costs[leg, kind, few].restart_s
            holds = "holds" if ratio <= MOST_OF_RESTART else "does not hold"
            found.append(
                f"{leg}, {kind}: a restart with {keys:,} keys over one with {few:,}: "
                f"{bench.beside(ratio, MOST_OF_RESTART)} (at most {MOST_OF_RESTART}: {holds})"
            )
        if leg != "local" and keys >= MILLION:
            limit = settings.budget_mib * BUDGET_SHARE
            holds = "holds" if cost.server_mib <= limit else "does not hold"
            found.append(
                f"{leg}, {kind}: memory of the server with {keys:,} keys: {cost.server_mib:,.0f} MiB "
                f"(at most {limit:,.0f}, the budget and a quarter: {holds})"
            )
    return found


class Tables(NamedTuple):
    """The batches: those that fill, small ones, one of all keys, small ones after a restart, and one long afterwards.

    ``every`` and ``last``: empty if all windows are not touched and closed.
    """

    fill: list[pa.Table]
    small: list[pa.Table]
    every: list[pa.Table]
    again: list[pa.Table]
    last: list[pa.Table]


def tables(keys: int, settings: Settings) -> Tables:
    import numpy as np
    import pyarrow as pa

    draw = np.random.default_rng(settings.seed)

    def table(ids: Any, seconds: Any) -> pa.Table:
        times = ORIGIN_US + np.asarray(seconds, np.int64) * SECOND_US
        columns = {"key": pa.array(ids, pa.int64()), "ts": pa.array(times, pa.timestamp("us", "UTC"))}
        return pa.table({**columns, "value": pa.array(np.ones(len(ids)))})

    made = []
    for begin in range(0, keys, FILL):
        ids = np.arange(begin, min(begin + FILL, keys))
        made.append(table(ids, draw.integers(0, SPREAD_S, len(ids))))
    n = settings.events
    more = range(settings.batches + 1 + AGAIN)
    small = [table(draw.integers(0, keys, n), np.full(n, SPREAD_S + batch)) for batch in more]
    every = [table(np.arange(keys), np.full(keys, SPREAD_S + settings.batches))] if settings.ends else []
    last = [table([0], [10 * 86_400])] if settings.ends else []
    return Tables(made, small[: settings.batches], every, small[settings.batches :], last)


def _cost(batches: Tables, before: Sequence[float], restart_s: float, close_s: float, panes: int) -> Cost:
    """``before``: seconds of the batches that fill, the small ones, and the one of all keys."""
    n = len(batches.fill)
    small = before[n : n + len(batches.small)]
    all_s = before[-1] if batches.every else 0.0
    return Cost(sum(before[:n]), statistics.median(small[WARM:]), restart_s, all_s, close_s, 0.0, 0.0, panes)


class _Local:
    """In this process, without Spark."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __enter__(self) -> _Local:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def cost(self, kind: str, keys: int) -> Cost:
        import aion
        from aion import aggregates as A

        policy = {"memory": {"budget": f"{self._settings.budget_mib} MiB"}, "lateness": {"coverage": None}}
        batches = tables(keys, self._settings)
        seconds, panes = [], 0
        with aion.LocalOperator(
            windows=windows_of()[kind], key="key", time="ts", aggregates={"n": A.count()}, policy=policy
        ) as operator:
            for at, table in enumerate((*batches.fill, *batches.small, *batches.every, *batches.last)):
                begin = time.perf_counter()
                panes += operator.process(table, ORIGIN_US + at * SECOND_US // 10).num_rows
                seconds.append(time.perf_counter() - begin)
            if batches.last:
                begin = time.perf_counter()
                panes += operator.advance(ORIGIN_US + 9 * 86_400 * SECOND_US).num_rows
                seconds.append(time.perf_counter() - begin)
        n = len(batches.fill) + len(batches.small) + len(batches.every)
        return _cost(batches, seconds[:n], 0.0, sum(seconds[n:]), panes)


class _InWorker:
    """In a worker process with a state server, without Spark."""

    def __init__(self, settings: Settings, work: Path) -> None:
        self._settings, self._work = settings, work

    def __enter__(self) -> _InWorker:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def cost(self, kind: str, keys: int) -> Cost:
        folder = self._work / f"worker-{kind}-{keys}"
        (folder / "state").mkdir(parents=True)
        batches = tables(keys, self._settings)
        worker = Worker(kind, self._settings.budget_mib, folder)
        try:
            done = [
                worker.batch(table, ORIGIN_US + at * SECOND_US // 10)
                for at, table in enumerate((*batches.fill, *batches.small, *batches.every, *batches.last))
            ]
            if batches.last:
                done.append(worker.batch(None, ORIGIN_US + 9 * 86_400 * SECOND_US))
        finally:
            worker.close()
        shutil.rmtree(folder, ignore_errors=True)
        n = len(batches.fill) + len(batches.small) + len(batches.every)
        seconds = [batch.seconds for batch in done]
        cost = _cost(batches, seconds[:n], 0.0, sum(seconds[n:]), sum(batch.panes for batch in done))
        return replace(cost, server_mib=worker.server_mib, worker_mib=worker.worker_mib)


class _OnSpark:
    """Through ``aion.windowed``, in one JVM."""

    def __init__(self, settings: Settings, work: Path) -> None:
        self._settings, self._work = settings, work

    def __enter__(self) -> _OnSpark:
        from experiments.shared.stream import session

        self._spark = session(
            self._settings.cores,
            self._work,
            policy="standard",
            more={
                "spark.aion.memory.budget": f"{self._settings.budget_mib} MiB",
                "spark.aion.lateness.coverage": "null",
            },
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._spark.stop()

    def cost(self, kind: str, keys: int) -> Cost:
        import pyarrow.parquet as pq

        import aion
        from aion import aggregates as A
        from experiments.shared.stream import Run, file_stream, run_to_end

        folder = self._work / f"{kind}-{keys}"
        folder.mkdir()
        batches = tables(keys, self._settings)
        memory = _Memory(self._spark._jvm.java.lang.ProcessHandle.current().pid())
        paths: list[Path] = []

        def run(made: Sequence[pa.Table]) -> Run:
            """Goes on with the query, with more files."""
            for table in made:
                paths.append(folder / f"{len(paths):06d}.parquet")
                pq.write_table(table, paths[-1])
                os.utime(paths[-1], (1_700_000_000 + len(paths), 1_700_000_000 + len(paths)))
            stream = aion.windowed(
                file_stream(self._spark, paths, "key bigint, ts timestamp, value double", "1 hour"),
                windows=windows_of()[kind], key=["key"], time="ts", aggregates={"n": A.count()},
            )  # fmt: skip
            events = sum(table.num_rows for table in made)
            return run_to_end(stream, self._work / f"checkpoint-{kind}-{keys}", events, memory.look, goes_on=True)

        runs = [run([*batches.fill, *batches.small, *batches.every])]
        memory.kill_server()
        runs.append(run(batches.again[:1]))
        runs += [run([*batches.again[1:], *batches.last])] if batches.last else []
        for left in (folder, self._work / f"checkpoint-{kind}-{keys}", self._work / "state"):
            shutil.rmtree(left, ignore_errors=True)
        seconds = [[report["durationMs"]["triggerExecution"] / 1e3 for report in r.progress] for r in runs]
        panes = sum(max(report["output_rows"] or 0, 0) for r in runs for report in r.progress)
        # The watermark moves in the batch after the last event, which is when windows close.
        close_s = sum(seconds[2][-2:]) if batches.last else 0.0
        cost = _cost(batches, seconds[0][: sum(map(len, batches[:3]))], runs[1].wall_s, close_s, panes)
        return replace(cost, server_mib=memory.server_mib, worker_mib=memory.worker_mib)


class _Memory:
    """The resident memory of the state server and of Python workers while a query runs. ``executor``: their process."""

    def __init__(self, executor: int) -> None:
        self._executor = executor
        self._first = self._largest = self.worker_mib = 0.0

    def look(self) -> None:
        import psutil

        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it may end at any time
                mib, command = process.memory_info().rss / MIB, process.cmdline()
                if self._is_server(command):
                    self._first = self._first or mib
                    self._largest = max(self._largest, mib)
                elif DAEMONS["aion"] in command:
                    self.worker_mib = max(self.worker_mib, mib)

    def kill_server(self) -> None:
        import psutil

        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self._is_server(process.cmdline()):
                    process.kill()

    def _is_server(self, command: Sequence[str]) -> bool:
        return "state_backends.server.main" in command and str(self._executor) in command

    @property
    def server_mib(self) -> float:
        return self._largest - self._first
