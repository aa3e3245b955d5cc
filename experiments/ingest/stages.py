"""The road of a kept event from Arrow to the user's function: which stage copies its bytes, and which writes them.

Runs the product's own functions one after another in this process, on the events of one file, without Spark. A byte
counts as copied by a stage if the output does not lie in the memory of the input, and as often as Arrow allocated
memory for it. Spark's own copies are not measured. It copies each byte of a row several times between the processes of
a shuffle, so the rows that a child makes say how many bytes those are.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.table import Table

import aion
from aion.base.hashing import ShardOfKeys
from aion.config import Policy, load_policy
from aion.core.ingest.builder import ShardBlock
from aion.core.ingest.fragments import Defragmenter, Fragmenter, fragment_bytes
from aion.core.query.plan import Plan, make_plan
from aion.execute.assembly import make_builder, make_contents, make_operator
from aion.execute.executor import Executor
from experiments.late_keys.runs import CountedAttempt
from state_backends.backends import Stores
from state_backends.files.bodies import Bodies
from state_backends.files.handed import HandedFile, name_of
from state_backends.files.names import HANDED, HANDED_FOLDER, MANIFEST, PART, SST
from state_backends.files.storage import LocalStorage
from state_backends.format.block import UNNUMBERED, Block, Compacted
from state_backends.server import wire
from state_backends.store.codec_pool import CodecPool
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.store.protocol import Only, StoredBlock
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard

CARRIERS = {"files": "handed over", "rows": "as rows"}
BUDGET = 1 << 30
QUERY = ("stages", "kept")
Stages = dict[str, list[dict[str, Any]]]
"""By carrier."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage did with the bytes of the events. All but the time are bytes for each byte of the events.

    ``moved``: what it passes on to another process. ``copied``: what lies elsewhere in memory than before, or was
    allocated by Arrow; the larger one. ``written``: to files.
    """

    name: str
    seconds: float
    moved: float
    copied: float
    written: float


@dataclass(slots=True)
class Count:
    """Bytes, while a stage runs."""

    moved: int = 0
    copied: int = 0


class Road:
    """The stages so far. ``folder``: where they write files."""

    def __init__(self, event_bytes: int, folder: Path) -> None:
        self.stages: list[Stage] = []
        self._event_bytes, self._folder = event_bytes, folder

    @contextmanager
    def stage(self, name: str) -> Iterator[Count]:
        pool, count = pa.default_memory_pool(), Count()
        written, allocated, begin = files_bytes(self._folder), pool.total_bytes_allocated(), time.perf_counter()
        yield count
        seconds, allocated = time.perf_counter() - begin, pool.total_bytes_allocated() - allocated
        found = count.moved, max(count.copied, allocated), files_bytes(self._folder) - written
        self.stages.append(Stage(name, seconds, *(size / self._event_bytes for size in found)))


class State:
    """A shard, as the state server has it. ``attempt``: the one that works on it."""

    def __init__(self, folder: Path) -> None:
        self.handed = folder / HANDED_FOLDER
        self._io, memory = IoThread(), MemoryBudget(BUDGET)
        self._shard = Shard(
            Identity(*QUERY, 0, 1, {}), LocalStorage(folder / "shard", self.handed), folder / "live",
            lambda p: Stores.of("tiered", p, self._io, memory, StoreOptions(bucket_limit_bytes=BUDGET // 2)), retain=2,
        )  # fmt: skip
        self._token: str | None = None
        self._batch = -1
        self.attempt: WiredAttempt

    def begin(self) -> dict[str, Any] | None:
        """Begins a batch. Returns the operator's snapshot."""
        self._batch += 1
        name = f"{self._batch:010d}-0"
        snapshot = self._shard.open(self._token, name, self._shard.identity)
        self.attempt = WiredAttempt(self._shard, name)
        return snapshot

    def commit(self, snapshot: dict[str, Any]) -> None:
        self._token = self._shard.commit(self.attempt.attempt, snapshot)

    def close(self) -> None:
        self._shard.close()
        self._io.close()


