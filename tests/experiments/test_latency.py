"""The parts of `aion experiment latency` that need no Spark: its medians, its ratios, its choices."""

from __future__ import annotations

import pytest

from experiments.latency.command import PHASES, contenders, milliseconds, ratios, slowest
from experiments.shared.bench import Summary


def report(trigger: int, *, rows: int = 1000, **phases: int) -> dict[str, object]:
    return {"numInputRows": rows, "durationMs": {"triggerExecution": trigger, **phases}}


def test_the_second_half_of_the_batches_with_events_counts() -> None:
    run = [report(9000), report(800), report(500), report(510), report(1), report(400), report(7, rows=0)]
    assert milliseconds(run) == 400  # of 510, 1 and 400
    with pytest.raises(ValueError, match="median"):
        milliseconds([report(7, rows=0)])


def test_99_of_100_batches_take_no_longer_than_is_said() -> None:
    run = [report(9000)] * 200 + [report(ms) for ms in range(200, 0, -1)]
    assert slowest(run) == 198
    assert slowest([report(1), report(7), report(3)]) == 7


def test_a_phase_is_the_sum_of_what_spark_reports() -> None:
    run = [report(900, latestOffset=1, getBatch=2, walCommit=4, addBatch=800, commitOffsets=5)]
    assert {name: milliseconds(run, of) for name, of in PHASES.items()} == {
        "offsets": 7, "planning": 0, "running": 800, "committing": 5
    }  # fmt: skip


def test_ratios_compare_what_has_as_many_partitions() -> None:
    times = {
        "partials 2": 440.0,
        "token 2": 400.0,
        "token-timer 2": 500.0,
        "partials 16": 2000.0,
        "stock-window 16": 1000.0,
    }
    summaries = {name: Summary(median, median, median, 1) for name, median in times.items()}
    assert ratios(summaries, (2, 16)) == {
        "partials / token, 2 partitions": pytest.approx(1.1),
        "partials / token-timer, 2 partitions": pytest.approx(0.88),
        "partials / stock-window, 16 partitions": 2.0,
    }


def test_contenders_are_chosen_by_name_and_in_order() -> None:
    assert list(contenders()) == ["partials", "apply", "token", "token-timer", "stock-window", "tuned-window"]
