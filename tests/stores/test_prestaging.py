"""What is brought into memory before it is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from aion.errors import StateError
from state_backends.format.block import Block
from state_backends.store.io_thread import IoRequest, Steps
from tests.io_thread.rig import PATIENCE, Gate
from tests.stores.rig import KIB, Rig


def staged(make: Callable[..., Rig], *slices: int, **options: Any) -> Rig:
    """A tiered store of six blocks on disk, with these slices prestaged."""
    rig = make("tiered", **options)
    rig.append((0, 0), (1, 0), (2, 0), (3, 10), (4, 10), (5, 20), size=KIB)
    rig.to_disk(0, 10, 20)
    assert rig.store.stats().m_bucket_bytes == 0
    rig.store.prestage(slices)
    return rig


def test_what_is_prestaged_is_in_both_tiers_and_read_without_waiting(make: Callable[..., Rig]) -> None:
    rig = staged(make, 0, 20)
    rig.settle()
    rig.validate()
    size = sum(rig.blocks[seq].size_bytes for seq in (0, 1, 2, 5))
    stats = rig.store.stats()
    assert stats.m_bucket_bytes == stats.staging.staged_bytes == size
    assert stats.p_bucket_bytes == sum(b.size_bytes for b in rig.blocks.values())
    with Gate(rig.io):
        assert rig.read(0, 20) == [0, 1, 2, 5], "the I/O thread is not asked"
    stats = rig.store.stats()
    assert (stats.staging.hits, stats.staging.misses, stats.staging.late) == (4, 0, 0)
    assert rig.read(10, blocking=True) == [3, 4]
    assert (stats.staging.hits, rig.store.stats().staging.misses) == (4, 2)


def test_a_block_that_is_fetched_while_the_one_before_is_worked_on_is_no_miss(make: Callable[..., Rig]) -> None:
    rig = staged(make)
    blocks = rig.store.read([0], blocking=False)
    assert rig.check(next(blocks)) == 0
    rig.settle()
    assert [rig.check(stored) for stored in blocks] == [1, 2]
    found = rig.store.stats().staging
    assert (found.hits, found.misses, found.ahead) == (0, 1, 2)


def test_a_function_that_takes_block_after_block_finds_the_first_of_each_window(make: Callable[..., Rig]) -> None:
    """The disk is faster than the function, so the rest of each window comes while it works on the first block."""
    rig = staged(make, 20, blocking=False)
    rig.settle()
    rig.store.processing_bytes_per_s = 1.0
    rig.store.prestage([0, 10])
    rig.settle()
    assert rig.store.stats().staging.staged_bytes == sum(rig.blocks[seq].size_bytes for seq in (0, 3, 5))
    with Gate(rig.io):
        assert rig.check(next(rig.store.read([0], blocking=False))) == 0
        assert rig.check(next(rig.store.read([10], blocking=False))) == 3


def test_what_is_read_later_is_fetched_after_what_any_shard_reads_next(make: Callable[..., Rig]) -> None:
    """One I/O thread serves all shards of a host. What has become urgent meanwhile goes on as urgent."""
    rig = staged(make)
    with Gate(rig.io):
        rig.store.prestage([], later=[0, 10])
        rig.store.prestage([20], later=[0])
        waiting = rig.io.waiting()
        assert (waiting["prestage"], waiting["prestage_later"]) == (1, 5)
        rig.store.prestage([0], later=[10])
        waiting = rig.io.waiting()
        assert (waiting["prestage"], waiting["prestage_later"]) == (4, 2)
    rig.settle()
    rig.validate()
    with Gate(rig.io):
        assert rig.read(0, 10, 20) == [0, 1, 2, 3, 4, 5]


def test_what_is_prestaged_and_let_go_unread_was_staged_in_vain(make: Callable[..., Rig]) -> None:
    rig = staged(make, 0)
    rig.settle()
    assert rig.check(next(rig.store.read([0]))) == 0
    before = rig.durable()
    rig.to_disk(0)
    assert rig.store.stats().m_bucket_bytes == 0
    assert rig.durable() == before, "it is on disk already"
    assert rig.store.stats().staging.vain_bytes == sum(rig.blocks[seq].size_bytes for seq in (1, 2))
    assert rig.read(0) == [0, 1, 2]


def test_late_blocks_stay_if_they_announce_an_execution(make: Callable[..., Rig]) -> None:
    rig = staged(make)
    rig.append((6, 0), (7, 10), late=True, size=KIB)
    rig.store.prestage([0])
    rig.store.flush()
    rig.settle()
    rig.validate()
    with Gate(rig.io):
        assert rig.read(0) == [0, 1, 2, 6], "the I/O thread is not asked"
    assert rig.store.stats().m_bucket_bytes == sum(rig.blocks[seq].size_bytes for seq in (0, 1, 2, 6))
    assert rig.store.stats().staging.hits == 4
    assert rig.read(0) == [0, 1, 2, 6]
    assert rig.store.stats().staging.hits == 4, "once for each time that they are brought, or held"
    rig.to_disk(0)
    assert rig.store.stats().m_bucket_bytes == 0, "and leave with their window"


def test_late_blocks_leave_if_there_is_no_room_for_them(make: Callable[..., Rig]) -> None:
    rig = staged(make, bucket_limit=2 * KIB)
    rig.append((6, 0), (7, 0), (8, 0), late=True, size=KIB)
    rig.store.prestage([0])
    rig.store.flush()
    rig.settle()
    rig.validate()
    assert rig.read(0) == [0, 1, 2, 6, 7, 8]


def test_prestaging_again_does_nothing(make: Callable[..., Rig]) -> None:
    rig = staged(make, 0)
    with Gate(rig.io):
        rig.store.prestage([0])
        rig.validate()
    rig.settle()
    rig.store.prestage([0, 99])
    rig.settle()
    assert rig.store.stats().staging.staged_bytes == sum(rig.blocks[seq].size_bytes for seq in (0, 1, 2))


def test_prestaging_takes_no_more_than_the_budget_has(make: Callable[..., Rig]) -> None:
    rig = staged(make, 0, 10, 20, budget=4 * KIB)
    rig.settle()
    assert 0 < rig.store.stats().m_bucket_bytes <= 4 * KIB
    assert rig.read(0, 10, 20) == [*range(6)]


def test_prestaging_and_appending_do_not_both_take_the_same_room(make: Callable[..., Rig]) -> None:
    """What is under way counts: or together they come to twice the budget."""
    rig = make("tiered", budget=12 * KIB)
    rig.append(*((seq, 0) for seq in range(9)), size=KIB)
    rig.to_disk(0)
    appending = threading.Thread(target=lambda: rig.append(*((seq, 10) for seq in range(20, 30)), size=KIB))
    with Gate(rig.io):
        rig.store.prestage([0])
        appending.start()
        appending.join(0.2)  # it is done, or waits for room that only the I/O thread can make
    appending.join(PATIENCE)
    rig.settle()
    assert rig.budget.peak_bytes <= 12 * KIB + KIB
    assert rig.read(0, 10) == [*range(9), *range(20, 30)]


def test_what_is_not_wanted_any_more_is_not_staged(make: Callable[..., Rig]) -> None:
    rig = make("tiered")
    rig.append((0, 0), (1, 10), (2, 20))
    rig.to_disk(0, 10, 20)
    with Gate(rig.io):
        rig.store.prestage([0, 10, 20])
        rig.store.destage([0])
        rig.store.purge([10])
        rig.validate()
    rig.settle()
    rig.validate()
    assert rig.store.stats().m_bucket_bytes == rig.blocks[2].size_bytes
    assert rig.read(0, 10, 20) == [0, 2]


@pytest.mark.parametrize("how", ["destage", "purge"])
def test_a_reader_that_waits_for_a_staging_is_told_when_there_will_be_none(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    rig = make("tiered")
    rig.append((0, 0))
    rig.to_disk(0)
    waits = threading.Event()
    raise_to = IoRequest.raise_to
    monkeypatch.setattr(IoRequest, "raise_to", lambda *to: (raise_to(*to), waits.set()))
    found: list[Any] = []

    def reading() -> None:
        try:
            found.append(rig.read(0))
        except StateError as error:
            found.append(error)

    with Gate(rig.io):
        rig.store.prestage([0])
        reader = threading.Thread(target=reading, daemon=True)
        reader.start()
        assert waits.wait(PATIENCE), "it makes the staging urgent, and waits for it"
        getattr(rig.store, how)([0])
    reader.join(PATIENCE / 4)
    assert not reader.is_alive(), "it waits for ever"
    if how == "destage":
        assert found == [[0]]
    else:
        assert "block 0 of slice 0 was purged" in str(found[0])


def test_a_staging_that_fails_loses_nothing(make: Callable[..., Rig]) -> None:
    rig = make("tiered")
    rig.append((0, 0))
    rig.to_disk(0)
    fetch = rig.p_bucket.fetch

    def failing(*where: int) -> Steps[Block]:
        raise OSError("unreadable")
        yield 0

    rig.p_bucket.fetch = failing  # type: ignore[method-assign]
    rig.store.prestage([0])
    rig.settle()
    rig.validate()
    with pytest.raises(OSError, match="unreadable"):
        rig.read(0)
    rig.p_bucket.fetch = fetch  # type: ignore[method-assign]
    assert rig.read(0) == [0]


def test_a_part_of_each_slice_stays_if_it_is_told_to(make: Callable[..., Rig]) -> None:
    """The bootstrap part: the first blocks, by which an execution can begin while the rest is staged."""
    rig = make("tiered", keep=0.5)
    rig.append(*((seq, 0) for seq in range(4)), size=KIB)
    rig.to_disk(0)
    assert rig.store.stats().m_bucket_bytes == rig.blocks[0].size_bytes * 2
    with Gate(rig.io):
        reader = rig.store.read([0])
        assert [rig.check(next(reader)) for _ in range(2)] == [0, 1]
    assert [rig.check(stored) for stored in reader] == [2, 3]


def test_what_is_restored_can_be_prestaged(make: Callable[..., Rig]) -> None:
    rig = staged(make)
    rig.reopen(rig.store.persist())
    rig.store.prestage([10])
    assert rig.read(10) == [3, 4]
    rig.settle()
    rig.store.rollback(4)
    rig.validate()
    assert rig.read(10) == [3]
