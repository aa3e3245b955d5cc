"""Windows too large for memory: the same groups by way of files, in bounded memory, and no file left behind."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion.config import load_policy
from aion.core.ingest.block import Block, BlockKind, Compression, encode
from aion.core.operator.actions import Execution, PaneKind, WindowRef
from aion.core.plan import Plan, make_plan
from aion.errors import ApplyError
from aion.execute import spilling
from aion.execute.applying import apply_window
from aion.execute.assembly import make_operator
from aion.execute.contents import RowContents
from aion.execute.executor import Executor
from aion.execute.grouping import Group, Piece, key_codes
from aion.execute.spilling import group_by_key, hash_rows
from state_backends.store.codec_pool import CodecPool
from state_backends.store.protocol import StoredBlock

UNLIMITED = 1 << 40

# -- groups -----------------------------------------------------------------------------------------------

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
    """The key columns, and the pieces of a window; as of blocks, sorted by key or not."""
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
        # By repr: NaN is one key, 0.0 and -0.0 are two, as they are for Arrow.
        assert repr(group.key) not in out
        rows = [row for part in group.parts for row in part.select(["value", "text"]).to_pylist()]
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
    assert found(group_by_key(names, iter(pieces), limit_bytes)) == expected(names, pieces)


@given(windows(), st.integers(0, 2**32))
def test_hashes_are_equal_exactly_for_equal_keys(window: tuple[list[str], list[Piece]], seed: int) -> None:
    names, pieces = window
    batches = [p.batch.select(names) for p in pieces]
    codes = key_codes(pa.Table.from_batches(batches))
    # Hashed batch by batch: what a batch is cut out of, and what else is in it, must not matter.
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
    """The product of the numbers of values is beyond 64 bits many times over."""
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
    assert found(group_by_key(["k"], iter(pieces), 1)) == expected(["k"], pieces)


# -- panes ------------------------------------------------------------------------------------------------

SCHEMA = pa.schema([("key", pa.int64()), ("name", pa.string()), ("ts", pa.timestamp("us")), ("value", pa.int64())])
SECOND = 1_000_000
Apply = Callable[[Any, Any, Iterator[pa.RecordBatch]], Any]


def digest(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
    """Depends on every event and on their order."""
    total = 0
    for batch in events:
        for value in batch.column("value").to_pylist():
            total = (total * 31 + value) % 1_000_003
    return {"digest": total}


def plan_of(apply: Apply, key: tuple[str, ...] = ("key", "name")) -> Plan:
    return make_plan(
        SCHEMA,
        key=key,
        time="ts",
        windows=aion.Tumbling("1 second"),
        aggregates=None,
        apply=apply,
        outputs="digest bigint",
    )


def block_of(keys: Any, values: Any, compression: Compression = Compression.NONE) -> Block:
    n = len(values)
    names = pa.array(["n" * (k % 3) if k % 5 else None for k in keys], pa.string())
    times = pa.array(np.zeros(n, np.int64)).cast(pa.timestamp("us"))
    batch = pa.record_batch([pa.array(keys, pa.int64()), names, times, pa.array(values, pa.int64())], schema=SCHEMA)
    return encode(batch, kind=BlockKind.EVENTS, slice_us=0, events=n, min_us=0, max_us=0, compression=compression)


def execute(blocks: int, *, changed_since: int = -1, late_from: int = 2**62) -> Execution:
    """Of one window over all blocks."""
    return Execution(
        window=WindowRef(0, 0, SECOND),
        kind=PaneKind.ON_TIME,
        pane=3,
        changed_since=changed_since,
        late_from=late_from,
        events=0,
        late_events=0,
    )


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    return sorted((row for batch in batches for row in batch.to_pylist()), key=repr)


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
        in_files = rows_of(apply_window(plan, order, iter(stored), pool, memory_limit_bytes=limit_bytes))
    in_memory = rows_of(apply_window(plan, order, iter(stored)))
    assert in_files == in_memory
    changed = {key for keys in blocks[changed_since + 1 :] for key in keys}
    assert {row["key"] for row in in_memory} == changed
    for row in in_memory:
        assert row["events"] == sum(keys.count(row["key"]) for keys in blocks)
        assert row["late_events"] == sum(keys.count(row["key"]) for keys in blocks[late_from:])


def test_an_executor_hands_the_limit_on(tmp_path: Path) -> None:
    """Through the operator, with real blocks: the same panes, and files were used."""
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
        assert panes(codec=pool, memory_limit_bytes=2000, spill_folder=str(tmp_path)) == panes()
    assert max(used) > 0
    assert files_in(tmp_path) == []


# -- memory -----------------------------------------------------------------------------------------------

MIB = 1 << 20


class Peak:
    """What Arrow and Python, numpy included, hold at most when they are looked at: more than at the beginning."""

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
    limit, blocks, rows = 4 * MIB, 160, 16_384
    rng = np.random.default_rng(1)
    peak = Peak()

    def stored() -> Iterator[StoredBlock]:
        for seq in range(blocks):
            keys = np.sort(np.where(rng.random(rows) < hot, 1, rng.integers(0, 300, rows)))
            batch = pa.record_batch(
                [keys, pa.nulls(rows, pa.string()), np.zeros(rows, "datetime64[us]"), np.arange(rows)], schema=SCHEMA
            )
            block = encode(batch, kind=BlockKind.EVENTS, slice_us=0, events=rows, min_us=0, max_us=0)
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
        panes = apply_window(
            plan, execute(blocks), stored(), pool, memory_limit_bytes=limit, spill_folder=str(tmp_path)
        )
        counted = {row["key"]: (row["digest"], row["events"]) for batch in panes for row in batch.to_pylist()}
    assert sum(n for n, _ in counted.values()) == blocks * rows
    assert all(n == events for n, events in counted.values())
    window_bytes = blocks * rows * 28
    assert window_bytes > 16 * limit
    # The limit, half of it for what goes into files, and some blocks on their way.
    assert peak.bytes < 2 * limit + 6 * MIB


def test_results_cut_out_of_the_events_do_not_keep_them_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilling, "FILES", 4)  # which makes the batches in the files larger
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
            yield StoredBlock(seq, encode(batch, kind=BlockKind.EVENTS, slice_us=0, events=rows, min_us=0, max_us=0))

    with peak:
        panes = list(
            apply_window(plan, execute(blocks), stored(), memory_limit_bytes=limit, spill_folder=str(tmp_path))
        )
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
    panes = apply_window(plan, execute(10), iter(stored), memory_limit_bytes=1 << 19, spill_folder=str(tmp_path))
    assert [row["events"] for row in rows_of(panes)] == [100_000]
    assert seen[0] <= 20_000
    assert files_in(tmp_path) == []


# -- files ------------------------------------------------------------------------------------------------


def files_in(folder: Path) -> list[str]:
    """Files of this process in a folder, also those without a name; none of ours should have one."""
    assert list(folder.iterdir()) == []
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except OSError:  # the one that lists them
            continue
    return [t for t in targets if t.startswith(str(folder))]


def spilled(apply: Apply, folder: Path) -> Iterator[pa.RecordBatch]:
    stored = [StoredBlock(i, block_of(sorted([*range(60)] * 5), range(300))) for i in range(4)]
    return apply_window(plan_of(apply), execute(4), iter(stored), memory_limit_bytes=1000, spill_folder=str(folder))


def test_files_are_gone_when_all_is_read(tmp_path: Path) -> None:
    during: list[int] = []

    def apply(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
        during.append(len(files_in(tmp_path)))
        return digest(key, window, events)

    assert len(rows_of(spilled(apply, tmp_path))) == 60
    assert during[0] > 1
    # One after the other is let go.
    assert during[-1] < during[0]
    assert files_in(tmp_path) == []


def test_files_are_gone_when_the_function_raises(tmp_path: Path) -> None:
    def apply(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
        next(events)
        raise ZeroDivisionError("mine")

    with pytest.raises(ApplyError, match="ZeroDivisionError: mine"):
        list(spilled(apply, tmp_path))
    assert files_in(tmp_path) == []


def test_files_are_gone_when_nobody_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aion.execute.applying.ROWS_AT_ONCE", 1)
    panes = spilled(digest, tmp_path)
    next(panes)
    assert files_in(tmp_path) != []
    panes.close()  # type: ignore[attr-defined]
    assert files_in(tmp_path) == []


def test_files_are_gone_when_a_block_cannot_be_read(tmp_path: Path) -> None:
    def stored() -> Iterator[StoredBlock]:
        for i in range(3):
            yield StoredBlock(i, block_of([1, 2, 3] * 100, range(300)))
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        list(apply_window(plan_of(digest), execute(3), stored(), memory_limit_bytes=9000, spill_folder=str(tmp_path)))
    assert files_in(tmp_path) == []


def test_a_full_disk_is_an_error_and_no_wrong_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = []

    def open_full(**_: object) -> Any:
        full.append(Path("/dev/full").open("w+b"))  # noqa: SIM115
        return full[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", open_full)
    with pytest.raises(OSError, match="No space left"):
        list(spilled(digest, tmp_path))
    assert full


def test_windows_that_fit_use_no_files(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    stored = [StoredBlock(0, block_of([i % 6 for i in range(100)], range(100)))]
    rows = rows_of(apply_window(plan_of(digest), execute(1), iter(stored), spill_folder=str(missing)))
    assert len(rows) == 6
    with pytest.raises(FileNotFoundError):
        list(apply_window(plan_of(digest), execute(1), iter(stored), memory_limit_bytes=9, spill_folder=str(missing)))


# --- what the policy says -----------------------------------------------------------------------------------


def events_of_keys(apply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Panes of 20 keys whose events, a megabyte together, are grouped under such a policy."""

    def last(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
        rows = pa.Table.from_batches(list(events))
        return {"n": rows.num_rows, "last": rows["v"][-1].as_py()}

    rows = range(20_000)
    columns = {"key": [i % 20 for i in rows], "ts": pa.array([1 for _ in rows], pa.timestamp("us"))}
    table = pa.table({**columns, "v": [f"{i:05d}" * 10 for i in rows]})
    windows = aion.Tumbling("1 minute")
    with aion.LocalOperator(
        windows=windows, key="key", time="ts", apply=last, schema="n long, last string", policy={"apply": apply}
    ) as operator:
        operator.process(table)
        panes: list[dict[str, Any]] = operator.advance(60_000_000).to_pylist()
        return sorted(panes, key=lambda row: row["key"])


def test_the_policy_says_what_is_grouped_in_memory_and_where_the_rest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str | None] = []
    real = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **how: (folders.append(how["dir"]), real(**how))[1])
    in_memory = events_of_keys({"memory": "64MiB"})
    assert not folders
    assert len(in_memory) == 20 and in_memory[3]["n"] == 1000 and in_memory[3]["last"] == "19983" * 10
    assert events_of_keys({"memory": "64KiB", "spill_dir": str(tmp_path)}) == in_memory
    assert set(folders) == {str(tmp_path)}
    folders.clear()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/elsewhere")
    assert events_of_keys({"memory": "64KiB"}) == in_memory
    assert set(folders) == {str(tmp_path)}, "Spark's own local folder"
