"""Versions of a shard: open by token, work, commit (DESIGN section 6).

A version is a manifest and the files it names, all immutable. Spark keeps the token of the current one, so
Spark decides which attempt won. What an attempt did before its commit can be undone: blocks carry numbers
that only grow, and purges wait for the commit.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rocksdict import Cache

from aion.errors import CorruptState, FormatError, SessionSuperseded, StateError
from state_backends.block import Block
from state_backends.faults import disk_error, disk_errors
from state_backends.manifest import FileEntry, Identity, Manifest, check_owner, dump, load
from state_backends.merging import delete
from state_backends.p_bucket import PBucket, sync
from state_backends.retention import Doomed, Retention
from state_backends.store import BlockStore, SstFile, StoredBlock

log = logging.getLogger(__name__)
StoreFactory = Callable[[PBucket], BlockStore]


class Shard:
    """One shard on its host: the version it holds and, between open and commit, the attempt at work on it.

    Calls are serialised by the caller. ``folder`` keeps the versions, ``live`` RocksDB's own files.
    """

    def __init__(
        self,
        identity: Identity,
        folder: Path,
        live: Path,
        make_store: StoreFactory,
        *,
        retain: int,
        cache: Cache | None = None,
    ) -> None:
        self.identity = identity
        self.folder = folder
        self._live = live
        self._make_store = make_store
        self._retain = retain
        self._cache = cache
        self._store: BlockStore | None = None
        self._p: PBucket | None = None
        self._held: Manifest | None = None
        self._files: dict[int, SstFile] = {}
        self._attempt: str | None = None
        self._first_seq = 0
        self._purging: list[int] = []
        self._written: list[SstFile] = []  # by the attempt at work or by merging, and named by no manifest yet
        self._retention: Retention | None = None  # known from the first commit after a rebuild on
        self.rebuilds = 0

    # -- an attempt ---------------------------------------------------------------------------------------

    def open(self, token: str | None, attempt: str, identity: Identity) -> dict[str, Any] | None:
        """Starts an attempt on the version ``token`` (None: the very first); returns its snapshot.

        Whatever another attempt left uncommitted is undone. Raises CorruptState, FormatError, ForeignState.
        """
        held = self._held.token if self._held else None
        if self._store is None or held != token:
            self._rebuild(token, identity)
        elif self._attempt is not None:
            self._undo()
        if self._held is not None:
            check_owner(self._held, identity)
        self.identity = identity
        self._attempt = attempt
        self._purging = []
        snapshot = self._held.snapshot if self._held else None
        self._first_seq = snapshot["next_seq"] if snapshot else 0
        assert self._p is not None
        self._p.tag = attempt
        return snapshot

    def append(self, attempt: str, blocks: Sequence[tuple[int, bool, Block]]) -> None:
        store = self._working(attempt)
        for seq, late, block in blocks:
            store.append(seq, block, late=late)

    def read(self, attempt: str, slices: Sequence[int], *, blocking: bool = False) -> Iterator[StoredBlock]:
        return self._working(attempt).read(slices, blocking=blocking)

    def prestage(self, attempt: str, slices: Sequence[int]) -> None:
        self._working(attempt).prestage(slices)

    def destage(self, attempt: str, slices: Sequence[int]) -> None:
        self._working(attempt).destage(slices)

    def purge(self, attempt: str, slices: Sequence[int]) -> None:
        """Takes effect with the commit, so that an attempt that fails has purged nothing."""
        self._working(attempt)
        self._purging += slices

    def commit(self, attempt: str, snapshot: dict[str, Any]) -> None:
        """Makes the attempt the current version, whole or not at all; its token is the attempt's name."""
        store = self._working(attempt)
        dead = frozenset(self._purging)
        assert self._p is not None
        self._written += store.persist(skip=dead)
        known = self._files | {f.file_no: f for f in self._written}
        # Slices never come back, so a slice that a file holds without one live block is a purged one.
        holds = {no: {s: 0 if s in dead else n for s, n in slices.items()} for no, slices in store.files().items()}
        live = sorted(no for no, slices in holds.items() if any(slices.values()))
        manifest = Manifest(
            token=attempt,
            parent=self._held.token if self._held else None,
            version=self._held.version + 1 if self._held else 1,
            identity=self.identity,
            files=tuple(_entry(known[no]) for no in live),
            purged=tuple(sorted({s for no in live for s, n in holds[no].items() if not n})),
            next_file_no=self._p.next_file_no,
            snapshot=snapshot,
        )
        self._write(manifest)
        store.purge(list(dead))
        self._files = {no: known[no] for no in live}
        self._held = manifest
        self._attempt = None
        unnamed = [Path(f.path).name for f in self._written if f.file_no not in self._files]
        self._written = []
        self._expire(manifest, unnamed)

    def abort(self, attempt: str) -> None:
        if self._attempt == attempt and self._store is not None:
            self._undo()
            self._attempt = None

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def token(self) -> str | None:
        """The version that is held, without what the attempt at work did."""
        return self._held.token if self._held else None

    @property
    def store(self) -> BlockStore | None:
        return self._store

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """What the operator was at the last commit."""
        return self._held.snapshot if self._held else None

    def _undo(self) -> None:
        """Forgets everything that the attempt at work did."""
        assert self._store is not None
        self._store.rollback(self._first_seq)
        # What merging wrote holds blocks of the version: the store goes on with it.
        live = self._store.files()
        for file in self._written:
            if file.file_no not in live:
                delete(file)
        self._written = [f for f in self._written if f.file_no in live]

    # -- versions -----------------------------------------------------------------------------------------

    def _working(self, attempt: str) -> BlockStore:
        if self._attempt != attempt or self._store is None:
            raise SessionSuperseded(
                f"shard {self.identity.shard}: attempt {attempt} is not at work on it (any more); "
                f"{self._attempt or 'none'} is"
            )
        return self._store

    def _rebuild(self, token: str | None, identity: Identity) -> None:
        self.close()
        self._held, self._files, self._attempt, self._written, self._retention = None, {}, None, [], None
        self.rebuilds += 1
        p_bucket = PBucket(self.folder / "files", self._live, durable=True, cache=self._cache)
        store = self._make_store(p_bucket)
        try:
            if token is not None:
                manifest = self._load(token)
                check_owner(manifest, identity)
                self._files = {f.file_no: self._file(f) for f in manifest.files}
                store.restore(list(self._files.values()), frozenset(manifest.purged))
                p_bucket.next_file_no = max(p_bucket.next_file_no, manifest.next_file_no)
                self._held = manifest
        except BaseException:
            store.close()
            raise
        self._p, self._store = p_bucket, store

    def _load(self, token: str) -> Manifest:
        path = self._path(token)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CorruptState(
                f"version {token} of shard {self.identity.shard} of operator {self.identity.operator!r} "
                f"is what Spark asks for, but {path} does not exist"
            ) from None
        except OSError as error:
            raise disk_error("reading a version", path.parent, error) from error
        return load(data, path.name)

    def _write(self, manifest: Manifest) -> None:
        path = self._path(manifest.token)
        part = path.with_suffix(".part")
        try:
            with disk_errors("writing a version", path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                with part.open("wb") as out:
                    out.write(dump(manifest))
                    out.flush()
                    os.fsync(out.fileno())
                part.rename(path)
                sync(path.parent)
        except BaseException:
            for left in (part, path):  # a version that its writer was told is none must not look like one
                with contextlib.suppress(OSError):
                    left.unlink()
            raise

    def _path(self, token: str) -> Path:
        return self.folder / "manifests" / f"{token}.json"

    def _file(self, entry: FileEntry) -> SstFile:
        path = self.folder / "files" / entry.name
        return SstFile(entry.file_no, str(path), entry.size_bytes, entry.index_crc, entry.blocks)

    # -- what is kept, and what is merged -----------------------------------------------------------------

    def _expire(self, manifest: Manifest, unnamed: Sequence[str]) -> None:
        """Deletes what nobody can ask for any more, and has the rest merged. The version is made: nothing raises."""
        assert self._p is not None and self._store is not None
        try:
            self._delete(Doomed([], list(unnamed)))
            if self._retention is None:
                self._retention = Retention(self._retain, self._versions_before(manifest))
            else:
                self._delete(self._retention.committed(manifest, self._p.has))
            if self._retention.sweep_due:
                self._delete(self._sweep(self._retention))
            held, disk = self._retention.held_bytes, self._retention.disk_bytes
            self._store.compact(self._files, held_bytes=held, disk_bytes=disk)
        except (OSError, StateError) as error:
            log.warning("what shard %d does not need is left for later: %s", self.identity.shard, error)

    def _versions_before(self, manifest: Manifest) -> list[Manifest]:
        """The manifest and those it came from, as far back as they are still there and whole, oldest first."""
        chain = [manifest]
        while chain[-1].parent and len(chain) < self._retain:
            try:
                chain.append(self._load(chain[-1].parent))
            except (CorruptState, FormatError):
                break  # nobody asks for it now; whoever does will be told
        return chain[::-1]

    def _sweep(self, retention: Retention) -> Doomed:
        """Looks through the folder for what nobody told of: other attempts, and what crashes left."""
        assert self._p is not None
        manifests = {path.name: path for path in (self.folder / "manifests").glob("*")}
        versions: dict[str, int | None] = {}
        for name in retention.unknown(manifests):
            try:
                versions[name] = load(manifests[name].read_bytes(), name).version
            except (CorruptState, FormatError, FileNotFoundError):
                versions[name] = None
        return retention.sweep(versions, [p.name for p in (self.folder / "files").glob("*")], self._p.has)

    def _delete(self, doomed: Doomed) -> None:
        """Deletes; what the disk does not let go is tried again after the next commit."""
        left = Doomed([], [])
        for folder, names, kept in (
            ("manifests", doomed.manifests, left.manifests),
            ("files", doomed.files, left.files),
        ):
            for name in names:
                try:
                    (self.folder / folder / name).unlink(missing_ok=True)
                except OSError as error:
                    log.warning("cannot delete %s in %s; it is tried again: %s", name, self.folder / folder, error)
                    kept.append(name)
        if self._retention is not None:
            self._retention.spared(left)


def _entry(file: SstFile) -> FileEntry:
    return FileEntry(file.file_no, Path(file.path).name, file.size_bytes, file.index_crc, file.blocks)
