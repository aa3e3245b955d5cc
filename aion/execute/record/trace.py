"""Traces: which blocks arrived when, with their slices, events and bytes, but without payload (docs/operate/tuning.md).

A trace is a Parquet file with the columns of ``SCHEMA``, or a folder of such files. Each batch of each shard writes one
file, named after both, so a batch that runs again replaces its file. The schema's metadata has the windows.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.aggregates import count
from aion.base.time import duration_us, format_duration
from aion.core.calendars import CalendarEdges, Steps, ZoneRules
from aion.core.compaction import BlockFact
from aion.core.life.actions import SliceFacts
from aion.core.life.arrival import UNTIMED
from aion.core.periodic import Cumulative, Periodic, periodic_of
from aion.core.query.plan import FINAL, Plan, make_plan
from aion.core.slicing.grid import is_timed
from aion.core.timing import NO_TIMING, Timing
from aion.core.windows import Aligned, Calendar
from aion.core.windows import Definition as WindowDefinition
from aion.errors import ConfigError, FormatError

FORMAT = 1
METADATA = b"aion.trace"
SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("batch", pa.int64()),
        ("kind", pa.string()),
        ("at_us", pa.int64()),
        ("watermark_us", pa.int64()),
        ("slice_us", pa.int64()),
        ("events", pa.int64()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("min_us", pa.int64()),
        ("max_us", pa.int64()),
        ("made_bytes", pa.int64()),
        ("took_us", pa.int64()),
        ("waited_us", pa.int64()),
        ("dealt_us", pa.int64()),
        ("slices", pa.list_(pa.int64())),
        ("events_of", pa.list_(pa.int64())),
        ("pane", pa.string()),
    ]
)
"""The columns of a trace. The meaning of a row depends on its ``kind``:

- ``batch``: one row for each batch of a shard.
- ``arrival``: a block. Blocks with the same ``at_us`` were handed over together, ``took_us`` after the work on earlier
  blocks ended. The work on them took ``dealt_us``, without executions and compactions. ``slices`` and ``events_of``:
  the slices of the block with their events, if it may hold several.
- ``compaction``: ``bytes`` became ``made_bytes`` within ``took_us``.
- ``execution``: a function read ``bytes`` within ``took_us``. It waited ``waited_us`` of that for blocks. ``pane``: the
  kind of its panes.
- ``staging``: ``bytes`` were prestaged within ``took_us``.
- ``writing``: a file of ``bytes`` was written within ``took_us``.
- ``last``: the input ends here.
"""

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MOST_FITTED = 500
"""The most measurements to fit a line to. The fit looks at every pair."""


class Cost(NamedTuple):
    """How long something takes: ``fixed_s`` seconds, and one more for each ``bytes_per_s`` bytes.

    ``times``: for each measurement that it was fitted to, in their order, the measured seconds divided by that.
    """

    fixed_s: float
    bytes_per_s: float
    times: tuple[float, ...] = (1.0,)


class Handed(NamedTuple):
    """Blocks that came together, how long after the work on earlier ones, and how long the work on these took."""

    blocks: int
    after_s: float
    dealt_s: float


def trace_folder(folder: str, operator: str) -> str:
    """Returns the folder of an operator's trace. ``folder``: ``trace.folder`` of the policy."""
    return str((Path(folder) / operator).resolve())


def recordable(windows: Mapping[str, WindowDefinition]) -> dict[str, Aligned]:
    """Returns the windows of an operator. Raises ConfigError for those of single keys, which are not recorded."""
    found = {name: window for name, window in windows.items() if isinstance(window, Aligned)}
    if len(found) < len(windows):
        other = next(str(window) for name, window in windows.items() if name not in found)
        raise ConfigError(
            f"trace.folder: {other} depends on the events of each key; only tumbling, sliding and calendar "
            "windows can be recorded"
        )
    return found


