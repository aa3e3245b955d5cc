"""`aion experiment windows`: other results are an error."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.shared.stream import Run
from experiments.windows.streams import Measured, check_equal


def measured(leg: str, contender: str, rate: float, **more: int) -> Measured:
    run = Run(events=4, steady_events_per_s=rate, whole_events_per_s=rate, wall_s=1.0, dropped_by_spark=0, progress=[])
    found = Measured(leg, contender, run, results=5, digest=0b1010, state_rows=None, state_bytes=1_000_000)
    return dataclasses.replace(found, **more)


def test_other_results_are_an_error() -> None:
    first = measured("20", "aion", 1.0)
    check_equal(first, measured("20", "stock", 2.0))
    for other in (measured("20", "stock", 2.0, results=6), measured("20", "stock", 2.0, digest=0b1011)):
        with pytest.raises(RuntimeError, match="20: stock has"):
            check_equal(first, other)
