"""Stored state is what the page on formats says: a reader that was written from it reads it."""

from __future__ import annotations

import itertools
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.config import load_policy
from aion.core.ingest.encoding import About, encode
from aion.core.ingest.key_ranges import row_hashes
from aion.core.query.plan import Plan, make_plan
from aion.errors import FormatError
from aion.execute.assembly import make_builder, make_operator
from state_backends.backends import Stores
from state_backends.files.storage import LocalStorage
from state_backends.format.block import BlockKind, Codec, Compacted, Compression
from state_backends.store.codec_pool import CodecPool
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.versions.manifest import Identity, dump, load
from state_backends.versions.shard import Shard
from tests.durations import us
from tests.operators import make_executor
from tests.state_reader import (
    HEADER,
    dead_blocks,
    read_block,
    read_compacted,
    read_manifest,
    read_packed,
    read_version,
)
from tests.versions.keyed_attempt import LocalKeyedAttempt

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/reference/formats.md").read_text()

SCHEMA = pa.schema([("ts", pa.timestamp("us")), ("k", pa.string()), ("v", pa.int64())])
IDENTITY = {"query": "q", "operator": "o", "shard": 3, "shards": 8}


class Rig:
    """A shard in a folder, as a host would have it."""

    def __init__(self, folder: Path, definition: dict[str, Any]) -> None:
        self.folder = folder
        self.identity = Identity(**IDENTITY, definition=definition)  # type: ignore[arg-type]
        self.io = IoThread()
        self.shard = Shard(
            self.identity,
            LocalStorage(folder / "state"),
            folder / "live",
            lambda p: Stores.of("tiered", p, self.io, MemoryBudget(1 << 20), StoreOptions(bucket_limit_bytes=1 << 20)),
            retain=100,
        )

    def close(self) -> None:
        self.shard.close()
        self.io.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(definition: dict[str, Any] | None = None) -> Rig:
        rigs.append(Rig(tmp_path, definition or {}))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


class OfShard(LocalKeyedAttempt):
    """What an executor needs of an attempt."""

    def __init__(self, shard: Shard, attempt: str) -> None:
        super().__init__(shard, attempt)
        self.shard, self.attempt = shard, attempt

    def append(self, blocks: Any) -> None:
        self.shard.append(self.attempt, list(blocks))

    def read(self, slices: Any, *, blocking: bool = False, only: Any = None) -> Any:
        return self.shard.read(self.attempt, slices, blocking=blocking, only=only)

    def prestage(self, slices: Any, only: Any = None) -> None:
        self.shard.prestage(self.attempt, slices, only)

    def release(self, destage: Any, purge: Any) -> None:
        self.shard.release(self.attempt, destage, purge)

    def replace(self, spans: Any, below: int) -> None:
        self.shard.replace(self.attempt, spans, below)

    def abandon(self, from_seq: int) -> None:
        raise AssertionError("nothing fails here")


def make_definition(**how: Any) -> Plan:
    windows = {"ten": aion.Tumbling(us(10_000_000)), "thirty": aion.Tumbling(us(30_000_000))}
    arguments = {"aggregates": None, "apply": None, "outputs": None} | how
    return make_plan(SCHEMA, key="k", time="ts", windows=windows, **arguments)


def run_batches(rig: Rig, plan: Plan, codec: str) -> list[str]:
    """Three batches, the last of which has late events and makes a window final; the tokens of their versions."""
    policy = load_policy({"state": {"codec": codec, "compression": "zstd"}, "lateness": {"initial_bound": "20s"}})
    tokens: list[str] = []
    seconds = [([1, 5, 12], 0), ([15, 22], 14), ([8, 33, 35], 31)]
    pool = CodecPool(0)
    for number, (times, watermark) in enumerate(seconds):
        token = f"{number:010d}-{number:016x}"
        snapshot = rig.shard.open(tokens[-1] if tokens else None, token, rig.identity)
        operator = make_operator(plan, policy, snapshot)
        executor = make_executor(plan, operator, OfShard(rig.shard, token), pool, policy)
        if watermark:
            list(executor.advance(watermark * 1_000_000))
        table = pa.table([[t * 1_000_000 for t in times], ["a", "b", "a"][: len(times)], times], schema=SCHEMA)
        builder = make_builder(plan, policy, pool, ShardOfKeys([0]))
        made = [b.block for batch in table.to_batches() for b in builder.add(batch)]
        list(executor.arrive(made + [b.block for b in builder.finish()]))
        list(executor.end_batch())
        rig.shard.commit(token, operator.snapshot())
        tokens.append(token)
    pool.close()
    return tokens


