"""Many windows over one stream, and sessions: Aion compared with stock Spark's ``window()`` and ``session_window()``.

One-minute sliding windows with an overlap of 1, 20, 100 and 600 windows per event, and sessions. Stock Spark makes a
row for each event and window; Aion puts each event into one slice. Events are in order, so that both have the same
results, and all runs of the same windows are checked against each other. Another part compares up to 1,000 different
definitions in one query with one definition.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from experiments.windows.streams import CONTENDERS, Leg, Measured

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from experiments.shared.bench import Target
    from experiments.shared.generate import EventPlan

PACKAGES = ("aion", "pyspark", "pyarrow", "pandas", "numpy", "rocksdict")
DELAY = "10 seconds"
SCHEMA = "key bigint, ts timestamp, value double"
SIZE = "1 minute"
LEGS = {
    "1": Leg("overlap 1", 1, size=SIZE),
    "20": Leg("overlap 20", 20, size=SIZE, slide="3 seconds"),
    "100": Leg("overlap 100", 100, size=SIZE, slide="600 milliseconds"),
    "600": Leg("overlap 600", 600, size=SIZE, slide="100 milliseconds"),
    "sessions": Leg("sessions", 1, gap="1 second"),
    "one": Leg("1 definition", 1, different=1),
    "twenty": Leg("20 definitions", 20, different=20),
    "hundred": Leg("100 definitions", 100, different=100),
    "thousand": Leg("1,000 definitions and sessions", 1001, different=1000, gap="1 second"),
}
# The target ratios, by overlap.
AT_LEAST = {"20": 2.0, "100": 8.0}
# The target ratios of many different definitions to one.
OF_ONE = {"twenty": None, "hundred": 0.7, "thousand": 0.4}
FEWER_OF_MANY = 4
"""With many definitions a batch has a quarter of the events, by default 500,000, in 100 keys."""
# Overlap 600 has a tenth of the events, for all contenders: stock Spark makes 600 rows of each event and would take too
# long.
FEWER_AT_600 = 10
# A key has 100 events at random times in the 40 seconds of a batch. Then one in 12 gaps is longer than a second.
EVENTS_OF_A_SESSION_KEY = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one run of the experiment."""

    events_per_batch: int
    batches: int
    runs: int
    warm_ups: int
    legs: tuple[str, ...]
    policy: str
    cores: int
    seed: int

    def plan(self, leg: str) -> EventPlan:
        """The events of a leg, the same for all contenders."""
        from experiments.shared.generate import EventPlan

        fewer = FEWER_AT_600 if leg == "600" else FEWER_OF_MANY if LEGS[leg].different else 1
        events = max(self.events_per_batch // fewer, 1)
        keys = max(events // EVENTS_OF_A_SESSION_KEY, 1) if leg == "sessions" else 100
        return EventPlan(events_per_batch=events, keys=keys, late_share=0.0, seed=self.seed)

    @property
    def headline(self) -> str:
        return (
            f"windows of {SIZE} or sessions of {LEGS['sessions'].gap} apart, {self.batches} batches in order, "
            f"{self.cores} cores"
        )


def windows(
    events: Annotated[int, typer.Option(min=100, help="Events per batch; overlap 600 has a tenth.")] = 2_000_000,
    batches: Annotated[int, typer.Option(min=3, help="Batches per run; the first two are not measured.")] = 4,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs per contender.")] = 2,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs per contender before those.")] = 1,
    legs: Annotated[str, typer.Option(help="Some of: 1,20,100,600,sessions,one,twenty,hundred,thousand.")] = "",
    policy: Annotated[str, typer.Option(help="Aion's policy: a preset or a file.")] = "standard",
    cores: Annotated[int, typer.Option(min=1, help="Cores, and shuffle partitions.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated events.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Folder for results; OUT/data keeps the generated files.", file_okay=False)
    ] = Path("out/windows"),
) -> None:
    """Compare Aion with Spark's window(): sliding windows with overlap 1 to 600, and sessions; events/s, state bytes.

    Counts and means by key. Aion takes part twice: with its policy, which keeps windows for late events, and with a
    bound of zero, which drops windows when they end, as stock Spark does.
    """
    # Here, not above: `aion --help` and Spark's workers import this module and need none of it.
    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    settings = Settings(events, batches, runs, warm_ups, chosen(legs), policy, cores, seed)
    console = wide_console()
    record: dict[str, Any] = {
        "experiment": "windows",
        "settings": asdict(settings),
        "data": {leg: asdict(settings.plan(leg)) for leg in settings.legs},
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
    }
    out.mkdir(parents=True, exist_ok=True)
    done = take_turns(settings, out, record, console)
    report(settings, done, out, record, console)


