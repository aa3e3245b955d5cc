"""What is in memory and what on disk, and how much."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from policies.destage import StandardDestage
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.pressure import PressureManager
from tests.stores.rig import KIB, Rig


def test_what_is_destaged_leaves_memory(rig: Rig) -> None:
    rig.append((0, 0), (1, 10))
    rig.append((2, 0), late=True)
    sizes = {seq: block.size_bytes for seq, block in rig.blocks.items()}
    rig.to_disk(0)
    stats = rig.store.stats()
    in_memory = {"memory": {0, 1, 2}, "tiered": {1}, "rocksdb": set[int]()}[rig.kind]
    assert stats.m_bucket_bytes == sum(sizes[s] for s in in_memory)
    assert stats.disk_only_bytes == sum(sizes[s] for s in sizes.keys() - in_memory)
    assert stats.blocks == 3


def test_late_blocks_go_straight_to_the_disk(make: Callable[..., Rig]) -> None:
    rig = make("tiered")
    rig.append((0, 0))
    rig.append((1, 0), late=True)
    rig.store.flush()
    rig.settle()
    stats = rig.store.stats()
    assert (stats.m_bucket_bytes, stats.disk_only_bytes) == (rig.blocks[0].size_bytes, rig.blocks[1].size_bytes)


def test_what_is_persisted_is_in_both_tiers_and_destaging_it_writes_nothing(make: Callable[..., Rig]) -> None:
    rig = make("tiered")
    rig.append((0, 0))
    rig.store.persist()
    size = rig.blocks[0].size_bytes
    stats = rig.store.stats()
    assert (stats.m_bucket_bytes, stats.p_bucket_bytes, stats.disk_only_bytes) == (size, size, 0)
    before = rig.durable()
    rig.to_disk(0)
    assert rig.store.stats().disk_only_bytes == size
    assert rig.durable() == before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_memory_exceeds_the_budget_by_one_block_at_most(make: Callable[..., Rig], seed: int) -> None:
    rig = make("tiered", budget=64 * KIB)
    sizes = random.Random(seed)
    for seq in range(300):
        rig.append((seq, seq % 7), late=sizes.random() < 0.2, size=sizes.randrange(500, 5000))
        rig.validate()
    largest = max(block.size_bytes for block in rig.blocks.values())
    assert rig.budget.peak_bytes <= 64 * KIB + largest
    assert rig.store.stats().blocks == 300
    assert rig.read(*range(7)) == sorted(range(300), key=lambda seq: (seq % 7, seq))
    assert rig.budget.peak_bytes <= 64 * KIB + largest, "reading a window does not need it in memory"


def test_stores_of_one_host_share_a_budget(make: Callable[..., Rig]) -> None:
    first, second = make("tiered", budget=32 * KIB), make("tiered", budget=32 * KIB)
    second.store.close()
    second.budget = first.budget
    second.store = second.open()
    for seq in range(40):
        first.append((seq, 0), size=2 * KIB)
        second.append((seq, 0), size=2 * KIB)
    assert first.budget.peak_bytes <= 34 * KIB + 100
    assert first.read(0) == second.read(0) == [*range(40)]
    second.store.close()  # so that what is left is the first one's
    assert first.budget.used_bytes == first.store.stats().m_bucket_bytes
    second.budget = MemoryBudget(1 << 30)
    second.store = second.open()


def test_an_m_bucket_has_its_own_limit(make: Callable[..., Rig]) -> None:
    rig = make("tiered", budget=1 << 20, bucket_limit=10 * KIB)
    rig.append(*((seq, 0) for seq in range(20)), size=2 * KIB)
    rig.append((20, 10), size=2 * KIB)
    rig.store.flush()
    rig.settle()
    assert rig.store.stats().m_bucket_bytes <= 10 * KIB + 2 * rig.blocks[0].size_bytes
    assert rig.store.stats().m_bucket_bytes >= 8 * KIB, "and it is used"
    assert rig.read(0, 10) == [*range(21)]


def test_the_memory_store_keeps_all_whatever_the_budget(make: Callable[..., Rig]) -> None:
    rig = make("memory", budget=4 * KIB)
    rig.append(*((seq, 0) for seq in range(20)), size=KIB)
    rig.to_disk(0)
    assert rig.store.stats().disk_only_bytes == 0
    assert rig.durable() == {} if (rig.folder / "files").exists() else True


def test_the_memory_store_keeps_all_whatever_the_pressure(make: Callable[..., Rig]) -> None:
    rig = make("memory", budget=4 * KIB)
    rig.append(*((seq, 0) for seq in range(20)), size=KIB)
    manager = PressureManager(rig.budget, StandardDestage(), lambda: 1.0)
    manager.tick([("local", rig.store)])
    rig.settle()
    assert rig.store.stats().m_bucket_bytes == sum(b.size_bytes for b in rig.blocks.values())
    assert (manager.destaged, manager.refused) == (0, 1)
