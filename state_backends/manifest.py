"""A version of a shard: an immutable manifest that names its files. Pure: bytes in and out.

The file is one JSON object, a newline, and the CRC-32 of the object's bytes as eight hexadecimal digits: all of it is
covered, the operator's snapshot included. ``docs/state-format.md`` describes every field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import orjson

from aion.errors import CorruptState, ForeignState, FormatError
from state_backends.checksum import crc32
from state_backends.json_values import dumps

FORMAT = 2
_READS = (1, 2)
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
    """``purged``: slices whose blocks are dead although a listed file still holds them. ``superseded``: blocks that are
    dead because others stand for them: runs (first seq, last seq) in which no block is alive.

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
    superseded: tuple[tuple[int, int], ...] = ()


def dump(manifest: Manifest) -> bytes:
    # Not by asdict, which would copy each value of the snapshot.
    return _seal({f.name: getattr(manifest, f.name) for f in fields(manifest)})


def load(data: bytes, name: str) -> Manifest:
    """Raises CorruptState or FormatError naming the manifest."""
    what = f"manifest {name}"
    value = _unseal(data, what)
    return _shaped(
        what,
        lambda: Manifest(
            token=value["token"],
            parent=value["parent"],
            version=value["version"],
            identity=_known(Identity, value["identity"]),
            files=tuple(_known(FileEntry, f) for f in value["files"]),
            purged=tuple(value["purged"]),
            next_file_no=value["next_file_no"],
            snapshot=value["snapshot"],
            superseded=tuple((first, last) for first, last in value.get("superseded", ())),
        ),
    )


def dump_operator(identity: Identity) -> bytes:
    """What all shards of an operator have in common: a file of its own, for shards that have no version yet."""
    return _seal({name: getattr(identity, name) for name in _OPERATOR})


def load_operator(data: bytes, name: str) -> dict[str, Any]:
    """Raises CorruptState or FormatError naming the file."""
    value = _unseal(data, name)
    return _shaped(name, lambda: {field: value[field] for field in _OPERATOR})


_OPERATOR = ("query", "operator", "shards", "definition")


def _seal(value: dict[str, Any]) -> bytes:
    body = dumps({"format": FORMAT, **value})
    return body + b"\n%08x\n" % crc32(body)


def _unseal(data: bytes, what: str) -> dict[str, Any]:
    body, trailer = data[:-10], data[-10:]
    if trailer != b"\n%08x\n" % crc32(body):
        raise CorruptState(f"{what}: its checksum differs from the one it was written with")
    value: dict[str, Any] = _shaped(what, lambda: dict(orjson.loads(body)))
    found = value.pop("format", None)
    if found not in _READS:
        raise FormatError(f"{what}: written in format {found}; this Aion reads up to format {FORMAT}")
    return value


def _shaped(what: str, read: Callable[[], T]) -> T:
    """What ``read`` makes of a value whose checksum is right, which yet may be another one's."""
    try:
        return read()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptState(f"{what}: not of the shape of format {FORMAT}: {error!r}") from error


def _known(kind: type[T], value: dict[str, Any]) -> T:
    """The fields that this Aion knows: a later one of the same format may have added others."""
    return kind(**{f.name: value[f.name] for f in fields(kind)})  # type: ignore[arg-type]


def check_owner(manifest: Manifest, wanted: Identity) -> None:
    """Raises ForeignState that says what differs."""
    check_operator(asdict(manifest.identity), wanted, f"the state of version {manifest.token}")


def check_operator(found: Mapping[str, Any], wanted: Identity, whose: str) -> None:
    """``found``: fields of an Identity. Raises ForeignState that says what differs."""
    for what in ("query", "operator", "shard", "shards"):
        if what in found and found[what] != getattr(wanted, what):
            hint = " (Spark fixes the number of shuffle partitions in the checkpoint)" if what == "shards" else ""
            raise ForeignState(f"{whose} belongs to {what} {found[what]!r}, not {getattr(wanted, what)!r}{hint}")
    definition = found["definition"]
    changed = [k for k in wanted.definition if definition.get(k) != wanted.definition[k]]
    if changed:
        was = "; ".join(f"{k}: was {definition.get(k)}, is {wanted.definition[k]}" for k in changed)
        raise ForeignState(
            f"operator {wanted.operator!r} was started with another definition ({was}); "
            "start it with a new checkpoint, or give it another name"
        )
