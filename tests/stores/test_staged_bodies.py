"""Bodies that are staged while their references move: each is counted in the budget, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from state_backends.store import body_files
from state_backends.store.io_thread import Priority
from tests.io_thread.rig import PATIENCE, Gate
from tests.simulated_disk import Job
from tests.stores.rig import KIB, Rig


def test_a_body_that_comes_while_it_is_looked_for_is_not_staged_again(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_is(path: object, ranges: list[tuple[int, int]]) -> list[bool]:
        return [False] * len(ranges)

    def comes_meanwhile(path: object, ranges: list[tuple[int, int]]) -> list[bool]:
        monkeypatch.setattr(body_files, "are_resident", none_is)
        rig.store.prestage([0])
        rig.settle()
        return none_is(path, ranges)

    rig = make("tiered")
    rig.hand_over((0, 0), size=3 * KIB)
    monkeypatch.setattr(body_files, "are_resident", comes_meanwhile)
    rig.store.prestage([0])
    rig.settle()
    assert rig.budget.reserved_bytes == 0
    assert rig.bytes_in_memory() == rig.budget.used_bytes == rig.whole_bytes(0)
    assert rig.store.stats().staging.staged_bytes == rig.blocks[0].header.body_bytes


@pytest.mark.parametrize("is_local", [True, False])
def test_a_body_is_in_memory_if_it_is_staged_or_the_system_has_it(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    """Otherwise it is on this host's disk, or elsewhere."""
    monkeypatch.setattr(body_files, "are_resident", lambda path, ranges: [offset == 0 for offset, _ in ranges])
    rig = make("tiered", is_local=is_local)
    rig.hand_over((0, 0), (1, 10), size=3 * KIB)
    reference, body = rig.blocks[1].size_bytes, rig.blocks[1].header.body_bytes
    mapped = (rig.whole_bytes(0), 0) if is_local else (rig.blocks[0].size_bytes, 0)
    assert rig.store.tiers(2) == {0: mapped, 10: (reference, body * is_local)}
    assert rig.store.tiers(1) == {0: mapped}
    rig.store.prestage([10])
    rig.settle()
    assert rig.store.tiers(2) == {0: mapped, 10: (rig.whole_bytes(1), 0)}
    rig.store.persist()
    rig.to_disk(0, 10)
    assert rig.store.tiers(2)[10] == (0, rig.whole_bytes(1) if is_local else reference)


def test_a_reference_that_left_memory_before_its_body_came_is_staged_with_it(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_files, "are_resident", lambda path, ranges: [False] * len(ranges))
    rig = make("tiered", bucket_limit=1)
    with Gate(rig.io):
        rig.hand_over((0, 0), size=3 * KIB, late=True)
        write = Job(rig.store.persist)
        while not write.waits:
            write.join(0.001)
        staging = Gate(rig.io, Priority.PRESTAGE)
        rig.store.prestage([0])  # the body alone; the reference is being written, and its m-bucket is full
    with staging:
        write.join(PATIENCE)
        assert rig.store.stats().m_bucket_bytes == 0
        rig.store.prestage([0])
    rig.settle()
    assert rig.budget.reserved_bytes == 0
    assert rig.bytes_in_memory() == rig.budget.used_bytes == rig.whole_bytes(0)
