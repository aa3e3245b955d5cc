"""What an aggregate means for a schema: its partials, the type of its result, and how that is lowered. Pure."""

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
from aion.aggregates.moments import SquaredDeviations, lower_variance
from aion.aggregates.partial import EVENTS, Counted, Extreme, Partial, States
from aion.aggregates.picks import Picked
from aion.aggregates.quantiles import Digest, is_quantifiable, lower_approximate, lower_percentiles
from aion.aggregates.sums import (
    DecimalSum,
    DoubleSum,
    IntegerSum,
    decimal_mean_type,
    decimal_sum_type,
    lower_decimal_mean,
    lower_decimal_sum,
    lower_mean,
    plain,
)
from aion.core.schema import parse_schema
from aion.errors import ConfigError, SchemaError, needs_extra


@dataclass(frozen=True)
class BoundAggregate:
    """An aggregate of a known schema: its partials, its result type, and ``lower`` over their states."""

    name: str
    aggregate: Aggregate
    partials: tuple[Partial, ...]
    type: pa.DataType
    lower: Callable[..., pa.Array]

    @property
    def decomposable(self) -> bool:
        """Its partials have a bounded size; what is not is holistic and keeps values of the events."""
        return not any(p.holistic for p in self.partials)

    @property
    def commutative(self) -> bool:
        """The order of arrival makes no difference to the result."""
        return self.aggregate.function in _IN_ANY_ORDER or all(p.commutative for p in self.partials)

    @property
    def invertible(self) -> bool:
        """Events can be taken out of a partial again."""
        return all(p.invertible for p in self.partials)


# What Arrow raises when it is asked, with no values or a null, for what it does not do with a type: the answer is no.
_NOT_OF_THIS_TYPE = (pa.ArrowNotImplementedError, pa.ArrowInvalid, TypeError)
# Functions of all values in whatever order; only their partials are lists with one.
_IN_ANY_ORDER = {"median", "percentile", "top_k"}


class _Asked(NamedTuple):
    """An aggregate with what is known about it, and its ways to say no."""

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
                raise self.refuse(f"takes decimals of up to 38 digits, not {type_}; cast the column")
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
            raise self.refuse(f"cannot tell values of type {type_} apart")
        return type_


_Made = tuple[tuple[Partial, ...], pa.DataType, Callable[..., pa.Array]]


def bind(name: str, aggregate: Aggregate, schema: pa.Schema, time: str | None = None) -> BoundAggregate:
    """Types an aggregate; raises SchemaError for a column that is missing or cannot be aggregated.

    ``time`` is the column of the event time, which first and last go by.
    """
    if not isinstance(aggregate, Aggregate):
        raise ConfigError(f"aggregates: {name!r} is {aggregate!r}, no aggregate; use aion.aggregates, e.g. A.count()")
    if aggregate.function not in _BINDERS:
        raise ConfigError(f"aggregates: {name!r} asks for the unknown function {aggregate.function!r}")
    for column in aggregate.columns:
        if column not in schema.names and (aggregate.function, column) != ("count", "*"):
            raise SchemaError(
                f"aggregates: {name!r} = {aggregate} names a column that does not exist: {column!r}; "
                f"the columns are {', '.join(schema.names)}"
            )
    partials, type_, lower = _BINDERS[aggregate.function](_Asked(name, aggregate, schema, time))
    return BoundAggregate(name, aggregate, partials, type_, lower)


def _count(asked: _Asked) -> _Made:
    column = asked.aggregate.columns[0]
    return (EVENTS if column == "*" else Counted(column),), pa.int64(), plain


def _sum(asked: _Asked) -> _Made:
    column, type_ = asked.aggregate.columns[0], asked.number()
    if pa.types.is_decimal(type_):
        result = decimal_sum_type(type_)
        return (DecimalSum(column, type_.scale),), result, preset(lower_decimal_sum, result=result)
    if pa.types.is_integer(type_):
        return (IntegerSum(column),), pa.int64(), plain
    return (DoubleSum(column),), pa.float64(), plain


def _mean(asked: _Asked) -> _Made:
    column, type_ = asked.aggregate.columns[0], asked.number()
    if pa.types.is_decimal(type_):
        result = decimal_mean_type(type_)
        partials = (DecimalSum(column, type_.scale), Counted(column))
        return partials, result, preset(lower_decimal_mean, result=result)
    return (DoubleSum(column), Counted(column)), pa.float64(), lower_mean


def _variance(asked: _Asked, *, sample: bool, root: bool) -> _Made:
    column = asked.aggregate.columns[0]
    asked.number()
    partials = (SquaredDeviations(column), Counted(column))
    return partials, pa.float64(), preset(lower_variance, sample=sample, root=root)


def _extreme(asked: _Asked, *, largest: bool) -> _Made:
    type_ = asked.ordered()
    return (Extreme(asked.aggregate.columns[0], type_, largest),), type_, plain


def _by_time(asked: _Asked, *, last: bool) -> _Made:
    if asked.time is None:
        raise asked.refuse("needs the column of the event time")
    time_type = asked.schema.field(asked.time).type
    ignore = asked.aggregate.option("ignorenulls")
    picked = Picked(
        asked.aggregate.columns[0], asked.kept(), asked.time, time_type, last, last, is_time=True, skip_nulls=ignore
    )
    return (picked,), asked.type(), _second