class WiredAttempt(CountedAttempt):
    """An attempt whose blocks travel as between a worker and the state server. ``count``: the messages' bytes."""

    def __init__(self, shard: Shard, attempt: str) -> None:
        super().__init__(shard, attempt)
        self.count = Count()
        self._bodies = Bodies(shard.bodies)

    def mapped(self, block: Block) -> Block:
        return self._bodies.of(block)

    def append(self, blocks: Any) -> None:
        for message in wire.pack(blocks):
            self.count.moved += message.nbytes
            super().append(wire.unpack(message))

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        stored = super().read(slices, blocking=blocking, only=only)
        for message in wire.pack((seq, False, block) for seq, block in stored):
            self.count.moved += message.nbytes
            for seq, _, block in wire.unpack(message):
                yield StoredBlock(seq, self.mapped(block))


def stages_of(path: Path, folder: Path, carrier: str) -> list[Stage]:
    """All stages, for the events of a file of ``aion experiment ingest``. ``folder``: for state; it must be empty."""
    policy = load_policy({"lateness": {"initial_bound": "1h", "coverage": None}, "blocks": {"target": "1MiB"}})
    batches = pq.read_table(path).to_batches(max_chunksize=10_000)
    plan = make_plan(
        batches[0].schema, key="key", time="ts", windows=aion.Tumbling("20 seconds"), aggregates=None,
        apply=count_events, outputs="n bigint",
    )  # fmt: skip
    events = [batch.select(plan.schema.names) for batch in batches]
    road = Road(sum(batch.nbytes for batch in events), folder)
    with CodecPool(1) as pool, closing(State(folder)) as state:
        with road.stage("child: sort, encode") as count:
            builder = make_builder(plan, policy, pool, ShardOfKeys([0]))
            made = [*chain.from_iterable(builder.add(batch) for batch in events), *builder.finish()]
            count.copied = outside(bodies(b.block for b in made), [b for batch in events for b in buffers(batch)])
        carried = [with_keys(b.block, b) for b in made]
        if carrier == "files":
            with road.stage("child: write a file"), closing(HandedFile(state.handed, name_of(0, "0", "0"))) as file:
                carried = [with_keys(file.add(b.block), b) for b in made]
                file.end()
                file.seal()
        with road.stage("child: rows") as count:
            fragmenter = Fragmenter(0, fragment_bytes(10_000))
            rows = pa.array(list(chain.from_iterable(map(fragmenter.rows, carried))), pa.binary())
            count.moved = rows.nbytes
            count.copied = 2 * rows.nbytes  # as Python's bytes, and as Arrow's
        with road.stage("root: blocks from rows") as count:
            arrived = [*Defragmenter().blocks([row.as_buffer() for row in rows])]
            count.copied = outside([pa.py_buffer(b.data) for b in arrived if b.at is None], rows.buffers())
        del made, carried
        executor = _executor(plan, policy, state, pool)
        with road.stage("root: to the state server") as state.attempt.count:
            for _ in executor.arrive([state.attempt.mapped(block) for block in arrived]):
                pass
            state.attempt.count.copied = state.attempt.count.moved
        del arrived, rows
        with road.stage("state server: commit"):
            state.commit(executor.operator.snapshot())
        executor = _executor(plan, policy, state, pool)
        with road.stage("root: read, group, call") as state.attempt.count:
            last_us = max(pc.max(batch["ts"]).cast(pa.int64()).as_py() for batch in events)
            n = sum(pane["n"] for rows in executor.advance(last_us + 20_000_000) for pane in rows.to_pylist())
            state.attempt.count.copied = state.attempt.count.moved
        if n != sum(batch.num_rows for batch in events):
            raise RuntimeError(f"the windows have {n} events, which is not what the file has")
    return road.stages


