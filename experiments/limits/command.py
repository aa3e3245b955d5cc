"""Things that must stay small: memory of readers and workers, a commit during a prestage, requests, a version."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.shared.bench import wide_console

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
PACKAGES = ("aion", "pyarrow", "rocksdict", "orjson")
LEGS = ("memory", "commit", "requests", "workers", "size")


def limits(
    legs: Annotated[str, typer.Option(help=f"Some of: {', '.join(LEGS)}.")] = ",".join(LEGS),
    budget_mib: Annotated[int, typer.Option(min=16, help="memory: the server's budget.")] = 48,
    readers: Annotated[int, typer.Option(min=1, help="memory: blocking readers at once.")] = 8,
    prestage_mib: Annotated[int, typer.Option(min=1, help="commit: MiB that another shard prestages.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="workers: sessions with each of the two daemons.")] = 3,
    days: Annotated[int, typer.Option(min=8, help="size: simulated days of five-minute windows.")] = 365,
    out: Annotated[Path, typer.Option(help="Folder for results and temporary state.", file_okay=False)] = Path(
        "out/limits"
    ),
) -> None:
    """Memory of readers and workers, a commit during a prestage, requests to an object store, size after a year."""
    from experiments.limits import runs as limits_runs
    from experiments.limits import workers as limits_workers
    from experiments.shared import bench

    wanted = [leg.strip() for leg in legs.split(",") if leg.strip()]
    if not wanted or set(wanted) - set(LEGS):
        raise typer.BadParameter(f"--legs {legs}: write some of {', '.join(LEGS)}, separated by commas")
    console = wide_console()
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "experiment": "limits",
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
    }
    with tempfile.TemporaryDirectory(prefix="work-", dir=out.absolute()) as work:
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            "memory": lambda: limits_runs.memory(Path(work), budget_mib, readers),
            "commit": lambda: limits_runs.commit(Path(work), prestage_mib),
            "requests": limits_runs.requests,
            "workers": lambda: limits_workers.workers(Path(work), rounds),
            "size": lambda: limits_runs.size(days),
        }
        for leg in wanted:
            with console.status(leg):
                record[leg] = runs[leg]()
            console.print(summary(leg, record[leg]), highlight=False, soft_wrap=True)
            bench.write_json(out / "limits.json", record)
    console.print(f"written: {out / 'limits.json'}", highlight=False)


def summary(leg: str, found: dict[str, Any]) -> str:
    """The result of a leg in one line."""
    if "missing" in found:
        return f"{leg}: not measured, {found['missing']}"
    match leg:
        case "memory":
            return (
                f"memory: {found['readers']} blocking readers of {found['window_mib']} MiB each, budget "
                f"{found['budget_mib']} MiB: the server took {found['above_idle_mib']:.0f} MiB more than when idle, "
                f"{found['above_idle_mib'] / found['allowed_mib']:.2f} of the {found['allowed_mib']:.0f} allowed"
            )
        case "commit":
            return (
                f"commit: one block takes {found['beside_s']:.3f} s during a prestage of {found['prestage_mib']:,} "
                f"MiB, and {found['alone_s']:.3f} s alone (medians)"
            )
        case "requests":
            each = ", ".join(f"{n:g} {kind}" for kind, n in found["each"].items())
            return f"requests: {each} for each shard and batch; {found['lists_at_opening']} LIST to open a shard"
        case "workers":
            spark, aion = found["spark"], found["aion"]
            return (
                f"workers: together {aion['together_mib']:.0f} MiB, {spark['together_mib']:.0f} if forked by Spark's "
                f"own daemon; not shared {aion['own_mib']:.0f} and {spark['own_mib']:.0f} MiB; a batch of "
                f"{found['events']:,} events takes {aion['batch_s']:.2f} and {spark['batch_s']:.2f} s, the first after "
                f"idle workers were ended {aion['after_idle_s']:.2f} and {spark['after_idle_s']:.2f} s (medians)"
            )
    return (
        f"size: a version after {found['days']} days is {found['last'] / found['first']:.2f} times as large as after "
        f"one week ({found['last']:,} and {found['first']:,} bytes), and {found['last'] / found['full']:.2f} times as "
        f"large as after nine weeks, when the history of lateness is complete ({found['full']:,} bytes); a version "
        f"with 7 days of one-minute windows has {found['minutes']:,} bytes"
    )
