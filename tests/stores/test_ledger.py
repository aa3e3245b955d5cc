"""The table of where blocks are: what may move where, and accounts that always add up."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from state_backends.format.block import Compacted
from state_backends.store.ledger import (
    IN_MEMORY,
    NO_FILE,
    ON_DISK,
    TRANSITIONS,
    IllegalMove,
    Ledger,
    Move,
    Place,
)
from state_backends.store.protocol import Only

LIVE = [place for place in Place if place is not Place.PURGED]

# How a block comes to each place, from memory.
WAYS: dict[Place, list[Move]] = {
    Place.MEMORY: [],
    Place.DESTAGING: [Move.WRITE],
    Place.BOTH: [Move.WRITE, Move.WRITTEN],
    Place.DISK: [Move.WRITE, Move.WRITTEN, Move.EVICT],
    Place.STAGING: [Move.WRITE, Move.WRITTEN, Move.EVICT, Move.STAGE],
}


def ledger_with_a_block(place: Place) -> Ledger:
    ledger = Ledger()
    ledger.add(7, slice_us=0, size_bytes=100, place=Place.MEMORY)
    for move in WAYS[place]:
        ledger.move(7, move, file_no=3 if move is Move.WRITTEN else None)
    assert ledger[7].place is place
    return ledger


@pytest.mark.parametrize("place", LIVE)
def test_a_live_block_is_readable_from_some_tier(place: Place) -> None:
    assert place in IN_MEMORY or place in ON_DISK


@pytest.mark.parametrize("place", LIVE)
@pytest.mark.parametrize("move", Move)
def test_a_move_that_the_table_lacks_is_refused_with_the_blocks_story(place: Place, move: Move) -> None:
    ledger = ledger_with_a_block(place)
    target = TRANSITIONS.get((place, move))
    if target is None:
        with pytest.raises(IllegalMove, match=rf"block 7 cannot {move} from {place}") as caught:
            ledger.move(7, move)
        assert all(str(step) in str(caught.value) for step in WAYS[place][-2:]), "the latest moves"
        assert ledger[7].place is place
        ledger.validate()
    elif target is Place.PURGED:
        ledger.move(7, move)
        assert 7 not in ledger and len(ledger) == 0
        assert (ledger.memory_bytes, ledger.disk_bytes) == (0, 0)
    else:
        ledger.move(7, move, file_no=3 if target in ON_DISK else None)
        assert ledger[7].place is target
        ledger.validate()


def test_a_block_leaves_memory_only_after_it_has_reached_the_disk() -> None:
    for (source, move), target in TRANSITIONS.items():
        if source in IN_MEMORY and target not in IN_MEMORY and target is not Place.PURGED:
            assert source in ON_DISK, f"{move} loses the block"


def test_a_number_is_given_once() -> None:
    ledger = ledger_with_a_block(Place.MEMORY)
    with pytest.raises(AssertionError, match="block 7"):
        ledger.add(7, 0, 1, Place.MEMORY)


def test_blocks_are_listed_by_slice_and_then_in_the_order_of_arrival() -> None:
    ledger = Ledger()
    for seq, slice_us in [(3, 10), (1, -10), (2, 10), (0, 10), (4, 0)]:
        ledger.add(seq, slice_us, 1, Place.MEMORY)
    assert [e.seq for e in ledger.of_slices([10, -10, 10, 99])] == [1, 0, 2, 3]


def test_a_read_of_some_blocks_finds_those_at_the_edges_of_what_it_asks_for() -> None:
    ledger = Ledger()
    for seq in (1, 2, 3):
        ledger.add(seq, slice_us=0, size_bytes=1, place=Place.MEMORY)
    ledger.add(4, slice_us=10, size_bytes=1, place=Place.MEMORY, compacted=Compacted(4, low=20, high=30))

    def found(only: Only) -> list[int]:
        return [entry.seq for entry in ledger.of_slices([0, 10], only)]

    assert found(Only(spans={0: (1, 3), 10: (4, 9)})) == [2, 3]
    assert found(Only(below=3)) == [1, 2]
    for keys, reads in (((10, 19), False), ((10, 20), True), ((30, 40), True), ((31, 40), False)):
        assert (4 in found(Only(keys=[keys]))) is reads
        assert found(Only(keys=[(0, 5), keys]))[:3] == [1, 2, 3], "blocks that are not sorted may have any key"


def test_validate_notices_books_that_do_not_add_up() -> None:
    ledger = ledger_with_a_block(Place.BOTH)
    ledger.memory_bytes += 1
    with pytest.raises(AssertionError):
        ledger.validate()


class LedgerMachine(RuleBasedStateMachine):
    """Against a dict of (slice, size, place)."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.model: dict[int, tuple[int, int, Place]] = {}
        self.next_seq = 0

    @rule(slice_us=st.integers(0, 3), size=st.integers(1, 100), on_disk=st.booleans())
    def add(self, slice_us: int, size: int, on_disk: bool) -> None:
        place = Place.DISK if on_disk else Place.MEMORY
        self.ledger.add(self.next_seq, slice_us, size, place, 5 if on_disk else NO_FILE)
        self.model[self.next_seq] = (slice_us, size, place)
        self.next_seq += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        slice_us, size, place = self.model[seq]
        move = data.draw(st.sampled_from([m for p, m in TRANSITIONS if p is place]))
        target = TRANSITIONS[place, move]
        self.ledger.move(seq, move, file_no=5 if move is Move.WRITTEN else None)
        if target is Place.PURGED:
            del self.model[seq]
        else:
            self.model[seq] = (slice_us, size, target)

    @invariant()
    def agrees(self) -> None:
        self.ledger.validate()
        assert {e.seq: (e.slice_us, e.size_bytes, e.place) for e in self.ledger} == self.model
        assert self.ledger.memory_bytes == sum(n for _, n, p in self.model.values() if p in IN_MEMORY)
        assert self.ledger.disk_bytes == sum(n for _, n, p in self.model.values() if p in ON_DISK)
        expected = sorted((s, seq) for seq, (s, _, _) in self.model.items())
        assert [(e.slice_us, e.seq) for e in self.ledger.of_slices(range(4))] == expected


TestLedger = LedgerMachine.TestCase


@pytest.mark.slow
@pytest.mark.parametrize("blocks_of_a_slice", [1, 4, 32])
def test_the_ledger_takes_no_more_memory_than_it_says(blocks_of_a_slice: int) -> None:
    """Of a block that was written, let go, staged and let go again: its story does not grow."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        ledger = Ledger()
        for number in range(20_000):
            ledger.add(10_000 + number, number // blocks_of_a_slice * 60_000_000, 1_000_000 + number, Place.MEMORY)
        for move in (Move.WRITE, Move.WRITTEN, Move.EVICT, Move.STAGE, Move.STAGED, Move.EVICT):
            for number in range(20_000):
                ledger.move(10_000 + number, move, file_no=7_000 if move is Move.WRITTEN else None)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= ledger.own_bytes
