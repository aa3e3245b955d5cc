"""Windows computed by the user's function over their events."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from aion.errors import ApplyError
from aion.operator import EmitDropped, Execute, Kind
from aion.plan import Key, Plan, Window
from aion.rows import pane_rows
from aion.time import format_instant
from state_backends.block import decode
from state_backends.store import StoredBlock

ROWS_AT_ONCE = 4096


class _Group(NamedTuple):
    """The events of one key: where they are, and how many are late."""

    key: Key
    parts: list[pa.RecordBatch]
    events: int
    late_events: int


def apply_window(plan: Plan, execute: Execute, blocks: Iterator[StoredBlock]) -> Iterator[pa.RecordBatch]:
    """Rows of one execution. The function runs for the keys that changed since the one before."""
    window = Window(execute.window.start_us, execute.window.end_us, plan.names[execute.window.definition])
    collected = _Collected(plan, execute)
    if not plan.key:
        events = (decode(b.block, plan.block_schema, f"block {b.seq}") for b in blocks)
        rows = _call(plan, (), window, events)
        collected.add(_Group((), [], execute.events, execute.late_events), rows)
    else:
        for group in _by_key(plan, execute, list(blocks)):
            collected.add(group, _call(plan, group.key, window, iter(group.parts)))
            if collected.rows >= ROWS_AT_ONCE:
                yield collected.take()
    if collected.rows:
        yield collected.take()


def dropped_events(plan: Plan, action: EmitDropped, batch: pa.RecordBatch) -> pa.RecordBatch:
    """One row for each event that came too late or has no time, with the event itself as JSON."""
    n = batch.num_rows
    texts = [orjson.dumps(row, default=_plain).decode() for row in batch.to_pylist()]
    return pane_rows(
        plan,
        keys=[batch.column(name) for name in plan.key],
        outputs=None,
        windows=[action.window],
        which=np.zeros(n, np.int64),
        kind=pa.repeat(Kind.DROPPED.value, n),
        events=np.ones(n, np.int64),
        late_events=np.full(n, int(action.window is not None)),
        event_time=batch.column(plan.time),
        lateness_us=action.lateness_us,
        reason=action.reason,
        event=pa.array(texts, pa.string()),
    )


class _Collected:
    """Result rows of several keys, made into Arrow together."""

    def __init__(self, plan: Plan, execute: Execute) -> None:
        self._plan, self._execute = plan, execute
        self._tables: list[pa.Table] = []
        self._dicts: list[Mapping[str, Any]] = []
        self._groups: list[tuple[_Group, int]] = []
        self.rows = 0

    def add(self, group: _Group, rows: list[Mapping[str, Any]] | pa.Table) -> None:
        n = len(rows)
        if not n:
            return
        if isinstance(rows, pa.Table):
            self._settle()
            self._tables.append(rows)
        else:
            self._dicts += rows
        self._groups.append((group, n))
        self.rows += n

    def take(self) -> pa.RecordBatch:
        self._settle()
        table = pa.concat_tables(self._tables)
        counts = [n for _, n in self._groups]
        of_row = pa.array(np.repeat(np.arange(len(counts)), counts))
        plan, execute = self._plan, self._execute
        keys = [
            pa.array([g.key[i] for g, _ in self._groups], plan.schema.field(name).type).take(of_row)
            for i, name in enumerate(plan.key)
        ]
        batch = pane_rows(
            plan,
            keys=keys,
            outputs=table.columns,
            windows=[execute.window],
            which=np.zeros(self.rows, np.int64),
            pane=np.full(self.rows, execute.pane, np.int32),
            kind=pa.repeat(execute.kind.value, self.rows),
            events=np.repeat([g.events for g, _ in self._groups], counts),
            late_events=np.repeat([g.late_events for g, _ in self._groups], counts),
        )
        self._tables, self._groups, self.rows = [], [], 0
        return batch

    def _settle(self) -> None:
        if self._dicts:
            self._tables.append(_to_table(self._plan, self._dicts, f"window {self._execute.window}"))
            self._dicts = []


def _by_key(plan: Plan, execute: Execute, blocks: list[StoredBlock]) -> Iterator[_Group]:
    """The events of each key that changed, as slices of the blocks: no event is copied.

    Blocks are sorted by key where they are made, so a key is one stretch, a run, in each block.
    """
    batches = [decode(b.block, plan.block_schema, f"block {b.seq}") for b in blocks]
    lengths = [batch.num_rows for batch in batches]
    table = pa.Table.from_batches(batches)
    codes = _key_codes(table, plan.key)
    block_of = np.repeat(np.arange(len(batches)), lengths)
    starts = np.concatenate(([0], np.flatnonzero((codes[1:] != codes[:-1]) | (block_of[1:] != block_of[:-1])) + 1))
    sizes = np.diff(np.append(starts, len(codes)))
    run_codes, run_blocks = codes[starts], block_of[starts]
    offsets = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    seqs = np.array([b.seq for b in blocks])[run_blocks]
    order = np.argsort(run_codes, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(run_codes[order])) + 1)
    for runs in groups:
        if seqs[runs].max() <= execute.changed_since:
            continue
        first = runs[0]
        batch, at = batches[run_blocks[first]], int(starts[first] - offsets[run_blocks[first]])
        yield _Group(
            tuple(batch.column(name)[at].as_py() for name in plan.key),
            [batches[run_blocks[r]].slice(int(starts[r] - offsets[run_blocks[r]]), int(sizes[r])) for r in runs],
            int(sizes[runs].sum()),
            int(sizes[runs][seqs[runs] >= execute.late_from].sum()),
        )


def _key_codes(table: pa.Table, keys: Iterable[str]) -> npt.NDArray[np.int64]:
    """The same integer for rows of the same key."""
    codes = np.zeros(table.num_rows, np.int64)
    for name in keys:
        encoded = table.column(name).combine_chunks().dictionary_encode(null_encoding="encode")
        codes = codes * max(len(encoded.dictionary), 1) + encoded.indices.to_numpy(zero_copy_only=False)
    return codes


def _call(plan: Plan, key: Key, window: Window, events: Iterator[pa.RecordBatch]) -> list[Mapping[str, Any]] | pa.Table:
    assert plan.apply is not None
    where = f"apply for key {key} and window [{format_instant(window.start)}, {format_instant(window.end)})"
    try:
        result = plan.apply(key, window, events)
        if isinstance(result, pa.RecordBatch):
            return pa.Table.from_batches([result]).select(plan.outputs.names).cast(plan.outputs)
        if isinstance(result, pa.Table):
            return result.select(plan.outputs.names).cast(plan.outputs)
        rows = [result] if isinstance(result, Mapping) else list(result)
    except Exception as error:
        raise ApplyError(f"{where}: {type(error).__name__}: {error}") from error
    for row in rows:
        if not isinstance(row, Mapping):
            raise ApplyError(f"{where}: returned {row!r}; a row is a mapping of column names to values")
        unknown: set[str] = set(row) - set(plan.outputs.names)
        if unknown:
            raise ApplyError(
                f"{where}: returned the column {sorted(unknown)[0]!r}, which the schema does not have; "
                f"it has {', '.join(plan.outputs.names)}"
            )
    if rows:
        _to_table(plan, rows[:1], where)  # so that a wrong type is told with its key and window
    return rows


def _to_table(plan: Plan, rows: list[Mapping[str, Any]], where: str) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows, plan.outputs)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ApplyError(f"{where}: what it returned does not fit the declared schema: {error}") from error


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
