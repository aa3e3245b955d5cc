"""The live windows of one version of a shard, as rows: windows of time, and windows of keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.base.numbers import NEVER
from aion.core.ingest.key_ranges import Keys, row_hashes
from aion.core.keyed.cut_sessions import assigner_of
from aion.core.keyed.in_memory import WindowsInMemory
from aion.core.keyed.orders import ExecuteKeyed
from aion.core.keyed.page_store import PAGES_AT_ONCE, place_of
from aion.core.keyed.table import Table, hashes_of
from aion.core.lateness.bound import AdaptiveBound
from aion.core.life.actions import Execute, PaneKind
from aion.core.life.rules import FixedBound, OfDefinition
from aion.core.life.window_table import WindowTable, status_of
from aion.core.query.evolved import of_shard
from aion.core.query.plan import Plan
from aion.core.slicing.grid import slices_from_json, start_of
from aion.core.timed.calendar_state import plan_of_snapshot
from aion.core.trigger.triggers import EveryBatchTrigger
from aion.core.windows import PerRecord, Session
from aion.execute.panes.applying import Seen, decode_all
from aion.execute.panes.combining import windows_at_once
from aion.execute.panes.contents import RowContents
from aion.execute.panes.keyed import KeyedExecutor
from aion.execute.panes.rows import RowFacts, WindowColumns, pane_rows
from aion.execute.spill.spilling import Room
from aion.state.columns import conformed, of_windows, shown_of
from aion.state.filters import Asked
from state_backends.server.reading import VersionReader
from state_backends.store.protocol import Only

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Reading:
    """What is read of one shard. ``names``: of the columns that may have other names than usual."""

    plan: Plan
    reader: VersionReader
    asked: Asked
    memory_bytes: int
    schema: pa.Schema

    @property
    def snapshot(self) -> Mapping[str, Any]:
        return self.reader.manifest.snapshot

    @property
    def at_us(self) -> int | None:
        found: int | None = self.snapshot["watermark_us"]
        return found

    def shown(self, panes: pa.RecordBatch, bound_us: Ints, sizes: Ints, status: Any) -> pa.RecordBatch:
        """Returns panes as rows of the answer."""
        columns = {name: panes.column(name) for name in shown_of(self.plan)}
        size, memory, disk = sizes.T
        # What nobody has to read is in memory; what is nowhere else is on the remote file system.
        tier = np.select([memory == size, memory > 0, disk > 0], ["memory", "both", "disk"], "remote")
        said = (pa.array(bound_us).cast(pa.duration("us")), status, size, tier)
        columns |= dict(zip(of_windows(self.plan).names[-len(said) :], said, strict=True))
        rows = conformed(columns, panes.num_rows, self.schema)
        if self.asked.keys is None:
            return rows
        keys = [rows.column(name) for name in self.plan.key]
        return rows.filter(pa.array(self.asked.among(keys, rows.num_rows)))


def window_rows(
    plan: Plan, reader: VersionReader, asked: Asked, memory_bytes: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yields a row for each live window and key of a shard.

    ``plan``: of the version's definition. ``memory_bytes``: about how much decoded state is in memory at once.
    ``schema``: of the answer.
    """
    snapshot = reader.manifest.snapshot
    plan = plan_of_snapshot(of_shard(plan, snapshot), snapshot)
    reading = _Reading(plan, reader, asked, memory_bytes, schema)
    yield from _of_time(reading)
    for part in plan.plans:
        yield from _of_keys(reading, part)


class _Segments:
    """The segments of a plan that overlap a stretch of time, in order."""

    def __init__(self, reader: VersionReader, names: Ints, starts_us: Ints, ends_us: Ints) -> None:
        self.names = tuple(names.tolist())
        self._starts_us, self._ends_us = starts_us, ends_us
        self._upto = np.cumsum([(0, 0, 0), *map(reader.sizes, self.names)], axis=0)

    @classmethod
    def of(cls, reading: _Reading, plan: Plan, begin_us: int, end_us: int) -> _Segments:
        names = np.array(sorted(s for s in slices_from_json(reading.snapshot["slices"]) if plan.holds(s)), np.int64)
        starts = np.array([start_of(name) for name in names.tolist()], np.int64)
        ends = plan.grid.ends(starts)
        needed = (starts < end_us) & (ends > begin_us)
        return cls(reading.reader, names[needed], starts[needed], ends[needed])

    def sizes(self, starts_us: Ints, ends_us: Ints) -> Ints:
        """Returns a row of :meth:`VersionReader.sizes` for each stretch ``[start, end)``: of all segments in it."""
        first = np.searchsorted(self._ends_us, starts_us, side="right")
        last = np.searchsorted(self._starts_us, ends_us)
        return np.asarray(self._upto[np.maximum(last, first)] - self._upto[first])


