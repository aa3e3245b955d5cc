"""Windows of single keys whose events do not fit into the memory of a worker, and texts beyond 2 GiB."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.core.ingest.builder import BlockBuilder
from aion.core.query.plan import make_plan
from aion.errors import TooLarge
from aion.execute.spill import held_rows
from aion.execute.spill.held_rows import HeldRows
from tests.core.keyed.test_keyed_windows import KINDS, Step, policy, steps, table
from tests.durations import us
from tests.examples import some

WINDOWS: dict[str, Any] = {
    "session": aion.Session(us(5)),
    "cut session": aion.Session(us(5), max_duration=us(9)),
    "count": aion.Count(3, 2),
    "per record": aion.PerRecord(us(7)),
    "punctuated": aion.Punctuated("mark"),
    "several": [aion.Session(us(4)), aion.Count(2), aion.Tumbling(us(10))],
}
MIB = 1 << 20
SECOND = 1_000_000
GAP = 10 * SECOND


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("key", ["key", None])
@some(1 / 4)
@given(script=steps)
def test_memory_for_a_few_events_gives_the_same_panes(
    kind: str, windows: Any, key: str | None, script: list[Step]
) -> None:
    def panes(memory: str) -> list[list[str]]:
        how = {**policy(20), "apply": {"memory": memory}}
        with aion.LocalOperator(windows=windows, key=key, time="t", policy=how, **KINDS[kind]) as operator:
            found = [operator.advance(s) if isinstance(s, int) else operator.process(table(s)) for s in script]
            found.append(operator.close())
        return [sorted(map(repr, rows.to_pylist())) for rows in found]

    assert panes("100B") == panes("256MiB")


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_rows_of_several_batches_are_taken_in_any_order(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_rows, "CHUNK_BYTES", chunk_bytes)
    batches = [pa.record_batch({"n": range(begin, begin + n)}) for begin, n in ((0, 3), (3, 0), (3, 1), (4, 6))]
    held = HeldRows(batches)
    for rows in ([], [0], [9, 0], [*range(10)], [3, 3, 9, 1, 2, 8, 0], [5, 6, 7, 8], [7, 6, 5]):
        assert held.take(np.array(rows, np.int64)).column("n").to_pylist() == rows
        read = [n for chunk in held.chunks(np.array(rows, np.int64)) for n in chunk.column("n").to_pylist()]
        assert read == rows


# -- beyond 2 GiB: what an array of Arrow's strings can hold ------------------------------------------------

TEXTS = 2400


def texts(first: int, count: int, keys: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "k": [f"key {n % keys}" for n in numbers],
            "t": pa.array([n * 1000 for n in numbers], pa.timestamp("us", "UTC")),
            "text": [f"{n:0{MIB}d}" for n in numbers],
            "n": numbers,
            "mark": [n % 800 == 0 for n in numbers],
        }
    )


def run(windows: Any, keys: int, key: str | None = "k", **what: Any) -> pa.Table:
    how = {"lateness": {"initial_bound": "1h", "coverage": None}, "memory": {"budget": "256MiB"}}
    with aion.LocalOperator(windows=windows, key=key, time="t", policy=how, **what) as operator:
        for first in range(0, TEXTS, 100):
            operator.process(texts(first, 100, keys))
        return operator.advance(86_400 * SECOND)


def lengths(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    n = size = 0
    last = -1
    for batch in events:
        assert batch.nbytes < 512 * MIB, "events of a large window are read in small batches"
        numbers = batch.column("n").to_pylist()
        assert numbers == sorted(numbers)
        assert numbers[0] > last
        last = numbers[-1]
        n += len(numbers)
        size += sum(len(text) for text in batch.column("text").to_pylist())
    return {"n": n, "size": size}


@pytest.mark.proof
@pytest.mark.usual_sizes
@pytest.mark.parametrize(("keys", "key"), [(1, "k"), (7, "k"), (1, None)])
@pytest.mark.parametrize(
    "windows",
    [aion.Tumbling("1 hour"), aion.Session("10 seconds"), aion.Session("10 seconds", max_duration="1 hour")],
    ids=["tumbling", "session", "cut session"],
)
def test_a_function_gets_more_text_than_an_array_holds(windows: Any, keys: int, key: str | None) -> None:
    panes = run(
        windows,
        keys,
        key,
        apply=aion.Apply(lengths, "n bigint, size bigint"),
    )
    assert sum(panes.column("n").to_pylist()) == TEXTS
    assert sum(panes.column("size").to_pylist()) == TEXTS * MIB


@pytest.mark.proof
@pytest.mark.usual_sizes
@pytest.mark.parametrize("windows", [aion.Tumbling("1 hour"), aion.Session("10 seconds")], ids=["tumbling", "session"])
def test_results_take_more_text_than_an_array_holds(windows: Any) -> None:
    """Each is small enough, all together are not."""

    def texts_of(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        return {"text": "".join(text for batch in events for text in batch.column("text").to_pylist())}

    panes = run(
        windows,
        100,
        apply=aion.Apply(texts_of, "text string"),
    )
    assert sum(len(text) for text in panes.column("text").to_pylist()) == TEXTS * MIB
    del panes
    panes = run(windows, 100, aggregates={"texts": A.collect_list("text")})
    assert sum(len(text) for texts in panes.column("texts").to_pylist() for text in texts) == TEXTS * MIB


@pytest.mark.proof
@pytest.mark.usual_sizes
@pytest.mark.parametrize(
    "windows",
    [aion.Tumbling("1 hour"), aion.Session("10 seconds"), aion.Count(800), aion.Punctuated("mark")],
    ids=["tumbling", "session", "count", "punctuated"],
)
def test_aggregates_of_more_text_than_an_array_holds(windows: Any) -> None:
    """They keep a text, or few."""
    wanted = {"max": A.max("text"), "last": A.last("text"), "by": A.max_by("text", "n"), "best": A.max_by("n", "text")}
    panes = run(windows, 7, aggregates=wanted)
    for row in panes.select(["max", "last", "by", "best"]).to_pylist():
        assert row["max"] == row["last"] == row["by"]
        assert int(row["max"][-9:]) == row["best"]


@pytest.mark.proof
@pytest.mark.usual_sizes
@pytest.mark.parametrize("windows", [aion.Tumbling("1 hour"), aion.Session("10 seconds")], ids=["tumbling", "session"])
def test_a_single_value_beyond_2_gib_is_an_error_that_says_so(windows: Any) -> None:
    with pytest.raises(TooLarge, match=r"'texts' = collect_list\(text\): .* more than 2 GiB.*apply="):
        run(windows, 1, aggregates={"n": A.count(), "texts": A.collect_list("text")})


def test_one_batch_may_be_larger_than_what_a_builder_holds() -> None:
    """It is cut before it is joined with what waits."""
    plan = make_plan(
        texts(0, 1, 1).schema, key="k", time="t", windows=aion.Session(us(GAP)), aggregates=None, apply=lengths,
        outputs="n bigint, size bigint",
    )  # fmt: skip
    builder = BlockBuilder(plan, buffer_bytes=4 * MIB, shard_of=ShardOfKeys([0]))
    (batch,) = texts(0, 20, 2).combine_chunks().to_batches()
    blocks = [made.block for made in builder.add(batch)] + [made.block for made in builder.finish()]
    assert sum(block.header.events for block in blocks) == 20
    assert max(block.size_bytes for block in blocks) < 6 * MIB
