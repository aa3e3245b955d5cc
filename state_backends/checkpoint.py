"""Versions of a shard: open by token, work, commit (docs/state-format.md).

A version is a manifest and the files it names, all immutable. Spark keeps the token of the current one, so
Spark decides which attempt won. What an attempt did before its commit can be undone: blocks carry numbers
that only grow, and purges wait for the commit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rocksdict import Cache

from aion.errors import CorruptBlock, CorruptState, FormatError, SessionSuperseded, StateError
from state_backends.block import Block
from state_backends.counting import only_counts
from state_backends.depot import MANIFEST, OPERATOR, Depot
from state_backends.manifest import (
    FileEntry,
    Identity,
    Manifest,
    check_operator,
    check_owner,
    dump,
    dump_operator,
    load,
    load_operator,
)
from state_backends.p_bucket import PBucket
from state_backends.retention import Doomed, Retention
from state_backends.store import BlockStore, Only, SstFile, StoredBlock, StoreStats

StoreFactory = Callable[[PBucket], BlockStore]
log = logging.getLogger(__name__)


class Shard:
    """One shard on its host: the version it holds and, between open and commit, the attempt at work on it.

    Calls are serialised by the caller, except for reads. ``depot`` keeps the versions, ``live`` RocksDB's own files.
    """

    durable = True
    """Whether files are synced, and kept until no version names them."""

    def __init__(
        self,
        identity: Identity,
        depot: Depot,
        live: Path,
        make_store: StoreFactory,
        *,
        retain: int,
        cache: Cache | None = None,
    ) -> None:
        self.identity = identity
        self.depot = depot
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
        self._counting = threading.Lock()
        self._past = StoreStats()  # what the stores counted that are closed

    # -- an attempt ---------------------------------------------------------------------------------------

    def open(self, token: str | None, attempt: str, identity: Identity) -> dict[str, Any] | None:
        """Starts an attempt on the version ``token`` (None: the very first); returns its snapshot.

        Whatever another attempt left uncommitted is undone. Raises CorruptState, FormatError, ForeignState.
        """
        held = self._held.token if self._held else None
        if self._store is None or held != token:
            self._rebuild(token, attempt, identity)
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

    def read(
        self, attempt: str, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None
    ) -> Iterator[StoredBlock]:
        return self._told(self._working(attempt).read(slices, blocking=blocking, only=only))

    def _told(self, blocks: Iterator[StoredBlock]) -> Iterator[StoredBlock]:
        """The blocks; whoever meets a damaged one learns of which version it is."""
        try:
            yield from blocks
        except CorruptBlock as error:
            version = f"version {self.token} in {self.depot.where(self.token)}" if self.token else "no version yet"
            raise CorruptBlock(f"{error}; {version}") from error

    def prestage(self, attempt: str, slices: Sequence[int], only: Only | None = None) -> None:
        self._working(attempt).prestage(slices, only)

    def destage(self, attempt: str, slices: Sequence[int]) -> None:
        self._working(attempt).destage(slices)

    def purge(self, attempt: str, slices: Sequence[int]) -> None:
        """Takes effect with the commit, so that an attempt that fails has purged nothing."""
        self._working(attempt)
        self._purging += slices

    def supersede(self, attempt: str, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        """Blocks that the attempt reads no more, since others stand for them; nobody does once it is committed."""
        self._working(attempt).supersede(spans, below)

    def commit(self, attempt: str, snapshot: dict[str, Any], token: str | None = None) -> None:
        """Makes the attempt the current version, whole or not at all; its token is the attempt's name, if not given."""
        store = self._working(attempt)
        dead = frozenset(self._purging)
        assert self._p is not None
        self._written += store.persist(skip=dead)
        known = self._files | {f.file_no: f for f in self._written}
        holds = {no: {s: 0 if s in dead else n for s, n in slices.items()} for no, slices in store.files().items()}
        live = {no for no, slices in holds.items() if any(slices.values())}
        # Slices never come back, so a slice that files hold without one live block in any of them is a purged one.
        alive = {s for no in live for s, n in holds[no].items() if n}
        purged = {s for no in live for s in holds[no]} - alive
        manifest = Manifest(
            token=token or attempt,
            parent=self._held.token if self._held else None,
            version=self._held.version + 1 if self._held else 1,
            identity=self.identity,
            files=tuple(_entry(known[no]) for no in sorted(live)),
            purged=tuple(sorted(purged)),
            superseded=tuple(store.superseded(skip=purged)),
            next_file_no=self._p.next_file_no,
            snapshot=snapshot,
        )
        # First all files, then the manifest that names them: a version is there whole or not at all.
        self.depot.publish([f.name for f in self._written if f.file_no in live])
        self.depot.save(manifest.token, dump(manifest))
        store.purge(list(dead))
        store.drop_superseded()
        self.depot.release([f.name for no, f in known.items() if no not in live])
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
        with self._counting:
            store, self._store = self._store, None  # whatever closing it says, it is not used again
            if store is not None:
                self._past.add(only_counts(store.stats()))
        if store is not None:
            store.close()

    def stats(self) -> StoreStats:
        """Of the store; what is counted goes on from one store to the next."""
        with self._counting:
            stats = StoreStats()
            stats.add(self._past)
            if self._store is not None:
                stats.add(self._store.stats())
            return stats

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
                with contextlib.suppress(OSError):  # then it is an orphan, which retention finds
                    self.depot.delete(file.name)
        self._written = [f for f in self._written if f.file_no in live]

    # -- versions -----------------------------------------------------------------------------------------

    def _working(self, attempt: str) -> BlockStore:
        if self._attempt != attempt or self._store is None:
            raise SessionSuperseded(
                f"shard {self.identity.shard}: attempt {attempt} is not at work on it (any more); "
                f"{self._attempt or 'none'} is"
            )
        return self._store

    def _rebuild(self, token: str | None, attempt: str, identity: Identity) -> None:
        self.close()
        self._held, self._files, self._attempt, self._written, self._retention = None, {}, None, [], None
        self.rebuilds += 1
        p_bucket = PBucket(self.depot.files, self._live, durable=self.durable, cache=self._cache)
        store = self._make_store(p_bucket)
        try:
            if token is None:
                self.depot.fetch([])
                self._claim(attempt, identity)
            else:
                manifest = self._load(token)
                check_owner(manifest, identity)
                self._files = {f.file_no: self._file(f) for f in manifest.files}
                self.depot.fetch(list(self._files.values()))
                store.restore(list(self._files.values()), frozenset(manifest.purged), manifest.superseded)
                p_bucket.next_file_no = max(p_bucket.next_file_no, manifest.next_file_no)
                self._held = manifest
        except CorruptState as error:
            store.close()
            raise CorruptState(f"version {token} in {self.depot.where(token or '')}: {error}") from error
        except BaseException:
            store.close()
            raise
        self._p, self._store = p_bucket, store

    def _claim(self, attempt: str, identity: Identity) -> None:
        """A shard without a version asks the file that the operator's shards share whether all is as it was.

        Until the first batch has come through nothing counts yet, and the definition may still change.
        """
        batch = attempt.partition("-")[0]
        found, mine = self.depot.owner(), dump_operator(identity)
        if found is None or (batch.isdecimal() and not int(batch)):
            if found != mine:
                self.depot.claim(mine)
        else:
            name = f"{OPERATOR} of operator {identity.operator!r}"
            check_operator(load_operator(found, name), identity, f"the state of {name}")

    def _load(self, token: str) -> Manifest:
        where = self.depot.where(token)
        try:
            manifest = load(self.depot.load(token), where.rpartition("/")[2])
            if manifest.token != token:
                raise CorruptState(f"{where} is the manifest of another version, {manifest.token}")
            return manifest
        except FileNotFoundError:
            raise CorruptState(
                f"version {token} of shard {self.identity.shard} of operator {self.identity.operator!r} "
                f"is what Spark asks for, but {where} does not exist"
            ) from None

    def _file(self, entry: FileEntry) -> SstFile:
        path = self.depot.files / entry.name
        return SstFile(entry.file_no, str(path), entry.size_bytes, entry.crc, entry.index_crc, entry.blocks)

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
        versions: dict[str, int | None] = {}
        for name in retention.unknown(self.depot.manifests()):
            try:
                versions[name] = load(self.depot.load(name.removesuffix(MANIFEST)), name).version
            except (CorruptState, FormatError, FileNotFoundError):
                versions[name] = None
        return retention.sweep(versions, self.depot.names(), self._p.has)

    def _delete(self, doomed: Doomed) -> None:
        """Deletes; what the disk does not let go is tried again after the next commit."""
        left = Doomed([], [])
        for delete, names, kept in (
            (self.depot.discard, doomed.manifests, left.manifests),
            (self.depot.delete, doomed.files, left.files),
        ):
            for name in names:
                try:
                    delete(name)
                except OSError as error:
                    log.warning("cannot delete %s; it is tried again: %s", name, error)
                    kept.append(name)
        if self._retention is not None:
            self._retention.spared(left)


def _entry(file: SstFile) -> FileEntry:
    return FileEntry(file.file_no, file.name, file.size_bytes, file.crc, file.index_crc, file.blocks)
