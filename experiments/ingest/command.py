"""The ingest rate of Aion, with partials and with events kept, compared with stock Spark.

All contenders run in one process tree, over the same files, and take turns. ``contenders`` has the contenders,
``shared.bench.steady_rate`` defines the rate.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from experiments.ingest.settings import KEYS, SCHEMA, WINDOW, WINDOW_MS, Settings
from experiments.shared.bench import PACKAGES, as_rows, figures, wide_console

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from experiments.ingest.contenders import Contender
    from experiments.ingest.flink import FlinkJob
    from experiments.shared.bench import Summary, Target, Turn
    from experiments.shared.generate import EventPlan
    from experiments.shared.stream import Run

# The target ratios, by setting. For other settings the ratio is reported without a target.
KEPT_OVER_LIST_STATE = {0: 12.0, 2304: 2.0}  # by payload bytes
KEPT_OVER_SCAN = {2304: 0.45}
UNIQUE_OVER_KEPT = 0.67
# By payload bytes and events of a batch.
KEPT_OVER_FLINK_HEAP = {(2304, 200_000): 0.8, (0, 2_000_000): 1.2}
KEPT_OVER_FLINK_ROCKSDB = {(2304, 100_000): 2.0}
PARTIALS_OVER_WINDOW = {1.0: 0.7, 20.0: 2.0}  # by overlap: the number of windows that hold an event


def ingest(
    events: Annotated[
        int | None,
        typer.Option(min=1, help="Events per batch (a file, a trigger). Default: 2,000,000; with a payload 200,000."),
    ] = None,
    batches: Annotated[int, typer.Option(min=3, help="Batches per run; the first two are not measured.")] = 5,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs per contender.")] = 3,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs per contender before those.")] = 1,
    payload: Annotated[int, typer.Option(min=0, help="Random bytes in each event, e.g. 2304.")] = 0,
    source: Annotated[
        Literal["rows", "files"],
        typer.Option(help="files: compare aion.read_files with Spark's reader, at 1 and 16 million events a batch."),
    ] = "rows",
    curve: Annotated[
        bool,
        typer.Option("--curve", help="The time of a batch of 1,000 to 8 million events, with and without late ones."),
    ] = False,
    slide: Annotated[str | None, typer.Option(help="A new window every SLIDE, e.g. '1 second'.")] = None,
    contenders: Annotated[
        str,
        typer.Option(
            help="Some of: partials,apply,apply-rows,unique,stock-window,tuned-window,list-state,scan,files,"
            "files-apply,partials-python; with --flink also flink-heap,flink-rocksdb,flink-mean."
        ),
    ] = "",
    keys: Annotated[int, typer.Option(min=1, help="How many keys the events have.")] = KEYS,
    list_events: Annotated[
        int, typer.Option(help="Events per run of list-state: whole batches of the same files, at least 3.")
    ] = 6_000_000,
    flink: Annotated[
        Path | None, typer.Option(help="Flink's jars, a folder or a wheel, to measure Flink, too.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Aion's policy: a preset or a file.")] = "standard",
    cores: Annotated[int, typer.Option(min=1, help="Cores, and shuffle partitions.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated events.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Folder for results; OUT/data keeps the generated files.", file_okay=False)
    ] = Path("out/ingest"),
) -> None:
    """Compare the events per second of Aion's two ways with Spark's window().agg and ListState, and with Flink.

    Events have key, time and value (5 % late by 1 to 5 windows), in 20-second windows. Rates are measured from the
    third batch of a run on. ListState is slow, so it reads fewer batches of the same size.
    """
    # Here, not above: `aion --help` and Spark's workers import this module and need none of it.
    from experiments.shared import bench
    from experiments.shared.generate import EventPlan, write_batches

    console = wide_console()
    if source == "files":
        from experiments.ingest.files import compare_files, sizes_for

        if slide is not None or keys != KEYS:
            raise typer.BadParameter("--slide and --keys do not go with --source files")
        sizes = sizes_for(events, payload)
        of_files = choose_files(contenders, payload)
        settings = Settings(max(sizes), dict.fromkeys(of_files, batches), runs, warm_ups, payload, slide, policy, cores)
        found = {"versions": bench.versions(PACKAGES), "machine": bench.machine()}
        start = {"experiment": "ingest", "settings": asdict(settings), "source": source, "sizes": sizes, **found}
        compare_files(settings, of_files, sizes, seed, out, start, console)
        return
    if curve:
        from experiments.ingest.curve import CONTENDERS, SIZES, measure

        if slide is not None or payload or keys != KEYS:
            raise typer.BadParameter("--curve does not go with --slide, --payload or --keys")
        of_curve = choose_files(contenders or ",".join(CONTENDERS), payload)
        sizes = tuple(size for size in SIZES if events is None or size <= events)
        settings = Settings(max(sizes), dict.fromkeys(of_curve, batches), runs, warm_ups, payload, slide, policy, cores)
        found = {"versions": bench.versions(PACKAGES), "machine": bench.machine()}
        start = {"experiment": "ingest", "settings": asdict(settings), "sizes": sizes, **found}
        measure(settings, of_curve, sizes, seed, out, start, console)
        return
    chosen = choose(contenders, sliding=slide is not None, payload_bytes=payload, flink=flink is not None)
    events = events or (200_000 if payload else 2_000_000)
    targets = targets_for(payload, overlap(slide), events)
    batches_of = dict.fromkeys(chosen, batches)
    if "list-state" in chosen:
        batches_of["list-state"] = min(batches, max(3, list_events // events))
    settings = Settings(events, batches_of, runs, warm_ups, payload, slide, policy, cores, keys)
    plan = EventPlan(events_per_batch=events, keys=keys, payload_bytes=payload, seed=seed)
    record: dict[str, Any] = {
        "experiment": "ingest",
        "settings": asdict(settings),
        "data": asdict(plan),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
        "disk_bytes_per_s": disk_rate(out),
    }
    with console.status(f"generating {batches} files of {events:,} events"):
        paths = write_batches(plan, batches, out / "data")
    done = take_turns(settings, chosen, paths, out, record, console, flink_of(flink, out, plan, settings))
    if payload:
        from experiments.ingest.stages import of_carriers

        with console.status("the stages of a kept event"):
            record["stages"] = of_carriers(paths[0], out)
    report(settings, chosen, targets, done, out, record, console)


def take_turns(
    settings: Settings,
    chosen: Mapping[str, Contender | FlinkJob],
    paths: list[Path],
    out: Path,
    record: dict[str, Any],
    console: Console,
    run_flink: Callable[[FlinkJob, Path], Run],
) -> list[tuple[Turn, Run]]:
    """All runs of all contenders. Spark's share one session. Writes each run to the JSON file when it is done."""
    from experiments.ingest.contenders import Shape
    from experiments.ingest.flink import FlinkJob
    from experiments.shared import bench
    from experiments.shared.stream import file_stream, run_to_end, session, spark_settings

    shape = Shape(WINDOW, WINDOW_MS, settings.slide, settings.payload_bytes > 0)
    schema = SCHEMA + (", payload binary" if shape.payload else "")
    any_aion = any(contender.is_aion for contender in chosen.values())
    done: list[tuple[Turn, Run]] = []
    work_dir = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    spark: SparkSession | None = None
    try:
        spark = session(settings.cores, work_dir, policy=settings.policy if any_aion else None)
        record["versions"]["java"] = spark.sparkContext._jvm.System.getProperty("java.version")
        record["spark_conf"] = dict(sorted(spark.sparkContext.getConf().getAll()))
        for turn in bench.turns(list(chosen), settings.runs, settings.warm_ups):
            contender = chosen[turn.contender]
            files = paths[: settings.batches[turn.contender]]
            with console.status(f"round {turn.round}: {contender.label}"):
                if isinstance(contender, FlinkJob):
                    run = run_flink(contender, work_dir)
                else:
                    # Plan and state are new in each run. Only the JVM and the workers stay warm.
                    stream = contender.build(file_stream(spark, files, schema, WINDOW), shape)
                    before = state_bytes(work_dir)
                    with spark_settings(spark, contender.settings):
                        run = run_to_end(stream, work_dir / "checkpoint", settings.events_per_batch * len(files))
                    run = replace(run, state_bytes=state_bytes(work_dir) - before)
            done.append((turn, run))
            kind = "warm-up" if turn.warm_up else "run"
            console.print(
                f"{kind:>7} {turn.round}  {contender.label:<26} {run.wall_s:>6.1f} s   events/s: "
                f"{run.steady_events_per_s:>10,.0f} steady, {run.whole_events_per_s:>10,.0f} whole run"
            )
            # After every run, so that an interruption loses only one run.
            bench.write_json(out / f"{settings.stem}.json", {**record, "runs": as_rows(done)})
    finally:
        if spark is not None:
            spark.stop()
        shutil.rmtree(work_dir, ignore_errors=True)
    return done


