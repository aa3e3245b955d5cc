"""The Prometheus endpoint of a state server: it listens on ``metrics.port``, only on the loopback interface.

It counts nothing itself. A scrape reads what the server knows anyway.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from state_backends.server.metrics import METRICS, Distribution, Metric, Stats

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import Metric as Family

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
RETRY_SECONDS = 10.0


class MetricsEndpoint:
    """Listens on the first port that is asked for, until it is closed. The caller makes one call at a time."""

    def __init__(self, stats: Callable[[], Stats], clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._retry_s: dict[int, float] = {}  # by port: when to try again

    @property
    def port(self) -> int | None:
        """The port on which it listens, or None if it does not listen."""
        return self._server.server_port if self._server is not None else None

    def serve(self, port: int | None) -> None:
        """Listens on a port; 0: on any free port. Does nothing if it listens already.

        Never raises. If the port is in use, it logs that, and later calls try again, at most every 10 s: the port may
        belong to a server that is about to end.
        """
        if port is None or self._server is not None or self._closed:
            return
        now = self._clock()
        if now < self._retry_s.get(port, now):
            return
        try:
            from prometheus_client import CollectorRegistry, start_http_server

            registry = CollectorRegistry()
            registry.register(StatsCollector(self._stats))
            self._server, self._thread = start_http_server(port, addr=LOOPBACK, registry=registry)
        except (OSError, ImportError) as error:
            if port not in self._retry_s:
                why = f"{error}; pip install 'aion[metrics]'" if isinstance(error, ImportError) else error
                log.warning("metrics: cannot listen on %s:%d (%s); it is tried again", LOOPBACK, port, why)
            self._retry_s[port] = now + RETRY_SECONDS

    def close(self) -> None:
        self._closed = True
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()


class StatsCollector:
    """Gives the metrics to prometheus_client at each scrape."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def describe(self) -> list[Family]:
        """Returns nothing, so that registering does not scrape."""
        return []

    def collect(self) -> Iterator[Family]:
        stats = self._stats()
        for metric in METRICS:
            yield _family(metric, stats)


def _family(metric: Metric, stats: Stats) -> Family:
    from prometheus_client import metrics_core

    kinds: dict[str, Any] = {
        "counter": metrics_core.CounterMetricFamily,
        "gauge": metrics_core.GaugeMetricFamily,
        "histogram": metrics_core.HistogramMetricFamily,
        "summary": metrics_core.SummaryMetricFamily,
    }
    family = kinds[metric.type](metric.name, metric.help, labels=metric.labels, unit=metric.unit)
    for labels, value in metric.read(stats):
        if not isinstance(value, Distribution):
            family.add_metric(labels, value)
        elif metric.type == "histogram":
            family.add_metric(labels, list(value.buckets), value.total)
        else:
            family.add_metric(labels, count_value=value.events, sum_value=value.total)
    result: Family = family
    return result
