"""The aggregates that a user names, as in ``pyspark.sql.functions``. Pure.

Each is a description; :func:`aion.aggregates.bind` makes it a computation over a known schema. Unless it says
otherwise a function skips nulls, and gives null for a group that has nothing but nulls.
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
    """What the user asked for: a function, its columns (``"*"`` only for ``count``), and its options by name."""

    function: str
    columns: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, name: str) -> Any:
        return dict(self.options)[name]

    def __str__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in self.options if value is not None and not callable(value)]
        return f"{self.function}({', '.join([*self.columns, *shown])})"


# -- numbers ----------------------------------------------------------------------------------------------


def count(column: str = "*") -> Aggregate:
    """Events, or the non-null values of a column. Result: bigint."""
    return Aggregate("count", (column,))


def sum(column: str) -> Aggregate:
    """Sum: bigint for integers (overflow is an error), double for floats, decimal(p+10, s) for decimals.

    Doubles are added up with twice their digits, and rounded once: neither the order of the events nor how they are
    split into blocks makes a difference.
    """
    return Aggregate("sum", (column,))


def mean(column: str) -> Aggregate:
    """Arithmetic mean: double, or decimal(p+4, s+4) rounded half up for decimals."""
    return Aggregate("mean", (column,))


avg = mean


def var_samp(column: str) -> Aggregate:
    """Variance of a sample, over n - 1: double; null for a single value."""
    return Aggregate("var_samp", (column,))


def var_pop(column: str) -> Aggregate:
    """Variance of all there is, over n: double."""
    return Aggregate("var_pop", (column,))


def stddev_samp(column: str) -> Aggregate:
    """Standard deviation of a sample, the square root of :func:`var_samp`: double; null for a single value."""
    return Aggregate("stddev_samp", (column,))


def stddev_pop(column: str) -> Aggregate:
    """Standard deviation of all there is, the square root of :func:`var_pop`: double."""
    return Aggregate("stddev_pop", (column,))


variance = var_samp
stddev = std = stddev_samp

# -- single values ----------------------------------------------------------------------------------------


def min(column: str) -> Aggregate:
    """Smallest value; of the column's own type."""
    return Aggregate("min", (column,))


def max(column: str) -> Aggregate:
    """Largest value; of the column's own type. NaN counts as larger than any number."""
    return Aggregate("max", (column,))


def first(column: str, ignorenulls: bool = False) -> Aggregate:
    """The value of the earliest event by event time, of several at the same time the first to arrive.

    It may be null, unless ``ignorenulls``: then events without a value do not count.
    """
    return Aggregate("first", (column,), (("ignorenulls", bool(ignorenulls)),))


def last(column: str, ignorenulls: bool = False) -> Aggregate:
    """The value of the latest event by event time, of several at the same time the last to arrive.

    It may be null, unless ``ignorenulls``: then events without a value do not count.
    """
    return Aggregate("last", (column,), (("ignorenulls", bool(ignorenulls)),))


def min_by(column: str, ord: str, k: int | None = None) -> Aggregate:
    """The value of ``column``, which may be null, where ``ord`` is smallest.

    Of equal ones that of the latest slice, and in it the last to arrive. With ``k`` an array of the
    values of the ``k`` smallest ``ord``, the smallest first.
    """
    return _by("min_by", column, ord, k)


def max_by(column: str, ord: str, k: int | None = None) -> Aggregate:
    """The value of ``column``, which may be null, where ``ord`` is largest.

    Of equal ones that of the latest slice, and in it the last to arrive. With ``k`` an array of the
    values of the ``k`` largest ``ord``, the largest first.
    """
    return _by("max_by", column, ord, k)


def _by(function: str, column: str, ord: str, k: int | None) -> Aggregate:
    if k is not None:
        _check_k(function, k)
    return Aggregate(function, (column, ord), (("k", k),))


def top_k(column: str, k: int) -> Aggregate:
    """The ``k`` largest values, the largest first: an array, empty where there is no value."""
    _check_k("top_k", k)
    return Aggregate("top_k", (column,), (("k", k),))


def _check_k(function: str, k: Any) -> None:
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= _MAX_K:
        raise ConfigError(f"{function}: k={k!r} must be an integer from 1 to {_MAX_K}")


