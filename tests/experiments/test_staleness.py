"""`aion experiment staleness`: its verdicts, what it compares with, and all of it once, in miniature."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from aion.core.trigger.distribution import LateDistribution
from aion.core.trigger.planner import TriggerPlan
from experiments import app
from experiments.staleness.command import figure_9, optimality, paper_horizons, replays
from experiments.staleness.model import (
    BOUNDS,
    DISTRIBUTIONS,
    fewest_in_hindsight,
    is_true,
    paper_distribution,
    placed_by,
    random_distributions,
    stream,
)
from experiments.staleness.report import Claim, claims, where_the_paper_was
from experiments.staleness.settings import DEFAULTS, Settings

TINY = Settings(distributions=10, grid=20, windows=2)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    results = figure_9(DEFAULTS)
    for of in results["descent"].values():
        of["seconds"] = 0.01  # whatever else this machine does
    return results


def verdicts(results: dict[str, Any]) -> dict[str, bool]:
    return {claim.paper: claim.holds for claim in claims(results)}


@pytest.mark.slow
def test_the_papers_claims_of_the_lognormal(found: dict[str, Any]) -> None:
    held = verdicts(found)
    for words in ("31 % of the executions of deltat", "27 % of the executions of deltaev"):
        assert held[f"lnorm, 0.05: {words}"]
    assert held["lnorm, 0.01: deltat fails within 20 executions (left)"]
    assert held["lnorm, 0.01: deltaev fails within 30 executions (right)"]
    assert not held["lnorm, 0.01: deltat fails within 30 executions (right)"], "it needs just 30"
    assert held["unif: deltat as good as Aion"]


@pytest.mark.parametrize(
    ("path", "value", "claim"),
    [
        (("fewest", "lnorm", "interval", "0.05"), 12, "lnorm, 0.05: 31 % of the executions of deltat"),
        (("fewest", "lnorm", "count", "0.05"), 16, "lnorm, 0.05: 27 % of the executions of deltaev"),
        (("fewest", "lnorm", "interval", "0.01"), 20, "lnorm, 0.01: deltat fails within 20 executions (left)"),
        (("fewest", "lnorm", "count", "0.01"), 30, "lnorm, 0.01: deltaev fails within 30 executions (right)"),
        (("fewest", "lnorm", "count", "0.1"), 3, "lnorm, 0.1: deltat and deltaev take more executions"),
        (("fewest", "unif", "interval", "0.01"), 12, "unif: deltat as good as Aion"),
        (
            ("fewest", "bursts", "count", "0.01"),
            8,
            "bursts: every bound with fewer executions than deltat and deltaev",
        ),
        (
            ("maximum", "interval", 7),
            0.001,
            "lnorm: lower maximum than deltat and deltaev for the same number of executions",
        ),
        *(
            (
                ("descent", "5", key),
                value,
                "descent takes less than a second, and never reaches its limit of iterations (3.4)",
            )
            for key, value in (("converged", False), ("seconds", 1.5))
        ),
    ],
)
def test_a_claim_is_judged_by_what_was_found(
    found: dict[str, Any], path: tuple[Any, ...], value: Any, claim: str
) -> None:
    assert verdicts(found)[claim]
    other = copy.deepcopy(found)
    inner = other
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert not verdicts(other)[claim]


def test_a_trigger_that_never_keeps_a_bound_needs_more_than_any_number(found: dict[str, Any]) -> None:
    other = copy.deepcopy(found)
    other["fewest"]["lnorm"]["interval"]["0.01"] = None
    of = {claim.paper: claim for claim in claims(other)}
    assert of["lnorm, 0.01: deltat fails within 30 executions (right)"] == Claim(
        "lnorm, 0.01: deltat fails within 30 executions (right)", "needs > 200", True
    )


def test_the_horizon_of_the_paper() -> None:
    horizons = paper_horizons()
    assert "17" in horizons and horizons["17"] == 30
    assert "15.4 to 17.6" in where_the_paper_was(horizons)
    assert "no horizon" in where_the_paper_was({})


@pytest.mark.parametrize("trigger", ["exact", "descent", "interval", "count"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_what_a_trigger_places_covers_the_distribution(trigger: str, name: str) -> None:
    late = paper_distribution(name)
    placed = placed_by(trigger, late, 7)
    assert (placed.executions, placed.shares[-1]) == (7, 1)
    assert late.at_all(placed.instants) == pytest.approx(placed.shares, abs=1e-6)
    if trigger == "interval":
        assert np.diff(placed.instants, prepend=0) == pytest.approx(1 / 7)
    if trigger == "count":
        assert np.diff(placed.shares, prepend=0) == pytest.approx(1 / 7)


def test_an_untrue_plan_is_found_out() -> None:
    late = LateDistribution([0, 0.5, 0.5, 1], [0, 0.2, 0.8, 1])
    for shares, true in (([0.2, 1], True), ([0.8, 1], True), ([0.5, 1], False), ([0.2, 0.9], False)):
        assert is_true(late, TriggerPlan(np.array([0.5, 1]), np.array(shares))) == true
    assert not is_true(late, TriggerPlan(np.array([0.6, 0.5, 1]), np.array([0.84, 0.8, 1])))


def test_random_distributions_are_of_all_kinds_and_the_same_for_one_seed() -> None:
    one, two = (list(random_distributions(20, np.random.default_rng(3))) for _ in range(2))
    assert {kind for kind, _ in one} == {"smooth", "spiky", "gaps", "heavy-tailed", "atoms"}
    assert [late.lateness.tolist() for _, late in one] == [late.lateness.tolist() for _, late in two]
    assert any((np.diff(late.lateness) == 0).any() for kind, late in one if kind == "atoms")
    assert all((np.diff(late.share) == 0).any() for kind, late in one if kind == "gaps")


def test_streams_come_from_their_distribution() -> None:
    late = paper_distribution("norm")
    drawn = stream(late, 20_000, 10**9, np.random.default_rng(1))
    assert len(drawn) == pytest.approx(20_000, rel=0.05)
    assert np.mean(drawn) / 10**9 == pytest.approx(0.5, abs=0.01)
    assert fewest_in_hindsight(drawn, 10**9, 0.05) == 5


def test_everything_is_optimal_and_planned_in_time() -> None:
    measured = optimality(TINY)
    kinds = measured["kinds"]
    assert set(kinds) == {"smooth", "spiky", "gaps", "heavy-tailed", "atoms"}
    assert [of["hold"] for of in kinds.values()] == [2] * 5
    assert set(measured["plan_ms"]) == {f"{bound:g}" for bound in BOUNDS}


@pytest.mark.slow
def test_every_stream_is_replayed() -> None:
    rows = replays(TINY)
    assert {row["distribution"] for row in rows} == set(DISTRIBUTIONS)
    for row in rows:
        for how in ("learnt", "learnt, batches", "nothing known"):
            assert row[how]["executions"] >= 1
            assert row[how]["kept"] <= row[how]["kept_if_possible"] <= 1


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    options = ["--distributions", "5", "--grid", "16", "--windows", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["staleness", *options])
    assert done.exit_code == 0, done.output
    assert "5 of 5 distributions hold" in done.output
    record = json.loads((tmp_path / "staleness.json").read_text())
    assert {claim["verdict"] for claim in record["claims"]} == {"holds", "does not hold"}
    assert (tmp_path / "staleness.png").stat().st_size > 10_000