def report(
    settings: Settings,
    chosen: Mapping[str, Contender | FlinkJob],
    targets: list[Target],
    done: list[tuple[Turn, Run]],
    out: Path,
    record: dict[str, Any],
    console: Console,
) -> None:
    """Prints tables, and writes all figures as JSON and the steady rates as a bar chart."""
    from experiments.shared import bench

    labels = {name: contender.label for name, contender in chosen.items()}
    steady = figures(chosen, done, lambda run: run.steady_events_per_s)
    rates = bench.summarise(steady)
    whole = bench.summarise(figures(chosen, done, lambda run: run.whole_events_per_s))
    judged = bench.verdicts(targets, rates)
    summary = {name: {"steady": asdict(rates[name]), "whole_run": asdict(whole[name])} for name in rates}
    ratios = [{**asdict(verdict), "verdict": verdict.words} for verdict in judged]
    record = {**record, "events_per_s": summary, "ratios": ratios, "runs": as_rows(done)}
    bench.write_json(out / f"{settings.stem}.json", record)
    bench.bar_chart(out / f"{settings.stem}.png", settings.headline, labels, steady, "events/s")
    console.print()
    console.print(bench.rates_table(settings.headline, labels, rates, columns(settings, done, whole)))
    if judged:
        console.print(bench.ratios_table(labels, judged))
    console.print(remarks(settings), highlight=False)
    console.print(flink_remark(chosen, done), highlight=False)
    if settings.payload_bytes:
        from experiments.ingest import stages

        console.print(disk_remark(settings, done, record["disk_bytes_per_s"], rates), highlight=False)
        console.print(stages.table(record["stages"]))
        stages.chart(out / f"{settings.stem}-stages.png", record["stages"])
    console.print(f"written: {out / settings.stem}.json and .png", highlight=False)


