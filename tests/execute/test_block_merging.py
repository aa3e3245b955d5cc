"""Blocks merged in any tree make the same panes as blocks that were never merged (Disco section 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.config import load_policy
from aion.core.ingest.builder import BlockBuilder, ShardBlock
from aion.core.ingest.encoding import BlockSettings, decode
from aion.core.ingest.levels import BlockMerger
from aion.core.query.plan import Plan, make_plan
from aion.errors import CorruptBlock
from aion.execute.assembly import make_operator
from aion.execute.executor import Executor
from state_backends.format.block import HEADER_BYTES, Block, Codec, Compression
from state_backends.format.ordered_map import MemoryMap
from state_backends.store.protocol import Only, StoredBlock

SCHEMA = pa.schema([("k", pa.int64()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.float64())])
WINDOWS = [aion.Tumbling("10s"), aion.Sliding("25s", "10s")]
# What does not depend on the order of arrival, which a shuffle does not keep.
AGGREGATES = {
    "n": A.count(),
    "total": A.sum("v"),
    "average": A.mean("v"),
    "low": A.min("v"),
    "distinct": A.count_distinct("v"),
    "about": A.approx_count_distinct("v"),
    "middle": A.median("v"),
    "best": A.top_k("v", 3),
}
SHARDS = (4, 7)
POLICY = load_policy({"lateness": {"initial_bound": "1h", "coverage": None}, "trigger": {"kind": "every_batch"}})


def in_order(key: Any, window: Any, events: Iterable[pa.RecordBatch]) -> dict[str, Any]:
    rows = sorted((r["ts"].timestamp(), r["v"] or 0.0) for batch in events for r in batch.to_pylist())
    return {"text": repr(rows)}


def plan_for(how: str, windows: Sequence[Any] = WINDOWS) -> Plan:
    given: dict[str, Any] = {"aggregates": None, "apply": None, "outputs": None}
    if how == "events":
        given |= {"apply": in_order, "outputs": "text string"}
    elif how == "partials":
        given |= {"aggregates": {name: AGGREGATES[name] for name in ("n", "total", "average", "low", "about")}}
    else:
        given |= {"aggregates": AGGREGATES}
    return make_plan(SCHEMA, key="k", time="ts", windows=windows, **given)


HOW = ("partials", "values", "events")
PLANS = {how: plan_for(how) for how in HOW}
SESSIONS = [aion.Session("3s"), aion.Session("8s"), aion.Tumbling("10s")]
OF_SESSIONS = {how: plan_for(how, SESSIONS) for how in HOW}
OF_SESSIONS["partials beside rows of events"] = plan_for("partials", [*SESSIONS, aion.PerRecord("5s")])


class Kept(MemoryMap):
    """A shard's blocks in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, list[StoredBlock]] = {}

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        for seq, _, block in blocks:
            stored = StoredBlock(seq, block)
            self.blocks.setdefault(block.header.slice_us, []).append(stored)

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        assert only is None
        return (stored for s in slices for stored in self.blocks.get(s, []))

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        pass

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        for slice_us in purge:
            self.blocks.pop(slice_us, None)


def panes(plan: Plan, *batches: Sequence[ShardBlock]) -> list[str]:
    """Everything that the shards yield: what is in time, or late for an earlier batch; and what has no time."""
    rows: list[dict[str, Any]] = []
    for shard in SHARDS:
        executor = Executor(plan, make_operator(plan, POLICY, None), Kept())
        for number, blocks in enumerate(batches, 1):
            mine = [b.block for b in blocks if b.shard == shard]
            watermark = 10**9 if number == len(batches) else 30_000_000 * number
            for batch in (*executor.arrive(mine), *executor.end_batch(), *executor.advance(watermark)):
                rows += batch.to_pylist()
    # Of events without a time each block's come out by themselves.
    dropped = sum(r["events"] for r in rows if r["kind"] == "dropped")
    return [*sorted(repr(r) for r in rows if r["kind"] != "dropped"), f"{dropped} dropped"]


def built(plan: Plan, events: pa.Table, target_bytes: int, **form: Any) -> list[ShardBlock]:
    builder = BlockBuilder(plan, BlockSettings(target_bytes, **form), shard_of=ShardOfKeys(SHARDS))
    return [b for batch in events.to_batches() for b in builder.add(batch)] + list(builder.finish())


def merged(plan: Plan, blocks: Sequence[ShardBlock], target_bytes: int, **form: Any) -> list[ShardBlock]:
    merger = BlockMerger(BlockBuilder(plan, BlockSettings(target_bytes, **form)))
    return [out for made in blocks for out in merger.add(made.shard, made.block)] + list(merger.finish())


TIMES = st.one_of(st.none(), st.integers(0, 60_000_000))
EVENTS = st.lists(st.tuples(st.sampled_from([0, 1, 2, None]), TIMES, st.sampled_from([None, 0.5, 1.0, 2.0, 7.0])))


