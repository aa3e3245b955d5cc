"""A window too large for memory is grouped by way of files, with the same result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion.config import load_policy
from aion.execute.assembly import make_operator
from aion.execute.executor import Executor
from aion.execute.panes.applying import apply_window
from aion.execute.panes.contents import RowContents
from aion.execute.spill import spilling
from aion.execute.spill.grouping import Group, Piece, key_codes
from aion.execute.spill.spilling import Room, group_by_key, hash_rows
from state_backends.format.block import Compression
from state_backends.store.codec_pool import CodecPool
from state_backends.store.protocol import StoredBlock
from tests.spilled import SECOND, UNLIMITED, block_of, digest, execute, files_in, plan_of, rows_of

KEYS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int": (pa.int64(), st.integers(-3, 3) | st.sampled_from([2**63 - 1, -(2**63)])),
    "small": (pa.int8(), st.integers(-128, 127)),
    "text": (pa.string(), st.sampled_from(["", "a", "ab", "b", "ä", "a\0", "\0a", "aaaaaaaaaaaaaaaaa"]) | st.text()),
    "large": (pa.large_string(), st.text(max_size=2)),
    "bytes": (pa.binary(), st.binary(max_size=2)),
    "fixed": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "bool": (pa.bool_(), st.booleans()),
    "float": (pa.float64(), st.sampled_from([0.0, -0.0, float("nan"), float("inf"), 1.5])),
    "half": (pa.float16(), st.sampled_from([np.float16(0.0), np.float16(1.5)])),
    "decimal": (pa.decimal128(20, 2), st.sampled_from([Decimal("0.01"), Decimal(10) ** 17, Decimal("-0.01")])),
    "wide": (pa.decimal256(50, 0), st.integers(-(10**49), 10**49).map(Decimal)),
    "date": (pa.date32(), st.dates()),
    "time": (pa.timestamp("us", "UTC"), st.integers(-(2**50), 2**50)),
    "nothing": (pa.null(), st.none()),
}


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[str], list[Piece]]:
    """Draws key columns and the pieces of a window, like blocks: sorted by key or not."""
    kinds = draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=3))
    domain = draw(st.lists(st.tuples(*(st.none() | KEYS[k][1] for k in kinds)), min_size=1, max_size=8))
    pieces, number = [], 0
    for rows in draw(st.lists(st.lists(st.sampled_from(domain), max_size=12), min_size=1, max_size=5)):
        if draw(st.booleans()):
            rows = sorted(rows, key=repr)
        columns = [pa.array([row[i] for row in rows], KEYS[k][0]) for i, k in enumerate(kinds)]
        values = pa.array(range(number, number + len(rows)), pa.int64())
        number += len(rows)
        texts = pa.array([None if v % 3 == 0 else "x" * v for v in range(len(rows))], pa.string())
        names = [f"k{i}" for i in range(len(kinds))]
        batch = pa.record_batch([*columns, values, texts], [*names, "value", "text"])
        start = draw(st.integers(0, len(rows)))
        pieces.append(Piece(batch.slice(start), draw(st.booleans()), draw(st.booleans())))
    return [f"k{i}" for i in range(len(kinds))], pieces


def found(groups: Iterator[Group]) -> dict[str, tuple[list[dict[str, Any]], int, int]]:
    out = {}
    for group in groups:
        # Compare by repr: as for Arrow, NaN is one key, and 0.0 and -0.0 are two.
        assert repr(group.key) not in out
        rows = [row for part in group.batches for row in part.select(["value", "text"]).to_pylist()]
        out[repr(group.key)] = rows, group.events, group.late_events
    return out


def expected(names: list[str], pieces: list[Piece]) -> dict[str, tuple[list[dict[str, Any]], int, int]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    late: dict[str, int] = {}
    changed = set()
    for piece in pieces:
        for row in piece.batch.to_pylist():
            key = repr(tuple(row[name] for name in names))
            rows.setdefault(key, []).append({"value": row["value"], "text": row["text"]})
            late[key] = late.get(key, 0) + piece.late
            changed |= {key} if piece.changed else set()
    return {key: (rows[key], len(rows[key]), late[key]) for key in changed}


@given(windows(), st.sampled_from([0, 1, 100, 500, UNLIMITED]))
def test_groups_are_those_of_plain_python_whatever_fits_in_memory(
    window: tuple[list[str], list[Piece]], limit_bytes: int
) -> None:
    names, pieces = window
    assert found(group_by_key(names, iter(pieces), Room(limit_bytes))) == expected(names, pieces)


@given(windows(), st.integers(0, 2**32))
def test_hashes_are_equal_exactly_for_equal_keys(window: tuple[list[str], list[Piece]], seed: int) -> None:
    names, pieces = window
    batches = [p.batch.select(names) for p in pieces]
    codes = key_codes(pa.Table.from_batches(batches))
    # Each batch is hashed alone. A hash must not depend on the table it was cut from, nor on its other rows.
    hashes = np.concatenate([hash_rows(b.columns, seed) for b in batches if b.num_rows] or [np.zeros(0, np.uint64)])
    assert len(set(zip(codes, hashes, strict=True))) == len(set(codes)) == len(set(hashes))


def test_hashes_spread_keys_evenly_and_anew_for_every_split() -> None:
    numbers = pa.array(range(100_000), pa.int64())
    for column in (numbers, numbers.cast(pa.string()), numbers.cast(pa.decimal128(38, 0)), numbers.cast(pa.float64())):
        first, second = hash_rows([column], 0), hash_rows([column], 1)
        for hashes in (first, second, first[second % 32 == 0]):
            counts = np.bincount(hashes % 32, minlength=32)
            assert counts.min() > 0.7 * len(hashes) / 32


def test_codes_of_many_columns_do_not_meet() -> None:
    """The product of the numbers of values exceeds 64 bits many times over."""
    rng = np.random.default_rng(0)
    columns = [pa.array(rng.permutation(3000)) for _ in range(9)]
    columns.append(pa.array([*range(2999), 0]))
    codes = key_codes(pa.table(columns, [str(i) for i in range(10)]))
    assert len(set(codes.tolist())) == 3000
    assert codes.min() >= 0
    twice = pa.concat_tables([pa.table(columns, [str(i) for i in range(10)])] * 2)
    codes = key_codes(twice)
    assert (codes[:3000] == codes[3000:]).all()


def test_keys_that_no_hash_separates_are_grouped_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spilling, "hash_rows", lambda columns, seed: np.zeros(len(columns[0]), np.uint64))
    monkeypatch.setattr(spilling, "MAX_SPLITS", 2)
    pieces = [
        Piece(pa.record_batch({"k": [1, 2, 1], "value": [i, 1, 2], "text": [""] * 3}), True, False) for i in (0, 9)
    ]
    assert found(group_by_key(["k"], iter(pieces), Room(1))) == expected(["k"], pieces)


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=40), min_size=1, max_size=8),
    st.integers(-1, 8),
    st.integers(0, 8),
    st.integers(0, 1500),
    st.integers(0, 2),
    st.sampled_from(Compression),
)
def test_panes_are_the_same_as_in_memory(
    blocks: list[list[int]],
    changed_since: int,
    late_from: int,
    limit_bytes: int,
    threads: int,
    compression: Compression,
) -> None:
    plan, order = plan_of(digest), execute(len(blocks), changed_since=changed_since, late_from=late_from)
    stored = [StoredBlock(i, block_of(sorted(keys), range(len(keys)), compression)) for i, keys in enumerate(blocks)]
    with CodecPool(threads) as pool:
        in_files = rows_of(apply_window(plan, order, iter(stored), pool, room=Room(limit_bytes)))
    in_memory = rows_of(apply_window(plan, order, iter(stored)))
    assert in_files == in_memory
    changed = {key for keys in blocks[changed_since + 1 :] for key in keys}
    assert {row["key"] for row in in_memory} == changed
    for row in in_memory:
        assert row["events"] == sum(keys.count(row["key"]) for keys in blocks)
        assert row["late_events"] == sum(keys.count(row["key"]) for keys in blocks[late_from:])


def test_an_executor_hands_the_limit_on(tmp_path: Path) -> None:
    """The panes are the same through the operator, with real blocks, and it uses files."""
    used: list[int] = []

    def apply(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
        used.append(len(files_in(tmp_path)))
        return digest(key, window, events)

    class Session:
        def __init__(self) -> None:
            self.blocks: list[StoredBlock] = []

        def append(self, blocks: Any) -> None:
            self.blocks += [StoredBlock(seq, block) for seq, _, block in blocks]

        def read(self, slices: Any, *args: Any, **kwargs: Any) -> Iterator[StoredBlock]:
            return iter(self.blocks)

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    def panes(**options: Any) -> list[dict[str, Any]]:
        plan = plan_of(apply)
        executor = Executor(
            plan, make_operator(plan, load_policy("standard"), None), Session(), RowContents(plan, **options)
        )
        keys = list(range(40)) * 10
        out = list(executor.arrive([block_of(sorted(keys), range(400)) for _ in range(3)]))
        out += executor.advance(SECOND)
        return rows_of(iter(out))

    assert len(panes()) == 40
    assert set(used) == {0}
    used.clear()
    with CodecPool(1) as pool:
        assert panes(codec=pool, room=Room(2000, str(tmp_path))) == panes()
    assert max(used) > 0
    assert files_in(tmp_path) == []


# --- what the policy says -----------------------------------------------------------------------------------


def events_of_keys(apply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the panes of 20 keys with a megabyte of events under this policy."""

    def last(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
        rows = pa.Table.from_batches(list(events))
        return {"n": rows.num_rows, "last": rows["v"][-1].as_py()}

    rows = range(20_000)
    columns = {"key": [i % 20 for i in rows], "ts": pa.array([1 for _ in rows], pa.timestamp("us"))}
    table = pa.table({**columns, "v": [f"{i:05d}" * 10 for i in rows]})
    windows = aion.Tumbling("1 minute")
    with aion.LocalOperator(
        windows=windows, key="key", time="ts", apply=aion.Apply(last, "n long, last string"), policy={"apply": apply}
    ) as operator:
        operator.process(table)
        panes: list[dict[str, Any]] = operator.advance(60_000_000).to_pylist()
        return sorted(panes, key=lambda row: row["key"])


def test_the_policy_says_what_is_grouped_in_memory_and_the_rest_goes_to_the_local_disk_of_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str | None] = []
    real = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **how: (folders.append(how["dir"]), real(**how))[1])
    in_memory = events_of_keys({"memory": "64MiB"})
    assert not folders
    assert len(in_memory) == 20 and in_memory[3]["n"] == 1000 and in_memory[3]["last"] == "19983" * 10
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/elsewhere")
    assert events_of_keys({"memory": "64KiB"}) == in_memory
    assert set(folders) == {str(tmp_path)}, "Spark's own local folder"


def test_mapped_events_need_no_files_if_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keyed window larger than memory: what children handed over is read where it lies."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was written to a temporary file")

    batch = pa.record_batch({"k": [1, 1, 2, 3], "text": ["x" * 5000] * 4})
    small = pa.record_batch({"k": list(range(4000)), "value": list(range(4000))})
    with monkeypatch.context() as patch:
        patch.setattr(spilling.tempfile, "TemporaryFile", never)
        groups = group_by_key(["k"], iter([Piece(batch, True, False, mapped=True)] * 50), Room(100_000))
        found = {group.key: sum(part.num_rows for part in group.batches) for group in groups}
        assert found == {(1,): 100, (2,): 50, (3,): 50}
        with pytest.raises(AssertionError, match="temporary"):
            list(group_by_key(["k"], iter([Piece(small, True, False, mapped=True)] * 9), Room(100_000)))
