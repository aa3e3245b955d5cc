"""Traces and their replay: what was recorded comes back, and a replay decides as the operator itself did."""

from __future__ import annotations

import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.config import load_policy
from aion.core.periodic import Periodic
from aion.errors import ConfigError, FormatError
from aion.execute.record.recorder import Recorder
from aion.execute.record.trace import FORMAT, METADATA, SCHEMA, Definition, Trace, fitted, read_trace
from aion.tools.tune.disk import Machine, SimulatedDisk, Transfer
from aion.tools.tune.simulator import as_recorded, simulate
from state_backends.store.io import Priority, Steps
from tests.examples import some

S = 1_000_000
FAST = Machine(1e9, 1e-5, 1e9, 1e-4, 1e9)
PADS = ("x" * 200, "y" * 180)


def table(times: list[int], keys: list[int]) -> pa.Table:
    return pa.table(
        {
            "ts": pa.array(times, pa.timestamp("us", "UTC")),
            "k": pa.array(keys, pa.int64()),
            "pad": [PADS[k % 2] for k in keys],
        }
    )


def how_many(key: Any, window: Any, events: Any) -> dict[str, int]:
    return {"n": sum(batch.num_rows for batch in events)}


KEPT: dict[str, Any] = {"apply": aion.Apply(how_many, "n long")}
KINDS: dict[str, dict[str, Any]] = {
    "kept": KEPT,
    "kept by key": {**KEPT, "key": "k"},
    "partials": {"aggregates": {"n": A.count()}, "key": "k"},
}
WINDOWS: dict[str, Any] = {
    "tumbling": aion.Tumbling("10 seconds"),
    "sliding": aion.Sliding("20 seconds", "5 seconds"),
    "cumulative": aion.Cumulative("5 seconds", "20 seconds"),
    "early": aion.Tumbling("10 seconds", early="3 seconds"),
    "timed apart": [
        aion.Tumbling("10 seconds", bound="15 seconds"),
        aion.Sliding("20 seconds", "5 seconds", trigger={"kind": "interval", "interval": timedelta(seconds=12)}),
        aion.Calendar("1 day", "Asia/Tokyo", early="9 seconds"),
    ],
}
POLICY: dict[str, Any] = {
    "memory": {"budget": "256KiB", "bucket_limit": "32KiB"},
    "blocks": {"target": "2KiB"},
    "lateness": {"initial_bound": "60s"},
}


