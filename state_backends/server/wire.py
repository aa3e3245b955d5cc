"""The messages between client and server: blocks and keyed values as Arrow batches, and errors by name. Pure."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import pyarrow as pa

from state_backends.format import errors
from state_backends.format.block import Block, parse
from state_backends.thresholds import threshold

BLOCKS = pa.schema([("seq", pa.int64()), ("late", pa.bool_()), ("block", pa.large_binary())])
VALUES = pa.schema([("key", pa.large_binary()), ("value", pa.large_binary()), ("needed_ms", pa.int64())])
FOUND = pa.schema([("value", pa.large_binary())])
ENTRIES = pa.schema([("key", pa.large_binary()), ("value", pa.large_binary())])
_KEYS = pa.schema([("key", pa.large_binary())])
MESSAGE_BYTES = threshold(1 << 20, 256)
# Each reader has one message waiting to be sent, which the memory budget does not count.
READ_MESSAGE_BYTES = threshold(1 << 18, 256)
_FIRST_BYTES = tuple(threshold(1 << bits, 16) for bits in (10, 12, 14, 16))  # of the first messages of a scan
_ITEM_BYTES = 8  # of an offset; so a message of many small values is not too large
T = TypeVar("T")
_ERROR_BYTES = 4000  # gRPC sends errors in headers, which are ASCII and at most 8 KiB
_BEGIN, _END = "aion:", ":noia"


def pack(blocks: Iterable[tuple[int, bool, Block]], message_bytes: int = MESSAGE_BYTES) -> Iterator[pa.RecordBatch]:
    """Packs blocks into messages of about ``message_bytes`` each.

    A message with a single block shares the block's memory. Nothing here refers to a message after it is yielded, so
    its memory can be freed.
    """
    waiting: list[tuple[int, bool, Any]] = []
    size = 0
    for seq, late, block in blocks:
        if waiting and size + block.size_bytes > message_bytes:
            full, waiting, size = [_message(waiting)], [], 0
            yield full.pop()
        waiting.append((seq, late, block.stored))
        size += block.size_bytes
        del block
        if size >= message_bytes:
            full, waiting, size = [_message(waiting)], [], 0
            yield full.pop()
    if waiting:
        yield _message(waiting)


def unpack(message: pa.RecordBatch) -> Iterator[tuple[int, bool, Block]]:
    """Yields the (seq, late, block) in a message. A single block shares the message's memory; several blocks are
    copied.
    """
    seqs, lates = message.column(0).to_pylist(), message.column(1).to_pylist()
    column = message.column(2)
    for i, (seq, late) in enumerate(zip(seqs, lates, strict=True)):
        buffer = column[i].as_buffer()
        # A small block must not keep the whole message in memory after the other blocks have been freed.
        data = buffer if message.num_rows == 1 else buffer.to_pybytes()
        yield seq, late, parse(data, f"block {seq}")


def _message(blocks: list[tuple[int, bool, Any]]) -> pa.RecordBatch:
    seqs, lates, data = zip(*blocks, strict=True)
    ends = pa.array([0, *itertools.accumulate(memoryview(d).nbytes for d in data)], pa.int64())
    body = pa.py_buffer(data[0] if len(data) == 1 else b"".join(data))
    blobs = pa.Array.from_buffers(pa.large_binary(), len(data), [None, ends.buffers()[1], body])
    return pa.record_batch([pa.array(seqs, pa.int64()), pa.array(lates, pa.bool_()), blobs], schema=BLOCKS)


# -- keyed values -----------------------------------------------------------------------------------------


def pack_keys(keys: Sequence[bytes]) -> str:
    """Returns keys as text, for a request: the bytes of an Arrow batch in base64."""
    batch = pa.record_batch([pa.array(keys, pa.large_binary())], schema=_KEYS)
    return base64.b64encode(batch.serialize()).decode()


def unpack_keys(text: str) -> list[bytes]:
    """Raises ValueError if this is not what :func:`pack_keys` makes, or if a key is empty."""
    data = unpack_key(text)
    batch = pa.ipc.read_record_batch(data, _KEYS)
    batch.validate(full=True)
    keys: list[bytes] = batch.column(0).to_pylist()
    if not all(keys):
        raise ValueError("a key is empty")
    return keys


def pack_key(key: bytes) -> str:
    return base64.b64encode(key).decode()


def unpack_key(text: str) -> bytes:
    """Raises ValueError if the text is not base64."""
    return base64.b64decode(text, validate=True)


def pack_values(values: Iterable[tuple[bytes, bytes | None, int | None]]) -> Iterator[pa.RecordBatch]:
    """Packs keyed values into messages of about ``MESSAGE_BYTES`` each."""
    for part in _parts(values, lambda value: len(value[0]) + len(value[1] or b""), itertools.repeat(MESSAGE_BYTES)):
        columns = zip(*part, strict=True)
        yield pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, VALUES, strict=True)], schema=VALUES)


def pack_found(pages: Iterable[Sequence[bytes | None]]) -> Iterator[pa.RecordBatch]:
    """Packs the pages of a get. Each message has at most about ``READ_MESSAGE_BYTES``, or one value."""
    for page in pages:
        if sum(map(len, filter(None, page))) <= READ_MESSAGE_BYTES:
            parts: Iterable[Sequence[bytes | None]] = [page]
        else:
            parts = _parts(page, lambda value: len(value or b""), itertools.repeat(READ_MESSAGE_BYTES))
        for part in parts:
            yield pa.record_batch([pa.array(part, pa.large_binary())], schema=FOUND)


def unpack_found(message: pa.RecordBatch) -> list[bytes | None]:
    values: list[bytes | None] = message.column(0).to_pylist()
    return values


def pack_entries(entries: Iterable[tuple[bytes, bytes]]) -> Iterator[pa.RecordBatch]:
    """Packs the entries of a scan. Its first messages are small: the reader may only want the first entries."""
    sizes = itertools.chain(_FIRST_BYTES, itertools.repeat(READ_MESSAGE_BYTES))
    for part in _parts(entries, lambda entry: len(entry[0]) + len(entry[1]), sizes):
        keys, values = zip(*part, strict=True)
        yield pa.record_batch([pa.array(keys, pa.large_binary()), pa.array(values, pa.large_binary())], schema=ENTRIES)


def unpack_entries(message: pa.RecordBatch) -> list[tuple[bytes, bytes]]:
    return list(zip(message.column(0).to_pylist(), message.column(1).to_pylist(), strict=True))


def _parts(items: Iterable[T], size_of: Callable[[T], int], sizes: Iterator[int]) -> Iterator[list[T]]:
    """Consecutive items, together as many bytes as the next of ``sizes``, or just above."""
    part: list[T] = []
    size, most_bytes = 0, next(sizes)
    for item in items:
        part.append(item)
        size += size_of(item) + _ITEM_BYTES
        if size >= most_bytes:
            yield part
            part, size, most_bytes = [], 0, next(sizes)
    if part:
        yield part


# -- errors -----------------------------------------------------------------------------------------------


def encode_error(error: BaseException) -> str:
    """Encodes an error as text, from which :func:`raise_error` makes the same kind of error again."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, MemoryError):
        advice = "lower memory.budget, or give the host or container more"
        text = f"the state server has no memory left ({text or name}); {advice}"
        name = errors.OutOfMemory.__name__
    elif isinstance(error, OSError) and "Too many open files" in text:
        text = f"{text} (the state server has too many files open: see ulimit -n)"
    while len(encoded := json.dumps([name, text])) > _ERROR_BYTES:
        text = text[: len(text) // 2] + " ..."
    return f"{_BEGIN}{encoded}{_END}"


def raise_error(text: str, otherwise: type[errors.AionError] = errors.ServerUnreachable) -> NoReturn:
    """Raises what the server raised. ``text``: the encoded error, with text that gRPC puts around it.

    ``otherwise``: raised if the text contains no encoded error. An error that is not one of Aion's becomes a
    ServerError with its name.
    """
    begin = text.find(_BEGIN)
    end = text.find(_END, begin)  # the first end, because gRPC may repeat the text
    if begin < 0 or end < begin:
        raise otherwise(text) from None
    try:
        name, message = json.loads(text[begin + len(_BEGIN) : end])
    except ValueError:  # gRPC cut it
        raise errors.ServerError(text[begin:end]) from None
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.AionError):
        raise kind(message) from None
    raise errors.ServerError(f"{name}: {message}") from None