EVENTS = {"apply": lambda key, window, events: {"n": 1}, "outputs": "n int"}
PARTIALS = {"aggregates": {"n": A.count(), "total": A.sum("v")}}


@pytest.mark.parametrize("how", [EVENTS, PARTIALS], ids=["events", "partials"])
@pytest.mark.parametrize("codec", ["arrow", "json"])
def test_versions_are_as_the_page_says(make: Callable[..., Rig], codec: str, how: dict[str, Any]) -> None:
    plan = make_definition(**how)
    rig = make(plan.definition)
    tokens = run_batches(rig, plan, codec)
    for number, token in enumerate(tokens):
        manifest = read_manifest(rig.folder / "state" / "manifests" / f"{token}.json")
        identity = manifest["identity"]
        assert {k: identity[k] for k in IDENTITY} == IDENTITY
        assert (manifest["token"], manifest["version"]) == (token, number + 1)
        assert manifest["parent"] == (tokens[number - 1] if number else None)
        blocks = read_version(rig.folder / "state", token)
        # As Aion reads it, rebuilt from files that RocksDB has ingested more than once by now.
        snapshot = rig.shard.open(token, "reader", rig.identity)
        assert snapshot == manifest["snapshot"]
        stored = rig.shard.read("reader", range(-60_000_000, 60_000_000, 10_000_000))
        assert {(b.header.slice_us, seq): bytes(b.stored) for seq, b in stored} == blocks
        assert {s for s, _ in blocks} == set(read_packed(snapshot["slices"])["slice"])
        assert max(seq for _, seq in blocks) < snapshot["next_seq"]
        schema = pa.schema([(name, {"int64": pa.int64(), "string": pa.string()}.get(t) or pa.timestamp("us"))
                            for name, t in identity["definition"]["block"]])  # fmt: skip
        for (slice_us, _), data in blocks.items():
            header, body = read_block(data)
            assert (header["slice"], header["kind"], header["codec"]) == (slice_us, how is PARTIALS, codec == "json")
            assert slice_us <= header["earliest"] <= header["latest"] < slice_us + 10_000_000
            if codec == "arrow":
                rows = pa.ipc.read_record_batch(pa.py_buffer(body), schema).to_pylist()
            else:
                rows = [json.loads(line) for line in body.splitlines()]
                assert all(list(row) == schema.names for row in rows)
            assert len(rows) == header["rows"]
            if how is EVENTS:  # whose values are their seconds
                times = [row["v"] * 1_000_000 for row in rows]
                assert (header["earliest"], header["latest"]) == (min(times), max(times))
                assert header["events"] == len(rows)
        assert sum(read_block(data)[0]["events"] for data in blocks.values()) == [3, 5, 8][number]
        kept = read_packed(snapshot["windows"])
        assert kept["end_us"] == sorted(kept["end_us"])
        table = make_operator(plan, load_policy({}), snapshot).windows
        for name in ("definition", "start_us", "end_us", "events", "stalest"):
            assert kept[name] == table[name].tolist()