def batches(seed: int, count: int, events: int) -> list[tuple[int, pa.Table]]:
    """Watermarks, with what comes under each: a third of it up to 70 s late."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        now = (i + 1) * 4 * S
        late = np.where(rng.random(events) < 0.33, rng.exponential(15 * S, events), 0).astype(np.int64)
        times = now + rng.integers(0, 4 * S, events) - np.minimum(late, 70 * S)
        made.append((now - 2 * S, table(times.tolist(), rng.integers(0, 9, events).tolist())))
    return made


def recorded(
    folder: Path, kind: str, windows: Any, policy: Any, stream: list[tuple[int, pa.Table]], emit: Any = "all"
) -> dict[str, Any]:
    """Runs the real thing; its counters."""
    definition = {"windows": windows, "time": "ts", "emit": emit, **KINDS[kind]}
    traced = load_policy(policy, {"trace.folder": folder})
    with aion.LocalOperator(policy=traced, **definition) as operator:
        for watermark, events in stream:
            operator.process(events)
            operator.advance(watermark)
        operator.close()
        return operator.counters


@pytest.mark.slow
@some(1 / 4)
@given(
    kind=st.sampled_from(list(KINDS)),
    asked=st.sampled_from([*[(windows, "all") for windows in WINDOWS], ("tumbling", "final"), ("sliding", "final")]),
    trigger=st.sampled_from(
        [
            {"bound": 0.2},
            {"bound": 0.02},
            {"kind": "every_batch"},
            {"kind": "count", "count": 40},
            {"kind": "every_batch", "early": "6 seconds"},
        ]
    ),
    seed=st.integers(0, 99),
)
@example(kind="partials", asked=("timed apart", "all"), trigger={"kind": "every_batch", "early": "6 seconds"}, seed=1)
@example(kind="kept by key", asked=("early", "all"), trigger={"bound": 0.2}, seed=2)
def test_a_replay_executes_exactly_what_was_executed(
    kind: str, asked: tuple[str, str], trigger: dict[str, Any], seed: int
) -> None:
    policy, (windows, emit) = load_policy({**POLICY, "trigger": trigger}), asked
    with tempfile.TemporaryDirectory() as folder:
        counters = recorded(Path(folder), kind, WINDOWS[windows], policy, batches(seed, 14, 60), emit)
        trace = read_trace(Path(folder))
    found = simulate(trace, policy, FAST, paced=False)
    assert found.executions == counters["executions"]
    assert found.dropped == counters["dropped"]
    assert trace.events == counters["events"]
    kept = counters["staleness"]
    assert found.stalest == kept["largest"]
    assert found.staleness == pytest.approx(kept["total"] / kept["windows"] if kept["windows"] else 0.0)


@pytest.mark.slow
def test_early_executions_cost_the_same_whoever_asks_for_them(tmp_path: Path) -> None:
    policy, slow = load_policy(POLICY, {"memory.budget": "64KiB"}), Machine(1e6, 1e-3, 1e6, 1e-2, 1e9)
    recorded(tmp_path, "kept", WINDOWS["early"], policy, batches(2, 8, 200))
    own = read_trace(tmp_path)
    silent = Trace(own.definition._replace(windows={"tumbling": WINDOWS["tumbling"]}), own.table)
    found = simulate(own, policy, slow, paced=False)
    assert found == simulate(silent, load_policy(policy, {"trigger.early": "3 seconds"}), slow, paced=False)
    without = simulate(silent, policy, slow, paced=False)
    assert found.executions["early"] > 0 == without.executions["early"]
    assert found.executions["on_time"] == without.executions["on_time"]
    assert found.read_bytes > without.read_bytes


def test_a_trace_says_what_came_and_when(tmp_path: Path) -> None:
    stream = batches(1, 5, 50)
    recorded(tmp_path / "t", "kept", WINDOWS["tumbling"], POLICY, stream)
    trace = read_trace(tmp_path / "t")
    assert trace.events == 250
    assert trace.bytes > sum(events["pad"].nbytes for _, events in stream)
    # Each call is a batch: events, then a watermark.
    assert [b.watermark_us for b in trace.batches] == [None, *(w for w, _ in stream for _ in range(2))]
    assert trace.batches[-1].ends_run and not any(b.ends_run for b in trace.batches[:-1])
    starts = [b.at_us for b in trace.batches]
    assert starts == sorted(starts)
    late_us, events = trace.lateness_us()
    assert late_us.min() >= 0 and 0 < events.sum() < 250
    trace.write(tmp_path / "one.parquet")
    again = read_trace(tmp_path / "one.parquet")
    assert again.table.equals(trace.table) and again.definition == trace.definition
    assert again.batches[2].blocks == trace.batches[2].blocks
    assert not {"pad", "k", "ts"} & set(again.table.schema.names)


@pytest.mark.parametrize(
    "metadata", [b"", b"{", b"\xff", b"[1]", b"null", b"{}", b'{"format": 1}', b'{"format": %d}'], ids=repr
)
def test_a_trace_whose_definition_is_damaged_is_refused(tmp_path: Path, metadata: bytes) -> None:
    recorded(tmp_path / "t", "kept", WINDOWS["tumbling"], POLICY, batches(1, 2, 5))
    table = read_trace(tmp_path / "t").table
    if b"%d" in metadata:
        metadata %= FORMAT
    pq.write_table(table.replace_schema_metadata({METADATA: metadata}), tmp_path / "one.parquet")
    with pytest.raises(FormatError, match=r"one\.parquet"):
        read_trace(tmp_path / "one.parquet")


def test_speeds_are_those_of_the_machine_that_recorded(tmp_path: Path) -> None:
    definition = Definition({"w": Periodic(10, 10, 0)}, key=True, kept=True, blocking=False, commits=False)
    recorder = Recorder(tmp_path, definition)
    recorder.begin(0, None, 0)
    for mib in (1, 2, 3, 4, 5):
        recorder.executed(mib << 20, 0.003 + 0.005 * mib + 0.1, 0.1)  # waited most of the time, whatever came
        recorder.staged(mib << 20, 0.002 * mib + 0.3, 0.3)
        recorder.written(mib << 20, 0.01 + 0.02 * mib)
    recorder.executed(1 << 20, 2.0)  # the first is slow but once
    recorder.staged(1 << 20, 0.5, 0.0)
    told = as_recorded(FAST, Trace(definition, recorder.table()))
    assert (1 << 20) / told.processing_bytes_per_s == pytest.approx(0.005, rel=0.01)
    assert told.execution_s == pytest.approx(0.003, rel=0.05)
    assert (1 << 20) / told.read_bytes_per_s == pytest.approx(0.002, rel=0.01)
    assert (told.read_block_s, told.staging_s) == (0.0, pytest.approx(0.0, abs=1e-5))
    assert (1 << 20) / told.write_bytes_per_s == pytest.approx(0.02, rel=0.01)
    assert told.write_file_s == pytest.approx(0.01, rel=0.01)
    recorder.begin(0, None, 0)
    assert as_recorded(FAST, Trace(definition, recorder.table())) == FAST


@pytest.mark.slow
def test_prestages_are_in_the_trace(tmp_path: Path) -> None:
    recorded(tmp_path / "t", "kept", WINDOWS["tumbling"], POLICY, batches(1, 12, 200))
    told = read_trace(tmp_path / "t")
    assert all(cost is not None and cost.bytes_per_s > 0 for cost in (told.staging, told.writing, told.processing))
    recorded(tmp_path / "n", "kept", WINDOWS["tumbling"], {**POLICY, "prestage": {"mode": "none"}}, batches(1, 12, 200))
    assert read_trace(tmp_path / "n").staging is None


@given(
    st.floats(0, 1),
    st.floats(1e-9, 1e-6),
    st.lists(st.integers(1, 1 << 26), min_size=20, max_size=60, unique=True),
    st.data(),
)
def test_a_line_is_found_whatever_a_few_slow_ones_say(
    fixed_s: float, s_per_byte: float, sizes: list[int], data: st.DataObject
) -> None:
    size = np.array(sizes, float)
    seconds = fixed_s + s_per_byte * size
    slow = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=len(sizes) // 10, unique=True))
    exact = fitted(size, seconds)
    assert exact.fixed_s == pytest.approx(fixed_s, abs=1e-6)
    assert 1 / exact.bytes_per_s == pytest.approx(s_per_byte, rel=1e-3)
    seconds[slow] += 5.0
    found = fitted(size, seconds)
    assert found.fixed_s >= 0 and found.bytes_per_s > 0
    off = np.abs(found.fixed_s + size / found.bytes_per_s - (fixed_s + s_per_byte * size))
    assert np.median(off) <= 0.02 * (fixed_s + s_per_byte * size.max()) + 1e-6


@pytest.mark.slow
def test_blocks_are_handed_over_as_they_were(tmp_path: Path) -> None:
    """As many at once as came, after as long as it took to make them; and a batch begins when its first call does."""
    with aion.LocalOperator(
        windows=WINDOWS["tumbling"], time="ts", policy={**POLICY, "trace": {"folder": tmp_path}}, **KEPT
    ) as operator:
        for watermark, events in batches(3, 6, 1500):
            time.sleep(0.02)
            operator.process(events)
            operator.advance(watermark)
    trace = read_trace(tmp_path)
    for batch in trace.batches:
        assert sum(handed.blocks for handed in batch.handed) == len(batch.blocks) == len(batch.rows)
        assert all(handed.after_s >= 0 and handed.dealt_s > 0 for handed in batch.handed)
    begins = np.diff([b.at_us for b in trace.batches])
    assert (begins >= 0).all()
    assert all(b.handed and b.handed[0].after_s > 0 for b in trace.batches if b.blocks)


@pytest.mark.slow
def test_a_trace_of_before_is_replayed(tmp_path: Path) -> None:
    """One that does not say when blocks were handed over, how long a function waited, and when definitions run."""
    trace = trace_of(tmp_path)
    table = trace.table.drop_columns(["waited_us", "dealt_us"])
    old = [kind == "arrival" for kind in table["kind"].to_pylist()]
    for name in ("at_us", "took_us"):
        place = table.schema.get_field_index(name)
        kept = pc.if_else(pa.array(old), pa.scalar(None, pa.int64()), table[name])
        table = table.set_column(place, name, kept)
    told = trace.definition.to_json()
    metadata = {METADATA: json.dumps({name: told[name] for name in told if name not in ("timing", "final_only")})}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "old.parquet")
    again = read_trace(tmp_path / "old.parquet")
    assert [b.handed for b in again.batches if b.blocks] == [
        [(len(b.blocks), 0.0, 0.0)] for b in again.batches if b.blocks
    ]
    policy = load_policy(POLICY)
    assert simulate(again, policy, FAST).executions == simulate(trace, policy, FAST).executions


@pytest.mark.parametrize("time_of", ["took_us", "dealt_us"])
def test_time_between_blocks_is_time_for_the_disk(time_of: str) -> None:
    """What is handed over, or worked on, later finds memory that writes made free meanwhile."""
    definition = Definition({"w": Periodic(10 * S, 10 * S, 0)}, key=False, kept=True, blocking=True, commits=False)

    def peak(before_us: int) -> int:
        rows: list[dict[str, Any]] = []
        for at in range(0, 200 * S, 10 * S):
            came = {"batch": at, time_of: before_us, "slice_us": at, "events": 10, "rows": 10, "bytes": 8 << 10}
            rows.append({"batch": at, "kind": "batch", "at_us": at, "watermark_us": at})
            rows += [{**came, "kind": "arrival", "at_us": at + number} for number in range(8)]
        table = pa.Table.from_pylist([{"shard": 0, **row} for row in rows], SCHEMA)
        policy = load_policy(POLICY, {"memory.bucket_limit": "8KiB"})
        slow = Machine(1e9, 1e-5, 1e6, 1e-3, 1e9)
        return simulate(Trace(definition, table), policy, slow).memory_bytes

    assert peak(0) > peak(200_000)


def test_a_batch_that_is_recorded_again_replaces_its_file(tmp_path: Path) -> None:
    for _ in range(2):
        recorded(tmp_path, "kept", WINDOWS["tumbling"], POLICY, batches(1, 3, 20))
    assert read_trace(tmp_path).events == 60


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="there is no trace"):
        read_trace(tmp_path)
    (tmp_path / "x.parquet").write_bytes(b"nothing")
    with pytest.raises(FormatError, match=r"x\.parquet"):
        read_trace(tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="events of each key"):
        aion.LocalOperator(
            windows=aion.Session("5 seconds"),
            time="ts",
            key="k",
            aggregates={"n": A.count()},
            policy={"trace": {"folder": tmp_path}},
        )


def trace_of(tmp_path: Path, kind: str = "kept") -> Trace:
    recorded(tmp_path / "trace", kind, WINDOWS["tumbling"], POLICY, batches(7, 14, 400))
    return read_trace(tmp_path / "trace")


@pytest.mark.slow
def test_a_replay_of_the_same_is_the_same(tmp_path: Path) -> None:
    trace, policy = trace_of(tmp_path, "kept by key"), load_policy(POLICY)
    assert simulate(trace, policy, FAST) == simulate(trace, policy, FAST)


@pytest.mark.slow
def test_a_replay_of_versions_writes_each_block_with_its_batch(tmp_path: Path) -> None:
    """Whatever room there is in memory."""
    trace = trace_of(tmp_path)
    ample = load_policy(POLICY, {"memory.budget": "64MiB", "memory.bucket_limit": "64MiB", "lateness.coverage": None})
    without, versions = simulate(trace, ample, FAST), Trace(trace.definition._replace(commits=True), trace.table)
    found = simulate(versions, ample, FAST)
    assert (found.executions, found.dropped) == (without.executions, without.dropped)
    assert without.written_bytes < 0.9 * trace.bytes < found.written_bytes <= trace.bytes


@pytest.mark.slow
def test_less_memory_and_a_slower_disk_cost_what_they_should(tmp_path: Path) -> None:
    trace = trace_of(tmp_path)
    of_disk = pc.is_in(trace.table["kind"], pa.array(["staging", "writing"]))
    trace = Trace(trace.definition, trace.table.filter(pc.invert(of_disk)))  # how fast the disk is, is told below
    tight = load_policy(POLICY, {"memory.budget": "128KiB"})
    ample = load_policy(POLICY, {"memory.budget": "64MiB", "memory.bucket_limit": "64MiB"})
    slow = Machine(1e6, 1e-3, 1e6, 1e-2, 1e9)
    little, much = simulate(trace, tight, slow, paced=False), simulate(trace, ample, slow, paced=False)
    assert little.memory_bytes < much.memory_bytes
    assert little.written_bytes > much.written_bytes
    assert little.executions == much.executions
    assert little.blocked_s > simulate(trace, tight, FAST, paced=False).blocked_s > 0
    none = load_policy(tight, {"prestage.mode": "none"})
    assert simulate(trace, none, FAST).hits == 0 < simulate(trace, tight, FAST).hits


def work(over: list[str], name: str, *steps: tuple[float, int]) -> Steps[None]:
    """Seconds and bytes of each."""
    for seconds, size in steps:
        yield Transfer(size, seconds)
    over.append(name)


def test_the_most_urgent_comes_first_and_nothing_waits_for_more_than_a_step() -> None:
    disk, over = SimulatedDisk(), list[str]()
    disk.submit(Priority.DESTAGE, work(over, "write", (1.0, 10), (1.0, 10)))
    disk.pass_to(0.5)
    disk.wait([disk.submit(Priority.READ, work(over, "read", (0.25, 5)))])
    assert (disk.now_s, over) == (1.25, ["read"])
    disk.pass_to(9.0)
    assert over == ["read", "write"]
    assert disk.bytes[Priority.DESTAGE] == 20


def test_a_disk_with_nothing_to_do_begins_at_once_and_does_not_wait_for_what_is_more_urgent() -> None:
    disk, over = SimulatedDisk(), list[str]()
    disk.submit(Priority.DESTAGE, work(over, "write", (1.0, 10), (1.0, 0)))
    disk.wait([disk.submit(Priority.PRESTAGE, work(over, "staging", (0.5, 5)))])
    assert (disk.now_s, over) == (1.5, ["staging"])


def test_prestages_are_as_slow_as_those_that_were_recorded(tmp_path: Path) -> None:
    """One after another: what a function that is not blocking has staged ahead hangs on it."""
    definition = Definition({"w": Periodic(10, 10, 0)}, key=True, kept=True, blocking=False, commits=False)
    recorder = Recorder(tmp_path, definition)
    recorder.begin(0, None, 0)
    for mib, times in ((1, 1.0), (2, 3.0), (3, 1.0), (4, 1.0), (5, 1.0), (6, 1.0), (7, 1.0), (8, 1.0)):
        recorder.staged(mib << 20, 0.01 * mib * times + 0.2, 0.2)  # waited for other I/O, whatever came
    told = Trace(definition, recorder.table()).staging
    assert told is not None
    assert told.times == pytest.approx((1.0, 3.0, *[1.0] * 6), rel=0.01)
    assert (1 << 20) / told.bytes_per_s == pytest.approx(0.01, rel=0.01)
