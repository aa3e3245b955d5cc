"""The time of a small batch: what a batch costs however few events it has, Aion beside stock Spark.

All contenders run in one process tree, over the same files of 1,000 events, and take turns. One of them is the floor of
everything that is built as Aion is: events go to Python, one row for each shard through the shuffle, and a stateful
operator that keeps one token for each shard. Another floor also has timers, as whatever the watermark sets off must:
Spark then takes longer to plan a batch and to begin its tasks.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from experiments.ingest.contenders import Contender
    from experiments.shared.bench import Summary, Turn
    from experiments.shared.stream import Run

MOST_OVER_TOKEN = 1.10
"""How much longer a batch of Aion may take than one of the floor."""
PHASES = {
    "offsets": ("latestOffset", "getBatch", "walCommit"),
    "planning": ("queryPlanning",),
    "running": ("addBatch",),
    "committing": ("commitOffsets", "commitBatch"),
}
"""The parts of a batch, and Spark's names for them."""


@dataclass(frozen=True, slots=True)
class Settings:
    events_per_batch: int
    batches: int
    runs: int
    warm_ups: int
    partitions: tuple[int, ...]
    policy: str
    cores: int
    keys: int = 100
    window_s: int = 20
    span_s: int = 40

    @property
    def window(self) -> str:
        return f"{self.window_s} seconds"


def contenders() -> dict[str, Contender]:
    from experiments.ingest.contenders import CONTENDERS, FLOORS

    known = {**CONTENDERS, **FLOORS}
    return {name: known[name] for name in ("partials", "apply", *FLOORS, "stock-window", "tuned-window")}


def latency(
    events: Annotated[int, typer.Option(min=1, help="Events in a batch (a file, a trigger).")] = 1_000,
    batches: Annotated[int, typer.Option(min=2, help="Batches per run; the second half is measured.")] = 40,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs per contender.")] = 3,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs per contender before those.")] = 2,
    partitions: Annotated[str, typer.Option(help="Numbers of shuffle partitions.")] = "2,16",
    only: Annotated[
        str, typer.Option(help="Some of: partials,apply,token,token-timer,stock-window,tuned-window.")
    ] = "",
    policy: Annotated[str, typer.Option(help="Aion's policy: a preset or a file.")] = "standard",
    cores: Annotated[int, typer.Option(min=1, help="Cores.")] = 2,
    keys: Annotated[int, typer.Option(min=1, help="Keys of the events.")] = 100,
    window: Annotated[int, typer.Option(min=1, help="Seconds of a window.")] = 20,
    span: Annotated[int, typer.Option(min=1, help="Seconds of event time in a batch.")] = 40,
    out: Annotated[Path, typer.Option(help="Folder for results; OUT/data keeps the files.", file_okay=False)] = Path(
        "out/latency"
    ),
) -> None:
    """Measure how long a batch of few events takes, with Aion and with stock Spark.

    Each run starts a query of its own; the JVM and the Python workers stay warm. The shape of Spark's own streaming
    benchmark is a batch for each second of 1,000 rows/s: --keys 1000 --window 60 --span 1 --batches 200.
    """
    from experiments.shared import bench
    from experiments.shared.bench import PACKAGES, wide_console
    from experiments.shared.generate import EventPlan, write_batches
    from experiments.shared.stream import CHECKPOINTS

    console = wide_console()
    known = contenders()
    chosen = {name: known[name] for name in bench.pick(only, list(known))}
    numbers = bench.numbers(partitions)
    settings = Settings(events, batches, runs, warm_ups, numbers, policy, cores, keys, window, span)
    second_us = 1_000_000
    plan = EventPlan(
        events_per_batch=events,
        keys=keys,
        window_us=window * second_us,
        span_us=span * second_us,
        delay_us=window * second_us,
    )
    paths = write_batches(plan, batches, out / "data")
    done = _take_turns(settings, chosen, paths, out, console.print)
    times = {place: [milliseconds(run.progress) for run in of_place] for place, of_place in done.items()}
    summaries = bench.summarise({_name(place): figures for place, figures in times.items()})
    bench.write_json(
        out / "latency.json",
        {
            "experiment": "latency",
            "settings": asdict(settings),
            "data": asdict(plan),
            "versions": bench.versions(PACKAGES),
            "machine": bench.machine(),
            "batch_ms": {name: asdict(summary) for name, summary in summaries.items()},
            "batch_ms_99": {_name(p): statistics.median(slowest(r.progress) for r in of) for p, of in done.items()},
            "ratios": ratios(summaries, numbers),
            "runs": [{"place": _name(place), **asdict(run)} for place, of_place in done.items() for run in of_place],
        },
    )
    labels = {_name((name, number)): f"{chosen[name].label}, {number} partitions" for name, number in done}
    title = f"the time of a batch of {events:,} events, {keys:,} keys, windows of {window} s, {cores} cores"
    figures = {_name(place): figures for place, figures in times.items()}
    bench.bar_chart(out / "latency.png", title, labels, figures, "milliseconds")
    console.print()
    console.print(_table(title, labels, summaries, {_name(place): of_place for place, of_place in done.items()}))
    for name, ratio in ratios(summaries, numbers).items():
        if name.startswith("partials / token,"):
            holds = "holds" if ratio <= MOST_OVER_TOKEN else "does not hold"
            verdict = f"{bench.beside(ratio, MOST_OVER_TOKEN)} (at most {MOST_OVER_TOKEN:.2f}: {holds})"
        else:
            verdict = f"{ratio:.2f}"
        console.print(f"{name}: {verdict}", highlight=False)
    console.print(CHECKPOINTS, highlight=False)
    console.print(f"written: {out / 'latency'}.json and .png", highlight=False)


