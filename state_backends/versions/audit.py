"""Checks the versions in a state folder without opening them: what exists, what is damaged, what can be saved.

Everything is read through ``pyarrow.fs``, so a local folder and an object store look alike. Only ``set_aside``,
``undo`` and ``forget`` change anything. A version is whole if its manifest is whole and every file that it names has
the bytes that were written, by the CRC-32 of the file. See docs/reference/formats.md.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from state_backends.files.bodies import damage
from state_backends.files.location import locate
from state_backends.files.names import HANDED, HANDED_FOLDER, MANIFEST, OPERATOR, SST
from state_backends.files.remote import pyarrow_uri, storage_errors
from state_backends.files.storage import Storage
from state_backends.format.checksum import crc32
from state_backends.format.definitions import digest
from state_backends.format.errors import ConfigError, CorruptState, FormatError, StateError, StorageError
from state_backends.thresholds import threshold
from state_backends.versions.lineage import PREFIX, digest_of, take_all
from state_backends.versions.manifest import FileEntry, Manifest, load, load_operator, runs_of
from state_backends.versions.retention import batch_of

_CHUNK_BYTES = threshold(4 << 20, 256)
DAMAGED = ".damaged"
FIRST = "first"
"""The name of the lineage in the operator's own folder."""


@dataclass(slots=True)
class Version:
    """One manifest. ``problem``: why it cannot be opened, or None if it is whole.

    ``other_format``: another version of Aion wrote it, so it is not damaged.
    """

    token: str
    manifest: Manifest | None
    problem: str | None
    other_format: bool = False

    @property
    def batch(self) -> int:
        """The number of the Spark batch that made it: the first part of its token. -1 if the token has none."""
        return batch_of(self.token)


@dataclass(slots=True)
class ShardFinding:
    """The versions of one shard, oldest first, and its files: the problem of each by name, None if it is whole."""

    query: str
    operator: str
    """For a later lineage: ``operator/lineage``. See state_backends/versions/lineage.py."""
    shard: str
    versions: list[Version] = field(default_factory=list)
    files: dict[str, str | None] = field(default_factory=dict)
    files_bytes: int = 0
    orphans: list[str] = field(default_factory=list)
    """Files that no version names."""
    operator_problem: str | None = None
    """What is wrong with ``operator.json``; names the file."""
    operator_other_format: bool = False

    @property
    def damage(self) -> list[str]:
        """A line for each damaged file or manifest, with the versions that cannot be used because of it.

        What another version of Aion wrote is not damaged: see :attr:`other_formats`.
        """
        where = f"{self.query}/{self.operator}/{self.shard}"
        lines = []
        if self.operator_problem is not None and not self.operator_other_format:
            lines.append(f"{self.operator_problem}; new shards need it")
        for name, problem in self.files.items():
            if problem is not None:
                users = [v.token for v in self.versions if v.manifest and any(f.name == name for f in v.manifest.files)]
                lines.append(f"{where}/files/{name}: {problem}; named by version {', '.join(users)}")
        unread = [v for v in self.versions if v.manifest is None and not v.other_format]
        return lines + [f"{where}/manifests/{v.token}{MANIFEST}: {v.problem}" for v in unread]

    @property
    def other_formats(self) -> list[str]:
        """Says for each manifest, and for ``operator.json``, which other version of Aion is needed to read it."""
        lines = [v.problem for v in self.versions if v.other_format and v.problem is not None]
        if self.operator_problem is not None and self.operator_other_format:
            lines.append(self.operator_problem)
        return lines

    @property
    def lineage(self) -> str:
        return self.operator.partition("/")[2]

    @property
    def newest(self) -> Version | None:
        """The newest whole version."""
        return next((v for v in reversed(self.versions) if v.problem is None), None)


@dataclass(slots=True)
class Lineage:
    """The state that belongs to one checkpoint. See state_backends/versions/lineage.py.

    ``checkpoint``: its location; None if ``operator.json`` is missing or cannot be read. ``newest``: the last batch.
    ``shards``: as :meth:`StateFolder.shards` names them.
    """

    query: str
    name: str
    checkpoint: str | None
    bytes: int = 0
    newest: int = -1
    shards: list[tuple[str, str, str]] = field(default_factory=list)

    def has_checkpoint(self) -> bool:
        """Returns whether the checkpoint exists. Raises StorageError if it cannot be reached from this machine."""
        if self.checkpoint is None:
            raise StorageError(f"lineage {self.name}: the place of its checkpoint is not known")
        with reaching(self.checkpoint) as (fs, path):
            return bool(fs.get_file_info(f"{path}/metadata").type is not pafs.FileType.NotFound)