class Definition(NamedTuple):
    """What a replay needs to know about an operator.

    ``kept``: blocks hold events for a function; otherwise partials. ``commits``: a batch ends with a version on disk.
    ``final_only``: windows run once, when their bound has passed.
    """

    windows: Mapping[str, Aligned]
    key: bool
    kept: bool
    blocking: bool
    commits: bool
    final_only: bool = False

    @classmethod
    def of(cls, plan: Plan, *, commits: bool) -> Definition:
        """Raises ConfigError for windows of single keys: sizes and times do not say what they do."""
        windows = recordable(plan.windows)
        return cls(windows, bool(plan.key), plan.layout is None, plan.blocking, commits, plan.final_only)

    def plan(self) -> Plan:
        """A plan with the same windows and the same kind of blocks. Its columns stand for any others."""
        schema = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])
        return make_plan(
            schema,
            key="key" if self.key else None,
            time="ts",
            windows=dict(self.windows),
            aggregates=None if self.kept else {"n": count()},
            apply=_nothing if self.kept else None,
            outputs="n long" if self.kept else None,
            blocking=self.blocking,
            emit=FINAL if self.final_only else "all",
        )

    def to_json(self) -> dict[str, Any]:
        windows = [[name, *window_to_json(window)] for name, window in self.windows.items()]
        timing = {name: _timing_to_json(window.timing) for name, window in self.windows.items()}
        return {"format": FORMAT, **self._asdict(), "windows": windows, "timing": timing}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Definition:
        """An earlier Aion did not write ``timing`` and ``final_only``."""
        timing = {name: _timing_from_json(values) for name, values in value.get("timing", {}).items()}
        windows = {name: window_from_json(values, timing.get(name, NO_TIMING)) for name, *values in value["windows"]}
        final_only = value.get("final_only", False)
        return cls(windows, value["key"], value["kept"], value["blocking"], value["commits"], final_only)


def _nothing(key: Any, window: Any, events: Any) -> dict[str, int]:
    raise AssertionError("a replay computes no results")


@dataclass(frozen=True, slots=True)
class Batch:
    """What one shard did in one batch: first the watermark moved, then blocks arrived.

    ``watermark_us``: None while there is no watermark. ``rows``: of each block. ``slices``: the slices of each block
    with their events, or nothing for a block of one slice.
    """

    shard: int
    number: int
    at_us: int
    watermark_us: int | None
    blocks: Sequence[BlockFact]
    rows: Int64s
    slices: Sequence[Sequence[tuple[int, int]]] = ()
    ends_run: bool = False
    handed: Sequence[Handed] = ()

    def facts(self, start: int, count: int) -> SliceFacts | None:
        """The events of each slice of ``count`` blocks from number ``start`` on."""
        if not any(self.slices):
            return None
        rows = [(i, *pair) for i, own in enumerate(self.slices[start : start + count]) for pair in own]
        return SliceFacts(*np.array(rows, np.int64).reshape(-1, 3).T)


@dataclass(frozen=True)
class Trace:
    """What was recorded. ``table``: with the columns of ``SCHEMA``."""

    definition: Definition
    table: pa.Table

    @cached_property
    def shards(self) -> list[int]:
        return sorted(set(self.table["shard"].to_pylist()))

    @cached_property
    def batches(self) -> list[Batch]:
        """The batches, ordered by number and shard."""
        keys = [("batch", "ascending"), ("shard", "ascending")]
        table = self.table.append_column("n", pa.array(np.arange(self.table.num_rows))).sort_by(
            [*keys, ("n", "ascending")]
        )
        shard, number = (table[name].to_numpy() for name in ("shard", "batch"))
        edges = np.flatnonzero((np.diff(shard) != 0) | (np.diff(number) != 0)) + 1
        bounds = [0, *edges.tolist(), table.num_rows] if table.num_rows else []
        return [_batch(table.slice(a, b - a)) for a, b in pairwise(bounds)]

    @cached_property
    def compactions(self) -> list[tuple[int, int]]:
        """The bytes of each compaction, before and after."""
        rows = self._of_kind("compaction")
        return list(zip(rows["bytes"].to_pylist(), rows["made_bytes"].to_pylist(), strict=True))

    @cached_property
    def compaction(self) -> Cost | None:
        """The cost of a compaction, with reading its blocks, or None if it was not recorded."""
        return self._cost("compaction")

    @cached_property
    def processing(self) -> Cost | None:
        """The cost of an execution, without waiting for blocks, or None if it was not recorded."""
        return self._cost("execution")

    @cached_property
    def staging(self) -> Cost | None:
        """The cost of a prestage, without waiting for other I/O, or None if it was not recorded."""
        return self._cost("staging")

    @cached_property
    def writing(self) -> Cost | None:
        """The cost of writing a file, without urgent I/O between its steps, or None if it was not recorded."""
        return self._cost("writing")

    def _cost(self, kind: str) -> Cost | None:
        rows = self._of_kind(kind)
        names = ("bytes", "took_us", "waited_us")
        size, took_us, waited_us = (rows[name].fill_null(0).to_numpy().astype(float) for name in names)
        timed = (size > 0) & rows["took_us"].is_valid().to_numpy()
        return fitted(size[timed], np.maximum(took_us - waited_us, 1.0)[timed] / 1e6) if timed.any() else None

    @cached_property
    def events(self) -> int:
        return int(sum(self._of_kind("arrival")["events"].to_pylist()))

    @cached_property
    def bytes(self) -> int:
        return int(sum(self._of_kind("arrival")["bytes"].to_pylist()))

    @cached_property
    def untimed(self) -> int:
        """The number of events without an event time, or with one that is out of range. All policies drop them."""
        return sum(b.events for batch in self.batches for b in batch.blocks if b.slice_us in UNTIMED)

    def lateness_us(self) -> tuple[Int64s, Int64s]:
        """For late blocks: how far the watermark was past the end of their first window, and their events."""
        late, events = [0], [0]
        windows = list(self.definition.windows.values())
        for batch in self.batches:
            if batch.watermark_us is None:
                continue
            own = [[(block.slice_us, block.events)] for block in batch.blocks]
            pairs = itertools.chain(*(batch.slices if any(batch.slices) else own))
            for slice_us, came in (pair for pair in pairs if is_timed(pair[0])):
                ends = [end for w in windows for _, end in w.covering(slice_us)]
                if min(ends) <= batch.watermark_us:
                    late.append(batch.watermark_us - min(ends))
                    events.append(came)
        return np.array(late, np.int64), np.array(events, np.int64)

    def write(self, path: Path) -> None:
        write_trace(path, self.definition, self.table)

    def _of_kind(self, kind: str) -> pa.Table:
        return self.table.filter(pa.array(np.array(self.table["kind"].to_pylist(), object) == kind, pa.bool_()))


