"""Rows as a block, and a block as rows. :mod:`state_backends.format.block` has the bytes around them. Pure.

Spark lets texts through that are not UTF-8 (a cast of bytes), and nothing that reads texts can. So they are settled
before they become part of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.base.numbers import sum_of
from aion.core.ingest import json_codec
from aion.core.query.plan import Plan
from aion.core.slicing.grid import NO_SLICE, is_timed
from aion.errors import CorruptBlock
from state_backends.format.block import Block, BlockKind, Codec, Compacted, Compression, check, from_body
from state_backends.thresholds import threshold

_LEAST_PLAIN, _LEAST_COMPRESSED = threshold(1 << 17, 64), threshold(1 << 15, 64)
_ARROW_NAMES = {Compression.LZ4: "lz4", Compression.ZSTD: "zstd"}


@dataclass(frozen=True)
class BlockSettings:
    """How the blocks of a query are made. ``threads``: how many encode blocks, beside the thread that builds them.
    ``drops_bad_texts``: events with a text that is not UTF-8 are dropped.

    Plain values: a worker that only makes blocks need not load the policy.
    """

    target_bytes: int = 1 << 20
    compression: Compression = Compression.NONE
    codec: Codec = Codec.ARROW
    threads: int = 0
    drops_bad_texts: bool = False


class About(NamedTuple):
    """What is said of the rows of a block. ``events``: how many events they stand for, with times in [min, max]."""

    kind: BlockKind
    slice_us: int
    events: int
    min_us: int
    max_us: int


def encode(
    batch: pa.RecordBatch,
    about: About,
    *,
    compression: Compression = Compression.NONE,
    codec: Codec = Codec.ARROW,
    compacted: Compacted | None = None,
) -> Block:
    """The batch as a block. Raises SchemaError for a type that the codec cannot carry."""
    raw = pa.py_buffer(json_codec.write(batch)) if codec is Codec.JSON else batch.serialize()
    body = raw
    if compression is not Compression.NONE:
        body = pa.Codec(_ARROW_NAMES[compression]).compress(raw)
    return from_body(
        body, **about._asdict(), rows=batch.num_rows,
        codec=codec, compression=compression, raw_bytes=raw.size, compacted=compacted,
    )  # fmt: skip


def encode_rows(
    plan: Plan,
    rows: pa.RecordBatch,
    slice_us: int,
    *,
    compression: Compression,
    codec: Codec,
    compacted: Compacted | None = None,
) -> Block:
    """A block of the plan from rows of ``plan.block_schema``. ``slice_us``: the name of their slice or segment."""
    if plan.layout is None:
        times = pc.min_max(rows.column(plan.time).cast(pa.int64()))
        low, high = times["min"].as_py(), times["max"].as_py()
        kind, events = BlockKind.EVENTS, rows.num_rows
    else:
        low = high = slice_us - plan.name_offset_us
        kind, events = BlockKind.PARTIALS, sum_of(rows.column("p0").to_numpy())
    if not is_timed(slice_us):
        low = high = NO_SLICE
    about = About(kind, slice_us, events, low, high)
    return encode(rows, about, compression=compression, codec=codec, compacted=compacted)


def decode(block: Block, schema: pa.Schema, name: str = "block") -> pa.RecordBatch:
    """The rows of a block. They share the block's memory if it is uncompressed Arrow. Checks the body first.

    Raises CorruptBlock with the block's name, also if the body was already damaged when it was written, or was written
    with another schema.
    """
    body = check(block, name)
    header = block.header
    try:
        if header.compression is not Compression.NONE:
            codec = pa.Codec(_ARROW_NAMES[header.compression])
            body = codec.decompress(body, decompressed_size=header.raw_bytes)
        if header.codec is Codec.JSON:
            batch = json_codec.read(body.to_pybytes(), schema)
        else:
            batch = pa.ipc.read_record_batch(body, schema)
    except MemoryError:  # it may be an ArrowException, too, but the block is not at fault
        raise
    except (pa.ArrowException, ValueError, OSError, EOFError) as error:
        raise CorruptBlock(f"{name}: its body does not read as {header.codec.name.lower()}: {error}") from error
    if batch.num_rows != header.rows:
        raise CorruptBlock(f"{name}: {batch.num_rows} rows where its header says {header.rows}")
    return batch


def is_mapped(block: Block) -> bool:
    """Whether the rows of a decoded block lie in a file that is mapped."""
    return block.at is not None and block.header.codec is Codec.ARROW and block.header.compression is Compression.NONE


def is_quick(codec: Codec, compression: Compression, raw_bytes: int) -> bool:
    """Whether encoding or decoding is faster in the caller's thread than in another.

    Handing a block over takes two threads about 30 µs. 1 MiB of Arrow takes 0.15 ms, and more than three times that if
    it is compressed. orjson holds the GIL, so another thread would only get in the way.
    """
    least = _LEAST_PLAIN if compression is Compression.NONE else _LEAST_COMPRESSED
    return codec is Codec.JSON or raw_bytes < least


def settled(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, npt.NDArray[np.bool_] | None]:
    """Returns a batch in which each byte that is no UTF-8 is U+FFFD, and a mask of the rows that had one.

    The mask is None if no row had one. It looks at texts anywhere in a column.
    """
    bad: npt.NDArray[np.bool_] | None = None
    for number, column in enumerate(batch.columns):
        if _bytes_of(column.type) == column.type or _is_utf8(column):
            continue
        rows = list(_bad_rows(column, 0))
        if bad is None:
            bad = np.zeros(batch.num_rows, np.bool_)
        bad[rows] = True
        batch = batch.set_column(number, batch.schema.field(number), _mended(column, rows))
    return batch, bad


def _bytes_of(type_: pa.DataType) -> pa.DataType:
    """Returns a type with bytes in the place of texts."""
    if pa.types.is_string(type_):
        return pa.binary()
    if pa.types.is_large_string(type_):
        return pa.large_binary()
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_bytes_of(field.type)) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(_bytes_of(type_.key_type), type_.item_field.with_type(_bytes_of(type_.item_type)))
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_bytes_of(type_.value_type)))
    return type_


def _is_utf8(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _bad_rows(column: pa.Array, first: int) -> Iterator[int]:
    """Yields the numbers of the rows with such a text: those of halves that have one."""
    if _is_utf8(column.take(pa.array(range(len(column)))) if pa.types.is_nested(column.type) else column):
        return  # a part of a column of lists would be checked with all texts of the column
    if len(column) == 1:
        yield first
        return
    half = len(column) // 2
    yield from _bad_rows(column[:half], first)
    yield from _bad_rows(column[half:], first + half)


def _mended(column: pa.Array, rows: list[int]) -> pa.Array:
    """Returns a column with other values in some rows."""
    parts, begin = [], 0
    for row in rows:
        (value,) = column[row : row + 1].view(_bytes_of(column.type)).to_pylist()
        parts += [column[begin:row], pa.array([_replaced(value, column.type)], column.type)]
        begin = row + 1
    return pa.concat_arrays([*parts, column[begin:]])


def _replaced(value: Any, type_: pa.DataType) -> Any:
    """Returns a value of a type whose texts are bytes, with texts."""
    if value is None:
        return None
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return value.decode("utf-8", "replace")
    if pa.types.is_struct(type_):
        return {field.name: _replaced(value[field.name], field.type) for field in type_}
    if pa.types.is_map(type_):
        return [(_replaced(key, type_.key_type), _replaced(item, type_.item_type)) for key, item in value]
    if pa.types.is_list(type_):
        return [_replaced(each, type_.value_type) for each in value]
    return value
