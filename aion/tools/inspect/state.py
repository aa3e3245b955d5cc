"""Shows the contents of a state folder, and sets a query back to its newest complete batch."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from aion.base.time import format_instant
from aion.config.values import about_bytes
from aion.core.lateness.observe import Lateness
from aion.core.lateness.sketch import LatenessSketch
from aion.core.operator.overview import by_status
from aion.errors import ConfigError, FormatError
from aion.execute.files.skipped import FOLDER
from aion.tools.inspect import tables
from aion.tools.inspect.windows import show_windows
from policies.durations import short_duration
from state_backends.files.storage import local_path
from state_backends.server.client import running_servers
from state_backends.versions.audit import Repair, ShardFinding, StateFolder, by_query, plan_repair
from state_backends.versions.manifest import runs_of

SET_ASIDE = "aion-set-aside"
WINDOWS = 20
_LOGS = ("offsets", "commits")


def inspect(state_dir: str, *, repair: bool, checkpoint: Path | None, contents: bool, windows: int = WINDOWS) -> bool:
    """Prints the contents of the folder. Returns whether it is undamaged, or was repaired.

    ``windows``: the most windows to show for each operator. ``checkpoint``: with it, only the state that belongs to
    this checkpoint is repaired. Raises ConfigError if there is no state, or if something is damaged and no state here
    belongs to the checkpoint. Raises FormatError if nothing is damaged, but another version of Aion wrote some of it.
    """
    if checkpoint is not None and not checkpoint.is_dir():
        raise ConfigError(f"--checkpoint: {checkpoint} is not a folder")
    console = tables.console()
    folder = StateFolder(state_dir)
    try:
        findings = _check(folder, console, contents)
        unused = [finding for finding in folder.without_shards() if finding.operator_problem is not None]
        if not findings and not unused:
            raise nothing_in(folder)
        for query, found in by_query(findings):
            console.print(_shards(query, found))
            with_values = [finding for finding in found if _is_keyed(finding)]
            with_windows = [finding for finding in found if finding not in with_values]
            if with_windows:
                console.print(_operators(with_windows))
                show_windows(console, with_windows, windows)
            if with_values:
                console.print(_values(with_values))
        console.print(_servers())
        damage = list(dict.fromkeys(line for finding in findings + unused for line in finding.damage))
        others = list(dict.fromkeys(line for finding in findings + unused for line in finding.other_formats))
        if not damage and others:
            raise FormatError(others[0])
        if not damage:
            console.print("every version is whole" if contents else "every version has all files, of the right size")
            return True
        for line in damage:
            console.print(f"damaged: {line}", style="red")
        for line in others:
            console.print(f"of another Aion: {line}")
        repaired = [found for _, found in by_query(findings + unused)]
        if checkpoint is not None:
            repaired = [_of_checkpoint(folder, repaired, checkpoint)]
        left = not repair
        for query, found in by_query(findings + unused):
            if not any(finding.damage for finding in found):
                continue
            if any(finding.other_formats for finding in found):
                left = True
                console.print(f"{_name(found)}: nothing is changed; repair it with the Aion that wrote all of it")
            elif found in repaired:
                repaired_it = _repair(folder, plan_repair(query, found), found, repair, checkpoint, console)
                left = left or not repaired_it
            else:
                left = True
                console.print(f"{_name(found)}: its state is not that of {checkpoint}, so nothing of it is changed")
        return not left
    finally:
        folder.close()


def nothing_in(folder: StateFolder) -> ConfigError:
    """Returns the error for a folder without state."""
    if folder.is_checkpoint():
        return ConfigError(
            f"{folder.state_dir} is the checkpoint of a query; give the folder of its state (spark.aion.state.dir)"
        )
    return ConfigError(f"{folder.state_dir}: no state of any query; is it the folder of spark.aion.state.dir?")


def _check(folder: StateFolder, console: Console, contents: bool) -> list[ShardFinding]:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)
        return [
            folder.check(shard, contents=contents, progress=lambda size: progress.advance(task, size))
            for shard in folder.shards()
        ]


def _shards(query: str, findings: list[ShardFinding]) -> Table:
    numbers = ("shard", "versions", "batches", "files", "bytes", "orphans")
    table = tables.table(f"query {query}", ("operator", *numbers, "whole"), numbers)
    for finding in findings:
        batches = [v.batch for v in finding.versions]
        broken = sum(v.problem is not None for v in finding.versions)
        newest = finding.newest
        up_to = f"up to batch {newest.batch}" if newest else "no"
        table.add_row(
            finding.operator,
            tables.called(finding.shard, newest.manifest.identity.ids if newest and newest.manifest else ()),
            f"{len(finding.versions):,}",
            f"{min(batches)} to {max(batches)}" if batches else "none",
            f"{len(finding.files):,}",
            about_bytes(finding.files_bytes),
            f"{len(finding.orphans):,}",
            "yes" if not broken else up_to,
        )
    return table


def _operators(findings: list[ShardFinding]) -> Table:
    numbers = ("windows", "blocks", "bytes", "late events", "lateness 50%, 99%, all")
    table = tables.table("as of the newest whole version of each shard", ("operator", "watermark", *numbers), numbers)
    for operator in sorted({f.operator for f in findings}):
        newest = [f.newest.manifest for f in findings if f.operator == operator and f.newest and f.newest.manifest]
        snapshots = [m.snapshot for m in newest]
        windows: Counter[str] = Counter()
        lateness = LatenessSketch()
        for snapshot in snapshots:
            windows.update(by_status(snapshot))
            if live := sum(keyed["live"]["windows"] for keyed in snapshot["keyed"] if "live" in keyed):
                windows["of single keys"] += live
            lateness.merge(LatenessSketch(Lateness.from_json(snapshot["lateness"]["lateness"]).counts))
        watermarks = [s["watermark_us"] for s in snapshots if s["watermark_us"] is not None]
        shares = [short_duration(int(lateness.quantile_us(share))) for share in (0.5, 0.99, 1.0)]
        table.add_row(
            operator,
            format_instant(min(watermarks)) if watermarks else "none",
            ", ".join(f"{n:,} {status}" for status, n in sorted(windows.items())) or "none",
            f"{sum(f.blocks for m in newest for f in m.files):,}",
            about_bytes(sum(f.size_bytes for m in newest for f in m.files)),
            f"{sum(s['counters']['late_events'] for s in snapshots):,}",
            ", ".join(shares) if lateness.total else "none",
        )
    return table


def _is_keyed(finding: ShardFinding) -> bool:
    """Returns whether a shard has the keyed values of a stateful processor, and no windows."""
    manifest = finding.newest.manifest if finding.newest else None
    return manifest is not None and "windows" not in manifest.snapshot


def _values(findings: list[ShardFinding]) -> Table:
    numbers = ("files", "keys in them", "bytes")
    table = tables.table("keyed values, as of the newest whole version of each shard", ("operator", *numbers), numbers)
    for operator in sorted({f.operator for f in findings}):
        newest = [f.newest.manifest for f in findings if f.operator == operator and f.newest and f.newest.manifest]
        runs = [run for manifest in newest for run in runs_of(manifest)]
        table.add_row(
            operator,
            f"{len(runs):,}",
            f"{sum(run.blocks for run in runs):,}",  # a key counts once in each file that has it
            about_bytes(sum(run.size_bytes for run in runs)),
        )
    return table


def _servers() -> Table | str:
    """Returns what is in memory. Only the state servers know this, so it covers only those of this host."""
    servers = running_servers()
    if not servers:
        return "in memory: no state server of this user runs on this host"
    numbers = ("pid", "shards", "in memory", "on disk", "on disk only", "budget")
    table = tables.table("state servers of this user on this host", numbers, numbers)
    for pid, stats in servers:
        sizes = ("m_bucket_bytes", "p_bucket_bytes", "disk_only_bytes", "budget_bytes")
        table.add_row(str(pid), str(stats["shards"]), *(about_bytes(stats[size]) for size in sizes))
    return table


# -- repair -----------------------------------------------------------------------------------------------


def _repair(
    folder: StateFolder,
    plan: Repair,
    found: list[ShardFinding],
    wanted: bool,
    checkpoint: Path | None,
    console: Console,
) -> bool:
    """Says what to do, and does it if that is wanted. Returns whether it has repaired anything."""
    changed = 0
    who = _name(found)
    if plan.last < 0:
        console.print(f"{who}: no batch of it has ended yet, so none has to run again")
    elif plan.batch is None:
        console.print(f"{who}: there is no batch after which every shard is whole; start it with a new checkpoint")
    elif not plan.replay:
        console.print(f"{who}: the newest batch, {plan.batch}, is whole in every shard; older versions are not needed")
    else:
        again = f"{plan.replay.start} to {plan.last}" if len(plan.replay) > 1 else str(plan.last)
        console.print(f"{who}: the newest batch after which every shard is whole is {plan.batch}; replay: {again}")
        if not wanted:
            console.print("stop the query and run this with --repair --checkpoint DIR to set it back to that batch")
        elif checkpoint is None:
            logs = " and ".join(f"{log}/" for log in _LOGS)
            console.print(
                f"now move the entries above {plan.batch} out of {logs} of its checkpoint, or give --checkpoint"
            )
        else:
            moved = set_back(checkpoint, plan.query, plan.batch)
            changed += len(moved)
            folder.undo(plan.query, folder.checkpoint(plan.query, found[0].operator), plan.batch)
            console.print(f"{checkpoint}: {len(moved)} log entries moved to {SET_ASIDE}; start the query again")
    if wanted:
        for path in [path for finding in found for path in folder.set_aside(finding)]:
            console.print(f"set aside: {path}")
            changed += 1
    repaired = changed > 0 and (plan.batch is not None or plan.last < 0)
    if wanted and not repaired:
        console.print(f"{who}: it was not repaired")
    return repaired


def _of_checkpoint(folder: StateFolder, found: list[list[ShardFinding]], checkpoint: Path) -> list[ShardFinding]:
    """Returns the findings of the query and lineage whose state belongs to a checkpoint.

    A checkpoint that was moved is known by the id of its query alone. Raises ConfigError if there is no such state, or
    if it could be that of several lineages.
    """
    metadata = checkpoint / "metadata"
    if not metadata.is_file():
        raise ConfigError(f"--checkpoint: {checkpoint} is not the checkpoint of a query; it has no file 'metadata'")
    text = metadata.read_text(errors="replace")
    same = [findings for findings in found if findings[0].query in text]
    if not same:
        queries = ", ".join(sorted({findings[0].query for findings in found}))
        raise ConfigError(f"--checkpoint: {checkpoint} is not the checkpoint of a query in this folder, {queries}")
    exact = [findings for findings in same if any(_is_place(folder, f, checkpoint) for f in findings)]
    match exact or same:
        case [findings]:
            return findings
    raise ConfigError(
        f"--checkpoint: the state of {checkpoint} may be any of {', '.join(map(_name, same))}; move the checkpoint "
        "back to where it was (--lineages), or use --repair without --checkpoint and follow what it says"
    )


def _is_place(folder: StateFolder, finding: ShardFinding, checkpoint: Path) -> bool:
    """Returns whether the state belongs to the checkpoint at this very place."""
    place = local_path(folder.checkpoint(finding.query, finding.operator) or "")
    return place is not None and place.resolve() == checkpoint.resolve()


def _name(findings: list[ShardFinding]) -> str:
    first = findings[0]
    return f"query {first.query}" + (f", {first.lineage}" if first.lineage else "")


def set_back(checkpoint: Path, query: str, batch: int) -> list[Path]:
    """Makes Spark continue after ``batch``: moves later entries of its logs aside, so that those batches run again.

    Returns the moved entries. Raises ConfigError if the folder is not the checkpoint of that query.
    """
    metadata = checkpoint / "metadata"
    if not metadata.is_file() or query not in metadata.read_text(errors="replace"):
        raise ConfigError(f"--checkpoint: {checkpoint} is not the checkpoint of query {query}")
    if not (checkpoint / "commits" / str(batch)).is_file():
        raise ConfigError(f"--checkpoint: {checkpoint} no longer has the commit of batch {batch}")
    moved = []
    for log in (*_LOGS, *(f"{FOLDER}/{stream.name}" for stream in (checkpoint / FOLDER).glob("*"))):
        for entry in list((checkpoint / log).iterdir()):
            number = entry.name.removeprefix(".").removesuffix(".crc")
            if number.isdecimal() and int(number) > batch:
                target = checkpoint / SET_ASIDE / log / entry.name
                target.parent.mkdir(parents=True, exist_ok=True)
                moved.append(Path(shutil.move(entry, target)))
    return [path for path in moved if not path.name.startswith(".")]
