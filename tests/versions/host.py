"""A host of one shard's versions, for tests."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from state_backends.backends import STORES, Stores
from state_backends.files.bodies import Bodies, Places
from state_backends.files.handed import HandedFile
from state_backends.files.handed_remote import HandedPlace, create, read_body
from state_backends.files.remote import Remote
from state_backends.files.remote_storage import RemoteStorage
from state_backends.files.storage import LocalStorage
from state_backends.format.block import Block
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.merge_choice import DEFAULTS, Limits
from state_backends.store.options import StoreOptions
from state_backends.store.p_bucket import PBucket
from state_backends.versions.manifest import Identity, load
from state_backends.versions.retention import batch_of
from state_backends.versions.shard import Shard
from tests.stores.rig import make_block

IDENTITY = Identity("query", "tolls", 3, 8, {"key": ["k"], "windows": {"w": 1}})


KINDS = [*STORES, "remote"]
"""The stores, their versions in a local folder; and the tiered one with versions on a file system that is not local."""


class Host:
    """A host that holds one shard, and can be replaced by another that knows its folder only."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        retain: int = 100,
        limits: Limits = DEFAULTS,
        budget: int = 16 << 10,
        block_bytes: int = 600,
        staged: Path | None = None,
    ) -> None:
        self.kind, self.folder, self.retain, self.limits = kind, folder, retain, limits
        self.budget_bytes, self.block_bytes = budget, block_bytes
        self.handed = HandedPlace("handed", folder / "written here")
        self.staged = staged or folder / "staged"
        self.blocks: dict[bytes, int] = {}
        self.attempts = 0
        self.start()

    def start(self, name: str = "state") -> None:
        self.io = IoThread()
        self.storage: LocalStorage | RemoteStorage = LocalStorage(self.folder / name, self.folder / "handed")
        if self.kind == "remote":
            # What pyarrow reaches by its own means; here it is a local folder, so that tests can look into it.
            fs = SubTreeFileSystem(str(self.folder.parent), LocalFileSystem())
            self.remote = Remote("test://remote", (fs, self.folder.name))
            self.storage = RemoteStorage(self.remote, name, self.folder / "copies", self.handed)
        self.shard = Shard(
            IDENTITY,
            self.storage,
            self.folder / "live",
            self.make_stores,
            retain=self.retain,
            staged=self.staged,
        )

    @property
    def backend(self) -> str:
        return "tiered" if self.kind == "remote" else self.kind

    def make_stores(self, p_bucket: PBucket) -> Stores:
        self.budget = MemoryBudget(self.budget_bytes)
        options = StoreOptions(bucket_limit_bytes=self.budget_bytes // 2, limits=self.limits)
        made = Stores.of(self.backend, p_bucket, self.io, self.budget, options)
        self.map = made.values
        return made

    def stop(self) -> None:
        self.shard.close()
        self.io.close()
        if self.kind == "remote":
            self.remote.close()
            for copies in ("copies", "written here"):  # the next host has none
                shutil.rmtree(self.folder / copies, ignore_errors=True)

    def restart(self) -> None:
        self.stop()
        self.start()

    def hand_over(self, name: str, *blocks: Block) -> list[Block]:
        """What a child on this host hands over."""
        if self.kind == "remote":
            file = create(self.remote, self.handed, name)
        else:
            file = HandedFile(self.folder / "handed", name)
        with closing(file):
            references = [file.add(block) for block in blocks]
            file.end()
            file.seal()
        return references

    def body(self, block: Block) -> bytes:
        """What a worker on this host reads."""

        def fetch(places: Places, reference: Block) -> bytes:
            assert reference.at is not None
            return read_body(self.remote, places, reference.at, reference.header.body_bytes)

        bodies = Bodies(self.shard.bodies, fetch if self.kind == "remote" else None)
        return bytes(bodies.of(block).body)

    def open(self, token: str | None, identity: Identity = IDENTITY) -> tuple[str, dict[str, Any] | None]:
        """A new attempt on a version, and its snapshot."""
        attempt = self.next_attempt(token)
        self.attempts += 1
        return attempt, self.shard.open(token, attempt, identity)

    def next_attempt(self, token: str | None) -> str:
        """The name of the next attempt, of the batch after the version's."""
        batch = 0 if token is None else batch_of(token) + 1
        return f"{batch:010d}-attempt-{self.attempts + 1}"

    def append(self, attempt: str, *blocks: tuple[int, int], late: bool = False) -> None:
        """Blocks as (seq, slice); each has contents of its own, also if its seq was given before."""
        for seq, slice_us in blocks:
            block = make_block(slice_us, len(self.blocks), self.block_bytes)
            self.blocks[bytes(block.stored)] = seq
            self.shard.append(attempt, [(seq, late, block)])

    def append_together(self, attempt: str, *blocks: tuple[int, int]) -> None:
        """Blocks that come in one call."""
        self.shard.append(attempt, [(seq, False, make_block(slice_us, seq)) for seq, slice_us in blocks])

    def commit(self, token: str | None, *blocks: tuple[int, int], purge: Sequence[int] = (), **snapshot: Any) -> str:
        """The next version: these blocks more, these slices less."""
        attempt, old = self.open(token)
        self.append(attempt, *blocks)
        self.shard.release(attempt, purge=purge)
        next_seq = max([seq + 1 for seq, _ in blocks], default=old["next_seq"] if old else 0)
        self.shard.commit(attempt, {"next_seq": next_seq, **snapshot})
        return attempt

    def read(self, attempt: str, *slices: int) -> list[tuple[int, Block]]:
        stored = [(seq, bytes(block.stored)) for seq, block in self.shard.read(attempt, slices)]
        assert all(self.blocks[data] == seq for seq, data in stored)
        return stored  # type: ignore[return-value]

    def seqs(self, token: str | None, *slices: int) -> list[int]:
        attempt, _ = self.open(token)
        seqs = [seq for seq, _ in self.read(attempt, *slices)]
        self.shard.abort(attempt)
        return seqs

    def manifest(self, token: str) -> Path:
        return self.folder / "state" / "manifests" / f"{token}.json"

    def settle(self) -> None:
        """What is to be deleted is deleted in the background where that takes its time."""
        if isinstance(self.storage, RemoteStorage):
            self.storage.settle()

    def manifests(self) -> set[str]:
        self.settle()
        return {path.stem for path in (self.folder / "state" / "manifests").glob("*")}

    def files(self) -> set[str]:
        self.settle()
        return {path.name for path in (self.folder / "state" / "files").glob("*")}

    def named_files(self, *tokens: str) -> set[str]:
        return {f.name for t in tokens for f in load(self.manifest(t).read_bytes(), t).files}


class in_the_way:
    """For a while there is a file where a folder should be."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.away = folder, folder.with_suffix(".away")

    def __enter__(self) -> None:
        self.folder.rename(self.away)
        self.folder.write_text("in the way")

    def __exit__(self, *_: object) -> None:
        self.folder.unlink()
        self.away.rename(self.folder)
