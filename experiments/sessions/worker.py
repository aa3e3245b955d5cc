"""The leg ``worker`` of ``aion experiment sessions``: one shard in a worker with a state server, without Spark.

The worker is a process of its own. It gets what a task of Spark gets, blocks from a child, one message after another,
and does what a task does with them. So its memory is what windows of keys take there, and nothing else.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

    from aion.config import Policy
    from aion.core.query.plan import Plan

MIB = 1 << 20
LOOK_S = 0.01
_SIZE = struct.Struct("<q")


class Done(NamedTuple):
    """What the worker says after each batch."""

    seconds: float
    panes: int


class Worker:
    """A worker process and its state server. ``server_mib``: how much the server grew. ``worker_mib``: the worker's
    largest memory, with its interpreter and libraries.
    """

    def __init__(self, kind: str, budget_mib: int, work: Path) -> None:
        self._plan, self._policy = definition(kind, budget_mib)
        self._work, self._batches = work, 0
        self.server_mib = self.worker_mib = 0.0
        begin = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
        command = [sys.executable, "-c", begin, kind, str(budget_mib), str(work), str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._server = int(self._answer())
        self._stop = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()

    def batch(self, table: pa.Table | None, watermark_us: int) -> Done:
        """One batch, from the child's blocks to the commit."""
        path = self._work / f"{self._batches}.blocks"
        with path.open("wb") as out:
            for data in [] if table is None else self._blocks(table):
                out.write(_SIZE.pack(len(data)))
                out.write(data)
        self._batches += 1
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(path), watermark_us]) + "\n")
        self._process.stdin.flush()
        done = Done(*json.loads(self._answer()))
        path.unlink()
        return done

    def close(self) -> None:
        self._stop.set()
        self._looking.join()
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the worker ended with exit code {self._process.wait()}")
        return line

    def _blocks(self, table: pa.Table) -> Iterator[memoryview]:
        from aion.base.hashing import ShardOfKeys
        from aion.execute.assembly import make_builder
        from state_backends.store.codec_pool import CodecPool

        pool = CodecPool(1)
        builder = make_builder(self._plan, self._policy, pool, ShardOfKeys([0]))
        for batch in table.select(self._plan.schema.names).cast(self._plan.schema).to_batches(max_chunksize=1 << 16):
            yield from (memoryview(made.block.stored) for made in builder.add(batch))
        yield from (memoryview(made.block.stored) for made in builder.finish())
        pool.close()

    def _look(self) -> None:
        import psutil

        server, worker = psutil.Process(self._server), psutil.Process(self._process.pid)
        first = server.memory_info().rss / MIB
        while not self._stop.wait(LOOK_S):
            self.server_mib = max(self.server_mib, server.memory_info().rss / MIB - first)
            self.worker_mib = max(self.worker_mib, worker.memory_info().rss / MIB)


def windows_of() -> dict[str, Any]:
    """The kinds of windows, all of them longer than a run."""
    import aion

    return {
        "session": aion.Session("1 hour"),
        "cut": aion.Session("1 hour", max_duration="6 hours"),
        "count": aion.Count(100),
        "record": aion.PerRecord("1 hour"),
    }


def definition(kind: str, budget_mib: int) -> tuple[Plan, Policy]:
    """The query, and its policy."""
    import pyarrow as pa

    from aion import aggregates as A
    from aion.config import load_policy
    from aion.core.query.plan import make_plan

    schema = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us", "UTC")), ("value", pa.float64())])
    plan = make_plan(
        schema, key="key", time="ts", windows=windows_of()[kind], aggregates={"n": A.count()}, apply=None, outputs=None
    )
    return plan, load_policy({"memory": {"budget": f"{budget_mib} MiB"}, "lateness": {"coverage": None}})


def _read(path: str) -> Iterator[Any]:
    from state_backends.format.block import parse

    with Path(path).open("rb") as file:
        while head := file.read(_SIZE.size):
            yield parse(file.read(_SIZE.unpack(head)[0]), path)


def main(kind: str, budget_mib: str, work: str, watch_pid: str) -> None:
    """What the worker does: it says the server's pid, and then answers a line for each batch."""
    from aion.execute.assembly import make_contents, store_config
    from aion.execute.windows import Windows
    from state_backends.server.client import StateClient, runtime_dir
    from state_backends.server.server_folder import occupant
    from state_backends.store.codec_pool import CodecPool
    from state_backends.versions.manifest import Identity

    plan, policy = definition(kind, int(budget_mib))
    application, pool = f"sessions-{uuid.uuid4()}", CodecPool(policy.io.codec_threads)
    client = StateClient.connect(application, watch_pid=int(watch_pid))
    store = store_config(policy, windows=plan.windows.values(), blocking=plan.blocking)
    server = occupant(runtime_dir(application))
    assert server is not None
    say: Callable[[object], None] = lambda text: print(text, flush=True)  # noqa: E731
    say(server.pid)
    token: str | None = None
    for number, line in enumerate(sys.stdin):
        path, watermark_us = json.loads(line)
        begin = time.perf_counter()
        makes = f"{number:010d}-{uuid.uuid4().hex[:16]}"
        attempt = client.open(
            Identity("sessions", "o", 0, 1, plan.definition), token=token, makes=makes, run="r", operator_uid="u",
            state_dir=str(Path(work) / "state"), store=store,
        )  # fmt: skip
        windows = Windows(plan, policy, attempt, attempt.snapshot, make_contents(plan, pool, policy))
        panes = sum(rows.num_rows for rows in windows.advance(watermark_us))
        for block in _read(path):
            panes += sum(rows.num_rows for rows in windows.arrive([block]))
        panes += sum(rows.num_rows for rows in windows.end_batch())
        attempt.commit(*windows.save())
        token = makes
        say(json.dumps([time.perf_counter() - begin, panes]))
    client.close()
    pool.close()
