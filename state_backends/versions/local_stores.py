"""What a shard has on its host: its stores, and files that no version names yet. All of it can be made anew.

It is made from a version (:meth:`LocalStores.restore`), and what an attempt adds is in it until the attempt commits.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from rocksdict import Cache

from state_backends.backends import Stores
from state_backends.files.faults import is_missing
from state_backends.files.names import SstFile
from state_backends.files.storage import Storage
from state_backends.format.errors import CorruptBlock, CorruptState, DiskError
from state_backends.store.attempt import StoreAttempt
from state_backends.store.body_files import BodyFiles
from state_backends.store.counting import only_counts
from state_backends.store.map.store import MapStore
from state_backends.store.p_bucket import PBucket
from state_backends.store.protocol import BlockStore, StoreStats
from state_backends.versions.manifest import Manifest


class Opened(NamedTuple):
    """The stores while they are open. ``files``: where files are made. ``work``: blocks. ``keyed``: values."""

    files: PBucket
    work: StoreAttempt
    map: MapStore


class LocalStores:
    """The stores of a shard. The folder ``live`` has RocksDB's own files, and new files.

    ``staged``: the folder of shared memory for staged bodies, if there is one. Any thread may ask for statistics.
    """

    def __init__(
        self, live: Path, make_stores: Callable[[PBucket], Stores], *, cache: Cache | None, staged: Path | None
    ) -> None:
        self.staged = staged
        self.opened: Opened | None = None
        """It is None while they are closed."""
        self.written: list[SstFile] = []
        """Files that an attempt or merging has made, and that no manifest names yet."""
        self.is_suspect = False
        """Something was damaged or missing. Then an attempt begins with new stores."""
        self._live, self._make_stores, self._cache = live, make_stores, cache
        self._lock = threading.Lock()
        self._closed = StoreStats()  # counts of the stores that were closed

    def restore(
        self, storage: Storage, manifest: Manifest | None, made: Callable[[int, Path], None], *, partly: bool
    ) -> StoreAttempt:
        """Makes the stores, with what is alive in a version. Raises CorruptState, DiskError, StorageError.

        ``made``: is called with each new file. ``partly``: large files of a remote storage may come later. Without it
        all are compared with their checksums.
        """
        # New files stay in a folder of this host until a version names them, so that no other host deletes them.
        files = PBucket(self._live / "new", self._live / "rocksdb", durable=False, cache=self._cache)
        files.made = made
        files.bodies = BodyFiles(self.staged, lambda: storage)
        files.trimmer.copies = storage.copies
        stores = self._make_stores(files)
        try:
            folder = str(storage.files)
            numbered = () if manifest is None else manifest.numbered.values()
            storage.fetch([file.in_folder(folder) for file in numbered], partly=partly)
            if manifest is not None:
                storage.publish([], list(manifest.handed))
                blocks, runs = manifest.blocks_in(folder), manifest.runs_in(folder)
                stores.blocks.restore(blocks, manifest.alive)
                stores.values.restore(runs)
                files.trimmer.plan(blocks, runs, ())
                files.next_file_no = max(files.next_file_no, manifest.next_file_no)
        except BaseException:
            stores.close()
            raise
        self.opened = Opened(files, StoreAttempt(stores.blocks), stores.values)
        return self.opened.work

    def delete_unless(self, live: Collection[int]) -> None:
        """Deletes the files without a version that are not among those with these numbers, and forgets them."""
        assert self.opened is not None
        for file in self.written:
            if file.file_no not in live:
                self.opened.files.delete(file)
        self.written = [file for file in self.written if file.file_no in live]

    def close(self) -> None:
        """Closes the stores, and removes the folder of this host. A later statistic still has their counts."""
        with self._lock:
            stores = self._stores()
            self.opened = None  # even if closing one fails, it is not used again
            for store in stores:
                self._closed.add(only_counts(store.stats()))
        try:
            for store in stores:
                store.close()
        finally:
            self.remove()

    def remove(self) -> None:
        """Removes the folder of this host."""
        shutil.rmtree(self._live, ignore_errors=True)

    def stats(self) -> StoreStats:
        """Returns the statistics of the stores. Counts include those of the stores that were here before."""
        with self._lock:
            stats = StoreStats()
            stats.add(self._closed)
            for store in self._stores():
                stats.add(store.stats())
            return stats

    def _stores(self) -> list[BlockStore | MapStore]:
        return [] if self.opened is None else [self.opened.work.store, self.opened.map]

    @property
    def is_there(self) -> bool:
        """Whether the folder is where it was. Somebody may have removed it."""
        return self.opened is not None and self.opened.files.is_there

    @contextlib.contextmanager
    def noticing_damage(self) -> Iterator[None]:
        """After damage, or if a file is missing, the next attempt works on stores that are made anew."""
        try:
            yield
        except (CorruptBlock, CorruptState):
            self.is_suspect = True
            raise
        except DiskError as error:
            # A disk that is full or read-only damages nothing, and the blocks in memory are worth keeping.
            if not is_missing(error):
                raise
            self.is_suspect = True
            raise CorruptState(f"a file of this host is missing: {error}") from error.__cause__