# -- distinct values and collections ----------------------------------------------------------------------


def count_distinct(column: str, *columns: str) -> Aggregate:
    """Distinct values, or combinations of values of several columns; those with a null do not count. Result: bigint.

    Exact: the distinct values are kept. :func:`approx_count_distinct` keeps a few hundred bytes.
    """
    return Aggregate("count_distinct", (column, *columns))


def approx_count_distinct(column: str, rsd: float | None = None) -> Aggregate:
    """Distinct values, give or take a relative standard deviation ``rsd`` (0.05 unless given). Result: bigint.

    A HyperLogLog of ``(1.04 / rsd)**2`` bytes, rounded up to a power of two; for as few values as fit into it as they
    are the result is exact.
    """
    rsd = 0.05 if rsd is None else rsd
    registers = LG_REGISTERS[0] if not _is_number(rsd) or rsd <= 0 else math.ceil(2 * math.log2(1.04 / rsd))
    least = 1.04 / 2 ** (LG_REGISTERS[-1] / 2)
    if not _is_number(rsd) or not least <= rsd < 1:
        raise ConfigError(f"approx_count_distinct: rsd={rsd!r} must be a number from {least:.5f} to 1")
    registers = LG_REGISTERS[0] if registers < LG_REGISTERS[0] else registers
    return Aggregate("approx_count_distinct", (column,), (("lg", registers),))


def collect_list(column: str) -> Aggregate:
    """All values as an array, empty where there is none; by slice, and in a slice in the order of arrival."""
    return Aggregate("collect_list", (column,))


def collect_set(column: str) -> Aggregate:
    """The distinct values as an array, empty where there is none, in no order that means anything."""
    return Aggregate("collect_set", (column,))


# -- quantiles --------------------------------------------------------------------------------------------


def median(column: str) -> Aggregate:
    """The exact median: ``percentile(column, 0.5)``. All values are kept."""
    return Aggregate("median", (column,))


def percentile(column: str, percentage: float | Sequence[float]) -> Aggregate:
    """The exact value at a share from 0 to 1 of the values, interpolated: double, or an array for several shares.

    All values are kept. :func:`approx_percentile` keeps a bounded sketch.
    """
    return Aggregate("percentile", (column,), (("percentage", _percentages("percentile", percentage)),))


def approx_percentile(column: str, percentage: float | Sequence[float], accuracy: int = 10_000) -> Aggregate:
    """The smallest value that a share from 0 to 1 of the values does not exceed, give or take 1 / ``accuracy`` of them.

    Of the column's type, or an array of it for several shares. Exact up to ``16 * accuracy`` values (131,070 at most);
    beyond, a t-digest of at most about ``128 * accuracy`` bytes (1 MiB at most).
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
        raise ConfigError(f"{function}: percentage={percentage!r} must be a number from 0 to 1, or a list of such")
    return shares if several else float(percentage)


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
    """An aggregate of your own, of three functions over Arrow arrays.

    ``lift(*columns)`` maps the columns of n events to n partials: an array for each column of ``partial`` (a schema,
    e.g. ``"total double, n bigint"``), or just the array if there is one. ``combine(left, right)`` merges two lists of
    such arrays element by element, and must be associative; ``left`` arrived earlier, so it need not be commutative.
    ``lower(*arrays)`` maps partials to results of type ``result``. Nulls are passed on as they are. ``name`` tells one
    function's state from another's when a query is restarted. ``commutative`` and ``invertible`` are declared, not
    checked. A function that raises, or returns something else, is an ApplyError.
    """
    named = (columns,) if isinstance(columns, str) else tuple(columns)
    for what, function in (("lift", lift), ("combine", combine), ("lower", lower)):
        if not callable(function):
            raise ConfigError(f"aggregate: {what}={function!r} cannot be called")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"aggregate: name={name!r} must be a name")
    return Aggregate(
        "aggregate",
        named,
        (
            ("name", name),
            ("lift", lift),
            ("combine", combine),
            ("lower", lower),
            ("partial", partial),
            ("result", result),
            ("commutative", commutative),
            ("invertible", invertible),
        ),
    )
