"""Figure 9 of the Aion paper: how few executions keep late windows fresh, and whether fewer could.

First plans on distributions (``model``), compared with the paper's two other triggers and with brute force.
Then replays of streams drawn from them, which never follow the plan exactly. ``report`` checks the paper's
claims.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.staleness.settings import DEFAULTS, EXECUTIONS, REPLAYED_BOUND, STEPS, Settings

if TYPE_CHECKING:
    import numpy as np

    from aion.core.trigger.distribution import LateDistribution

PACKAGES = ("aion", "numpy", "scipy", "matplotlib")
HORIZONS = (5.0, 10.0, 15.0, 16.0, 17.0, 18.0, 20.0, 30.0, 50.0, 100.0)
EXPECTED = (20, 200, 2000)
BOUND_US = 3_600_000_000


def staleness(
    horizon: Annotated[
        float, typer.Option(min=0.1, help="T of the log-normal distribution, in units of its median.")
    ] = DEFAULTS.horizon,
    distributions: Annotated[
        int, typer.Option(min=1, help="Random distributions on which brute force tries to find better plans.")
    ] = DEFAULTS.distributions,
    grid: Annotated[int, typer.Option(min=8, help="Places that brute force tries in time, and in events.")] = (
        DEFAULTS.grid
    ),
    windows: Annotated[
        int, typer.Option(min=1, help="Windows replayed for each distribution and number of events.")
    ] = DEFAULTS.windows,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random distributions and streams.")] = DEFAULTS.seed,
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/staleness"),
) -> None:
    """How many executions a staleness bound costs: figure 9 of the Aion paper, optimality, and replayed streams."""
    # Here, not above: `aion --help` imports this module and needs none of it.
    from dataclasses import asdict

    from experiments.shared import bench
    from experiments.shared.bench import wide_console
    from experiments.staleness import report as staleness_report

    console = wide_console()
    settings = Settings(horizon, distributions, grid, windows, seed)
    with console.status("figure 9"):
        results: dict[str, Any] = {**figure_9(settings), "paper_horizons": paper_horizons()}
    with console.status(f"brute force on {distributions:,} random distributions"):
        results["optimality"] = optimality(settings)
    with console.status("streams"):
        results["replays"] = replays(settings)
    record = {
        "experiment": "staleness",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
        "results": results,
    }
    for table in staleness_report.tables(results, settings):
        console.print(table)
    console.print(staleness_report.remarks(results, settings), highlight=False)
    paths = staleness_report.write(out, record, results, settings)
    console.print("written: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)


def figure_9(settings: Settings) -> dict[str, Any]:
    """The data of figure 9.

    ``maximum``: on the log-normal, by trigger and number of executions. ``fewest``: executions by distribution, trigger
    and bound. ``horizons``: the same for the log-normal alone, by T. ``descent``: iterations, seconds and excess over
    the exact maximum, by number of executions.
    """
    from time import perf_counter

    from aion.core.trigger.planner import balanced
    from experiments.staleness.descent import descent
    from experiments.staleness.model import DISTRIBUTIONS, TRIGGERS, paper_distribution, placed_by

    late = {name: paper_distribution(name, settings.horizon) for name in DISTRIBUTIONS}
    numbers = range(1, EXECUTIONS + 1)
    descents = {}
    for k in numbers:
        begun = perf_counter()
        found = descent(late["lnorm"], k)
        descents[str(k)] = {
            "seconds": perf_counter() - begun,
            "iterations": found.iterations,
            "converged": found.converged,
            "over_exact": found.plan.maximum / balanced(late["lnorm"], k).maximum - 1,
        }
    return {
        "maximum": {t: [placed_by(t, late["lnorm"], k).maximum for k in numbers] for t in TRIGGERS},
        "fewest": {name: fewest_of(distribution) for name, distribution in late.items()},
        "horizons": {f"{T:g}": fewest_of(paper_distribution("lnorm", T)) for T in HORIZONS},
        "descent": descents,
    }


def fewest_of(late: LateDistribution) -> dict[str, dict[str, int | None]]:
    """The fewest executions by trigger and bound."""
    from experiments.staleness.model import BOUNDS, TRIGGERS, fewest_by

    return {t: {f"{b:g}": fewest_by(t, late, b) for b in BOUNDS} for t in TRIGGERS}


def optimality(settings: Settings) -> dict[str, Any]:
    """By kind of distribution: how many there are, how many hold, and the grid's maximum over ours; and ms per plan."""
    from time import process_time

    import numpy as np

    from aion.core.trigger.planner import plan
    from experiments.staleness.model import BOUNDS, compare, random_distributions

    kinds: dict[str, dict[str, Any]] = {}
    plan_ms: dict[str, list[float]] = {f"{bound:g}": [] for bound in BOUNDS}
    for kind, late in random_distributions(settings.distributions, np.random.default_rng(settings.seed)):
        compared = compare(late, settings.grid)
        of_kind = kinds.setdefault(kind, {"distributions": 0, "hold": 0, "grid_over_ours": []})
        of_kind["distributions"] += 1
        of_kind["hold"] += compared.holds
        of_kind["grid_over_ours"] += compared.ratio.tolist()
        for bound in BOUNDS:
            begun = process_time()
            plan(late, bound=bound)
            plan_ms[f"{bound:g}"].append((process_time() - begun) * 1e3)
    for of_kind in kinds.values():
        ratios = of_kind.pop("grid_over_ours")
        of_kind |= {"grid_over_ours": {"lowest": min(ratios), "median": float(np.median(ratios))}}
    return {"kinds": kinds, "plan_ms": {bound: quantiles(values) for bound, values in plan_ms.items()}}