def table(rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


@pytest.mark.parametrize("how", PLANS)
@given(data=st.data())
def test_any_tree_gives_the_same_panes(how: str, data: st.DataObject) -> None:
    plan = PLANS[how]
    children = data.draw(st.lists(EVENTS, min_size=1, max_size=5))
    target = data.draw(st.sampled_from([200, 2_000, 1 << 20]))
    form = data.draw(
        st.sampled_from([{}, {"compression": Compression.LZ4}, {"codec": Codec.JSON}] if how == "events" else [{}])
    )
    nodes = [built(plan, table(rows), target, **form) for rows in children]
    expected = panes(plan, [block for node in nodes for block in node])
    assert panes(plan, through_a_tree(plan, nodes, target, data, **form)) == expected


def through_a_tree(
    plan: Plan, nodes: list[list[ShardBlock]], target_bytes: int, data: st.DataObject, **form: Any
) -> list[ShardBlock]:
    """What the last node of any tree over these nodes hands on."""
    while len(nodes) > 1:
        # Any number of neighbours share a parent; one without siblings is merged with itself.
        size = data.draw(st.integers(1, len(nodes)))
        together = [block for node in nodes[:size] for block in data.draw(st.permutations(node))]
        nodes = [*nodes[size:], merged(plan, together, target_bytes, **form)] if size > 1 else nodes[1:] + nodes[:1]
    return merged(plan, nodes[0], target_bytes, **form)


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("how", OF_SESSIONS)
@given(data=st.data())
def test_sessions_are_the_same_whichever_tree_their_events_came_through(how: str, data: st.DataObject) -> None:
    """Also those of events from several children, and those that late events of a second batch extend or join."""
    plan = OF_SESSIONS[how]
    target = data.draw(st.sampled_from([200, 2_000, 1 << 20]))
    batches = [
        [built(plan, table(rows), target) for rows in data.draw(st.lists(EVENTS, min_size=1, max_size=4))]
        for _ in range(2)
    ]
    expected = panes(plan, *([block for node in nodes for block in node] for nodes in batches))
    assert panes(plan, *(through_a_tree(plan, nodes, target, data) for nodes in batches)) == expected


def test_late_events_that_came_through_a_tree_join_sessions() -> None:
    """The property above says nothing where no session is retracted: here one is."""
    plan = OF_SESSIONS["partials"]
    first = [built(plan, table([(0, second * 1_000_000, 1.0)]), 200) for second in (1, 2, 6)]
    late = [built(plan, table([(0, second * 1_000_000, 1.0)]), 200) for second in (4, 5)]
    rows = panes(plan, *(merged(plan, [block for node in nodes for block in node], 200) for nodes in (first, late)))
    short = [row for row in rows if "session 3 seconds" in row]
    assert len([row for row in short if "retracted" in row]) == 2
    assert len([row for row in short if "'n': 5" in row]) == 1


@pytest.mark.parametrize("how", ["partials", "values"])
def test_what_many_children_know_of_a_slice_becomes_one_block(how: str) -> None:
    plan = PLANS[how]
    nodes = [built(plan, table([(0, 1_000_000, 1.0), (1, 2_000_000, 2.0)]), 1 << 20) for _ in range(8)]
    together = [block for node in nodes for block in node]
    (fat, *others) = merged(plan, together, 1 << 20)
    assert len(others) == len({b.shard for b in together}) - 1
    assert sum(b.block.header.events for b in (fat, *others)) == 16
    assert sum(b.block.header.rows for b in (fat, *others)) == 2, "one row for each key"


def test_a_slice_is_sent_once_however_many_windows_it_is_in() -> None:
    """Kept events: the bytes that a node passes on do not grow with the windows, but for further edges."""
    rows = [(0, t, 1.0) for t in range(0, 60_000_000, 100_000)]
    sizes = []
    for windows in ([aion.Tumbling("10s")], [aion.Tumbling("10s"), aion.Sliding("60s", "10s"), aion.Tumbling("30s")]):
        plan = make_plan(
            SCHEMA, key="k", time="ts", windows=windows, aggregates=None, apply=in_order, outputs="text string"
        )
        out = merged(plan, built(plan, table(rows), 1 << 20), 1 << 20)
        sizes.append(sum(b.block.size_bytes for b in out))
        assert sum(b.block.header.events for b in out) == len(rows)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("how", "is_read"), [("events", False), ("values", False), ("partials", True)])
def test_only_what_gets_smaller_by_merging_is_read(how: str, is_read: bool) -> None:
    """A large block of kept events or values is handed on as it is: a node does not look into it."""
    plan = PLANS[how]
    rows = [(k, 1_000_000, float(v)) for k in range(3) for v in range(200)]
    blocks = built(plan, table(rows), 1 << 20)
    smallest = min(b.block.size_bytes for b in blocks)
    passed = merged(plan, [*blocks, *blocks], smallest)
    untouched = {id(b.block) for b in blocks}
    assert all(id(b.block) in untouched for b in passed) is not is_read
    assert sum(b.block.header.events for b in passed) == 2 * len(rows)


@pytest.mark.usual_sizes
def test_blocks_stay_near_the_target() -> None:
    plan = PLANS["events"]
    small = [built(plan, table([(k, 1_000_000 + n, 1.0) for k in range(3)]), 1 << 20) for n in range(500)]
    out = merged(plan, [b for node in small for b in node], 4_096)
    assert max(b.block.size_bytes for b in out) < 2 * 4_096
    assert len(out) < 20
    for shard_block in out:
        keys = decode(shard_block.block, plan.block_schema).column("k").to_pylist()
        assert len([k for i, k in enumerate(keys) if i == 0 or keys[i - 1] != k]) == len(set(keys)), "a key is one run"


def test_a_damaged_block_is_not_merged() -> None:
    plan = PLANS["partials"]
    (shard, block, _), *_ = built(plan, table([(0, 1, 1.0)]), 1 << 20)
    damaged = bytearray(block.stored)
    damaged[HEADER_BYTES + 8] ^= 1
    with pytest.raises(CorruptBlock, match="checksum"):
        merged(plan, [ShardBlock(shard, Block(block.header, bytes(damaged)))], 1 << 20)
