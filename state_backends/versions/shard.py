"""Versions of a shard: open by token, work, commit (docs/state-format.md).

A version is a manifest and the files that it names, all immutable. Spark keeps the token of the current version, so
Spark decides which attempt won. Everything that an attempt does before its commit can be undone: see
:class:`state_backends.store.attempt.StoreAttempt`, on which each attempt works.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rocksdict import Cache

from aion.core.ingest.block import Block
from aion.errors import (
    AttemptSuperseded,
    CorruptBlock,
    CorruptState,
    ForeignState,
    FormatError,
    RequestError,
    StateError,
)
from state_backends.files.names import HANDED, MANIFEST, OPERATOR, Doomed, SstFile
from state_backends.files.storage import Storage
from state_backends.store.attempt import StoreAttempt
from state_backends.store.counting import only_counts
from state_backends.store.keyed.run_files import RunFiles
from state_backends.store.keyed.store import KeyedStore
from state_backends.store.ledger import NO_FILE
from state_backends.store.p_bucket import PBucket
from state_backends.store.protocol import BlockStore, Only, StoredBlock, StoreStats
from state_backends.versions.lineage import Elsewhere, Home, take, take_beside
from state_backends.versions.manifest import (
    FileEntry,
    Identity,
    Manifest,
    Past,
    check_operator,
    check_owner,
    dump,
    dump_operator,
    load,
    load_operator,
    runs_of,
)
from state_backends.versions.retention import Retention, batch_of, floor_of

StoreFactory = Callable[[PBucket], BlockStore]
KeyedFactory = Callable[[RunFiles], KeyedStore]
T = TypeVar("T")
log = logging.getLogger(__name__)


class Shard:
    """One shard on its host: the current version and, between open and commit, the attempt that works on it.

    The caller makes one call at a time, except for reads. ``storage`` keeps the versions. The folder ``live`` has
    RocksDB's own files, and new files. ``retain``: how many batches Spark keeps. ``home`` finds the storage of the
    lineage of an identity (state_backends/versions/lineage.py); it is called when the shard is rebuilt from a version.
    None: the lineage is in ``storage``. ``make_keyed``: makes the store of its keyed values. None: it cannot have any.
    """

    def __init__(
        self,
        identity: Identity,
        storage: Storage,
        live: Path,
        make_store: StoreFactory,
        *,
        retain: int,
        home: Callable[[Identity], Home] | None = None,
        cache: Cache | None = None,
        make_keyed: KeyedFactory | None = None,
    ) -> None:
        self.identity = identity
        self.storage = storage
        self._live = live
        self._make_store = make_store
        self._make_keyed = make_keyed
        # One more than Spark keeps batches: the newest version may belong to a batch that is not complete yet.
        self._keep = retain + 1
        self._home = home
        self._elsewhere: Callable[[str], Elsewhere | None] = lambda token: None
        self._cache = cache
        self._attempt: StoreAttempt | None = None
        self._p_bucket: PBucket | None = None
        self._keyed: KeyedStore | None = None
        self._current: Manifest | None = None
        self._files: dict[int, FileEntry] = {}
        self._handed: dict[str, FileEntry] = {}  # by children, and named by the current version
        self._at_work: str | None = None
        self._new_token = ""
        self._written: list[SstFile] = []  # by the attempt at work or by merging, and named by no manifest yet
        self._published: list[str] = []  # by the attempt at work
        self._retention = Retention(self._keep)
        self.rebuilds = 0
        self._stats_lock = threading.Lock()
        self._closed_stats = StoreStats()  # counts of the stores that were closed

    # -- an attempt ---------------------------------------------------------------------------------------

    def open(
        self, token: str | None, attempt: str, identity: Identity, makes: str | None = None
    ) -> dict[str, Any] | None:
        """Starts an attempt on the version ``token``; returns the version's snapshot. None: there is no version yet.

        Undoes what another attempt did without committing it. ``makes``: the token of the version that this attempt
        will commit; by default the name of the attempt. Raises CorruptState, FormatError, ForeignState.
        """
        held = self._current.token if self._current else None
        work = self._attempt
        if work is None or held != token:
            work = self._rebuild(token, attempt, identity)
        elif self._at_work is not None:
            self._undo()
        if self._current is not None:
            check_owner(self._current, identity)
        self.identity = identity
        self._at_work, self._new_token = attempt, makes or attempt
        snapshot = self._current.snapshot if self._current else None
        work.begin(snapshot["next_seq"] if snapshot else 0)
        assert self._p_bucket is not None
        self._p_bucket.tag = attempt
        return snapshot

    def append(self, attempt: str, blocks: Sequence[tuple[int, bool, Block]]) -> None:
        """Keeps (seq, late, block). Raises RequestError, and keeps none, unless the numbers grow."""
        self._working(attempt).append(blocks)

    def read(
        self, attempt: str, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None
    ) -> Iterator[StoredBlock]:
        return self._naming_the_version(self._working(attempt).read(slices, blocking=blocking, only=only))

    def _naming_the_version(self, found: Iterator[T]) -> Iterator[T]:
        """Yields what was found. Adds the version to the error for a damaged block or file."""
        try:
            yield from found
        except (CorruptBlock, CorruptState) as error:
            version = f"version {self.token} in {self.storage.where(self.token)}" if self.token else "no version yet"
            raise type(error)(f"{error}; {version}") from error

    def prestage(self, attempt: str, slices: Sequence[int], only: Only | None = None) -> None:
        self._working(attempt).prestage(slices, only)

    def release(self, attempt: str, destage: Sequence[int] = (), purge: Sequence[int] = ()) -> None:
        """Memory may let go of the slices ``destage``. The slices ``purge`` go with the commit."""
        self._working(attempt).release(destage, purge)

    def replace(self, attempt: str, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        """See :meth:`BlockStore.replace`. This attempt sees the change at once, others after the commit."""
        self._working(attempt).replace(spans, below)

    def get(self, attempt: str, keys: Sequence[bytes]) -> Iterator[list[bytes | None]]:
        """The value of each key, None if there is none, in pages. See KeyedAttempt for this and the next two."""
        return self._naming_the_version(self._keyed_of(attempt).get(keys))

    def put(self, attempt: str, values: Iterable[tuple[bytes, bytes | None, int | None]]) -> None:
        self._keyed_of(attempt).put(values)

    def scan(self, attempt: str, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        return self._naming_the_version(self._keyed_of(attempt).scan(begin, end))

    @property
    def on_disk(self) -> bool:
        """See :class:`state_backends.store.keyed.protocol.KeyedAttempt`."""
        return self._keyed is not None and self._keyed.on_disk

    def expect(self, keys: Sequence[bytes]) -> bool:
        """See :meth:`KeyedStore.expect`. The next attempt may begin meanwhile."""
        keyed = self._keyed
        return keyed is not None and keyed.expect(keys)

    def commit(self, attempt: str, snapshot: dict[str, Any]) -> str:
        """Makes a new version of what the attempt did, whole or not at all; returns its token.

        Raises RequestError if ``snapshot["next_seq"]`` is the number of a block that exists already.
        """
        work = self._working(attempt)
        if snapshot["next_seq"] <= work.last_seq:
            raise RequestError(f"commit: snapshot.next_seq must be above block {work.last_seq}, which exists already")
        store, dead = work.store, frozenset(work.purging)
        assert self._p_bucket is not None
        self._written += store.persist(skip=dead)
        # Live blocks by file number, then slice.
        counts = {no: {s: 0 if s in dead else n for s, n in slices.items()} for no, slices in store.files().items()}
        live = {no for no, slices in counts.items() if any(slices.values())}
        # A purged slice never comes back. So a slice is purged if files hold it and none has a live block of it.
        alive = {s for no in live for s, n in counts[no].items() if n}
        purged = {s for no in live for s in counts[no]} - alive
        runs = self._keyed.persist() if self._keyed is not None else []
        new = [f for f in self._written if f.file_no in live]
        new += [run for run in runs if run.file_no not in self._files]
        self._unpublish()
        self._published = self._p_bucket.publish(new, attempt, self.storage.files)
        entries = self._files | {f.file_no: _entry(f, name) for f, name in zip(new, self._published, strict=True)}
        handed = self._adopted(store.handed(skip=dead))
        files = (*(entries[no] for no in sorted(live.union(run.file_no for run in runs))), *handed)
        past = self._retention.following(self._current, files)
        manifest = Manifest(
            token=self._new_token,
            parent=self._current.token if self._current else None,
            version=self._current.version + 1 if self._current else 1,
            identity=self.identity,
            files=files,
            purged=tuple(sorted(purged)),
            superseded=tuple(store.replaced(skip=purged)),
            next_file_no=self._p_bucket.next_file_no,
            snapshot=snapshot,
            history=self._retention.history(past),
            runs=tuple(run.file_no for run in runs),
        )
        # First all files, then the manifest that names them: so a version exists whole or not at all.
        self.storage.publish(self._published, [f.name for f in files])
        self.storage.save(manifest.token, dump(manifest))
        work.end()
        before = self._current.files if self._current else ()
        self.storage.release({f.name for f in before} - {f.name for f in files})
        for file in self._written:
            if file.file_no not in live:
                self._p_bucket.delete(file)
        self._keep_files(manifest)
        if self._keyed is not None:
            self._keyed.end([self._file(run) for run in runs_of(manifest)], snapshot.get("expected_ms"))
        self._at_work = None
        self._written, self._published = [], []
        self._expire(manifest, past, batch_of(attempt))
        return manifest.token

    def abort(self, attempt: str) -> None:
        if self._at_work == attempt and self._attempt is not None:
            self._undo()
            self._at_work = None

    def close(self) -> None:
        with self._stats_lock:
            stores = self._stores()
            self._attempt = self._keyed = None  # even if closing one fails, it is not used again
            for store in stores:
                self._closed_stats.add(only_counts(store.stats()))
        try:
            for store in stores:
                store.close()
        finally:
            shutil.rmtree(self._live, ignore_errors=True)

    def stats(self) -> StoreStats:
        """Statistics of the store. Counts include those of the stores that this shard had before."""
        with self._stats_lock:
            stats = StoreStats()
            stats.add(self._closed_stats)
            for store in self._stores():
                stats.add(store.stats())
            return stats

    def _stores(self) -> list[BlockStore | KeyedStore]:
        return [store for store in (self.store, self._keyed) if store is not None]

    @property
    def token(self) -> str | None:
        """The current version. It does not contain what the attempt has done so far."""
        return self._current.token if self._current else None

    @property
    def store(self) -> BlockStore | None:
        return self._attempt.store if self._attempt is not None else None

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """The operator's state as of the current version."""
        return self._current.snapshot if self._current else None

    def _undo(self) -> None:
        """Forgets everything that the attempt at work did."""
        assert self._attempt is not None and self._p_bucket is not None
        self._attempt.undo()
        if self._keyed is not None:
            self._keyed.undo()
        # A merged file holds blocks of the version, so the store keeps it.
        live = self._attempt.store.files()
        for file in self._written:
            if file.file_no not in live:
                self._p_bucket.delete(file)
        self._written = [f for f in self._written if f.file_no in live]
        self._unpublish()

    def _unpublish(self) -> None:
        """Deletes what a failed commit published. No version names it, or only a version that Spark does not use."""
        published, self._published = self._published, []
        self._retention.retry(self.storage.delete(Doomed([], published)))

    # -- versions -----------------------------------------------------------------------------------------

    def _working(self, attempt: str) -> StoreAttempt:
        if self._at_work != attempt or self._attempt is None:
            raise AttemptSuperseded(
                f"shard {self.identity.shard}: attempt {attempt} does not work on it (any more); "
                f"{self._at_work or 'none'} does"
            )
        return self._attempt

    def _keyed_of(self, attempt: str) -> KeyedStore:
        self._working(attempt)
        if self._keyed is None:
            raise StateError(f"shard {self.identity.shard} has no store for keyed values")
        return self._keyed

    def _rebuild(self, token: str | None, attempt: str, identity: Identity) -> StoreAttempt:
        self.close()
        self._current, self._files, self._handed = None, {}, {}
        self._at_work, self._written, self._published = None, [], []
        self._retention = Retention(self._keep)
        self.rebuilds += 1
        if self._home is not None:
            self.storage, self._elsewhere = self._home(identity)
        # New files stay in a folder of this host until a version names them, so that no other host deletes them.
        p_bucket = PBucket(self._live / "new", self._live / "rocksdb", durable=False, cache=self._cache)
        p_bucket.ahead = self.storage.read_ahead
        store = self._make_store(p_bucket)
        keyed = self._make_keyed(RunFiles(p_bucket, self._live / "keyed")) if self._make_keyed is not None else None
        stores: list[BlockStore | KeyedStore] = [store] if keyed is None else [store, keyed]
        try:
            manifest = None if token is None else self._find(token, attempt, identity)
            self._claim(attempt, identity, begins=manifest is None)
            if manifest is not None:
                self._keep_files(manifest)
            self.storage.fetch([self._file(f) for f in self._files.values()])
            if manifest is not None:
                self.storage.publish([], list(self._handed))
                blocks = [self._file(f) for no, f in self._files.items() if no not in manifest.runs]
                store.restore(blocks, frozenset(manifest.purged), manifest.superseded)
                if keyed is not None:
                    keyed.restore([self._file(run) for run in runs_of(manifest)])
                elif manifest.runs:
                    raise StateError(f"shard {self.identity.shard} has no store for the keyed values of its version")
                p_bucket.next_file_no = max(p_bucket.next_file_no, manifest.next_file_no)
            past, floor = self._older(manifest)
            manifests, names = self.storage.listing()
            self._retention = Retention(self._keep, past, floor=floor, manifests=manifests, files=names)
        except BaseException as error:
            for made in stores:
                made.close()
            if isinstance(error, CorruptState):
                raise CorruptState(f"version {token} in {self.storage.where(token or '')}: {error}") from error
            raise
        self._p_bucket, self._attempt, self._keyed = p_bucket, StoreAttempt(store), keyed
        return self._attempt

    def _find(self, token: str, attempt: str, identity: Identity) -> Manifest:
        """The version. Copies it from another lineage if it is there. Raises CorruptState, ForeignState."""
        try:
            manifest = self._load(token)
        except FileNotFoundError:
            other = self._elsewhere(token)
            if other is None:
                raise CorruptState(self._not_found(token)) from None
            manifest = self._load(token, other.storage)
            check_owner(manifest, identity)
            take_beside(other, batch_of(attempt))
            # Last: if anything fails before, the next attempt takes all of it again.
            manifest = take(manifest, other.storage, self.storage)
        check_owner(manifest, identity)
        return manifest

    def _not_found(self, token: str) -> str:
        """The message for a version that Spark asks for and that does not exist. It names the likely reason."""
        text = (
            f"Spark asks for version {token} of shard {self.identity.shard} of operator {self.identity.operator!r}, "
            f"but {self.storage.where(token)} does not exist"
        )
        there = [int(n[:10]) for n in self.storage.listing()[0] if n.endswith(MANIFEST) and n[:10].isdecimal()]
        if not there and self._home is not None:
            return (
                f"{text}, and no other lineage of the query has this version. Was the checkpoint copied long ago, or "
                "was its state deleted?"
            )
        batch = token.partition("-")[0]
        if there and batch.isdecimal() and int(batch) < min(there):
            text += (
                f". The checkpoint is at batch {int(batch)}, but only batches {min(there)} to {max(there)} are kept "
                "here: was it restored from a backup, or copied long ago? State is kept for "
                f"spark.sql.streaming.minBatchesToRetain batches, {self._keep - 1}"
            )
        elif there:
            text += (
                ". If the query uses the result of this operator twice, its state was written twice: use it once, and "
                "take it apart in foreachBatch after batch.persist()"
            )
        return text

    def _claim(self, attempt: str, identity: Identity, *, begins: bool) -> None:
        """Compares this shard with ``operator.json``, which the operator's shards share. Writes it if it is missing.

        ``begins``: the shard has no version yet. Until the first batch is complete, the definition may still change.
        Raises ForeignState.
        """
        found, own = self.storage.owner(), dump_operator(identity)
        if found is None:
            found = self.storage.claim(own, first=True)
        if found == own:
            return
        where = f"{OPERATOR} of operator {identity.operator!r}"
        if begins and batch_of(attempt) == 0:
            self.storage.claim(own, first=False)
            return
        operator = load_operator(found, where)
        check_operator(operator, identity, f"the state of {where}")
        if operator["checkpoint"] != identity.checkpoint:
            raise ForeignState(
                f"the state of {where} is used by the query with the checkpoint {operator['checkpoint']}, not by this "
                f"one with {identity.checkpoint}; start again, and it gets a folder of its own"
            )
        self.storage.claim(own, first=False)

    def _load(self, token: str, storage: Storage | None = None) -> Manifest:
        """Raises FileNotFoundError, CorruptState, FormatError."""
        storage = storage or self.storage
        where = storage.where(token)
        manifest = load(storage.load(token), where.rpartition("/")[2])
        if manifest.token != token:
            raise CorruptState(f"{where} is the manifest of another version, {manifest.token}")
        return manifest

    def _older(self, manifest: Manifest | None) -> tuple[list[Past], int]:
        """The kept versions before this one, oldest first, and a floor: see :func:`floor_of`.

        The manifest lists them all, unless the history is longer than one manifest lists, or more versions are kept now
        than when it was written. Then the oldest version that it lists names those before.
        """
        if manifest is None:
            return [], -1
        past, first = list(manifest.history), manifest
        while len(past) < self._keep - 1 and first.history:
            try:
                first = self._load(first.history[0].token)
                past = [*first.history, *past]
            except FileNotFoundError:
                break  # deleted, and so are all before it
            except (CorruptState, FormatError) as error:
                log.warning("an older version of shard %d cannot be read: %s", self.identity.shard, error)
                return past, floor_of(past) if past else batch_of(manifest.token)
        return past[-(self._keep - 1) :], -1

    def _keep_files(self, manifest: Manifest) -> None:
        self._current = manifest
        self._files = {f.file_no: f for f in manifest.files if not f.name.endswith(HANDED)}
        self._handed = {f.name: f for f in manifest.files if f.name.endswith(HANDED)}

    def _adopted(self, names: set[str]) -> list[FileEntry]:
        """The files of children that a new version names. Links those that the current version does not name."""
        new = sorted(names - self._handed.keys())
        # If this commit fails, another attempt's version may need these links. So they are not deleted at once: a
        # commit of a later batch deletes them, unless a version of its history names them.
        self._retention.note(new)
        entries = dict(self._handed)
        for name, footer in zip(new, self.storage.adopt(new), strict=True):
            entries[name] = FileEntry(NO_FILE, name, footer.size_bytes, footer.crc, 0, len(footer.bodies))
        return [entries[name] for name in sorted(names)]

    def _file(self, entry: FileEntry) -> SstFile:
        return entry.in_folder(str(self.storage.files))

    # -- what is kept, and what is merged -----------------------------------------------------------------

    def _expire(self, manifest: Manifest, past: list[Past], batch: int) -> None:
        """Deletes what nobody can ask for, and starts merging. The version exists already, so nothing is raised."""
        assert self.store is not None
        try:
            self._retention.retry(self.storage.delete(self._retention.committed(manifest, past, batch)))
            held, disk = self._retention.held_bytes, self._retention.disk_bytes
            self.store.compact(self._files, held_bytes=held, disk_bytes=disk)
            if self._keyed is not None:
                self._keyed.compact()
        except (OSError, StateError) as error:
            log.warning(
                "old files of shard %d could not be deleted now; the next commit tries again: %s",
                self.identity.shard,
                error,
            )


def _entry(file: SstFile, name: str) -> FileEntry:
    return FileEntry(file.file_no, name, file.size_bytes, file.crc, file.index_crc, file.blocks)
