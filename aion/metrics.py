"""The metrics of this host's state server: bytes per tier, I/O, and counters of the operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from aion.base.html import html_of
from aion.errors import ServerError
from state_backends.server.client import StateClient

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["StateMetrics", "state"]


def __dir__() -> list[str]:
    """Returns what users call."""
    return __all__


@dataclass(frozen=True, slots=True)
class StateMetrics:
    """The metrics of a state server. Bytes are encoded bytes of live blocks.

    A block that is in memory and on disk counts in both tiers. ``operators``: by operator name, the counters as of the
    last commits, summed over shards: ``events``, ``late_events``, ``dropped``, ``windows``, ``purged_windows``,
    ``executions`` by kind, and ``staleness``: how often its bound was kept, and why not
    (:class:`aion.core.life.lifecycle.StalenessKept`). Each shard counts its own windows. ``queries``: by query id
    and operator, what the commits of this server added to the counters, and the current state
    (:class:`state_backends.store.counting.Committed`). ``metrics_port``: the port of the Prometheus endpoint, or None.
    ``failed_writes``: files that could not be written to disk; their blocks stayed in memory. ``merges``: merges of
    files, which wrote ``merged_bytes`` again. ``failed_merges``: merges that failed and changed nothing.

    ``values``: keyed values in memory, with ``value_bytes``; of these, ``cached_bytes`` are also on disk.
    ``value_hits``: keys that were looked up without the disk; ``value_misses``: others. ``runs``: the files of keyed
    values, with ``run_bytes``.
    """

    def _repr_html_(self) -> str:
        return html_of("aion.metrics.state", {f.name: getattr(self, f.name) for f in fields(self)})

    m_bucket_bytes: int
    p_bucket_bytes: int
    disk_only_bytes: int
    failed_writes: int
    merges: int
    merged_bytes: int
    failed_merges: int
    values: int
    value_bytes: int
    value_hits: int
    value_misses: int
    runs: int
    run_bytes: int
    peak_m_bucket_bytes: int
    budget_bytes: int
    used_bytes: int
    reserved_bytes: int
    ledger_bytes: int
    cached_bytes: int
    resident_bytes: int
    blocks: int
    shards: int
    attempts: int
    planned_prestages: int
    metrics_port: int | None
    rebuilds: int
    staging: Mapping[str, float]
    operators: Mapping[str, Mapping[str, Any]]
    queries: Mapping[str, Mapping[str, Mapping[str, Any]]]
    io: Mapping[str, Any]
    destaged_under_pressure: int
    refused_under_pressure: int

    @property
    def disk_bytes(self) -> int:
        return self.p_bucket_bytes


def state(spark: SparkSession) -> StateMetrics | None:
    """Returns the metrics of this host's state server, or None if there is no server.

    For example::

        aion.metrics.state(spark).m_bucket_bytes
    """
    from aion.spark.session.sessions import application, is_session

    if not is_session(spark):
        raise TypeError(f"metrics.state: a SparkSession is needed, not {spark!r}")
    client = StateClient.find(application(spark))
    if client is None:
        return None
    try:
        return StateMetrics(**client.stats())
    except ServerError:
        return None
    finally:
        client.close()
