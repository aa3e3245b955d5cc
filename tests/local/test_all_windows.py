"""LocalOperator against the oracle of all definitions: every kind of window together, in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.core.periodic import Cumulative, Sliding, Tumbling
from aion.core.windows import Count, Definition, PerRecord, Session
from aion.errors import IntegerOverflow, WindowError
from tests.durations import us
from tests.examples import some
from tests.keyed_oracle import Event
from tests.local.slicing import FOREVER, KEYS, Player, Step, batch, check, expected, policy
from tests.slicing_oracle import Pane

# -- every window together --------------------------------------------------------------------------------

tumblings = st.builds(Tumbling, st.integers(1, 15).map(us), st.integers(-5, 5).map(us))
slidings = st.integers(1, 15).flatmap(
    lambda size: st.builds(Sliding, st.just(us(size)), st.integers(1, size).map(us), st.integers(-5, 5).map(us))
)
counts = st.integers(1, 6).flatmap(lambda n: st.builds(Count, st.just(n), st.integers(1, n)))
sessions = st.builds(Session, st.integers(1, 8).map(us))
cumulatives = st.integers(1, 5).flatmap(
    lambda step: st.builds(
        Cumulative, st.just(us(step)), st.integers(1, 5).map(lambda n: us(n * step)), st.integers(-5, 5).map(us)
    )
)
of_partials = tumblings | slidings | cumulatives | sessions
of_any_kind = of_partials | counts | st.builds(PerRecord, st.integers(1, 10).map(us))
bounds = st.sampled_from([0, 0, 1, 5, 12, 30])


def several(kinds: st.SearchStrategy[Definition]) -> st.SearchStrategy[list[Definition]]:
    return st.lists(kinds, min_size=1, max_size=4, unique_by=repr)


@st.composite
def sessions_among_others(draw: st.DrawFn) -> list[Definition]:
    """Draws sessions of several gaps, a tumbling and a sliding window."""
    gaps = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True))
    return [draw(tumblings), draw(slidings.filter(lambda w: w.slide_us < w.size_us)), *map(Session, map(us, gaps))]


@st.composite
def streams(draw: st.DrawFn, keys: int) -> list[Step]:
    """Draws batches and watermarks in any order, with events on both sides of them. At the end all windows end."""
    events = st.builds(Event, st.integers(0, keys - 1), st.integers(-30, 60), st.integers(-9, 9))
    steps: list[Step] = []
    watermark = draw(st.integers(-30, 20))
    for _ in range(draw(st.integers(1, 8))):
        batch = draw(st.lists(events, max_size=8))
        if draw(st.booleans()):
            batch = sorted((event._replace(t=watermark + event.t // 4) for event in batch), key=lambda e: e.t)
        steps.append(batch)
        if draw(st.integers(0, 3)):
            watermark += draw(st.integers(-3, 20))
            steps.append(watermark)
    return [*steps, FOREVER]


ways = st.sampled_from(["lazy", "eager"])
key_counts = st.sampled_from([1, 3])


@given(sessions_among_others(), bounds, key_counts, ways, st.data())
def test_sessions_of_several_gaps_among_fixed_and_sliding_windows(
    windows: list[Definition], bound: int, keys: int, way: str, data: st.DataObject
) -> None:
    check(windows, bound, data.draw(streams(keys)), key="key" if keys > 1 else None, aggregation=way)


@pytest.mark.parametrize("kinds", [of_partials, of_any_kind], ids=["of partials", "of any kind"])
@given(bound=bounds, keys=key_counts, way=ways, data=st.data())
def test_panes_are_those_of_the_definitions(
    kinds: st.SearchStrategy[Definition], bound: int, keys: int, way: str, data: st.DataObject
) -> None:
    windows, steps = data.draw(several(kinds)), data.draw(streams(keys))
    check(windows, bound, steps, key="key" if keys > 1 else None, aggregation=way)


@some(1 / 2)
@given(several(of_partials | st.builds(PerRecord, st.integers(1, 10).map(us))), streams(2))
def test_a_sink_that_follows_the_panes_ends_with_the_truth(windows: list[Definition], steps: list[Step]) -> None:
    """The sink has a row for each window: a pane replaces it, a retraction deletes it. No event exceeds the bound."""
    sink: dict[tuple[Any, ...], Pane] = {}
    with Player(windows, 10_000, "key") as player:
        for step in steps:
            for pane in sorted(player.step(step), key=lambda pane: pane.kind != "retracted"):
                if pane.kind == "retracted":
                    assert sink.pop(pane[:4]), "what is taken back was given"
                else:
                    sink[pane[:4]] = pane
    everything = [event for step in steps if not isinstance(step, int) for event in step]
    truth = expected(windows, 0, [everything, FOREVER])[0][-1]
    assert {at: pane[5:] for at, pane in sink.items()} == {pane[:4]: pane[5:] for pane in truth}


@pytest.mark.slow
@pytest.mark.usual_sizes
@pytest.mark.parametrize(
    "key", [pytest.param(key, id=name, marks=[pytest.mark.proof] * (key is None)) for name, key in KEYS.items()]
)
def test_large_batches_over_many_windows_and_sessions(key: str | None) -> None:
    """The batches are large enough to use tables, trees and stretches of windows. All ways give the same panes."""
    rng = np.random.default_rng(6)
    windows: list[Definition] = [Tumbling(us(int(ms) * 1_000)) for ms in np.linspace(1_000, 9_000, 60).round()]
    windows += [Sliding("7 s", "1500 ms"), Session("400 ms"), Session("900 ms")]
    players = [Player(windows, 1_500_000, key, aggregation) for aggregation in ("auto", "lazy", "eager")]
    sparse = np.concatenate(
        (np.arange(2_000), np.arange(3_500, 5_000), np.arange(6_100, 8_000), np.arange(9_400, 12_000))
    )
    latest, kinds = 0, set()
    last: dict[tuple[Any, ...], Pane] = {}
    seen, judged = [], []
    watermark = -(10**18)
    for number in range(6):
        times = (rng.choice(sparse, 2_000) + 10_000 * number) * 1_000
        # Late events, most of them from the batch before. Some lie where no session was open.
        times[:200] -= 10_000_000
        times[:5] = (8_300 + 10_000 * (number - 1)) * 1_000
        rng.shuffle(times)
        values_of = rng.integers(-1_000, 1_000, 2_000).tolist()
        events = [Event(0, t, v) for t, v in zip(times.tolist(), values_of, strict=True)]
        seen += events
        judged += [watermark] * len(events)
        latest = max(latest, int(times.max()))
        watermark = FOREVER if number == 5 else latest - 3_000_000
        found = [[player.step(events), player.step(watermark)] for player in players]
        assert found[0] == found[1] == found[2]
        for pane in (pane for panes in found[0] for pane in panes):
            last[pane[:4]] = pane
            kinds.add(pane.kind)
    for player in players:
        player.operator.close()
    assert kinds == {"on_time", "late", "retracted"}
    times_us, values, at = np.array([e.t for e in seen]), np.array([e.value for e in seen]), np.array(judged)
    for definition, window in enumerate(windows[:60]):
        assert isinstance(window, Tumbling)
        starts = times_us // window.size_us * window.size_us
        in_time = starts + window.size_us + 1_500_000 > at
        totals = {start: int(values[in_time & (starts == start)].sum()) for start in np.unique(starts[in_time])}
        assert {pane.start: pane.total for pane in last.values() if pane.definition == definition} == totals


# -- aggregates -------------------------------------------------------------------------------------------


def test_results_are_lowered_and_floats_are_floats() -> None:
    aggregates = {"mean": A.mean("value"), "sum": A.sum("value"), "low": A.min("value")}
    with aion.LocalOperator(windows=Tumbling(us(10)), time="ts", aggregates=aggregates, policy=policy(0)) as operator:
        times = pa.array([1, 2, 11]).cast(pa.timestamp("us"))
        operator.process(pa.table({"ts": times, "value": pa.array([1.5, 2.5, float("nan")], pa.float32())}))
        rows = operator.advance(20).sort_by("window_start").to_pylist()
    assert [rows[0][name] for name in ("events", *aggregates)] == [2, 2.0, 4.0, 1.5]
    assert rows[1]["events"] == 1 and all(np.isnan(rows[1][name]) for name in aggregates)


def test_counting_needs_no_values() -> None:
    windows = {"tumbling": Tumbling(us(10)), "session": Session(us(2)), "count": Count(2)}
    with aion.LocalOperator(windows=windows, time="ts", aggregates={"n": A.count()}, policy=policy(0)) as operator:
        operator.process(pa.table({"ts": pa.array([1, 2, 11]).cast(pa.timestamp("us"))}))
        rows = operator.advance(FOREVER).select(["window", "window_start", "window_end", "n"]).to_pylist()
    micros = [(row["window"], row["window_start"].microsecond, row["window_end"].microsecond, row["n"]) for row in rows]
    assert sorted(micros) == [
        ("count", 1, 3, 2), ("session", 1, 4, 2), ("session", 11, 13, 1), ("tumbling", 0, 10, 2),
        ("tumbling", 10, 20, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("aggregation", ["lazy", "eager"])
def test_a_window_whose_sum_leaves_64_bits_is_an_error_and_no_other(aggregation: str) -> None:
    with Player([Tumbling(us(1)), Tumbling(us(4))], aggregation=aggregation) as player:
        player.step(batch((0, 2**62), (1, 2**62), (2, -1)))
        assert sorted(pane.total or 0 for pane in player.step(3)) == [-1, 2**62, 2**62]
        player.step(batch((3, -5)))
        assert [pane.total for pane in player.step(4) if pane.definition == 1] == [2**63 - 6]
        player.step(batch((4, 2**62), (5, 2**62)))
        with pytest.raises(IntegerOverflow):
            player.step(8)


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [[], ["1 minute"], [Tumbling(us(5)), Tumbling(us(5))]], ids=str)
def test_what_are_no_windows_is_refused(windows: Any) -> None:
    with pytest.raises(WindowError):
        aion.LocalOperator(windows=windows, time="ts", aggregates={"n": A.count()})
