"""Opens a version of a shard to read it. A running query is not disturbed: its server is only asked where bytes are.

Everything that the version names is linked into a temporary folder first. So the version can be read to its end even if
the query deletes it meanwhile. Files of an object store cannot be linked: of large ones, only what a read needs is
fetched, when it is needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path

from state_backends.backends import Stores
from state_backends.files.bodies import Bodies
from state_backends.files.location import Location
from state_backends.files.storage import LocalStorage, Storage
from state_backends.format.errors import CorruptState, DiskError, MissingState
from state_backends.server.client import tiers_here
from state_backends.server.live_folder import LiveFolder, own_name
from state_backends.store.body_files import BodyFiles
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.store.p_bucket import PBucket
from state_backends.store.protocol import Only, StoredBlock
from state_backends.versions.manifest import Manifest

MEMORY_BYTES = 16 << 20
"""The memory for blocks and values that are read ahead."""


class VersionReader:
    """The blocks and the values of one version. It has the reading methods of a ShardAttempt.

    ``blocks_read`` and ``keys_read`` count the blocks that were read and the keys that were looked up.
    """

    def __init__(self, manifest: Manifest, stores: Stores, bodies: Bodies, is_remote: bool) -> None:
        self.manifest = manifest
        self._stores, self._bodies, self._is_remote = stores, bodies, is_remote
        self.blocks_read = self.keys_read = 0

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        """Yields the blocks of slices, or ``only`` some of them, by slice and in the order of arrival."""
        for stored in self._stores.blocks.read(slices, only=only):
            self.blocks_read += 1
            yield StoredBlock(stored.seq, self._bodies.of(stored.block))

    def sizes(self, slice_us: int) -> tuple[int, int, int]:
        """Returns the encoded bytes of the blocks of a slice, how many are in memory, and how many only on disk.

        All others are on a remote file system. In memory: a state server of this host had them there at the first call.
        """
        size = self._stores.blocks.size_on_disk([slice_us])
        memory, disk = self._tiers.get(slice_us, (0, 0))
        return size, memory, disk if self._is_remote else size - memory

    @cached_property
    def _tiers(self) -> dict[int, tuple[int, int]]:
        manifest, its = self.manifest, self.manifest.identity
        return tiers_here(its.query, its.operator, its.shard, manifest.token, manifest.snapshot["next_seq"])

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the value of each key, in the order of the keys, or None if there is none."""
        self.keys_read += len(keys)
        return list(chain.from_iterable(self._stores.values.get(keys)))

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """Yields key and value where ``begin <= key < end``, in the order of the keys."""
        return self._stores.values.scan(begin, end)

    def put(self, values: Sequence[object]) -> None:
        """Refuses: a version is only read."""
        raise AssertionError("a version is only read")


class HeldVersion:
    """A version of a shard that stays as it is until it was read. See :func:`held`."""

    def __init__(self, live: Path, storage: Storage, manifest: Manifest, there: Storage) -> None:
        self.manifest = manifest
        self._live, self._storage, self._there = live, storage, there

    @contextmanager
    def reading(self) -> Iterator[VersionReader]:
        """Returns a context in which its blocks and values can be read.

        Raises MissingState if the version has been deleted, CorruptState, DiskError, StorageError.
        """
        manifest, storage = self.manifest, self._storage
        blocks, runs = manifest.blocks_in(str(storage.files)), manifest.runs_in(str(storage.files))
        io = IoThread()
        try:
            p_bucket = PBucket(self._live / "new", self._live / "rocksdb", durable=False)
            p_bucket.bodies = BodyFiles(None, lambda: storage)
            p_bucket.trimmer.copies = storage.copies
            stores = Stores.of("rocksdb", p_bucket, io, MemoryBudget(MEMORY_BYTES), StoreOptions())
            try:
                with _noticing_deletion(self._there, manifest):
                    storage.fetch([*blocks, *runs], partly=True)
                    stores.blocks.restore(blocks, manifest.alive)
                    stores.values.restore(runs)
                is_remote = not isinstance(self._there, LocalStorage)
                yield VersionReader(manifest, stores, Bodies(storage.bodies), is_remote)
            finally:
                stores.close()
        finally:
            io.close()


@contextmanager
def held(location: Location, names: Sequence[str], manifest: Manifest) -> Iterator[HeldVersion]:
    """Returns a context in which a version of a shard stays as it is, even if the query deletes it.

    ``names``: the folders of the shard, from the query on. An object store has no links, so there the version stays
    only as long as the query keeps it. Raises MissingState if the version has been deleted, CorruptState, DiskError,
    StorageError.
    """
    # Several versions may be read at a time, each in a folder of its own.
    live = LiveFolder(location.live, f"{own_name()}-{uuid.uuid4().hex[:12]}")
    storage: Storage | None = None
    try:
        location.keep_copies(None, 0)  # nothing is fetched that nobody reads
        there = location.storage(names, live.path / "files", f"read-{uuid.uuid4().hex}")
        if isinstance(there, LocalStorage):
            own = LocalStorage(live.path / "version")
            with _noticing_deletion(there, manifest):
                own.take(there, [file.name for file in manifest.files])
            storage = own
        else:
            storage = there
        yield HeldVersion(live.path, storage, manifest, there)
    finally:
        if storage is not None:
            storage.close()
        live.close()


@contextmanager
def _noticing_deletion(there: Storage, manifest: Manifest) -> Iterator[None]:
    """Raises MissingState if a file is missing because its version has been deleted: its manifest went before it."""
    try:
        yield
    except (CorruptState, DiskError) as error:
        try:
            there.load(manifest.token)
        except FileNotFoundError:
            raise MissingState(
                f"version {manifest.token} was deleted before it was opened; the query keeps only its last versions"
            ) from error
        raise
