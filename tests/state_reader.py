"""Reads stored state as docs/reference/formats.md and the pages beside it say. It was written from them, and knows no
Aion.

It uses struct, json and zlib, and pyarrow for the bodies of blocks, which are Arrow's.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa


def read_manifest(path: Path) -> dict[str, Any]:
    body, crc, nothing = path.read_bytes().split(b"\n")
    assert nothing == b"" and re.fullmatch(rb"[0-9a-f]{8}", crc)
    assert int(crc, 16) == zlib.crc32(body)
    manifest: dict[str, Any] = json.loads(body)
    assert manifest["format"] == 4
    return manifest


def read_version(shard: Path, token: str) -> dict[tuple[int, int], bytes]:
    """The live blocks of a version, by slice and seq."""
    manifest = read_manifest(shard / "manifests" / f"{token}.json")
    blocks: dict[tuple[int, int], bytes] = {}
    for file in manifest["files"]:
        data = (shard / "files" / file["name"]).read_bytes()
        assert (len(data), zlib.crc32(data)) == (file["size_bytes"], file["crc"])
        entries = list(read_table(data))
        (key, index), *rest, (last_key, last) = entries
        number = struct.pack(">Q", file["file_no"])
        assert key == number and zlib.crc32(index) == file["index_crc"]
        assert len(index) >= 4096
        assert last_key == number + b"\xff" * 16 and last == b""
        found = {}
        for key, value in rest:
            file_no, slice_, seq = struct.unpack(">QQQ", key)
            assert file_no == file["file_no"]
            found[slice_ - 2**63, seq] = value
        written_as = json.loads(index)["file"]
        assert written_as.startswith(f"{file['file_no']:010d}-") and written_as.endswith(".sst")
        assert json.loads(index) == {
            "file": written_as,
            "blocks": [[s, seq, len(value), *read_compacted(value)] for (s, seq), value in found.items()],
        }
        assert len(found) == file["blocks"]
        alive = {at for first, last in file["alive"] for at in range(first, last + 1)}
        assert alive and alive <= set(range(len(found)))
        blocks |= {key: value for at, (key, value) in enumerate(found.items()) if at in alive}
    return blocks


def dead_blocks(manifest: Path) -> int:
    """How many blocks the files of a version have besides its own."""
    files = read_manifest(manifest)["files"]
    return sum(file["blocks"] - sum(last - first + 1 for first, last in file["alive"]) for file in files)


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of an SST file."""
    end = len(data) - 53
    mark, _, _, metaindex_size, zeros, version, magic = struct.unpack("<x4sIII24sI8s", data[end:])
    assert mark == bytes.fromhex("3e007a00") and zeros == bytes(24)
    assert (version, magic) == (6, bytes.fromhex("f7cff485b741e288"))
    meta = dict(table_block(data, end - 5 - metaindex_size, metaindex_size))
    where, size, _ = varints(meta[b"rocksdb.index"], 0, 2)
    for _, handle in table_block(data, where, size, in_index=True):
        where, size, _ = varints(handle, 0, 2)
        for key, value in table_block(data, where, size):
            assert key.endswith(bytes.fromhex("0100000000000000"))
            yield key[:-8], value


def table_block(data: bytes, where: int, size: int, *, in_index: bool = False) -> Iterator[tuple[bytes, bytes]]:
    assert data[where + size] == 0, "not compressed"
    block = data[where : where + size]
    (unused,) = struct.unpack("<I", block[-4:])
    at, end, key = 0, size - 4 - 4 * unused, b""
    while at < end:
        if in_index:
            shared, new, at = varints(block, at, 2)
        else:
            shared, new, length, at = varints(block, at, 3)
        key = key[:shared] + block[at : at + new]
        at += new
        if in_index:
            length = varints(block, at, 2)[-1] - at
        yield key, block[at : at + length]
        at += length


def varints(data: bytes, at: int, count: int) -> tuple[int, ...]:
    """So many integers, and where the next one begins."""
    found = []
    for _ in range(count):
        value = 0
        for place in itertools.count(0, 7):
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << place
            if byte < 0x80:
                break
        found.append(value)
    return (*found, at)


HEADER = {
    "magic": "4s", "version": "B", "kind": "B", "codec": "B", "compression": "B", "slice": "q", "rows": "I",
    "events": "I", "earliest": "q", "latest": "q", "raw": "Q", "length": "Q", "body crc": "I", "header crc": "I",
}  # fmt: skip


def read_compacted(data: bytes) -> tuple[int, ...]:
    """Last seq, low and high of a compacted block; of another one, nothing."""
    at = 64 if data[4] > 2 else 60
    return struct.unpack("<qqq", data[at : at + 24]) if data[4] in (2, 4) else ()


def read_block(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header's fields, and the body, decompressed."""
    types = HEADER | ({"events": "Q"} if data[4] > 2 else {})
    first = struct.calcsize("<" + "".join(types.values())) - 4
    own = first + 8 * len(read_compacted(data))
    fields = struct.unpack("<" + "".join(types.values()), data[:first] + data[own : own + 4])
    header = dict(zip(types, fields, strict=True))
    assert header["magic"] == b"AION" and header["version"] in (1, 2, 3, 4)
    assert (header["version"] > 2) == (header["events"] >= 2**32)
    assert header["header crc"] == zlib.crc32(data[:own])
    body = data[own + 4 :]
    assert (header["length"], header["body crc"]) == (len(body), zlib.crc32(body))
    if header["compression"]:
        body = pa.decompress(body, header["raw"], codec={1: "lz4", 2: "zstd"}[header["compression"]], asbytes=True)
    assert len(body) == header["raw"]
    return header, body


def read_packed(value: dict[str, Any]) -> dict[str, list[float]]:
    data = zlib.decompress(base64.b64decode(value["packed"]))
    (form,), at = struct.unpack("<q", data[:8]), 8
    assert form == 1
    found: dict[str, list[float]] = {}
    for name, (coding, step) in value["columns"].items():
        (length,) = struct.unpack("<q", data[at : at + 8])
        planes = [data[at + 8 + i * length : at + 8 + (i + 1) * length] for i in range(8)]
        doubled = [int.from_bytes(octets, "little") for octets in zip(*planes, strict=True)]
        values = [n // 2 if n % 2 == 0 else -(n // 2) - 1 for n in doubled]
        sums = list(itertools.accumulate(values))
        if coding == "differences":
            found[name] = [n * step for n in sums]
        else:
            plain = [n * step for n in values]
            found[name] = [struct.unpack("<d", struct.pack("<q", n))[0] for n in plain] if coding == "double" else plain
        at += 8 + 8 * length
    assert at == len(data)
    return found
