"""Partials that Spark's own aggregate functions compute: what they compute in SQL, and what state that is. Pure.

All of it is exact, so that results are those of :meth:`aion.aggregates.partial.Partial.lift`. A double is cut into four
pieces, each an integer of up to 32 bits times a power of two, and Spark adds up each piece as a bigint, which does not
round. A value that does not fit into the pieces (it is infinite, not a number, at least 2**48, or has bits below
2**-83) stays as it is: rows are also grouped by such values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from aion.aggregates.doubled import sum_by_group
from aion.aggregates.groups import Groups
from aion.aggregates.partial import Counted, Extreme, Partial, States, extremes, present
from aion.aggregates.sums import DecimalSum, DoubleSum, IntegerSum, joined
from aion.aggregates.values import Doubles, Ints, Mask, spread

Read = Callable[[Sequence[pa.Array], Sequence[pa.Array]], States]


class Computed(NamedTuple):
    """A value that Spark computes: as SQL, and the type that it has."""

    sql: str
    type: pa.DataType


class InSql(NamedTuple):
    """What Spark computes for a partial, as SQL.

    ``steps``: columns by their names; each step has those of the steps before it. ``groups``: by what rows are grouped
    besides. ``aggregates``: the aggregate functions. ``read``: makes the states of rows from their groups and
    their aggregates.
    """

    aggregates: tuple[Computed, ...]
    read: Read
    steps: tuple[Mapping[str, str], ...] = ()
    groups: tuple[Computed, ...] = ()


def in_sql(partial: Partial, columns: Mapping[str, tuple[str, pa.DataType]], name: str) -> InSql | None:
    """Returns what Spark computes for a partial, or None if its functions do not compute the same.

    ``columns``: by the names that partials know, each column as SQL, and its type. ``name``: with it, names of columns
    begin that the partial needs.
    """
    column, type_ = columns[partial.columns[0]] if partial.columns else ("1", pa.int32())
    match partial:
        case Counted():
            return InSql((_count(column),), _as_they_are)
        case IntegerSum() if pa.types.is_int64(type_):
            return InSql((_sum(f"shiftright({column}, 32)"), _sum(f"{column} & {_LOW}")), _joined)
        case IntegerSum():
            return InSql((_sum(f"cast({column} as bigint)"),), _as_they_are)
        case DecimalSum() if type_.precision <= _DIGITS:
            total = Computed(f"sum({column})", pa.decimal128(type_.precision + 10, type_.scale))
            return InSql((total,), lambda _, sums: [sums[0].cast(partial.types[0])])
        case DoubleSum() if pa.types.is_floating(type_):
            return _of_doubles(column, name)
        case DoubleSum():
            return _of_integers(column, name)
        case Extreme() if _is_plain(type_):
            extreme = Computed(f"{'max' if partial.largest else 'min'}({column})", type_)
            return InSql((extreme,), lambda _, found: [_extreme(partial, found[0])])
    return None


_LOW = 2**32 - 1
_DIGITS = 28
"""Spark adds up decimals of this many digits with ten more, which are enough for any number of rows."""


def _count(value: str) -> Computed:
    return Computed(f"count({value})", pa.int64())


def _sum(value: str) -> Computed:
    """The sum of values of type bigint."""
    return Computed(f"sum({value})", pa.int64())


def _is_plain(type_: pa.DataType) -> bool:
    t = pa.types
    plain = (t.is_integer, t.is_floating, t.is_decimal128, t.is_date32, t.is_timestamp)
    return any(is_so(type_) for is_so in plain)


def _as_they_are(_: Sequence[pa.Array], aggregates: Sequence[pa.Array]) -> States:
    return list(aggregates)


def _joined(_: Sequence[pa.Array], halves: Sequence[pa.Array]) -> States:
    high, low = (half.fill_null(0).to_numpy() for half in halves)
    return [joined(high, low, halves[0].is_valid().to_numpy(zero_copy_only=False))]


def _extreme(partial: Extreme, found: pa.Array) -> pa.Array:
    """Returns what Spark found, in the type of the state. Of two zeros, Spark may return the negative one."""
    groups, (values,), _ = present(Groups(np.arange(len(found)), len(found)), found.cast(partial.type))
    return extremes(groups, values, largest=partial.largest)


_SCALES = (2.0**-16, 2.0**17, 2.0**50, 2.0**83)
"""Each piece of a double is an integer divided by one of these."""
_LIMIT = 2.0**48


def _of_doubles(column: str, name: str) -> InSql:
    """Few steps, because each makes the plan of every batch longer: two of the rests are made in one."""
    value = f"cast({column} as double)"
    fits = f"abs({value}) < {_LIMIT!r}D"
    rests = [f"{name}r{number}" for number in range(len(_SCALES))]
    steps = (
        {rests[0]: f"if({fits}, {value}, 0D)"},
        {rests[1]: _rest(rests[0], 0), rests[2]: _rest(f"({_rest(rests[0], 0)})", 1)},
        {rests[3]: _rest(rests[2], 2)},
    )
    pieces = [_piece(rest, number) for number, rest in enumerate(rests)]
    sums = (*(_sum(f"cast({piece} as bigint)") for piece in pieces), _count(column))
    large = f"if({fits} and {rests[3]} * {_SCALES[3]!r}D = {pieces[3]}, null, {value})"
    return InSql(sums, _doubles, steps, (Computed(large, pa.float64()),))


def _piece(rest: str, number: int) -> str:
    return f"rint({rest} * {_SCALES[number]!r}D)"


def _rest(rest: str, number: int) -> str:
    """What a piece leaves of a rest."""
    return f"{rest} - {_piece(rest, number)} * {1 / _SCALES[number]!r}D"


def _of_integers(column: str, name: str) -> InSql:
    """The sum of integers as doubles, which have been rounded if they have more than 53 bits."""
    high = f"{name}h"
    steps = ({high: f"floor(cast({column} as double) / {2.0**32!r}D)"},)
    low = f"cast(cast({column} as double) - cast({high} as double) * {2.0**32!r}D as bigint)"
    return InSql((_sum(high), _sum(low), _count(column)), _integers, steps)


def _doubles(groups: Sequence[pa.Array], aggregates: Sequence[pa.Array]) -> States:
    """A row that was grouped by its value has as many of it as it has events."""
    (large,), (*pieces, counts) = groups, aggregates
    is_large = large.is_valid().to_numpy(zero_copy_only=False)
    found = [(np.where(is_large, 0, _numbers(p)), 1 / scale) for p, scale in zip(pieces, _SCALES, strict=True)]
    times = counts.to_numpy()[is_large]
    return _added(found, counts, np.repeat(np.flatnonzero(is_large), times), large.drop_null().to_numpy().repeat(times))


def _integers(_: Sequence[pa.Array], aggregates: Sequence[pa.Array]) -> States:
    high, low, counts = aggregates
    return _added([(_numbers(high), 2.0**32), (_numbers(low), 1.0)], counts, np.empty(0, np.int64), np.empty(0))


def _numbers(column: pa.Array) -> Ints:
    numbers: Ints = column.fill_null(0).to_numpy()
    return numbers


def _added(pieces: Sequence[tuple[Ints, float]], counts: pa.Array, rows: Ints, values: Doubles) -> States:
    """Returns the sum of each row's pieces, each an integer times a power of two, and of the values of ``rows``."""
    count = len(counts)
    ids, all_values = [rows], [np.asarray(values, np.float64)]
    for numbers, unit in pieces:
        # A double holds 53 bits of the 63.
        for part, of in ((numbers >> 32, unit * 2.0**32), (numbers & _LOW, unit)):
            some = np.flatnonzero(part)
            ids.append(some)
            all_values.append(np.asarray(part[some] * of, np.float64))
    high, low = sum_by_group(Groups(np.concatenate(ids), count), np.concatenate(all_values))
    valid: Mask = counts.to_numpy() > 0
    return [spread(high, None if bool(valid.all()) else valid), pa.array(low)]
