"""What each aggregate means, in plain Python over the rows of one group in the order of arrival.

Written from the documentation and the observed results of ``pyspark.sql.functions`` (4.3), and from nothing of Aion.
A row is a mapping; ``ts`` is its event time or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from tests import oracle

Rows = Sequence[dict[str, Any]]
Function = Callable[[Rows], Any]


def there(rows: Rows, column: str) -> list[Any]:
    return [row[column] for row in rows if row[column] is not None]


def count(rows: Rows, column: str | None = None) -> int:
    return len(rows) if column is None else len(there(rows, column))


def total(rows: Rows, column: str) -> Any:
    return oracle.spark_sum([row[column] for row in rows])


def mean(rows: Rows, column: str) -> Any:
    return oracle.spark_mean([row[column] for row in rows])


def variance(rows: Rows, column: str, *, sample: bool, root: bool) -> float | None:
    """From exact rationals, rounded at the end."""
    values = [float(v) for v in there(rows, column)]
    n = len(values) - sample
    if n < 0 or not values or (sample and len(values) == 1):
        return None
    if not all(map(math.isfinite, values)):
        return math.nan
    exact = exact_variance(values, n)
    return math.sqrt(exact) if root else float(exact)


def exact_variance(values: Sequence[float], over: int) -> Fraction:
    rationals = [Fraction(v) for v in values]
    middle = sum(rationals, Fraction(0)) / len(rationals)
    return sum(((v - middle) ** 2 for v in rationals), Fraction(0)) / over


def smallest(rows: Rows, column: str) -> Any:
    return oracle.spark_min([row[column] for row in rows])


def largest(rows: Rows, column: str) -> Any:
    return oracle.spark_max([row[column] for row in rows])


def first(rows: Rows, column: str, ignorenulls: bool = False) -> Any:
    rows = [row for row in rows if row[column] is not None] if ignorenulls else rows
    return min(rows, key=_time)[column] if rows else None  # of equal ones min takes the first


def last(rows: Rows, column: str, ignorenulls: bool = False) -> Any:
    rows = [row for row in rows if row[column] is not None] if ignorenulls else rows
    return max(reversed(rows), key=_time)[column] if rows else None  # of equal ones max takes the first, so the last


def _time(row: dict[str, Any]) -> tuple[bool, Any]:
    return (row["ts"] is not None, row["ts"])


def by(rows: Rows, column: str, order: str, *, least: bool) -> Any:
    rows = [row for row in rows if row[order] is not None]
    if not rows:
        return None
    choose = min if least else max
    return choose(reversed(rows), key=lambda row: oracle.rank(row[order]))[column]


def best(rows: Rows, column: str, order: str, k: int, *, least: bool) -> list[Any]:
    rows = [row for row in rows if row[order] is not None]
    # A stable sort in reverse keeps equal ones in their order.
    ordered = sorted(rows, key=lambda row: oracle.rank(row[order]), reverse=not least)
    return [row[column] for row in ordered[:k]]


def distinct(rows: Rows, *columns: str) -> set[Any]:
    """Combinations without nulls; NaN as a word, because it is one value here and none to Python."""
    found = set()
    for row in rows:
        values = tuple("NaN" if oracle.is_nan(row[c]) else row[c] for c in columns)
        if None not in values:
            found.add(values)
    return found


def percentile(rows: Rows, column: str, share: float) -> float | None:
    values = sorted((float(v) for v in there(rows, column)), key=oracle.rank)
    if not values:
        return None
    at = (len(values) - 1) * share
    low, high = values[math.floor(at)], values[math.ceil(at)]
    if low == high or at == math.floor(at):
        return low
    return (math.floor(at) + 1 - at) * low + (at - math.floor(at)) * high


def nth(rows: Rows, column: str, share: float) -> Any:
    """What approximate percentiles approximate."""
    values = sorted(there(rows, column), key=oracle.rank)
    return values[max(math.ceil(share * len(values)), 1) - 1] if values else None


# -- comparisons ------------------------------------------------------------------------------------------


def same(found: Any, wanted: Any) -> bool:
    """The same value of the same type; NaN is itself, and in lists as well."""
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(same, found, wanted))
    return type(found) is type(wanted) and (found == wanted or (oracle.is_nan(found) and oracle.is_nan(wanted)))


def close(found: Any, wanted: Any) -> bool:
    """The same double but for its last digits."""
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(close, found, wanted))
    if isinstance(found, float) and isinstance(wanted, float) and math.isfinite(wanted):
        return math.isclose(found, wanted, rel_tol=1e-12, abs_tol=1e-300)
    return same(found, wanted)


def as_set(found: Any, wanted: set[Any]) -> bool:
    """A list of distinct values is a set of them."""
    plain = [("NaN" if oracle.is_nan(v) else v,) for v in found]
    return len(plain) == len(set(plain)) and set(plain) == wanted


def decimal_mean(rows: Rows, column: str, scale: int) -> Decimal | None:
    return oracle.spark_decimal_mean([row[column] for row in rows], scale)