def test_files_of_any_shape_are_as_the_page_says(make: Callable[..., Rig]) -> None:
    """Blocks of many tables' size and of none, times before 1970, slices that are purged, several files."""
    rig = make()
    token, blocks, events = None, {}, set()
    for attempt, count in enumerate([1, 200, 40]):
        rig.shard.open(token, f"{attempt:010d}-t", rig.identity)
        for i in range(count):
            seq, slice_us, size = len(blocks), (i % 7 - 3) * 10**12, [0, 10, 5000, 70_000][i % 4]
            batch = pa.record_batch({"x": [bytes([i]) * size]})
            compression = [Compression.NONE, Compression.LZ4, Compression.ZSTD][i % 3]
            compacted = Compacted(seq, i, 2**62) if i % 7 < 3 else None
            block = encode(
                batch,
                About(BlockKind.EVENTS, slice_us, 9 << i % 59, slice_us, -(i % 2)),
                compression=compression,
                codec=Codec(i % 2),
                compacted=compacted,
            )
            blocks[slice_us, seq] = bytes(block.stored)
            rig.shard.append(f"{attempt:010d}-t", [(seq, i % 5 == 0, block)])
        purged = [-2 * 10**12] if attempt == 2 else []
        rig.shard.release(f"{attempt:010d}-t", purge=purged)
        token = f"{attempt:010d}-t"
        rig.shard.commit(token, {"next_seq": len(blocks)})
        found = read_version(rig.folder / "state", token)
        assert found == {key: data for key, data in blocks.items() if key[0] not in purged}
        for data in found.values():
            header, body = read_block(data)
            assert len(body) == header["raw"]
            events.add(header["events"])
    assert events == {9 << i for i in range(59)}
    assert dead_blocks(rig.folder / "state" / "manifests" / f"{token}.json")


@pytest.mark.parametrize("how", [EVENTS, PARTIALS], ids=["events", "partials"])
def test_compacted_blocks_are_as_the_page_says(make: Callable[..., Rig], how: dict[str, Any]) -> None:
    """Batches into one window until it is compacted; late ones, compacted among themselves; and as Aion reads them."""
    plan = make_definition(**how)
    rig = make(plan.definition)
    policy = load_policy({"lateness": {"initial_bound": "100s"}, "trigger": {"kind": "every_batch"}})
    pool, token, events, ranges = CodecPool(0), None, 0, 0
    for number in range(9):
        attempt = f"{number:010d}-{number:016x}"
        operator = make_operator(plan, policy, rig.shard.open(token, attempt, rig.identity))
        executor = make_executor(plan, operator, OfShard(rig.shard, attempt), pool, policy)
        if number > 4:
            list(executor.advance(30_000_000))
        times = [5_000_000 + number] * 8 + [12_000_000] * (number == 0)  # one more, for which the first file is kept
        rows = [times, [*"abcdefghi"][: len(times)], [number] * len(times)]
        batch = pa.record_batch(rows, schema=SCHEMA)
        builder = make_builder(plan, policy, pool, ShardOfKeys([0]))
        made = [b.block for b in [*builder.add(batch), *builder.finish()]]
        list(executor.arrive(made))
        list(executor.end_batch())
        rig.shard.commit(attempt, operator.snapshot())
        token, events = attempt, events + len(times)
        found = read_version(rig.folder / "state", token)
        rig.shard.open(token, "reader", rig.identity)
        stored = rig.shard.read("reader", [0, 10_000_000])
        assert {(b.header.slice_us, seq): bytes(b.stored) for seq, b in stored} == found
        assert sum(read_block(data)[0]["events"] for data in found.values()) == events
        for data in found.values():
            if read_compacted(data):
                last_seq, low, high = read_compacted(data)
                body = pa.py_buffer(read_block(data)[1])
                hashes = row_hashes(plan, pa.ipc.read_record_batch(body, plan.block_schema))
                assert (np.diff(hashes) >= 0).all() and (hashes[0], hashes[-1]) == (low, high)
                assert 0 <= last_seq < operator.next_seq
                ranges += 1
    dead = dead_blocks(rig.folder / "state" / "manifests" / f"{token}.json")
    assert ranges and dead, "something was compacted, and the files still hold the blocks that it replaced"
    pool.close()


# -- what the page lists ----------------------------------------------------------------------------------------


