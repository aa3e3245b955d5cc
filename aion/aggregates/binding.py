"""Binds an aggregate to a schema: its partials, the type of its result, and the function that lowers it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as preset
from typing import Any, NamedTuple

import pyarrow as pa

from aion.aggregates.cardinality import Registers
from aion.aggregates.custom import Custom, call
from aion.aggregates.functions import Aggregate
from aion.aggregates.lists import Best, Distinct, Values, lengths_of
from aion.aggregates.partial import EVENTS, Counted, Extreme, Partial, States
from aion.aggregates.picks import Picked
from aion.aggregates.quantiles import Digest, is_quantifiable, lower_approximate, lower_percentiles
from aion.aggregates.sums import (
    DecimalSum,
    DoubleSum,
    IntegerSum,
    SquaredDeviations,
    decimal_mean_type,
    decimal_sum_type,
    lower_decimal_mean,
    lower_decimal_sum,
    lower_mean,
    lower_variance,
    plain,
)
from aion.base.schema import parse_schema
from aion.errors import ConfigError, SchemaError, needs_extra


@dataclass(frozen=True)
class BoundAggregate:
    """An aggregate bound to a schema: its partials, its result type, and ``lower``, which takes their states."""

    name: str
    aggregate: Aggregate
    partials: tuple[Partial, ...]
    type: pa.DataType
    lower: Callable[..., pa.Array]

    @property
    def decomposable(self) -> bool:
        """Whether its partials have a bounded size. Otherwise it is holistic: it keeps values of the events."""
        return not any(p.holistic for p in self.partials)

    @property
    def commutative(self) -> bool:
        """Whether the result is the same for every order of arrival."""
        return self.aggregate.function in _IN_ANY_ORDER or all(p.commutative for p in self.partials)

    @property
    def invertible(self) -> bool:
        """Whether events can be removed from a partial again."""
        return all(p.invertible for p in self.partials)


# What Arrow raises for an operation that it does not support for a type. We try with no values, or with one null.
_UNSUPPORTED = (pa.ArrowNotImplementedError, pa.ArrowInvalid, TypeError)
# Functions whose results do not depend on the order of the values, although their partials are ordered lists.
_IN_ANY_ORDER = {"median", "percentile", "top_k"}


class _Request(NamedTuple):
    """An aggregate to bind, with its schema. Its methods check the types of its columns; they raise SchemaError."""

    name: str
    aggregate: Aggregate
    schema: pa.Schema
    time: str | None

    def type(self, i: int = 0) -> pa.DataType:
        return self.schema.field(self.aggregate.columns[i]).type

    def refuse(self, why: str) -> SchemaError:
        return SchemaError(f"aggregates: {self.name!r} = {self.aggregate} {why}")

    def number(self) -> pa.DataType:
        type_ = self.type()
        t = pa.types
        if t.is_decimal(type_):
            if not t.is_decimal128(type_):
                raise self.refuse(
                    f"takes decimals of type decimal128, with up to 38 digits, not {type_}; cast the column"
                )
        elif not (t.is_integer(type_) or t.is_floating(type_)):
            raise self.refuse(f"needs numbers, not {type_}; cast the column")
        return type_

    def ordered(self, i: int = 0) -> pa.DataType:
        type_ = self.type(i)
        if not _can_be_ordered(type_):
            raise self.refuse(f"cannot order values of type {type_}")
        return type_

    def kept(self, i: int = 0) -> pa.DataType:
        type_ = self.type(i)
        if not _can_be_kept(type_):
            raise self.refuse(f"cannot keep values of type {type_}")
        return type_

    def hashed(self, i: int = 0) -> pa.DataType:
        type_ = self.type(i)
        if not _can_be_told_apart(type_):
            raise self.refuse(f"cannot compare values of type {type_}")
        return type_


_Made = tuple[tuple[Partial, ...], pa.DataType, Callable[..., pa.Array]]


def check_aggregate(name: str, aggregate: object) -> None:
    """Raises ConfigError for what is not an aggregate, or not one that is known."""
    if not isinstance(aggregate, Aggregate):
        raise ConfigError(f"aggregates: {name!r} is {aggregate!r}, which is not an aggregate; use e.g. A.count()")
    if aggregate.function not in _BINDERS:
        raise ConfigError(f"aggregates: {name!r} asks for the unknown function {aggregate.function!r}")


def bind(name: str, aggregate: Aggregate, schema: pa.Schema, time: str | None = None) -> BoundAggregate:
    """Binds an aggregate to a schema. Raises SchemaError for a column that is missing or cannot be aggregated.

    ``time``: the event time column, by which first and last order the events.
    """
    check_aggregate(name, aggregate)
    for column in aggregate.columns:
        if column not in schema.names and (aggregate.function, column) != ("count", "*"):
            raise SchemaError(
                f"aggregates: {name!r} = {aggregate} names a column that does not exist: {column!r}; "
                f"the columns are {', '.join(schema.names)}"
            )
    partials, type_, lower = _BINDERS[aggregate.function](_Request(name, aggregate, schema, time))
    return BoundAggregate(name, aggregate, partials, type_, lower)


def _count(request: _Request) -> _Made:
    column = request.aggregate.columns[0]
    return (EVENTS if column == "*" else Counted(column),), pa.int64(), plain


def _sum(request: _Request) -> _Made:
    column, type_ = request.aggregate.columns[0], request.number()
    if pa.types.is_decimal(type_):
        result = decimal_sum_type(type_)
        return (DecimalSum(column, type_.scale),), result, preset(lower_decimal_sum, result=result)
    if pa.types.is_integer(type_):
        return (IntegerSum(column),), pa.int64(), plain
    return (DoubleSum(column),), pa.float64(), plain


def _mean(request: _Request) -> _Made:
    column, type_ = request.aggregate.columns[0], request.number()
    if pa.types.is_decimal(type_):
        result = decimal_mean_type(type_)
        partials = (DecimalSum(column, type_.scale), Counted(column))
        return partials, result, preset(lower_decimal_mean, result=result)
    return (DoubleSum(column), Counted(column)), pa.float64(), lower_mean


def _variance(request: _Request, *, sample: bool, root: bool) -> _Made:
    column = request.aggregate.columns[0]
    request.number()
    partials = (SquaredDeviations(column), Counted(column))
    return partials, pa.float64(), preset(lower_variance, sample=sample, root=root)


def _extreme(request: _Request, *, largest: bool) -> _Made:
    type_ = request.ordered()
    return (Extreme(request.aggregate.columns[0], type_, largest),), type_, plain


def _by_time(request: _Request, *, last: bool) -> _Made:
    if request.time is None:
        raise request.refuse("needs the column of the event time")
    time_type = request.schema.field(request.time).type
    ignore = request.aggregate.option("ignorenulls")
    picked = Picked(
        request.aggregate.columns[0],
        request.kept(),
        request.time,
        time_type,
        last,
        last,
        is_time=True,
        skip_nulls=ignore,
    )
    return (picked,), request.type(), _second


def _by_order(request: _Request, *, largest: bool) -> _Made:
    (value, order), k = request.aggregate.columns, request.aggregate.option("k")
    if k is not None:
        best = Best(value, request.kept(), order, request.ordered(1), k, largest)
        return (best,), pa.list_(request.type()), plain if value == order else _second
    # Of rows with equal order, Spark keeps the one that it sees last.
    return (Picked(value, request.kept(), order, request.ordered(1), largest, last=True),), request.type(), _second


def _top_k(request: _Request) -> _Made:
    column, type_ = request.aggregate.columns[0], request.ordered()
    return (Best(column, type_, column, type_, request.aggregate.option("k"), True),), pa.list_(type_), plain


def _count_distinct(request: _Request) -> _Made:
    columns = request.aggregate.columns
    return (Distinct(columns, tuple(request.hashed(i) for i in range(len(columns)))),), pa.int64(), _lengths


def _collect_set(request: _Request) -> _Made:
    return (Distinct(request.aggregate.columns, (request.hashed(),)),), pa.list_(request.type()), plain


def _needs_sketches(request: _Request) -> None:
    """Raises MissingExtra now, not in the first batch."""
    with needs_extra("sketches", request.aggregate.function):
        import datasketches  # noqa: F401 (importing it is the check)


def _approx_count_distinct(request: _Request) -> _Made:
    _needs_sketches(request)
    registers = Registers(request.aggregate.columns[0], request.aggregate.option("lg"), request.hashed())
    return (registers,), pa.int64(), registers.estimates


def _collect_list(request: _Request) -> _Made:
    return (Values(request.aggregate.columns[0], request.kept()),), pa.list_(request.type()), plain


def _percentile(request: _Request) -> _Made:
    type_ = request.number()
    share = 0.5 if request.aggregate.function == "median" else request.aggregate.option("percentage")
    shares, array = _shares(share)
    lower = preset(lower_percentiles, ranks=shares, array=array)
    return (Values(request.aggregate.columns[0], type_),), pa.list_(pa.float64()) if array else pa.float64(), lower


def _approx_percentile(request: _Request) -> _Made:
    type_ = request.type()
    if not is_quantifiable(type_):
        raise request.refuse(f"needs numbers, dates or times, not {type_}; cast the column")
    _needs_sketches(request)
    shares, array = _shares(request.aggregate.option("percentage"))
    digest = Digest(request.aggregate.columns[0], type_, request.aggregate.option("accuracy"))
    lower = preset(lower_approximate, ranks=shares, array=array)
    return (digest,), pa.list_(type_) if array else type_, lower


def _aggregate(request: _Request) -> _Made:
    options = dict(request.aggregate.options)
    fields, result = parse_schema(options["partial"]), options["result"]
    if isinstance(result, str):
        result = parse_schema(f"result {result}").field(0).type
    custom = Custom(
        options["name"],
        request.aggregate.columns,
        tuple((f.name, f.type) for f in fields),
        options["lift"],
        options["combine"],
        options["commutative"],
        options["invertible"],
    )

    return (custom,), result, preset(_lower_own, name=options["name"], function=options["lower"], result=result)


def _lower_own(states: States, *, name: str, function: Callable[..., Any], result: pa.DataType) -> pa.Array:
    return call(f"{name}: lower", function, states, [result], len(states[0]))[0]


def _second(states: States) -> pa.Array:
    return states[1]


def _lengths(states: States) -> pa.Array:
    return pa.array(lengths_of(states[0]))


def _shares(share: float | tuple[float, ...]) -> tuple[tuple[float, ...], bool]:
    return (share, True) if isinstance(share, tuple) else ((share,), False)


_BINDERS: dict[str, Callable[[_Request], _Made]] = {
    "count": _count,
    "sum": _sum,
    "mean": _mean,
    "var_samp": preset(_variance, sample=True, root=False),
    "var_pop": preset(_variance, sample=False, root=False),
    "stddev_samp": preset(_variance, sample=True, root=True),
    "stddev_pop": preset(_variance, sample=False, root=True),
    "min": preset(_extreme, largest=False),
    "max": preset(_extreme, largest=True),
    "first": preset(_by_time, last=False),
    "last": preset(_by_time, last=True),
    "min_by": preset(_by_order, largest=False),
    "max_by": preset(_by_order, largest=True),
    "top_k": _top_k,
    "count_distinct": _count_distinct,
    "approx_count_distinct": _approx_count_distinct,
    "collect_list": _collect_list,
    "collect_set": _collect_set,
    "median": _percentile,
    "percentile": _percentile,
    "approx_percentile": _approx_percentile,
    "aggregate": _aggregate,
}


def _can_be_ordered(type_: pa.DataType) -> bool:
    """Returns whether Aion or Arrow can order values of the type. Arrow is tried now, so that no batch fails later."""
    t = pa.types
    if t.is_floating(type_) or t.is_boolean(type_) or (t.is_temporal(type_) and not t.is_interval(type_)):
        return True
    if t.is_struct(type_):
        return type_.num_fields > 0 and all(_can_be_ordered(field.type) for field in type_)
    nothing = pa.table({"key": pa.array([], pa.int64()), "value": pa.array([], type_)})
    try:
        nothing.group_by("key", use_threads=False).aggregate([("value", "min")])
    except _UNSUPPORTED:
        return False
    return not t.is_null(type_)


def _can_be_kept(type_: pa.DataType) -> bool:
    """Returns whether Arrow can take and filter values of the type."""
    try:
        pa.nulls(1, type_).take(pa.array([0])).filter(pa.array([True]))
    except _UNSUPPORTED:
        return False
    return True


def _can_be_told_apart(type_: pa.DataType) -> bool:
    try:
        pa.nulls(1, type_).dictionary_encode()
    except _UNSUPPORTED:
        return False
    return not pa.types.is_nested(type_) and not pa.types.is_null(type_)
