"""``aion explain``: what the last batches of a query did, and why."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from aion.base.numbers import counted
from aion.base.time import format_instant
from aion.config.values import about_bytes
from aion.core.operator.overview import by_status
from aion.core.query.plan import FINAL
from aion.errors import ConfigError, FormatError
from aion.tools.inspect import tables
from aion.tools.inspect.state import nothing_in
from aion.tools.inspect.windows import show_bounds
from policies.durations import short_duration
from state_backends.server.client import running_servers
from state_backends.store.counting import number
from state_backends.versions.audit import ShardFinding, StateFolder, Version, by_query

DEFAULT = "aion-state"
"""Where a session without ``spark.aion.state.dir`` keeps state, in its working folder."""
_OF_WINDOWS = {
    "events": ("events",),
    "late": ("late_events",),
    "dropped": ("dropped",),
    "no time": ("untimed",),
    "new windows": ("windows",),
    "removed": ("purged_windows",),
    "ran early": ("executions", "early"),
    "ran on time": ("executions", "on_time"),
    "ran late": ("executions", "late"),
    "ran at last": ("executions", "final"),
    "retracted": ("retracted",),
}
"""The columns of the table, and where each number is among the counters of a shard."""
_OF_VALUES = {"events": ("events",), "dropped": ("dropped",), "new keys": ("keys",), "timers fired": ("fired_timers",)}


@dataclass
class _Batch:
    """What a batch did in all shards of an operator. ``watermark_us``: the furthest of them."""

    watermark_us: int | None = None
    shards: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, version: Version, before: Mapping[str, Any], columns: Mapping[str, tuple[str, ...]]) -> None:
        """Adds a version of a shard. ``before``: the counters of the version that it was made from."""
        assert version.manifest is not None
        snapshot = version.manifest.snapshot
        at_us = snapshot.get("watermark_us")
        if at_us is not None:
            self.watermark_us = at_us if self.watermark_us is None else max(self.watermark_us, at_us)
        self.shards += 1
        for name, path in columns.items():
            grown = number(snapshot["counters"], *path) - number(before, *path)
            self.counts[name] = self.counts.get(name, 0) + int(grown)


def explain(what: str, *, state_dir: str | None, batches: int) -> bool:
    """Prints what the last batches did, of one query or of all in a state folder. Returns whether all could be read.

    ``what``: a state folder, or, in ``state_dir``, the id of a query or the name of an operator. Raises ConfigError if
    there is none.
    """
    console = tables.console()
    place, wanted = _place(what, state_dir)
    with closing(StateFolder(place)) as folder:
        shards = folder.shards()
        if not shards and wanted is None:
            raise nothing_in(folder)
        if not (chosen := [shard for shard in shards if wanted is None or _is_wanted(shard, wanted)]):
            there = ", ".join(sorted({f"{query} ({operator.partition('/')[0]})" for query, operator, _ in shards}))
            raise ConfigError(f"{wanted}: {place} has no state of such a query; it has {there or 'none at all'}")
        findings = [ShardFinding(*shard, versions=folder.recent(shard, batches + 1)) for shard in chosen]
        for query, found in by_query(findings):
            for operator in sorted({finding.operator for finding in found}):
                _show(console, query, operator, [f for f in found if f.operator == operator], batches)
        damage = [line for finding in findings for line in finding.damage]
        for line in damage:
            console.print(f"damaged: {line}", style="red")
        if not damage and (others := [line for finding in findings for line in finding.other_formats]):
            raise FormatError(others[0])
        return not damage


def _place(what: str, state_dir: str | None) -> tuple[str, str | None]:
    """Returns the state folder, and the query to show, or None for all."""
    if state_dir is not None:
        return state_dir, what
    if "://" in what or os.sep in what or Path(what).exists():
        return what, None
    if Path(DEFAULT).is_dir():
        return DEFAULT, what
    raise ConfigError(
        f"{what}: there is no such folder, and no {DEFAULT} in this one; give the folder of the state "
        "(spark.aion.state.dir), or a query and --state DIR"
    )


def _is_wanted(shard: tuple[str, str, str], wanted: str) -> bool:
    query, operator, _ = shard
    return query.startswith(wanted) or operator.partition("/")[0] == wanted


def _show(console: Console, query: str, operator: str, findings: list[ShardFinding], most: int) -> None:
    whole = [f for f in findings if f.newest is not None]
    newest = [f.newest.manifest for f in whole if f.newest is not None and f.newest.manifest is not None]
    if not newest:
        return
    windows = [manifest.snapshot for manifest in newest if "windows" in manifest.snapshot]
    columns = _OF_WINDOWS if windows else _OF_VALUES
    did = _batches(whole, columns)
    size = about_bytes(sum(file.size_bytes for manifest in newest for file in manifest.files))
    console.print(
        f"{operator} of query {query}: up to batch {max(f.newest.batch for f in whole if f.newest):,}, "
        f"{counted(len(newest), 'shard')}, {size} in files, {_in_tiers(query, operator)}"
    )
    last = sorted(did)[-most:]
    title = f"what the last {len(last)} batches did" + ("; each shard counts its own windows" if windows else "")
    console.print(_table(title, {batch: did[batch] for batch in last}, columns))
    if not windows:
        return
    totals = {name: sum(did[batch].counts[name] for batch in last) for name in columns}
    for line in _why(totals, windows, newest[0].identity.definition):
        console.print(line, soft_wrap=True)
    kept = [f"{count:,} {_STATUS[status]}" for status, count in sorted(_kept(windows).items())]
    console.print(f"kept now: {', '.join(kept) or 'no windows'}", soft_wrap=True)
    show_bounds(console, operator, whole)


_STATUS = {
    "active": "open windows",
    "late": "windows that ended and still take late events",
    "keyed": "windows of single keys",
}


def _kept(snapshots: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    kept: dict[str, int] = {}
    for snapshot in snapshots:
        for status, count in by_status(snapshot).items():
            kept[status] = kept.get(status, 0) + count
        live = sum(of_kind["live"]["windows"] for of_kind in snapshot["keyed"] if "live" in of_kind)
        if live:
            kept["keyed"] = kept.get("keyed", 0) + live
    return kept


def _batches(findings: Sequence[ShardFinding], columns: Mapping[str, tuple[str, ...]]) -> dict[int, _Batch]:
    """Returns what each batch did. A shard that had nothing to do in a batch has no version of it."""
    did: dict[int, _Batch] = {}
    for finding in findings:
        before: Mapping[str, Any] | None = None
        for version in finding.versions:
            if version.manifest is None:
                before = None
                continue
            if version.manifest.is_first:
                before = {}
            if before is not None:
                did.setdefault(version.batch, _Batch()).add(version, before, columns)
            before = version.manifest.snapshot["counters"]
    return did


def _table(title: str, did: Mapping[int, _Batch], columns: Mapping[str, Any]) -> Table:
    shown = [name for name in columns if name in ("events", "dropped") or any(b.counts[name] for b in did.values())]
    timed = any(batch.watermark_us is not None for batch in did.values())
    names = ("batch", *(("watermark",) if timed else ()), "shards", *shown)
    table = tables.table(title, names, [name for name in names if name != "watermark"])
    for number_, batch in did.items():
        at = "none" if batch.watermark_us is None else format_instant(batch.watermark_us)
        row = [f"{number_:,}", *((at,) if timed else ()), f"{batch.shards:,}"]
        table.add_row(*row, *(f"{batch.counts[name]:,}" for name in shown))
    return table


def _in_tiers(query: str, operator: str) -> str:
    """Says where the state is now. Only state servers know, and only those of this host can be asked."""
    name = operator.partition("/")[0]
    found = [state for _, stats in running_servers() if (state := stats["queries"].get(query, {}).get(name))]
    if not any(state["shards"] for state in found):
        return "not in the memory of a state server on this host"
    memory, disk = (about_bytes(sum(state[place] for state in found)) for place in ("memory_bytes", "disk_bytes"))
    return f"on this host {memory} in memory and {disk} on disk"


def _why(counts: Mapping[str, int], snapshots: Sequence[Mapping[str, Any]], definition: Mapping[str, Any]) -> list[str]:
    """Says why windows ran and events were dropped, for what happened in these batches."""
    final_only = definition.get("emit") == FINAL
    came_too_late = counts["dropped"] - counts["no time"]
    reasons = {
        "ran early": "results before the window's end are asked for (early=)",
        "ran on time": "the watermark passed the window's end",
        "ran late": _trigger(snapshots[0]["trigger"]),
        "ran at last": "emit='final': a window runs once, when nothing can change it any more"
        if final_only
        else "the window's bound passed, and events had come since it ran before",
        "retracted": "events changed the bounds of a session or another window of a key, or a result vanished",
        "dropped": f"{came_too_late:,} events came after the bounds of their windows; see aion.dropped for each"
        if came_too_late
        else "events without a time",
        "no time": f"{counts['no time']:,} of the dropped events had no time that windows could use: it was null, out "
        "of range or ahead of the clock, or the windows before dropped them; see aion.dropped for each",
    }
    lines = [f"{name}: {reason}" for name, reason in reasons.items() if counts[name]]
    if counts["ran late"] and snapshots[0]["triggers"]:
        names = ", ".join(definition["windows"][int(n)][0] for n in snapshots[0]["triggers"])
        lines.append(f"ran late: {names} decide by triggers of their own")
    windows, kept, far, few = (
        sum(int(number(s["counters"], "staleness", name)) for s in snapshots)
        for name in ("windows", "kept", "missed_between_looks", "missed_otherwise")
    )
    if kept + far + few:
        lines.append(
            f"staleness: {kept:,} of {windows:,} removed windows with late events stayed within trigger.bound"
            + (f"; {far:,} did not because batches were too far apart" if far else "")
            + (f"; {few:,} did not because fewer late events came than expected" if few else "")
        )
    return lines


def _trigger(trigger: Mapping[str, Any]) -> str:
    match trigger["kind"]:
        case "every_batch":
            return "a batch brought late events (trigger.kind: every_batch)"
        case "interval":
            return f"late events came; at most once in {short_duration(trigger['every_us'])} (trigger.kind: interval)"
        case "count":
            return f"{trigger['every']:,} late events had come (trigger.kind: count)"
    bound = trigger["bound"]
    asked = f"more than {bound:g} (trigger.bound)" if bound is not None else f"{trigger['executions']} times in all"
    return f"late events came, and without it the result would have been too stale: {asked}"
