"""The streams of `aion experiment completeness`, in batches, and its figure. Seeded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import aion

if TYPE_CHECKING:
    from experiments.completeness.settings import Settings

Ints = npt.NDArray[np.int64]
MINUTE_US = 60_000_000
HOUR_US, DAY_US = 60 * MINUTE_US, 1440 * MINUTE_US
WINDOW_US = 5 * MINUTE_US
DAYS_OF_2001 = 60


@dataclass(frozen=True)
class Feed:
    """Events in the order of arrival. The watermark is the clock, and moves by ``step_us``."""

    table: pa.Table
    arrived_us: Ints
    step_us: int
    windows: aion.Tumbling
    key: str | None
    bound: str
    judged_from_us: int

    def batches(self) -> Iterator[tuple[int, pa.Table]]:
        """The watermark before each batch, and the events of the batch. The last one closes all windows."""
        edges = np.arange(self.arrived_us[0] // self.step_us, self.arrived_us[-1] // self.step_us + 2) * self.step_us
        cuts = np.searchsorted(self.arrived_us, edges)
        ends = np.append(cuts[1:], len(self.arrived_us))
        for at, begin, end in zip(edges.tolist(), cuts.tolist(), ends.tolist(), strict=True):
            yield at, self.table.slice(begin, end - begin)
        yield int(edges[-1]) + 30 * DAY_US, self.table.slice(0, 0)


def feed(name: str, settings: Settings, flights_2001: Path | None = None) -> Feed:
    """A stream of :data:`experiments.completeness.STREAMS`, ``FLIGHTS`` or ``FLIGHTS_2001``."""
    if name.startswith("flights 2001"):
        assert flights_2001 is not None
        return flights_of_2001(name, flights_2001)
    return flights(name, settings) if name.startswith("flights") else simulated(name, settings)


def simulated(name: str, settings: Settings) -> Feed:
    """Delays of two minutes, as their median, and log-normal, if the name says nothing else."""
    rng = np.random.default_rng((len(name), settings.seed))
    count = settings.windows * settings.events * settings.keys
    at = np.sort(rng.integers(0, settings.windows * WINDOW_US, count))
    key = rng.integers(0, settings.keys, count)
    window = at // WINDOW_US
    delay = 120 * np.exp(rng.standard_normal(count))
    if name == "pareto":
        delay = 60 * rng.pareto(1.5, count)
    elif name == "keys differ":
        delay *= np.geomspace(0.5, 2, settings.keys)[key]
    elif name == "drift":  # to the double in the time of the stream
        delay *= np.exp2(window / settings.windows)
    elif name == "daily":
        delay *= np.exp(0.4 * np.sin(2 * np.pi * window * WINDOW_US / DAY_US))
    elif name == "storms":  # an hour each
        storm = rng.random(settings.windows // 12 + 1) < 0.1
        delay *= np.where(storm[window // 12], 3, 0.5)
    arrived = at + (np.minimum(delay, 86_400) * 1e6).astype(np.int64)
    order = np.argsort(arrived, kind="stable")
    table = pa.table({"ts": pa.array(at[order], pa.timestamp("us", "UTC")), "k": key[order]})
    judged_us = settings.warm_up * WINDOW_US
    return Feed(table, arrived[order], 2 * MINUTE_US, aion.Tumbling("5 minutes"), "k", "1 hour", judged_us)


def flights(name: str, settings: Settings) -> Feed:
    """Windows of an hour of all flights; of six hours and of a day by carrier."""
    from aion.demo.flights import load_flights

    data = load_flights().choose(settings.flights)
    width = {"1h": "1 hour", "6h": "6 hours", "1d": "1 day"}[name.split()[1]]
    key = None if width == "1 hour" else "carrier"
    table = data.table.select(["scheduled", "carrier"]).rename_columns(["ts", "carrier"])
    first_us = int(data.scheduled_us.min())
    return Feed(table, data.departed_us, HOUR_US, aion.Tumbling(width), key, "1 day", first_us + 25 * DAY_US)


def flights_of_2001(name: str, path: Path) -> Feed:
    """Windows of an hour of all flights; of a day by origin. The flights of the last ``DAYS_OF_2001``."""
    from experiments.shared.flights_2001 import load

    table = load(path)
    arrived_us = table["arrived"].cast(pa.int64()).to_numpy()
    first = int(np.searchsorted(arrived_us, arrived_us[-1] - DAYS_OF_2001 * DAY_US))
    table, arrived_us = table.slice(first), arrived_us[first:]
    judged_us = int(arrived_us[0]) + (int(arrived_us[-1]) - int(arrived_us[0])) // 3
    width, key = ("1 hour", None) if name.endswith("1h") else ("1 day", "origin")
    return Feed(table.drop_columns("arrived"), arrived_us, HOUR_US, aion.Tumbling(width), key, "1 day", judged_us)


def draw(path: Path, rows: Mapping[str, pa.Table]) -> None:
    """By stream: what was said of each row, and the truth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = min(3, len(rows))
    down = -(-len(rows) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(4.6 * across, 3.4 * down), squeeze=False)
    for ax, (name, table) in zip(axes.flat, rows.items(), strict=False):
        _panel(ax, name, table)
    for ax in axes.flat[len(rows) :]:
        ax.set_axis_off()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(ax: Any, name: str, table: pa.Table) -> None:
    share, low, truth = (table.column(column).to_numpy() for column in ("completeness", "completeness_low", "truth"))
    known = ~np.isnan(share) & (low < 1)
    ax.set(title=name, xlabel="completeness, as said", ylabel="share in truth", xlim=(0, 1.02), ylim=(0, 1.02))
    ax.plot([0, 1], [0, 1], color="#999999", linewidth=0.8)
    if not known.any():
        return
    ax.scatter(share[known], truth[known], s=3, alpha=0.25, color="#4477aa", linewidths=0, label="a row")
    order = np.argsort(share[known])
    for part in np.array_split(order, min(25, max(1, len(order) // 30))):
        middle = share[known][part].mean()
        ax.plot([middle], [truth[known][part].mean()], "o", color="#228833", markersize=4)
        ax.plot([middle], [low[known][part].mean()], "_", color="#ee6677", markersize=9)
    ax.plot([], [], "o", color="#228833", markersize=4, label="mean of alike rows")
    ax.plot([], [], "_", color="#ee6677", markersize=9, label="completeness_low")
    ax.legend(fontsize=7, loc="upper left", frameon=False)