def _by_order(asked: _Asked, *, largest: bool) -> _Made:
    (value, order), k = asked.aggregate.columns, asked.aggregate.option("k")
    if k is not None:
        best = Best(value, asked.kept(), order, asked.ordered(1), k, largest)
        return (best,), pa.list_(asked.type()), plain if value == order else _second
    # Of equal ones Spark keeps the one that it sees last.
    return (Picked(value, asked.kept(), order, asked.ordered(1), largest, last=True),), asked.type(), _second


def _top_k(asked: _Asked) -> _Made:
    column, type_ = asked.aggregate.columns[0], asked.ordered()
    return (Best(column, type_, column, type_, asked.aggregate.option("k"), True),), pa.list_(type_), plain


def _count_distinct(asked: _Asked) -> _Made:
    columns = asked.aggregate.columns
    return (Distinct(columns, tuple(asked.hashed(i) for i in range(len(columns)))),), pa.int64(), _lengths


def _collect_set(asked: _Asked) -> _Made:
    return (Distinct(asked.aggregate.columns, (asked.hashed(),)),), pa.list_(asked.type()), plain


def _needs_sketches(asked: _Asked) -> None:
    """Says now what is not installed, rather than in the first batch."""
    with needs_extra("sketches", asked.aggregate.function):
        import datasketches  # noqa: F401


def _approx_count_distinct(asked: _Asked) -> _Made:
    asked.hashed()
    _needs_sketches(asked)
    registers = Registers(asked.aggregate.columns[0], asked.aggregate.option("lg"))
    return (registers,), pa.int64(), registers.estimates


def _collect_list(asked: _Asked) -> _Made:
    return (Values(asked.aggregate.columns[0], asked.kept()),), pa.list_(asked.type()), plain


def _percentile(asked: _Asked) -> _Made:
    type_ = asked.number()
    share = 0.5 if asked.aggregate.function == "median" else asked.aggregate.option("percentage")
    shares, array = _shares(share)
    lower = preset(lower_percentiles, ranks=shares, array=array)
    return (Values(asked.aggregate.columns[0], type_),), pa.list_(pa.float64()) if array else pa.float64(), lower


def _approx_percentile(asked: _Asked) -> _Made:
    type_ = asked.type()
    if not is_quantifiable(type_):
        raise asked.refuse(f"needs numbers, dates or times, not {type_}; cast the column")
    _needs_sketches(asked)
    shares, array = _shares(asked.aggregate.option("percentage"))
    digest = Digest(asked.aggregate.columns[0], type_, asked.aggregate.option("accuracy"))
    lower = preset(lower_approximate, ranks=shares, array=array)
    return (digest,), pa.list_(type_) if array else type_, lower


def _aggregate(asked: _Asked) -> _Made:
    of = dict(asked.aggregate.options)
    fields = parse_schema(of["partial"])
    result = parse_schema(f"result {of['result']}").field(0).type if isinstance(of["result"], str) else of["result"]
    custom = Custom(
        of["name"],
        asked.aggregate.columns,
        tuple((f.name, f.type) for f in fields),
        of["lift"],
        of["combine"],
        of["commutative"],
        of["invertible"],
    )

    return (custom,), result, preset(_lower_own, name=of["name"], function=of["lower"], result=result)


def _lower_own(states: States, *, name: str, function: Callable[..., Any], result: pa.DataType) -> pa.Array:
    return call(f"{name}: lower", function, states, [result], len(states[0]))[0]


def _second(states: States) -> pa.Array:
    return states[1]


def _lengths(states: States) -> pa.Array:
    return pa.array(lengths_of(states[0]))


def _shares(share: float | tuple[float, ...]) -> tuple[tuple[float, ...], bool]:
    return (share, True) if isinstance(share, tuple) else ((share,), False)


_BINDERS: dict[str, Callable[[_Asked], _Made]] = {
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
    """Whether the type has an order that is computed here, or by Arrow: asked of it, so that data never finds out."""
    t = pa.types
    if t.is_floating(type_) or t.is_boolean(type_) or (t.is_temporal(type_) and not t.is_interval(type_)):
        return True
    nothing = pa.table({"key": pa.array([], pa.int64()), "value": pa.array([], type_)})
    try:
        nothing.group_by("key", use_threads=False).aggregate([("value", "min")])
    except _NOT_OF_THIS_TYPE:
        return False
    return not t.is_null(type_)


def _can_be_kept(type_: pa.DataType) -> bool:
    """Whether Arrow can move values of the type about."""
    try:
        pa.nulls(1, type_).take(pa.array([0])).filter(pa.array([True]))
    except _NOT_OF_THIS_TYPE:
        return False
    return True


def _can_be_told_apart(type_: pa.DataType) -> bool:
    try:
        pa.nulls(1, type_).dictionary_encode()
    except _NOT_OF_THIS_TYPE:
        return False
    return not pa.types.is_nested(type_) and not pa.types.is_null(type_)
