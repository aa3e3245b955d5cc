"""A version of a shard: an immutable manifest that names its files. Pure: bytes in and out.

The file is one JSON object, a newline, and the CRC-32 of the object's bytes as eight hexadecimal digits. The checksum
covers everything, also the operator's snapshot. ``docs/reference/formats.md`` describes every field.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import msgspec
import orjson

from state_backends.files.names import HANDED, SstFile
from state_backends.format.checksum import crc32
from state_backends.format.definitions import changes
from state_backends.format.errors import CorruptState, ForeignState, FormatError
from state_backends.format.plain_names import PLAIN, is_plain
from state_backends.store.ledger import NO_FILE
from state_backends.store.protocol import Alive, Runs
from state_backends.versions.json_values import dumps

FORMAT = 4
_BEGINS = orjson.dumps({"format": FORMAT})[:-1] + b","
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """Says whose state it is. ``definition``: what the operator's blocks and windows depend on.

    ``ids``: the ids of all shards; the hash of a key is an index into it. ``key_types``: the types that the columns of
    the key are hashed as. Both are empty if no keys are hashed. ``checkpoint``: the location of the query's checkpoint.
    Only ``operator.json`` has these three; manifests do not.
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
    """An older version that is kept. ``left``: name and bytes of each file that it names but the next version does not.

    ``merged_bytes``: bytes of the merged files that the next version was the first to name.
    """

    token: str
    left: tuple[tuple[str, int], ...]
    merged_bytes: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of blocks. ``crc``: CRC-32 of the whole file. ``index_crc``: CRC-32 of its index of blocks.

    ``alive``: the positions of its live blocks in its index. None for files of other kinds, which are alive as a whole.
    In a file of keyed values, ``blocks`` counts the keys, and ``index_crc`` is the CRC-32 of the entry with its name.
    Opening a shard reads the index only. A file that a child handed over (docs/inside/hand-over.md) has no number and
    no such index; ``crc`` is the checksum of its list of bodies. Each body has a checksum of its own.
    """

    file_no: int
    name: str
    size_bytes: int
    crc: int
    index_crc: int
    blocks: int
    alive: Runs | None = None

    def __post_init__(self) -> None:
        runs = [(-1, -1), *(self.alive or ())]
        if any(first > last or first <= before for (_, before), (first, last) in itertools.pairwise(runs)):
            raise ValueError("runs must ascend")

    @classmethod
    def of(cls, file: SstFile, name: str) -> FileEntry:
        """A file that was written here, under the name that it has in a version."""
        return cls(file.file_no, name, file.size_bytes, file.crc, file.index_crc, file.blocks)

    @classmethod
    def of_handed(cls, name: str, size_bytes: int, crc: int, bodies: int) -> FileEntry:
        """A file that a child handed over."""
        return cls(NO_FILE, name, size_bytes, crc, 0, bodies)

    def in_folder(self, folder: str) -> SstFile:
        """Returns the file, or its copy, in a local folder."""
        path = f"{folder}/{self.name}"
        return SstFile(self.file_no, path, self.size_bytes, self.crc, self.index_crc, self.blocks)


@dataclass(frozen=True)
class Manifest:
    """The contents of a version. What it does not list does not exist.

    ``next_file_no``: an attempt that starts from this version gives this number to its first file. ``history``: older
    versions that are kept, oldest first. The last one is the parent. The history is empty if the parent lies in another
    lineage's folder; the parent of a first version that was taken from there is that version itself. ``runs``: the
    numbers of the files with keyed values, oldest first. All other files have blocks.
    """

    token: str
    parent: str | None
    version: int
    identity: Identity
    files: tuple[FileEntry, ...]
    next_file_no: int
    snapshot: dict[str, Any]
    history: tuple[Past, ...] = ()
    runs: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether the shard had no version before."""
        return self.parent in (None, self.token)

    @cached_property
    def numbered(self) -> dict[int, FileEntry]:
        """The files that a shard has made, by their numbers."""
        return {file.file_no: file for file in self.files if not file.name.endswith(HANDED)}

    @cached_property
    def handed(self) -> dict[str, FileEntry]:
        """The files that children have handed over, by their names."""
        return {file.name: file for file in self.files if file.name.endswith(HANDED)}

    def blocks_in(self, folder: str) -> list[SstFile]:
        """Returns the files with blocks, or their copies, in a local folder."""
        return [file.in_folder(folder) for number, file in self.numbered.items() if number not in self.runs]

    def runs_in(self, folder: str) -> list[SstFile]:
        """Returns the files with keyed values, or their copies, in a local folder: see :func:`runs_of`."""
        return [run.in_folder(folder) for run in runs_of(self)]

    @property
    def alive(self) -> Alive:
        """Which blocks of its files are alive."""
        files = {file.file_no: file for file in self.files}

        def alive(file_no: int, blocks: Sequence[tuple[int, int]]) -> list[bool]:
            runs = files[file_no].alive
            return [True] * len(blocks) if runs is None else _in_runs(runs, range(len(blocks)))

        return alive


def runs_of(manifest: Manifest) -> list[FileEntry]:
    """Returns the files with keyed values, oldest first. Raises CorruptState if one of them is not among the files."""
    files = {file.file_no: file for file in manifest.files}
    for number in manifest.runs:
        if number not in files:
            raise CorruptState(f"file {number:010d}, a run, is not among the files of version {manifest.token}")
    return [files[number] for number in manifest.runs]


