"""Everything that a store can be asked for, in any order, against a dict, and within its memory budget."""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Sequence
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

from policies.destage import DestagePolicy, MemoryView, StandardDestage, Suggestion
from state_backends.backends import STORES
from state_backends.files.names import SstFile
from state_backends.format.block import Compacted
from state_backends.store import body_files
from state_backends.store.m_bucket import PeriodicWindows
from state_backends.store.pressure import PressureManager
from state_backends.store.protocol import Only
from tests.stores.rig import EAGER, KIB, Rig

BUDGET = 12 * KIB
LARGEST = 3 * KIB + 100
"""Bytes of the largest block that is appended."""


class AnyDestage:
    """A policy that suggests whatever is drawn."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def suggest(self, view: MemoryView) -> list[Suggestion]:
        names = [window.name for window in view.windows]
        chosen = self._data.draw(st.lists(st.sampled_from([*names, ("store", -1)]), unique=True))
        return [Suggestion(name, self._data.draw(st.sampled_from([0, 1500, 5000])), "drawn") for name in chosen]


class StoreMachine(RuleBasedStateMachine):
    """A store against a dict, with any policy, a disk that may break, and versions to go back to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.temporary = tempfile.TemporaryDirectory(prefix="aion-test-")
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(body_files, "are_resident", self.are_resident)
        self.near = 0  # of 4 bodies, how many the system has in memory
        self.live: dict[int, int] = {}  # seq -> slice
        self.hidden: dict[int, int] = {}  # replaced, until the next commit
        self.next_seq = 0
        self.known: dict[int, SstFile] = {}
        # The last version: its files, what is alive in them, live blocks, next seq, and the blocks' contents.
        self.version: Any = ([], {}, {}, 0, {})
        self.generation = 0
        self.broken = self.was_broken = False

    def are_resident(self, path: Path, ranges: Sequence[tuple[int, int]]) -> list[bool]:
        return [zlib.crc32(f"{path.name} {offset}".encode()) % 4 < self.near for offset, _ in ranges]

    @initialize(
        keep=st.sampled_from([0.0, 0.3, 1.0]),
        bucket_limit=st.sampled_from([KIB, 4 * KIB, BUDGET]),
        windows=st.sampled_from([(), (PeriodicWindows(2000, 1000, 0),)]),
        blocking=st.booleans(),
        is_local=st.booleans(),
        thresholds=st.lists(st.floats(0, 1), min_size=3, max_size=3, unique=True),
        victim=st.sampled_from(["largest", "slowest"]),
        idle_after_s=st.none() | st.just(60.0),
    )
    def begin(
        self,
        keep: float,
        bucket_limit: int,
        windows: Any,
        blocking: bool,
        is_local: bool,
        thresholds: list[float],
        victim: Any,
        idle_after_s: float | None,
    ) -> None:
        self.rig = Rig(
            self.kind,
            Path(self.temporary.name),
            budget=BUDGET,
            bucket_limit=bucket_limit,
            keep=keep,
            limits=EAGER,
            windows=windows,
            blocking=blocking,
            is_local=is_local,
        )
        resume, moderate, scarce = sorted(thresholds)
        self.standard = StandardDestage(
            keep_fraction=keep,
            idle_after_s=idle_after_s,
            moderate=moderate,
            resume=resume,
            scarce=scarce,
            victim=victim,
        )

    slices = st.integers(0, 4)

    def slice_us(self, number: int) -> int:
        """Purged slices never come back: the numbers that were purged have new names."""
        return number * 1000 + self.generation

    def live_slices(self) -> list[int]:
        return sorted(set(self.live.values()))

    def arrival(self, seq: int) -> int:
        compacted = self.rig.blocks[seq].header.compacted
        return seq if compacted is None else compacted.last_seq

    def in_order(self, slices: Sequence[int]) -> list[int]:
        """Live blocks of these slices, by slice and in the order of arrival."""
        return [seq for _, _, seq in sorted((s, self.arrival(seq), seq) for seq, s in self.live.items() if s in slices)]

    @precondition(lambda self: self.live and not self.broken)
    @rule(data=st.data(), late=st.booleans(), count=st.integers(1, 2))
    def compaction(self, data: st.DataObject, late: bool, count: int) -> None:
        """Replaces some neighbouring blocks of a slice by a run of one block or two."""
        slice_us = data.draw(st.sampled_from(self.live_slices()))
        arrivals = sorted({self.arrival(seq) for seq in self.in_order([slice_us])})
        until = data.draw(st.sampled_from(arrivals))
        after = data.draw(st.sampled_from([-1, *(a for a in arrivals if a < until)]))
        old = [seq for seq in self.in_order([slice_us]) if after < self.arrival(seq) <= until]
        below = self.next_seq
        for part in range(count):
            self.rig.append(
                (self.next_seq, slice_us), late=late, compacted=Compacted(until, part * 100, part * 100 + 99)
            )
            self.next_seq += 1
        self.rig.store.replace({slice_us: (after, until)}, below)
        self.live |= dict.fromkeys(range(below, self.next_seq), slice_us)
        self.hidden |= {seq: self.live.pop(seq) for seq in old}

    @rule(data=st.data(), low=st.integers(0, 250), below=st.none() | st.integers(0, 60))
    def read_some(self, data: st.DataObject, low: int, below: int | None) -> None:
        slices = self.live_slices()
        after = data.draw(st.integers(-1, max(self.next_seq, 0)))
        only = Only(dict.fromkeys(slices[:1], (after, after + 5)), [(low, low + 10)], below)
        wanted = []
        for seq in self.in_order(slices):
            compacted = self.rig.blocks[seq].header.compacted
            in_span = self.live[seq] not in slices[:1] or after < self.arrival(seq) <= after + 5
            meets = compacted is None or (compacted.low <= low + 10 and low <= compacted.high)
            wanted += [seq] * (in_span and meets and (below is None or seq < below))
        assert [self.rig.check(stored) for stored in self.rig.store.read(slices, only=only)] == wanted

    @rule(
        number=slices,
        late=st.booleans(),
        size=st.sampled_from([0, 900, 3000]),
        count=st.integers(1, 4),
        hands_over=st.booleans(),
    )
    def append(self, number: int, late: bool, size: int, count: int, hands_over: bool) -> None:
        total = sum(self.rig.whole_bytes(seq) for seq in self.live | self.hidden)
        if self.broken and total + count * max(size, KIB) > 6 * KIB:  # the ledger may take the other half
            return  # it might be refused, or not: that depends on how far the I/O thread is
        blocks = [(self.next_seq + n, self.slice_us(number)) for n in range(count)]
        (self.rig.hand_over if hands_over else self.rig.append)(*blocks, late=late, size=size)
        self.live |= dict(blocks)
        self.next_seq += count

    @rule(data=st.data(), blocking=st.booleans())
    def read(self, data: st.DataObject, blocking: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from([*self.live_slices(), -1])))
        assert self.rig.read(*chosen, blocking=blocking) == self.in_order(chosen)

    @rule(data=st.data(), until=st.none() | st.integers(0, 60), speed=st.sampled_from([None, 1.0, 1e4, 1e9]))
    def prestage(self, data: st.DataObject, until: int | None, speed: float | None) -> None:
        """How much of a slice it takes depends on the speed of the function, and on that of the disk so far."""
        self.rig.store.processing_bytes_per_s = speed  # type: ignore[attr-defined]
        slices = data.draw(st.lists(st.sampled_from([*self.live_slices(), -1]), unique=True))
        self.rig.store.prestage(slices, None if until is None else Only(below=until))

    @rule(near=st.sampled_from([0, 0, 2, 4]))
    def page_cache(self, near: int) -> None:
        self.near = near

    @precondition(lambda self: self.live)
    @rule(data=st.data(), until=st.integers(0, 3))
    def read_half_way(self, data: st.DataObject, until: int) -> None:
        reader = self.rig.store.read(data.draw(st.lists(st.sampled_from(self.live_slices()), min_size=1)))
        for stored, _ in zip(reader, range(until), strict=False):
            self.rig.check(stored)
        reader.close()  # type: ignore[attr-defined]

    @rule(data=st.data())
    def destage(self, data: st.DataObject) -> None:
        self.rig.store.destage(data.draw(st.lists(st.sampled_from([*self.live_slices(), -1]), unique=True)))

    @rule(
        data=st.data(),
        is_standard=st.booleans(),
        machine_share=st.sampled_from([0.0, 0.5, 0.97]),
        later_s=st.sampled_from([0.0, 100.0]),
        executed_s=st.none() | st.just(1.0),
    )
    def press(
        self,
        data: st.DataObject,
        is_standard: bool,
        machine_share: float,
        later_s: float,
        executed_s: float | None,
    ) -> None:
        """The policy looks at memory, and what it suggests is done."""
        policy: DestagePolicy = self.standard if is_standard else AnyDestage(data)
        manager = PressureManager(
            self.rig.budget, policy, lambda: machine_share, clock=lambda: time.monotonic() + later_s
        )
        manager.tick([("store", self.rig.store)], executed_s)

    @rule()
    def flush(self) -> None:
        self.rig.store.flush()

    @rule()
    def settle(self) -> None:
        """At rest, the budget knows of each byte."""
        self.rig.settle()
        self.rig.validate()
        assert self.rig.bytes_in_memory() == self.rig.budget.used_bytes
        assert self.rig.budget.reserved_bytes == 0

    @rule(data=st.data())
    def purge(self, data: st.DataObject) -> None:
        self.forget(data.draw(st.lists(st.sampled_from([*self.live_slices(), -1]), max_size=2, unique=True)))

    def forget(self, slices: list[int]) -> None:
        self.rig.store.purge(slices)
        self.live = {seq: s for seq, s in self.live.items() if s not in slices}
        self.hidden = {seq: s for seq, s in self.hidden.items() if s not in slices}
        self.generation += 1

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """As a shard commits: what is dead need not be written, and is purged when the rest is."""
        dead = data.draw(st.lists(st.sampled_from([*self.live_slices(), -1]), max_size=2, unique=True))
        try:
            files = self.rig.store.persist(skip=dead)
        except OSError:
            assert self.broken
            return
        self.known |= {f.file_no: f for f in files}
        holds = self.rig.store.files(skip=dead)
        self.forget(dead)
        self.rig.store.drop_replaced()
        assert self.rig.store.files() == holds
        self.hidden = {}
        contents = dict(self.rig.blocks)
        files = [self.known[no] for no in sorted(holds)]
        self.version = (files, holds, dict(self.live), self.next_seq, contents)

    @rule()
    def compact(self) -> None:
        """Only what is in the last version: nothing else is there for good."""
        self.rig.store.compact([f.file_no for f in self.version[0]])

    @precondition(lambda self: not self.broken)
    @rule()
    def rollback(self) -> None:
        self.next_seq = self.version[3]
        self.rig.store.rollback(self.next_seq)
        self.live = {seq: s for seq, s in (self.live | self.hidden).items() if seq < self.next_seq}
        self.hidden = {}

    @precondition(lambda self: not self.broken)
    @rule()
    def crash(self) -> None:
        files, holds, live, self.next_seq, contents = self.version
        self.rig.reopen(files, holds)
        self.live, self.hidden, self.rig.blocks = dict(live), {}, dict(contents)
        self.generation += 1

    @rule()
    def break_or_heal(self) -> None:
        self.rig.settle()
        (self.rig.heal_disk if self.broken else self.rig.break_disk)()
        self.broken, self.was_broken = not self.broken, True

    @invariant()
    def agrees(self) -> None:
        store = self.rig.store
        store.validate()  # type: ignore[attr-defined]
        stats = store.stats()
        total = sum(self.rig.whole_bytes(seq) for seq in self.live | self.hidden)
        assert stats.blocks == len(self.live) + len(self.hidden)
        in_memory, on_disk = (sum(sizes) for sizes in zip((0, 0), *store.tiers(self.next_seq).values(), strict=True))
        is_local = bool(self.rig.handed.bodies.folders)  # otherwise bodies are elsewhere
        assert in_memory + on_disk == total if is_local else in_memory + on_disk <= total
        assert self.was_broken or not stats.failed_merges
        assert max(stats.m_bucket_bytes, stats.p_bucket_bytes) <= total <= stats.m_bucket_bytes + stats.disk_only_bytes
        if self.rig.kind == "tiered" and not self.was_broken:
            assert self.rig.budget.peak_bytes <= BUDGET + LARGEST
            assert self.rig.budget.least_left_bytes >= -LARGEST

    def teardown(self) -> None:
        try:
            if hasattr(self, "rig"):  # it may have been refused what it drew to begin with
                assert self.rig.read(*self.live_slices()) == self.in_order(self.live_slices())
                self.settle()
                self.rig.close()
                assert not self.rig.staged.exists()
        finally:
            self.patch.undo()
            self.temporary.cleanup()


@pytest.mark.slow(but_first=True)
@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", STORES)
def test_any_order_of_events(kind: str) -> None:
    examples = max(settings().max_examples, 25 if kind == "tiered" else 1)  # the others have no budget to keep
    run_state_machine_as_test(
        lambda: StoreMachine(kind), settings=settings(stateful_step_count=40, max_examples=examples)
    )
