"""The cost of versions and recovery: the ingest queries with normal commits, and with commits that do nothing.

The contenders take turns over the same files. Each has a Spark application and a state server of its own, in one JVM.
Only the servers differ. It measures the rate of ``shared.bench.steady_rate``. Since that depends on what else the
machine does, it also measures the processor time of all processes involved, over the whole run.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.ingest.settings import WINDOW, WINDOW_MS
from experiments.shared.bench import PACKAGES, as_rows, figures, wide_console

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.shared.bench import Target, Turn
    from experiments.shared.stream import Run

    Done = list[tuple[Turn, "Measured"]]

QUERIES = ("partials", "apply")
HOW = {"commits": "normal commits", "nothing": "commits do nothing"}
ALLOWED_OVERHEAD = 0.15


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one run of the experiment."""

    queries: tuple[str, ...]
    events_per_batch: int
    batches: int
    runs: int
    warm_ups: int
    payload_bytes: int
    policy: str
    cores: int

    @property
    def contenders(self) -> list[str]:
        return [f"{query} {how}" for query in self.queries for how in HOW]

    @property
    def headline(self) -> str:
        """The settings in one line."""
        size = f" of {self.payload_bytes:,} B" if self.payload_bytes else ""
        return (
            f"batches of {self.events_per_batch:,} events{size}, 100 keys, 5 % late, windows of {WINDOW}, "
            f"policy {self.policy}, {self.cores} cores"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, and its processor time in seconds."""

    run: Run
    cpu_s: float

    @property
    def steady_events_per_s(self) -> float:
        return self.run.steady_events_per_s

    @property
    def events_per_cpu_s(self) -> float:
        return self.run.events / self.cpu_s


def overhead(
    queries: Annotated[str, typer.Option(help="Some of: partials,apply.")] = "",
    events: Annotated[
        int | None,
        typer.Option(min=1, help="Events per batch (a file, a trigger). Default: 2,000,000; with a payload 200,000."),
    ] = None,
    batches: Annotated[int, typer.Option(min=3, help="Batches per run; the first two are not measured.")] = 6,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs per contender.")] = 5,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs per contender before those.")] = 1,
    payload: Annotated[int, typer.Option(min=0, help="Random bytes in each event, e.g. 2304.")] = 0,
    policy: Annotated[str, typer.Option(help="Aion's policy: a preset or a file.")] = "standard",
    cores: Annotated[int, typer.Option(min=1, help="Cores, and shuffle partitions.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated events.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Folder for results, and for the state during the runs.", file_okay=False)
    ] = Path("out/overhead"),
) -> None:
    """Compare the events per second with normal commits and with commits that do nothing."""
    # Here, not above: `aion --help` imports this module and needs none of it.
    from experiments.shared import bench
    from experiments.shared.generate import EventPlan, write_batches

    console = wide_console()
    events = events or (200_000 if payload else 2_000_000)
    settings = Settings(tuple(bench.pick(queries, QUERIES)), events, batches, runs, warm_ups, payload, policy, cores)
    plan = EventPlan(events_per_batch=events, payload_bytes=payload, seed=seed)
    record: dict[str, Any] = {
        "experiment": "overhead",
        "settings": asdict(settings),
        "data": asdict(plan),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
    }
    with console.status(f"generating {batches} files of {events:,} events"):
        paths = write_batches(plan, batches, out / "data")
    done = take_turns(settings, paths, out, record, console)
    report(settings, done, out, record, console)


def take_turns(settings: Settings, paths: list[Path], out: Path, record: dict[str, Any], console: Console) -> Done:
    """All runs of all contenders. Writes each run to the JSON file when it is done."""
    from experiments.shared import bench

    done: Done = []
    work_dir = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    try:
        for turn in bench.turns(settings.contenders, settings.runs, settings.warm_ups):
            query, how = turn.contender.split()
            with console.status(f"round {turn.round}: {query}, {HOW[how]}"):
                run = run_once(settings, query, how, paths, work_dir)
            done.append((turn, run))
            kind = "warm-up" if turn.warm_up else "run"
            console.print(
                f"{kind:>7} {turn.round}  {query + ', ' + HOW[how]:<30} {run.run.wall_s:>6.1f} s "
                f"({run.cpu_s:.1f} processor s)   events/s: {run.steady_events_per_s:>10,.0f} steady"
            )
            bench.write_json(out / "overhead.json", {**record, "runs": as_rows(done)})
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    return done


def run_once(settings: Settings, query: str, how: str, paths: list[Path], work_dir: Path) -> Measured:
    """One run in a Spark application of its own. Raises RuntimeError if it did not commit as expected."""
    from experiments.ingest.contenders import CONTENDERS, Shape
    from experiments.shared.state_server import state_server
    from experiments.shared.stream import file_stream, run_to_end, session

    shape = Shape(WINDOW, WINDOW_MS, None, settings.payload_bytes > 0)
    schema = "key bigint, ts timestamp, value double" + (", payload binary" if shape.payload else "")
    spark = session(settings.cores, work_dir, policy=settings.policy)
    try:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        jvm_pid = int(jvm.java.lang.ProcessHandle.current().pid())
        with state_server(spark.sparkContext.applicationId, jvm_pid, how, work_dir / "server.log"):
            stream = CONTENDERS[query].build(file_stream(spark, paths, schema, WINDOW), shape)
            before = cpu_seconds()
            run = run_to_end(stream, work_dir / "checkpoint", settings.events_per_batch * len(paths))
            cpu_s = sum(s - before.get(process, 0.0) for process, s in cpu_seconds().items())
    finally:
        spark.stop()
    check(work_dir / "state", how, settings)
    shutil.rmtree(work_dir / "state")
    return Measured(run, cpu_s)


def cpu_seconds() -> dict[int, float]:
    """The processor time of this process and of its descendants, by pid.

    Workers that have ended count for the daemon that forked them and waited for them.
    """
    import psutil

    from experiments.shared.tree import python_workers

    found: dict[int, float] = {}
    me = psutil.Process()
    children = me.children(recursive=True)
    daemons, workers = python_workers(children)
    for process in (me, *children):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
            if process in daemons or process in workers:
                found[process.pid] += times.children_user + times.children_system
    return found


def check(state: Path, how: str, settings: Settings) -> None:
    """Raises RuntimeError if the number of versions in a state folder does not fit the kind of commits."""
    versions = len(list(state.glob("*/*/shard-*/manifests/*.json")))
    if how == "nothing" and versions:
        raise RuntimeError(f"commits wrote {versions} versions although they should do nothing")
    if how == "commits" and versions < settings.batches * settings.cores:
        raise RuntimeError(f"only {versions} versions for {settings.batches} batches of {settings.cores} shards")


def report(settings: Settings, done: Done, out: Path, record: dict[str, Any], console: Console) -> None:
    """Prints tables, and writes all figures as JSON and the steady rates as a bar chart."""
    from experiments.shared import bench

    labels = {f"{query} {how}": f"{query}, {words}" for query in settings.queries for how, words in HOW.items()}
    steady = figures(settings.contenders, done, lambda run: run.steady_events_per_s)
    rates = bench.summarise(steady)
    judged = bench.verdicts(targets(settings), rates)
    per_cpu_s = bench.summarise(figures(settings.contenders, done, lambda run: run.events_per_cpu_s))
    record = {
        **record,
        "events_per_s": {name: asdict(rate) for name, rate in rates.items()},
        "events_per_cpu_s": {name: asdict(rate) for name, rate in per_cpu_s.items()},
        "ratios": [{**asdict(verdict), "verdict": verdict.words} for verdict in judged],
        "runs": as_rows(done),
    }
    bench.write_json(out / "overhead.json", record)
    bench.bar_chart(out / "overhead.png", settings.headline, labels, steady, "events/s")
    console.print()
    per_processor = {name: f"{rate.median:,.0f}" for name, rate in per_cpu_s.items()}
    console.print(bench.rates_table(settings.headline, labels, rates, {"events per processor s": per_processor}))
    console.print(bench.ratios_table(labels, judged))
    for verdict in judged:
        over, under = verdict.target.over, verdict.target.under
        console.print(
            f"{over.split()[0]}: versions and recovery cost {1 / verdict.ratio - 1:+.1%} of the time "
            f"(target: at most {ALLOWED_OVERHEAD:.0%}; {verdict.words}), and "
            f"{per_cpu_s[under].median / per_cpu_s[over].median - 1:+.1%} of the processor time",
            highlight=False,
        )
    console.print(f"written: {out / 'overhead'}.json and .png", highlight=False)


def targets(settings: Settings) -> list[Target]:
    """The targets: at most 15 % more time for the same events, so at least 1 / 1.15 of the rate."""
    from experiments.shared.bench import Target

    at_least = round(1 / (1 + ALLOWED_OVERHEAD), 3)
    return [Target(f"{query} commits", f"{query} nothing", at_least) for query in settings.queries]
