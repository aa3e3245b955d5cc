"""Records traces: the input of one shard, batch by batch (docs/operate/tuning.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from aion.core.compaction import CompactionDone
from aion.core.life.actions import SliceFacts
from aion.core.operator.operator import Operator
from aion.core.slicing.grid import is_timed
from aion.execute.record.trace import SCHEMA, Definition, write_trace
from state_backends.format.block import Block


class Recorder:
    """Records the input of one shard.

    Call ``begin`` at the start of each batch and ``write`` at its end. What is not written is lost at the next
    ``begin``.
    """

    def __init__(self, folder: Path, definition: Definition, shard: int = 0) -> None:
        self._folder, self._definition, self._shard = folder, definition, shard
        self._number = 0
        self._rows: list[dict[str, Any]] = []
        self._timed = True
        self._dealt_s = 0.0
        self._arrived_s = 0.0
        self._arrived: list[dict[str, Any]] = []  # the blocks that are worked on
        self._spent_s = 0.0  # on executions and compactions meanwhile

    def begin(self, number: int, watermark_us: int | None, at_us: int | None = None, *, timed: bool = True) -> None:
        """Starts a batch. ``at_us``: by default now. ``timed=False``: do not record when blocks are handed over."""
        self._number, self._timed = number, timed
        self._dealt_s = time.perf_counter()
        begun_us = time.time_ns() // 1000 if at_us is None else at_us
        self._rows = [{"kind": "batch", "at_us": begun_us, "watermark_us": watermark_us}]
        self._arrived = []

    def called(self) -> None:
        """Sets the start of the batch to now. ``begin`` came earlier, to record the store's I/O between batches."""
        self._rows[0]["at_us"] = time.time_ns() // 1000
        self.dealt()

    def advanced(self, watermark_us: int) -> None:
        before = self._rows[0]["watermark_us"]
        self._rows[0]["watermark_us"] = watermark_us if before is None else max(before, watermark_us)

    def dealt(self) -> None:
        """Notes that all work on the blocks so far is done."""
        self._dealt_s = time.perf_counter()
        dealt_s = max(0.0, self._dealt_s - self._arrived_s - self._spent_s)
        for row in self._arrived:
            row["dealt_us"] = round(dealt_s * 1e6)
        self._arrived = []

    def arrived(self, blocks: Sequence[Block], facts: SliceFacts | None = None) -> None:
        handed: dict[str, int] = {}
        if self._timed:
            waited_s = time.perf_counter() - self._dealt_s
            handed = {"at_us": time.time_ns() // 1000, "took_us": round(waited_s * 1e6)}
        first = len(self._rows)
        for index, header in enumerate(block.header for block in blocks):
            own = {}
            if facts is not None:
                in_block = facts.block == index
                own = {"slices": facts.slice_us[in_block].tolist(), "events_of": facts.events[in_block].tolist()}
            times = {"min_us": header.min_us, "max_us": header.max_us} if is_timed(header.slice_us) else {}
            self._rows.append(
                {
                    "kind": "arrival",
                    "slice_us": header.slice_us,
                    "events": header.events,
                    "rows": header.rows,
                    "bytes": header.size_bytes,
                    **times,
                    **handed,
                    **own,
                }
            )
        if self._timed:
            self._arrived_s, self._arrived, self._spent_s = time.perf_counter(), self._rows[first:], 0.0

    def executed(self, size_bytes: int, seconds: float, waited_s: float = 0.0, pane: str | None = None) -> None:
        """Records an execution. ``waited_s``: how many of the seconds it waited for blocks. ``pane``: their kind."""
        took = {"took_us": round(seconds * 1e6), "waited_us": round(waited_s * 1e6)}
        self._rows.append({"kind": "execution", "bytes": size_bytes, "pane": pane, **took})
        self._spent_s += seconds

    def staged(self, size_bytes: int, seconds: float, waited_s: float) -> None:
        """Records a prestage. ``waited_s``: how many of the seconds it waited for other I/O. Any thread may call it."""
        took = {"took_us": round(seconds * 1e6), "waited_us": round(waited_s * 1e6)}
        self._rows.append({"kind": "staging", "bytes": size_bytes, **took})

    def written(self, size_bytes: int, seconds: float) -> None:
        """Records that a file was written. Any thread may call it."""
        self._rows.append({"kind": "writing", "bytes": size_bytes, "took_us": round(seconds * 1e6)})

    def ended(self) -> None:
        """Records that the input ends here."""
        self._rows.append({"kind": "last"})

    def compacted(self, fact: CompactionDone, seconds_per_byte: float) -> None:
        compaction = fact.compaction
        row = {
            "kind": "compaction",
            "slice_us": compaction.slice_us,
            "bytes": compaction.size_bytes,
            "made_bytes": fact.size_bytes,
        }
        seconds = seconds_per_byte * compaction.size_bytes
        self._rows.append({**row, "took_us": round(seconds * 1e6)})
        self._spent_s += seconds

    @contextmanager
    def compactions(self, operator: Operator) -> Iterator[RecordedCompactions]:
        """Records the compactions in its context. Yields a stand-in for the operator: use it to carry them out."""
        compactions = RecordedCompactions(operator, self)
        yield compactions
        compactions.noted()

    def table(self) -> pa.Table:
        """The batch so far, as a table."""
        rows = [{"shard": self._shard, "batch": self._number, **row} for row in self._rows]
        return pa.Table.from_pylist(rows, SCHEMA)

    def write(self) -> None:
        """Writes the batch. Replaces the file of the same batch of the same shard."""
        path = self._folder / f"{self._shard:06d}-{self._number:010d}.parquet"
        write_trace(path, self._definition, self.table())


class RecordedCompactions:
    """A stand-in for the operator that records compactions.

    The time of a group is divided among its compactions in proportion to their bytes.
    """

    def __init__(self, operator: Operator, recorder: Recorder) -> None:
        self._operator, self._recorder = operator, recorder
        self._begin_s = self._made_s = time.perf_counter()
        self._group: list[CompactionDone] = []

    @property
    def next_seq(self) -> int:
        self.noted()
        self._begin_s = time.perf_counter()
        return self._operator.next_seq

    def number(self, blocks: int) -> int:
        self._made_s = time.perf_counter()
        return self._operator.number(blocks)

    def handle(self, event: CompactionDone) -> Sequence[object]:
        self._group.append(event)
        return self._operator.handle(event)

    def noted(self) -> None:
        """Records the last group, which is done."""
        size = sum(fact.compaction.size_bytes for fact in self._group)
        for fact in self._group:
            self._recorder.compacted(fact, max(0.0, self._made_s - self._begin_s) / max(size, 1))
        self._group.clear()
