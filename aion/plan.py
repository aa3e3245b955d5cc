"""What one ``windowed`` call means, resolved against a schema: shared by child, root and LocalOperator. Pure.

All times inside are int64 microseconds; all timestamp columns are ``timestamp[us]`` with zone UTC or none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from aion import aggregates as agg
from aion.errors import ConfigError, SchemaError
from aion.schema import parse_schema
from aion.slices import SliceGrid
from aion.windows import Periodic, named


class Window(NamedTuple):
    """The interval that an ``apply`` function is called for: µs since the epoch, end exclusive."""

    start: int
    end: int
    name: str


Key = tuple[Any, ...]
# A mapping, an iterable of mappings, or a RecordBatch or Table.
ApplyResult: TypeAlias = Any
ApplyFunction = Callable[[Key, Window, Iterator[pa.RecordBatch]], ApplyResult]

# Columns that every result has, around the user's own.
WINDOW_COLUMNS = ("window", "window_start", "window_end")
PANE_COLUMNS = ("pane", "kind", "events", "late_events")
DROPPED_COLUMNS = ("event_time", "lateness_us", "reason", "event")


@dataclass(frozen=True)
class Plan:
    """A resolved operator definition."""

    key: tuple[str, ...]
    time: str
    windows: Mapping[str, Periodic]
    schema: pa.Schema
    layout: agg.Layout | None
    apply: ApplyFunction | None
    outputs: pa.Schema
    blocking: bool = True

    @cached_property
    def grid(self) -> SliceGrid:
        return SliceGrid(tuple(self.windows.values()))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.windows)

    @cached_property
    def key_fields(self) -> list[pa.Field]:
        """The key columns as they stand in partials: by position, so that no user's name can clash."""
        return [pa.field(f"k{i}", self.schema.field(name).type) for i, name in enumerate(self.key)]

    @cached_property
    def block_schema(self) -> pa.Schema:
        """What the rows of a block are: events as the user has them, or keys and partials."""
        if self.layout is None:
            return self.schema
        return pa.schema([*self.key_fields, *self.layout.fields])

    @cached_property
    def timestamp(self) -> pa.DataType:
        return self.schema.field(self.time).type

    @cached_property
    def result_schema(self) -> pa.Schema:
        """Keys, window, aggregates or the function's columns, pane, and what only dropped rows have."""
        return pa.schema(
            [
                *(pa.field(name, self.schema.field(name).type) for name in self.key),
                pa.field("window", pa.string()),
                pa.field("window_start", self.timestamp),
                pa.field("window_end", self.timestamp),
                *(pa.field(f.name, f.type) for f in self.outputs),
                pa.field("pane", pa.int32()),
                pa.field("kind", pa.string()),
                pa.field("events", pa.int64()),
                pa.field("late_events", pa.int64()),
                pa.field("event_time", self.timestamp),
                pa.field("lateness_us", pa.int64()),
                pa.field("reason", pa.string()),
                pa.field("event", pa.string()),
            ]
        )

    @cached_property
    def definition(self) -> dict[str, Any]:
        """What stored state depends on; a restart with another definition is refused."""
        return {
            "key": [[name, str(self.schema.field(name).type)] for name in self.key],
            "time": self.time,
            "windows": [[name, window.spec()] for name, window in self.windows.items()],
            "block": [[f.name, str(f.type)] for f in self.block_schema],
            "partials": self.layout.spec() if self.layout else [],
        }

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.definition, sort_keys=True).encode()).hexdigest()[:16]


def make_plan(
    schema: pa.Schema,
    *,
    key: str | Sequence[str] | None,
    time: str,
    windows: Periodic | Sequence[Periodic] | Mapping[str, Periodic],
    aggregates: Mapping[str, agg.Aggregate] | None,
    apply: ApplyFunction | None,
    outputs: str | pa.Schema | None,
    blocking: bool = True,
) -> Plan:
    """Checks a definition against the input's schema.

    ``blocking``: whether ``apply`` needs all events before it can begin (paper 3.3); partials, those that hold values
    included, are decoded while the rest is read.
    ``schema`` must hold the time as ``timestamp[us]``. Raises SchemaError, WindowError or ConfigError.
    """
    keys = (key,) if isinstance(key, str) else tuple(key or ())
    _check_columns(schema, keys, time)
    definitions = named(windows)
    if (aggregates is None) == (apply is None):
        raise ConfigError("give either aggregates={...} or apply=function with schema='...', and not both")
    if apply is not None:
        if not callable(apply):
            raise ConfigError(f"apply: {apply!r} cannot be called; give a function of (key, window, events)")
        if outputs is None:
            raise ConfigError("apply= needs the schema of what it returns, e.g. schema='median double'")
        layout, result, kept = None, parse_schema(outputs), schema
    else:
        assert aggregates is not None
        if outputs is not None:
            raise ConfigError("schema= belongs to apply=; aggregates know their types")
        if not aggregates:
            raise ConfigError("aggregates: none given; e.g. aggregates={'n': aion.aggregates.count()}")
        layout = agg.Layout([agg.bind(name, a, schema, time) for name, a in aggregates.items()])
        result = pa.schema([pa.field(b.name, b.type) for b in layout.bound])
        kept = pa.schema([schema.field(n) for n in dict.fromkeys((*keys, time, *layout.columns))])
    _check_names(keys, result.names)
    return Plan(keys, time, definitions, kept, layout, apply, result, blocking and apply is not None)


def _check_columns(schema: pa.Schema, keys: Sequence[str], time: str) -> None:
    for what, name in [("time", time), *(("key", k) for k in keys)]:
        if name not in schema.names:
            raise SchemaError(f"{what}: there is no column {name!r}; the columns are {', '.join(schema.names)}")
    if len(set(keys)) != len(keys):
        raise SchemaError(f"key: {list(keys)} names a column twice")
    if not pa.types.is_timestamp(schema.field(time).type):
        raise SchemaError(f"time: column {time!r} is of type {schema.field(time).type}; a timestamp is needed")
    for name in keys:
        type_ = schema.field(name).type
        if pa.types.is_nested(type_):
            raise SchemaError(f"key: column {name!r} is of type {type_}; a key must be a plain value")


def _check_names(keys: Sequence[str], outputs: Sequence[str]) -> None:
    taken = {*WINDOW_COLUMNS, *PANE_COLUMNS, *DROPPED_COLUMNS}
    for what, names in (("key", keys), ("result column", outputs)):
        for name in names:
            if name in taken:
                raise SchemaError(f"{what}: {name!r} is a column that every result has; use another name")
    for name in outputs:
        if name in keys:
            raise SchemaError(f"result column: {name!r} is a key column already; use another name")
