"""`aion experiment slicing`: all contenders and baselines yield the same panes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from aion.core.periodic import Tumbling
from aion.core.windows import Definition, Session
from experiments.slicing import runs, take_turns
from experiments.slicing.baselines import Buckets, FlatFat
from experiments.slicing.records import measure_records
from experiments.slicing.runs import (
    CONTENDERS,
    Cell,
    Result,
    Settings,
    generate,
    measure,
    reference,
)
from tests.durations import us
from tests.slicing_oracle import Event, Oracle

TINY = Settings(
    events=6_000, batch=6_000, small_batch=1_000, rate=1_000, rates=(1_000,), windows=(1, 3), fractions=(0.0, 1.0),
    concurrent=2, runs=1, seconds=0.01, records=64, overlaps=(3, 5), keys=(2,),
)  # fmt: skip


def of(rate: float, contender: str = "aion") -> Result:
    return Result(contender, int(rate), 1.0, 2.0, 1, 1, 1)


@pytest.mark.parametrize("contender", CONTENDERS)
def test_every_contender_yields_the_panes_of_the_operator(contender: str) -> None:
    cell = Cell(200, 7, True, 0.3, 1_500)
    stream = generate(8_000, 200, 0.3, seed=1)
    settings = replace(TINY, seconds=60.0)  # to the end of the stream, however slow the machine is
    found = measure(contender, cell, stream, settings)
    assert (found.panes, found.checksum) == reference(found, cell, stream, settings)
    assert found.panes > 10 and found.seconds > 0
    if contender in runs.POLICIES:
        assert (found.events, found.batches) == (8_000, 6)


def test_other_panes_end_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "reference", lambda *_: (0, 0))
    with pytest.raises(RuntimeError, match="aion and LocalOperator yield different panes"):
        take_turns(TINY, ["windows"], Console(quiet=True))


windows = st.lists(
    st.builds(Tumbling, st.integers(1, 15).map(us), st.integers(-5, 5).map(us))
    | st.builds(Session, st.integers(1, 8).map(us)),
    min_size=1, max_size=4,
)  # fmt: skip
BASELINES: dict[str, Callable[[Sequence[Definition]], Buckets | FlatFat]] = {
    "buckets": Buckets,
    "flatfat": FlatFat,
    "flatfat-batch": lambda windows: FlatFat(windows, whole_batches=True),
}


@pytest.mark.parametrize("name", BASELINES)
@given(windows, st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 40), max_size=8)), max_size=8))
@example(
    [Tumbling(us(2), us(1)), Session(us(1))], [(1, [8]), (9, [0])]
)  # an event just behind a session that has ended
def test_baselines_yield_each_window_once_when_it_ends(
    name: str, windows: list[Definition], steps: list[tuple[int, list[int]]]
) -> None:
    """The watermark goes on by so much before each batch, whose events are so far behind it."""
    baseline, oracle = BASELINES[name](windows), Oracle(windows, 0)
    watermark = -20
    for progress, behind in [*steps, (10**6, [])]:
        watermark += progress
        found = zip(*(column.tolist() for column in baseline.advance(watermark)), strict=True)
        expected = [(p.definition, p.start, p.end, p.events, p.total) for p in oracle.advance(watermark)]
        assert sorted(found) == sorted(expected)
        events = [Event(0, watermark + t, 7 * n - 20) for n, t in enumerate(behind)]
        baseline.process(np.array([e.t for e in events], np.int64), np.array([e.value for e in events], np.int64))
        oracle.process(events)


@pytest.mark.parametrize("kind", ["memory", "RocksDB"])
def test_designs_agree_and_their_costs_are_counted(kind: str, tmp_path: Path) -> None:
    found = measure_records(64, 1, tmp_path, measured=10)["storages"][kind]
    assert found["read_us"] > 0 and found["write_us"] > 0
    designs = found["designs"]
    assert designs["plain"]["writes"] == 64
    assert designs["8 buckets"]["writes"] < 12
    assert any(costs["buckets"] == found["best"] for costs in designs.values())
    assert list(tmp_path.iterdir()) == []
