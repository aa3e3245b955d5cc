"""`aion experiment staleness`: claims of the paper, plans that are untrue, and all of it in miniature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from aion.core.trigger.distribution import LateDistribution
from aion.core.trigger.planner import TriggerPlan
from experiments import app
from experiments.staleness.command import figure_9
from experiments.staleness.model import (
    is_true,
)
from experiments.staleness.report import claims
from experiments.staleness.settings import DEFAULTS


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


def test_an_untrue_plan_is_found_out() -> None:
    late = LateDistribution([0, 0.5, 0.5, 1], [0, 0.2, 0.8, 1])
    for shares, true in (([0.2, 1], True), ([0.8, 1], True), ([0.5, 1], False), ([0.2, 0.9], False)):
        assert is_true(late, TriggerPlan(np.array([0.5, 1]), np.array(shares))) == true
    assert not is_true(late, TriggerPlan(np.array([0.6, 0.5, 1]), np.array([0.84, 0.8, 1])))


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    options = ["--distributions", "5", "--grid", "16", "--windows", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["staleness", *options])
    assert done.exit_code == 0, done.output
    assert "5 of 5 distributions hold" in done.output
    record = json.loads((tmp_path / "staleness.json").read_text())
    assert {claim["verdict"] for claim in record["claims"]} == {"holds", "does not hold"}
    assert (tmp_path / "staleness.png").stat().st_size > 10_000
