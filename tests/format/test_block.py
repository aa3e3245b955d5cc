"""Blocks: there and back in every compression, and no damage that goes unnoticed."""

from __future__ import annotations

import struct
import zlib
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.ingest.encoding import About, decode, encode
from aion.errors import CorruptBlock, FormatError
from state_backends.format.block import HEADER_BYTES, VERSION, Block, BlockKind, Compacted, Compression, check, parse

SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("ts", pa.timestamp("us", "UTC")),
        ("v", pa.float64()),
        ("n", pa.int64()),
        ("ok", pa.bool_()),
        ("price", pa.decimal128(10, 2)),
        ("tags", pa.list_(pa.string())),
        ("at", pa.struct([("x", pa.int32())])),
    ]
)
rows = st.fixed_dictionaries(
    {
        "k": st.none() | st.text(max_size=5),
        "ts": st.none() | st.datetimes(timezones=st.just(UTC)),
        "v": st.none() | st.floats(allow_nan=False),
        "n": st.none() | st.integers(-(2**63), 2**63 - 1),
        "ok": st.none() | st.booleans(),
        "price": st.none() | st.decimals(-1000, 1000, places=2),
        "tags": st.none() | st.lists(st.none() | st.text(max_size=2), max_size=3),
        "at": st.none() | st.fixed_dictionaries({"x": st.none() | st.integers(0, 9)}),
    }
)
compressions = pytest.mark.parametrize("compression", Compression)


def block_of(batch: pa.RecordBatch, compression: Compression = Compression.NONE, **header: Any) -> Block:
    values = {"kind": BlockKind.EVENTS, "slice_us": -7, "events": batch.num_rows, "min_us": -7, "max_us": 12}
    more = {name: header.pop(name) for name in ("codec", "compacted") if name in header}
    return encode(batch, About(**(values | header)), compression=compression, **more)


def small(compression: Compression = Compression.NONE) -> tuple[Block, pa.RecordBatch]:
    batch = pa.record_batch({"k": ["a", None, "bb"], "v": [1.0, None, 2.5]})
    return block_of(batch, compression), batch


def read(data: Any, schema: pa.Schema) -> pa.RecordBatch:
    return decode(parse(data, "block 17"), schema, "block 17")


# -- there and back ---------------------------------------------------------------------------------------


@compressions
@given(st.lists(rows, max_size=8))
def test_what_is_read_is_what_was_written(compression: Compression, values: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pylist(values, SCHEMA)
    block = block_of(batch, compression)
    assert block.size_bytes == len(block.stored)
    for data in (block.stored, memoryview(block.stored), pa.py_buffer(block.stored)):
        assert read(data, SCHEMA).equals(batch)
    assert decode(block, SCHEMA).equals(batch), "without a detour over its bytes"


@given(
    st.sampled_from(BlockKind),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**32 - 1) | st.integers(0, 2**62),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
)
def test_the_header_says_what_it_was_told(kind: BlockKind, slice_us: int, events: int, low: int, high: int) -> None:
    batch = pa.record_batch({"v": [1, 2]})
    header = parse(block_of(batch, kind=kind, slice_us=slice_us, events=events, min_us=low, max_us=high).stored).header
    assert (header.kind, header.slice_us, header.events, header.min_us, header.max_us) == (
        kind, slice_us, events, low, high,
    )  # fmt: skip
    assert header.rows == 2


@given(st.integers(0, 2**63 - 1), st.none() | st.tuples(*[st.integers(0, 2**63 - 1)] * 3))
def test_a_header_holds_any_count(events: int, compacted: tuple[int, int, int] | None) -> None:
    block = block_of(pa.record_batch({"v": [1, 2]}), events=events, compacted=compacted and Compacted(*compacted))
    assert parse(block.stored).header == block.header
    assert (block.header.events, block.header.compacted) == (events, compacted)
    assert read(block.stored, pa.schema([("v", pa.int64())])).num_rows == 2
    assert block.stored[4] <= 2 or events >= 2**32, "an older Aion reads whatever it can"
    for length in range(len(block.stored)):
        with pytest.raises(CorruptBlock, match="block 17"):
            read(block.stored[:length], SCHEMA)


@compressions
def test_a_slice_of_a_batch_takes_its_own_rows_only(compression: Compression) -> None:
    batch = pa.record_batch({"v": list(range(1000))})
    piece = batch.slice(400, 3)
    block = block_of(piece, compression)
    assert block.size_bytes < 600
    assert read(block.stored, batch.schema).column(0).to_pylist() == [400, 401, 402]


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
def test_compression_makes_blocks_smaller(compression: Compression) -> None:
    batch = pa.record_batch({"v": ["the same text again"] * 1000})
    block = block_of(batch, compression)
    assert block.size_bytes < block_of(batch).size_bytes / 3
    assert block.header.raw_bytes == block_of(batch).header.body_bytes


@pytest.mark.usual_sizes
def test_an_uncompressed_block_is_decoded_without_a_copy() -> None:
    block, batch = small()
    whole = pa.py_buffer(block.stored)
    decoded = read(block.stored, batch.schema)
    for column in decoded.columns:
        for buffer in filter(None, column.buffers()):
            assert whole.address <= buffer.address and buffer.address + buffer.size <= whole.address + whole.size


def test_a_header_has_64_bytes() -> None:
    assert HEADER_BYTES == 64


# -- damage ---------------------------------------------------------------------------------------------------


@compressions
def test_every_flipped_bit_is_noticed_and_the_block_named(compression: Compression) -> None:
    block, batch = small(compression)
    for position in range(block.size_bytes * 8):
        damaged = bytearray(block.stored)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises((CorruptBlock, FormatError), match="block 17"):
            read(bytes(damaged), batch.schema)


@compressions
def test_every_truncation_is_noticed_and_the_block_named(compression: Compression) -> None:
    block, batch = small(compression)
    for length in range(block.size_bytes):
        with pytest.raises(CorruptBlock, match="block 17"):
            read(block.stored[:length], batch.schema)


def test_bytes_too_many_are_noticed() -> None:
    block, batch = small()
    with pytest.raises(CorruptBlock, match="block 17"):
        read(block.stored + b"\0", batch.schema)


@given(st.binary(max_size=200))
def test_what_is_no_block_is_told(data: bytes) -> None:
    with pytest.raises(CorruptBlock, match="block 17"):
        parse(data, "block 17")


def test_check_looks_at_the_body_without_decoding_it() -> None:
    block, _ = small()
    check(block)
    with pytest.raises(CorruptBlock, match=r"block 17.*checksum"):
        check(Block(block.header, block.stored[:-1] + b"\xff"), "block 17")


def test_a_block_of_a_newer_format_is_told_apart_from_a_damaged_one() -> None:
    block, _ = small()
    head = bytearray(block.stored[: HEADER_BYTES - 4])
    head[4] = VERSION + 1
    newer = bytes(head) + struct.pack("<I", zlib.crc32(head)) + block.stored[HEADER_BYTES:]
    with pytest.raises(FormatError, match=rf"block 17.*format {VERSION + 1}.*up to {VERSION}"):
        parse(newer, "block 17")


def test_values_of_every_width_survive() -> None:
    row = {
        "k": "ü" * 300, "ts": datetime(2024, 2, 29, 12, tzinfo=UTC), "v": -0.0, "n": -(2**63), "ok": False,
        "price": Decimal("-99999999.99"), "tags": ["", None], "at": {"x": None},
    }  # fmt: skip
    batch = pa.RecordBatch.from_pylist([row], SCHEMA)
    for compression in Compression:
        assert read(block_of(batch, compression).stored, SCHEMA).to_pylist() == [row]
