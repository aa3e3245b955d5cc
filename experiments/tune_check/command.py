"""Checks the predictions of `aion tune` against real runs (docs/operate/tuning.md).

A stream is recorded under one policy. Then it really runs under other policies, with the same timing, on the tiered
store on this machine's disk. The figures of each run are compared with those of a replay of the recorded trace under
the same policy.

Speeds change with whatever else the machine does, and hits depend on them. So everything is repeated several times, and
medians are compared with medians.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table

    from aion.config import Policy
    from aion.tools.tune.simulator import Outcome

PACKAGES = ("aion", "numpy", "pyarrow", "rocksdict")
WITHIN = 0.2
FEW = 0.02
"""Ignore a difference in hits below this share of the blocks that reads did not find in memory all along."""
WORKLOADS = ("average", "linear-road")
BUDGETS: Mapping[str, float] = {"ample": 2.0, "tight": 0.5, "scarce": 0.2}
"""Memory, as a share of the size of the kept windows."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "none staged": {"prestage.mode": "none"},
    "kept in part": {"destage.keep_fraction": 0.3, "trigger.bound": 0.2},
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one run of the experiment. ``pause_s``: the least time from one batch to the next."""

    scale: float = 0.06
    batches: int = 20
    past_windows: int = 4
    pause_s: float = 0.3
    seed: int = 1
    repeats: int = 3


DEFAULTS = Settings()


def tune_check(
    scale: Annotated[float, typer.Option(min=0.01, max=1, help="Scale of the workloads' rates and windows.")] = (
        DEFAULTS.scale
    ),
    batches: Annotated[int, typer.Option(min=5, help="Batches of each stream.")] = DEFAULTS.batches,
    past_windows: Annotated[int, typer.Option(min=1, help="How many windows late an event may be.")] = (
        DEFAULTS.past_windows
    ),
    pause: Annotated[float, typer.Option(min=0, help="Least seconds from one batch to the next.")] = DEFAULTS.pause_s,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the streams.")] = DEFAULTS.seed,
    repeats: Annotated[int, typer.Option(min=1, help="Traces recorded, and runs of each case; medians count.")] = (
        DEFAULTS.repeats
    ),
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/tune-check"),
) -> None:
    """Check that replays predict real runs: bytes, executions, their seconds, and hits within 20 %."""
    from dataclasses import asdict

    from aion.tools.tune.calibrate import calibrate
    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    console = wide_console()
    settings = Settings(scale, batches, past_windows, pause, seed, repeats)
    with console.status("measuring the disk"):
        machine = calibrate(durable=False)
    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        rows += checked(workload, settings, machine, lambda text: console.print(text, highlight=False))
    console.print(table_of(rows))
    console.print(verdict(rows), highlight=False)
    record = {
        "experiment": "tune-check",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
        "disk": asdict(machine),
        "results": rows,
    }
    bench.write_json(out / "tune-check.json", record)
    console.print(f"written: {out / 'tune-check.json'}", highlight=False, soft_wrap=True)


def checked(workload: str, settings: Settings, machine: Any, show: Any) -> list[dict[str, Any]]:
    """A row for each budget, variant and figure."""
    import tempfile

    from aion.config import load_policy
    from aion.execute.record.trace import read_trace
    from aion.tools.tune.simulator import simulate
    from experiments.tune_check.traces import operator_of
    from experiments.workloads import load
    from experiments.workloads.model import Shape
    from state_backends.server.machine import memory_share_used

    made = load(workload)
    shape = Shape.of(made.spec, past_windows=settings.past_windows, scale=settings.scale, seed=settings.seed)
    operator = operator_of(workload, shape)
    stream = [
        (shape.start_us(batch), made.streams[operator.stream](shape, batch)[0]) for batch in range(settings.batches)
    ]
    state = sum(events.nbytes for _, events in stream) / settings.batches * (settings.past_windows + 1)
    basis = load_policy(policy_for(shape, 2.0 * state, {}))
    policies = {
        f"{workload}, {name}, {variant}": load_policy(policy_for(shape, share * state, changes))
        for name, share in BUDGETS.items()
        for variant, changes in VARIANTS.items()
    }
    predicted: dict[str, list[dict[str, float]]] = {case: [] for case in policies}
    real: dict[str, list[dict[str, float]]] = {case: [] for case in policies}
    # Warm up: the first batches of a process are slower.
    run(operator.definition, stream[: settings.batches // 3], basis, settings)
    for repeat in range(settings.repeats):
        with tempfile.TemporaryDirectory(prefix="aion-tune-check-") as folder:
            run(operator.definition, stream, basis, settings, record=Path(folder))
            trace = read_trace(Path(folder))
        for case, policy in policies.items():
            used = memory_share_used()
            real[case].append(run(operator.definition, stream, policy, settings))
            predicted[case].append(figures(simulate(trace, policy, machine, machine_share=used)))
        show(f"{workload}: {repeat + 1} of {settings.repeats}; load averages over 1, 5 and 15 minutes: {loads()}")
    return [{"case": case, **row} for case in policies for row in compared(predicted[case], real[case])]


def policy_for(shape: Any, budget_bytes: float, changes: Mapping[str, Any]) -> Policy:
    """The policy of a case. Windows are kept until the last of their events can come."""
    from aion.config import load_policy

    budget = max(1 << 20, int(budget_bytes))
    keys = {
        "memory.budget": budget,
        "memory.bucket_limit": min(budget, 64 << 20),
        "blocks.target": "128KiB",
        "lateness.initial_bound": shape.part(shape.past_windows + 1),
        "lateness.coverage": None,
    }
    return load_policy("standard", {**keys, **changes})


def run(
    definition: Mapping[str, Any],
    stream: list[tuple[int, pa.Table]],
    policy: Policy,
    settings: Settings,
    record: Path | None = None,
) -> dict[str, float]:
    """Runs the real operator on the real store, and returns the same figures as a replay."""
    import tempfile

    if record is None:
        with tempfile.TemporaryDirectory(prefix="aion-tune-check-") as folder:
            return run(definition, stream, policy, settings, record=Path(folder))
    import time

    from pyarrow import parquet

    from aion.config.sections import TracePolicy
    from aion.local import LocalOperator

    recorded = policy.model_copy(update={"trace": TracePolicy(folder=str(record))})
    with LocalOperator(policy=recorded, **definition) as operator:
        begin = time.monotonic()
        for number, (watermark_us, events) in enumerate(stream):
            time.sleep(max(0.0, begin + number * settings.pause_s - time.monotonic()))
            operator.process(events, watermark_us)
        operator.close()
        moved = operator.io.by_priority
        staging = operator.store.stats().staging
        recorded = parquet.read_table(record, columns=["kind", "took_us"], filters=[("kind", "=", "execution")])
        return {
            "executions": sum(operator.counters["executions"].values()),
            "seconds of executions": sum(recorded["took_us"].to_pylist()) / 1e6,
            "bytes written": moved["write"].bytes + moved["late_write"].bytes + moved["destage"].bytes,
            "bytes read": moved["read"].bytes + moved["prestage"].bytes,
            "hits": staging.hits,
            "reads": staging.hits + staging.late + staging.misses,
        }


def figures(outcome: Outcome) -> dict[str, float]:
    return {
        "executions": outcome.all_executions,
        "seconds of executions": outcome.execution_s,
        "bytes written": outcome.written_bytes,
        "bytes read": outcome.read_bytes,
        "hits": outcome.hits,
        "reads": outcome.hits + outcome.late + outcome.misses,
    }


def loads() -> str:
    import os

    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


def compared(replays: Sequence[Mapping[str, float]], runs: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """A row for each figure: the medians of replays and of real runs. ``reads`` only sets the tolerance for hits."""
    from statistics import median

    rows = []
    for name in ("executions", "seconds of executions", "bytes written", "bytes read", "hits"):
        every = {"predictions": [replay[name] for replay in replays], "runs": [run[name] for run in runs]}
        predicted, real = (median(found) for found in every.values())
        allowed = WITHIN * real
        if name == "hits":
            allowed = max(allowed, FEW * median(run["reads"] for run in runs))
        holds = abs(predicted - real) <= allowed
        rows.append({"figure": name, "predicted": predicted, "real": real, **every, "holds": holds})
    return rows


def table_of(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="replays compared with real runs", title_justify="left")
    for heading in ("case", "figure"):
        table.add_column(heading, no_wrap=True)
    for heading in ("predicted", "real", "ratio", "least to most", "within 20 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        ratio = f"{row['predicted'] / row['real']:.2f}" if row["real"] else "-"
        colour, words = ("green", "holds") if row["holds"] else ("red", "does not hold")
        digits = 2 if "seconds" in row["figure"] else 0
        least, most, predicted, real = (
            f"{figure:,.{digits}f}" for figure in (min(row["runs"]), max(row["runs"]), row["predicted"], row["real"])
        )
        figures = (predicted, real, ratio, f"{least} to {most}")
        table.add_row(row["case"], row["figure"], *figures, f"[{colour}]{words}[/{colour}]")
    return table


def verdict(rows: list[dict[str, Any]]) -> str:
    lines = []
    for name in dict.fromkeys(row["figure"] for row in rows):
        of = [row for row in rows if row["figure"] == name]
        good = sum(row["holds"] for row in of)
        words = "holds" if good == len(of) else "does not hold"
        lines.append(f"{name} within 20 % of the measurement: {words} ({good} of {len(of)} cases)")
    return "\n".join(lines)