def fitted(size: Floats, seconds: Floats) -> Cost:
    """A line through the measurements. A few slow ones, such as the first, do not move it (Theil and Sen)."""
    if len(size) > MOST_FITTED:  # some of them, evenly spread
        chosen = np.linspace(0, len(size) - 1, MOST_FITTED).astype(int)
        size, seconds = size[chosen], seconds[chosen]
    one, other = np.triu_indices(len(size), 1)
    differ = size[one] != size[other]
    one, other = one[differ], other[differ]
    pace = float(np.median(seconds / size))
    slopes = (seconds[one] - seconds[other]) / (size[one] - size[other])
    slope = float(np.median(slopes)) if len(slopes) else pace
    if not 0 < slope <= pace:  # the measurements only say how fast it was most of the time
        slope = pace
    fixed_s = max(0.0, float(np.median(seconds - slope * size)))
    return Cost(fixed_s, 1 / slope, tuple((seconds / (fixed_s + slope * size)).tolist()))


def _handed(table: pa.Table) -> list[Handed]:
    """``table``: the arrivals of one batch. Those with the same instant came together."""
    at_us = table["at_us"].fill_null(-1).to_numpy()
    after_us, dealt_us = (table[name].fill_null(0).to_numpy() for name in ("took_us", "dealt_us"))
    begins = [0, *(np.flatnonzero(np.diff(at_us)) + 1).tolist(), len(at_us)] if len(at_us) else [0]
    return [
        Handed(stop - start, float(after_us[start]) / 1e6, float(dealt_us[start]) / 1e6)
        for start, stop in pairwise(begins)
    ]


def _batch(table: pa.Table) -> Batch:
    kinds = table["kind"].to_pylist()
    head = kinds.index("batch")
    arrivals = table.take(pa.array([i for i, kind in enumerate(kinds) if kind == "arrival"], pa.int64()))
    columns = arrivals.select(["slice_us", "events", "bytes"]).columns
    facts = zip(*(column.to_pylist() for column in columns), strict=True)
    return Batch(
        shard=table["shard"][head].as_py(),
        number=table["batch"][head].as_py(),
        at_us=table["at_us"][head].as_py(),
        watermark_us=table["watermark_us"][head].as_py(),
        blocks=[BlockFact(*fact) for fact in facts],
        rows=np.array(arrivals["rows"].to_pylist(), np.int64),
        slices=[
            list(zip(slices or (), events or (), strict=True))
            for slices, events in zip(*(arrivals[name].to_pylist() for name in ("slices", "events_of")), strict=True)
        ],
        ends_run="last" in kinds,
        handed=_handed(arrivals),
    )


