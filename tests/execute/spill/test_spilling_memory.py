"""A window too large for memory takes little of it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import aion
from aion.core.ingest.encoding import About, encode
from aion.core.query.plan import make_plan
from aion.execute.panes.applying import apply_window
from aion.execute.spill import spilling
from aion.execute.spill.spilling import Room
from state_backends.files.bodies import Bodies, Places
from state_backends.files.handed import HandedFile, name_of
from state_backends.format.block import BlockKind
from state_backends.store.codec_pool import CodecPool
from state_backends.store.protocol import StoredBlock
from tests.spilled import MIB, SCHEMA, block_of, execute, files_in, mapped_bytes, plan_of, rows_of


class Peak:
    """The most memory that Arrow and Python, with numpy, held at any look, above what they held at the beginning."""

    def __enter__(self) -> Peak:
        tracemalloc.start(1)
        self._before = self._now()
        self.bytes = 0
        return self

    def __exit__(self, *_: object) -> None:
        tracemalloc.stop()

    def _now(self) -> int:
        return int(pa.total_allocated_bytes()) + tracemalloc.get_traced_memory()[0]

    def look(self) -> None:
        self.bytes = max(self.bytes, self._now() - self._before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threads", "hot"),
    [
        pytest.param(0, 0.0, marks=pytest.mark.proof),
        pytest.param(2, 0.0, id="even"),
        pytest.param(0, 0.7, id="one key is most of it"),
        pytest.param(2, 0.7, marks=pytest.mark.proof),
    ],
)
def test_memory_is_bounded_for_a_window_far_larger_than_the_limit(threads: int, hot: float, tmp_path: Path) -> None:
    limit, blocks, rows = 2 * MIB, 80, 16_384
    rng = np.random.default_rng(1)
    peak = Peak()

    def stored() -> Iterator[StoredBlock]:
        for seq in range(blocks):
            keys = np.sort(np.where(rng.random(rows) < hot, 1, rng.integers(0, 300, rows)))
            batch = pa.record_batch(
                [keys, pa.nulls(rows, pa.string()), np.zeros(rows, "datetime64[us]"), np.arange(rows)], schema=SCHEMA
            )
            block = encode(batch, About(BlockKind.EVENTS, 0, rows, 0, 0))
            peak.look()
            yield StoredBlock(seq, block)
            del block, batch

    def count(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
        n = 0
        for batch in events:
            n += batch.num_rows
            peak.look()
        return {"digest": n}

    plan = plan_of(count)
    with peak, CodecPool(threads) as pool:
        panes = apply_window(plan, execute(blocks), stored(), pool, room=Room(limit, str(tmp_path)))
        counted = {row["key"]: (row["digest"], row["events"]) for batch in panes for row in batch.to_pylist()}
    assert sum(n for n, _ in counted.values()) == blocks * rows
    assert all(n == events for n, events in counted.values())
    window_bytes = blocks * rows * 28
    assert window_bytes > 16 * limit
    # The limit, half of it again for what goes into files, and the blocks on their way.
    assert peak.bytes < 2 * limit + 6 * MIB


@pytest.mark.proof
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is in memory")
def test_a_keyed_window_that_was_handed_over_is_mapped_within_the_limit(tmp_path: Path) -> None:
    """Every key has events in every block, and they are read where they lie."""
    limit, blocks, rows = 2 * MIB, 40, 16
    schema = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us")), ("pad", pa.string())])
    name = name_of(7, "c0ffee", "attempt")
    file = HandedFile(tmp_path, name)
    try:
        batch = pa.record_batch(
            [np.arange(rows), np.zeros(rows, "datetime64[us]"), ["x" * 32_000] * rows], schema=schema
        )
        block = encode(batch, About(BlockKind.EVENTS, 0, rows, 0, 0))
        references = [file.add(block) for _ in range(blocks)]
        file.end()
        file.seal()
    finally:
        file.close()
    most = 0

    def count(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
        nonlocal most
        n = 0
        for part in events:
            n += pc.sum(pc.binary_length(part["pad"])).as_py()  # it reads the offsets
            n += pc.sum(pc.count_substring(part["pad"], "y")).as_py()  # it reads the texts
            most = max(most, mapped_bytes(tmp_path / name))
        return {"length": n}

    plan = make_plan(
        schema, key="key", time="ts", windows=aion.Tumbling("1 second"), aggregates=None, apply=count,
        outputs="length bigint",
    )  # fmt: skip
    bodies = Bodies(Places([str(tmp_path)]))
    stored = (StoredBlock(seq, bodies.of(reference)) for seq, reference in enumerate(references))
    panes = list(apply_window(plan, execute(blocks), stored, room=Room(limit, str(tmp_path))))
    assert {row["length"] for batch in panes for row in batch.to_pylist()} == {blocks * 32_000}
    assert blocks * rows * 32_000 > 8 * limit
    assert 0 < most < limit + MIB, "the limit, and one block"


@pytest.mark.slow
def test_results_cut_out_of_the_events_do_not_keep_them_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilling, "FILES", 4)  # this makes the batches in the files larger
    schema = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us")), ("value", pa.int64())])
    rows, blocks, limit = 16_384, 60, 2 * MIB
    peak = Peak()

    def one(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
        peak.look()
        parts = list(events)
        return parts[key[0] % len(parts)].select(["value"]).slice(0, 1)

    plan = make_plan(
        schema,
        key="key",
        time="ts",
        windows=aion.Tumbling("1 second"),
        aggregates=None,
        apply=one,
        outputs="value bigint",
    )

    def stored() -> Iterator[StoredBlock]:
        for seq in range(blocks):
            keys = np.sort(np.random.default_rng(seq).integers(0, 300, rows))
            batch = pa.record_batch([keys, np.zeros(rows, "datetime64[us]"), np.arange(rows)], schema=schema)
            yield StoredBlock(seq, encode(batch, About(BlockKind.EVENTS, 0, rows, 0, 0)))

    with peak:
        panes = list(apply_window(plan, execute(blocks), stored(), room=Room(limit, str(tmp_path))))
    assert sum(b.num_rows for b in panes) == 300
    assert peak.bytes < 2 * limit + 4 * MIB


def test_a_large_key_is_streamed_and_need_not_be_read_to_its_end(tmp_path: Path) -> None:
    seen: list[int] = []

    def peek(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
        batch = next(events)
        seen.append(batch.num_rows)
        return {"digest": pc.sum(batch.column("value")).as_py()}

    plan = plan_of(peek, key=("key",))
    stored = [StoredBlock(i, block_of([7] * 10_000, range(10_000))) for i in range(10)]
    panes = apply_window(plan, execute(10), iter(stored), room=Room(1 << 19, str(tmp_path)))
    assert [row["events"] for row in rows_of(panes)] == [100_000]
    assert seen[0] <= 20_000
    assert files_in(tmp_path) == []