# -- windows of time ----------------------------------------------------------------------------------------


def _of_time(reading: _Reading) -> Iterator[pa.RecordBatch]:
    plan, snapshot = reading.plan, reading.snapshot
    table = WindowTable.from_json(snapshot["windows"], len(plan.windows))
    rows = np.flatnonzero(reading.asked.overlap(table["start_us"], table["end_us"]))
    if not len(rows):
        return
    segments = _Segments.of(reading, plan, int(table["start_us"][rows].min()), int(table["end_us"][rows].max()))
    size_of = np.zeros((len(table), 3), np.int64)
    size_of[rows] = segments.sizes(table["start_us"][rows], table["end_us"][rows])
    over = table.over(rows, reading.at_us)
    order = Execute(
        PaneKind.ON_TIME,
        segments.names,
        table["definition"][rows],
        table["start_us"][rows],
        table["end_us"][rows],
        table["panes"][rows],
        np.full(len(rows), -1),
        table["late_from_seq"][rows],
        table["events"][rows],
        table["late_events"][rows],
        np.zeros(len(rows)),
        table["end_us"][rows] + table["bound_us"][rows],
        np.where(over, table["last_seq"][rows], NEVER),
    )
    for some in _at_once(plan, order):
        for panes in _panes(reading, some):
            if not panes.num_rows:
                continue
            start_us, end_us = (_micros(panes.column(f"window_{edge}")) for edge in ("start", "end"))
            at = table.find(plan.numbers_of(panes.column("window"), start_us), end_us)
            status = pa.array([str(status_of(us, reading.at_us)) for us in end_us.tolist()], pa.string())
            yield reading.shown(panes, table["bound_us"][at], size_of[at], status)


def _at_once(plan: Plan, order: Execute) -> Iterator[Execute]:
    if plan.layout is None:
        for i, (start_us, end_us) in enumerate(zip(order.start_us.tolist(), order.end_us.tolist(), strict=True)):
            yield order.some(slice(i, i + 1), tuple(s for s in order.slices if start_us <= s < end_us))
        return
    for until in np.unique(order.until).tolist():
        yield from windows_at_once(plan, order.some(order.until == until))


def _panes(reading: _Reading, order: Execute) -> Iterator[pa.RecordBatch]:
    plan, until = reading.plan, int(order.until[0])
    keys = _keys(plan, reading.asked)
    spans = None if until == NEVER else dict.fromkeys(order.slices, (-1, until))
    blocks = reading.reader.read(order.slices, only=Only(spans, None if keys is None else keys.ranges))
    if plan.layout is not None or (plan.updates is not None and plan.updates.layout is not None):
        contents = RowContents(plan, room=Room(reading.memory_bytes))
        for rows in contents.panes(order, blocks, keys):
            yield rows.filter(pc.not_equal(rows.column("kind"), PaneKind.RETRACTED.value))
        return
    with closing(decode_all(plan, blocks, None, keys)) as decoded:
        counts = [_counts(plan, d.batch, d.seq >= int(order.late_from[0])) for d in decoded]
    if not counts:
        return
    counted = pa.concat_tables(counts).group_by(list(plan.key)).aggregate([("\0events", "sum"), ("\0late", "sum")])
    n = counted.num_rows
    yield pane_rows(
        plan,
        [counted.column(name).combine_chunks() for name in plan.key],
        WindowColumns.of_execution(order).take(np.zeros(n, np.int64)),
        RowFacts(PaneKind.ON_TIME, counted.column("\0events_sum"), counted.column("\0late_sum")),
    )


def _counts(plan: Plan, events: pa.RecordBatch, is_late: bool) -> pa.Table:
    """Returns how many events each key has, and how many of them are late."""
    n = events.num_rows
    ones = pa.array(np.ones(n, np.int64))
    columns = [*(events.column(name) for name in plan.key), ones, ones if is_late else pa.array(np.zeros(n, np.int64))]
    table = pa.table(columns, [*plan.key, "\0events", "\0late"])
    counted = table.group_by(list(plan.key)).aggregate([("\0events", "sum"), ("\0late", "sum")])
    return counted.rename_columns(
        [name.removesuffix("_sum") if name[0] == "\0" else name for name in counted.schema.names]
    )


