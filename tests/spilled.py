"""Makes blocks of events of one window, and runs it within a limit of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import aion
from aion.core.ingest.encoding import About, encode
from aion.core.life.actions import Execution, PaneKind, WindowRef
from aion.core.query.plan import Plan, make_plan
from aion.execute.panes.applying import apply_window
from aion.execute.spill.spilling import Room
from state_backends.format.block import Block, BlockKind, Compression
from state_backends.store.protocol import StoredBlock

UNLIMITED = 1 << 40


SCHEMA = pa.schema([("key", pa.int64()), ("name", pa.string()), ("ts", pa.timestamp("us")), ("value", pa.int64())])
SECOND = 1_000_000
Apply = Callable[[Any, Any, Iterator[pa.RecordBatch]], Any]


def digest(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
    """Computes a number that depends on every event and on their order."""
    total = 0
    for batch in events:
        for value in batch.column("value").to_pylist():
            total = (total * 31 + value) % 1_000_003
    return {"digest": total}


def plan_of(apply: Apply, key: tuple[str, ...] = ("key", "name")) -> Plan:
    return make_plan(
        SCHEMA,
        key=key,
        time="ts",
        windows=aion.Tumbling("1 second"),
        aggregates=None,
        apply=apply,
        outputs="digest bigint",
    )


def block_of(keys: Any, values: Any, compression: Compression = Compression.NONE) -> Block:
    n = len(values)
    names = pa.array(["n" * (k % 3) if k % 5 else None for k in keys], pa.string())
    times = pa.array(np.zeros(n, np.int64)).cast(pa.timestamp("us"))
    batch = pa.record_batch([pa.array(keys, pa.int64()), names, times, pa.array(values, pa.int64())], schema=SCHEMA)
    return encode(batch, About(BlockKind.EVENTS, 0, n, 0, 0), compression=compression)


def execute(blocks: int, *, changed_since: int = -1, late_from: int = 2**62) -> Execution:
    """Returns the order to run one window over all blocks."""
    return Execution(
        window=WindowRef(0, 0, SECOND),
        kind=PaneKind.ON_TIME,
        pane=3,
        changed_since=changed_since,
        late_from=late_from,
        events=0,
        late_events=0,
    )


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    return sorted((row for batch in batches for row in batch.to_pylist()), key=repr)


MIB = 1 << 20


def files_in(folder: Path) -> list[str]:
    """Returns the open files of this process in a folder. Checks that none of them has a name."""
    assert list(folder.iterdir()) == []
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except OSError:  # the file that lists the others
            continue
    return [t for t in targets if t.startswith(str(folder))]


def spilled(apply: Apply, folder: Path) -> Iterator[pa.RecordBatch]:
    stored = [StoredBlock(i, block_of(sorted([*range(60)] * 5), range(300))) for i in range(4)]
    return apply_window(plan_of(apply), execute(4), iter(stored), room=Room(1000, str(folder)))


def mapped_bytes(path: Path) -> int:
    """How much of a file this process has in its memory."""
    text = Path("/proc/self/smaps").read_text()
    parts = text.split(str(path))[1:]
    return sum(int(part.split("Rss:")[1].split()[0]) << 10 for part in parts)
