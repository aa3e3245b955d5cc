"""The parts of `aion experiment windows` that need no Spark: its windows, its verdicts, its comparison."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console

from aion.base.time import duration_us
from experiments.shared.stream import Run
from experiments.windows.command import LEGS, Settings, chosen, report, targets
from experiments.windows.streams import Measured, check_equal, sizes_us

SETTINGS = Settings(1_000_000, 4, 1, 0, tuple(LEGS), "standard", 2, 1)


def measured(leg: str, contender: str, rate: float, **more: int) -> Measured:
    run = Run(events=4, steady_events_per_s=rate, whole_events_per_s=rate, wall_s=1.0, dropped_by_spark=0, progress=[])
    found = Measured(leg, contender, run, results=5, digest=0b1010, state_rows=None, state_bytes=1_000_000)
    return dataclasses.replace(found, **more)


def test_every_event_is_in_as_many_windows_as_the_label_says() -> None:
    for leg in LEGS.values():
        if leg.size is not None:
            slide_us = duration_us(leg.slide or leg.size, what="slide")
            assert divmod(duration_us(leg.size, what="size"), slide_us) == (leg.overlap, 0)


def test_all_events_are_in_order_and_those_of_sessions_have_more_keys() -> None:
    plans = {leg: SETTINGS.plan(leg) for leg in LEGS}
    assert all(plan.late_share == 0 for plan in plans.values())
    assert plans["100"].events_per_batch == 1_000_000 == 10 * plans["600"].events_per_batch
    assert plans["sessions"].keys == 10_000 == 100 * plans["20"].keys


def test_different_definitions_are_compared_with_one() -> None:
    assert [len(LEGS[leg].windows) for leg in ("one", "twenty", "hundred", "thousand")] == [1, 20, 100, 1001]
    assert sizes_us(1) == [1_000_000] and (sizes_us(1000)[0], sizes_us(1000)[-1]) == (1_000_000, 20_000_000)
    assert len({*sizes_us(1000)}) == 1000
    legs = ("one", "hundred", "thousand")
    assert [(t.over, t.under, t.at_least) for t in targets(legs)] == [
        ("hundred aion", "one aion", 0.7),
        ("thousand aion", "one aion", 0.4),
    ]
    assert targets(("hundred",)) == []


def test_windows_are_chosen_by_name_and_in_order() -> None:
    assert chosen("") == tuple(LEGS)
    assert chosen("sessions, 20") == ("20", "sessions")
    with pytest.raises(typer.BadParameter, match="unknown: nonsense; use 1, 20, 100, 600, sessions, one"):
        chosen("nonsense,1")


def test_other_results_are_an_error() -> None:
    first = measured("20", "aion", 1.0)
    check_equal(first, measured("20", "stock", 2.0))
    for other in (measured("20", "stock", 2.0, results=6), measured("20", "stock", 2.0, digest=0b1011)):
        with pytest.raises(RuntimeError, match="20: stock has"):
            check_equal(first, other)


def test_verdicts_are_computed_from_what_was_measured(tmp_path: Path) -> None:
    assert {t.over: t.at_least for t in targets(["1", "100"])} == {
        "1 aion": None,
        "1 aion-no-bound": None,
        "100 aion": 8.0,
        "100 aion-no-bound": None,
    }
    console = Console(file=io.StringIO(), width=150)
    settings = dataclasses.replace(SETTINGS, legs=("20", "100"))
    rates = {"20": 21.0, "100": 79.0}
    done = [measured(leg, "aion", rate) for leg, rate in rates.items()]
    done += [measured(leg, "stock", 10.0, state_rows=1234) for leg in rates]
    report(settings, done, tmp_path, {"experiment": "windows"}, console)
    record = json.loads((tmp_path / "windows.json").read_text())
    assert [(r["target"]["over"], r["ratio"], r["verdict"]) for r in record["ratios"]] == [
        ("20 aion", pytest.approx(2.1), "holds"),
        ("100 aion", pytest.approx(7.9), "does not hold"),
    ]
    assert len(record["runs"]) == 4
    assert (tmp_path / "windows.png").read_bytes().startswith(b"\x89PNG")
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "overlap 100: Spark" in printed
    assert "1,234" in printed
