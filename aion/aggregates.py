"""Aggregates as lift / combine / lower over Arrow columns (Scotty, seed 000 section IV.B). Pure.

Named and typed as in ``pyspark.sql.functions``, with Spark's null, NaN and overflow handling:

* nulls are skipped; a group of nothing but nulls has a null ``sum``, ``mean``, ``min`` or ``max``;
* NaN is larger than every other number;
* integers sum to 64 bits and an overflow raises IntegerOverflow; decimals stay decimals.

An aggregate names the *partials* it needs; equal partials of several aggregates are kept once, so
``count``, ``sum`` and ``mean`` of a column share. A partial is lifted from events with one Arrow kernel and
combined with another; ``lower`` turns the combined partials of many groups into one result column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.errors import ConfigError, IntegerOverflow, SchemaError

_I64_MIN, _I64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Aggregate:
    """What the user asked for: a function and a column (``"*"`` only for ``count``)."""

    function: str
    column: str

    decomposable = True

    def __str__(self) -> str:
        return f"{self.function}({self.column})"


def count(column: str = "*") -> Aggregate:
    """Events, or the non-null values of a column. Result: bigint."""
    return Aggregate("count", column)


def sum(column: str) -> Aggregate:
    """Sum: bigint for integers (overflow is an error), double for floats, decimal(p+10, s) for decimals."""
    return Aggregate("sum", column)


def mean(column: str) -> Aggregate:
    """Arithmetic mean: double, or decimal(p+4, s+4) rounded half up for decimals."""
    return Aggregate("mean", column)


avg = mean


def min(column: str) -> Aggregate:
    """Smallest value; of the column's own type."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    """Largest value; of the column's own type. NaN counts as larger than any number."""
    return Aggregate("max", column)


@dataclass(frozen=True, slots=True)
class Partial:
    """One column of partial state: how events are lifted into it, and how such columns combine.

    ``lift`` and ``combine`` are names of Arrow's grouped kernels; ``prepare`` maps the input column first.
    """

    column: str
    prepare: str
    lift: str
    combine: str
    type: pa.DataType


@dataclass(frozen=True, slots=True)
class Bound:
    """An aggregate of a known schema: its partials, its result type, and ``lower`` over their columns."""

    name: str
    partials: tuple[Partial, ...]
    type: pa.DataType
    lower: Callable[..., pa.Array]


def bind(name: str, aggregate: Aggregate, schema: pa.Schema) -> Bound:
    """Types an aggregate; raises SchemaError for a column that is missing or cannot be aggregated."""
    if not isinstance(aggregate, Aggregate):
        raise ConfigError(f"aggregates: {name!r} is {aggregate!r}, no aggregate; use aion.aggregates, e.g. A.count()")
    if aggregate.function == "count" and aggregate.column == "*":
        return Bound(name, (EVENTS,), pa.int64(), _same)
    if aggregate.column not in schema.names:
        raise SchemaError(
            f"aggregates: {name!r} = {aggregate} names a column that does not exist; "
            f"the columns are {', '.join(schema.names)}"
        )
    column, source = aggregate.column, schema.field(aggregate.column).type
    counted = Partial(column, "none", "count", "sum", pa.int64())
    match aggregate.function:
        case "count":
            return Bound(name, (counted,), pa.int64(), _same)
        case "min" | "max":
            return _bind_extreme(name, aggregate, source)
        case "sum":
            if pa.types.is_decimal(source):
                partial = Partial(column, "none", "sum", "sum", pa.decimal128(38, source.scale))
                result = pa.decimal128(_at_most(source.precision + 10, 38), source.scale)
                return Bound(name, (partial,), result, lambda total: _cast_decimal(total, result, aggregate))
            if pa.types.is_integer(source):
                return Bound(name, (Partial(column, "int64", "sum", "sum", pa.int64()),), pa.int64(), _same)
            _numeric(name, aggregate, source)
            return Bound(name, (Partial(column, "double", "sum", "sum", pa.float64()),), pa.float64(), _same)
        case "mean":
            if pa.types.is_decimal(source):
                partial = Partial(column, "none", "sum", "sum", pa.decimal128(38, source.scale))
                result = _decimal_mean_type(source)
                return Bound(name, (partial, counted), result, lambda t, n: _decimal_mean(t, n, result))
            _numeric(name, aggregate, source)
            total = Partial(column, "double", "sum", "sum", pa.float64())
            return Bound(name, (total, counted), pa.float64(), _mean)
        case _:
            raise ConfigError(f"aggregates: {name!r} asks for the unknown function {aggregate.function!r}")


EVENTS = Partial("*", "none", "count_all", "sum", pa.int64())


def _bind_extreme(name: str, aggregate: Aggregate, source: pa.DataType) -> Bound:
    kernel = aggregate.function
    if pa.types.is_floating(source):
        # Arrow skips NaN; Spark says NaN is the largest. As order-preserving integers both agree.
        partial = Partial(aggregate.column, "ordered", kernel, kernel, pa.int64())
        return Bound(name, (partial,), source, lambda bits: _from_ordered(bits).cast(source))
    if pa.types.is_duration(source):
        partial = Partial(aggregate.column, "int64", kernel, kernel, pa.int64())
        return Bound(name, (partial,), source, lambda ticks: ticks.cast(source))
    if not _can_be_ordered(source):
        raise SchemaError(f"aggregates: {name!r} = {aggregate} cannot order values of type {source}")
    return Bound(name, (Partial(aggregate.column, "none", kernel, kernel, source),), source, _same)


def _can_be_ordered(type_: pa.DataType) -> bool:
    """Whether Arrow's grouped kernels take the type: asked of them, so that data never finds out first."""
    nothing = pa.table({"key": pa.array([], pa.int64()), "value": pa.array([], type_)})
    try:
        nothing.group_by("key", use_threads=False).aggregate([("value", "min")])
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, TypeError):
        return False
    return not pa.types.is_null(type_)


