"""Which attempt works on which shard, and which operator is used twice."""

from __future__ import annotations

import pytest

from aion.errors import AttemptSuperseded, ServerError, ServerUnreachable
from state_backends.server.attempts import Attempts
from state_backends.versions.manifest import Identity

IDENTITY = Identity("query", "windowed", 0, 1, {})


def test_a_shard_is_in_one_partition_of_a_stage_and_in_any_of_the_next() -> None:
    """A function of foreachBatch may use a part of the batch, so the same shard is elsewhere in the next stage."""
    attempts = Attempts()
    for attempt, place in (("a0", (7, 3)), ("b0", (7, 3)), ("c0", (8, 0)), ("d0", None)):
        assert attempts.check(attempt, IDENTITY, "run", "uid", place) == ("query", "windowed", 0)
    with pytest.raises(ServerError, match="'windowed' is used twice in this query"):
        attempts.check("e0", IDENTITY, "run", "uid", (8, 1))
    attempts.check("f0", IDENTITY, "another run", "uid", (8, 1))
    with pytest.raises(ServerError, match="two operators of this query are both named 'windowed'"):
        attempts.check("g0", IDENTITY, "another run", "another uid", (8, 1))


def test_who_asks_for_an_attempt_that_is_not_there_is_told_whether_it_ended() -> None:
    attempts = Attempts()
    with pytest.raises(AttemptSuperseded, match="a0 has ended"):
        attempts.find("a0", attempts.server)
    with pytest.raises(ServerUnreachable, match="a0 never began here"):
        attempts.find("a0", "another server")
