"""Shows for each window how long it is kept and why, which events are still to come, and when it runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from aion.base.time import format_instant
from aion.core.keyed.summary import LISTED
from aion.core.lateness.bound import AdaptiveBound
from aion.core.operator.overview import REASONS, KeyedOutlook, WindowOutlook, keyed_windows, windows
from aion.tools.inspect import tables
from policies.durations import short_duration
from state_backends.store.counting import judged
from state_backends.versions.audit import ShardFinding

PLANNED = 5


def show_windows(console: Console, findings: Sequence[ShardFinding], most: int) -> None:
    """Prints for each operator the bound of new windows, and the ``most`` windows that end first, over all shards."""
    for operator in sorted({f.operator for f in findings}):
        of_operator = [f for f in findings if f.operator == operator and f.newest and f.newest.manifest]
        show_bounds(console, operator, of_operator)
        _show_keyed(console, operator, of_operator, most)
        if most:
            _show_operator(console, operator, of_operator, most)


def show_bounds(console: Console, operator: str, findings: Sequence[ShardFinding]) -> None:
    """Prints the bound of new windows, the reason for it, and the coverage that bounds had.

    Shards with the same text are printed together.
    """
    shards_by_text: dict[str, list[str]] = {}
    late = missed = 0.0
    for finding in findings:
        assert finding.newest is not None and finding.newest.manifest is not None
        snapshot = finding.newest.manifest.snapshot
        late, missed = late + judged(snapshot)[0], missed + judged(snapshot)[1]
        decision = AdaptiveBound.of_snapshot(snapshot["lateness"]).decision
        shards_by_text.setdefault(f"{short_duration(decision.bound_us)}: {decision.why}", []).append(_number(finding))
    for text, shards in shards_by_text.items():
        who = "" if len(shards_by_text) == 1 else f", shard {', '.join(shards)}"
        console.print(f"{operator}{who}: new windows are kept for {text}")
    if late:
        console.print(
            f"{operator}: {1 - missed / late:.2%} of {late:,.0f} late events came within learned bounds, "
            f"of windows that ended four bounds ago or earlier"
        )


def _show_operator(console: Console, operator: str, findings: Sequence[ShardFinding], most: int) -> None:
    found: list[tuple[WindowOutlook, str, str]] = []
    for finding in findings:
        assert finding.newest is not None and finding.newest.manifest is not None
        manifest = finding.newest.manifest
        stored = manifest.identity.definition
        of_shard = windows(manifest.snapshot, stored)
        found += [(window, stored["windows"][window.definition][0], _number(finding)) for window in of_shard]
    found.sort(key=lambda row: (row[0].end_us, row[0].start_us, row[1], row[2]))
    if not found:
        return
    left = f"; the first {most:,} of {len(found):,} to end, --windows N shows more" if len(found) > most else ""
    numbers, words = (
        ("shard", "events", "late", "kept for"),
        ("why", "still to come", "staleness", "runs, if events came"),
    )
    table = tables.table(f"windows of {operator}{left}", ("window", *numbers, *words), (*numbers, "staleness"))
    for window, definition, shard in found[:most]:
        table.add_row(
            f"{definition}\n{format_instant(window.start_us)}\n{format_instant(window.end_us)} {window.status}",
            shard,
            f"{window.events:,}",
            f"{window.late_events:,}",
            short_duration(window.bound_us),
            REASONS[window.reason],
            _to_come(window),
            f"{window.staleness:.3f}",
            _runs(window),
        )
    console.print(table)


def _show_keyed(console: Console, operator: str, findings: Sequence[ShardFinding], most: int) -> None:
    """Prints a summary of the keyed windows of each definition, and the ``most`` of them that end first."""
    found: list[tuple[KeyedOutlook, str, str]] = []
    for finding in findings:
        assert finding.newest is not None and finding.newest.manifest is not None
        manifest = finding.newest.manifest
        stored = manifest.identity.definition
        of_shard = keyed_windows(manifest.snapshot, stored)
        found += [(told, stored["windows"][told.definition][0], _number(finding)) for told in of_shard]
    if not found:
        return
    names = ("definition", "windows", "executed", "events", "first end", "last end", "kept for")
    table = tables.table(f"windows of single keys of {operator}", names, ("windows", "executed", "events", "kept for"))
    for name in dict.fromkeys(name for _, name, _ in found):
        outlooks = [outlook for outlook, of, _ in found if of == name]
        bounds = sorted(outlook.bound_us for outlook in outlooks)
        table.add_row(
            name,
            *(f"{sum(getattr(o, what) for o in outlooks):,}" for what in ("windows", "executed", "events")),
            _instant(min((o.first_end_us for o in outlooks if o.first_end_us is not None), default=None)),
            _instant(max((o.last_end_us for o in outlooks if o.last_end_us is not None), default=None)),
            " to ".join(dict.fromkeys(short_duration(us) for us in (bounds[0], bounds[-1]))),
        )
    console.print(table)
    count = sum(outlook.windows for outlook, _, _ in found)
    rows = [(window, name, shard) for outlook, name, shard in found for window in outlook.listed]
    rows.sort(key=lambda row: (row[0].end_us is None, row[0].end_us or 0, row[0].start_us, row[1:], row[0].key))
    # Each shard lists only its first LISTED windows, so the overall order is known only up to that number.
    shown = rows[: most if most <= LISTED or len(rows) == count else LISTED]
    if not shown:
        return
    left = f"; the first {len(shown):,} of {count:,} to end" if len(shown) < count else ""
    columns = ("window", "key", "shard", "start", "end", "events", "late", "executed")
    table = tables.table(f"each of them{left}", columns, ("shard", "events", "late"))
    for window, name, shard in shown:
        table.add_row(
            name,
            ", ".join(window.key),
            shard,
            format_instant(window.start_us),
            _instant(window.end_us),
            f"{window.events:,}",
            f"{window.late_events:,}",
            "yes" if window.executed else "no",
        )
    console.print(table)


def _instant(us: int | None) -> str:
    return "unknown" if us is None else format_instant(us)


def _to_come(window: WindowOutlook) -> str:
    if window.to_come is None:
        return "unknown"
    events = "of its events, late" if window.status == "active" else "of its events"
    return f"{window.to_come:.2%} {events}"


def _runs(window: WindowOutlook) -> str:
    planned = [format_instant(us) for us in window.executions_us[:PLANNED]]
    if len(window.executions_us) > PLANNED:
        planned.append(f"{len(window.executions_us) - PLANNED} more")
    return "\n".join([*planned, f"{format_instant(window.purged_us)} at last"])


def _number(finding: ShardFinding) -> str:
    assert finding.newest is not None and finding.newest.manifest is not None
    return tables.called(finding.shard, finding.newest.manifest.identity.ids)
