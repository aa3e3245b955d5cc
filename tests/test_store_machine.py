"""The store in any order of events, on a disk that is slow, stuck, failing or cut off, against a dict."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aion.errors import StateError
from policies.destage import StandardDestage
from state_backends.block import Block
from state_backends.io_thread import IoThread, Priority, Request, Steps
from state_backends.m_bucket import MemoryBudget
from state_backends.p_bucket import PBucket
from state_backends.pressure import PressureManager
from state_backends.store import StoredBlock
from state_backends.stores import STORES
from state_backends.tiered import TieredStore
from tests.simulated_disk import Disk, Job, OnDisk, at_rest
from tests.test_checkpoint import Host
from tests.test_io_thread import PATIENCE
from tests.test_store_contract import make_block

KIB = 1 << 10
BUDGET, LARGEST = 12 * KIB, 3 * KIB + 100
AN_HOUR = 3600.0  # seconds, and longer than any example runs

SLICES = st.integers(0, 4)
SIZES = st.lists(st.sampled_from([0, 900, 3000]), min_size=1, max_size=5)
ONE_IN_4 = st.sampled_from([False, False, False, True])

Contents = dict[int, tuple[int, bytes]]  # seq -> slice, encoded block


class ListeningIo(IoThread):
    """Knows of every failure that was not simulated, also of those that nobody waits for."""

    def __init__(self) -> None:
        self.unexpected: list[BaseException] = []
        super().__init__()

    def submit(self, priority: Priority, steps: Steps[Any]) -> Request[Any]:
        request = super().submit(priority, steps)
        request.future.add_done_callback(self._note)
        return request

    def _note(self, future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is not None and "simulated" not in str(future.exception()):
            self.unexpected.append(future.exception())  # type: ignore[arg-type]


class Embedded:
    """A shard as LocalOperator has it: without versions; what is purged is purged at once."""

    token = None

    def __init__(self, store: TieredStore) -> None:
        self.store = store

    def open(self, token: None, attempt: str, identity: object) -> None:
        pass

    def append(self, attempt: str, blocks: Sequence[tuple[int, bool, Block]]) -> None:
        for seq, late, block in blocks:
            self.store.append(seq, block, late=late)

    def read(self, attempt: str, slices: Sequence[int], *, blocking: bool = False) -> Iterator[StoredBlock]:
        return self.store.read(slices, blocking=blocking)

    def destage(self, attempt: str, slices: Sequence[int]) -> None:
        self.store.destage(slices)

    def purge(self, attempt: str, slices: Sequence[int]) -> None:
        self.store.purge(slices)

    def close(self) -> None:
        self.store.close()


class SlowHost(Host):
    """A host of one shard, on a simulated disk. The budget is the host's: what is closed gives back what it had."""

    def __init__(self, kind: str, folder: Path, *, embedded: bool, **options: Any) -> None:
        self.embedded, self.options = embedded, options
        self.disks = [Disk()]
        self.budget = MemoryBudget(BUDGET)
        super().__init__(kind, folder)

    def make_store(self, p_bucket: PBucket) -> TieredStore:
        on_disk: Any = OnDisk(p_bucket, self.disk)
        store = STORES[self.kind](on_disk, self.io, self.budget, bucket_limit_bytes=4 * KIB, **self.options)
        store.processing_bytes_per_s = 1.0
        return store

    def start(self) -> None:
        super().start()
        self.io.close()
        self.io = ListeningIo()
        if self.embedded:
            p_bucket = PBucket(self.folder / "state" / "files", self.folder / "live", durable=False)
            self.shard: Any = Embedded(self.make_store(p_bucket))

    @property
    def disk(self) -> Disk:
        return self.disks[-1]  # the older ones hold what was half done when they were cut off

    @property
    def store(self) -> TieredStore | None:
        return self.shard.store  # type: ignore[return-value]

    def lose_power(self, jobs: Iterable[Job]) -> None:
        """The host is gone in the middle of whatever it did."""
        self.disk.cut = True
        self.disk.go()
        for job in jobs:  # they may come to any end
            job.join(PATIENCE)
        self.stop()
        assert self.budget.used_bytes == 0

    def come_back(self) -> None:
        left = self.folder / "live" / "db"
        left.mkdir(parents=True, exist_ok=True)
        (left / "CURRENT").write_text("what RocksDB left")
        self.disks.append(Disk())
        self.budget = MemoryBudget(BUDGET)
        self.start()


