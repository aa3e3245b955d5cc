"""Runs the user's ``apply`` function over the events of windows."""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from aion.aggregates.values import combined
from aion.base.numbers import sum_of
from aion.base.time import format_instant
from aion.core.ingest.encoding import decode, is_mapped, is_quick
from aion.core.ingest.key_ranges import Keys, row_hashes
from aion.core.keyed.orders import ExecuteKeyed
from aion.core.life.actions import Execution, PaneKind, WindowRef
from aion.core.life.arrival import UNTIMED
from aion.core.query.evolved import converted, schema_before
from aion.core.query.functions import Key, Window
from aion.core.query.plan import Plan
from aion.core.query.updates import DROPPED, visible
from aion.core.slicing.grid import DROPPED_SLICE
from aion.errors import ApplyError
from aion.execute.panes.keyed_panes import locate
from aion.execute.panes.rows import Dropped, RowFacts, WindowColumns, pane_rows
from aion.execute.panes.updates import Newest, with_seq
from aion.execute.spill.grouping import Group, Piece, keys_of
from aion.execute.spill.held_rows import HeldRows, stretches
from aion.execute.spill.spilling import ROOM, Room, group_by_key, partitions_by_key
from state_backends.files.bodies import give_back_pages
from state_backends.store.codec_pool import CodecPool
from state_backends.store.protocol import StoredBlock
from state_backends.thresholds import threshold