def rows_of(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    _, section, *others = re.split(rf"^###? {re.escape(heading)}$", TEXT, flags=re.MULTILINE)
    assert not others, f"{heading}: there are several"
    section = re.split(r"^###? ", section, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    end = next((i for i, line in enumerate(lines) if i and not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:end]]


def names_in(text: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", text)


def fields_of(heading: str) -> set[str]:
    """The names in the first column of the first table below a heading."""
    return {name for first, *_ in rows_of(heading) for name in names_in(first)}


def test_the_page_lists_every_field(make: Callable[..., Rig]) -> None:
    plan = make_definition(**PARTIALS)
    rig = make(plan.definition)
    token = run_batches(rig, plan, "arrow")[-1]
    manifest = read_manifest(rig.folder / "state" / "manifests" / f"{token}.json")
    listed = {names_in(first)[0]: names_in(text) for first, text in rows_of("Manifest")}
    assert list(listed) == list(manifest)
    assert list(manifest["identity"]) == listed["identity"]
    assert list(manifest["files"][0]) == listed["files"]
    assert set(manifest["identity"]["definition"]) <= set(names_in(TEXT))
    shared = read_manifest(rig.folder / "operator.json")
    assert shared.pop("format") == 4
    same = {name: manifest["identity"][name] for name in ("query", "operator", "shards", "definition")}
    assert shared == {**same, "ids": [], "key_types": [], "checkpoint": ""}
    assert set(shared) <= set(names_in(TEXT))
    parent = manifest["history"][-1]
    assert parent[0] == manifest["parent"] and all(len(past) == 3 for past in manifest["history"])
    snapshot = {name: names_in(text) for first, text in rows_of("Snapshot") for name in names_in(first)}
    assert list(snapshot) == list(manifest["snapshot"])
    assert set(manifest["snapshot"]["windows"]["columns"]) == fields_of("Windows")
    assert set(manifest["snapshot"]["lateness"]) == fields_of("Lateness")
    assert set(manifest["snapshot"]["runs"]["columns"]) <= set(snapshot["runs"])


def test_the_page_lists_the_header_of_a_block() -> None:
    types = {"u8": "B", "u32": "I", "i64": "q", "u64": "Q", "4 bytes": "4s"}
    rows = rows_of("Blocks")
    assert [types[type_] for _, type_, _ in rows] == list(HEADER.values())
    places = itertools.accumulate((struct.calcsize("<" + code) for code in HEADER.values()), initial=0)
    assert [int(at) for at, _, _ in rows] == [*places][:-1]


# -- other formats ------------------------------------------------------------------------------------------------


def test_a_field_that_came_later_is_passed_over(make: Callable[..., Rig]) -> None:
    plan = make_definition(**PARTIALS)
    rig = make(plan.definition)
    path = rig.folder / "state" / "manifests" / f"{run_batches(rig, plan, 'arrow')[-1]}.json"
    manifest = load(path.read_bytes(), path.name)
    value = read_manifest(path)
    for part in (value, value["identity"], value["files"][0], value["snapshot"]):
        part["later"] = 1
    body = orjson.dumps(value)
    found = load(body + b"\n%08x\n" % zlib.crc32(body), "m")
    assert found.snapshot.pop("later") == 1
    assert found == manifest
    assert load(dump(manifest), "m") == manifest


def test_a_newer_snapshot_is_refused(make: Callable[..., Rig]) -> None:
    plan = make_definition(**PARTIALS)
    rig = make(plan.definition)
    token = run_batches(rig, plan, "arrow")[-1]
    snapshot = read_manifest(rig.folder / "state" / "manifests" / f"{token}.json")["snapshot"]
    policy = load_policy({"lateness": {"initial_bound": "20s"}})
    assert make_operator(plan, policy, snapshot).snapshot() == snapshot
    with pytest.raises(FormatError, match=r"snapshot was written in format 8; this Aion reads format 7"):
        make_operator(plan, policy, {**snapshot, "version": 8})
    with pytest.raises(FormatError, match=r"format 6; this Aion reads format 7: use the older Aion that wrote it"):
        make_operator(plan, policy, {**snapshot, "version": 6})