@contextmanager
def reaching(checkpoint: str) -> Iterator[tuple[Any, str]]:
    """Returns a context with the file system and the path of a checkpoint. Raises StorageError if it is out of
    reach.
    """
    try:
        if checkpoint.startswith("file:"):  # with one slash, as Spark writes it
            fs, path = pafs.LocalFileSystem(), unquote(urlsplit(checkpoint).path)
        else:
            fs, path = pafs.FileSystem.from_uri(pyarrow_uri(checkpoint))
        yield fs, path.rstrip("/")
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{checkpoint} cannot be reached from here: {error}") from error


@dataclass(frozen=True, slots=True)
class Repair:
    """How far a query has to go back. All its shards have whole state after ``batch``, which is None if no batch has
    that.

    ``last``: the newest batch of any shard. ``replay``: the batches that Spark has to run again.
    """

    query: str
    batch: int | None
    last: int

    @property
    def replay(self) -> range:
        return range((self.batch if self.batch is not None else -1) + 1, self.last + 1)


class StateFolder:
    """A state folder, local or remote. Raises StorageError or OSError if it cannot be read."""

    def __init__(self, state_dir: str) -> None:
        if not state_dir.strip():
            raise ConfigError(f"{state_dir!r} is not a state folder; give a path or a URI")
        self.state_dir = state_dir
        self.location = locate(state_dir)
        self._fs, self._base = self.location.filesystem()

    def close(self) -> None:
        self.location.close()

    def shards(self) -> list[tuple[str, str, str]]:
        """(query, operator, shard) of all shards here. The operator is as in ShardFinding.

        Raises StateError, or StorageError if the place cannot be reached.
        """
        with storage_errors(self.state_dir):
            kind = self._fs.get_file_info(self._base).type
        if kind is not pafs.FileType.Directory:
            what = "there is no such folder" if kind is pafs.FileType.NotFound else "this is not a folder"
            raise StateError(f"{self.state_dir}: {what}; give the folder of spark.aion.state.dir")
        return [(query, place, shard) for query, place, shards in self._places() for shard in shards]

    def _places(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yields the query, the operator as in ShardFinding, and the names of its shards."""
        for query in self._folders(self._base):
            for operator in self._folders(f"{self._base}/{query}"):
                names = self._folders(f"{self._base}/{query}/{operator}")
                for place in [operator, *(f"{operator}/{name}" for name in names if name.startswith(PREFIX))]:
                    shards = names if place == operator else self._folders(f"{self._base}/{query}/{place}")
                    yield query, place, [shard for shard in shards if shard.startswith("shard-")]

    def without_shards(self) -> list[ShardFinding]:
        """Returns a finding for each operator that has no shards (``shard``: ""). Only its ``operator.json`` can be
        damaged.
        """
        findings = [ShardFinding(query, place, "") for query, place, shards in self._places() if not shards]
        for finding in findings:
            finding.operator_problem, finding.operator_other_format = self._operator(finding.query, finding.operator)
        return findings

    def lineages(self) -> list[Lineage]:
        """Returns the lineages that have shards here."""
        found: dict[tuple[str, str], Lineage] = {}
        handed: set[tuple[str, str]] = set()
        for query, operator, shard in self.shards():
            name = operator.partition("/")[2] or FIRST
            lineage = found.get((query, name))
            if lineage is None:
                checkpoint = self.checkpoint(query, operator)
                lineage = found[query, name] = Lineage(query, name, checkpoint)
            folder = f"{self._base}/{query}/{operator}/{shard}"
            lineage.shards.append((query, operator, shard))
            for file, size in self._list(f"{folder}/files"):
                # All shards that need a file of a child have links to it.
                is_new = not file.endswith(HANDED) or (operator, file) not in handed
                lineage.bytes += size if is_new else 0
                handed.add((operator, file))
            tokens = [name.partition("-")[0] for name, _ in self._list(f"{folder}/manifests")]
            lineage.newest = max([lineage.newest, *(int(token) for token in tokens if token.isdecimal())])
        return list(found.values())

    def forget(self, lineage: Lineage) -> None:
        """Deletes the versions of a lineage. The query's other lineages take those that they lack before.

        A shard without rows since a checkpoint was copied or moved may need one. When the shard is opened, it deletes
        the others.
        """
        others = [
            other.name for other in self.lineages() if other.query == lineage.query and other.name != lineage.name
        ]
        for query, place, shard in lineage.shards:
            operator = place.partition("/")[0]
            for name in others:
                below = (operator, shard) if name == FIRST else (operator, name, shard)
                take_all(self._storage(query, *place.split("/"), shard), self._storage(query, *below))
        for query, place, shard in lineage.shards:
            self._fs.delete_dir(f"{self._base}/{query}/{place}/{shard}")
        for query, place in dict.fromkeys(shard[:2] for shard in lineage.shards):
            folder = f"{self._base}/{query}/{place}"
            if lineage.checkpoint is not None:
                self._forget_handed(folder.removesuffix(f"/{lineage.name}"), digest_of(lineage.checkpoint))
            if lineage.name != FIRST and not self._folders(folder):
                self._fs.delete_dir(folder)

    def undo(self, query: str, checkpoint: str | None, batch: int) -> None:
        """Deletes the versions of batches after this one: the query was set back, and others take their place."""
        for its_query, place, shards in self._places():
            if its_query == query and self.checkpoint(query, place) == checkpoint:
                for folder in (f"{self._base}/{query}/{place}/{shard}/manifests" for shard in shards):
                    for name, _ in self._list(folder):
                        if name.endswith(MANIFEST) and batch_of(name) > batch:
                            self._fs.delete_file(f"{folder}/{name}")

    def _storage(self, *names: str) -> Storage:
        return self.location.storage(names, self.location.live, "forgotten")

    def _forget_handed(self, operator: str, lineage: str) -> None:
        """Deletes what children of a lineage handed over to no version; see docs/reference/formats.md."""
        folder = f"{operator}/{HANDED_FOLDER}"
        if lineage in self._folders(folder):
            self._fs.delete_dir(f"{folder}/{lineage}")
        for name, _ in self._list(folder):
            if f"-{lineage}-" in name:
                self._fs.delete_file(f"{folder}/{name}")

    def is_checkpoint(self) -> bool:
        """Returns whether this is the checkpoint of a streaming query instead."""
        places = [f"{self._base}/{name}" for name in ("metadata", "offsets")]
        return all(info.type is not pafs.FileType.NotFound for info in self._fs.get_file_info(places))

    def checkpoint(self, query: str, operator: str) -> str | None:
        """Returns the location of the checkpoint to which an operator's state belongs; None if ``operator.json`` is
        unreadable.

        ``operator``: as in ShardFinding.
        """
        try:
            return str(self.operator(query, operator)["checkpoint"])
        except StateError:
            return None

    def operator(self, query: str, operator: str) -> dict[str, Any]:
        """Returns what ``operator.json`` says. ``operator``: as in ShardFinding. Raises StateError, also if it is
        missing.
        """
        found = self._read_operator(query, operator)
        if found is None:
            name = f"{query}/{operator}/{OPERATOR}"
            raise CorruptState(f"{name} is missing; the query writes it again when it starts")
        return found

    def _read_operator(self, query: str, operator: str) -> dict[str, Any] | None:
        """Returns what ``operator.json`` says; None if it is missing."""
        name = f"{query}/{operator}/{OPERATOR}"
        try:
            with self._fs.open_input_stream(f"{self._base}/{name}") as stream:
                return load_operator(stream.read(), name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{name}: it cannot be read: {error}") from error

    def check(
        self, shard: tuple[str, str, str], *, contents: bool = True, progress: Callable[[int], None] | None = None
    ) -> ShardFinding:
        """Reads every manifest and, with ``contents``, every byte of every file.

        Calls ``progress`` with the number of bytes of each read.
        """
        finding = ShardFinding(*shard)
        folder = f"{self._base}/{'/'.join(shard)}"
        there = {name: size for name, size in self._list(f"{folder}/files") if name.endswith((SST, HANDED))}
        finding.files_bytes = sum(there.values())
        tokens = [n.removesuffix(MANIFEST) for n, _ in self._list(f"{folder}/manifests") if n.endswith(MANIFEST)]
        for token in tokens:
            version = self._version(shard, folder, token)
            finding.versions.append(version)
            for file in version.manifest.files if version.manifest else ():
                if file.name not in finding.files:
                    finding.files[file.name] = self._file(folder, file, there.get(file.name), contents, progress)
                problem = finding.files[file.name]
                if problem is not None and version.problem is None:
                    version.problem = f"file {file.name}: {problem}"
        # If the query is running, retention may have deleted some of this since it was listed.
        left = {name for name, _ in self._list(f"{folder}/manifests")}
        finding.versions = [v for v in finding.versions if v.problem is None or f"{v.token}{MANIFEST}" in left]
        named = {f.name for v in finding.versions if v.manifest for f in v.manifest.files}
        finding.files = {name: problem for name, problem in finding.files.items() if name in named}
        finding.versions.sort(key=lambda v: (v.manifest.version if v.manifest else v.batch + 1, v.token))
        finding.operator_problem, finding.operator_other_format = self._operator(*shard[:2])
        finding.orphans = sorted(set(there) - named)
        return finding

    def recent(self, shard: tuple[str, str, str], most: int) -> list[Version]:
        """Reads the newest version of a shard and those that it was made from, up to ``most``, oldest first.

        Reads manifests only. Attempts that Spark gave up are not among them, except in the newest batch. A version
        whose manifest is damaged is among them, and the next one that can be read.
        """
        folder = f"{self._base}/{'/'.join(shard)}"
        listed = [n.removesuffix(MANIFEST) for n, _ in self._list(f"{folder}/manifests") if n.endswith(MANIFEST)]
        found: list[Version] = []
        while listed and len(found) < most:
            version = self._version(shard, folder, listed.pop())
            # If the query is running, retention may have deleted it since it was listed.
            if version.manifest is not None or self._exists(f"{folder}/manifests/{version.token}{MANIFEST}"):
                found.append(version)
            if version.manifest is not None:
                parent = "" if version.manifest.is_first else str(version.manifest.parent)
                listed = [token for token in listed if token <= parent]
        return found[::-1]

    def newest(self, shard: tuple[str, str, str], last: int | None, definitions: Container[str]) -> Manifest | None:
        """Returns the newest version of a shard that can be read, up to the batch ``last``, or None if there is none.

        It is one with a definition of these digests, if there is any. Of one batch it is what was written last: a query
        that was set back makes its batches again. A damaged manifest may be that of an attempt that Spark gave up, so
        it hides none. Raises CorruptState if all are damaged.
        """
        folder, first = f"{self._base}/{'/'.join(shard)}", None
        infos = self._fs.get_file_info(pafs.FileSelector(f"{folder}/manifests", allow_not_found=True))
        names = [(batch_of(i.base_name), i.mtime_ns, i.base_name) for i in infos if i.base_name.endswith(MANIFEST)]
        listed = sorted(name for name in names if last is None or name[0] <= last)
        for _, _, name in reversed(listed):
            manifest = self._version(shard, folder, name.removesuffix(MANIFEST)).manifest
            if manifest is not None and digest(manifest.identity.definition) in definitions:
                return manifest
            first = first or manifest
        if listed and first is None:
            raise CorruptState(f"{folder}: none of its {len(listed)} manifests can be read")
        return first

    def oldest(self, shard: tuple[str, str, str]) -> list[Manifest] | None:
        """Returns the versions of the oldest batch of a shard that has any, or None if one of them cannot be read."""
        folder = f"{self._base}/{'/'.join(shard)}"
        listed = [n.removesuffix(MANIFEST) for n, _ in self._list(f"{folder}/manifests") if n.endswith(MANIFEST)]
        batch = min((batch for token in listed if (batch := batch_of(token)) >= 0), default=-1)
        found = [self._version(shard, folder, token).manifest for token in listed if batch_of(token) <= batch]
        return None if None in found else [manifest for manifest in found if manifest is not None]

    def _exists(self, path: str) -> bool:
        return bool(self._fs.get_file_info(path).type is pafs.FileType.File)

    def set_aside(self, finding: ShardFinding) -> list[str]:
        """Renames damaged files and manifests to ``*.damaged``. Returns the new names."""
        folder = f"{self._base}/{finding.query}/{finding.operator}/{finding.shard}"
        bad = [f"{folder}/files/{name}" for name, problem in finding.files.items() if problem is not None]
        bad += [f"{folder}/manifests/{v.token}{MANIFEST}" for v in finding.versions if v.problem and not v.other_format]
        if finding.operator_problem is not None and not finding.operator_other_format:
            bad.append(f"{self._base}/{finding.query}/{finding.operator}/{OPERATOR}")
        moved = []
        for path in bad:
            if self._fs.get_file_info(path).type is pafs.FileType.File:
                self._fs.move(path, path + DAMAGED)
                moved.append(path + DAMAGED)
        return moved

    def _operator(self, query: str, operator: str) -> tuple[str | None, bool]:
        """Returns what is wrong with ``operator.json``, and whether it is only of another format."""
        try:
            found = self._read_operator(query, operator)
        except StateError as error:
            return str(error), isinstance(error, FormatError)
        if found is None:
            return None, False  # the query writes it when it opens a shard
        owner = f"{found['query']}/{found['operator']}"
        is_own = owner == f"{query}/{operator.partition('/')[0]}"
        return None if is_own else f"{query}/{operator}/{OPERATOR}: it belongs to {owner}", False

    def _version(self, shard: tuple[str, str, str], folder: str, token: str) -> Version:
        path = f"{folder}/manifests/{token}{MANIFEST}"
        try:
            with self._fs.open_input_stream(path) as stream:
                manifest = load(stream.read(), PurePosixPath(path).name)
        except (StateError, OSError) as error:
            return Version(token, None, str(error), other_format=isinstance(error, FormatError))
        if manifest.token != token:
            return Version(token, None, f"it is the manifest of version {manifest.token}")
        owner = manifest.identity
        name = f"{owner.query}/{owner.operator}/shard-{owner.shard:05d}"
        if name != f"{shard[0]}/{shard[1].partition('/')[0]}/{shard[2]}":
            return Version(token, None, f"it belongs to another shard, {name}")
        try:
            runs_of(manifest)
        except CorruptState as error:
            return Version(token, None, str(error))
        return Version(token, manifest, None)

    def _file(
        self, folder: str, file: FileEntry, size: int | None, contents: bool, progress: Callable[[int], None] | None
    ) -> str | None:
        if size is None:
            return "it is missing"
        if size != file.size_bytes:
            return f"it has {size} bytes instead of the {file.size_bytes} that were written"
        if not contents:
            return None
        crc = 0
        try:
            if file.name.endswith(HANDED):
                with self._fs.open_input_file(f"{folder}/files/{file.name}") as source:
                    found = damage(source.read(), file.crc)
                if progress is not None:
                    progress(file.size_bytes)
                return found
            with self._fs.open_input_stream(f"{folder}/files/{file.name}") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    crc = crc32(chunk, crc)
                    if progress is not None:
                        progress(len(chunk))
        except (OSError, pa.ArrowException) as error:
            return f"it cannot be read: {error}"
        return None if crc == file.crc else "its checksum is not that of the bytes that were written"

    def _folders(self, path: str) -> list[str]:
        infos = self._fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        folders = [i.base_name for i in infos if i.type is pafs.FileType.Directory]
        return sorted(name for name in folders if not name.startswith("."))

    def _list(self, path: str) -> list[tuple[str, int]]:
        infos: list[Any] = self._fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return sorted((i.base_name, i.size) for i in infos if i.type is pafs.FileType.File)


def plan_repair(query: str, findings: list[ShardFinding]) -> Repair:
    """Finds the newest batch after which every shard of the query has a whole version.

    Only Spark's checkpoint says which attempt of a batch won. So all of a shard's versions of that batch must be whole.
    A shard without versions of that batch counts with its last batch before. A shard whose first version is younger had
    no state then.
    """
    findings = [f for f in findings if f.shard]
    batches = sorted({v.batch for f in findings for v in f.versions})
    last = batches[-1] if batches else -1
    for batch in reversed(batches):
        if all(_has_state_after(finding, batch) for finding in findings):
            return Repair(query, batch, last)
    return Repair(query, None, last)


def _has_state_after(finding: ShardFinding, batch: int) -> bool:
    before = [v for v in finding.versions if v.batch <= batch]
    if not before:
        first = [v.manifest for v in finding.versions if v.manifest is not None]
        return any(m.is_first for m in first)
    newest = max(v.batch for v in before)
    return all(v.problem is None for v in before if v.batch == newest)


def by_query(findings: list[ShardFinding]) -> Iterator[tuple[str, list[ShardFinding]]]:
    """Groups findings by query and lineage, because a lineage is set back without the others."""
    for query, lineage in sorted({(f.query, f.lineage) for f in findings}):
        yield query, [f for f in findings if (f.query, f.lineage) == (query, lineage)]
