"""What a replay predicts against what really happens: the check of `aion tune` (docs/tuning.md).

A stream is recorded under one policy. Then it is run for real under others, in the same steps of time, with the tiered
store on this machine's disk; and what the recorded trace, replayed, says of each of those policies is compared.

Speeds change from one moment to the next with whatever else the machine does, and hits hang on them; so all of that is
done several times, and medians are compared: what is to be expected with what is to be expected.
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
"""Of the blocks that were read from the disk or staged: a difference in hits that is less is none."""
WORKLOADS = ("average", "linear-road")
BUDGETS: Mapping[str, float] = {"ample": 2.0, "tight": 0.5, "scarce": 0.2}
"""Memory, as a share of what the windows that are kept take."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "none staged": {"prestage.mode": "none"},
    "kept in part": {"destage.keep_fraction": 0.3, "trigger.bound": 0.2},
}


@dataclass(frozen=True, slots=True)
class Settings:
    """One experiment; ``pause_s``: at least so long from batch to batch."""

    scale: float = 0.06
    batches: int = 20
    past_windows: int = 4
    pause_s: float = 0.3
    seed: int = 1
    repeats: int = 3


DEFAULTS = Settings()


def tune_check(
    scale: Annotated[float, typer.Option(min=0.01, max=1, help="Of the workloads' rates and windows.")] = (
        DEFAULTS.scale
    ),
    batches: Annotated[int, typer.Option(min=5, help="Batches of each stream.")] = DEFAULTS.batches,
    past_windows: Annotated[int, typer.Option(min=1, help="How many windows late events come.")] = (
        DEFAULTS.past_windows
    ),
    pause: Annotated[float, typer.Option(min=0, help="Seconds from batch to batch, at least.")] = DEFAULTS.pause_s,
    seed: Annotated[int, typer.Option(min=0, help="Of the streams.")] = DEFAULTS.seed,
    repeats: Annotated[int, typer.Option(min=1, help="Recorded traces, and runs of each case: medians count.")] = (
        DEFAULTS.repeats
    ),
    out: Annotated[Path, typer.Option(help="For results.")] = Path("out/tune-check"),
) -> None:
    """Whether replays predict real runs: bytes, executions and hits within 20 %."""
    from dataclasses import asdict

    from aion.tools.tune.calibrate import calibrate
    from experiments import bench
    from experiments.ingest import wide_console

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


def checked(workload: str, settings: Settings, machine: Any, say: Any) -> list[dict[str, Any]]:
    """A row for each budget, variant and figure."""
    import tempfile

    from aion.config import load_policy
    from aion.execute.trace import read_trace
    from aion.tools.tune.simulator import simulate
    from experiments.tune_traces import operator_of
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
    # What the first batches of a process pay for is not what is asked about.
    run(operator.definition, stream[: settings.batches // 3], basis, settings)
    for repeat in range(settings.repeats):
        with tempfile.TemporaryDirectory(prefix="aion-tune-check-") as folder:
            run(operator.definition, stream, basis, settings, record=Path(folder))
            trace = read_trace(Path(folder))
        for case, policy in policies.items():
            used = memory_share_used()
            real[case].append(run(operator.definition, stream, policy, settings))
            predicted[case].append(figures(simulate(trace, policy, machine, machine_share=used)))
        say(f"{workload}: {repeat + 1} of {settings.repeats}; load over 1, 5 and 15 minutes: {loads()}")
    return [{"case": case, **row} for case in policies for row in compared(predicted[case], real[case])]


def policy_for(shape: Any, budget_bytes: float, changes: Mapping[str, Any]) -> Policy:
    """Windows are kept as long as the last of their events comes."""
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
    """The real operator over the real store; the same figures as those of a replay."""
    import time

    from aion.local import LocalOperator

    with LocalOperator(policy=policy, record=record, **definition) as operator:
        begin = time.monotonic()
        for number, (watermark_us, events) in enumerate(stream):
            time.sleep(max(0.0, begin + number * settings.pause_s - time.monotonic()))
            operator.process(events, watermark_us)
        operator.close()
        moved = operator.io.by_priority
        staging = operator.store.stats().staging
        return {
            "executions": sum(operator.counters["executions"].values()),
            "bytes written": moved["write"].bytes + moved["late_write"].bytes + moved["destage"].bytes,
            "bytes read": moved["read"].bytes + moved["prestage"].bytes,
            "hits": staging.hits,
            "reads": staging.hits + staging.late + staging.misses,
        }


def figures(outcome: Outcome) -> dict[str, float]:
    return {
        "executions": outcome.all_executions,
        "bytes written": outcome.written_bytes,
        "bytes read": outcome.read_bytes,
        "hits": outcome.hits,
        "reads": outcome.hits + outcome.late + outcome.misses,
    }


def loads() -> str:
    import os

    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


def compared(replays: Sequence[Mapping[str, float]], runs: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """The median of each figure but ``reads``, which says of how many blocks hits are: replays' and real runs'."""
    from statistics import median

    rows = []
    for name in ("executions", "bytes written", "bytes read", "hits"):
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

    table = Table(title="replays against real runs", title_justify="left")
    for heading in ("case", "figure"):
        table.add_column(heading, no_wrap=True)
    for heading in ("predicted", "real", "ratio", "least to most", "within 20 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        ratio = f"{row['predicted'] / row['real']:.2f}" if row["real"] else "-"
        colour, words = ("green", "holds") if row["holds"] else ("red", "does not hold")
        spread = f"{min(row['runs']):,.0f} to {max(row['runs']):,.0f}"
        figures = (f"{row['predicted']:,.0f}", f"{row['real']:,.0f}", ratio, spread)
        table.add_row(row["case"], row["figure"], *figures, f"[{colour}]{words}[/{colour}]")
    return table


def verdict(rows: list[dict[str, Any]]) -> str:
    lines = []
    for name in dict.fromkeys(row["figure"] for row in rows):
        of = [row for row in rows if row["figure"] == name]
        good = sum(row["holds"] for row in of)
        words = "holds" if good == len(of) else "does not hold"
        lines.append(f"{name} within 20 % of what was measured: {words} ({good} of {len(of)} runs)")
    return "\n".join(lines)
