"""The metrics of a state server as a table: name, type, help, unit, labels, and how each is read. Pure.

The Prometheus endpoint, ``aion top``, the table of docs/operate/metrics.md and the tests of the Grafana dashboard all
use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from state_backends.files.request_counts import CLASSES
from state_backends.store.counting import number

Stats = Mapping[str, Any]
"""What :meth:`state_backends.server.host.Host.stats` returns."""

Labels = tuple[str, ...]


class Distribution(NamedTuple):
    """A histogram or a summary. ``total``: the sum of the values.

    ``buckets``: (le, number of events up to le), cumulative. The last ``le`` is +Inf. Empty for a summary.
    """

    events: float
    total: float
    buckets: tuple[tuple[str, float], ...] = ()


Reading = tuple[Labels, float | Distribution]


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table. ``labels``: names of the labels. ``read`` yields each value with its label values."""

    name: str
    type: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    labels: Labels
    read: Callable[[Stats], Iterable[Reading]]

    @property
    def unit(self) -> str:
        """The unit. By Prometheus's convention it is the end of the name."""
        words = self.name.removesuffix("_total").split("_")
        return words[-1] if words[-1] in ("bytes", "seconds", "ratio") else ""

    @property
    def series(self) -> list[str]:
        """The names that a query in Prometheus can use."""
        parts = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}.get(self.type, ("",))
        return [self.name + part for part in parts]


# -- how they are read ------------------------------------------------------------------------------------


def _at(*path: str) -> Callable[[Stats], Iterator[Reading]]:
    def read(stats: Stats) -> Iterator[Reading]:
        yield (), number(stats, *path)

    return read


def _each(**paths: str) -> Callable[[Stats], Iterator[Reading]]:
    """Reads a value for each label. ``paths``: the path to each value, with dots, by label."""

    def read(stats: Stats) -> Iterator[Reading]:
        for label, path in paths.items():
            yield (label,), number(stats, *path.split("."))

    return read


def _places(stats: Stats) -> Iterator[Reading]:
    """State by place. The places are disjoint, so they add up to the size of the state."""
    both = number(stats, "p_bucket_bytes") - number(stats, "disk_only_bytes")
    yield ("memory",), number(stats, "m_bucket_bytes") - both
    yield ("both",), both
    yield ("disk",), number(stats, "disk_only_bytes")


def _by_priority(name: str) -> Callable[[Stats], Iterator[Reading]]:
    def read(stats: Stats) -> Iterator[Reading]:
        for priority, known in stats.get("io", {}).get("by_priority", {}).items():
            yield (priority,), number(known, name)

    return read


def _queued(stats: Stats) -> Iterator[Reading]:
    for priority, requests in stats.get("io", {}).get("waiting", {}).items():
        yield (priority,), requests


def _operators(stats: Stats) -> Iterator[tuple[Labels, Mapping[str, Any]]]:
    for query, operators in stats.get("queries", {}).items():
        for operator, known in operators.items():
            yield (query, operator), known


def _of_operator(*path: str) -> Callable[[Stats], Iterator[Reading]]:
    def read(stats: Stats) -> Iterator[Reading]:
        for labels, known in _operators(stats):
            yield labels, number(known, *path)

    return read


def _each_of_operator(*path: str, names: Labels) -> Callable[[Stats], Iterator[Reading]]:
    def read(stats: Stats) -> Iterator[Reading]:
        for labels, known in _operators(stats):
            for name in names:
                yield (*labels, name), number(known, *path, name)

    return read


def _moved(stats: Stats) -> Iterator[Reading]:
    for labels, known in _operators(stats):
        for direction in ("read", "written"):
            yield (*labels, direction), number(known, "requests_total", f"{direction}_bytes")


def _bounds(stats: Stats) -> Iterator[Reading]:
    for labels, known in _operators(stats):
        for which, bound_us in known.get("bounds_us", {}).items():
            yield (*labels, which), bound_us / 1e6


def _coverage(stats: Stats) -> Iterator[Reading]:
    for labels, known in _operators(stats):
        for which, share in known.get("coverage", {}).items():
            yield (*labels, which), share


def _staleness(stats: Stats) -> Iterator[Reading]:
    for labels, known in _operators(stats):
        counted = known["counters"]
        yield labels, Distribution(number(counted, "staleness", "windows"), number(counted, "staleness", "total"))


