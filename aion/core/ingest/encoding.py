"""Rows as a block, and a block as rows. :mod:`state_backends.format.block` has the bytes around them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from aion.core.ingest import json_codec
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

    target_bytes: int
    compression: Compression
    codec: Codec
    threads: int
    drops_bad_texts: bool = False


def encode(
    batch: pa.RecordBatch,
    *,
    kind: BlockKind,
    slice_us: int,
    events: int,
    min_us: int,
    max_us: int,
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
        body, kind=kind, slice_us=slice_us, rows=batch.num_rows, events=events, min_us=min_us, max_us=max_us,
        codec=codec, compression=compression, raw_bytes=raw.size, compacted=compacted,
    )  # fmt: skip


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
