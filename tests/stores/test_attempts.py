"""An attempt on a store of this process: what an attempt does can be undone until the attempt ends."""

from __future__ import annotations

import pytest

from aion.errors import RequestError
from state_backends.store.attempt import StoreAttempt
from tests.stores.rig import Rig, make_block


def attempt_on(rig: Rig) -> StoreAttempt:
    """An attempt on a store with block 0 in slice 0 and block 1 in slice 10."""
    attempt = StoreAttempt(rig.store)
    attempt.begin(0)
    attempt.append((seq, False, make_block(slice_us, seq)) for seq, slice_us in ((0, 0), (1, 10)))
    attempt.end()
    return attempt


def found(attempt: StoreAttempt) -> list[int]:
    return [stored.seq for stored in attempt.read([0, 10])]


def test_a_purge_waits_for_the_end_of_the_attempt(rig: Rig) -> None:
    attempt = attempt_on(rig)
    attempt.begin(2)
    attempt.release([], [0])
    assert (found(attempt), list(attempt.purging)) == ([0, 1], [0])
    attempt.end()
    assert (found(attempt), list(attempt.purging)) == ([1], [])


def test_an_attempt_that_is_undone_changed_nothing(rig: Rig) -> None:
    attempt = attempt_on(rig)
    attempt.begin(2)
    attempt.append([(2, True, make_block(0, 2))])
    attempt.replace({0: (-1, 0)}, 2)
    attempt.release([10], [10])
    assert found(attempt) == [2, 1]
    attempt.undo()
    attempt.begin(2)
    attempt.end()
    assert found(attempt) == [0, 1]


def test_numbers_only_grow(rig: Rig) -> None:
    attempt = attempt_on(rig)
    attempt.begin(2)
    with pytest.raises(RequestError, match="block 2 comes after block 3"):
        attempt.append([(3, False, make_block(0, 3)), (2, False, make_block(0, 2))])
    assert (found(attempt), attempt.last_seq) == ([0, 1], 1)