ROWS_AT_ONCE = threshold(4096)
BYTES_AT_ONCE = threshold(64 << 20, 64)
"""Result rows are passed on when there are this many of them, or when they have about this many bytes."""
WORTH_FILTERING = threshold(1024, 2)
"""In a block with fewer rows, filtering by key costs more than it saves."""
_IN_LINE = CodecPool(0)
_UNFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""The errors that Arrow raises for values that do not have the declared types."""


Seen = Callable[[Iterator[StoredBlock]], Iterator[StoredBlock]]
"""What the blocks of an execution pass through as they are read, so that they are measured."""


class Decoded(NamedTuple):
    """The rows of a block. ``seq``: the number of the last block that arrived in it.

    It does not keep the block's bytes alive, unless the rows share them. ``mapped``: the rows lie in a file that is
    mapped, so they need no memory of their own.
    """

    seq: int
    slice_us: int
    batch: pa.RecordBatch
    mapped: bool = False


def decode_all(
    plan: Plan, blocks: Iterable[StoredBlock], pool: CodecPool | None, keys: Keys | None = None
) -> Generator[Decoded, None, None]:
    """Decodes blocks lazily and in order. With a pool, its threads decode some before the caller asks for them.

    ``keys``: the rows of these keys are wanted, or all if it is None. Rows of other keys may come, too.
    """

    def one(stored: StoredBlock) -> Decoded:
        batch = _rows_of(plan, stored)
        kept = None
        if keys is not None and batch.num_rows >= WORTH_FILTERING:
            kept = keys.among(row_hashes(plan, batch))
        if kept is not None:
            batch = batch.filter(pa.array(kept))
        return Decoded(stored.arrival, stored.block.header.slice_us, batch, kept is None and is_mapped(stored.block))

    def quick(stored: StoredBlock) -> bool:
        header = stored.block.header
        return is_quick(header.codec, header.compression, header.raw_bytes)

    return (pool or _IN_LINE).map_ordered(one, blocks, inline=quick)


def _rows_of(plan: Plan, stored: StoredBlock) -> pa.RecordBatch:
    name = f"block {stored.seq}"
    step = None if plan.history is None else plan.history.step_of(stored.seq)
    if step is None:
        return decode(stored.block, plan.block_schema, name)
    then = decode(stored.block, schema_before(plan, step), name)
    return converted(plan, then, step, stored.block.header.slice_us)


def apply_window(
    plan: Plan,
    execute: Execution,
    blocks: Iterable[StoredBlock],
    pool: CodecPool | None = None,
    keys: Keys | None = None,
    room: Room = ROOM,
) -> Iterator[pa.RecordBatch]:
    """The result rows of one execution. The function runs for the keys that changed since the execution before.

    A key for which it returns nothing is retracted if the execution before had events of it.

    ``keys``: those keys, if they are known. Without key columns, the events are passed on as they are read. With key
    columns, the events are grouped first. ``room``: of decoded events.
    """
    window = Window(execute.window.start_us, execute.window.end_us, plan.names[execute.window.definition])
    collected = _Collected(plan, execute.kind)
    with closing(decode_all(plan, blocks, pool, keys)) as decoded:
        if not plan.key:
            rows = _call(plan, (), window, (d.batch for d in decoded))
            shown = _Shown((), execute.window, execute.closes_us, execute.pane, execute.events, execute.late_events)
            collected.add(shown, rows, again=execute.changed_since >= 0)
        else:
            pieces = (
                Piece(d.batch, d.seq > execute.changed_since, d.seq >= execute.late_from, d.mapped) for d in decoded
            )
            with closing(group_by_key(plan.key, pieces, room, give_back_pages)) as groups:
                yield from _apply_groups(plan, execute, groups, collected)
    yield from collected.rest()


def newest_panes(
    plan: Plan,
    execute: Execution,
    blocks: Iterable[StoredBlock],
    pool: CodecPool | None = None,
    keys: Keys | None = None,
    room: Room = ROOM,
) -> Iterator[pa.RecordBatch]:
    """The same if events replace earlier ones: the function or the aggregates see the newest ones.

    A key without any is retracted if the execution before had events of it. Without key columns, all events of the
    window are in memory at once, and so are those of each key.
    """
    assert plan.updates is not None
    collected = _Collected(plan, execute.kind)
    with closing(decode_all(plan, blocks, pool, keys)) as decoded:
        pieces = (Piece(with_seq(d.batch, d.seq), True, False, d.mapped) for d in decoded)
        with closing(partitions_by_key(plan.key, pieces, room)) as partitions:
            for newest in (
                Newest.of(plan, execute, partition.batches) for partition in partitions if partition.batches
            ):
                if plan.updates.layout is not None:
                    yield from newest.panes(plan, execute)
                else:
                    yield from _apply_groups(plan, execute, newest.groups(plan), collected)
    yield from collected.rest()


def _apply_groups(
    plan: Plan, execute: Execution, groups: Iterator[Group], collected: _Collected
) -> Iterator[pa.RecordBatch]:
    window = Window(execute.window.start_us, execute.window.end_us, plan.names[execute.window.definition])
    for group in groups:
        rows = _call(plan, group.key, window, group.batches) if group.events else []
        shown = _Shown(group.key, execute.window, execute.closes_us, execute.pane, group.events, group.late_events)
        collected.add(shown, rows, again=group.seen)
        del group, rows  # otherwise they keep this key's events while the next key's are read
        if collected.is_full:
            yield collected.take()


def apply_keyed(plan: Plan, order: ExecuteKeyed, held: HeldRows, limit_bytes: int) -> Iterator[pa.RecordBatch]:
    """Runs the function for windows of single keys. ``held``: see :func:`aion.execute.panes.keyed_panes.locate`.

    A window for which it returns nothing is retracted if it was executed before.

    The events of small windows are copied together, up to ``limit_bytes``. Those of a larger one are read while the
    function runs.
    """
    collected = _Collected(plan, order.kind)
    name = plan.names[order.definition]
    events = held.select(plan.schema.names)
    for windows, rows, begins, lengths in stretches(locate(plan, order, held.table), held, limit_bytes):
        is_large = len(windows) == 1 and sum_of(held.weights(rows)) > limit_bytes
        taken = None if is_large else events.take(rows)
        columns = [windows[c].tolist() for c in ("start", "end", "closes", "pane", "events", "late_events")]
        keys = keys_of(plan.key, windows.keys) if windows.keys else repeat(())
        where = zip(begins.tolist(), lengths.tolist(), strict=True)
        for (begin, length), key, start, end, *shown in zip(where, keys, *columns, strict=False):
            own = events.chunks(rows) if taken is None else iter([taken.slice(begin, length)])
            result = _call(plan, key, Window(start, end, name), own)
            of_pane = _Shown(key, WindowRef(order.definition, start, end), *shown)
            collected.add(of_pane, result, again=of_pane.pane > 0)
            if collected.is_full:
                yield collected.take()
    yield from collected.rest()


def dropped_events(
    plan: Plan, batch: pa.RecordBatch, rows: Any, windows: WindowColumns, lateness_us: Any, reason: str
) -> pa.RecordBatch:
    """A result row for each event that came too late or has no time in range, with the event itself as JSON.

    Row ``rows[i]`` of the batch came too late for window i by ``lateness_us[i]``. ``lateness_us``: None for
    events without a time in range. They have no window.
    """
    if plan.updates is not None and reason == UNTIMED[DROPPED_SLICE]:
        texts = combined(batch.column(DROPPED))
    else:
        texts = as_texts(batch.select(visible(plan)))
    n, at = len(rows), pa.array(rows)
    return pane_rows(
        plan,
        [batch.column(name).take(at) for name in plan.key],
        windows,
        RowFacts(PaneKind.DROPPED, np.ones(n, np.int64), np.full(n, int(lateness_us is not None))),
        dropped=Dropped(reason, lateness_us, batch.column(plan.time).take(at), texts.take(at)),
    )


class _Shown(NamedTuple):
    """What a pane shows besides the user's columns."""

    key: Key
    window: WindowRef
    closes_us: int
    pane: int
    events: int
    late_events: int


