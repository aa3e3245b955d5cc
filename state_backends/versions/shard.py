"""Versions of a shard: open by token, work, commit (docs/inside/versions.md).

A version is a manifest and the files that it names, all immutable. Spark keeps the token of the current version, so
Spark decides which attempt won. Everything that an attempt does before its commit can be undone: see
:class:`state_backends.store.attempt.StoreAttempt`, on which each attempt works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rocksdict import Cache

from state_backends.backends import Stores
from state_backends.files.bodies import Places
from state_backends.files.names import ToDelete
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
from state_backends.store.p_bucket import PBucket
from state_backends.store.protocol import BlockStore, Only, StoredBlock, StoreStats
from state_backends.versions.lineage import Home, is_taken, read_version, take_version
from state_backends.versions.local_stores import LocalStores, Opened
from state_backends.versions.manifest import FileEntry, Identity, Manifest, Past, check_owner, dump
from state_backends.versions.opening import claim, not_found, older
from state_backends.versions.publishing import PublishingAhead
from state_backends.versions.retention import Retention, batch_of, manifest_name

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass
class _Making:
    """The version that an attempt makes. ``attempt``: its name. ``token``: of the version.

    ``published``: the files that it has published. ``may_be_saved``: the manifest that names them may be there.
    """

    attempt: str
    token: str
    published: list[str] = field(default_factory=list)
    may_be_saved: bool = False


class Shard:
    """One shard on its host: the current version and, between open and commit, the attempt that works on it.

    The caller makes one call at a time, except for reads. ``storage`` keeps the versions. The folder ``live`` has
    RocksDB's own files, and new files. ``retain``: how many batches Spark keeps. ``home`` finds the storage of the
    lineage of an identity (state_backends/versions/lineage.py) when the shard is rebuilt from a version, or is None if
    the lineage is in ``storage``. ``requests``: what the storages of this shard count. ``staged``: the folder of shared
    memory for staged bodies, or None if there is none.
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
        # One more than Spark keeps batches: the newest version may belong to a batch that is not complete yet.
        self._keep = retain + 1
        self._home = home
        self._place = Home(storage, lambda token: None, lambda: iter([storage]))
        self._requests = requests or Requests()
        self.requested: Batch | None = None
        """The requests for the last commit of this host."""
        self._local = LocalStores(live, make_stores, cache=cache, staged=staged)
        self.rebuilds = 0
        """How many times the local stores were made anew."""
        self.current: Manifest | None = None
        """The current version. It does not contain what the attempt has done so far."""
        self._at_work: _Making | None = None
        self._ahead = PublishingAhead(storage)
        self._retention = Retention(self._keep)

    # -- an attempt ---------------------------------------------------------------------------------------

    def open(
        self, token: str | None, attempt: str, identity: Identity, makes: str | None = None
    ) -> dict[str, Any] | None:
        """Starts an attempt on the version ``token``; returns its snapshot. Both are None if there is no version yet.

        Undoes what another attempt did without committing it. ``makes``: the token of the version that this attempt
        will commit; by default the name of the attempt. Raises CorruptState, FormatError, ForeignState.
        """
        if self.token != token or self._local.is_suspect or not self._local.is_there:
            self._rebuild(token, attempt, identity)
        elif self._at_work is not None:
            self._undo(self._at_work)
        if self.current is not None:
            check_owner(self.current, identity)
        elif identity != self.identity:
            # What is in operator.json may be from an attempt that failed.
            claim(self.storage, identity, self._place.shards, batch_of(attempt), begins=True)
        self._retention.begins(batch_of(attempt), self.storage.listing)
        self.identity = identity
        self._at_work = _Making(attempt, makes or attempt)
        self._ahead.begins(attempt)
        snapshot, opened = self.snapshot, self._opened
        opened.work.begin(snapshot["next_seq"] if snapshot else 0)
        opened.files.tag = attempt
        return snapshot

    def append(self, attempt: str, blocks: Sequence[tuple[int, bool, Block]]) -> None:
        """Keeps (seq, late, block). Raises RequestError, and keeps none, unless the numbers grow."""
        with self._local.noticing_damage():
            self._working(attempt).work.append(blocks)

    def read(
        self, attempt: str, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None
    ) -> Iterator[StoredBlock]:
        return self._naming_the_version(self._working(attempt).work.read(slices, blocking=blocking, only=only))

    def _naming_the_version(self, found: Iterator[T]) -> Iterator[T]:
        """Yields what was found. Adds the version to the error for a damaged block or file."""
        try:
            with self._local.noticing_damage():
                yield from found
        except (CorruptBlock, CorruptState) as error:
            version = f"version {self.token} in {self.storage.where(self.token)}" if self.token else "no version yet"
            raise type(error)(f"{error}; {version}") from error.__cause__

    def prestage(self, attempt: str, slices: Sequence[int], only: Only | None = None) -> None:
        self._working(attempt).work.prestage(slices, only)

    def release(self, attempt: str, destage: Sequence[int] = (), purge: Sequence[int] = ()) -> None:
        """Memory may let go of the slices ``destage``. The slices ``purge`` go with the commit."""
        self._working(attempt).work.release(destage, purge)

    def replace(self, attempt: str, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        """See :meth:`BlockStore.replace`. This attempt sees the change at once, others after the commit."""
        self._working(attempt).work.replace(spans, below)

    def get(self, attempt: str, keys: Sequence[bytes]) -> Iterator[list[bytes | None]]:
        """The value of each key, None if there is none, in pages. See LazyMap for this and the next two."""
        return self._naming_the_version(self._working(attempt).map.get(keys))

    def put(self, attempt: str, values: Iterable[Change]) -> None:
        with self._local.noticing_damage():
            self._working(attempt).map.put(values)

    def scan(self, attempt: str, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        return self._naming_the_version(self._working(attempt).map.scan(begin, end))

    @property
    def on_disk(self) -> bool:
        """See :class:`state_backends.format.ordered_map.LazyMap`."""
        opened = self._local.opened
        return opened is not None and opened.map.on_disk

    def expect(self, keys: Sequence[bytes]) -> bool:
        """See :meth:`MapStore.expect`. The next attempt may begin meanwhile."""
        opened = self._local.opened
        return opened is not None and opened.map.expect(keys)

    def commit(self, attempt: str, snapshot: dict[str, Any], due: Sequence[int] = ()) -> str:
        """Makes a new version of what the attempt did, whole or not at all; returns its token.

        ``due``: slices that the next attempts will probably read, the soonest first. Raises RequestError if
        ``snapshot["next_seq"]`` is the number of a block that exists already.
        """
        with self._local.noticing_damage():
            return self._commit(attempt, snapshot, due)

    def _commit(self, attempt: str, snapshot: dict[str, Any], due: Sequence[int]) -> str:
        opened, making, before = self._working(attempt), self._at_work, self.current
        assert making is not None
        work, p_bucket = opened.work, opened.files
        if snapshot["next_seq"] <= work.last_seq:
            raise RequestError(f"commit: snapshot.next_seq must be above block {work.last_seq}, which exists already")
        numbered = {} if before is None else before.numbered
        dead = frozenset(work.purging)
        self._local.written += work.store.persist(skip=dead)
        live = work.store.files(skip=dead)
        runs = opened.map.persist()
        new = [f for f in self._local.written if f.file_no in live]
        new += [run for run in runs if run.file_no not in numbered]
        # An earlier try of this commit may have published some of them. They are the same files.
        earlier, making.published = making.published, p_bucket.publish(new, attempt, self.storage.files)
        self._unpublish(making, set(earlier).difference(making.published))
        entries = numbered | {f.file_no: FileEntry.of(f, name) for f, name in zip(new, making.published, strict=True)}
        entries |= {no: replace(entries[no], alive=positions) for no, positions in live.items()}
        handed = self._adopted(work.store.handed(skip=dead))
        files = (*(entries[no] for no in sorted({*live, *(run.file_no for run in runs)})), *handed)
        past = self._retention.following(before, files)
        manifest = Manifest(
            token=making.token,
            parent=self.token,
            version=before.version + 1 if before else 1,
            identity=self.identity,
            files=files,
            next_file_no=p_bucket.next_file_no,
            snapshot=snapshot,
            history=self._retention.history(past),
            runs=tuple(run.file_no for run in runs),
        )
        # First all files, then the manifest that names them: so a version exists whole or not at all.
        self.storage.publish(making.published, [f.name for f in files])
        making.may_be_saved = True
        self.storage.save(manifest.token, dump(manifest))
        self._retention.note([], self._ahead.committed([f.file_no for f in new], making.published))
        making.published, making.may_be_saved = [], False
        work.end()
        self._local.delete_unless(live)
        self.current = manifest
        opened.map.end(manifest.runs_in(str(self.storage.files)), snapshot.get("expected_ms"))
        # Only now: until here, reads that go on beside this may have used them.
        self.storage.release({f.name for f in (before.files if before else ())} - {f.name for f in files})
        self._at_work, self._local.written = None, []
        self.requested = Batch(batch_of(attempt), self._requests.since_last())
        self._expire(manifest, past, batch_of(attempt), due)
        return manifest.token

    def abort(self, attempt: str) -> None:
        if self._at_work is not None and self._at_work.attempt == attempt and self._local.opened is not None:
            self._undo(self._at_work)
            self._at_work = None

    def close(self) -> None:
        self._ahead.ends()
        self._local.close()

    def stats(self) -> StoreStats:
        """See :meth:`LocalStores.stats`."""
        return self._local.stats()

    @property
    def bodies(self) -> Places:
        """Where workers find the bodies of handed-over blocks."""
        return self.storage.bodies._replace(staged=str(self._local.staged or ""))

    @property
    def token(self) -> str | None:
        """The token of the current version."""
        return self.current.token if self.current else None

    def has_had(self, token: str) -> bool:
        """Whether that is the current version, or an older one from which the current one was made."""
        current = self.current
        return current is not None and token in (current.token, *(past.token for past in current.history))

    @property
    def store(self) -> BlockStore | None:
        return self._local.opened.work.store if self._local.opened is not None else None

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """The operator's state as of the current version."""
        return self.current.snapshot if self.current else None

    def _undo(self, making: _Making) -> None:
        """Forgets everything that the attempt at work did."""
        self._retention.note([], self._ahead.ends())
        opened = self._opened
        opened.work.undo()
        opened.map.undo()
        # A merged file holds blocks of the version, so the store keeps it.
        self._local.delete_unless(opened.work.store.files())
        published, making.published = making.published, []
        self._unpublish(making, published)

    def _unpublish(self, making: _Making, names: Collection[str]) -> None:
        """Deletes files that a failed commit published and that no manifest names.

        Saving a manifest may fail after it was stored. Then a commit of a later batch deletes it with its files.
        """
        if making.may_be_saved:
            self._retention.note([manifest_name(making.token)], [])
            if self._is_saved(making.token):
                self._retention.note([], names)
                return
        self._retention.retry(self.storage.delete(ToDelete([], list(names))))

    def _is_saved(self, token: str) -> bool:
        """Whether the manifest with this token is there. True if nobody knows."""
        try:
            self.storage.load(token)
        except FileNotFoundError:
            return False
        except (OSError, StateError) as error:
            log.warning("nobody knows whether version %s was made: %s", token, error)
        return True

    # -- versions -----------------------------------------------------------------------------------------

    def _working(self, attempt: str) -> Opened:
        working = "none" if self._at_work is None else self._at_work.attempt
        if working != attempt or self._local.opened is None:
            shard = self.identity.shard
            raise AttemptSuperseded(f"shard {shard}: attempt {attempt} does not work on it (any more); {working} does")
        return self._local.opened

    @property
    def _opened(self) -> Opened:
        assert self._local.opened is not None
        return self._local.opened

    def _rebuild(self, token: str | None, attempt: str, identity: Identity) -> None:
        """Makes the shard anew from a version. Everything local is a cache: if it is damaged, it is made once more."""
        self.close()
        if self._local.is_suspect:
            self.storage.close()
        self.current = self._at_work = None
        self._local.written = []
        self._retention = Retention(self._keep)
        self.rebuilds += 1
        if self._home is not None:
            self._place = self._home(identity)
            self.storage.leave()
            self.storage = self._place.storage
        try:
            manifest = None if token is None else self._find(token, attempt, identity)
            claim(self.storage, identity, self._place.shards, batch_of(attempt), begins=manifest is None)
            try:
                self._restore(manifest, partly=not self._local.is_suspect)
            except (CorruptState, DiskError) as error:
                log.warning("shard %d is made again without the files of this host: %s", identity.shard, error)
                self._local.remove()
                self.storage.close()
                self._restore(manifest, partly=False)
        except CorruptState as error:
            raise CorruptState(f"version {token} in {self.storage.where(token or '')}: {error}") from error.__cause__
        self._local.is_suspect = False
        try:
            past, floor = older(self.storage, manifest, self._keep)
            unlisted = batch_of(attempt) if manifest is None or is_taken(manifest) else None
            self._retention = Retention(self._keep, past, floor=floor, unlisted_in=unlisted)
            if unlisted is None:
                self._retention.note(*self.storage.listing())
        except BaseException:
            self.close()
            raise
        self.current = manifest

    def _restore(self, manifest: Manifest | None, *, partly: bool) -> None:
        self._ahead = PublishingAhead(self.storage)
        self._local.restore(self.storage, manifest, self._ahead.made, partly=partly)

    def _find(self, token: str, attempt: str, identity: Identity) -> Manifest:
        """The version. Copies it from another lineage if it is there.

        Raises CorruptState, MissingState, ForeignState.
        """
        try:
            manifest = read_version(self.storage, token)
        except FileNotFoundError:
            if (other := self._place.other_lineage(token)) is None:
                moved = self._home is not None
                raise not_found(self.storage, token, identity, self._keep, has_lineages=moved) from None
            manifest = take_version(other, token, self.storage, identity, batch_of(attempt))
        check_owner(manifest, identity)
        return manifest

    def _adopted(self, names: set[str]) -> list[FileEntry]:
        """The files of children that a new version names. Links those that the current version does not name."""
        handed = {} if self.current is None else self.current.handed
        new = sorted(names - handed.keys())
        # If this commit fails, another attempt's version may need these links. So they are not deleted at once: a
        # commit of a later batch deletes them, unless a version of its history names them.
        self._retention.note([], new)
        entries = dict(handed)
        for name, footer in zip(new, self.storage.adopt(new), strict=True):
            entries[name] = FileEntry.of_handed(name, footer.size_bytes, footer.crc, len(footer.bodies))
        return [entries[name] for name in sorted(names)]

    # -- what is kept, and what is merged -----------------------------------------------------------------

    def _expire(self, manifest: Manifest, past: list[Past], batch: int, due: Sequence[int]) -> None:
        """Deletes what nobody can ask for. Starts merging and making room. The version exists, so it raises nothing."""
        opened, folder = self._opened, str(self.storage.files)
        store = opened.work.store
        if self.storage.copies.excess() > 0:
            opened.files.trimmer.plan(manifest.blocks_in(folder), manifest.runs_in(folder), due)
            store.trim()
        try:
            self._retention.retry(self.storage.delete(self._retention.committed(manifest, past, batch)))
            held, disk = self._retention.held_bytes, self._retention.disk_bytes
            store.compact(manifest.numbered, held_bytes=held, disk_bytes=disk)
            opened.map.compact()
        except (OSError, StateError) as error:
            log.warning("old files of shard %d stay until the next commit: %s", self.identity.shard, error)