@dataclass
class Version:
    """What was committed, and the version that it came from."""

    parent: str | None
    blocks: Contents
    next_seq: int
    dead: frozenset[int]


@dataclass
class Reader:
    """A read that was begun: what it is to find, and what may come between."""

    blocks: Iterator[Any]
    expected: list[tuple[int, bytes]]  # that are still to come
    gone: set[int] = field(default_factory=set)  # seqs that were purged, or undone, since
    troubled: bool = False  # by a disk that could not be read
    busy: bool = False


class StoreMachine(RuleBasedStateMachine):
    """A shard over a store, with one line of versions. What Spark may choose is ShardMachine's (test_checkpoint).

    While the disk is stuck, a call that has to wait for it goes on in a thread of its own, and other things happen.
    """

    def __init__(self, kind: str, folder: Path, *, embedded: bool = False, **options: Any) -> None:
        super().__init__()
        self.host = SlowHost(kind, folder, embedded=embedded, **options)
        self.kind, self.embedded = kind, embedded
        self.policy = StandardDestage(idle_after_s=AN_HOUR, keep_fraction=options.get("keep_fraction", 0.0))
        self.versions: dict[str | None, Version] = {None: Version(None, {}, 0, frozenset())}
        self.token: str | None = None
        self.attempt: str | None = None
        self.live: Contents = {}
        self.next_seq = 0
        self.purging: set[int] = set()
        self.made = 0
        self.readers: list[Reader] = []
        self.jobs: dict[Job, Callable[[Job], None]] = {}
        self.troubled: set[Job] = set()  # by a disk that failed at some time
        self.working: Job | None = None  # the one that has the shard; readers need no turn
        self.stuck = self.crashed = self.rebuilding = self.cannot_drop = False
        self.excused = False  # memory exceeds the budget because the disk takes nothing

    # -- how calls are made -------------------------------------------------------------------------------

    @property
    def disk(self) -> Disk:
        return self.host.disk

    def rest(self) -> None:
        """Lets everything come as far as it gets, and looks at what came of it."""
        while True:
            at_rest(self.host.io, self.disk, self.jobs)
            done = [job for job in self.jobs if not job.is_alive()]
            for job in done:
                job.join()
                if job is self.working:
                    self.working = None
                self.jobs.pop(job)(job)
            if not done:
                return

    def call(self, what: Callable[[], Any], then: Callable[[Job], None], *, works: bool = True) -> None:
        job = Job(what)
        self.jobs[job] = then
        if self.disk.failing:
            self.troubled.add(job)
        if works:
            self.working = job
        self.rest()
        assert self.stuck or job not in self.jobs, "the disk is not stuck, and it waits all the same"

    idle = precondition(lambda self: self.working is None)
    at_work = precondition(lambda self: self.working is None and self.attempt is not None)
    versioned = precondition(lambda self: not self.embedded)

    def slices_of(self, data: st.DataObject) -> list[int]:
        """Some slices, or all, and one that has nothing."""
        slices = [*sorted({s for s, _ in self.live.values()}), -1]
        some = st.lists(st.sampled_from(slices), min_size=1, unique=True)
        return data.draw(st.just(slices) | some, "slices")

    # -- attempts -----------------------------------------------------------------------------------------

    @initialize(
        past=st.lists(st.tuples(SLICES, st.booleans(), SIZES), max_size=4),
        expired=st.booleans(),
        old=ONE_IN_4,
        slow=st.booleans(),
    )
    def begin(self, past: list[tuple[int, bool, list[int]]], expired: bool, old: bool, slow: bool) -> None:
        """With something to lose."""
        self.open(back=False)
        for slice_, late, sizes in past:
            self.append(slice_, late, sizes)
        assert self.attempt
        if expired:
            self.host.shard.destage(self.attempt, [*{s for s, _ in self.live.values()}])
            self.rest()
        if old and not self.embedded:
            self.commit()
            self.open(back=False)
        if slow:
            self.gets_stuck()

    @versioned
    @idle
    @rule(back=ONE_IN_4)
    def open(self, back: bool) -> None:
        """Also when another attempt is at work, which is undone; and for the version before."""
        held = self.host.shard.token
        if back:
            self.token = self.versions[self.token].parent
        version = self.versions[self.token]
        # Who reads from a store that was closed is told so, or from one that forgot what the attempt appended.
        self.rebuilding = held != self.token or self.host.store is None
        self.interrupt(0 if self.rebuilding else version.next_seq)
        self.attempt, self.purging = None, set()

        def opened(job: Job) -> None:
            self.rebuilding = False
            if job.error is not None:
                assert job in self.troubled and "simulated" in str(job.error), repr(job.error)
                return
            self.attempt, snapshot = job.value
            self.live, self.next_seq = dict(version.blocks), version.next_seq
            assert (snapshot or {"next_seq": 0})["next_seq"] == version.next_seq

        self.call(lambda: self.host.open(self.token), opened)

    def interrupt(self, from_seq: int) -> None:
        for reader in self.readers:
            reader.gone |= {seq for seq, _ in reader.expected if seq >= from_seq}

    @at_work
    @rule(slice_=SLICES, sizes=SIZES)
    def events_come_late(self, slice_: int, sizes: list[int]) -> None:
        self.append(slice_, True, sizes)

    @at_work
    @rule(slice_=SLICES, sizes=SIZES)
    def events_come(self, slice_: int, sizes: list[int]) -> None:
        self.append(slice_, False, sizes)

    def append(self, slice_: int, late: bool, sizes: list[int]) -> None:
        dead = self.versions[self.token].dead | self.purging
        slice_us = next(s for s in range(slice_, 10**6, 10) if s not in dead)
        blocks = []
        for size in sizes:
            self.made += 1
            block = make_block(slice_us, self.made, size)
            self.host.blocks[bytes(block.data)] = self.next_seq
            self.live[self.next_seq] = slice_us, bytes(block.data)
            blocks.append((self.next_seq, late, block))
            self.next_seq += 1
        attempt, shard = self.attempt, self.host.shard
        assert attempt

        def appended(job: Job) -> None:
            assert job.error is None, "what cannot be written stays in memory"
            if "write" in self.disk.failing or self.kind == "memory":
                return
            if self.excused:
                assert self.host.budget.left() >= -LARGEST, "the disk takes blocks again, and memory is not relieved"
                self.host.budget.peak_bytes, self.excused = self.host.budget.used_bytes, False

        if self.stuck:
            self.call(lambda: [shard.append(attempt, [block]) for block in blocks], appended)
        else:  # one by one, so that what each finds is what the one before left, and no race
            for block in blocks:
                self.call(lambda block=block: shard.append(attempt, [block]), appended)

    @at_work
    @rule(data=st.data())
    def destage(self, data: st.DataObject) -> None:
        """Windows expire."""
        assert self.attempt
        self.host.shard.destage(self.attempt, self.slices_of(data))
        self.rest()

    @precondition(lambda self: self.embedded)
    @at_work
    @rule(data=st.data())
    def windows_end(self, data: st.DataObject) -> None:
        self.purge(data)

    def purge(self, data: st.DataObject) -> None:
        assert self.attempt
        slices = self.slices_of(data)[:2]
        self.purging |= set(slices)
        if self.embedded:
            self.forget(self.purging)
            self.live = {seq: b for seq, b in self.live.items() if b[0] not in slices}
        self.host.shard.purge(self.attempt, slices)
        self.rest()

    def forget(self, slices: Collection[int]) -> None:
        """Who reads these is told so, from now on."""
        gone = {seq for seq, (s, _) in self.live.items() if s in slices}
        for reader in self.readers:
            reader.gone |= gone

    @versioned
    @at_work
    @rule(data=st.data(), purges=st.booleans())
    def commits(self, data: st.DataObject, purges: bool) -> None:
        if purges:
            self.purge(data)
        self.commit()
        self.next_attempt()

    def next_attempt(self) -> None:
        if self.attempt is None and self.working is None:
            self.open(back=False)

    def commit(self) -> None:
        attempt, next_seq, shard, parent = self.attempt, self.next_seq, self.host.shard, self.token
        assert attempt
        purging = frozenset(self.purging)
        blocks = {seq: b for seq, b in self.live.items() if b[0] not in purging}
        self.forget(purging)

        def committed(job: Job) -> None:
            if job.error is not None:
                assert job in self.troubled and "simulated" in str(job.error), repr(job.error)
                return
            self.versions[attempt] = Version(parent, blocks, next_seq, self.versions[parent].dead | purging)
            self.token, self.attempt = attempt, None
            self.live = dict(blocks)

        self.call(lambda: shard.commit(attempt, {"next_seq": next_seq}), committed)

    @versioned
    @at_work
    @rule()
    def abort(self) -> None:
        attempt, shard = self.attempt, self.host.shard
        assert attempt
        version = self.versions[self.token]
        self.interrupt(version.next_seq)
        self.attempt = None

        def aborted(job: Job) -> None:
            assert job.error is None
            self.live, self.next_seq = dict(version.blocks), version.next_seq

        self.call(lambda: shard.abort(attempt), aborted)
        self.next_attempt()

    @versioned
    @precondition(lambda self: self.jobs or self.next_seq > self.versions[self.token].next_seq)
    @rule(back=ONE_IN_4)
    def crash(self, back: bool) -> None:
        for reader in self.readers:
            if not reader.busy:
                reader.blocks.close()  # type: ignore[attr-defined]
        self.readers = []
        self.host.lose_power(self.jobs)
        self.host.come_back()
        self.crashed = True
        self.jobs, self.working, self.stuck, self.excused, self.rebuilding = {}, None, False, False, False
        self.attempt = None
        self.open(back)

    # -- reading ------------------------------------------------------------------------------------------

    @at_work
    @rule(data=st.data(), blocking=st.booleans(), count=st.integers(1, 3))
    def begin_to_read(self, data: st.DataObject, blocking: bool, count: int) -> None:
        assert self.attempt
        slices = self.slices_of(data)
        wanted = sorted((s, seq, block) for seq, (s, block) in self.live.items() if s in slices)
        reader = Reader(
            self.host.shard.read(self.attempt, slices, blocking=blocking), [(seq, block) for _, seq, block in wanted]
        )
        self.readers.append(reader)
        self.go_on(reader, count)

    @precondition(lambda self: any(not r.busy for r in self.readers))
    @rule(data=st.data(), count=st.integers(0, 8))
    def read_on(self, data: st.DataObject, count: int) -> None:
        """Or give up. Not only with the shard at hand: a server streams while others work."""
        ready = [r for r in self.readers if not r.busy]
        reader = ready[data.draw(st.integers(0, len(ready) - 1), "reader")]
        if count:
            self.go_on(reader, count)
        else:
            reader.blocks.close()  # type: ignore[attr-defined]
            self.readers.remove(reader)
            self.rest()

    def go_on(self, reader: Reader, count: int) -> None:
        found: list[tuple[int, bytes]] = []
        reader.troubled |= "read" in self.disk.failing
        reader.busy = True

        def some() -> bool:
            """Whether it came to its end."""
            for _ in range(count):
                stored = next(reader.blocks, None)
                if stored is None:
                    return True
                found.append((stored.seq, bytes(stored.block.data)))
            return False

        def read(job: Job) -> None:
            reader.busy = False
            assert found == reader.expected[: len(found)]
            reader.expected = reader.expected[len(found) :]
            if type(job.error) is StateError:  # and not that a block is corrupt
                assert reader.expected and reader.expected[0][0] in reader.gone, repr(job.error)
            elif job.error is not None:
                assert reader.troubled and "simulated" in str(job.error), repr(job.error)
            elif not job.value:
                return
            else:
                assert reader.expected == [], "it ends before all was read"
            self.readers.remove(reader)

        self.call(some, read, works=False)

    # -- what the host does meanwhile ---------------------------------------------------------------------

    @precondition(lambda self: self.working is None and self.host.store is not None)
    @rule(data=st.data())
    def prestage(self, data: st.DataObject) -> None:
        """Between two attempts, too."""
        assert self.host.store
        self.host.store.prestage(self.slices_of(data))
        self.rest()

    @precondition(lambda self: self.host.store is not None)
    @rule()
    def flush(self) -> None:
        assert self.host.store
        self.host.store.flush()
        self.rest()
        stats = self.host.store.stats()
        if self.kind == "rocksdb" and not self.stuck and not self.disk.failing and not stats.staging.staged_bytes:
            assert stats.m_bucket_bytes == 0, "all was to leave memory, and the disk takes it"

    @precondition(lambda self: self.host.store is not None)
    @rule(share=st.sampled_from([0.0, 0.8, 1.0]), later=st.booleans())
    def pressure(self, share: float, later: bool) -> None:
        """In the sampler's thread: whatever is at work meanwhile. ``later``: nothing came for long."""
        store = self.host.store
        assert store
        manager = PressureManager(
            self.host.budget, self.policy, lambda: share, lambda: time.monotonic() + (2 * AN_HOUR if later else 0)
        )
        views = store.views()
        manager.tick([("shard", store)])
        assert self.policy.pressed or share < self.policy.moderate
        self.rest()
        if share == 1.0 and not self.stuck and not self.disk.failing and self.kind != "memory":
            kept = sum(view["keep_bytes"] for view in views)
            assert store.stats().m_bucket_bytes <= kept, "memory is scarce: all but the bootstrap part goes"

    # -- what the disk does -------------------------------------------------------------------------------

    @precondition(lambda self: not self.stuck)
    @rule()
    def gets_stuck(self) -> None:
        self.disk.hold()
        self.stuck = True

    @precondition(lambda self: self.stuck)
    @rule(count=st.integers(1, 6))
    def moves_a_little(self, count: int) -> None:
        """Some steps, but no further than to where somebody waits no more."""
        waiting = len(self.jobs)
        for _ in range(count):
            self.disk.step()
            self.rest()
            if len(self.jobs) < waiting:
                break
        self.next_attempt()

    @precondition(lambda self: self.stuck)
    @rule()
    def moves_again(self) -> None:
        while self.jobs:
            self.disk.step()
            self.rest()
        self.disk.go()
        self.stuck = False
        self.rest()

    @rule(what=st.sampled_from(["", "", "write", "read", "drop", "read write drop"]), after=st.integers(0, 3))
    def fails(self, what: str, after: int) -> None:
        """Or is well again."""
        self.disk.fail(what.split(), after)
        self.excused |= "write" in what
        self.cannot_drop |= "drop" in what
        self.troubled |= set(self.jobs) if what else set()
        for reader in self.readers:
            reader.troubled |= "read" in what

    # -- what is true after every step --------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        host, store = self.host, self.host.store
        assert host.io.unexpected == []  # type: ignore[attr-defined]
        if self.rebuilding:
            return  # one store is half closed, and the other half open
        if store is None:
            assert host.budget.used_bytes == host.budget.reserved_bytes == 0
            return
        store.validate()
        stats = store.stats()
        assert stats.m_bucket_bytes == host.budget.used_bytes
        assert stats.staging.vain_bytes <= stats.staging.staged_bytes
        if self.kind != "memory" and not self.excused:
            assert host.budget.peak_bytes <= BUDGET + LARGEST
        if not self.stuck:
            assert host.budget.reserved_bytes == 0, "room is kept for what is on its way only"
        if self.working is not None or (self.attempt is None and self.host.shard.token != self.token):
            return
        total = sum(len(block) for _, block in self.live.values())
        assert stats.blocks == len(self.live)
        assert max(stats.m_bucket_bytes, stats.p_bucket_bytes) <= total <= stats.m_bucket_bytes + stats.disk_only_bytes
        if self.kind == "memory":
            assert stats.disk_only_bytes == 0
        if self.attempt is not None and not self.stuck and not self.disk.failing:
            self.everything_is_there()

    def everything_is_there(self) -> None:
        assert self.attempt
        found = self.host.read(self.attempt, *{s for s, _ in self.live.values()})
        wanted = sorted((s, seq, block) for seq, (s, block) in self.live.items())
        assert found == [(seq, block) for _, seq, block in wanted]

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # or that failure is told, and not what follows from it
                self.end()
        finally:
            with contextlib.suppress(Exception):
                self.host.lose_power(self.jobs)

    def end(self) -> None:
        if self.stuck:
            self.moves_again()
        self.disk.fail(())
        while self.readers:
            self.go_on(self.readers[0], 10**6)
        if not self.embedded:
            self.open(back=False)
        self.everything_is_there()
        if self.embedded:
            assert self.attempt
            self.host.shard.purge(self.attempt, [s for s, _ in self.live.values()])
            self.rest()
            assert self.cannot_drop or self.host.files() == set(), "what is dead leaves the disk"
        else:
            self.commit()
        assert self.host.budget.reserved_bytes == 0
        self.host.stop()
        assert self.host.budget.used_bytes == 0
        assert not (self.host.folder / "live").exists()
        if self.crashed:
            self.nothing_is_left_of_what_failed()
        shutil.rmtree(self.host.folder, ignore_errors=True)  # there may be none

    def depth(self, token: str | None) -> int:
        return 0 if token is None else 1 + self.depth(self.versions[token].parent)

    def nothing_is_left_of_what_failed(self) -> None:
        """A few versions later; by their numbers, versions and files are told that nobody will ask for any more."""
        host = self.host
        host.retain = 2
        host.start()
        slices = {s for s, _ in self.live.values()}
        versions = max(map(self.depth, self.versions)) - self.depth(self.token)
        files = max((int(name.partition("-")[0]) for name in host.files()), default=0)
        tokens = [self.token]
        for i in range(max(versions, files) + 3):
            tokens.append(host.commit(tokens[-1], (self.next_seq + i, -2)))
        wanted = sorted((s, seq) for seq, (s, _) in self.live.items())
        assert host.seqs(tokens[-1], *slices) == [seq for _, seq in wanted]
        host.stop()
        assert host.files() == host.named_files(*tokens[-2:])
        assert host.manifests() == {*tokens[-2:]}


# The store, how it is made, and the share of examples.
KINDS: dict[str, tuple[str, dict[str, Any], float]] = {
    "memory": ("memory", {}, 0.4),
    "rocksdb": ("rocksdb", {}, 0.6),
    "tiered": ("tiered", {}, 1.0),
    "embedded": ("tiered", {"embedded": True}, 0.8),
    "a part stays": ("tiered", {"keep_fraction": 0.3}, 0.6),
    "no more than needed": ("tiered", {"keep_fraction": 0.3, "blocking": False}, 0.6),
}


@pytest.mark.timeout(900)  # should it fail, the example is made small
@pytest.mark.parametrize("which", KINDS)
def test_any_order_of_events(which: str, quick_folder: Path) -> None:
    kind, options, share = KINDS[which]
    numbers = itertools.count()
    run_state_machine_as_test(
        lambda: StoreMachine(kind, quick_folder / str(next(numbers)), **options),
        settings=settings(max_examples=max(1, int(settings.default.max_examples * share)), stateful_step_count=60),
    )
