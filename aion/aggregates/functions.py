"""The aggregates for users, named as in ``pyspark.sql.functions``. Pure.

Each returns a description; :func:`aion.aggregates.binding.bind` makes it a computation over a schema. Unless its
docstring says otherwise, a function skips nulls, and gives null if all values of a group are null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from aion.aggregates.cardinality import LG_REGISTERS
from aion.aggregates.quantiles import MAX_ACCURACY
from aion.errors import ConfigError

_MAX_K = 100_000  # as in Spark's max_by


@dataclass(frozen=True, slots=True)
class Aggregate:
    """An aggregate as the user wrote it: a function, its columns (``"*"`` only for ``count``), its options by name."""

    function: str
    columns: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for column in self.columns:
            if not isinstance(column, str) or not column:
                raise ConfigError(f"{self.function}: {column!r} is not the name of a column; give e.g. 'speed'")

    def option(self, name: str) -> Any:
        return dict(self.options)[name]

    def __str__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in self.options if value is not None and not callable(value)]
        return f"{self.function}({', '.join([*self.columns, *shown])})"


# -- numbers ----------------------------------------------------------------------------------------------


def count(column: str = "*") -> Aggregate:
    """Returns the number of events, or of the non-null values of a column. Result: bigint."""
    return Aggregate("count", (column,))


def sum(column: str) -> Aggregate:
    """Sum: bigint for integers (overflow is an error), double for floats, decimal(p+10, s) for decimals.

    Doubles are added with twice their precision and rounded once. So the result does not depend on the order of the
    events or on how they are split into blocks.
    """
    return Aggregate("sum", (column,))


def mean(column: str) -> Aggregate:
    """Arithmetic mean: double, or decimal(p+4, s+4) rounded half up for decimals."""
    return Aggregate("mean", (column,))


avg = mean


def var_samp(column: str) -> Aggregate:
    """Sample variance, divided by n - 1: double; null for a single value."""
    return Aggregate("var_samp", (column,))


def var_pop(column: str) -> Aggregate:
    """Population variance, divided by n: double."""
    return Aggregate("var_pop", (column,))


def stddev_samp(column: str) -> Aggregate:
    """Sample standard deviation, the square root of :func:`var_samp`: double; null for a single value."""
    return Aggregate("stddev_samp", (column,))


def stddev_pop(column: str) -> Aggregate:
    """Population standard deviation, the square root of :func:`var_pop`: double."""
    return Aggregate("stddev_pop", (column,))


variance = var_samp
stddev = std = stddev_samp

# -- single values ----------------------------------------------------------------------------------------


def min(column: str) -> Aggregate:
    """Smallest value. The result has the type of the column."""
    return Aggregate("min", (column,))


def max(column: str) -> Aggregate:
    """Largest value. The result has the type of the column. NaN is larger than any number."""
    return Aggregate("max", (column,))


def first(column: str, ignorenulls: bool = False) -> Aggregate:
    """Returns the value of the earliest event by event time. Of several at the same time, the first to arrive.

    The value may be null. With ``ignorenulls``, events whose value is null are ignored.
    """
    return Aggregate("first", (column,), (("ignorenulls", _flag("first", "ignorenulls", ignorenulls)),))


def last(column: str, ignorenulls: bool = False) -> Aggregate:
    """Returns the value of the latest event by event time. Of several at the same time, the last to arrive.

    The value may be null. With ``ignorenulls``, events whose value is null are ignored.
    """
    return Aggregate("last", (column,), (("ignorenulls", _flag("last", "ignorenulls", ignorenulls)),))


def min_by(column: str, ord: str, k: int | None = None) -> Aggregate:
    """Returns the value of ``column``, which may be null, in the row with the smallest ``ord``.

    Of several such rows, the one of the latest slice, and in that slice the last to arrive. With ``k``: an array of the
    values in the ``k`` rows with the smallest ``ord``, the smallest first.
    """
    return _by("min_by", column, ord, k)


def max_by(column: str, ord: str, k: int | None = None) -> Aggregate:
    """Returns the value of ``column``, which may be null, in the row with the largest ``ord``.

    Of several such rows, the one of the latest slice, and in that slice the last to arrive. With ``k``: an array of the
    values in the ``k`` rows with the largest ``ord``, the largest first.
    """
    return _by("max_by", column, ord, k)


def _by(function: str, column: str, ord: str, k: int | None) -> Aggregate:
    if k is not None:
        _check_k(function, k)
    return Aggregate(function, (column, ord), (("k", k),))


def top_k(column: str, k: int) -> Aggregate:
    """Returns an array of the ``k`` largest values, the largest first. It is empty if there is no value."""
    _check_k("top_k", k)
    return Aggregate("top_k", (column,), (("k", k),))


def _check_k(function: str, k: Any) -> None:
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= _MAX_K:
        raise ConfigError(f"{function}: k={k!r} must be an integer from 1 to {_MAX_K}")


# -- distinct values and collections ----------------------------------------------------------------------


def count_distinct(column: str, *columns: str) -> Aggregate:
    """Returns the number of distinct values, or of distinct combinations of several columns. Result: bigint.

    Nulls, and combinations with a null, do not count. The result is exact, because all distinct values are kept.
    :func:`approx_count_distinct` keeps a few hundred bytes.
    """
    return Aggregate("count_distinct", (column, *columns))


def approx_count_distinct(column: str, rsd: float | None = None) -> Aggregate:
    """Returns the approximate number of distinct values. Result: bigint.

    ``rsd``: the relative standard deviation of the result, 0.05 by default. Keeps a HyperLogLog sketch of
    ``(1.04 / rsd)**2`` bytes, rounded up to a power of two. Before that many bytes are needed, the sketch keeps 4 bytes
    of hash for each value, and the result is nearly always exact.
    """
    rsd = 0.05 if rsd is None else rsd
    least = 1.04 / 2 ** (LG_REGISTERS[-1] / 2)
    if not _is_number(rsd) or not least <= rsd < 1:
        raise ConfigError(f"approx_count_distinct: rsd={rsd!r} must be a number from {least:.5f} to below 1")
    registers = math.ceil(2 * math.log2(1.04 / rsd))
    registers = LG_REGISTERS[0] if registers < LG_REGISTERS[0] else registers
    return Aggregate("approx_count_distinct", (column,), (("lg", registers),))


def collect_list(column: str) -> Aggregate:
    """Returns an array of all values, ordered by slice, and in a slice by arrival. It is empty if there is no value."""
    return Aggregate("collect_list", (column,))


def collect_set(column: str) -> Aggregate:
    """Returns an array of the distinct values, in no particular order. It is empty if there is no value."""
    return Aggregate("collect_set", (column,))


# -- quantiles --------------------------------------------------------------------------------------------


def median(column: str) -> Aggregate:
    """Returns the exact median: ``percentile(column, 0.5)``. All values are kept."""
    return Aggregate("median", (column,))


def percentile(column: str, percentage: float | Sequence[float]) -> Aggregate:
    """Returns the exact percentile: double, or an array for several percentages. Values are interpolated.

    ``percentage``: from 0 to 1, or several. All values are kept; :func:`approx_percentile` keeps a bounded sketch.
    """
    return Aggregate("percentile", (column,), (("percentage", _percentages("percentile", percentage)),))


def approx_percentile(column: str, percentage: float | Sequence[float], accuracy: int = 10_000) -> Aggregate:
    """Returns the approximate percentile: the smallest value that is not exceeded by a share ``percentage`` of the
    values.

    ``percentage``: from 0 to 1, or several. The rank of the result is off by at most about 1 / ``accuracy``. The result
    has the type of the column, or is an array of that type for several percentages. It is exact up to ``16 * accuracy``
    values (131,070 at most). For more values, a t-digest of doubles is kept, of at most about ``128 * accuracy`` bytes
    (1 MiB at most). So integers beyond 2**53 and decimals of more than 15 digits are rounded, and values that differ
    only there are taken for equal.
    """
    if not isinstance(accuracy, int) or isinstance(accuracy, bool) or not 1 <= accuracy <= MAX_ACCURACY:
        raise ConfigError(
            f"approx_percentile: accuracy={accuracy!r} must be an integer from 1 to {MAX_ACCURACY}; percentile is exact"
        )
    shares = _percentages("approx_percentile", percentage)
    return Aggregate("approx_percentile", (column,), (("percentage", shares), ("accuracy", accuracy)))


percentile_approx = approx_percentile


def _percentages(function: str, percentage: Any) -> float | tuple[float, ...]:
    several = isinstance(percentage, Sequence) and not isinstance(percentage, str)
    shares = tuple(percentage) if several else (percentage,)
    if not shares or not all(_is_number(share) and 0 <= share <= 1 for share in shares):
        raise ConfigError(f"{function}: percentage={percentage!r} must be a number from 0 to 1, or a list of them")
    return shares if several else float(percentage)


def _flag(function: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{function}: {name}={value!r} is neither True nor False")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- the user's own ---------------------------------------------------------------------------------------


def aggregate(
    columns: str | Sequence[str],
    *,
    lift: Callable[..., Any],
    combine: Callable[..., Any],
    lower: Callable[..., Any],
    partial: str | pa.Schema,
    result: str | pa.DataType,
    name: str,
    commutative: bool = False,
    invertible: bool = False,
) -> Aggregate:
    """Your own aggregate, made of three functions over Arrow arrays.

    For example::

        squares = A.aggregate(
            "speed",
            lift=lambda speed: pc.multiply(speed, speed),
            combine=lambda left, right: [pc.add(left[0], right[0])],
            lower=lambda total: total,
            partial="total double",
            result="double",
            name="squares",
        )

    ``lift(*columns)`` maps the columns of n events to n partials. It returns an array for each column of ``partial`` (a
    schema, e.g. ``"total double, n bigint"``), or just the array if there is only one. ``combine(left, right)`` merges
    two lists of such arrays element by element. It must be associative, but need not be commutative: ``left`` arrived
    earlier. ``lower(*arrays)`` maps partials to results of type ``result``. The functions get nulls unchanged.

    ``name`` identifies the function's state when a query is restarted. ``commutative`` and ``invertible`` are your
    declarations and are not checked. If a function raises, or returns anything else, that is an ApplyError.
    """
    if not isinstance(columns, Sequence):
        raise ConfigError(f"aggregate: columns={columns!r} must be the name of a column, or a list of names")
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if not isinstance(partial, str | pa.Schema):
        raise ConfigError(f"aggregate: partial={partial!r} must be a schema, e.g. 'total double, n bigint'")
    if not isinstance(result, str | pa.DataType):
        raise ConfigError(f"aggregate: result={result!r} must be a type, e.g. 'double'")
    for what, function in (("lift", lift), ("combine", combine), ("lower", lower)):
        if not callable(function):
            raise ConfigError(f"aggregate: {what}={function!r} is not a function")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"aggregate: name={name!r} must be a non-empty string")
    return Aggregate(
        "aggregate",
        names,
        (
            ("name", name),
            ("lift", lift),
            ("combine", combine),
            ("lower", lower),
            ("partial", partial),
            ("result", result),
            ("commutative", _flag("aggregate", "commutative", commutative)),
            ("invertible", _flag("aggregate", "invertible", invertible)),
        ),
    )