def milliseconds(progress: Sequence[Mapping[str, Any]], phase: Sequence[str] = ("triggerExecution",)) -> float:
    """The median time of a batch, or of some of its phases, in the second half of a run.

    In the first half, the query starts and learns: while history is short, Aion evaluates it in every batch.
    """
    return float(statistics.median(_times(progress, phase)))


def slowest(progress: Sequence[Mapping[str, Any]]) -> float:
    """The time that 99 % of the batches in the second half of a run do not exceed."""
    times = sorted(_times(progress, ("triggerExecution",)))
    return float(times[-(-99 * len(times) // 100) - 1])


def _times(progress: Sequence[Mapping[str, Any]], phase: Sequence[str]) -> list[int]:
    with_data = [report for report in progress if report["numInputRows"] > 0]
    with_data = with_data[len(with_data) // 2 :]
    return [sum(report["durationMs"].get(name, 0) for name in phase) for report in with_data]


def ratios(summaries: Mapping[str, Summary], partitions: Sequence[int]) -> dict[str, float]:
    """Aion's times over those of the others, with as many partitions."""
    return {
        f"{ours} / {other}, {number} partitions": summaries[a].median / summaries[b].median
        for number in partitions
        for ours in ("partials", "apply")
        for other in ("token", "token-timer", "stock-window", "tuned-window")
        if (a := _name((ours, number))) in summaries and (b := _name((other, number))) in summaries
    }


def _name(place: tuple[str, int]) -> str:
    return f"{place[0]} {place[1]}"


def _take_turns(
    settings: Settings, chosen: Mapping[str, Contender], paths: list[Path], out: Path, say: Callable[[str], None]
) -> dict[tuple[str, int], list[Run]]:
    """The measured runs of each contender with each number of partitions."""
    from experiments.ingest.contenders import Shape
    from experiments.ingest.settings import SCHEMA
    from experiments.shared import bench
    from experiments.shared.stream import file_stream, run_to_end, session, spark_settings

    shape = Shape(settings.window, settings.window_s * 1_000, None, False)
    places = {_name((name, number)): (name, number) for number in settings.partitions for name in chosen}
    done: dict[tuple[str, int], list[Run]] = {place: [] for place in places.values()}
    work_dir = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    spark = None
    try:
        spark = session(settings.cores, work_dir, policy=settings.policy)
        for turn in bench.turns(list(places), settings.runs, settings.warm_ups):
            name, number = places[turn.contender]
            spark.conf.set("spark.sql.shuffle.partitions", str(number))
            stream = chosen[name].build(file_stream(spark, paths, SCHEMA, settings.window), shape)
            with spark_settings(spark, chosen[name].settings):
                run = run_to_end(stream, work_dir / "checkpoint", settings.events_per_batch * len(paths))
            say(_line(turn, chosen[name].label, number, run))
            if not turn.warm_up:
                done[name, number].append(run)
    finally:
        if spark is not None:
            spark.stop()
        shutil.rmtree(work_dir, ignore_errors=True)
    return done


def _line(turn: Turn, label: str, partitions: int, run: Run) -> str:
    kind = "warm-up" if turn.warm_up else "run"
    return (
        f"{kind:>7} {turn.round}  {label:<26} {partitions:>3} partitions {milliseconds(run.progress):>6.0f} ms a batch"
    )


def _table(
    title: str, labels: Mapping[str, str], summaries: Mapping[str, Summary], runs: Mapping[str, Sequence[Run]]
) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in ("ms", "lowest", "highest", "99 %", *PHASES):
        table.add_column(heading, justify="right")
    for name, summary in summaries.items():
        phases = [statistics.median(milliseconds(run.progress, of) for run in runs[name]) for of in PHASES.values()]
        late = statistics.median(slowest(run.progress) for run in runs[name])
        figures = (summary.median, summary.lowest, summary.highest, late, *phases)
        table.add_row(labels[name], *(f"{figure:,.0f}" for figure in figures))
    return table
