"""The legs of ``aion experiment limits``. They call the code that a query runs: state server, stores, operator."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from aion.core.ingest.encoding import About

if TYPE_CHECKING:
    from aion.core.operator.operator import Operator
    from state_backends.format.block import Block
    from state_backends.server.remote_attempt import RemoteAttempt
    from state_backends.store.tiered import TieredStore

MIB = 1 << 20
MINUTE_US = 60_000_000
WINDOW_MIB = 64
VERSIONS = 10
LEARNT_DAYS = 63  # eight default half-lives, plus a week


def _block(slice_us: int, size: int = MIB) -> Block:
    import pyarrow as pa

    from aion.core.ingest.encoding import encode
    from state_backends.format.block import BlockKind

    batch = pa.record_batch({"p": pa.array([os.urandom(size - 500)], pa.large_binary())})
    return encode(batch, About(BlockKind.EVENTS, slice_us, 1, slice_us, slice_us))


# -- memory -----------------------------------------------------------------------------------------------


def memory(work: Path, budget_mib: int, readers: int) -> dict[str, Any]:
    """The peak memory of a state server with blocking readers of windows larger than its budget (Linux only)."""
    from state_backends.backends import StoreConfig
    from state_backends.server import server_folder
    from state_backends.server.client import StateClient, runtime_dir
    from state_backends.versions.manifest import Identity

    application = f"limits-{uuid.uuid4()}"
    config = StoreConfig(budget_bytes=budget_mib * MIB, bucket_limit_bytes=budget_mib * MIB)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as executor:
        clients = [StateClient.connect(application, watch_pid=executor.pid) for _ in range(readers)]

        def opened(batch: int) -> list[RemoteAttempt]:
            return [
                client.open(
                    Identity("limits", "reader", i, readers, {}),
                    token=f"{batch - 1:010d}-{i}" if batch else None, makes=f"{batch:010d}-{i}", run="run",
                    operator_uid="uid", state_dir=str(work / "state"), store=config,
                )
                for i, client in enumerate(clients)
            ]  # fmt: skip

        def commit(attempts: list[RemoteAttempt], slices: list[int], next_seq: int) -> None:
            for attempt in attempts:
                attempt.release(slices, [])
                attempt.commit({"next_seq": next_seq, "counters": {}})

        def read(attempts: list[RemoteAttempt], slice_us: int, blocks: int) -> None:
            together = threading.Barrier(readers)
            found: list[int] = []

            def one(attempt: RemoteAttempt) -> None:
                together.wait()
                found.append(sum(1 for _ in attempt.read([slice_us], blocking=True)))

            threads = [threading.Thread(target=one, args=(attempt,)) for attempt in attempts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert found == [blocks] * readers

        try:
            server = server_folder.occupant(runtime_dir(application))
            assert server is not None
            attempts = opened(0)
            for attempt in attempts:
                attempt.append([(0, False, _block(10))])
            commit(attempts, [10], 1)
            attempts = opened(1)
            for _ in range(3):  # so that one-time allocations of readers are already there
                read(attempts, 10, 1)
            idle = _resident(server.pid, "VmRSS")
            for attempt in attempts:
                for seq in range(1, WINDOW_MIB + 1):
                    attempt.append([(seq, False, _block(0))])
            commit(attempts, [0, 10], WINDOW_MIB + 1)
            attempts = opened(2)
            Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # resets the peak
            read(attempts, 0, WINDOW_MIB)
            peak = _resident(server.pid, "VmHWM")
        finally:
            for client in clients:
                client.close()
            executor.kill()
    return {
        "budget_mib": budget_mib,
        "readers": readers,
        "window_mib": WINDOW_MIB,
        "idle_mib": idle,
        "peak_mib": peak,
        "above_idle_mib": peak - idle,
        "allowed_mib": 1.25 * budget_mib + readers,
    }


def _resident(pid: int, what: str) -> float:
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


# -- a commit during a prestage ---------------------------------------------------------------------------


def commit(work: Path, prestage_mib: int, rounds: int = 5) -> dict[str, Any]:
    from state_backends.store.io_thread import IoThread
    from state_backends.store.m_bucket import MemoryBudget
    from state_backends.store.options import StoreOptions
    from state_backends.store.p_bucket import PBucket
    from state_backends.store.tiered import TieredStore

    io, budget = IoThread(), MemoryBudget(4 * prestage_mib * MIB)

    def store(name: str) -> TieredStore:
        folder = work / name
        p_bucket = PBucket(folder / "files", folder / "live", durable=True)
        return TieredStore(p_bucket, io, budget, StoreOptions(bucket_limit_bytes=2 * prestage_mib * MIB))

    def timed(seq: int) -> float:
        mine.append(seq, _block(0), late=False)
        begin = time.perf_counter()
        mine.persist()
        return time.perf_counter() - begin

    other, mine = store("other"), store("mine")
    try:
        for seq in range(prestage_mib):
            other.append(seq, _block(0), late=False)
        other.persist()
        alone, beside = [], []
        for number in range(rounds):
            alone.append(timed(2 * number))
            other.destage([0])
            other.prestage([0])
            beside.append(timed(2 * number + 1))
            while io.busy():
                time.sleep(0.01)
    finally:
        other.close()
        mine.close()
        io.close()
    return {"prestage_mib": prestage_mib, "alone_s": median(alone), "beside_s": median(beside)}


# -- requests ---------------------------------------------------------------------------------------------


class _Seen(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r'"([A-Z]+) (\S+) HTTP', record.getMessage())
        if found:
            method, path = found.groups()
            listing, deleting = method == "GET" and "list-type" in path, method == "POST" and "delete" in path
            self.kinds["LIST" if listing else "DELETE of many" if deleting else method] += 1


def requests() -> dict[str, Any]:
    """The requests of versions to an object store: a real S3 server (moto) on the loopback interface."""
    try:
        from moto.server import ThreadedMotoServer
    except ImportError:
        return {"missing": "it needs a local S3 server; run pip install 'moto[server]'"}
    import pyarrow.fs as pafs

    from state_backends.backends import Stores
    from state_backends.files.remote import Remote
    from state_backends.files.remote_storage import RemoteStorage
    from state_backends.store.io_thread import IoThread
    from state_backends.store.m_bucket import MemoryBudget
    from state_backends.store.options import StoreOptions
    from state_backends.versions.manifest import Identity
    from state_backends.versions.shard import Shard

    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        os.environ.setdefault(variable, "true")
    log, seen = logging.getLogger("werkzeug"), _Seen()
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(seen)
    server: Any = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    io, identity = IoThread(), Identity("limits", "requests", 0, 1, {})
    try:
        query = f"scheme=http&endpoint_override=127.0.0.1:{server.get_host_and_port()[1]}&region=us-east-1"
        fs, _ = pafs.FileSystem.from_uri(f"s3://bucket/?{query}&allow_bucket_creation=true")
        fs.create_dir("bucket")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            remote = Remote(f"s3://bucket/state?{query}")
            storage = RemoteStorage(remote, "limits/requests/shard-00000", folder / "copies")
            shard = Shard(
                identity,
                storage,
                folder / "live",
                lambda p: Stores.of("tiered", p, io, MemoryBudget(MIB), StoreOptions(bucket_limit_bytes=MIB)),
                retain=2,
            )
            token: str | None = None
            for batch in range(2 * VERSIONS):
                if batch == VERSIONS:
                    seen.kinds.clear()
                attempt = f"{batch:010d}-a"
                shard.open(token, attempt, identity)
                shard.append(attempt, [(batch, False, _block(batch, 4096))])
                shard.release(attempt, purge=[batch - 1])
                shard.commit(attempt, {"next_seq": batch + 1})
                storage.settle()
                token = attempt
            each = {kind: count / VERSIONS for kind, count in seen.kinds.items()}
            shard.close()
            seen.kinds.clear()
            shard.open(token, f"{2 * VERSIONS:010d}-a", identity)
            lists = seen.kinds["LIST"]
            shard.close()
            remote.close()
    finally:
        io.close()
        server.stop()
        log.removeHandler(seen)
    return {"each": each, "lists_at_opening": lists}


# -- the size of a version --------------------------------------------------------------------------------


def size(days: int) -> dict[str, Any]:
    """The bytes of a version without its files.

    With five-minute windows: after a week, when the history of lateness is complete, and at the end. Then with
    one-minute windows.
    """
    first, full, last = _sizes(5, [7, min(days, LEARNT_DAYS), days], kept="1 day")
    (minutes,) = _sizes(1, [8], kept="7 days")
    return {"days": days, "first": first, "full": full, "last": last, "minutes": minutes}


def _sizes(minutes: int, after_days: list[int], kept: str) -> list[int]:
    import random

    import pyarrow as pa

    import aion
    from aion import aggregates as A
    from aion.config import load_policy
    from aion.core.compaction import BlockFact, Compact, CompactionDone
    from aion.core.life.actions import Arrived, BatchEnded, WatermarkAdvanced
    from aion.core.query.plan import make_plan
    from aion.execute.assembly import make_operator
    from state_backends.versions.manifest import Identity, Manifest, dump

    plan = make_plan(
        pa.schema([("ts", pa.timestamp("us")), ("k", pa.string())]), windows=aion.Tumbling(f"{minutes} minutes"),
        time="ts", key="k", aggregates={"n": A.count()}, apply=None, outputs=None,
    )  # fmt: skip
    lateness = {"initial_bound": kept, "max_bound": "7 days", "coverage": None}
    policy = load_policy({"lateness": lateness, "trigger": {"kind": "every_batch"}})
    operator: Operator = make_operator(plan, policy, None)
    draw, width = random.Random(1), minutes * MINUTE_US
    begin = 1_700_006_400_000_000

    def do(event: Any) -> None:
        for action in operator.handle(event):
            if isinstance(action, Compact):
                operator.number(1)
                do(CompactionDone(action, action.size_bytes // 2))

    sizes, ends = [], [day * 1440 // minutes for day in after_days]
    for first, end in zip([0, *ends], ends, strict=False):
        for number in range(first, end):
            start = begin + number * width
            do(WatermarkAdvanced(start - draw.randrange(20_000) * 1000))
            facts = [BlockFact(start, draw.randrange(900, 1100), draw.randrange(9000, 11000))]
            if draw.random() < 0.2 and number:
                back = min(number, int(draw.paretovariate(0.8)))
                facts.append(BlockFact(start - back * width, draw.randrange(1, 30), draw.randrange(500, 900)))
            do(Arrived(facts))
            do(BatchEnded())
        version = Manifest("t", None, 1, Identity("q", "o", 0, 1, plan.definition), (), 0, operator.snapshot())
        sizes.append(len(dump(version)))
    return sizes