def _numeric(name: str, aggregate: Aggregate, source: pa.DataType) -> None:
    if not (pa.types.is_integer(source) or pa.types.is_floating(source)):
        raise SchemaError(f"aggregates: {name!r} = {aggregate} needs numbers, not {source}; cast the column")


# -- lift and combine: one grouped pass for all partials --------------------------------------------------


class Layout:
    """The partial columns of a set of aggregates, each kept once, as ``p0, p1, ...``; ``p0`` counts events."""

    def __init__(self, bound: Sequence[Bound]) -> None:
        self.bound = tuple(bound)
        partials: dict[Partial, str] = {EVENTS: "p0"}
        for aggregate in bound:
            for partial in aggregate.partials:
                partials.setdefault(partial, f"p{len(partials)}")
        self.partials = partials
        self.fields = [pa.field(name, partial.type) for partial, name in partials.items()]

    @property
    def columns(self) -> list[str]:
        """The event columns that the partials are made from."""
        return list(dict.fromkeys(p.column for p in self.partials if p.column != "*"))

    def lift(self, keys: Mapping[str, pa.Array], events: Mapping[str, Any]) -> pa.Table:
        """Events to partials, one row per distinct key: the key columns, then the partial columns."""
        columns: dict[str, Any] = dict(keys)
        asked: list[tuple[str, Partial, str]] = []
        for partial, name in self.partials.items():
            if partial.column == "*":
                asked.append(("", partial, name))
                continue
            prepared = f"{partial.prepare}:{partial.column}"
            if prepared not in columns:
                columns[prepared] = _PREPARE[partial.prepare](events[partial.column])
            asked.append((prepared, partial, name))
        return _grouped(pa.table(columns), list(keys), asked, "lift")

    def combine(self, keys: Sequence[str], partials: pa.Table, extra: Mapping[str, str] | None = None) -> pa.Table:
        """Partials of many blocks to one row per distinct key.

        ``extra``: further columns to carry along, each with the Arrow kernel that reduces it.
        """
        asked = [(name, partial, name) for partial, name in self.partials.items()]
        for name, kernel in (extra or {}).items():
            asked.append((name, Partial(name, "none", kernel, kernel, pa.int64()), name))
        return _grouped(partials, list(keys), asked, "combine")

    def lower(self, combined: pa.Table) -> dict[str, pa.Array]:
        """The result columns, by the user's names, of combined partials."""
        return {
            aggregate.name: aggregate.lower(
                *(combined.column(self.partials[p]).combine_chunks() for p in aggregate.partials)
            )
            for aggregate in self.bound
        }


def _grouped(table: pa.Table, keys: list[str], asked: Sequence[tuple[str, Partial, str]], step: str) -> pa.Table:
    specs: list[tuple[Any, str, Any]] = []
    wide: list[tuple[str, pa.DataType]] = []
    for source, partial, name in asked:
        kernel = partial.lift if step == "lift" else partial.combine
        if kernel == "count_all":
            specs.append(([], "count_all", None))
            continue
        if kernel == "sum" and _may_overflow(table.column(source), partial.type):
            # Sums that might leave their type are computed in a wider one and checked when they are narrowed.
            index = table.schema.get_field_index(source)
            table = table.set_column(index, source, table.column(source).cast(_wider(partial.type)))
            wide.append((name, partial.type))
        counts = kernel == "count" or (kernel == "sum" and partial.lift in ("count", "count_all"))
        options = (
            pc.CountOptions(mode="only_valid")
            if kernel == "count"
            else pc.ScalarAggregateOptions(skip_nulls=True, min_count=0 if counts else 1)
        )
        specs.append((source, kernel, options))
    result = table.group_by(keys, use_threads=False).aggregate(specs)
    # Arrow puts the keys first, then the aggregates in the order asked.
    result = result.rename_columns([*keys, *(name for _, _, name in asked)])
    for name, narrow in wide:
        index = result.schema.get_field_index(name)
        result = result.set_column(index, name, _narrow(result.column(name), narrow))
    return result


