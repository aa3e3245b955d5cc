"""Versions of a shard: open by token, work, commit (docs/inside/versions.md).

A version is a manifest and the files that it names, all immutable. Spark keeps the token of the current version, so
Spark decides which attempt won. Everything that an attempt does before its commit can be undone: see
:class:`state_backends.store.attempt.StoreAttempt`, on which each attempt works.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rocksdict import Cache

from state_backends.backends import Stores
from state_backends.files.bodies import Places
from state_backends.files.faults import is_missing
from state_backends.files.names import HANDED, Doomed, SstFile
from state_backends.files.request_counts import Batch
from state_backends.files.requests import Requests
from state_backends.files.storage import Storage
from state_backends.format.block import Block
from state_backends.format.errors import (
    AttemptSuperseded,
    CorruptBlock,
    CorruptState,
    DiskError,
    RequestError,
    StateError,
)
from state_backends.format.ordered_map import Change
from state_backends.store.attempt import StoreAttempt
from state_backends.store.body_files import BodyFiles
from state_backends.store.counting import only_counts
from state_backends.store.keyed.store import KeyedStore
from state_backends.store.p_bucket import PBucket
from state_backends.store.protocol import BlockStore, Only, StoredBlock, StoreStats
from state_backends.versions.lineage import Home, is_taken, read_version, take_version
from state_backends.versions.manifest import FileEntry, Identity, Manifest, Past, check_owner, dump, runs_of
from state_backends.versions.opening import claim, not_found, older
from state_backends.versions.publishing import PublishingAhead
from state_backends.versions.retention import Retention, batch_of, manifest_name

T = TypeVar("T")
log = logging.getLogger(__name__)


class Shard:
    """One shard on its host: the current version and, between open and commit, the attempt that works on it.

    The caller makes one call at a time, except for reads. ``storage`` keeps the versions. The folder ``live`` has
    RocksDB's own files, and new files. ``retain``: how many batches Spark keeps. ``home`` finds the storage of the
    lineage of an identity (state_backends/versions/lineage.py); it is called when the shard is rebuilt from a version.
    None: the lineage is in ``storage``. ``requests``: what the storages of this shard count. ``staged``: the folder of
    shared memory for staged bodies; None: there is none.
    """

    def __init__(
        self,
        identity: Identity,
        storage: Storage,
        live: Path,
        make_stores: Callable[[PBucket], Stores],
        *,
        retain: int,
        home: Callable[[Identity], Home] | None = None,
        cache: Cache | None = None,
        requests: Requests | None = None,
        staged: Path | None = None,
    ) -> None:
        self.identity = identity
        self.storage = storage
        self._live = live
        self._make_stores = make_stores
        # One more than Spark keeps batches: the newest version may belong to a batch that is not complete yet.
        self._keep = retain + 1
        self._home = home
        self._place = Home(storage, lambda token: None, lambda: iter([storage]))
        self._cache = cache
        self._staged = staged
        self._requests = requests or Requests()
        self.requested: Batch | None = None
        """The requests for the last commit of this host."""
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
        self._may_be_saved = False  # the manifest that names them
        self._ahead = PublishingAhead(storage)
        self._retention = Retention(self._keep)
        self._unlisted_in: int | None = None  # the batch in which the folder must not be listed yet: see retention.py
        self._suspect = False  # something local was damaged or missing
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
        work = self._attempt
        if work is None or self.token != token or self._suspect or not self._is_there():
            work = self._rebuild(token, attempt, identity)
        elif self._at_work is not None:
            self._undo()
        if self._current is not None:
            check_owner(self._current, identity)
        elif identity != self.identity:
            # What is in operator.json may be from an attempt that failed.
            claim(self.storage, identity, self._place.shards, batch_of(attempt), begins=True)
        if self._unlisted_in is not None and batch_of(attempt) > self._unlisted_in:
            self._retention.note(*self.storage.listing())
            self._unlisted_in = None
        self.identity = identity
        self._at_work, self._new_token = attempt, makes or attempt
        self._ahead.begins(attempt)
        snapshot = self._current.snapshot if self._current else None
        work.begin(snapshot["next_seq"] if snapshot else 0)
        assert self._p_bucket is not None
        self._p_bucket.tag = attempt
        return snapshot

    def append(self, attempt: str, blocks: Sequence[tuple[int, bool, Block]]) -> None:
        """Keeps (seq, late, block). Raises RequestError, and keeps none, unless the numbers grow."""
        with self._noticing_damage():
            self._working(attempt).append(blocks)

    def read(
        self, attempt: str, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None
    ) -> Iterator[StoredBlock]:
        return self._naming_the_version(self._working(attempt).read(slices, blocking=blocking, only=only))

    def _naming_the_version(self, found: Iterator[T]) -> Iterator[T]:
        """Yields what was found. Adds the version to the error for a damaged block or file."""
        try:
            with self._noticing_damage():
                yield from found
        except (CorruptBlock, CorruptState) as error:
            version = f"version {self.token} in {self.storage.where(self.token)}" if self.token else "no version yet"
            raise type(error)(f"{error}; {version}") from error.__cause__

    def prestage(self, attempt: str, slices: Sequence[int], only: Only | None = None) -> None:
        self._working(attempt).prestage(slices, only)

    def release(self, attempt: str, destage: Sequence[int] = (), purge: Sequence[int] = ()) -> None:
        """Memory may let go of the slices ``destage``. The slices ``purge`` go with the commit."""
        self._working(attempt).release(destage, purge)

    def replace(self, attempt: str, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        """See :meth:`BlockStore.replace`. This attempt sees the change at once, others after the commit."""
        self._working(attempt).replace(spans, below)

    def get(self, attempt: str, keys: Sequence[bytes]) -> Iterator[list[bytes | None]]:
        """The value of each key, None if there is none, in pages. See LazyMap for this and the next two."""
        return self._naming_the_version(self._keyed_of(attempt).get(keys))

    def put(self, attempt: str, values: Iterable[Change]) -> None:
        with self._noticing_damage():
            self._keyed_of(attempt).put(values)

    def scan(self, attempt: str, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        return self._naming_the_version(self._keyed_of(attempt).scan(begin, end))

    @property
    def on_disk(self) -> bool:
        """See :class:`state_backends.format.ordered_map.LazyMap`."""
        return self._keyed is not None and self._keyed.on_disk

    def expect(self, keys: Sequence[bytes]) -> bool:
        """See :meth:`KeyedStore.expect`. The next attempt may begin meanwhile."""
        keyed = self._keyed
        return keyed is not None and keyed.expect(keys)

    def commit(self, attempt: str, snapshot: dict[str, Any], due: Sequence[int] = ()) -> str:
        """Makes a new version of what the attempt did, whole or not at all; returns its token.

        ``due``: slices that the next attempts will probably read, the soonest first. Raises RequestError if
        ``snapshot["next_seq"]`` is the number of a block that exists already.
        """
        with self._noticing_damage():
            return self._commit(attempt, snapshot, due)

    def _commit(self, attempt: str, snapshot: dict[str, Any], due: Sequence[int]) -> str:
        work = self._working(attempt)
        if snapshot["next_seq"] <= work.last_seq:
            raise RequestError(f"commit: snapshot.next_seq must be above block {work.last_seq}, which exists already")
        store, dead = work.store, frozenset(work.purging)
        assert self._p_bucket is not None
        self._written += store.persist(skip=dead)
        live = store.files(skip=dead)
        runs = self._keyed.persist() if self._keyed is not None else []
        new = [f for f in self._written if f.file_no in live]
        new += [run for run in runs if run.file_no not in self._files]
        # An earlier try of this commit may have published some of them. They are the same files.
        earlier, self._published = self._published, self._p_bucket.publish(new, attempt, self.storage.files)
        self._unpublish(set(earlier).difference(self._published))
        entries = self._files | {f.file_no: FileEntry.of(f, name) for f, name in zip(new, self._published, strict=True)}
        entries |= {no: replace(entries[no], alive=positions) for no, positions in live.items()}
        handed = self._adopted(store.handed(skip=dead))
        files = (*(entries[no] for no in sorted({*live, *(run.file_no for run in runs)})), *handed)
        past = self._retention.following(self._current, files)
        manifest = Manifest(
            token=self._new_token,
            parent=self._current.token if self._current else None,
            version=self._current.version + 1 if self._current else 1,
            identity=self.identity,
            files=files,
            next_file_no=self._p_bucket.next_file_no,
            snapshot=snapshot,
            history=self._retention.history(past),
            runs=tuple(run.file_no for run in runs),
        )
        # First all files, then the manifest that names them: so a version exists whole or not at all.
        self.storage.publish(self._published, [f.name for f in files])
        self._may_be_saved = True
        self.storage.save(manifest.token, dump(manifest))
        self._retention.note([], self._ahead.committed([f.file_no for f in new], self._published))
        self._published, self._may_be_saved = [], False
        work.end()
        before = self._current.files if self._current else ()
        for file in self._written:
            if file.file_no not in live:
                self._p_bucket.delete(file)
        self._keep_files(manifest)
        if self._keyed is not None:
            self._keyed.end([self._file(run) for run in runs_of(manifest)], snapshot.get("expected_ms"))
        # Only now: until here, reads that go on beside this may have used them.
        self.storage.release({f.name for f in before} - {f.name for f in files})
        self._at_work, self._written = None, []
        self.requested = Batch(batch_of(attempt), self._requests.since_last())
        self._expire(manifest, past, batch_of(attempt), due)
        return manifest.token

    def abort(self, attempt: str) -> None:
        if self._at_work == attempt and self._attempt is not None:
            self._undo()
            self._at_work = None

    def close(self) -> None:
        self._ahead.ends()
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
    def bodies(self) -> Places:
        """Where workers find the bodies of handed-over blocks."""
        return self.storage.bodies._replace(staged=str(self._staged or ""))

    @property
    def token(self) -> str | None:
        """The current version. It does not contain what the attempt has done so far."""
        return self._current.token if self._current else None

    def has_had(self, token: str) -> bool:
        """Whether that is the current version, or an older one from which the current one was made."""
        current = self._current
        return current is not None and token in (current.token, *(past.token for past in current.history))

    @property
    def store(self) -> BlockStore | None:
        return self._attempt.store if self._attempt is not None else None

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """The operator's state as of the current version."""
        return self._current.snapshot if self._current else None

    def _undo(self) -> None:
        """Forgets everything that the attempt at work did."""
        self._retention.note([], self._ahead.ends())
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
        published, self._published = self._published, []
        self._unpublish(published)
        self._may_be_saved = False

    def _unpublish(self, names: Collection[str]) -> None:
        """Deletes files that a failed commit published and that no manifest names.

        Saving a manifest may fail after it was stored. Then a commit of a later batch deletes it with its files.
        """
        if self._may_be_saved:
            self._retention.note([manifest_name(self._new_token)], [])
            if self._is_saved():
                self._retention.note([], names)
                return
        self._retention.retry(self.storage.delete(Doomed([], list(names))))

    def _is_saved(self) -> bool:
        """Whether the manifest of the attempt at work is there. True if nobody knows."""
        try:
            self.storage.load(self._new_token)
        except FileNotFoundError:
            return False
        except (OSError, StateError) as error:
            log.warning("nobody knows whether version %s was made: %s", self._new_token, error)
        return True

    # -- what is local may be damaged, or go -------------------------------------------------------------

    def _is_there(self) -> bool:
        """Whether the working folder is where it was. Somebody may have removed it."""
        return self._p_bucket is not None and self._p_bucket.is_there

    @contextlib.contextmanager
    def _noticing_damage(self) -> Iterator[None]:
        """After damage, or if a file is missing, the next attempt works on a shard that is made anew."""
        try:
            yield
        except (CorruptBlock, CorruptState):
            self._suspect = True
            raise
        except DiskError as error:
            # A disk that is full or read-only damages nothing, and the blocks in memory are worth keeping.
            if not is_missing(error):
                raise
            self._suspect = True
            raise CorruptState(f"a file of this host is missing: {error}") from error.__cause__

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
        assert self._keyed is not None
        return self._keyed

    def _rebuild(self, token: str | None, attempt: str, identity: Identity) -> StoreAttempt:
        """Makes the shard anew from a version. Everything local is a cache: if it is damaged, it is made once more."""
        self.close()
        if self._suspect:
            self.storage.close()
        self._current, self._files, self._handed = None, {}, {}
        self._at_work, self._written, self._published, self._may_be_saved = None, [], [], False
        self._retention = Retention(self._keep)
        self.rebuilds += 1
        if self._home is not None:
            self._place = self._home(identity)
            self.storage.leave()
            self.storage = self._place.storage
        try:
            manifest = None if token is None else self._find(token, attempt, identity)
            claim(self.storage, identity, self._place.shards, batch_of(attempt), begins=manifest is None)
            if manifest is not None:
                self._keep_files(manifest)
            try:
                work = self._restore(manifest, partly=not self._suspect)
            except (CorruptState, DiskError) as error:
                log.warning("shard %d is made again without the files of this host: %s", identity.shard, error)
                shutil.rmtree(self._live, ignore_errors=True)
                self.storage.close()
                work = self._restore(manifest, partly=False)
        except CorruptState as error:
            raise CorruptState(f"version {token} in {self.storage.where(token or '')}: {error}") from error.__cause__
        self._suspect = False
        try:
            past, floor = older(self.storage, manifest, self._keep)
            self._retention = Retention(self._keep, past, floor=floor)
            self._unlisted_in = None
            if manifest is None or is_taken(manifest):
                self._unlisted_in = batch_of(attempt)
            else:
                self._retention.note(*self.storage.listing())
        except BaseException:
            self.close()
            raise
        return work

    def _restore(self, manifest: Manifest | None, *, partly: bool) -> StoreAttempt:
        """Makes the stores, with what is alive in a version. Raises CorruptState, DiskError, StorageError.

        ``partly``: large files of a remote storage may come later. Without it all are compared with their checksums.
        """
        # New files stay in a folder of this host until a version names them, so that no other host deletes them.
        p_bucket = PBucket(self._live / "new", self._live / "rocksdb", durable=False, cache=self._cache)
        self._ahead = PublishingAhead(self.storage)
        p_bucket.made = self._ahead.made
        p_bucket.bodies = BodyFiles(self._staged, lambda: self.storage)
        p_bucket.trimmer.copies = self.storage
        stores = self._make_stores(p_bucket)
        try:
            self.storage.fetch([self._file(f) for f in self._files.values()], partly=partly)
            if manifest is not None:
                self.storage.publish([], list(self._handed))
                blocks = [self._file(f) for no, f in self._files.items() if no not in manifest.runs]
                stores.blocks.restore(blocks, manifest.alive)
                runs = [self._file(run) for run in runs_of(manifest)]
                stores.values.restore(runs)
                p_bucket.trimmer.plan(blocks, runs, ())
                p_bucket.next_file_no = max(p_bucket.next_file_no, manifest.next_file_no)
        except BaseException:
            stores.close()
            raise
        self._p_bucket, self._attempt, self._keyed = p_bucket, StoreAttempt(stores.blocks), stores.values
        return self._attempt

    def _find(self, token: str, attempt: str, identity: Identity) -> Manifest:
        """The version. Copies it from another lineage if it is there.

        Raises CorruptState, MissingState, ForeignState.
        """
        try:
            manifest = read_version(self.storage, token)
        except FileNotFoundError:
            if (other := self._place.elsewhere(token)) is None:
                moved = self._home is not None
                raise not_found(self.storage, token, identity, self._keep, has_lineages=moved) from None
            manifest = take_version(other, token, self.storage, identity, batch_of(attempt))
        check_owner(manifest, identity)
        return manifest

    def _keep_files(self, manifest: Manifest) -> None:
        self._current = manifest
        self._files = {f.file_no: f for f in manifest.files if not f.name.endswith(HANDED)}
        self._handed = {f.name: f for f in manifest.files if f.name.endswith(HANDED)}

    def _adopted(self, names: set[str]) -> list[FileEntry]:
        """The files of children that a new version names. Links those that the current version does not name."""
        new = sorted(names - self._handed.keys())
        # If this commit fails, another attempt's version may need these links. So they are not deleted at once: a
        # commit of a later batch deletes them, unless a version of its history names them.
        self._retention.note([], new)
        entries = dict(self._handed)
        for name, footer in zip(new, self.storage.adopt(new), strict=True):
            entries[name] = FileEntry.of_handed(name, footer.size_bytes, footer.crc, len(footer.bodies))
        return [entries[name] for name in sorted(names)]

    def _file(self, entry: FileEntry) -> SstFile:
        return entry.in_folder(str(self.storage.files))

    # -- what is kept, and what is merged -----------------------------------------------------------------

    def _expire(self, manifest: Manifest, past: list[Past], batch: int, due: Sequence[int]) -> None:
        """Deletes what nobody can ask for. Starts merging and making room. The version exists, so it raises nothing."""
        assert self.store is not None and self._p_bucket is not None
        if self.storage.excess() > 0:
            blocks = [self._file(f) for no, f in self._files.items() if no not in manifest.runs]
            self._p_bucket.trimmer.plan(blocks, [self._file(run) for run in runs_of(manifest)], due)
            self.store.trim()
        try:
            self._retention.retry(self.storage.delete(self._retention.committed(manifest, past, batch)))
            held, disk = self._retention.held_bytes, self._retention.disk_bytes
            self.store.compact(self._files, held_bytes=held, disk_bytes=disk)
            if self._keyed is not None:
                self._keyed.compact()
        except (OSError, StateError) as error:
            log.warning("old files of shard %d stay until the next commit: %s", self.identity.shard, error)
