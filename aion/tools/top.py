"""``aion top``: shows live metrics of the state servers of this user on this host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aion.config.values import about_bytes
from aion.core.life.lifecycle import EXECUTED
from aion.tools.inspect import tables
from policies.durations import short_duration
from state_backends.server.client import running_servers
from state_backends.server.metrics import METRICS, Distribution, Labels, Stats

NO_SERVER = "no state server of this user runs on this host"


class Look(NamedTuple):
    """The metrics of a server at some instant, by name and labels (see ``state_backends.server.metrics``)."""

    at_s: float
    values: dict[tuple[str, Labels], float | Distribution]
    port: int | None

    @classmethod
    def of(cls, stats: Stats, at_s: float) -> Look:
        values = {(metric.name, labels): value for metric in METRICS for labels, value in metric.read(stats)}
        return cls(at_s, values, stats.get("metrics_port"))

    def value(self, name: str, *labels: str) -> float:
        value = self.values.get((name, labels), 0.0)
        return value.events if isinstance(value, Distribution) else value

    def distribution(self, name: str, *labels: str) -> Distribution:
        value = self.values.get((name, labels))
        return value if isinstance(value, Distribution) else Distribution(0, 0)

    def labels(self, name: str) -> list[Labels]:
        return [labels for metric, labels in self.values if metric == name]


def top(*, every_s: float, once: bool) -> None:
    """Shows the servers until interrupted. With ``once``, or if the output is not a terminal, shows them once."""
    console = tables.console()
    looks = look({})
    if once or not console.is_terminal:
        console.print(frame(looks, {}))
        return
    try:
        with Live(frame(looks, {}), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                before, looks = looks, look(looks)
                live.update(frame(looks, before), refresh=True)
    except KeyboardInterrupt:
        return


def look(before: dict[int, Look]) -> dict[int, Look]:
    """Returns the current metrics of all servers, by pid. Servers keep their order from ``before``; new ones come
    last.
    """
    now = {pid: Look.of(stats, time.monotonic()) for pid, stats in running_servers()}
    return {pid: now[pid] for pid in [*(p for p in before if p in now), *sorted(now.keys() - before.keys())]}


def frame(looks: dict[int, Look], before: dict[int, Look]) -> RenderableType:
    """Returns the content of the screen. ``before``: earlier metrics of the same servers, to compute speeds."""
    if not looks:
        return Text(NO_SERVER)
    return Group(*(part for pid, now in looks.items() for part in _server(pid, now, before.get(pid))))


def _server(pid: int, now: Look, before: Look | None) -> Sequence[RenderableType]:
    used, budget = now.value("aion_memory_used_bytes"), now.value("aion_memory_budget_bytes")
    places = [f"{about_bytes(now.value('aion_state_bytes', place))} {words}" for place, words in _PLACES]
    reads = [f"{now.value('aion_staged_reads_total', outcome):,.0f} {words}" for outcome, words in _READS]
    listens = f", metrics on port {now.port}" if now.port is not None else ""
    share = f" ({used / budget:.0%})" if budget else ""
    lines = [
        f"state server {pid}: {about_bytes(now.value('aion_server_resident_bytes'))} resident{listens}",
        f"budget   {about_bytes(used)} of {about_bytes(budget)}{share}, "
        f"{now.value('aion_destages_total', 'done'):,.0f} windows destaged under pressure",
        f"state    {', '.join(places)}",
        f"reads    {', '.join(reads)}; blocked for {now.value('aion_blocked_seconds_total'):,.1f} s",
    ]
    return Text(lines[0], style="bold"), *map(Text, lines[1:]), _events(now, before), _windows(now), _io(now, before)


_PLACES = (("memory", "in memory"), ("both", "in both"), ("disk", "on disk"))
_READS = (("hit", "prestaged"), ("ahead", "read ahead"), ("late", "prestaged too late"), ("miss", "missed"))


def _events(now: Look, before: Look | None) -> Table:
    table = _table("operator", "query", "shards", "events", "per second", "late", "dropped", "lateness 50%, 99%")
    for query, operator in now.labels("aion_shards"):
        labels = query, operator
        events, late = (now.value(f"aion_{name}_total", *labels) for name in ("events", "late_events"))
        table.add_row(
            operator,
            query[:8],
            f"{now.value('aion_shards', *labels):,.0f}",
            f"{events:,.0f}",
            _speed(now, before, "aion_events_total", *labels),
            f"{late:,.0f}" + (f" ({late / events:.1%})" if events else ""),
            f"{now.value('aion_dropped_events_total', *labels):,.0f}",
            _quantiles(now.distribution("aion_lateness_seconds", *labels)),
        )
    return table


def _windows(now: Look) -> Table:
    table = _table(
        "operator",
        "windows",
        "kept for",
        "covered",
        "early",
        "on time",
        "late",
        "final",
        "staleness",
        "commits",
        "restores",
    )
    for labels in now.labels("aion_shards"):
        staleness = now.distribution("aion_staleness_ratio", *labels)
        table.add_row(
            labels[1],
            f"{now.value('aion_windows', *labels):,.0f}",
            _bounds(now, labels),
            _coverage(now, labels),
            *(f"{now.value('aion_executions_total', *labels, kind):,.0f}" for kind in EXECUTED),
            f"{staleness.total / staleness.events:.3f}" if staleness.events else "",
            f"{now.value('aion_commits_total', *labels):,.0f}",
            f"{now.value('aion_restores_total', *labels):,.0f}",
        )
    return table


def _bounds(now: Look, labels: Labels) -> str:
    keys = [("aion_bound_seconds", (*labels, which)) for which in ("shortest", "longest")]
    found = [now.value(name, *of_bound) for name, of_bound in keys if (name, of_bound) in now.values]
    return " to ".join(dict.fromkeys(map(_duration, found)))


def _coverage(now: Look, labels: Labels) -> str:
    """Returns the share of late events that came within learned bounds. Empty if no bound has been judged yet."""
    key = ("aion_coverage_ratio", (*labels, "realised"))
    return f"{now.value(key[0], *key[1]):.2%}" if key in now.values else ""


def _io(now: Look, before: Look | None) -> Table:
    table = _table("I/O", "queued", "requests", "bytes", "bytes per second", "waited", "longest")
    for (priority,) in now.labels("aion_io_requests_total"):
        table.add_row(
            priority,
            f"{now.value('aion_io_queued_requests', priority):,.0f}",
            f"{now.value('aion_io_requests_total', priority):,.0f}",
            about_bytes(now.value("aion_io_bytes_total", priority)),
            _speed(now, before, "aion_io_bytes_total", priority, of_bytes=True),
            f"{now.value('aion_io_wait_seconds_total', priority):,.1f} s",
            f"{now.value('aion_io_longest_wait_seconds', priority):,.3f} s",
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _speed(now: Look, before: Look | None, name: str, *labels: str, of_bytes: bool = False) -> str:
    """Returns the increase of a counter per second. Empty if there is no earlier value."""
    if before is None or now.at_s <= before.at_s:
        return ""
    speed = max(0.0, now.value(name, *labels) - before.value(name, *labels)) / (now.at_s - before.at_s)
    return about_bytes(speed) if of_bytes else f"{speed:,.0f}"


def _quantiles(lateness: Distribution) -> str:
    """Returns the median and the 99 % quantile. The histogram only gives the upper ends of their buckets."""
    return ", ".join(_up_to(lateness, share) for share in (0.5, 0.99)) if lateness.events else ""


def _up_to(lateness: Distribution, share: float) -> str:
    edges = [edge for edge, up_to in lateness.buckets if up_to >= share * lateness.events]
    if edges[0] == "+Inf":
        return f"> {_duration(lateness.buckets[-2][0])}"
    return f"≤ {_duration(edges[0])}"


def _duration(edge: Any) -> str:
    return short_duration(int(float(edge) * 1e6))
