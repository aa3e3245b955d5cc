"""Versions of a shard: open by token, work, commit (DESIGN section 6).

A version is a manifest and the files it names, all immutable. Spark keeps the token of the current one, so
Spark decides which attempt won. What an attempt did before its commit can be undone: blocks carry numbers
that only grow, and purges wait for the commit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rocksdict import Cache

from aion.errors import CorruptState, FormatError, SessionSuperseded
from state_backends.block import Block
from state_backends.manifest import FileEntry, Identity, Manifest, check_owner, dump, load
from state_backends.p_bucket import PBucket, sync
from state_backends.store import BlockStore, SstFile, StoredBlock

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
        self._written: list[SstFile] = []  # by the attempt at work, and named by no manifest yet
        # Versions that may still be asked for, oldest first.
        self._retained: list[Manifest] = []
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

    def commit(self, attempt: str, snapshot: dict[str, Any], token: str | None = None) -> None:
        """Makes the attempt the current version, whole or not at all; its token is the attempt's name, if not given."""
        store = self._working(attempt)
        dead = frozenset(self._purging)
        assert self._p is not None
        self._written += store.persist(skip=dead)
        known = self._files | {f.file_no: f for f in self._written}
        # Slices never come back, so a slice that a file holds without one live block is a purged one.
        holds = {no: {s: 0 if s in dead else n for s, n in slices.items()} for no, slices in store.files().items()}
        live = sorted(no for no, slices in holds.items() if any(slices.values()))
        manifest = Manifest(
            token=token or attempt,
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
        self._retained.append(manifest)
        self._written = []
        self._expire()

    def abort(self, attempt: str) -> None:
        if self._attempt == attempt and self._store is not None:
            self._undo()
            self._attempt = None

    def close(self) -> None:
        store, self._store = self._store, None  # whatever closing it says, it is not used again
        if store is not None:
            store.close()

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
        for file in self._written:
            Path(file.path).unlink(missing_ok=True)
        self._written = []

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
        self._held, self._files, self._attempt, self._written, self._retained = None, {}, None, [], []
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
                self._retained = self._versions_before(manifest)
        except BaseException:
            store.close()
            raise
        self._p, self._store = p_bucket, store

    def _load(self, token: str) -> Manifest:
        path = self._path(token)
        try:
            return load(path.read_bytes(), path.name)
        except FileNotFoundError:
            raise CorruptState(
                f"version {token} of shard {self.identity.shard} of operator {self.identity.operator!r} "
                f"is what Spark asks for, but {path} does not exist"
            ) from None

    def _write(self, manifest: Manifest) -> None:
        path = self._path(manifest.token)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("wb") as out:
            out.write(dump(manifest))
            out.flush()
            os.fsync(out.fileno())
        part.rename(path)
        sync(path.parent)

    def _path(self, token: str) -> Path:
        return self.folder / "manifests" / f"{token}.json"

    def _file(self, entry: FileEntry) -> SstFile:
        path = self.folder / "files" / entry.name
        return SstFile(entry.file_no, str(path), entry.size_bytes, entry.index_crc, entry.blocks)

    def _versions_before(self, manifest: Manifest) -> list[Manifest]:
        """The manifest and those it came from, as far back as they are still there and whole, oldest first."""
        chain = [manifest]
        while chain[-1].parent and len(chain) < self._retain:
            try:
                chain.append(self._load(chain[-1].parent))
            except (CorruptState, FormatError):
                break  # nobody asks for it now; whoever does will be told
        return chain[::-1]

    def _expire(self) -> None:
        """Deletes what nobody can ask for any more: old versions, failed attempts, and files that only they needed.

        Spark has chosen the version that this one came from. So other versions as old as that one lost, and files of
        numbers that were given out before it belong to attempts that are over.
        """
        current = self._retained[-1]
        self._retained = self._retained[-self._retain :]
        kept = {m.token for m in self._retained}
        for path in (self.folder / "manifests").glob("*.json"):
            if path.stem in kept:
                continue
            try:
                version = load(path.read_bytes(), path.name).version
            except (CorruptState, FormatError, FileNotFoundError):
                continue  # of whatever it is the remains, it is not ours to judge
            if version < current.version:
                path.unlink(missing_ok=True)
        given_out = self._retained[-2].next_file_no if len(self._retained) > 1 else 0
        needed = {f.name for m in self._retained for f in m.files}
        for path in (self.folder / "files").glob("*.sst"):
            number = path.name.partition("-")[0]
            if path.name in needed or not number.isdecimal():
                continue
            if int(number) < given_out or path.stem.endswith(f"-{current.token}"):
                path.unlink(missing_ok=True)


def _entry(file: SstFile) -> FileEntry:
    return FileEntry(file.file_no, Path(file.path).name, file.size_bytes, file.index_crc, file.blocks)
