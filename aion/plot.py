"""Figures: ``aion.plot.lateness(query)``, and the parts that the demo's figure shares with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aion.errors import ConfigError, needs_extra
from policies.durations import short_duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pyspark.sql.streaming import StreamingQuery

__all__ = ["lateness"]

Doubles = npt.NDArray[np.float64]

# Okabe and Ito's palette: distinct for every kind of colour vision.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
LATENESS_TICKS = {1 / 60: "1 s", 1: "1 min", 10: "10 min", 60: "1 h", 360: "6 h", 1440: "1 day", 10_080: "7 days"}


def __dir__() -> list[str]:
    """Returns what users call."""
    return __all__


def lateness(query: StreamingQuery, name: str | None = None) -> Figure:
    """Returns a figure of how late the events of a query are: the share that is later than x, since this run began.

    For example::

        aion.plot.lateness(query).savefig("lateness.png")

    ``name``: of the operator; it may be left out if the query has one. A dashed line shows how long new windows are
    kept. The numbers are those of the state server on the driver's host, now: events that were committed there, by a
    histogram that is exact at the dots. Raises ConfigError if there are none, and MissingExtra without matplotlib.
    """
    from aion.spark.start.progress import kept

    with needs_extra("experiments", "aion.plot"):
        from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that a notebook shows, whatever its backend is."""

        def _repr_png_(self) -> bytes:
            from io import BytesIO

            png = BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    operator, state = _chosen({n: s for n, s in kept(query).items() if "lateness" in s.get("counters", {})}, name)
    events, histogram = state["counters"]["events"], state["counters"]["lateness"].get("events", {})
    late_events = sum(histogram.values())
    figure = Shown(figsize=(7, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    if late_events:
        edges = [0.05, *(float(edge) for edge in histogram if edge != "+Inf")]  # seconds; the first stands for 0
        later = late_events - np.concatenate(([0], np.cumsum(list(histogram.values())[:-1])))
        seen = later > 0
        minutes, share = np.array(edges)[seen] / 60, later[seen] / events
        curve(axes, minutes, share, BLUE, f"late: {share[0] * 100:.3g} %")
        axes.plot(minutes, share, "o", color=BLUE, markersize=5)
    for bound_us in sorted({us for us in state.get("bounds_us", {}).values() if us > 0}):
        words = f"new windows are kept for {short_duration(bound_us)}"
        axes.axvline(bound_us / 6e7, color=ORANGE, linestyle="--", label=words)
    scale(axes, events, f"How late the events of {operator} are: {late_events:,} of {events:,}", "events")
    if not late_events:
        axes.text(0.5, 0.5, "no event was late", ha="center", transform=axes.transAxes)
    return figure


def _chosen(operators: Mapping[str, Mapping[str, Any]], name: str | None) -> tuple[str, Mapping[str, Any]]:
    if name is None and len(operators) == 1:
        (name,) = operators
    if name is None or name not in operators:
        there = ", ".join(map(repr, operators))
        raise ConfigError(
            f"plot: the query has the operators {there}; give name= one of them"
            if operators
            else "plot: no state server on this host has windows of this query; its numbers come with the first batch, "
            "and go when the query has stopped"
        )
    return name, operators[name]


# -- what figures of lateness have in common ------------------------------------------------------------


def curve(axes: Any, late_minutes: Doubles, share: Doubles, colour: str, label: str) -> None:
    """Draws the share of events that are later than x. ``late_minutes``: ascending."""
    axes.step(late_minutes, share, where="pre", color=colour, linewidth=2, label=label)


def scale(axes: Any, events: int, title: str, what: str) -> None:
    """Two logarithmic axes, which show a heavy tail. ``events``: all of them. ``what``: they are called so."""
    axes.set(xscale="log", yscale="log", title=title)
    axes.set_ylim(0.5 / max(1, events), 1)
    low, high = axes.get_xlim()
    ticks = {at: words for at, words in LATENESS_TICKS.items() if low <= at <= max(high, 14_400)}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share * 100:g} %")
    axes.set(xlabel="later than", ylabel=f"share of all {what}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", frameon=False, fontsize=9)
