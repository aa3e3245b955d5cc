"""A store on simulated files against one on RocksDB: with all I/O over after each step, the same blocks are where."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aion.tools.tune.disk import Machine, SimulatedDisk
from aion.tools.tune.files import ShardDisk, SimulatedFiles, sized
from state_backends.format.block import Compacted
from state_backends.store.io import Io, Priority
from state_backends.store.ledger import Place
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.store.protocol import Only
from state_backends.store.tiered import TieredStore
from tests.stores.rig import EAGER, KIB, Rig, make_block, nothing

MACHINE = Machine(1e8, 1e-4, 1e8, 1e-3, 1e9, 0.0, 1e-3)
BUDGET, BUCKET = 12 * KIB, 4 * KIB
SLICES = st.integers(0, 4)
SOME = st.lists(SLICES, max_size=3, unique=True)
Call = Callable[[TieredStore], Any]


def settled(io: Io) -> None:
    """What requests ask for may ask for more."""
    io.submit(Priority.MAINTENANCE, nothing()).result()
    while io.busy():
        io.submit(Priority.MAINTENANCE, nothing()).result()


def seen(store: TieredStore, budget: MemoryBudget) -> dict[str, Any]:
    """Everything but times."""
    store.validate()
    stats = store.stats()
    times = {"last_append_s", "append_rate_bytes_per_s"}
    return {
        "places": {entry.seq: (entry.place, entry.file_no) for entry in store.blocks.ledger},
        "views": [{name: value for name, value in view.items() if name not in times} for view in store.views()],
        "stats": replace(stats, staging=replace(stats.staging, blocked_s=0.0)),
        "files": store.files(),
        "budget": (budget.used_bytes, budget.reserved_bytes),
    }


class Both:
    """A real store and a simulated one, told the same. ``live``: slice and arrival of each block that is read."""

    def __init__(self, folder: Path, keep: float) -> None:
        self.rig = Rig("tiered", folder, budget=BUDGET, bucket_limit=BUCKET, keep=keep, limits=EAGER)
        disk, self.budget = SimulatedDisk(), MemoryBudget(BUDGET)
        self.io = ShardDisk(disk, MACHINE, (1.0, 2.0))
        self.simulated = TieredStore(
            SimulatedFiles(MACHINE, disk), self.io, self.budget, StoreOptions(**self.rig.options)
        )
        self.live: dict[int, tuple[int, int]] = {}
        self.number = 0

    @property
    def real(self) -> TieredStore:
        assert isinstance(self.rig.store, TieredStore)
        return self.rig.store

    def both(self, call: Call) -> None:
        assert call(self.real) == call(self.simulated)
        settled(self.rig.io)
        settled(self.io)
        found = seen(self.simulated, self.budget)
        assert found == seen(self.real, self.rig.budget)
        assert not {Place.STAGING, Place.DESTAGING} & {place for place, _ in found["places"].values()}

    def append(self, slice_us: int, late: bool, size: int, compacted: Compacted | None = None) -> None:
        seq, self.number = self.number, self.number + 1
        block = make_block(slice_us, seq, size, compacted)
        stand_in = sized(slice_us, block.size_bytes, compacted)
        self.live[seq] = slice_us, seq if compacted is None else compacted.last_seq
        self.both(lambda store: store.append(seq, block if store is self.real else stand_in, late=late))

    def compaction(self, data: st.DataObject, slice_us: int, late: bool) -> None:
        arrivals = sorted({arrival for s, arrival in self.live.values() if s == slice_us})
        if not arrivals:
            return
        until = data.draw(st.sampled_from(arrivals))
        after = data.draw(st.sampled_from([-1, *(a for a in arrivals if a < until)]))
        below = self.number
        for part in range(2):
            self.append(slice_us, late, 900, Compacted(until, part * 100, part * 100 + 99))
        self.both(lambda store: store.replace({slice_us: (after, until)}, below))
        self.live = {
            n: (s, a) for n, (s, a) in self.live.items() if n >= below or s != slice_us or not after < a <= until
        }

    def read(self, slices: list[int], blocking: bool, only: Only | None) -> None:
        self.both(lambda store: [stored.seq for stored in store.read(slices, blocking=blocking, only=only)])

    def purge(self, slices: list[int]) -> None:
        self.live = {n: (s, a) for n, (s, a) in self.live.items() if s not in slices}
        self.both(lambda store: store.purge(slices))

    def step(self, data: st.DataObject) -> None:
        match data.draw(
            st.sampled_from(["append"] * 6 + ["compaction", "prestage", "destage", "press", "commit", "else"])
        ):
            case "append":
                self.append(data.draw(SLICES), data.draw(st.booleans()), data.draw(st.sampled_from([0, 900, 3000])))
            case "compaction":
                self.compaction(data, data.draw(SLICES), data.draw(st.booleans()))
            case "prestage":
                slices, keys = data.draw(SOME), data.draw(st.none() | st.integers(0, 250))
                only = None if keys is None else Only(keys=[(keys, keys + 10)])
                self.both(lambda store: store.prestage(slices, only))
                self.read(slices, data.draw(st.booleans()), only)
            case "destage":
                slices = data.draw(SOME)
                self.both(lambda store: store.destage(slices))
            case "press":
                slice_us, keep = data.draw(SLICES), data.draw(st.sampled_from([0, 1500]))
                self.both(lambda store: store.shrink(slice_us, keep))
            case "commit":
                dead = data.draw(SOME)
                self.both(lambda store: [(f.file_no, f.blocks) for f in store.persist(skip=dead)])
                self.purge(dead)
                self.both(lambda store: store.drop_replaced())
                self.both(lambda store: store.compact())
            case "else":
                self.read(data.draw(SOME), data.draw(st.booleans()), None)
                self.both(lambda store: store.flush())
                self.both(lambda store: store.compact())


@given(data=st.data(), keep=st.sampled_from([0.0, 0.3]))
def test_blocks_are_where_they_really_are(data: st.DataObject, keep: float) -> None:
    with tempfile.TemporaryDirectory(prefix="aion-test-") as folder:
        both = Both(Path(folder), keep)
        try:
            for _ in range(data.draw(st.integers(5, 30))):
                both.step(data)
        finally:
            both.rig.close()