def choose(
    names: str, *, sliding: bool = False, payload_bytes: int = 0, flink: bool = False
) -> dict[str, Contender | FlinkJob]:
    """The contenders with these names, in the order of the comparison; without names all that say something."""
    from experiments.ingest.contenders import CONTENDERS
    from experiments.ingest.flink import JOBS
    from experiments.shared import bench

    known: dict[str, Contender | FlinkJob] = {**CONTENDERS, **(JOBS if flink else {})}
    if sliding:
        known = {name: known[name] for name in ("partials", "stock-window", "tuned-window", "scan")}
    # Without a payload, hardly anything is handed over; with one, a mean keeps nothing of it.
    idle = {"unique", "partials-python", "flink-mean" if payload_bytes else "apply-rows"}
    wanted = bench.pick(names, list(known), [name for name in known if name not in idle])
    return {name: known[name] for name in wanted}


def choose_files(names: str, payload_bytes: int) -> dict[str, Contender]:
    """The contenders of ``--source files`` with these names; without names those that the targets are about."""
    from experiments.ingest.contenders import OF_FILES
    from experiments.shared import bench

    default = ["files-apply", "apply"] if payload_bytes else ["files", "partials", "stock-window"]
    return {name: OF_FILES[name] for name in bench.pick(names, list(OF_FILES), default)}


def overlap(slide: str | None) -> float:
    """The number of windows that hold an event; 1 for tumbling windows."""
    if slide is None:
        return 1.0
    from aion.base.time import duration_us

    try:
        slide_us = duration_us(slide, what="--slide")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not 0 < slide_us <= WINDOW_MS * 1_000:
        raise typer.BadParameter(f"--slide: {slide!r} is not above 0 and up to {WINDOW}; e.g. '1 second'")
    return WINDOW_MS * 1_000 / slide_us


def flink_of(jars: Path | None, out: Path, plan: EventPlan, settings: Settings) -> Callable[[FlinkJob, Path], Run]:
    """Runs a job of Flink over the stream of ``plan``, with the jars that ``--flink`` names.

    Raises typer.BadParameter if they are not those of Flink, or if there is no compiler.
    """
    from experiments.ingest.flink import Flink, Load
    from experiments.shared.flink import FlinkError

    try:
        flink = None if jars is None else Flink(jars, out / "data")
    except FlinkError as error:
        raise typer.BadParameter(f"--flink: {error}") from None
    load = Load.of(plan, max(settings.batches.values()), settings.cores)

    def run(job: FlinkJob, work_dir: Path) -> Run:
        assert flink is not None, "without --flink, Flink cannot be chosen"
        return flink.run(job, load, work_dir)

    return run