def _keys(plan: Plan, asked: Asked) -> Keys | None:
    if asked.keys is None:
        return None
    names = [field.name for field in plan.key_fields] if plan.layout is not None else list(plan.key)
    return Keys(row_hashes(plan, asked.keys.rename_columns(names)))


# -- windows of keys ----------------------------------------------------------------------------------------


def _of_keys(reading: _Reading, part: Plan) -> Iterator[pa.RecordBatch]:
    snapshot = reading.snapshot
    numbers = sorted(number for each in reading.plan.plans for number in each.keyed)
    before = dict(zip(numbers, snapshot["keyed"], strict=True))
    shared = AdaptiveBound.of_snapshot(snapshot["lateness"])
    own_us = snapshot.get("own_bounds_us", {})
    types = [part.schema.field(name).type for name in part.key]

    def only(table: Table) -> Any:
        return reading.asked.among(table.keys, len(table))

    for number, window in part.keyed.items():
        own = own_us.get(str(number))
        bound = shared if own is None else FixedBound(own, shared)
        rules = OfDefinition(bound, EveryBatchTrigger())  # nothing runs here
        memory = WindowsInMemory(
            number, assigner_of(window, shows_open=True), types, rules, part.grid.bins, before[number]
        )
        memory.kept.values = reading.reader
        asked = reading.asked
        pages = np.arange(memory.kept.pages)
        if asked.keys is not None:
            columns = [column.combine_chunks() for column in asked.keys.columns]
            pages = np.unique(
                place_of(hashes_of(Table(columns, {"row": np.arange(asked.keys.num_rows)})), memory.kept.pages)
            )
        for begin in range(0, len(pages), PAGES_AT_ONCE):
            windows, members = memory.peek(pages[begin : begin + PAGES_AT_ONCE], None if asked.keys is None else only)
            complete = windows["closes"] < NEVER
            if members is not None or len(windows):
                ends = windows["end"] + isinstance(
                    window, PerRecord | Session
                )  # an event at its end is in such a window
                wanted = np.flatnonzero(asked.overlap(windows["start"], np.where(complete, ends, NEVER)))
                if members is not None:
                    members = type(members)(members.begins[wanted], members.lengths[wanted], members.seqs, members.rows)
                if len(wanted):
                    order = ExecuteKeyed(number, PaneKind.ON_TIME, windows.take(wanted), members)
                    yield from _shown(reading, part, order, bound.bound_for_new_window())


def _shown(reading: _Reading, part: Plan, order: ExecuteKeyed, bound_us: int) -> Iterator[pa.RecordBatch]:
    segments = _Segments.of(reading, part, *order.interval_us)
    for panes in _keyed_panes(reading, part, replace(order, slices=segments.names)):
        start_us, end_us = (_micros(panes.column(f"window_{edge}")) for edge in ("start", "end"))
        is_open = panes.column("closes_at").is_null().to_numpy(zero_copy_only=False)
        ends = pa.array(end_us, mask=is_open).cast(part.timestamp)
        panes = panes.set_column(panes.schema.get_field_index("window_end"), panes.schema.field("window_end"), ends)
        is_late = ~is_open & (end_us <= (-NEVER if reading.at_us is None else reading.at_us))
        sizes = segments.sizes(start_us, np.where(is_open, NEVER, end_us))
        status = pa.array(np.where(is_late, "late", "active"))
        yield reading.shown(panes, np.full(panes.num_rows, bound_us), sizes, status)


def _keyed_panes(reading: _Reading, part: Plan, order: ExecuteKeyed) -> Iterator[pa.RecordBatch]:
    windows = order.windows
    if part.layout is None:
        n = len(windows)
        yield pane_rows(
            part,
            windows.keys,
            WindowColumns(np.full(n, order.definition), windows["start"], windows["end"], windows["closes"]),
            RowFacts(PaneKind.ON_TIME, windows["events"], windows["late_events"]),
        )
        return
    executor = KeyedExecutor(
        part,
        reading.reader,  # type: ignore[arg-type]
        None,
        Room(reading.memory_bytes),
        seeks=True,
        timed=_untimed,
    )
    yield from executor.execute(executor.orders(order))


@contextmanager
def _untimed() -> Iterator[Seen]:
    yield lambda blocks: blocks


def _micros(column: Any) -> Ints:
    found: Ints = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found
