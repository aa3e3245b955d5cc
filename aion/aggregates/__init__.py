"""Aggregates as lift / combine / lower over Arrow columns (Scotty section IV.B). Pure.

Named and typed as in ``pyspark.sql.functions``, with Spark's null, NaN and overflow handling:

* nulls are skipped; if all values of a group are null, its ``sum``, ``mean``, ``min``, ``median``, ... are null;
* NaN is larger than every other number, and equal to itself; 0.0 and -0.0 are equal;
* sums of integers have 64 bits, and an overflow raises IntegerOverflow, also if values that come in another batch would
  make the sum small again; decimals stay decimals.

An aggregate names the *partials* that it needs. Equal partials of several aggregates are kept once, so ``count``,
``sum``, ``mean`` and ``stddev`` of a column share theirs. A few numpy or Arrow passes lift a partial from the events of
many groups, and a few more merge it. ``lower`` turns the states of many groups into one result column.

*Decomposable* aggregates keep partials of a fixed or bounded size. *Holistic* ones (median, percentile, count_distinct,
collect_list, collect_set) keep the values of their columns, once for each key and slice, as lists beside the other
partials. ``aion.aggregates.binding`` has the properties of each: decomposable, commutative, invertible.
"""

from aion.aggregates.functions import (
    Aggregate,
    aggregate,
    approx_count_distinct,
    approx_percentile,
    avg,
    collect_list,
    collect_set,
    count,
    count_distinct,
    first,
    last,
    max,
    max_by,
    mean,
    median,
    min,
    min_by,
    percentile,
    percentile_approx,
    std,
    stddev,
    stddev_pop,
    stddev_samp,
    sum,
    top_k,
    var_pop,
    var_samp,
    variance,
)

__all__ = [
    "Aggregate",
    "aggregate",
    "approx_count_distinct",
    "approx_percentile",
    "avg",
    "collect_list",
    "collect_set",
    "count",
    "count_distinct",
    "first",
    "last",
    "max",
    "max_by",
    "mean",
    "median",
    "min",
    "min_by",
    "percentile",
    "percentile_approx",
    "std",
    "stddev",
    "stddev_pop",
    "stddev_samp",
    "sum",
    "top_k",
    "var_pop",
    "var_samp",
    "variance",
]


def __dir__() -> list[str]:
    """Returns what users write, and not the modules and names that compute it."""
    return __all__
