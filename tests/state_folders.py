"""State folders for tests of the tools that read them: how they are written, checked and damaged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import aion
from state_backends.backends import Stores
from state_backends.files.names import HANDED_FOLDER
from state_backends.files.storage import LocalStorage
from state_backends.format.block import Block
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.versions.audit import ShardFinding, StateFolder
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard
from tests.durations import us
from tests.operators import make
from tests.stores.rig import make_block

SLICES = (0, 10, 20)
Blocks = list[tuple[int, bytes]]


class Writer:
    """The versions of one shard, one for each batch, as a state server makes them."""

    def __init__(
        self, state: Path, shard: int, live: Path, *, query: str = "query", lineage: str = "", checkpoint: str = ""
    ) -> None:
        self.identity = Identity(query, "tolls", shard, 2, {}, checkpoint=checkpoint)
        self.folder = state / query / "tolls" / lineage / f"shard-{shard:05d}"
        self._live = live / str(shard)

    def __enter__(self) -> Writer:
        self._io = IoThread()
        self.shard = Shard(
            self.identity,
            LocalStorage(self.folder, self.folder.parent / HANDED_FOLDER),
            self._live,
            lambda p: Stores.of("tiered", p, self._io, MemoryBudget(1 << 20), StoreOptions(bucket_limit_bytes=1 << 20)),
            retain=100,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.shard.close()
        self._io.close()

    def commit(self, token: str | None, batch: int, seqs: Sequence[int]) -> str:
        attempt = f"{batch:010d}-{'ab'[self.identity.shard]}{batch}"
        self.shard.open(token, attempt, self.identity)
        for seq in seqs:
            salt = 1000 * self.identity.shard + seq
            self.shard.append(attempt, [(seq, False, make_block(SLICES[seq % 3], salt, 300))])
        snapshot = make(aion.Tumbling(us(10))).snapshot() | {"next_seq": seqs[-1] + 1}
        self.shard.commit(attempt, snapshot)
        return attempt

    def put(self, token: str | None, batch: int, *values: tuple[bytes, bytes | None]) -> str:
        """A version with keyed values more, by a processor without windows."""
        attempt = f"{batch:010d}-{'ab'[self.identity.shard]}{batch}"
        self.shard.open(token, attempt, self.identity)
        self.shard.put(attempt, [(key, value, None) for key, value in values])
        self.shard.commit(attempt, {"next_seq": 0, "counters": {}})
        return attempt

    def read(self, token: str) -> Blocks:
        """All blocks of a version, by an attempt that changes nothing."""
        self.shard.open(token, "reader", self.identity)
        try:
            return [(seq, bytes(block.stored)) for seq, block in self.shard.read("reader", SLICES)]
        finally:
            self.shard.abort("reader")

    def adopt(self, block: Block) -> None:
        """The first version, with a block that a child handed over."""
        self.shard.open(None, "0000000000-a", self.identity)
        self.shard.append("0000000000-a", [(0, False, block)])
        self.shard.commit("0000000000-a", make(aion.Tumbling(us(10))).snapshot() | {"next_seq": 1})


def two_shards(folder: Path) -> Path:
    """Makes a state folder with two shards: the first has versions of batches 0, 1, 2, the other of 0 and 2."""
    state = folder / "state"
    for shard, batches in ((0, (0, 1, 2)), (1, (0, 2))):
        with Writer(state, shard, folder / "live") as writer:
            token = None
            for n, batch in enumerate(batches):
                token = writer.commit(token, batch, range(4 * n, 4 * n + 4))
    return state


def look(state: Path) -> dict[str, ShardFinding]:
    """Returns what is found in each shard."""
    with closing(StateFolder(str(state))) as folder:
        return {shard[2]: folder.check(shard) for shard in folder.shards()}


def newest_file(state: Path, shard: int, batch: int) -> Path:
    (path,) = (state / f"query/tolls/shard-{shard:05d}/files").glob(f"*-{batch:010d}-*.sst")
    return path


def write_checkpoint(folder: Path, query: str) -> Path:
    for log in ("offsets", "commits"):
        (folder / log).mkdir(parents=True)
        for batch in range(3):
            (folder / log / str(batch)).write_text("v1")
    (folder / "metadata").write_text(f'{{"id":"{query}"}}')
    return folder


def batches_of(checkpoint: Path) -> list[str]:
    return sorted(p.name for p in (checkpoint / "commits").iterdir())