class _Collected:
    """Collects the result rows of several keys, and turns them into one Arrow batch."""

    def __init__(self, plan: Plan, kind: PaneKind) -> None:
        self._plan, self._kind = plan, kind
        self._tables: list[pa.Table] = []
        self._dicts: list[Mapping[str, Any]] = []
        self._groups: list[_Shown] = []
        self._gone: list[_Shown] = []
        self._counts: list[int] = []
        self._in_tables = 0  # how many groups, from the first on, have all their rows in the tables
        self.rows = 0
        self._size_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.rows >= ROWS_AT_ONCE or self._size_bytes >= BYTES_AT_ONCE

    def add(self, shown: _Shown, rows: list[Mapping[str, Any]] | pa.Table, *, again: bool) -> None:
        """Adds what the function returned for a key. ``again``: it ran for this key and window before."""
        n = len(rows)
        if not n:
            if again:
                self._gone.append(shown)
            return
        if isinstance(rows, pa.Table):
            self._settle()
            self._in_tables = len(self._groups) + 1
            # A few rows that are a slice of a batch of events must not keep the whole batch in memory.
            self._tables.append(rows if rows.get_total_buffer_size() <= 2 * rows.nbytes else rows.take(np.arange(n)))
            self._size_bytes += rows.nbytes
        else:
            self._dicts += rows
            self._size_bytes += sum(_size_of(value) for row in rows for value in row.values())
        self._groups.append(shown)
        self._counts.append(n)
        self.rows += n

    def take(self) -> pa.RecordBatch:
        self._settle()
        batch = self._rows(self._kind, self._groups, pa.concat_tables(self._tables).columns, self._counts)
        self._tables, self._groups, self._counts, self.rows, self._size_bytes = [], [], [], 0, 0
        self._in_tables = 0
        return batch

    def rest(self) -> Iterator[pa.RecordBatch]:
        """All rows that are left, and the retractions."""
        if self.rows:
            yield self.take()
        if self._gone:
            nothing = [shown._replace(events=0, late_events=0) for shown in self._gone]
            yield self._rows(PaneKind.RETRACTED, nothing, None, [1] * len(nothing))

    def _rows(
        self, kind: PaneKind, groups: Sequence[_Shown], outputs: Sequence[Any] | None, counts: Sequence[int]
    ) -> pa.RecordBatch:
        keys_of, windows, closes, panes, events, late_events = zip(*groups, strict=True)
        which = np.repeat(np.arange(len(counts)), counts)
        of_row = pa.array(which)
        plan = self._plan
        keys = [
            pa.array([key[i] for key in keys_of], plan.schema.field(name).type).take(of_row)
            for i, name in enumerate(plan.key)
        ]
        closes_us = None if outputs is None else np.array(closes, np.int64)
        of_windows = WindowColumns.of(windows)._replace(closes_us=closes_us).take(which)
        counted = RowFacts(kind, np.repeat(events, counts), np.repeat(late_events, counts), np.repeat(panes, counts))
        return pane_rows(plan, keys, of_windows, counted, outputs)

    def _settle(self) -> None:
        """Turns the collected dicts into a table. Raises ApplyError with the key and window of rows that do not fit."""
        if not self._dicts:
            return
        try:
            self._tables.append(_to_table(self._plan, self._dicts))
        except _UNFIT:
            first = 0
            for group, count in zip(self._groups[self._in_tables :], self._counts[self._in_tables :], strict=True):
                try:
                    _to_table(self._plan, self._dicts[first : first + count])
                except _UNFIT as error:
                    ref = group.window
                    window = Window(ref.start_us, ref.end_us, self._plan.names[ref.definition])
                    raise ApplyError(
                        f"{_where(group.key, window)}: what it returned does not fit the declared schema: {error}"
                    ) from error
                first += count
            raise
        self._dicts = []
        self._in_tables = len(self._groups)


def _call(plan: Plan, key: Key, window: Window, events: Iterator[pa.RecordBatch]) -> list[Mapping[str, Any]] | pa.Table:
    assert plan.apply is not None
    try:
        result = plan.apply(key, window, events)
        if isinstance(result, pa.RecordBatch | pa.Table):
            if surplus := _surplus(plan, result.schema.names):
                raise ValueError(surplus)
            table = result if isinstance(result, pa.Table) else pa.Table.from_batches([result])
            return table.select(plan.outputs.names).cast(plan.outputs)
        if type(result).__module__.partition(".")[0] == "pandas":
            raise TypeError(
                f"it returned a {type(result).__name__} of pandas; return "
                "pyarrow.Table.from_pandas(frame, preserve_index=False), or frame.to_dict('records')"
            )
        rows = [result] if isinstance(result, Mapping) or not isinstance(result, Iterable) else list(result)
    except Exception as error:
        raise ApplyError(f"{_where(key, window)}: {type(error).__name__}: {error}") from error
    for row in rows:
        if not isinstance(row, Mapping):
            raise ApplyError(
                f"{_where(key, window)}: returned {row!r}, of type {type(row).__name__}; return a mapping of column "
                "names to values, several of them, or a pyarrow table"
            )
        if surplus := _surplus(plan, row):
            raise ApplyError(f"{_where(key, window)}: {surplus}")
    return rows


