"""A version of a shard: an immutable manifest that names its files. Pure: bytes in and out.

The file is one JSON object, a newline, and the CRC-32 of the object's bytes as eight hexadecimal digits: all of it is
covered, the operator's snapshot included. ``docs/state-format.md`` describes every field.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import orjson

from aion.errors import CorruptState, ForeignState, FormatError

FORMAT = 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose state it is. ``definition`` is what the operator's blocks and windows depend on."""

    query: str
    operator: str
    shard: int
    shards: int
    definition: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """``crc``: CRC-32 of the whole file; ``index_crc``: of its index of blocks, which is what opening a shard reads."""

    file_no: int
    name: str
    size_bytes: int
    crc: int
    index_crc: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """``purged``: slices whose blocks are dead although a listed file still holds them.

    ``next_file_no``: files of attempts that start from this version are numbered from here on.
    """

    token: str
    parent: str | None
    version: int
    identity: Identity
    files: tuple[FileEntry, ...]
    purged: tuple[int, ...]
    next_file_no: int
    snapshot: dict[str, Any]


def dump(manifest: Manifest) -> bytes:
    body = orjson.dumps({"format": FORMAT, **asdict(manifest)})
    return body + b"\n%08x\n" % zlib.crc32(body)


def load(data: bytes, name: str) -> Manifest:
    """Raises CorruptState or FormatError naming the manifest."""
    body, trailer = data[:-10], data[-10:]
    if trailer != b"\n%08x\n" % zlib.crc32(body):
        raise CorruptState(f"manifest {name}: its checksum differs from the one it was written with")
    try:
        value = orjson.loads(body)
        found = value.pop("format", None)
        if found != FORMAT:
            raise FormatError(f"manifest {name}: written in format {found}; this Aion reads format {FORMAT}")
        return Manifest(
            token=value["token"],
            parent=value["parent"],
            version=value["version"],
            identity=_known(Identity, value["identity"]),
            files=tuple(_known(FileEntry, f) for f in value["files"]),
            purged=tuple(value["purged"]),
            next_file_no=value["next_file_no"],
            snapshot=value["snapshot"],
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptState(f"manifest {name}: not of the shape of format {FORMAT}: {error!r}") from error


def _known(kind: type[T], value: dict[str, Any]) -> T:
    """The fields that this Aion knows: a later one of the same format may have added others."""
    return kind(**{f.name: value[f.name] for f in fields(kind)})  # type: ignore[arg-type]


def check_owner(manifest: Manifest, wanted: Identity) -> None:
    """Raises ForeignState that says what differs."""
    found = manifest.identity
    for what in ("query", "operator", "shard", "shards"):
        if getattr(found, what) != getattr(wanted, what):
            hint = " (Spark fixes the number of shuffle partitions in the checkpoint)" if what == "shards" else ""
            raise ForeignState(
                f"the state of version {manifest.token} belongs to {what} {getattr(found, what)!r}, "
                f"not {getattr(wanted, what)!r}{hint}"
            )
    changed = [k for k in wanted.definition if found.definition.get(k) != wanted.definition[k]]
    if changed:
        was = "; ".join(f"{k}: was {found.definition.get(k)}, is {wanted.definition[k]}" for k in changed)
        raise ForeignState(
            f"operator {wanted.operator!r} was started with another definition ({was}); "
            "start it with a new checkpoint, or give it another name"
        )
