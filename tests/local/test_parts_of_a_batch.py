"""A shard's events of a batch may reach it in several parts, in any order: Spark's shuffle decides. It changes nothing.

Also how many events are counted as late, and as too late.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.core.windows import Definition
from aion.execute.assembly import make_builder
from aion.execute.executor import Executor
from state_backends.format.block import Block
from tests.core.keyed.test_keyed_windows import DEFINITIONS, Step, policy, steps, table
from tests.durations import us
from tests.examples import some
from tests.keyed_oracle import Event

APPLIED = {"apply": aion.Apply(lambda key, window, batches: {"n": sum(b.num_rows for b in batches)}, "n bigint")}
COUNTED = {"aggregates": {"n": A.count()}}
MIXED: list[Any] = [
    *DEFINITIONS,
    [aion.Session(us(5)), aion.Tumbling(us(20))],
    [aion.Session(gap_column="gap"), aion.Count(2)],
]


class InParts(aion.LocalOperator):
    """Each record batch of a table becomes blocks by itself, as in a child of Spark, and they arrive by themselves."""

    def _carry_out(
        self, executor: Executor, table: pa.Table | None, watermark_us: int | None, *, ends_run: bool
    ) -> list[pa.RecordBatch]:
        rows = [] if watermark_us is None else [*executor.advance(watermark_us)]
        for blocks in self._arrivals([] if table is None else [self._blocks(executor, b) for b in table.to_batches()]):
            rows += executor.arrive(blocks)
        return [*rows, *executor.end_batch(ends_run=ends_run)]

    def _blocks(self, executor: Executor, batch: pa.RecordBatch) -> list[Block]:
        builder = make_builder(executor.plan, self.policy, self._codec, ShardOfKeys([0]))
        return [b.block for b in [*builder.add(batch), *builder.finish()]]

    def _arrivals(self, blocks: list[list[Block]]) -> list[list[Block]]:
        return blocks


class Backwards(InParts):
    def _arrivals(self, blocks: list[list[Block]]) -> list[list[Block]]:
        return blocks[::-1]


class Together(InParts):
    def _arrivals(self, blocks: list[list[Block]]) -> list[list[Block]]:
        return [[block for some in blocks for block in some]]


def found(operator: aion.LocalOperator, script: list[Step], parts: int) -> list[Any]:
    """What comes out of each step, in any order. Rows of dropped events that differ in nothing else are added up."""
    steps = []
    for step in script:
        if isinstance(step, int):
            rows = operator.advance(step).to_pylist()
        else:
            rows = operator.process(pa.concat_tables([table(step[i::parts]) for i in range(parts)])).to_pylist()
        seen: Counter[str] = Counter()
        for row in rows:
            dropped = row["kind"] == "dropped" and "n" in row
            seen[str({**row, **dict.fromkeys(("n", "events", "late_events") if dropped else ())})] += row["events"] or 1
        steps.append(seen)
    return [*steps, operator.counters]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("definition", MIXED, ids=str)
@pytest.mark.parametrize("how", [COUNTED, APPLIED], ids=["partials", "events"])
@some(1 / 2)
@given(script=steps, bound=st.sampled_from([0, 3, 20]), parts=st.sampled_from([2, 3]))
@example(script=[110, [Event(1, 60, 0, gap=200), Event(1, 70, 0, gap=2)]], bound=20, parts=2)
@example(script=[110, [Event(1, 103, 0), Event(1, 107, 0)]], bound=20, parts=2)
def test_the_parts_of_a_batch_and_their_order_change_nothing(
    definition: Any, how: dict[str, Any], script: list[Step], bound: int, parts: int
) -> None:
    outcomes = []
    for make in (Together, InParts, Backwards):
        with make(windows=definition, key="key", time="t", policy=policy(bound), **how) as operator:
            outcomes.append(found(operator, [[Event(9, -900, 0)], *script, 500], parts))
    assert outcomes[1] == outcomes[0]
    assert outcomes[2] == outcomes[0]


LATE = Event(0, 100, 0)
GOOD = Event(1, 2000, 0)


@pytest.mark.parametrize("how", [COUNTED, APPLIED], ids=["partials", "events"])
@pytest.mark.parametrize("beside", [[], [aion.Tumbling(us(10_000))]], ids=["alone", "beside a long window"])
@pytest.mark.parametrize(
    "definition",
    [
        aion.Session(us(5)),
        aion.Session(us(5), max_duration=us(9)),
        aion.Count(2),
        aion.PerRecord(us(5)),
        aion.Tumbling(us(5)),
    ],
    ids=str,
)
def test_an_event_that_is_too_late_is_late_whatever_comes_with_it(
    definition: Definition, beside: list[Definition], how: dict[str, Any]
) -> None:
    for batches in ([[LATE, GOOD]], [[LATE], [GOOD]], [[GOOD], [LATE]]):
        with aion.LocalOperator(
            windows=[definition, *beside], key="key", time="t", policy=policy(10), **how
        ) as operator:
            operator.process(table([Event(2, 1500, 0)]), 1000)
            for batch in batches:
                operator.process(table(batch))
            counters = operator.counters
            assert (counters["events"], counters["late_events"], counters["dropped"]) == (3, 1, 1)


@pytest.mark.parametrize("how", [COUNTED, APPLIED], ids=["partials", "events"])
@pytest.mark.parametrize("definition", [aion.Session(us(5)), aion.Count(1), aion.PerRecord(us(5))], ids=str)
def test_an_event_is_late_if_only_a_window_of_its_key_has_ended(definition: Definition, how: dict[str, Any]) -> None:
    with aion.LocalOperator(
        windows=[definition, aion.Tumbling(us(10_000))], key="key", time="t", policy=policy(5000), **how
    ) as operator:
        operator.process(table([Event(0, 100, 0)]))
        operator.advance(1000)
        rows = operator.process(table([Event(0, 100, 1), Event(1, 2000, 0)])).to_pylist()
        assert sum(row["late_events"] for row in rows) >= 1
        assert operator.counters["late_events"] == 1