def dump(manifest: Manifest) -> bytes:
    # asdict would copy each value of the snapshot.
    value = {f.name: getattr(manifest, f.name) for f in fields(manifest)}
    value["identity"] = {name: getattr(manifest.identity, name) for name in _OWNER}
    value["history"] = [tuple(past) for past in manifest.history]
    return _seal(value)


def load(data: bytes, name: str) -> Manifest:
    """Raises CorruptState or FormatError naming the manifest."""
    what = f"manifest {name}"
    manifest = _read(Manifest, data, what)
    tokens = [manifest.token, *(past.token for past in manifest.history)]
    files = [*(file.name for file in manifest.files), *(file for past in manifest.history for file, _ in past.left)]
    parents = [] if manifest.parent is None else [manifest.parent]
    _check_names(what, [*tokens, *parents, *files, manifest.identity.query, manifest.identity.operator])
    return manifest


def dump_operator(identity: Identity) -> bytes:
    """Returns the contents of ``operator.json``: what all shards of an operator share. Every shard compares itself with
    it.
    """
    return _seal({name: getattr(identity, name) for name in _OPERATOR})


def load_operator(data: bytes, name: str) -> dict[str, Any]:
    """Returns the fields of an Identity that ``operator.json`` has. Raises CorruptState or FormatError naming the
    file.
    """
    operator = _read(_Operator, data, name)
    _check_names(name, [operator.query, operator.operator])
    return dict(vars(operator))


@dataclass(frozen=True)
class _Operator:
    query: str
    operator: str
    shards: int
    definition: dict[str, Any]
    ids: list[int]
    key_types: list[str]
    checkpoint: str


_OPERATOR = tuple(field.name for field in fields(_Operator))
_OWNER = ("query", "operator", "shard", "shards", "definition")


def _seal(value: dict[str, Any]) -> bytes:
    body = dumps({"format": FORMAT, **value})
    return body + b"\n%08x\n" % crc32(body)


def _read(kind: type[T], data: bytes, what: str) -> T:
    """Reads what :func:`_seal` wrote. A later version of Aion may have added fields to the same format."""
    body, trailer = data[:-10], data[-10:]
    if trailer != b"\n%08x\n" % crc32(body):
        raise CorruptState(f"{what}: its checksum differs from the one it was written with")
    try:
        if not body.startswith(_BEGINS) and (found := orjson.loads(body).get("format")) != FORMAT:
            age = "older" if isinstance(found, int) and found < FORMAT else "newer"
            raise FormatError(
                f"{what}: written in format {found}; this Aion reads format {FORMAT}: use the {age} Aion that wrote it"
            )
        return msgspec.json.decode(body, type=kind)
    except (ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise CorruptState(f"{what}: its fields are not those of its format: {error}") from error


def _check_names(what: str, names: Iterable[str]) -> None:
    """Raises CorruptState for a name that is not plain. All of these become parts of paths."""
    for name in names:
        if not is_plain(name):
            raise CorruptState(f"{what}: it contains {name!r:.200}, which is not a plain name ({PLAIN})")


def _in_runs(runs: Runs, numbers: Sequence[int]) -> list[bool]:
    """Returns whether each number lies in one of the runs."""
    lasts = [last for _, last in runs]
    at = [bisect_left(lasts, number) for number in numbers]
    return [i < len(runs) and runs[i][0] <= number for i, number in zip(at, numbers, strict=True)]


def check_owner(manifest: Manifest, wanted: Identity) -> None:
    """Raises ForeignState saying what differs."""
    found = {name: getattr(manifest.identity, name) for name in _OWNER}
    check_operator(found, wanted, f"the state of version {manifest.token}")


def check_kept(
    operator: dict[str, Any], versions: Callable[[], Iterable[Manifest]], check: Callable[[dict[str, Any]], T]
) -> T | None:
    """Returns what ``check`` returns for the state of an operator. It raises ForeignState for that of somebody else.

    ``operator``: what ``operator.json`` says. A batch that failed may have written it, so if it is refused, the newest
    ``versions`` that may have been committed are checked instead. Returns None if nothing is kept.
    """
    try:
        return check(operator)
    except ForeignState:
        kept = [{**operator, "definition": v.identity.definition, "shards": v.identity.shards} for v in versions()]
        for found in kept:
            with contextlib.suppress(ForeignState):
                return check(found)
        if kept:
            raise
        return None


def check_operator(found: Mapping[str, Any], wanted: Identity, state: str) -> None:
    """Compares fields of an Identity with those that are wanted. Raises ForeignState saying what differs.

    ``state``: what the message calls the state that was found.
    """
    for what in ("query", "operator", "shard", "shards"):
        if what in found and found[what] != getattr(wanted, what):
            hint = f"; set state.shards to {found[what]}, its number of shards" if what == "shards" else ""
            raise ForeignState(f"{state} belongs to {what} {found[what]!r}, not {getattr(wanted, what)!r}{hint}")
    if differ := changes(found["definition"], wanted.definition):
        raise ForeignState(
            f"operator {wanted.operator!r} was started with another definition: {'; '.join(differ)}. What it keeps is "
            "for that one: change it back, or start the query with a new checkpoint"
        )
    for what, meaning in (("ids", "ids of shards"), ("key_types", "types that keys are hashed as")):
        was, is_now = found.get(what), list(getattr(wanted, what))
        if was is not None and was != is_now:
            raise ForeignState(
                f"{state} has other {meaning}: {was}, not {is_now}. Keys would be looked for in shards that do not "
                "hold them; start with a new checkpoint"
            )
