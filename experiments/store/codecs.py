"""The cost of codecs, and the gain from codec threads: ``python -m experiments.store.codecs [threads]``.

First: milliseconds to encode and to decode a block of 1 MiB in the calling thread, and how many times faster codec
threads are. Each figure is the best of several rounds, which take turns. Then: million events per second of a builder
and of a keyed window, with events of 24 bytes. Run nothing else meanwhile: threads only help on idle cores.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import aion
from aion.core.ingest.builder import BlockBuilder, ShardBlock
from aion.core.ingest.encoding import About, BlockSettings, decode, encode
from aion.core.life.actions import Execution, PaneKind, WindowRef
from aion.core.query.plan import Plan, make_plan
from aion.execute.panes.applying import apply_window
from state_backends.format.block import Block, BlockKind, Codec, Compression
from state_backends.store.codec_pool import CodecPool
from state_backends.store.protocol import StoredBlock

T = TypeVar("T")
SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us")), ("value", pa.float64())])
ROWS = 43_690  # of 24 bytes: 1 MiB
EVENTS = 2_000_000
WINDOW_US = 60_000_000


def events(rows: int, keys: int = 100) -> pa.RecordBatch:
    rng = np.random.default_rng(rows)
    times = pa.array(np.sort(rng.integers(0, 4 * WINDOW_US, rows))).cast(SCHEMA.field("ts").type)
    return pa.record_batch([rng.integers(0, keys, rows), times, rng.random(rows).round(3)], schema=SCHEMA)


def best_of(rounds: int, works: Mapping[int, Callable[[], object]]) -> dict[int, float]:
    """The best time of each, in seconds. They take turns, so that noise affects all of them alike."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def coding(pools: Mapping[int, CodecPool], codec: Codec, compression: Compression) -> str:
    batch, n = events(ROWS), 4 if codec is Codec.JSON else 64

    def encoded(batch: pa.RecordBatch) -> Block:
        return encode(batch, About(BlockKind.EVENTS, 0, ROWS, 0, 0), compression=compression, codec=codec)

    def through(pool: CodecPool, function: Callable[[T], object], item: T) -> Callable[[], object]:
        return lambda: deque(pool.map_ordered(function, [item] * n), maxlen=8)  # a real reader holds a few as well

    block = encoded(batch)
    passes: dict[str, Callable[[CodecPool], Callable[[], object]]] = {
        "encode": lambda pool: through(pool, encoded, batch),
        "decode": lambda pool: through(pool, lambda b: decode(b, SCHEMA), block),
    }
    texts = [f"{codec.name.lower():6}{compression.name.lower():5}{block.size_bytes / 2**20:5.2f} MiB"]
    for what, work in passes.items():
        in_line, *threaded = best_of(7, {t: work(p) for t, p in pools.items()}).values()
        factors = ", ".join(f"{in_line / seconds:.2f}" for seconds in threaded)
        texts.append(f"{what} {in_line / n * 1e3:7.3f} ms, threads {factors} times faster")
    return "   ".join(texts)


def build(plan: Plan, pool: CodecPool, compression: Compression) -> list[Block]:
    builder = BlockBuilder(plan, BlockSettings(compression=compression), pool)
    out: list[ShardBlock] = []
    for batch in pa.Table.from_batches([events(EVENTS)]).to_batches(max_chunksize=10_000):
        out += builder.add(batch, pa.repeat(pa.scalar(0, pa.int32()), batch.num_rows))
    return [b.block for b in [*out, *builder.finish()]]


def execute(plan: Plan, pool: CodecPool, blocks: list[Block]) -> int:
    rows = 0
    for start in range(0, 4 * WINDOW_US, WINDOW_US):
        stored = [StoredBlock(seq, b) for seq, b in enumerate(blocks) if b.header.slice_us == start]
        window = WindowRef(0, start, start + WINDOW_US)
        order = Execution(window, PaneKind.ON_TIME, 0, -1, len(blocks), 0, 0)
        rows += sum(batch.num_rows for batch in apply_window(plan, order, stored, pool))
    return rows


def mean(key: Any, window: Any, parts: Any) -> dict[str, float]:
    sums, rows = zip(*((pc.sum(part.column("value")).as_py(), part.num_rows) for part in parts), strict=True)
    return {"mean": sum(sums) / sum(rows)}


def windows(pools: Mapping[int, CodecPool], compression: Compression) -> str:
    plan = make_plan(
        SCHEMA, key="key", time="ts", windows=aion.Tumbling("1 minute"), aggregates=None, apply=mean,
        outputs="mean double",
    )  # fmt: skip
    blocks = build(plan, pools[0], compression)
    assert execute(plan, pools[0], blocks) == 400
    built = best_of(5, {t: partial(build, plan, p, compression) for t, p in pools.items()})
    applied = best_of(5, {t: partial(execute, plan, p, blocks) for t, p in pools.items()})
    texts = [
        f"{t} threads: builder {EVENTS / built[t] / 1e6:.1f}, apply {EVENTS / applied[t] / 1e6:.1f}" for t in pools
    ]
    return f"{compression.name.lower():5}" + "; ".join(texts)


def main(threads: int = 2) -> None:
    pools = {t: CodecPool(t) for t in (0, threads)}
    for codec in Codec:
        for compression in Compression:
            print(coding(pools, codec, compression), flush=True)
    for compression in Compression:
        print(f"million events/s, {windows(pools, compression)}", flush=True)
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
