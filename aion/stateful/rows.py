"""Rows of pyspark from columns of Arrow, at less cost: to convert times, to make rows, and to read their fields."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from functools import lru_cache, partial
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
from pyspark.sql.types import Row


def row_maker(names: Sequence[str]) -> Callable[[Iterable[Any]], Row]:
    """Makes a Row with these fields from its values.

    pyspark's own Row has the names of its fields in each instance, and looks for a name in them whenever a field is
    read. Here they belong to a subclass, with a descriptor for each field, as in a named tuple. A pickled row is
    pyspark's own again.
    """
    return partial(tuple.__new__, _row_class(tuple(names)))


@lru_cache(maxsize=256)
def _row_class(names: tuple[str, ...]) -> type[Row]:
    # Only for its descriptors, which are C. mypy wants the names of fields as literals.
    by_place = namedtuple("Row", [f"field{place}" for place in range(len(names))])  # type: ignore[misc]
    # As with pyspark's Row, a method wins over a field of its name, and the first of several equal names counts.
    fields = {
        name: vars(by_place)[f"field{names.index(name)}"]
        for name in names
        if not hasattr(Row, name) and not name.startswith("__")
    }
    return type("Row", (Row,), {"__module__": Row.__module__, "__fields__": list(names), **fields})


def python_values(column: pa.ChunkedArray) -> list[Any]:
    """Returns what ``column.to_pylist()`` gives. Times and dates, for which that takes microseconds each, go through
    numpy.
    """
    name = column.type.tz if pa.types.is_timestamp(column.type) else None
    if column.type not in (pa.date32(), pa.timestamp("us", name)):
        return list(column.to_pylist())
    zone = None if name is None else pa.lib.string_to_tzinfo(name)
    if zone is None:
        values: list[Any] = column.to_numpy().tolist()
        # numpy makes integers of times that Python does not have.
        return list(column.to_pylist()) if int in set(map(type, values)) else values
    if not isinstance(zone, ZoneInfo | timezone):
        return list(column.to_pylist())
    since: list[Any] = column.to_numpy().view("timedelta64[us]").tolist()
    after = datetime(1970, 1, 1, tzinfo=zone).__add__  # a fifth of the cost of replace(tzinfo=zone)
    try:
        if column.null_count:
            return [None if time is None else zone.fromutc(after(time)) for time in since]
        return list(map(zone.fromutc, map(after, since)))
    except OverflowError:
        return list(column.to_pylist())
