"""A version of a shard: an immutable manifest that names its files. Pure: bytes in and out.

The file is one JSON object, a newline, and the CRC-32 of the object's bytes as eight hexadecimal digits. The checksum
covers everything, also the operator's snapshot. ``docs/state-format.md`` describes every field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import orjson

from aion.core.checksum import crc32
from aion.errors import CorruptState, ForeignState, FormatError
from state_backends.versions.json_values import dumps

FORMAT = 3
_READS = (1, 2, 3)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """Says whose state it is. ``definition``: what the operator's blocks and windows depend on.

    ``ids``: the ids of all shards, in the order in which hashes of keys choose them. ``key_types``: the types of the
    keys as they are hashed. Both are empty if no keys are hashed. ``checkpoint``: the location of the query's
    checkpoint. Manifests do not repeat these three.
    """

    query: str
    operator: str
    shard: int
    shards: int
    definition: dict[str, Any]
    ids: tuple[int, ...] = ()
    key_types: tuple[str, ...] = ()
    checkpoint: str = ""


class Past(NamedTuple):
    """An older version that is kept. ``left``: names and bytes of the files that it names and its successor does not.

    ``merged_bytes``: bytes of merged files that its successor was the first to name.
    """

    token: str
    left: tuple[tuple[str, int], ...]
    merged_bytes: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """``crc``: CRC-32 of the whole file. ``index_crc``: of its index of blocks; opening a shard reads only that."""

    file_no: int
    name: str
    size_bytes: int
    crc: int
    index_crc: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a version.

    ``purged``: slices whose blocks are dead although a listed file still holds them. ``superseded``: blocks that are
    dead because others replaced them, as runs (first seq, last seq) without a live block. ``next_file_no``: the number
    of the next file of attempts that start from this version. ``history``: older versions that are kept, oldest first;
    the last one is the parent, if it lies in this folder.
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
    history: tuple[Past, ...] = ()


def dump(manifest: Manifest) -> bytes:
    # Not by asdict, which would copy each value of the snapshot.
    value = {f.name: getattr(manifest, f.name) for f in fields(manifest)}
    value["identity"] = {name: getattr(manifest.identity, name) for name in _OWNER}
    value["history"] = [tuple(past) for past in manifest.history]
    return _seal(value)


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
            identity=Identity(**{name: value["identity"][name] for name in _OWNER}),
            files=tuple(_known(FileEntry, f) for f in value["files"]),
            purged=tuple(value["purged"]),
            next_file_no=value["next_file_no"],
            snapshot=value["snapshot"],
            superseded=tuple((first, last) for first, last in value.get("superseded", ())),
            history=tuple(
                Past(token, tuple((name, size) for name, size in left), merged)
                for token, left, merged in value.get("history", ())
            ),
        ),
    )


def dump_operator(identity: Identity) -> bytes:
    """The file with what all shards of an operator have in common. Every shard compares itself with it."""
    return _seal({name: getattr(identity, name) for name in (*_OPERATOR, *_LAYOUT, "checkpoint")})


def load_operator(data: bytes, name: str) -> dict[str, Any]:
    """Fields of an Identity, without those that an earlier Aion did not write.

    Raises CorruptState or FormatError naming the file.
    """
    value = _unseal(data, name)
    found = _shaped(name, lambda: {field: value[field] for field in _OPERATOR})
    return {**found, **{field: value[field] for field in (*_LAYOUT, "checkpoint") if field in value}}


_OPERATOR = ("query", "operator", "shards", "definition")
_LAYOUT = ("ids", "key_types")
_OWNER = ("query", "operator", "shard", "shards", "definition")


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
    """Calls ``read`` on a value with a right checksum. It may still be of another kind: then raises CorruptState."""
    try:
        return read()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptState(f"{what}: not of the shape of format {FORMAT}: {error!r}") from error


def _known(kind: type[T], value: dict[str, Any]) -> T:
    """The fields that this Aion knows. A later Aion may have added others to the same format."""
    return kind(**{f.name: value[f.name] for f in fields(kind)})  # type: ignore[arg-type]


def check_owner(manifest: Manifest, wanted: Identity) -> None:
    """Raises ForeignState that says what differs."""
    found = {name: getattr(manifest.identity, name) for name in _OWNER}
    check_operator(found, wanted, f"the state of version {manifest.token}")


def check_operator(found: Mapping[str, Any], wanted: Identity, whose: str) -> None:
    """``found``: fields of an Identity. Raises ForeignState that says what differs."""
    for what in ("query", "operator", "shard", "shards"):
        if what in found and found[what] != getattr(wanted, what):
            hint = f"; set state.shards to {found[what]}" if what == "shards" else ""
            raise ForeignState(f"{whose} belongs to {what} {found[what]!r}, not {getattr(wanted, what)!r}{hint}")
    definition = found["definition"]
    changed = [k for k in wanted.definition if definition.get(k) != wanted.definition[k]]
    if changed:
        was = "; ".join(f"{k}: was {definition.get(k)}, is {wanted.definition[k]}" for k in changed)
        raise ForeignState(
            f"operator {wanted.operator!r} was started with another definition ({was}); "
            "start it with a new checkpoint, or give it another name"
        )
    for what, meaning in (("ids", "ids of shards"), ("key_types", "types that keys are hashed as")):
        was_, is_ = found.get(what), list(getattr(wanted, what))
        if was_ is not None and was_ != is_:
            raise ForeignState(
                f"{whose} has other {meaning}: {was_}, not {is_}. Keys would be looked for in shards that do not hold "
                "them; start with a new checkpoint"
            )


def check_unrecorded(found: Mapping[str, Any], wanted: Identity, shards: Iterable[int], whose: str) -> None:
    """As :func:`check_operator`, for an earlier Aion that did not record how keys become shards.

    ``shards``: the ids of the shards with state. The earlier Aion hashed keys by their own types, and chose ids by the
    number of partitions. If that gives the same shards as today, the state is right. Raises ForeignState.
    """
    if "ids" in found or not wanted.ids:
        return
    hashed = [type_ for _, type_ in wanted.definition["key"]]
    if not set(shards) <= set(wanted.ids) or hashed != list(wanted.key_types):
        raise ForeignState(
            f"{whose} was written by an earlier Aion, which put keys into other shards; start with a new checkpoint"
        )