def _may_overflow(column: pa.ChunkedArray, type_: pa.DataType) -> bool:
    """Whether the sum of a column could leave its type, judged by its extremes: cheap, and never wrong."""
    if pa.types.is_int64(type_):
        limit = _I64_MAX
    elif pa.types.is_decimal(type_):
        limit = 10**type_.precision - 1
    else:
        return False
    extremes = pc.min_max(column).as_py()
    if extremes["min"] is None:
        return False
    low, high = (_unscaled(value, type_) for value in extremes.values())
    return (-low if -low > high else high) * len(column) > limit


def _unscaled(value: Any, type_: pa.DataType) -> int:
    """The integer that stands for a value: decimals without their point, exactly."""
    if not isinstance(value, Decimal):
        return int(value)
    with localcontext() as context:
        context.prec = 80
        return int(value.scaleb(type_.scale if pa.types.is_decimal(type_) else 0))


def _wider(type_: pa.DataType) -> pa.DataType:
    return pa.decimal256(76, type_.scale) if pa.types.is_decimal(type_) else pa.decimal128(38, 0)


def _narrow(total: pa.ChunkedArray, to: pa.DataType) -> pa.ChunkedArray:
    limit, what = (10**to.precision - 1, to) if pa.types.is_decimal(to) else (_I64_MAX, "a bigint")
    for value in pc.min_max(total).as_py().values():
        if value is not None and not -limit - (to == pa.int64()) <= _unscaled(value, to) <= limit:
            raise IntegerOverflow(f"sum: {value} does not fit into {what}; cast the column to a wider type or double")
    return total.cast(to)


# -- prepare and lower ------------------------------------------------------------------------------------


def _to_ordered(values: Any) -> pa.Array:
    """Floats as integers of the same order, NaN last; -0.0 and 0.0 become one."""
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    array = array.cast(pa.float64())
    doubles = array.fill_null(0.0).to_numpy(zero_copy_only=False) + 0.0
    doubles = np.where(np.isnan(doubles), np.nan, doubles)
    bits = doubles.view(np.int64)
    ordered = bits ^ ((bits >> 63) & np.int64(_I64_MAX))
    return pa.array(ordered, mask=array.is_null().to_numpy(zero_copy_only=False))


def _from_ordered(ordered: pa.Array) -> pa.Array:
    values = ordered.fill_null(0).to_numpy(zero_copy_only=False)
    doubles = (values ^ ((values >> 63) & np.int64(_I64_MAX))).view(np.float64)
    return pa.array(doubles, mask=ordered.is_null().to_numpy(zero_copy_only=False), from_pandas=False)


_PREPARE: dict[str, Callable[[Any], Any]] = {
    "none": lambda values: values,
    "int64": lambda values: values.cast(pa.int64()),
    "double": lambda values: values.cast(pa.float64(), safe=False),
    "ordered": _to_ordered,
}


def _same(values: pa.Array) -> pa.Array:
    return values


def _mean(total: pa.Array, n: pa.Array) -> pa.Array:
    return pc.divide(total, n.cast(pa.float64(), safe=False))


def _at_most(value: int, limit: int) -> int:
    return value if value < limit else limit


def _decimal_mean_type(source: pa.Decimal128Type) -> pa.DataType:
    # Spark's DecimalType.bounded(p + 4, s + 4): each at most 38.
    return pa.decimal128(_at_most(source.precision + 4, 38), _at_most(source.scale + 4, 38))


def _decimal_mean(total: pa.Array, n: pa.Array, result: pa.Decimal128Type) -> pa.Array:
    # Exact: one result per group in Python's decimals, whose division Arrow's has no rounding mode for.
    step = Decimal(1).scaleb(-result.scale)
    with localcontext() as context:
        context.prec = 76
        values = [
            None if t is None or not c else (t / c).quantize(step, rounding=ROUND_HALF_UP)
            for t, c in zip(total.to_pylist(), n.to_pylist(), strict=True)
        ]
    try:
        return pa.array(values, result)
    except pa.ArrowInvalid:
        raise IntegerOverflow(f"mean: a value does not fit into {result}; cast the column to double") from None


def _cast_decimal(total: pa.Array, result: pa.DataType, aggregate: Aggregate) -> pa.Array:
    try:
        return total.cast(result)
    except pa.ArrowInvalid:
        raise IntegerOverflow(f"{aggregate}: the sum does not fit into {result}") from None