def paper_horizons() -> dict[str, int | None]:
    """The horizons T at which the log-normal gives the paper's 31 % and 27 % at a bound of 0.05.

    T goes in steps of 0.1 medians. The values: the executions that equal intervals need there for a bound of 0.01.
    """
    from experiments.staleness.model import fewest_by, paper_distribution

    found: dict[str, int | None] = {}
    for T in (tenths / 10 for tenths in range(100, 251)):
        late = paper_distribution("lnorm", T)
        ours, interval, count = (fewest_by(t, late, 0.05) for t in ("exact", "interval", "count"))
        assert ours and interval and count
        if (round(100 * ours / interval), round(100 * ours / count)) == (31, 27):
            found[f"{T:g}"] = fewest_by("interval", late, 0.01)
    return found


def quantiles(values: list[float]) -> dict[str, float]:
    import numpy as np

    return {
        "median": float(np.median(values)),
        "99 %": float(np.quantile(values, 0.99)),
        "highest": max(values),
        "within 1 ms": float(np.mean(np.array(values) <= 1.0)),
    }


def replays(settings: Settings) -> list[dict[str, Any]]:
    """Replays of windows with random late events, under staleness triggers that know more or less about them."""
    import numpy as np

    from aion.core.trigger.planner import plan
    from aion.core.trigger.staleness import StalenessTrigger
    from experiments.staleness.model import DISTRIBUTIONS, Learnt, fewest_in_hindsight, paper_distribution, stream

    rng = np.random.default_rng(settings.seed)
    found: list[dict[str, Any]] = []
    for name in DISTRIBUTIONS:
        late = paper_distribution(name, settings.horizon)
        for expected in EXPECTED:
            drawn = [stream(late, expected, BOUND_US, rng) for _ in range(settings.windows)]
            drawn = [lateness_us for lateness_us in drawn if lateness_us.size]
            learnt = StalenessTrigger(REPLAYED_BOUND, forecast=Learnt(late, BOUND_US, expected))
            found.append(
                {
                    "distribution": name,
                    "expected": expected,
                    "planned": plan(late, bound=REPLAYED_BOUND).executions,
                    "hindsight": float(np.mean([fewest_in_hindsight(s, BOUND_US, REPLAYED_BOUND) for s in drawn])),
                    "learnt": replayed(learnt, drawn),
                    "learnt, batches": replayed(learnt, drawn, BOUND_US // STEPS),
                    "nothing known": replayed(StalenessTrigger(REPLAYED_BOUND), drawn),
                }
            )
    return found


def replayed(trigger: Any, streams: list[np.ndarray[Any, Any]], step_us: int = 0) -> dict[str, float]:
    """Means over windows: executions, the largest staleness, and the share of windows that kept the bound.

    ``kept_if_possible``: the share without executions that ran as soon as their first event came.
    """
    import numpy as np

    from experiments.staleness.replay import replay

    runs = [replay(trigger, lateness_us, bound_us=BOUND_US, step_us=step_us) for lateness_us in streams]
    allowed = REPLAYED_BOUND * (1 + 1e-6)
    return {
        "executions": float(np.mean([run.executions for run in runs])),
        "maximum": float(np.mean([run.maximum for run in runs])),
        "kept": float(np.mean([run.maximum <= allowed for run in runs])),
        "kept_if_possible": float(np.mean([(run.at_once | (run.staleness <= allowed)).all() for run in runs])),
    }
