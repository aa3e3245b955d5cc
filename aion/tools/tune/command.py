"""``aion tune``: replays a trace under many policies, and writes the chosen one as a file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from aion.base.numbers import counted
from aion.config import Policy, format_bytes, load_policy, policy_to_json
from aion.config.reference import comment, commented
from aion.errors import ConfigError
from aion.execute.record.trace import Trace
from aion.tools.tune.calibrate import calibrate
from aion.tools.tune.disk import Machine
from aion.tools.tune.search import Goal, Result, Tried, changed, search
from aion.tools.tune.simulator import as_recorded

MOST_ROWS = 20


def machine_of(path: Path | None, console: Console, *, durable: bool) -> Machine:
    """Returns the machine in the file ``path``. If there is no such file, measures it and writes it. Raises
    ConfigError.
    """
    if path is not None and path.exists():
        try:
            return Machine(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: not a file that `aion tune --machine` wrote: {error}") from error
    with console.status("measuring the disk"):
        machine = calibrate(durable=durable)
    if path is not None:
        write_text(path, json.dumps(asdict(machine), indent=2) + "\n")
    return machine


def tune(
    trace: Trace,
    goal: Goal,
    machine: Machine,
    *,
    source: str,
    policy: str,
    out: Path,
    evaluations: int,
    seed: int,
    console: Console,
) -> Result:
    """Searches, prints the front, and writes the chosen policy."""
    if not trace.events:
        raise ConfigError(f"{source}: there are no events, so there is nothing to tune for")
    console.print(what_came(trace, source), highlight=False)
    console.print(words_of(as_recorded(machine, trace)), highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("replaying policies", total=evaluations)
        result = search(
            trace,
            goal,
            machine,
            policy=load_policy(policy),
            evaluations=evaluations,
            seed=seed,
            on_done=lambda done: progress.update(task, completed=done),
        )
    console.print(front_table(result, goal))
    if result.goal != goal:
        console.print(
            f"batches are too far apart for a staleness of {goal.staleness:g}: even a bound of a fifth of it gives "
            f"{result.goal.staleness / 1.05:.3g}; the search asked for at most {result.goal.staleness:.3g}",
            highlight=False,
        )
    if not result.kept:
        console.print("no policy that was tried keeps memory, staleness and coverage at once", style="red")
    write_text(out, policy_yaml(result, goal, source, policy))
    load_policy(out)  # it must pass `aion policy check`
    console.print(f"written: {out}", highlight=False, soft_wrap=True)
    return result


def what_came(trace: Trace, source: str) -> str:
    late_us, events = trace.lateness_us()
    share = events.sum() / max(1, trace.events)
    return (
        f"{source}: {counted(trace.events, 'event')} in {len(trace.batches):,} batches "
        f"of {counted(len(trace.shards), 'shard')}, {trace.bytes / 2**20:,.1f} MiB; "
        f"{share:.1%} late, the latest by {late_us.max() / 1e6:,.1f} s"
    )


def words_of(machine: Machine) -> str:
    return (
        f"disk: reads {machine.read_bytes_per_s / 2**20:,.0f} MiB/s and {machine.read_block_s * 1e6:,.0f} µs a block, "
        f"writes {machine.write_bytes_per_s / 2**20:,.0f} MiB/s and {machine.write_file_s * 1e3:,.1f} ms a file"
    )


def front_table(result: Result, goal: Goal) -> Table:
    title = f"{len(result.front)} of {len(result.tried)} policies: no other one is better in everything"
    table = Table(title=title, title_justify="left")
    headings = ("memory", "blocked", "staleness", "executions", "written", "hits", "kept late")
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("budget, bucket, keep, prestage, bound")
    for one in shown(result):
        o, keys = one.outcome, one.keys
        asked = o.hits + o.late + o.misses
        table.add_row(
            "chosen" if one is result.chosen else "",
            f"{o.memory_bytes / 2**20:,.1f} MiB",
            f"{o.blocked_s:,.3f} s",
            f"{o.staleness:.3f}",
            f"{o.all_executions:,} in {o.execution_s:,.2f} s",
            f"{o.written_bytes / 2**20:,.1f} MiB",
            f"{o.hits / asked:.0%}" if asked else "-",
            f"{o.coverage:.2%}",
            f"{keys['memory.budget']}, {keys['memory.bucket_limit']}, {keys['destage.keep_fraction']:g}, "
            f"{keys['prestage.mode']}, {keys['trigger.bound']:g}",
        )
    return table


def shown(result: Result) -> list[Tried]:
    """Returns the front. If it is long, some of it, evenly spread, and the chosen one."""
    front = list(result.front)
    if len(front) <= MOST_ROWS:
        return front
    step = len(front) / (MOST_ROWS - 1)
    places = {int(i * step) for i in range(MOST_ROWS - 1)} | {front.index(result.chosen)}
    return [front[i] for i in sorted(places)]


def policy_yaml(result: Result, goal: Goal, source: str, policy: str) -> str:
    """Returns the chosen policy as a file. Has the keys that the search set, each with its meaning. The rest is the
    default.
    """
    o = result.chosen.outcome
    head = [
        f"Chosen by aion tune for {source}, among {len(result.tried)} policies that it replayed, beginning with the "
        f"policy {policy}. Keys that are not in this file have their default.",
        f"Asked: memory {format_bytes(goal.memory_bytes)}, staleness {goal.staleness:g}, coverage {goal.coverage:g}"
        + ("." if result.kept else ". Not all of it is kept."),
        f"Predicted: {o.memory_bytes / 2**20:,.1f} MiB of blocks at most, {o.blocked_s:.3g} s blocked, "
        f"{o.all_executions:,} executions in {o.execution_s:.3g} s, mean staleness {o.staleness:.3g}, "
        f"{o.written_bytes / 2**20:,.1f} MiB "
        f"written, {o.coverage:.2%} of late events kept.",
    ]
    base = load_policy(policy)
    # The file also has the settings of the policy that the search began with: it must not depend on that one.
    defaults, begun = policy_to_json(Policy()), policy_to_json(base)
    settings: dict[str, dict[str, Any]] = {
        section: {key: value for key, value in keys.items() if value != defaults[section][key]}
        for section, keys in begun.items()
    }
    for section, keys in changed(result.chosen).items():
        settings[section].update(keys)
    lines = [line for text in head for line in comment(text)]
    return "\n".join([*lines, "", *commented(settings)]) + "\n"


def write_text(path: Path, text: str) -> None:
    """Writes a file that is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
