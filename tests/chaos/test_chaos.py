"""Nothing lost, whatever dies: a short run of ``aion experiment chaos``, with at least one fault of each kind."""

from __future__ import annotations

import io
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from experiments.chaos import Result, Settings, run, summary
from experiments.chaos_faults import FAULTS, KILLS

# In an order in which each meets a query at work: after a JVM was killed it takes a while until there is one.
KINDS = (
    "server", "worker", "full disk", "hung server", "pause", "no descriptors", "JVM", "socket gone", "daemon",
)  # fmt: skip


@pytest.mark.proof
@pytest.mark.timeout(1800)  # four minutes where nothing else runs
def test_every_pane_is_that_of_an_undisturbed_run_and_of_the_events(tmp_path: Path) -> None:
    assert set(KINDS) == KILLS.keys() | FAULTS.keys()
    others = set(psutil.Process().children(recursive=True))
    kills = sum(kind in KILLS for kind in KINDS)
    settings = Settings(kills, seed=7, kinds=KINDS, files_of_a_kill=1.0, more_files=9, events_of_a_file=80)
    said, result = io.StringIO(), Result()
    try:
        run(settings, tmp_path, result, Console(file=said, width=200))
    finally:
        print(said.getvalue())  # for who looks into a failure
    assert result.differences == []
    assert result.kills == kills
    assert {fault.kind for fault in result.faults} == set(KINDS)
    assert result.batches > 2 * kills
    assert result.panes > 50
    assert result.too_late > 0
    assert list(summary(result))[-1].startswith(f"{kills} kills, 0 differences")
    assert set(psutil.Process().children(recursive=True)) <= others
    assert list(tmp_path.iterdir()) == []
