"""What a real state server takes of memory, by the kernel's count, while many functions read windows at once."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from aion.core.ingest.encoding import About, encode
from state_backends.backends import StoreConfig
from state_backends.format.block import Block, BlockKind
from state_backends.server.remote_attempt import RemoteAttempt
from tests.io_thread.rig import PATIENCE
from tests.server.conftest import Connect, open_shard, server_of, snapshot

MIB = 1 << 20
BUDGET = 48 * MIB
READERS = 8
BLOCKS = 64  # of 1 MiB: each window is larger than the budget
STORE = StoreConfig(backend="tiered", budget_bytes=BUDGET, bucket_limit_bytes=BUDGET)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's count of pages is Linux's")


def large_block(slice_us: int) -> Block:
    batch = pa.record_batch({"payload": pa.array([bytes(MIB - 400)], pa.large_binary())})
    return encode(batch, About(BlockKind.EVENTS, slice_us, 1, slice_us, slice_us))


def resident_bytes(pid: int, what: str) -> int:
    """``VmRSS``: now; ``VmHWM``: the most since :func:`forget_peak`."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines[what].split()[0]) << 10


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def read_at_once(attempts: list[RemoteAttempt], slice_us: int, blocks: int) -> None:
    """Blocking reads, that all begin together, and all stop for the others behind their first block."""
    together = threading.Barrier(len(attempts))
    counts: list[int] = []

    def reading(attempt: RemoteAttempt) -> None:
        together.wait(PATIENCE)
        found = attempt.read([slice_us], blocking=True)
        next(found)
        together.wait(6 * PATIENCE)
        counts.append(1 + sum(1 for _ in found))

    threads = [threading.Thread(target=reading, args=(attempt,), daemon=True) for attempt in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(12 * PATIENCE)
    assert counts == [blocks] * len(attempts)


@pytest.mark.slow
def test_many_blocking_readers_stay_within_the_budget(application: str, connect: Connect, tmp_path: Path) -> None:
    clients = [connect() for _ in range(READERS)]
    pid = server_of(application).pid

    def opened(before: str | None, name: str) -> list[RemoteAttempt]:
        how = {"store": STORE}
        told = enumerate(clients)
        return [open_shard(c, tmp_path, before and f"{before}{n}", f"{name}{n}", shard=n, **how) for n, c in told]

    # Everything has been done once, of one block each: what the process itself takes is there.
    attempts = opened(None, "a")
    for attempt in attempts:
        attempt.append([(0, False, large_block(0))])
        attempt.release([0], [])
        attempt.commit(snapshot(1))
    attempts = opened("a", "b")
    read_at_once(attempts, 0, 1)
    idle = resident_bytes(pid, "VmRSS")
    allowed = BUDGET * 5 // 4 + READERS * large_block(0).size_bytes
    forget_peak(pid)

    block = large_block(1)
    for attempt in attempts:
        for seq in range(BLOCKS):
            attempt.append([(1 + seq, False, block)])
        attempt.release([1], [])
        attempt.commit(snapshot(1 + BLOCKS))
    assert resident_bytes(pid, "VmHWM") - idle <= allowed, "while they were written"

    attempts = opened("b", "c")
    assert clients[0].stats()["m_bucket_bytes"] == 0
    forget_peak(pid)
    read_at_once(attempts, 1, BLOCKS)
    taken = resident_bytes(pid, "VmHWM") - idle
    assert taken <= allowed, f"{taken / MIB:.0f} MiB above the idle server, of {allowed / MIB:.0f}"
    stats = clients[0].stats()
    assert stats["used_bytes"] == 0
    assert stats["reserved_bytes"] < BUDGET // 8, "what readers reserved was given back"