def chosen(names: str) -> tuple[str, ...]:
    """The legs with these names, in their order; without names all. Raises BadParameter for an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(LEGS)
    if unknown := [name for name in wanted if name not in LEGS]:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; use {', '.join(LEGS)}")
    return tuple(name for name in LEGS if name in wanted)


def contenders(leg: str) -> list[str]:
    """The contenders of a leg. Legs of different definitions are compared with one definition, not with Spark."""
    return ["aion"] if LEGS[leg].different else list(CONTENDERS)


def take_turns(settings: Settings, out: Path, record: dict[str, Any], console: Console) -> list[Measured]:
    """All measured runs of all contenders, in one Spark session. Writes each to the JSON file when it is done."""
    from experiments.shared import bench
    from experiments.shared.generate import write_batches
    from experiments.shared.stream import file_stream, session
    from experiments.windows.streams import check_equal, measure

    done: list[Measured] = []
    work = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    spark: SparkSession | None = None
    try:
        spark = session(settings.cores, work, policy=settings.policy)
        for leg in settings.legs:
            plan = settings.plan(leg)
            files = write_batches(plan, settings.batches, out / "data")
            first: Measured | None = None
            for turn in bench.turns(contenders(leg), settings.runs, settings.warm_ups):
                stream = file_stream(spark, files, SCHEMA, DELAY)
                total = plan.events_per_batch * settings.batches
                with console.status(f"{LEGS[leg].label}, round {turn.round}: {CONTENDERS[turn.contender].label}"):
                    found = measure(spark, leg, LEGS[leg], turn.contender, stream, work / "checkpoint", total)
                first = first or found
                check_equal(first, found)
                if not turn.warm_up:
                    done.append(found)
                console.print(
                    f"{LEGS[leg].label:<12} {turn.round} {CONTENDERS[turn.contender].label:<14} "
                    f"{found.run.steady_events_per_s:>12,.0f} events/s, {found.results:,} results, "
                    f"{found.state_bytes / 1e6:,.1f} MB",
                    highlight=False,
                )
                bench.write_json(out / "windows.json", {**record, "runs": [m.to_json() for m in done]})
    finally:
        if spark is not None:
            spark.stop()
        shutil.rmtree(work, ignore_errors=True)
    return done


def targets(legs: Sequence[str]) -> list[Target]:
    """The ratios of Aion to stock Spark, and of many definitions to one, with their targets if they have one."""
    from experiments.shared.bench import Target

    found = [
        Target(f"{leg} {contender}", f"{leg} stock", AT_LEAST.get(leg) if contender == "aion" else None)
        for leg in legs
        for contender in contenders(leg)
        if contender != "stock" and not LEGS[leg].different
    ]
    many = [leg for leg in legs if leg in OF_ONE and "one" in legs]
    return [*found, *(Target(f"{leg} aion", "one aion", OF_ONE[leg]) for leg in many)]


def report(settings: Settings, done: Sequence[Measured], out: Path, record: dict[str, Any], console: Console) -> None:
    """Prints tables, and writes all figures as JSON and the rates as a bar chart."""
    from experiments.shared import bench
    from experiments.shared.stream import CHECKPOINTS

    by_name: dict[str, list[Measured]] = {}
    for measured in done:
        by_name.setdefault(f"{measured.leg} {measured.contender}", []).append(measured)
    labels = {
        f"{leg} {c}": f"{LEGS[leg].label}: {CONTENDERS[c].label}" for leg in settings.legs for c in contenders(leg)
    }
    rates = {name: [m.run.steady_events_per_s for m in runs] for name, runs in by_name.items()}
    summary = bench.summarise(rates)
    judged = bench.verdicts(targets(settings.legs), summary)
    latest = {name: runs[-1] for name, runs in by_name.items()}
    more = {
        "events per run": {name: f"{m.run.events:,}" for name, m in latest.items()},
        "results": {name: f"{m.results:,}" for name, m in latest.items()},
        "state MB": {name: f"{max(m.state_bytes for m in runs) / 1e6:,.1f}" for name, runs in by_name.items()},
        "state rows": {n: f"{m.state_rows:,}" for n, m in latest.items() if m.state_rows is not None},
    }
    ratios = [{**asdict(verdict), "verdict": verdict.words} for verdict in judged]
    figures = {name: asdict(rate) for name, rate in summary.items()}
    runs = [m.to_json() for m in done]
    bench.write_json(out / "windows.json", {**record, "events_per_s": figures, "ratios": ratios, "runs": runs})
    bench.bar_chart(out / "windows.png", settings.headline, labels, rates, "events/s")
    console.print()
    console.print(bench.rates_table(settings.headline, labels, summary, more))
    console.print(bench.ratios_table(labels, judged))
    console.print(f"{REMARKS}\n{CHECKPOINTS}", highlight=False)
    if "600" in settings.legs:
        console.print(
            f"Overlap 600: 1/{FEWER_AT_600} of the events for all, since Spark makes 600 rows of each.", highlight=False
        )
    console.print(f"written: {out / 'windows'}.json and .png", highlight=False)


REMARKS = """\
events/s: median over the runs of input rows / trigger time, without the first two batches of each.
state MB: the peak. For Aion: live blocks in memory or on disk, as its state server counts them (four times a second).
For Spark: memoryUsedBytes of its RocksDB stores, after each batch. state rows: Spark's numRowsTotal.
'Aion' keeps windows for late events as its policy says; 'bound 0' drops them when they end, as Spark does.
All contenders of the same windows had the same results in every run: number, bounds, counts and means.
With different definitions (tumbling, 1 to 20 seconds in milliseconds) batches have a quarter of the events."""