def _surplus(plan: Plan, names: Iterable[str]) -> str | None:
    """Says that a result has a column too many. None if it has none."""
    unknown = sorted(set(names) - set(plan.outputs.names), key=str)
    if not unknown:
        return None
    return (
        f"returned the column {unknown[0]!r}, which the schema does not have; it has "
        f"{', '.join(plan.outputs.names)}: add the column to schema=, or do not return it"
    )


def _size_of(value: Any) -> int:
    """About how many bytes a value takes in Arrow. Of a list, the first element stands for all."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple) and value:
        return len(value) * _size_of(value[0])
    return 8


def _where(key: Key, window: Window) -> str:
    return f"apply for key {key} and window [{format_instant(window.start)}, {format_instant(window.end)})"


def _to_table(plan: Plan, rows: list[Mapping[str, Any]]) -> pa.Table:
    """The rows as a table of the declared schema. Raises one of ``_UNFIT`` if they do not fit."""
    table = pa.Table.from_pylist(rows, plan.outputs)
    for field in plan.outputs:
        _check_whole([row.get(field.name) for row in rows], field.type)
    return table


def _check_whole(values: Iterable[Any], type_: pa.DataType) -> None:
    """pyarrow makes an integer of 1.5, and a date of 1.9, without a word. Raises ValueError."""
    if not _cuts(type_):
        return
    there = (value for value in values if value is not None)
    if pa.types.is_integer(type_):
        for value in there:
            if value != int(value):
                raise ValueError(f"{value!r} is not an integer")
    elif pa.types.is_temporal(type_):
        for value in there:
            if isinstance(value, float):
                raise ValueError(f"{value!r} is not a {type_}")
    elif pa.types.is_map(type_):
        pairs = [pair for value in there for pair in (value.items() if isinstance(value, Mapping) else value)]
        _check_whole([key for key, _ in pairs], type_.key_type)
        _check_whole([item for _, item in pairs], type_.item_type)
    elif pa.types.is_list(type_):
        # An array of numpy has one type. If it is of integers, there is nothing to look for.
        lists = (v for v in there if not (isinstance(v, np.ndarray) and v.dtype.kind in "iu"))
        _check_whole((element for value in lists for element in value), type_.value_type)
    elif pa.types.is_struct(type_):
        found = [value for value in there if isinstance(value, Mapping)]
        for field in type_:
            _check_whole([value.get(field.name) for value in found], field.type)


def _cuts(type_: pa.DataType) -> bool:
    """Whether pyarrow may cut a number to make a value of this type, at any depth."""
    inner = [type_.field(i).type for i in range(type_.num_fields)]
    return pa.types.is_integer(type_) or pa.types.is_temporal(type_) or any(map(_cuts, inner))


def as_texts(rows: pa.RecordBatch) -> pa.Array:
    """Returns each row as JSON."""
    return pa.array([orjson.dumps(row, default=_plain).decode() for row in _plain_rows(rows)], pa.string())


def _plain_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]]
    try:
        rows = batch.to_pylist()
    except (OverflowError, ValueError):
        whole = batch.take(pa.array(range(batch.num_rows)))  # not a slice: lists of slices cannot be put together
        columns = [_readable(column) for column in whole.columns]
        rows = pa.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()
    return rows


def _readable(column: pa.Array) -> pa.Array:
    """The column with only values that Python can read, at every depth.

    Dates and times become strings, because Python's calendar is shorter than Arrow's. Bytes that are not UTF-8 are
    escaped.
    """
    type_ = column.type
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_):
        return column.cast(pa.string())
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return type(column).from_arrays(column.offsets, _readable(column.values), mask=column.is_null())
    if pa.types.is_map(type_):
        keys, items = _readable(column.keys), _readable(column.items)
        return pa.MapArray.from_arrays(column.offsets, keys, items, mask=column.is_null())
    if pa.types.is_struct(type_):
        fields = [_readable(column.field(i)) for i in range(type_.num_fields)]
        return pa.StructArray.from_arrays(fields, [field.name for field in type_], mask=column.is_null())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        values = column.cast(pa.large_binary()).to_pylist()
        return pa.array([None if v is None else v.decode(errors="backslashreplace") for v in values], pa.string())
    return column


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