def of_carriers(path: Path, out: Path) -> Stages:
    """The stages of each carrier, as rows for the JSON file. ``out``: where state lies meanwhile."""
    found = {}
    for carrier in CARRIERS:
        with tempfile.TemporaryDirectory(dir=out, prefix="stages-") as folder:
            stages_of(path, Path(folder) / "first", carrier)  # its memory is new, and it compiles nothing yet
            found[carrier] = [asdict(stage) for stage in stages_of(path, Path(folder) / "second", carrier)]
    return found


def table(stages: Stages) -> Table:
    shown = Table(title="bytes for each byte of the events, by stage", title_justify="left")
    shown.add_column("stage", no_wrap=True)
    headings = ("moved", "copied", "written")
    for heading in ("carrier", "seconds", *headings):
        shown.add_column(heading, justify="right")
    for carrier, rows in stages.items():
        for row in rows:
            figures = [f"{row[heading]:.2f}" for heading in headings]
            shown.add_row(row["name"], CARRIERS[carrier], f"{row['seconds']:.3f}", *figures)
    return shown


def chart(path: Path, stages: Stages) -> None:
    """A bar for each stage: what is copied, moved and written for each byte of the events, with each carrier."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = {"copied": "#4c78a8", "moved": "#f58518", "written": "#54a24b"}
    figure, rows = pyplot.subplots(1, len(stages), figsize=(10, 3.6), sharex=True, layout="constrained")
    for axes, (carrier, found) in zip(rows, stages.items(), strict=True):
        names, left = [row["name"] for row in found], np.zeros(len(found))
        for part, colour in parts.items():
            sizes = np.array([row[part] for row in found])
            axes.barh(names, sizes, left=left, color=colour, label=part, height=0.6)
            left += sizes
        axes.invert_yaxis()
        axes.set_title(f"{CARRIERS[carrier]}: {left.sum():.1f} in all", fontsize=10, loc="left")
        axes.set_xlabel("bytes for each byte of the events")
        axes.spines[["top", "right"]].set_visible(False)
    rows[0].legend(frameon=False, fontsize=9, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _executor(plan: Plan, policy: Policy, state: State, pool: CodecPool) -> Executor:
    """At the beginning of a batch."""
    operator = make_operator(plan, policy, state.begin())
    return Executor(plan, operator, state.attempt, make_contents(plan, pool, policy))


def count_events(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, int]:
    """The user's function. It reads no payload, as the one of ``aion experiment ingest``."""
    return {"n": sum(batch.num_rows for batch in events)}


def with_keys(block: Block, made: ShardBlock) -> Block:
    """A reference as children send it: its header says that its rows are sorted."""
    if block.at is None or made.keys is None:
        return block
    return block._replace(header=block.header._replace(compacted=Compacted(UNNUMBERED, *made.keys)))


def bodies(blocks: Iterable[Block]) -> list[pa.Buffer]:
    return [block.body for block in blocks]


def buffers(batch: pa.RecordBatch) -> list[pa.Buffer]:
    return [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None]


def outside(found: Iterable[pa.Buffer | None], before: Iterable[pa.Buffer | None]) -> int:
    """The bytes of the buffers ``found`` that do not lie in the memory of ``before``."""
    known = sorted((b.address, b.address + b.size) for b in before if b is not None)
    begins = [begin for begin, _ in known]

    def is_known(buffer: pa.Buffer) -> bool:
        at = bisect_right(begins, buffer.address) - 1
        return at >= 0 and buffer.address + buffer.size <= known[at][1]

    return sum(b.size for b in found if b is not None and not is_known(b))


def files_bytes(folder: Path) -> int:
    """Bytes of all files. Links count once; RocksDB's own log does not."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.suffix in (SST, HANDED, MANIFEST, PART) and path.is_file():
                status = path.stat()
                found[status.st_ino] = status.st_size
    return sum(found.values())
