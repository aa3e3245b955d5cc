"""Overlapping windows combined lazily and eagerly: the same to the last bit, and as plain Python says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.aggregates.doubled import sum_by_group, sums_are_exact
from aion.aggregates.groups import Groups
from aion.config import load_policy
from aion.core.life.actions import Execute, Execution, PaneKind, WindowRef
from aion.core.query.plan import Plan, make_plan
from aion.core.slicing.tree import SliceTree, choose_height, spans
from aion.errors import IntegerOverflow
from aion.execute.panes.combining import WINDOWS_AT_ONCE, Loaded, windows_at_once
from tests import aggregate_oracle as o
from tests.aggregates.test_aggregates_windows import extremes_and_their_distance
from tests.durations import us
from tests.examples import some
from tests.local.scenarios import (
    AGGREGATES,
    Scenario,
    aggregated,
    expected_panes,
    panes_of,
    policy,
    run,
    scenarios,
    truth,
)
from tests.oracle import Definition, Event

few = some(1 / 5)

# Of a fixed size, and exact in any grouping.
EXACT: dict[str, A.Aggregate] = {
    **AGGREGATES, "sf": A.sum("f"), "mf": A.mean("f"), "lo_k": A.min("k"), "hi_k": A.max("k"), "first": A.first("id"),
    "last_f": A.last("f", ignorenulls=True), "by": A.max_by("id", "v"), "least": A.min_by("f", "v"),
    "top": A.top_k("v", 2), "tops": A.max_by("id", "f", k=2), "ad": A.approx_count_distinct("v", 0.5),
}  # fmt: skip
# Of a fixed size, and rounded by merges, or by nobody knows what.
ROUNDED = {
    "sd": A.stddev_pop("f"), "var": A.var_samp("v"), "ap": A.approx_percentile("f", 0.5),
    "spread": extremes_and_their_distance(),
}  # fmt: skip

overlapping = st.sampled_from(
    [
        (Definition(40, 5),),
        (Definition(64, 1),),
        (Definition(33, 2, 1),),
        (Definition(40, 2, 1, grows=True),),
        (Definition(60, 3), Definition(10, 10), Definition(25, 10, 2)),
    ]
)


@pytest.fixture
def heights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the trees that were grown."""
    found: list[int] = []
    grow = SliceTree.grow

    def noted(tree: SliceTree, height: int, limit_bytes: int) -> None:
        grow(tree, height, limit_bytes)
        found.append(len(tree.starts) - 1)

    monkeypatch.setattr(SliceTree, "grow", noted)
    return found


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Of which partials trees were grown."""
    found: set[str] = set()
    grow = SliceTree.grow

    def noted(tree: SliceTree, height: int, limit_bytes: int) -> None:
        grow(tree, height, limit_bytes)
        found.update(type(partial).__name__ for partial in tree.partials)

    monkeypatch.setattr(SliceTree, "grow", noted)
    return found


def by(aggregation: str, scenario: Scenario, name: str = "standard") -> Any:
    return load_policy(policy(name, scenario.bound), {"execution.aggregation": aggregation})


def exactly(rows: Sequence[Any]) -> list[str]:
    """Rows so that NaN is itself, and zeros have their signs."""
    return sorted(map(repr, rows))


# -- through the operator -----------------------------------------------------------------------------------


def more(events: Sequence[Event]) -> dict[str, Any]:
    numbers = o.there(events, "v")
    return {
        **aggregated(events),
        "first": o.first(events, "id"),
        "last_f": o.last(events, "f", ignorenulls=True),
        "top": sorted(numbers, reverse=True)[:2],
        "ad": len(o.distinct(events, "v")),
    }


@few
@pytest.mark.parametrize("name", ["standard", "tiny"])
@given(scenario=scenarios(overlapping))
def test_eager_panes_are_those_of_lazy_ones_and_of_the_oracle(name: str, scenario: Scenario) -> None:
    eager, _ = run(scenario, by("eager", scenario, name), aggregates=EXACT)
    lazy, _ = run(scenario, by("lazy", scenario, name), aggregates=EXACT)
    told = ["n", "c", "s", "m", "lo", "hi", "last", "first", "last_f", "top", "ad"]
    for rows, same, (panes, _) in zip(eager, lazy, truth(scenario, more), strict=True):
        assert exactly(rows) == exactly(same)
        assert panes_of(rows, scenario, told) == expected_panes(panes)


@few
@given(scenario=scenarios(overlapping))
def test_aggregates_that_round_are_the_same_too(scenario: Scenario) -> None:
    both = [run(scenario, by(way, scenario), aggregates=ROUNDED)[0] for way in ("eager", "lazy")]
    assert [exactly(rows) for rows in both[0]] == [exactly(rows) for rows in both[1]]


def feed(operator: aion.LocalOperator, times: Sequence[int], keys: Sequence[int]) -> pa.Table:
    stamps = pa.array(times, pa.int64()).cast(pa.timestamp("us"))
    return operator.process(pa.table({"k": keys, "ts": stamps, "x": np.sqrt(np.arange(len(keys)))}))


def sliding(overlap: int, aggregation: str, **aggregates: A.Aggregate) -> aion.LocalOperator:
    return aion.LocalOperator(
        key="k", time="ts", windows=aion.Sliding(f"{overlap} seconds", "1 second"),
        aggregates=aggregates or {"n": A.count(), "m": A.mean("x")},
        policy={
            "lateness": {"initial_bound": "1 day", "coverage": None},
            "trigger": {"kind": "every_batch"},
            "execution": {"aggregation": aggregation},
        },
    )  # fmt: skip


def overlap_600(aggregation: str, keys: int = 8) -> tuple[list[str], list[str]]:
    """On-time panes of 600 windows, and late ones: one event into the middle of all of them."""
    with sliding(600, aggregation) as operator:
        feed(operator, np.repeat(np.arange(1200) * 1_000_000, keys).tolist(), list(range(keys)) * 1200)
        on_time = operator.advance(1200 * 1_000_000)
        late = feed(operator, [599_500_000], [3])
    return exactly(on_time.to_pylist()), exactly(late.to_pylist())


@pytest.mark.slow
def test_windows_that_overlap_600_times_are_eager_of_itself(heights: list[int]) -> None:
    lazy = overlap_600("lazy")
    assert not heights
    auto = overlap_600("auto")
    assert auto == lazy
    assert (len(auto[0]), len(auto[1])) == (1200 * 8, 600)
    assert len(heights) == 2, "a pass over the windows on time, and one over the 600 that are late"
    assert min(heights) >= 3


def test_windows_that_do_not_overlap_are_lazy_of_themselves(heights: list[int]) -> None:
    with sliding(1, "auto") as operator:
        feed(operator, np.repeat(np.arange(200) * 1_000_000, 50).tolist(), list(range(50)) * 200)
        assert operator.advance(200 * 1_000_000).num_rows == 200 * 50
    assert not heights


def test_keys_that_are_seldom_seen_again_are_lazy_of_themselves(heights: list[int]) -> None:
    with sliding(20, "auto") as operator:
        feed(operator, np.repeat(np.arange(60) * 1_000_000, 200).tolist(), list(range(60 * 200)))
        assert operator.advance(60 * 1_000_000).num_rows == 60 * 200 * 20 - 200 * sum(range(20))
    assert not heights


@pytest.mark.parametrize("aggregate", [A.stddev("x"), A.median("x"), A.approx_percentile("x", 0.5)])
def test_what_rounds_or_grows_is_lazy_beside_others_that_are_eager(aggregate: A.Aggregate, grown: set[str]) -> None:
    found = {}
    for way in ("eager", "lazy"):
        with sliding(30, way, n=A.count(), other=aggregate) as operator:
            feed(operator, [s * 1_000_000 for s in range(60) for _ in range(3)], [1, 2, 1] * 60)
            found[way] = operator.advance(60 * 1_000_000)
    assert found["eager"].num_rows == 120
    assert exactly(found["eager"].to_pylist()) == exactly(found["lazy"].to_pylist())
    assert {"Counted"} <= grown <= {"Counted", "DoubleSum"}, "of what neither rounds nor grows"


# -- one pass -------------------------------------------------------------------------------------------------

SCHEMA = pa.schema(
    [("k", pa.int64()), ("ts", pa.timestamp("us")), ("i", pa.int64()), ("f", pa.float64()), ("id", pa.int64())]
)


def plan_of(**aggregates: A.Aggregate) -> Plan:
    return make_plan(
        SCHEMA, key="k", time="ts", windows=aion.Tumbling(us(1)), aggregates=aggregates, apply=None, outputs=None
    )


def loaded(plan: Plan, rows: Sequence[tuple[int, int, int, int, Any]]) -> Loaded:
    """Of (slice, seq, key, integer, double); each seq of a slice is a block."""
    blocks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for number, (slice_us, seq, key, i, f) in enumerate(rows):
        event = {"k": key, "ts": slice_us, "i": i, "f": f, "id": number}
        blocks.setdefault((slice_us, seq), []).append(event)
    assert plan.layout is not None
    made = []
    for (slice_us, seq), events in sorted(blocks.items()):
        table = pa.Table.from_pylist(events, pa.schema([f if f.name != "ts" else ("ts", pa.int64()) for f in SCHEMA]))
        events_of = table.cast(SCHEMA)
        partials = plan.layout.lift({"k0": events_of.column("k")}, {n: events_of.column(n) for n in SCHEMA.names})
        made += [(seq, slice_us, batch) for batch in partials.cast(plan.block_schema).combine_chunks().to_batches()]
    return Loaded.of_blocks(plan, made)


def execute(slices: Sequence[int], changed_since: int = -1, late_from: int = 2**63 - 1) -> Execution:
    window = WindowRef(0, slices[0], slices[-1] + 1)
    return Execution(window, PaneKind.LATE, 1, changed_since, late_from, 0, 0)


def order(windows: Sequence[Execution]) -> Execute:
    return Execute.of(windows, ())


ALL = {
    "n": A.count(), "s": A.sum("i"), "sf": A.sum("f"), "m": A.mean("f"), "lo": A.min("f"), "hi": A.max("i"),
    "first": A.first("id"), "last": A.last("id"), "by": A.max_by("id", "i"), "top": A.top_k("f", 3),
    "ids": A.min_by("id", "i", k=3), "d": A.approx_count_distinct("i"),
}  # fmt: skip

doubles = st.sampled_from([0.1, -2.5, 1e16, 3.0, 0.0, -0.0]) | st.none()
extreme = doubles | st.sampled_from([1e300, -1e300, 5e-324, 1e200, math.inf, -math.inf, math.nan])


@st.composite
def passes(draw: st.DrawFn) -> tuple[list[tuple[int, int, int, int, Any]], list[Execution]]:
    """Events in slices, some of which are empty, and windows over stretches of them with numbers of their own."""
    slices = sorted(draw(st.sets(st.integers(-40, 60), min_size=1, max_size=30)))
    values = draw(st.sampled_from([doubles, extreme]))
    row = st.tuples(st.sampled_from(slices), st.integers(0, 9), st.integers(0, 4), st.integers(-3, 3), values)
    rows = draw(st.lists(row, min_size=1, max_size=60))
    numbers = st.sampled_from([-1, -1, 0, 4, 8])
    windows = []
    for _ in range(draw(st.integers(1, 12))):
        begin = draw(st.integers(0, len(slices) - 1))
        end = draw(st.integers(begin + 1, len(slices)))
        windows.append(execute(slices[begin:end], draw(numbers), draw(st.sampled_from([0, 1, 5, 9, 2**63 - 1]))))
    return rows, windows


def pane(rows: Sequence[tuple[int, int, int, int, Any]], window: Execution, key: int) -> dict[str, Any] | None:
    own = [(i, r) for i, r in enumerate(rows) if window.window.start_us <= r[0] < window.window.end_us and r[2] == key]
    if not any(r[1] > window.changed_since for _, r in own):
        return None
    in_order = sorted(own, key=lambda e: (e[1][0], e[1][1], e[0]))
    return {
        "n": len(own),
        "s": sum(r[3] for _, r in own),
        "hi": max(r[3] for _, r in own),
        "first": min(in_order, key=lambda e: e[1][0])[0],
        "last": max(reversed(in_order), key=lambda e: e[1][0])[0],
        "by": max(reversed(in_order), key=lambda e: e[1][3])[0],
        "ids": [i for i, _ in sorted(in_order, key=lambda e: e[1][3])[:3]],
        "d": len({r[3] for _, r in own}),
        "events": len(own),
        "late_events": sum(r[1] >= window.late_from for _, r in own),
    }


@given(passes(), st.sampled_from([1, 2000, 1 << 30]))
@example(([(0, 2, 0, 1, 0.1), (1, 7, 0, 1, 0.1), (0, 1, 0, 1, 0.1)], [execute([0], 4, 2), execute([0, 1], 4, 2)]), 1)
@example(([(s, 0, 0, s, 1e300 * (-1) ** s) for s in range(9)], [execute(range(2, 9))]), 1 << 30)
def test_a_pass_is_the_same_either_way_and_as_plain_python_says(
    case: tuple[list[tuple[int, int, int, int, Any]], list[Execution]], limit_bytes: int
) -> None:
    rows, windows = case
    plan = plan_of(**ALL)

    def found(aggregation: Any) -> list[dict[str, Any]]:
        batches = loaded(plan, rows).windows(order(windows), limit_bytes, aggregation)
        return [row for batch in batches for row in batch.to_pylist()]

    eager = found("eager")
    assert exactly(eager) == exactly(found("lazy")) == exactly(found("auto"))
    wanted = [p for w in windows for k in range(5) if (p := pane(rows, w, k)) is not None]
    assert (
        exactly([{name: row[name] for name in wanted[0]} for row in eager]) == exactly(wanted) if wanted else not eager
    )


def test_of_equal_ones_the_first_or_last_by_slice_is_taken() -> None:
    """Whichever runs a window is combined of, in whatever order they were made."""
    plan = plan_of(by=ALL["by"], ids=ALL["ids"], top=A.max_by("id", "f", k=2))
    rows = [(s, 0, 0, 1, 0.5) for s in range(23)]
    windows = [execute(range(a, b)) for a in range(23) for b in range(a + 1, 24)]
    found = [row for batch in loaded(plan, rows).windows(order(windows), 1 << 30, "eager") for row in batch.to_pylist()]
    assert [(row["by"], row["ids"], row["top"]) for row in found] == [
        (end - 1, [*range(start, end)][:3], [*range(start, end)][:2]) for _, start, end in (w.window for w in windows)
    ]


def test_doubles_whose_runs_would_be_rounded_are_lazy(grown: set[str]) -> None:
    plan = plan_of(s=A.sum("f"))
    rows = [(s, 0, 0, 0, f) for s, f in enumerate([1e300, 1e200, 1.0, -1e300, -1e200])]
    for values, sums in ((rows, [1.0, 1e300]), ([r for r in rows if abs(r[4]) < 1e250], [1.0, 1e200])):
        windows = [execute(range(5)), execute(range(3))]
        found = [
            s for b in loaded(plan, values).windows(order(windows), 1 << 30, "eager") for s in b.column("s").to_pylist()
        ]
        assert found == sums
    assert grown == {"Counted"}


def test_a_run_that_overflows_is_no_error_where_no_window_does(heights: list[int]) -> None:
    most = 2**63 - 1
    plan = plan_of(s=A.sum("i"))
    rows = [(s, 0, 0, i, 0.0) for s, i in enumerate([-most, most, most, -most, 5])]

    def sums(*windows: Execution) -> list[int]:
        return [
            s for b in loaded(plan, rows).windows(order(windows), 1 << 30, "eager") for s in b.column("s").to_pylist()
        ]

    assert sums(execute(range(4)), execute(range(5)), execute([0, 1])) == [0, 5, 0]
    assert heights  # of runs (0, 1) and (2, 3) each sum is 0
    del heights[:]
    rows = [(s, 0, 0, i, 0.0) for s, i in enumerate([most, most, -most, -most, 5])]
    assert sums(execute(range(4)), execute(range(5)), execute([1, 2])) == [0, 5, 0]
    assert not heights
    with pytest.raises(IntegerOverflow, match="'s' = sum"):
        sums(execute(range(4)), execute([0, 1]))


# -- runs, heights, stretches -----------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 70))
def test_spans_are_all_of_a_window_in_order_and_few(data: st.DataObject, slices: int) -> None:
    levels, first = [np.arange(slices + 1)], [[(s, s + 1) for s in range(slices)]]
    for _ in range(data.draw(st.integers(0, 7))):
        runs = first[-1]
        first.append([(pair[0][0], pair[-1][1]) for pair in (runs[i : i + 2] for i in range(0, len(runs), 2))])
        levels.append(levels[-1][-1] + np.arange(len(first[-1]) + 1))
    nodes = [run_ for level in first for run_ in level]
    bounds = st.tuples(st.integers(0, slices), st.integers(0, slices)).map(sorted)
    windows = data.draw(st.lists(bounds, min_size=1, max_size=9))
    begins, ends = (np.array(side) for side in zip(*windows, strict=True))
    found = spans(levels, begins, ends)
    for begin, end, starts, lengths in zip(begins, ends, *found, strict=True):
        runs = [nodes[i] for at, n in zip(starts, lengths, strict=True) for i in range(at, at + n)]
        assert [a[1] for a in runs[:-1]] == [b[0] for b in runs[1:]]
        assert (runs[0][0], runs[-1][1]) == (begin, end) if runs else begin == end
        assert (lengths[: len(levels) - 1] <= 1).all()
        assert len(runs) <= 2 * (len(levels) - 1) + (end - begin) // 2 ** (len(levels) - 1)


def height_of(overlap: int, windows: int, keys: int, rows_per_slice: int | None = None) -> int:
    rows = np.full(overlap + windows, keys if rows_per_slice is None else rows_per_slice)
    begins = np.arange(windows)
    return choose_height(rows, keys, begins, begins + overlap, "auto")


def test_trees_are_as_high_as_pays() -> None:
    assert height_of(1, 64, 1000) == 0
    assert height_of(600, 1, 1000) == 0, "a window alone"
    assert height_of(600, 600, 1) > 0
    assert height_of(600, 600, 1000) > height_of(20, 64, 1000) > 0
    assert height_of(600, 64, 10**9, rows_per_slice=1000) == 0, "runs have as many rows as their slices"


@pytest.mark.usual_sizes
def test_windows_that_share_their_slices_are_computed_in_one_pass() -> None:
    plan = plan_of(n=A.count())

    def passes_of(windows: Sequence[Execution]) -> list[int]:
        slices = sorted({s for w in windows for s in range(w.window.start_us, w.window.end_us)})
        return [len(some) for some in windows_at_once(plan, Execute.of(windows, tuple(slices)))]

    assert passes_of([execute(range(s, s + 600)) for s in range(1300)]) == [601, 601, 98]
    assert passes_of([execute([s]) for s in range(1300)])[:2] == [WINDOWS_AT_ONCE] * 2
    assert passes_of([execute(range(1000 * n, 1000 * n + 9)) for n in range(200)]) == [64, 64, 64, 8]


# -- sums of doubles --------------------------------------------------------------------------------------------


def pair_of(values: Sequence[Fraction | float]) -> Fraction:
    high, low = sum_by_group(Groups(np.zeros(len(values), np.int64), 1), np.array(values, float))
    return Fraction(high[0]) + Fraction(low[0])


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(finite | st.floats(-1e6, 1e6) | st.integers(-9, 9).map(float), min_size=1, max_size=40), st.data())
def test_sums_that_are_said_to_be_exact_are(values: list[float], data: st.DataObject) -> None:
    if not sums_are_exact(np.array(values), len(values)):
        return
    cuts = sorted(data.draw(st.sets(st.integers(0, len(values)))) | {0, len(values)})
    assert [pair_of(values[a:b]) for a, b in pairwise(cuts)] == [
        sum(map(Fraction, values[a:b])) for a, b in pairwise(cuts)
    ]


def test_ordinary_values_have_exact_sums_and_wild_ones_have_not() -> None:
    rng = np.random.default_rng(4)
    for values in (rng.normal(size=100_000), rng.random(100_000) * 1e9, rng.lognormal(3, 2, 100_000), np.zeros(3)):
        assert sums_are_exact(values, 100_000)
    assert sums_are_exact(np.array([math.nan, math.inf, 1.0]), 10)
    assert not sums_are_exact(np.array([1e300, 1.0]), 10)
    assert not sums_are_exact(np.array([1e16, 1e-20]), 1000)
    assert not sums_are_exact(np.array([2.0**900]), 2)
