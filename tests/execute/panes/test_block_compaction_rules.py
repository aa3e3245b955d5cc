"""Which blocks are compacted and when, and by which hashes keys are found again: decisions without any data."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aion.core.compaction import BlockCompaction, BlockFact, Compact, CompactionDone
from aion.core.ingest.key_ranges import MOST_KEYS, TOP, Keys, equal_ranges
from aion.core.packing import untable
from aion.execute.executor import carry_out
from state_backends.store.ledger import Ledger, Place
from state_backends.store.protocol import Only, StoredBlock

# -- which runs are compacted, and when ------------------------------------------------------------------------


def runs_of(compaction: BlockCompaction) -> list[tuple[int, int]]:
    """The last number and the size of each run of slice 0."""
    runs = untable(compaction.to_json())
    columns = zip(runs["slice"], runs["last_seq"], runs["size_bytes"], strict=True)
    return [(last_seq, size_bytes) for slice_us, last_seq, size_bytes in columns if slice_us == 0]


class Model:
    """A slice whose blocks each hold a set of keys. Its size is their number, and compaction merges the sets."""

    def __init__(self, compaction: BlockCompaction) -> None:
        self.compaction = compaction
        self.blocks: list[tuple[int, frozenset[int]]] = []  # by arrival
        self.seq = self.came = self.rewritten = 0
        self.cuts: list[int] = []

    def batch(self, sets: Sequence[frozenset[int]], *, ended: bool = False) -> None:
        for keys in sets:
            self.blocks.append((self.seq, keys))
            self.compaction.arrived(BlockFact(0, 1, len(keys)), self.seq)
            self.seq += 1
            self.came += len(keys)
        self.compact(ended=ended)

    def compact(self, *, ended: bool) -> None:
        while due := self.compaction.due(0, self.cuts, ended=ended):
            compaction = due[0]
            inside = [b for b in self.blocks if compaction.after < b[0] <= compaction.until]
            assert len(inside) > 1 and compaction.size_bytes == sum(len(keys) for _, keys in inside)
            assert len({bisect.bisect(self.cuts, seq) for seq, _ in inside}) == 1, "a cut goes through it"
            together = frozenset().union(*(keys for _, keys in inside))
            place = self.blocks.index(inside[0])
            self.blocks[place : place + len(inside)] = [(compaction.until, together)]
            self.rewritten += len(together)
            self.compaction.compacted(CompactionDone(compaction, len(together)))
        assert runs_of(self.compaction) == [(seq, len(keys)) for seq, keys in self.blocks]

    def stretches(self) -> list[list[frozenset[int]]]:
        found: dict[int, list[frozenset[int]]] = {}
        for seq, keys in self.blocks:
            found.setdefault(bisect.bisect(self.cuts, seq), []).append(keys)
        return list(found.values())


key_sets = st.frozensets(st.integers(0, 60), min_size=1)


@example([[frozenset([0]), frozenset([0]), frozenset([0, 1, 2, 3]), frozenset([0])]], 5)
@example([[frozenset([0, 1]), frozenset([0, 1]), frozenset([0, 1]), frozenset([0])]], 5)
@given(
    st.lists(st.one_of(st.lists(key_sets, max_size=4), st.just("cut"), st.just("restart")), max_size=40),
    st.sampled_from([5, 40, 10**9]),
)
def test_what_is_kept_is_at_most_twice_what_it_would_be_compacted(steps: list[Any], limit: int) -> None:
    model = Model(BlockCompaction(open_too=True, limit_bytes=limit))
    for step in steps:
        if step == "cut":
            model.cuts.append(model.seq)
        elif step == "restart":
            snapshot = model.compaction.to_json()
            model.compaction = BlockCompaction(open_too=True, limit_bytes=limit, snapshot=snapshot)
            assert model.compaction.to_json() == snapshot
        else:
            model.batch(step)
        for runs in model.stretches():
            compacted = len(frozenset().union(*runs))
            assert sum(map(len, runs)) <= 2 * compacted
            assert len(runs) <= 2 * math.log2(compacted) + 2


@pytest.mark.parametrize(("repeats", "rounds"), [(True, 2.1), (False, 10)])
def test_a_byte_is_written_again_seldom(repeats: bool, rounds: float) -> None:
    """A thousand batches: of the same keys, each is written about once more; of new ones, O(log n) times."""
    model = Model(BlockCompaction(open_too=True))
    for batch in range(1000):
        model.batch([frozenset(range(20)) if repeats else frozenset(range(20 * batch, 20 * batch + 20))])
    assert model.rewritten <= rounds * model.came
    assert len(model.blocks) <= (2 if repeats else 20)


def test_kept_events_are_compacted_when_no_window_of_the_slice_is_active_any_more() -> None:
    compaction = BlockCompaction(open_too=False)
    for seq in range(10):
        compaction.arrived(BlockFact(0, 1, 100), seq)
        assert compaction.due(0, [], ended=False) == []
    assert compaction.touched() == [0] and compaction.touched() == []
    assert compaction.due(0, [], ended=True) == [Compact(0, -1, 9, 1000, True)]
    compaction.compacted(CompactionDone(Compact(0, -1, 9, 1000, True), 990))
    for seq in (20, 21):
        compaction.arrived(BlockFact(0, 1, 1), seq)
    assert compaction.due(0, [20], ended=True) == []
    compaction.arrived(BlockFact(0, 1, 1), 22)
    assert compaction.due(0, [20], ended=True) == [Compact(0, 9, 22, 3, True)], (
        "what came late is compacted among itself"
    )
    assert compaction.due(0, [20, 22], ended=True) == [], "and what is news is not compacted with what is not"
    compaction.forget([0])
    assert not runs_of(compaction) and compaction.due(0, [], ended=True) == []


@pytest.mark.usual_sizes
@pytest.mark.parametrize("open_too", [True, False])
def test_what_a_late_event_would_have_read_as_a_whole_is_sorted_when_its_windows_have_ended(open_too: bool) -> None:
    compaction = BlockCompaction(open_too=open_too)
    for seq, size in enumerate([300_000, 200_000]):
        compaction.arrived(BlockFact(0, 1, size), seq)
    assert compaction.due(0, [], ended=False) == [], "the second is no larger than the first"
    (order,) = compaction.due(0, [], ended=True)
    assert order == Compact(0, -1, 1, 500_000, True)
    compaction.compacted(CompactionDone(order, 490_000))
    compaction.arrived(BlockFact(0, 1, 100_000), 2)
    assert compaction.due(0, [2], ended=True) == [], "so little is read at once"
    compaction.arrived(BlockFact(0, 1, 300_000), 3)
    (order,) = compaction.due(0, [2, 3], ended=True)
    assert order == Compact(0, 2, 3, 300_000, True), "one block, and larger than those it is cut into"
    compaction.compacted(CompactionDone(order, 300_000))
    assert compaction.due(0, [2, 3], ended=True) == []


def test_of_more_than_fits_what_is_not_sorted_is_compacted_first() -> None:
    compaction = BlockCompaction(open_too=True, limit_bytes=100)
    for seq in range(5):
        compaction.arrived(BlockFact(0, 1, 40), seq)
    assert compaction.due(0, [], ended=False) == [Compact(0, -1, 1, 80, False), Compact(0, 1, 3, 80, False)]
    for order in compaction.due(0, [], ended=False):
        compaction.compacted(CompactionDone(order, 80))
    assert compaction.due(0, [], ended=False) == [Compact(0, -1, 4, 200, False)], (
        "sorted runs are merged range by range"
    )


def test_a_slice_is_swept_when_no_fewer_of_its_rows_are_gone_than_needed() -> None:
    compaction = BlockCompaction(open_too=True, limit_bytes=100)
    compaction.arrived(BlockFact(0, 1, 90), 0)
    compaction.arrived(BlockFact(0, 1, 60), 1)
    compaction.wasted(0, 3)
    compaction = BlockCompaction(open_too=True, limit_bytes=100, snapshot=compaction.to_json())
    assert compaction.wasteful == [0] and not compaction.sweep(0, 4)
    compaction.wasted(0, 1)
    assert compaction.sweep(0, 4) and compaction.may_compact(0)
    (order,) = compaction.due(0, [], ended=False, sweeps=True)
    assert order == Compact(0, -1, 1, 150, False, sweeps=True)
    compaction.compacted(CompactionDone(order, 0))
    assert not runs_of(compaction) and compaction.wasteful == [] and not compaction.may_compact(0), "nothing was needed"
    compaction.arrived(BlockFact(0, 1, 10), 2)
    compaction.wasted(0, 1)
    assert compaction.sweep(0, 1), "and what comes later is there again"
    (order,) = compaction.due(0, [], ended=True, sweeps=True)
    assert order == Compact(0, -1, 2, 10, True, sweeps=True)


@pytest.mark.parametrize("limit", [100, 10**9])
def test_blocks_from_before_compaction_are_left_as_they_are(limit: int) -> None:
    """State of an Aion that did not compact yet, whose runs nobody knows; nor what its windows tell apart."""
    compaction = BlockCompaction(open_too=True, limit_bytes=limit)
    compaction.leave([0, 7], 12)
    compaction.wasted(0, 10**6)
    assert not compaction.sweep(0, 1) and compaction.due(0, [5], ended=True) == []
    for seq in (12, 13, 14):
        compaction.arrived(BlockFact(0, 1, 40), seq)
    compaction = BlockCompaction(open_too=True, limit_bytes=limit, snapshot=compaction.to_json())
    assert [compaction.after for compaction in compaction.due(0, [5], ended=True)] == [11]


# -- keys by their hashes -----------------------------------------------------------------------------------


@pytest.mark.usual_sizes
@given(st.lists(st.integers(0, TOP), max_size=20), st.lists(st.integers(0, TOP), max_size=20))
def test_keys_are_found_by_their_hashes(wanted: list[int], rows: list[int]) -> None:
    keys = Keys(np.array(wanted, np.int64))
    among = keys.among(np.array(rows, np.int64))
    assert (among.tolist() if among is not None else [True] * len(rows)) == [row in wanted for row in rows]
    assert keys.ranges == [(h, h) for h in sorted(set(wanted))]
    everything = Keys(np.arange(MOST_KEYS + 1))
    assert everything.ranges is None and everything.among(np.array(rows, np.int64)) is None


@given(st.integers(1, 50))
def test_ranges_of_hashes_hold_each_once(parts: int) -> None:
    ranges = equal_ranges(parts)
    assert len(ranges) == parts and (ranges[0][0], ranges[-1][1]) == (0, TOP)
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(ranges))


blocks_in_ledger = st.lists(
    st.tuples(st.integers(0, 2), st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))),
    max_size=20,
)
some_ranges = st.lists(st.integers(0, 99), max_size=8, unique=True).map(
    lambda ends: list(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@given(blocks_in_ledger, st.none() | some_ranges, st.none() | st.integers(0, 20), st.data())
def test_only_some_blocks(blocks: list[Any], keys: Any, below: int | None, data: st.DataObject) -> None:
    """Against the words of :class:`Only`, block by block."""
    from state_backends.format.block import Compacted as OfKeys

    span = st.tuples(st.integers(-1, 99), st.integers(0, 99))
    spans = data.draw(st.none() | st.dictionaries(st.integers(0, 2), span))
    ledger = Ledger()
    wanted = []
    for seq, (slice_us, compacted) in enumerate(blocks):
        of_keys = OfKeys(compacted[0], *sorted(compacted[1:])) if compacted else None
        entry = ledger.add(seq, slice_us, 1, Place.MEMORY, compacted=of_keys)
        after, until = (spans or {}).get(slice_us, (-1, 10**9))
        holds = of_keys is None or keys is None
        if of_keys is not None and keys is not None:
            holds = any(low <= h <= high for low, high in keys for h in range(of_keys.low, of_keys.high + 1))
        if after < entry.arrival <= until and holds and (below is None or seq < below):
            wanted.append((slice_us, entry.arrival, seq))
    found = ledger.of_slices([0, 1, 2], Only(spans, keys, below))
    assert [(e.slice_us, e.arrival, e.seq) for e in found] == sorted(wanted)


# -- runs that were handed over ------------------------------------------------------------------------------


def handed_over(compaction: BlockCompaction, seq: int, size: int, keys: tuple[int, int]) -> None:
    compaction.arrived(BlockFact(0, 1, size, keys), seq)


def test_the_blocks_of_one_child_are_one_sorted_run() -> None:
    compaction = BlockCompaction(open_too=False)
    for seq, keys in enumerate([(0, 10), (10, 20), (25, 30), (5, 40)]):
        handed_over(compaction, seq, 10**6, keys)
    compaction.touched()
    handed_over(compaction, 4, 10**6, (50, 60))
    found = compaction.to_json()
    assert [run[1:3] for run in rows_of_runs(found)] == [(2, 3 * 10**6), (3, 10**6), (4, 10**6)], (
        "windows are executed between batches, so the last one is a run of its own"
    )
    assert compaction.due(0, [], ended=True) == [], "they are sorted, and few"
    assert BlockCompaction(open_too=False, snapshot=found).to_json() == found


@pytest.mark.usual_sizes
def test_runs_that_were_handed_over_are_compacted_when_many_larger_ones_follow() -> None:
    compaction = BlockCompaction(open_too=False)
    handed_over(compaction, 0, 10**8, (0, 9))
    for seq in range(1, 10):
        handed_over(compaction, seq, 10**6, (0, 9))
        assert compaction.due(0, [], ended=True) == []
    handed_over(compaction, 10, 10**6, (0, 9))
    assert compaction.due(0, [], ended=True) == [Compact(0, 0, 10, 10**7, True)]
    assert compaction.due(0, [4], ended=True) == [], "what windows tell apart is not compacted together"
    small = BlockCompaction(open_too=False)
    handed_over(small, 0, 1000, (0, 9))
    for seq in range(1, 8):
        handed_over(small, seq, 10**6, (0, 9))
    assert small.due(0, [], ended=True) == [], "a small run costs one read, and its neighbours many bytes"


def test_rows_are_not_compacted_across_a_run_that_was_handed_over() -> None:
    compaction = BlockCompaction(open_too=False)
    compaction = BlockCompaction(open_too=False)
    for seq in range(5):
        if seq == 2:
            handed_over(compaction, seq, 10**7, (0, 9))
        else:
            compaction.arrived(BlockFact(0, 1, 200_000), seq)
    found = compaction.due(0, [], ended=True)
    assert found == [Compact(0, -1, 1, 400_000, True), Compact(0, 2, 4, 400_000, True)]
    for order in found:
        compaction.compacted(CompactionDone(order, 400_000))
    assert compaction.due(0, [], ended=True) == []


def rows_of_runs(snapshot: dict[str, Any]) -> list[tuple[int, ...]]:
    return list(zip(*untable(snapshot).values(), strict=True))


def test_what_was_ordered_before_a_run_became_another_one_is_not_carried_out() -> None:
    def order(slice_us: int, after: int, until: int) -> Compact:
        return Compact(slice_us, after, until, 10, late=False)

    class Shard:
        """The operator, the attempt and the contents. Only their orders matter."""

        next_seq, compaction_bytes = 100, 10

        def __init__(self) -> None:
            self.done: list[Compact] = []

        def handle(self, event: CompactionDone) -> list[Compact]:
            self.done.append(event.compaction)
            return [order(0, -1, 9)] if len(self.done) == 1 else []

        def read(self, slices: Any, **_: Any) -> Iterator[StoredBlock]:
            return iter(())

        def compacted(self, *_: Any) -> list[Any]:
            return []

        def replace(self, spans: Any, below: int) -> None:
            pass

    shard: Any = Shard()
    carry_out([order(0, -1, 1), order(0, 1, 3), order(7, -1, 1)], shard, shard, shard)
    assert shard.done == [order(0, -1, 1), order(7, -1, 1), order(0, -1, 9)]
