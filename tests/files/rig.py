"""Storages of every kind, and hosts that have a shard in an object store."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow.fs as pafs

from state_backends.backends import Stores
from state_backends.files.disk_budget import DiskBudget
from state_backends.files.kept_copies import KeptCopies
from state_backends.files.names import SstFile
from state_backends.files.remote import Remote
from state_backends.files.remote_storage import RemoteStorage
from state_backends.files.requests import Requests
from state_backends.files.storage import LocalStorage
from state_backends.store.io_thread import IoThread, Priority
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.store.p_bucket import PBucket
from state_backends.versions.lineage import Home
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard
from tests.object_store import ObjectStore
from tests.stores.rig import make_block, nothing

URI = "test://place/of?state"
IDENTITY = Identity("query", "tolls", 3, 8, {"key": ["k"]})
BLOCK_BYTES = 3000
SECOND = "0000000002-a"


class Hooked:
    """A file system of pyarrow's that asks ``before(call, path)`` first, which may raise, or wait."""

    def __init__(self, fs: Any, before: Callable[[str, str], None]) -> None:
        self._fs, self._before = fs, before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        if not callable(found):
            return found

        def call(first: Any, *rest: Any, **options: Any) -> Any:
            self._before(name, str(getattr(first, "base_dir", first)))
            return found(first, *rest, **options)

        return call


class Place:
    """A file system, and the hosts that have storages of one shard there."""

    def __init__(self, kind: str, folder: Path, bucket: ObjectStore | None = None) -> None:
        self.kind, self.folder, self.bucket = kind, folder, bucket
        self.hosts = 0
        self.remotes: list[Remote] = []
        self.before: Callable[[str, str], None] = lambda call, path: None
        fs = (
            pafs._MockFileSystem()
            if kind == "in memory"
            else pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())
        )
        self.fs = Hooked(fs, lambda call, path: self.before(call, path))

    def storage(self, shard: str = "shard") -> Any:
        """That of a new host, which has copies of nothing."""
        self.hosts += 1
        if self.kind == "local":
            return LocalStorage(self.folder / shard)
        of_bucket = self.bucket is not None and Remote(self.bucket.uri("base"))
        self.remotes.append(of_bucket or Remote(URI, (self.fs, "base")))
        return RemoteStorage(self.remotes[-1], f"query/{shard}", self.folder / f"copies-{self.hosts}")

    def close(self) -> None:
        for remote in self.remotes:
            remote.close()


def write(storage: Any, name: str, data: bytes) -> SstFile:
    """A file as PBucket leaves it: whole, under its name."""
    storage.files.mkdir(parents=True, exist_ok=True)
    path = storage.files / name
    path.write_bytes(data)
    return SstFile(int(name.partition("-")[0]), str(path), len(data), zlib.crc32(data), 0, 1)


def here(storage: Any, file: SstFile) -> SstFile:
    """The file as a manifest names it to another host."""
    return file._replace(path=str(storage.files / file.name))


def published(storage: Any, *names: str) -> None:
    storage.publish(names, names)


def manifests(storage: Any) -> list[str]:
    return sorted(storage.listing()[0])


def files(storage: Any) -> list[str]:
    return sorted(storage.listing()[1])


class Host:
    """A host with one shard in the object store, and copies of nothing when it starts."""

    def __init__(
        self,
        uri: str,
        folder: Path,
        *,
        kind: str = "tiered",
        retain: int = 100,
        budget: int = 64 << 10,
        kept: KeptCopies | None = None,
        renews: bool = False,
        disk: DiskBudget | None = None,
    ) -> None:
        """``renews``: as on a state server, each rebuild gets a new storage for the same folder."""
        self.disk = disk
        self.folder, self.budget = folder, budget
        self.io = IoThread()
        self.remote = Remote(uri)
        self.requests = Requests()
        self.kept = kept
        self.kind = kind
        self.shard = Shard(
            IDENTITY,
            self.make_storage(),
            folder / "live",
            self.make_stores,
            retain=retain,
            home=self.home if renews else None,
            requests=self.requests,
        )

    def make_storage(self) -> RemoteStorage:
        where = "query/tolls/shard-00003", self.folder / "copies"
        return RemoteStorage(self.remote, *where, requests=self.requests, kept=self.kept, budget=self.disk)

    def home(self, identity: Identity) -> Home:
        storage = self.make_storage()
        return Home(storage, lambda token: None, lambda: iter([storage]))

    @property
    def storage(self) -> RemoteStorage:
        return cast(RemoteStorage, self.shard.storage)

    def make_stores(self, p_bucket: PBucket) -> Stores:
        self.p_bucket = p_bucket
        return Stores.of(
            self.kind, p_bucket, self.io, MemoryBudget(self.budget), StoreOptions(bucket_limit_bytes=self.budget // 4)
        )

    def put(self, token: str | None, attempt: str, values: dict[bytes, bytes | None]) -> str:
        """The next version, with these keyed values more."""
        attempt = f"{int(attempt):010d}-a"
        self.shard.open(token, attempt, IDENTITY)
        self.shard.put(attempt, [(key, value, None) for key, value in values.items()])
        self.shard.commit(attempt, {"next_seq": 0})
        self.storage.settle()
        self.io.submit(Priority.MAINTENANCE, nothing()).result()
        return attempt

    def values(self, token: str | None) -> dict[bytes, bytes]:
        self.shard.open(token, "0000009999-reader", IDENTITY)
        found = dict(self.shard.scan("0000009999-reader", b"", None))
        self.shard.abort("0000009999-reader")
        return found

    def commit(self, token: str | None, attempt: str, *blocks: tuple[int, int], purge: Sequence[int] = ()) -> str:
        """The next version: (seq, slice) more, these slices less."""
        attempt = f"{int(attempt):010d}-a"
        self.shard.open(token, attempt, IDENTITY)
        for seq, slice_us in blocks:
            self.shard.append(attempt, [(seq, False, make_block(slice_us, seq, BLOCK_BYTES))])
        self.shard.release(attempt, purge=purge)
        self.shard.commit(attempt, {"next_seq": max([seq + 1 for seq, _ in blocks], default=0)})
        self.storage.settle()
        return attempt

    def seqs(self, token: str | None, *slices: int) -> list[int]:
        """Of the blocks of a version, whose bytes are those that were appended."""
        self.shard.open(token, "0000009999-reader", IDENTITY)
        stored = list(self.shard.read("0000009999-reader", slices))
        self.shard.abort("0000009999-reader")
        for seq, block in stored:
            assert bytes(block.stored) == bytes(make_block(block.header.slice_us, seq, BLOCK_BYTES).stored)
        return [seq for seq, _ in stored]

    def close(self) -> None:
        self.shard.close()
        self.io.close()
        self.remote.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def names(bucket: ObjectStore, kind: str) -> set[str]:
    prefix = f"state/query/tolls/shard-00003/{kind}/"
    return {path.removeprefix(prefix) for path in bucket.objects() if path.startswith(prefix)}