def read_trace(path: Path) -> Trace:
    """Reads a trace from a file, or from all files of a folder. Raises FormatError that names the bad file."""
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        operators = sorted({file.parent for file in path.glob("*/*.parquet")})
        if len(operators) == 1:
            return read_trace(operators[0])
        if operators:
            names = ", ".join(folder.name for folder in operators)
            raise FormatError(f"{path}: here are the traces of several operators: {names}; give the folder of one")
        raise FormatError(f"{path}: there is no trace in this folder; a query records one with trace.folder: {path}")
    tables: list[pa.Table] = []
    definitions: list[dict[str, Any]] = []
    for file in files:
        try:
            table = parquet().ParquetFile(file).read()
            definition = json.loads((table.schema.metadata or {}).get(METADATA, b"null"))
        except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: the metadata are damaged
            raise FormatError(f"{file}: this is not a trace: {error}") from error
        if not isinstance(definition, dict) or not {*table.schema.names} <= {*SCHEMA.names}:
            raise FormatError(f"{file}: this is not a trace; its columns are {', '.join(table.schema.names)}")
        for name in {*SCHEMA.names} - {*table.schema.names}:  # columns that an earlier Aion did not record
            table = table.append_column(name, pa.nulls(table.num_rows, SCHEMA.field(name).type))
        table = table.select(SCHEMA.names)
        if definition.get("format") != FORMAT:
            raise FormatError(f"{file}: a trace of format {definition.get('format')}; this Aion reads format {FORMAT}")
        tables.append(table.replace_schema_metadata(None).cast(SCHEMA))
        definitions.append(definition)
        if definition != definitions[0]:
            raise FormatError(f"{file}: has other definitions than {files[0].name}; keep a folder for each operator")
    try:
        return Trace(Definition.from_json(definitions[0]), pa.concat_tables(tables))
    except (LookupError, TypeError, ValueError) as error:
        raise FormatError(f"{files[0]}: its definition is damaged: {error!r}") from error


def write_trace(path: Path, definition: Definition, table: pa.Table) -> None:
    """Writes a file completely or not at all. Replaces an existing file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    metadata = {METADATA: json.dumps(definition.to_json()).encode()}
    try:
        parquet().write_table(table.replace_schema_metadata(metadata), partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def parquet() -> Any:
    """The module ``pyarrow.parquet``. Every root's worker loads this module, but only a query that records needs it."""
    import pyarrow.parquet

    return pyarrow.parquet


def window_to_json(window: Aligned) -> list[Any]:
    """Returns the definition of windows as JSON values. A calendar brings the rules of its zone."""
    # A trace has no keys, so nobody can tell which rows a definition with ``fill`` has for windows without events.
    if isinstance(window, Cumulative):
        return [{name: value for name, value in window.spec().items() if not name.startswith("fill")}]
    if isinstance(window, Periodic):
        return [window.size_us, window.slide_us, window.offset_us]
    steps, rules = window.edges.steps, window.edges.rules
    start = [] if steps.start is None else [steps.start]
    return [steps.every, rules.name, base64.b64encode(rules.tzif).decode("ascii"), *start]


def window_from_json(values: Sequence[Any], timing: Timing = NO_TIMING) -> Aligned:
    if isinstance(values[0], Mapping):
        return periodic_of(values[0], timing)
    if isinstance(values[0], int):
        size_us, slide_us, offset_us = values
        return Periodic(size_us, slide_us, offset_us, timing)
    every, zone, tzif, *start = values
    rules = ZoneRules(zone, base64.b64decode(tzif))
    return Calendar(CalendarEdges(Steps.of(every, *start), rules), timing=timing)


def _timing_to_json(timing: Timing) -> dict[str, Any]:
    """What the definition says about its own executions, and nothing that it leaves to the policy."""
    trigger = None if timing.trigger is None else {key: _plain(value) for key, value in timing.trigger}
    values = {"early_us": timing.early_us, "bound_us": timing.bound_us, "trigger": trigger}
    return {name: value for name, value in values.items() if value is not None}


def _timing_from_json(values: Mapping[str, Any]) -> Timing:
    trigger = values.get("trigger")
    items = None if trigger is None else tuple(trigger.items())
    return Timing(values.get("early_us"), values.get("bound_us"), items)


def _plain(value: Any) -> Any:
    """A setting of a trigger as the same setting in JSON."""
    return format_duration(duration_us(value)) if isinstance(value, timedelta) else value
