"""What travels between client and server: blocks as Arrow batches, and errors by name. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import pyarrow as pa

from aion import errors
from aion.core.ingest.block import Block, parse

BLOCKS = pa.schema([("seq", pa.int64()), ("late", pa.bool_()), ("block", pa.large_binary())])
MESSAGE_BYTES = 1 << 20
READ_MESSAGE_BYTES = 1 << 18  # for each reader, a message waits to be sent outside of the memory budget
_ERROR_BYTES = 4000  # gRPC carries errors in headers, of ASCII and limited to 8 KiB
_BEGIN, _END = "aion:", ":noia"


def pack(blocks: Iterable[tuple[int, bool, Block]], message_bytes: int = MESSAGE_BYTES) -> Iterator[pa.RecordBatch]:
    """Blocks as messages of about that size each.

    A large block is sent from the memory that it is in. Nothing here refers to a message once it is yielded, so its
    memory can be freed.
    """
    waiting: list[tuple[int, bool, Any]] = []
    size = 0
    for seq, late, block in blocks:
        if waiting and size + block.size_bytes > message_bytes:
            full, waiting, size = [_message(waiting)], [], 0
            yield full.pop()
        waiting.append((seq, late, block.data))
        size += block.size_bytes
        del block
        if size >= message_bytes:
            full, waiting, size = [_message(waiting)], [], 0
            yield full.pop()
    if waiting:
        yield _message(waiting)


def unpack(message: pa.RecordBatch) -> Iterator[tuple[int, bool, Block]]:
    """The blocks of a message. A single block shares the message's memory; several small ones get their own."""
    seqs, lates = message.column(0).to_pylist(), message.column(1).to_pylist()
    column = message.column(2)
    for i, (seq, late) in enumerate(zip(seqs, lates, strict=True)):
        buffer = column[i].as_buffer()
        # A small block must not keep the whole message in memory when its neighbours are gone.
        data = buffer if message.num_rows == 1 else buffer.to_pybytes()
        yield seq, late, parse(data, f"block {seq}")


def _message(blocks: list[tuple[int, bool, Any]]) -> pa.RecordBatch:
    seqs, lates, data = zip(*blocks, strict=True)
    ends = pa.array([0, *itertools.accumulate(memoryview(d).nbytes for d in data)], pa.int64())
    body = pa.py_buffer(data[0] if len(data) == 1 else b"".join(data))
    blobs = pa.Array.from_buffers(pa.large_binary(), len(data), [None, ends.buffers()[1], body])
    return pa.record_batch([pa.array(seqs, pa.int64()), pa.array(lates, pa.bool_()), blobs], schema=BLOCKS)


def encode_error(error: BaseException) -> str:
    """An error as text that :func:`raise_error` turns back into the same kind of error."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, MemoryError):
        advice = "lower memory.budget, or give the host or container more"
        text = f"the state server has no memory left ({text or name}); {advice}"
        name = errors.OutOfMemory.__name__
    elif isinstance(error, OSError) and "Too many open files" in text:
        text = f"{text} (the state server has too many files open: see ulimit -n)"
    while len(said := json.dumps([name, text])) > _ERROR_BYTES:
        text = text[: len(text) // 2] + " ..."
    return f"{_BEGIN}{said}{_END}"


def raise_error(text: str, otherwise: type[errors.AionError] = errors.ServerUnreachable) -> NoReturn:
    """Raises what the server raised. gRPC adds words of its own around the text.

    ``otherwise``: raised for a text that no server wrote. If the server raised an error that is not Aion's, it comes as
    ServerError with its name.
    """
    begin = text.find(_BEGIN)
    end = text.find(_END, begin)  # gRPC may repeat the text
    if begin < 0 or end < begin:
        raise otherwise(text)
    try:
        name, message = json.loads(text[begin + len(_BEGIN) : end])
    except ValueError:  # cut short on its way
        raise errors.ServerError(text[begin:end]) from None
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.AionError):
        raise kind(message)
    raise errors.ServerError(f"{name}: {message}")