def _lateness(stats: Stats) -> Iterator[Reading]:
    for labels, known in _operators(stats):
        counted = known["counters"].get("lateness", {})
        buckets, cumulative = [], 0.0
        for edge, events in counted.get("events", {}).items():
            cumulative += events
            buckets.append((edge, cumulative))
        if buckets and buckets[-1][0] == "+Inf":
            yield labels, Distribution(cumulative, number(counted, "seconds"), tuple(buckets))


# -- the table --------------------------------------------------------------------------------------------

_OPERATOR = ("query", "operator")

METRICS: tuple[Metric, ...] = (
    # What operators did. These count only what was committed on this host.
    Metric("aion_events_total", "counter", "Events received.", _OPERATOR, _of_operator("counters", "events")),
    Metric(
        "aion_late_events_total", "counter", "Events that came after the end of one of their windows.", _OPERATOR,
        _of_operator("counters", "late_events"),
    ),
    Metric(
        "aion_dropped_events_total", "counter", "Events that came after the bound of a window, or without a time.",
        _OPERATOR, _of_operator("counters", "dropped"),
    ),
    Metric(
        "aion_lateness_seconds", "histogram",
        "Lateness of late events: watermark minus end of the window, once for each window.",
        _OPERATOR, _lateness,
    ),
    Metric(
        "aion_executions_total", "counter", "Executions of windows, by kind; each shard counts its own.",
        (*_OPERATOR, "kind"),
        _each_of_operator("counters", "executions", names=("early", "on_time", "late", "final")),
    ),
    Metric(
        "aion_retractions_total", "counter", "Panes retracted, of sessions and other windows that events change.",
        _OPERATOR, _of_operator("counters", "retracted"),
    ),
    Metric(
        "aion_staleness_ratio", "summary",
        "Staleness of each purged window that had late events: the largest between two of its executions.",
        _OPERATOR, _staleness,
    ),
    Metric(
        "aion_staleness_largest_ratio", "gauge", "The largest staleness of all since the query began.",
        _OPERATOR, _of_operator("largest_staleness"),
    ),
    Metric(
        "aion_staleness_windows_total", "counter",
        "Purged windows that had late events, by whether they stayed within trigger.bound, and if not, why.",
        (*_OPERATOR, "outcome"),
        _each_of_operator("counters", "staleness", names=("kept", "missed_between_looks", "missed_otherwise")),
    ),
    Metric(
        "aion_bound_seconds", "gauge",
        "How long new windows are kept after their end: the shortest and longest of all shards, without max_state.",
        (*_OPERATOR, "which"), _bounds,
    ),
    Metric(
        "aion_coverage_ratio", "gauge",
        "The share of late events that came within learned bounds: asked, and realised since the query began.",
        (*_OPERATOR, "which"), _coverage,
    ),
    Metric(
        "aion_judged_events_total", "counter",
        "Late events of windows that ended four bounds ago, by whether they came within the learned bound: in_time or "
        "missed.",
        (*_OPERATOR, "outcome"), _each_of_operator("counters", "judged", names=("in_time", "missed")),
    ),
    Metric(
        "aion_windows", "gauge", "Windows that are kept; each shard counts its own.", _OPERATOR, _of_operator("windows")
    ),
    Metric("aion_windows_made_total", "counter", "Windows made.", _OPERATOR, _of_operator("counters", "windows")),
    Metric(
        "aion_windows_purged_total", "counter", "Windows purged.", _OPERATOR,
        _of_operator("counters", "purged_windows"),
    ),
    Metric("aion_shards", "gauge", "Shards on this host.", _OPERATOR, _of_operator("shards")),
    Metric("aion_commits_total", "counter", "Versions of shards committed.", _OPERATOR, _of_operator("commits")),
    Metric(
        "aion_restores_total", "counter", "Shards rebuilt from a version: after a restart, a move, or a failure.",
        _OPERATOR, _of_operator("restores"),
    ),
    Metric(
        "aion_storage_requests_total", "counter",
        "Requests to the file system of a URI, by class; get reads a whole file, and range a part of one.",
        (*_OPERATOR, "class"), _each_of_operator("requests_total", names=CLASSES),
    ),
    Metric(
        "aion_storage_bytes_total", "counter", "Bytes of these requests.", (*_OPERATOR, "direction"), _moved,
    ),
    # State, and memory.
    Metric(
        "aion_state_bytes", "gauge",
        "Encoded bytes of live blocks, by place. M-buckets are memory plus both; p-buckets are both plus disk.",
        ("place",), _places,
    ),
    Metric("aion_state_blocks", "gauge", "Live blocks.", (), _at("blocks")),
    Metric("aion_values", "gauge", "Keyed values in memory.", (), _at("values")),
    Metric(
        "aion_values_bytes", "gauge", "Memory of keyed values and of what attempts have put.", (), _at("value_bytes")
    ),
    Metric(
        "aion_value_reads_total", "counter",
        "Keys that were looked up: hit (without the disk) or miss.",
        ("outcome",), _each(hit="value_hits", miss="value_misses"),
    ),
    Metric("aion_runs", "gauge", "Files of keyed values in the current versions.", (), _at("runs")),
    Metric("aion_runs_bytes", "gauge", "Bytes of these files.", (), _at("run_bytes")),
    Metric("aion_memory_budget_bytes", "gauge", "The memory budget of this host.", (), _at("budget_bytes")),
    Metric(
        "aion_memory_used_bytes", "gauge", "Bytes of blocks in memory, and of what attempts have put.",
        (), _at("used_bytes"),
    ),
    Metric("aion_memory_peak_bytes", "gauge", "The most bytes in memory so far.", (), _at("peak_m_bucket_bytes")),
    Metric(
        "aion_memory_ledger_bytes", "gauge", "Bytes of the ledgers, which know where each block is.",
        (), _at("ledger_bytes"),
    ),
    Metric(
        "aion_memory_reserved_bytes", "gauge", "Bytes of the budget reserved for blocks being fetched and for RocksDB.",
        (), _at("reserved_bytes"),
    ),
    Metric("aion_server_resident_bytes", "gauge", "Memory of the server's process.", (), _at("resident_bytes")),
    Metric(
        "aion_destages_total", "counter", "Windows destaged because of memory pressure, and refusals to do so.",
        ("outcome",), _each(done="destaged_under_pressure", refused="refused_under_pressure"),
    ),
    Metric("aion_attempts", "gauge", "Attempts that work on a shard now.", (), _at("attempts")),
    # Staging.
    Metric(
        "aion_staged_reads_total", "counter",
        "Reads of blocks that were on disk: hit (prestaged in time), ahead (fetched while the function "
        "worked on earlier blocks), late (still being prestaged), miss.",
        ("outcome",), _each(hit="staging.hits", ahead="staging.ahead", late="staging.late", miss="staging.misses"),
    ),
    Metric(
        "aion_blocked_seconds_total", "counter", "Time that late and missed reads waited for the disk.", (),
        _at("staging", "blocked_s"),
    ),
    Metric("aion_prestaged_bytes_total", "counter", "Bytes prestaged.", (), _at("staging", "staged_bytes")),
    Metric(
        "aion_prestaged_vain_bytes_total", "counter", "Bytes prestaged that left memory without being read.", (),
        _at("staging", "vain_bytes"),
    ),
    Metric("aion_planned_prestages", "gauge", "Prestages that are not due yet.", (), _at("planned_prestages")),
    # The I/O thread, and files.
    Metric("aion_io_queued_requests", "gauge", "Requests that wait for the disk.", ("priority",), _queued),
    Metric("aion_io_requests_total", "counter", "Requests for I/O.", ("priority",), _by_priority("requests")),
    Metric("aion_io_bytes_total", "counter", "Bytes moved.", ("priority",), _by_priority("bytes")),
    Metric(
        "aion_io_wait_seconds_total", "counter", "Time that requests waited for their first step.", ("priority",),
        _by_priority("waited_s"),
    ),
    Metric(
        "aion_io_longest_wait_seconds", "gauge", "The longest that a request waited.", ("priority",),
        _by_priority("longest_wait_s"),
    ),
    Metric("aion_io_busy_seconds_total", "counter", "Time spent on I/O.", (), _at("io", "busy_s")),
    Metric("aion_failed_writes_total", "counter", "Files that could not be written.", (), _at("failed_writes")),
    Metric(
        "aion_merges_total", "counter", "Merges of files in the background.", ("outcome",),
        _each(done="merges", failed="failed_merges"),
    ),
    Metric("aion_merged_bytes_total", "counter", "Bytes that merges wrote again.", (), _at("merged_bytes")),
)  # fmt: skip


def table() -> str:
    """Returns the table of docs/operate/metrics.md."""
    head = ("name", "type", "unit", "labels", "what it says")
    rows = [
        (f"`{m.name}`", m.type, m.unit, ", ".join(f"`{label}`" for label in m.labels), m.help.replace("|", "\\|"))
        for m in METRICS
    ]
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, ("---",) * len(head), *rows))
