"""`aion experiment planned`: its modes in miniature."""

from __future__ import annotations

import pytest

from experiments.planned.command import run
from experiments.planned.settings import MODES, Settings

TINY = Settings(windows=4, events=600, late=40, bound_s=120, median_s=30, budget_bytes=4 << 20, staleness=0.1)


@pytest.mark.slow
def test_modes_yield_the_same_panes_and_find_different_things_in_memory() -> None:
    found = {mode: run(mode, TINY) for mode in MODES}
    assert len({f["panes"] for f in found.values()}) == 1
    executions = found["none"]["executions"]
    assert executions["on_time"] == 4 and executions["late"] > 4
    assert [f["executions"] for f in found.values()] == [executions] * 3
    assert found["none"]["hits"] == found["none"]["staged_bytes"] == 0 < found["none"]["misses"]
    assert found["predictive"]["hits"] > 0
    for f in found.values():
        assert 0 < f["staleness"]["mean"] <= f["staleness"]["largest"] <= 1
        assert 0 <= f["staleness"]["kept"] <= 1 and f["late_seconds"] > 0
