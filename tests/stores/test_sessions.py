"""A session on a store of this process: what an attempt does can be undone until the attempt ends."""

from __future__ import annotations

import pytest

from aion.errors import RequestError
from state_backends.store.session import StoreSession
from tests.stores.rig import Rig, make_block


def session_of(rig: Rig) -> StoreSession:
    """A session on a store with block 0 in slice 0 and block 1 in slice 10."""
    session = StoreSession(rig.store)
    session.begin(0)
    session.append((seq, False, make_block(slice_us, seq)) for seq, slice_us in ((0, 0), (1, 10)))
    session.end()
    return session


def found(session: StoreSession) -> list[int]:
    return [stored.seq for stored in session.read([0, 10])]


def test_a_purge_waits_for_the_end_of_the_attempt(rig: Rig) -> None:
    session = session_of(rig)
    session.begin(2)
    session.release([], [0])
    assert (found(session), list(session.purging)) == ([0, 1], [0])
    session.end()
    assert (found(session), list(session.purging)) == ([1], [])


def test_an_attempt_that_is_undone_changed_nothing(rig: Rig) -> None:
    session = session_of(rig)
    session.begin(2)
    session.append([(2, True, make_block(0, 2))])
    session.replace({0: (-1, 0)}, 2)
    session.release([10], [10])
    assert found(session) == [2, 1]
    session.undo()
    session.begin(2)
    session.end()
    assert found(session) == [0, 1]


def test_numbers_only_grow(rig: Rig) -> None:
    session = session_of(rig)
    session.begin(2)
    with pytest.raises(RequestError, match="block 2 comes after block 3"):
        session.append([(3, False, make_block(0, 3)), (2, False, make_block(0, 2))])
    assert (found(session), session.last_seq) == ([0, 1], 1)