def targets_for(payload_bytes: int, windows_per_event: float, events: int) -> list[Target]:
    """The ratios to report, with their targets if these settings have one."""
    from experiments.shared.bench import Target

    return [
        Target("apply", "list-state", KEPT_OVER_LIST_STATE.get(payload_bytes)),
        Target("apply", "apply-rows", None),
        Target("unique", "apply", UNIQUE_OVER_KEPT),
        Target("apply", "scan", KEPT_OVER_SCAN.get(payload_bytes)),
        Target("apply", "flink-rocksdb", KEPT_OVER_FLINK_ROCKSDB.get((payload_bytes, events))),
        Target("apply", "flink-heap", KEPT_OVER_FLINK_HEAP.get((payload_bytes, events))),
        Target("partials", "stock-window", PARTIALS_OVER_WINDOW.get(windows_per_event)),
        Target("partials", "tuned-window", None),
        Target("partials", "flink-mean", None),
    ]


def columns(settings: Settings, done: list[tuple[Turn, Run]], whole: dict[str, Summary]) -> dict[str, dict[str, str]]:
    """The columns of the table besides the steady rates."""
    return {
        "whole run": {name: f"{rate.median:,.0f}" for name, rate in whole.items()},
        "batches": {name: str(count) for name, count in settings.batches.items()},
        "dropped": {turn.contender: f"{run.dropped_by_spark:,}" for turn, run in done},
    }


def remarks(settings: Settings) -> str:
    """The explanations below the tables."""
    from experiments.shared.stream import CHECKPOINTS

    lines = [
        "events/s: median over the runs of input rows / trigger time, without the first two batches of each.",
        "Aion keeps late events and executes their windows again. Spark drops them. dropped: rows per run; for "
        "window().agg, counted after its partial aggregation.",
        CHECKPOINTS,
    ]
    fewest, most = min(settings.batches.values()), max(settings.batches.values())
    if fewest < most:
        lines.append(
            f"ListState is slow, so a run reads only the first {fewest} of the {most} files "
            f"({fewest * settings.events_per_batch:,} events). Batches have the same size for all contenders."
        )
    return "\n".join(lines)


def flink_remark(chosen: Mapping[str, Contender | FlinkJob], done: Sequence[tuple[Turn, Run]]) -> str:
    """How Flink was measured, or how to get it."""
    from experiments.ingest.flink import FlinkJob
    from experiments.shared.flink import CHECKPOINT_MS, HOW_TO_GET

    jobs = [name for name, contender in chosen.items() if isinstance(contender, FlinkJob)]
    if not jobs:
        return HOW_TO_GET
    made = [run.progress[0] for turn, run in done if turn.contender in jobs and not turn.warm_up]
    fewest = min(found["checkpoints"] for found in made)
    return (
        "Flink makes the same distribution of events in its own process, so it reads no source; its windows fire "
        f"again at most once per batch of event time. Checkpoints every {CHECKPOINT_MS / 1_000:g} s, at least {fewest} "
        "in a run."
    )


def disk_rate(folder: Path, size_bytes: int = 256 << 20) -> float:
    """Bytes per second that the disk of a folder writes and syncs: the median of three files."""
    folder.mkdir(parents=True, exist_ok=True)
    data, rates = os.urandom(size_bytes), []
    for _ in range(3):
        with tempfile.TemporaryFile(dir=folder) as file:
            begin = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            rates.append(size_bytes / (time.perf_counter() - begin))
    return statistics.median(rates)


def state_bytes(work_dir: Path) -> int:
    """Bytes of the files of all versions. Files that several shards link count once."""
    found = {}
    for path in (work_dir / "state").rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.is_file():
                found[status.st_ino] = status.st_size
    return sum(found.values())


def disk_remark(settings: Settings, done: Sequence[tuple[Turn, Run]], disk: float, rates: Mapping[str, Summary]) -> str:
    """What the disk allows, and how many bytes were written for each byte of an event."""
    event_bytes = settings.payload_bytes + 24
    lines = [
        f"The disk writes {disk / 1e6:,.0f} MB/s with fsync. 1.3 bytes for each byte of the events would be "
        f"{disk / event_bytes / 1.3:,.0f} events/s."
    ]
    for name in ("apply", "apply-rows"):
        runs = [run for turn, run in done if turn.contender == name and not turn.warm_up]
        if runs and name in rates:
            written = statistics.median(run.state_bytes / (run.events * event_bytes) for run in runs)
            lines.append(f"{name}: {written:.2f} bytes of state were written for each byte of the events.")
    return " ".join(lines)
