"""What the batches after the next one will read is staged after that, as far as memory has room."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.server.conftest import STORE, Connect, block, open_shard, snapshot, wait_until

SLICES = range(0, 400, 10)
BUDGET_BYTES = STORE.budget_bytes or 0


@pytest.mark.slow
def test_what_is_due_later_is_staged_after_what_is_due_next(connect: Connect, tmp_path: Path) -> None:
    """Forty slices of 40 KiB take more than the budget of 1 MiB. The standard policy keeps 60 % of that in memory."""
    client = connect()
    attempt = open_shard(client, tmp_path, None, "first-0")
    attempt.append([(n, True, block(*range(5000), slice_us=s)) for n, s in enumerate(SLICES)])
    size_bytes = block(*range(5000)).size_bytes
    assert len(SLICES) * size_bytes > BUDGET_BYTES
    attempt.commit(snapshot(len(SLICES)), prestage=[50, 20], later=[s for s in SLICES if s not in (20, 50)])
    most = int(BUDGET_BYTES * 0.6) // size_bytes
    wait_until(lambda: client.stats()["staging"]["staged_bytes"] >= (most - 4) * size_bytes)
    stats = client.stats()
    assert stats["used_bytes"] <= 0.6 * BUDGET_BYTES and not stats["staging"]["vain_bytes"], "nothing leaves again"
    again = open_shard(client, tmp_path, "first-0", "second-1")
    for slice_us in (50, 20, 0, 10, 30):
        [stored] = again.read([slice_us])
        assert stored.block.header.slice_us == slice_us
    staging = client.stats()["staging"]
    assert (staging["hits"], staging["misses"], staging["late"]) == (5, 0, 0)
    assert [*again.read([390])] and client.stats()["staging"]["misses"] == 1, "the last ones found no room"


@pytest.mark.slow
def test_what_is_due_later_takes_no_room_from_what_is_due_next(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    attempt = open_shard(client, tmp_path, None, "first-0")
    attempt.append([(n, True, block(*range(5000), slice_us=s)) for n, s in enumerate(SLICES)])
    next_, later = [*SLICES[:16]], [*SLICES[16:]]
    attempt.commit(snapshot(len(SLICES)), prestage=next_, later=later)
    size_bytes = block(*range(5000)).size_bytes
    wait_until(lambda: client.stats()["staging"]["staged_bytes"] >= len(next_) * size_bytes)
    again = open_shard(client, tmp_path, "first-0", "second-1")
    assert all([*again.read([slice_us])] for slice_us in later)
    assert client.stats()["staging"]["hits"] == 0, "only what is due next was staged"


@pytest.mark.slow
def test_without_room_for_all_staging_waits_for_the_time_at_which_the_trigger_starts_a_batch(
    connect: Connect, tmp_path: Path
) -> None:
    """Nothing is known of the intervals yet, so without the trigger the next batch might come at once."""
    client = connect()
    attempt = open_shard(client, tmp_path, None, "first-0")
    attempt.append([(n, True, block(*range(5000), slice_us=s)) for n, s in enumerate(SLICES)])
    attempt.commit(snapshot(len(SLICES)), prestage=[0])
    size_bytes = block(*range(5000)).size_bytes
    wait_until(lambda: client.stats()["staging"]["staged_bytes"] >= size_bytes)  # so the speed is known
    opened_s = time.monotonic()
    attempt = open_shard(client, tmp_path, "first-0", "second-1", next_start=(3600.0, 2.5))
    attempt.commit(snapshot(len(SLICES)), prestage=[*SLICES])
    wait_until(lambda: client.stats()["staging"]["staged_bytes"] >= 2 * size_bytes)
    assert time.monotonic() - opened_s >= 1.5
