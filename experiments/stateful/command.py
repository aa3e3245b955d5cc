"""Stateful processors: Aion compared with stock Spark's ``transformWithState``, and with the floor.

The same processor, unchanged, runs over the same files with Spark's state store, with Aion's, and with its state in a
dict that nobody saves. The contenders take turns in one session.
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

if TYPE_CHECKING:
    from experiments.shared.bench import Target
    from experiments.stateful.runs import Measured

PACKAGES = ("aion", "pyspark", "pyarrow", "pandas", "numpy", "rocksdict")
OVER_STOCK = {"value": 5.0, "list": 10.0, "map": 5.0, "session": 5.0}
OF_FLOOR = 0.6
"""Where the floor itself is less than OVER_STOCK times as fast as Spark, this share of the floor is the target."""
OF_MEMORY = 0.6
NAMES = ("value", "list", "map", "session", "tiers")


@dataclass(frozen=True, slots=True)
class Settings:
    events_per_batch: int
    batches: int
    runs: int
    warm_ups: int
    legs: tuple[str, ...]
    contenders: tuple[str, ...]
    pandas: bool
    policy: str
    cores: int
    seed: int

    @property
    def stem(self) -> str:
        return "stateful-pandas" if self.pandas else "stateful"


def stateful(
    events: Annotated[int, typer.Option(min=1, help="Events in a batch.")] = 250_000,
    batches: Annotated[int, typer.Option(min=3, help="Batches per run; the first two are not measured.")] = 6,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs per contender.")] = 2,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs per contender before those.")] = 0,
    legs: Annotated[str, typer.Option(help="Some of: value,list,map,session,tiers.")] = "",
    contenders: Annotated[str, typer.Option(help="Some of: stock,tuned,aion,floor.")] = "",
    pandas: Annotated[bool, typer.Option("--pandas", help="Processors of frames, not of rows.")] = False,
    policy: Annotated[str, typer.Option(help="Aion's policy: a preset or a file.")] = "standard",
    cores: Annotated[int, typer.Option(min=1, help="Cores, and shuffle partitions.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated events.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for results; OUT/data keeps the files.", file_okay=False)] = Path(
        "out/stateful"
    ),
) -> None:
    """Compare Aion with Spark's transformWithState, and with a processor whose state costs nothing.

    Events/s of counts, lists, maps and sessions. The last leg has ten times as much state as memory.
    """
    from experiments.shared import bench
    from experiments.shared.bench import wide_console
    from experiments.stateful.runs import CONTENDERS, has_aion

    console = wide_console()
    able = [name for name in CONTENDERS if name != "aion" or has_aion()]
    chosen = tuple(bench.pick(contenders, list(CONTENDERS), able))
    if "aion" in chosen and not has_aion():
        raise typer.BadParameter("this version of Aion has no group_by; use --contenders stock,tuned,floor")
    wanted = bench.pick(legs, NAMES)
    if "aion" not in chosen:
        wanted = [name for name in wanted if name != "tiers"]
    settings = Settings(events, batches, runs, warm_ups, tuple(wanted), chosen, pandas, policy, cores, seed)
    record: dict[str, Any] = {
        "experiment": "stateful",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
    }
    out.mkdir(parents=True, exist_ok=True)
    report(settings, take_turns(settings, out, record, console), out, record, console)


def of_leg(leg: str, contenders: Sequence[str]) -> list[str]:
    """The contenders of a leg. Aion in memory is compared with Aion on disk."""
    from experiments.stateful.runs import TIERS

    return list(TIERS) if leg == "tiers" else list(contenders)


def take_turns(settings: Settings, out: Path, record: dict[str, Any], console: Console) -> list[Measured]:
    """All measured runs, in one session. Writes each to the JSON file when it is done."""
    from experiments.shared import bench
    from experiments.shared.generate import write_batches
    from experiments.shared.stream import session
    from experiments.stateful.runs import LEGS, measure, tier

    done: list[Measured] = []
    work = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    spark = session(settings.cores, work, policy=settings.policy)
    try:
        for leg in settings.legs:
            paths = write_batches(
                LEGS[leg].plan(settings.events_per_batch, settings.seed), settings.batches, out / "data"
            )
            for turn in bench.turns(of_leg(leg, settings.contenders), settings.runs, settings.warm_ups):
                with console.status(f"{leg}, round {turn.round}: {turn.contender}"):
                    if leg == "tiers":
                        # A state server keeps the largest budget that it was given. Each session has its own server.
                        spark.stop()
                        spark = session(settings.cores, work, policy=settings.policy)
                        found = tier(spark, turn.contender, settings.pandas, paths, work)
                    else:
                        found = measure(spark, leg, turn.contender, settings.pandas, paths, work)
                if not turn.warm_up:
                    done.append(found)
                console.print(
                    f"{leg:<8} {turn.round} {turn.contender:<10} {found.events_per_s:>12,.0f} events/s", highlight=False
                )
                bench.write_json(out / f"{settings.stem}.json", {**record, "runs": [m.to_json() for m in done]})
    finally:
        spark.stop()
        shutil.rmtree(work, ignore_errors=True)
    return done


def targets(legs: Sequence[str], contenders: Sequence[str], medians: dict[str, float]) -> list[Target]:
    """The ratios and their targets. What no store can reach, since the floor does not, is measured by the floor."""
    from experiments.shared.bench import Target

    found: list[Target] = []
    for leg in legs:
        if leg == "tiers":
            found += [Target("tiers disk", "tiers memory", OF_MEMORY), Target("tiers disk", "tiers disk-plain", None)]
            continue
        stock, floor = (medians.get(f"{leg} {name}") for name in ("stock", "floor"))
        reachable = stock is None or floor is None or floor >= OVER_STOCK[leg] * stock
        found += [
            Target(f"{leg} aion", f"{leg} stock", OVER_STOCK[leg] if reachable else None),
            Target(f"{leg} aion", f"{leg} floor", None if reachable else OF_FLOOR),
            Target(f"{leg} aion", f"{leg} tuned", None),
            Target(f"{leg} floor", f"{leg} stock", None),
        ]
    return found


def report(settings: Settings, done: Sequence[Measured], out: Path, record: dict[str, Any], console: Console) -> None:
    """Prints tables, and writes all figures as JSON and the rates as a bar chart."""
    from experiments.shared import bench
    from experiments.shared.stream import CHECKPOINTS
    from experiments.stateful.runs import CONTENDERS, LEGS, TIERS

    rates: dict[str, list[float]] = {}
    for measured in done:
        rates.setdefault(f"{measured.leg} {measured.contender}", []).append(measured.events_per_s)
    labels = {
        f"{leg} {name}": f"{LEGS[leg].label}: {(TIERS if leg == 'tiers' else CONTENDERS)[name]}"
        for leg in settings.legs
        for name in of_leg(leg, settings.contenders)
    }
    summary = bench.summarise(rates)
    medians = {name: figure.median for name, figure in summary.items()}
    judged = bench.verdicts(targets(settings.legs, settings.contenders, medians), summary)
    title = (
        f"stateful processors of {'frames' if settings.pandas else 'rows'}, "
        f"batches of {settings.events_per_batch:,} events, {settings.cores} cores"
    )
    bench.write_json(
        out / f"{settings.stem}.json",
        {
            **record,
            "events_per_s": {name: asdict(figure) for name, figure in summary.items()},
            "ratios": [{**asdict(verdict), "verdict": verdict.words} for verdict in judged],
            "runs": [measured.to_json() for measured in done],
        },
    )
    bench.bar_chart(out / f"{settings.stem}.png", title, labels, rates, "events/s")
    console.print()
    console.print(bench.rates_table(title, labels, summary, {}))
    console.print(bench.ratios_table(labels, judged))
    console.print(f"{REMARKS}\n{CHECKPOINTS}", highlight=False)
    console.print(f"written: {out / settings.stem}.json and .png", highlight=False)


REMARKS = """\
events/s: events of a batch / the median time of a batch (triggerExecution), without the first two batches of a run.
floor: the same processor behind the same shuffle, in mapInArrow, with its state in a dict of the Python worker.
Nothing of it is saved. If the floor itself does not reach the target over Spark, the target is 0.6 of the floor."""
