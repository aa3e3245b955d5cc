"""Which rows of a batch of panes a table has to hold. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.core.operator.actions import PaneKind
from aion.core.query.plan import DROPPED_COLUMNS, WINDOW_COLUMNS
from aion.errors import SchemaError

KIND = "kind"
_ROW = "\0row"


@dataclass(frozen=True)
class Change:
    """What a batch does to a table.

    ``rows``: the rows to write. ``gone``: the ``identity`` columns of the rows to delete. Rows of the table that are
    equal to one of either in the ``identity`` columns are replaced or deleted. Nulls are equal to each other.
    """

    identity: tuple[str, ...]
    rows: pa.Table
    gone: pa.Table

    @property
    def places(self) -> pa.Table:
        """The identity of each row that is written or deleted."""
        return pa.concat_tables([self.rows.select(list(self.identity)), self.gone])


def identity_of(columns: Sequence[str], key: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the columns by which a row is found: the key's, and those of the window.

    Without ``key``, the key columns are those before ``window``. Raises SchemaError if a column is missing.
    """
    name, *bounds = WINDOW_COLUMNS
    if key is None:
        if name not in columns:
            raise SchemaError(
                f"upsert: there is no column {name!r}, and the columns before it are the key; pass key=[...]. "
                f"The columns are {', '.join(columns)}"
            )
        keys = tuple(columns[: columns.index(name)])
    else:
        keys = (key,) if isinstance(key, str) else tuple(key)
    for needed in (*keys, *bounds, KIND):
        if needed not in columns:
            raise SchemaError(f"upsert: there is no column {needed!r}; the columns are {', '.join(columns)}")
    return tuple(dict.fromkeys([*keys, *(c for c in WINDOW_COLUMNS if c in columns)]))


def written_columns(columns: Sequence[str]) -> list[str]:
    """Returns the columns without those that only dropped rows use."""
    return [name for name in columns if name not in DROPPED_COLUMNS]


def change_of(panes: pa.Table, identity: Sequence[str]) -> Change:
    """Returns what a batch of panes does to a table. Dropped rows do nothing.

    The rows of a key are in order, so the last row of a window counts.
    """
    panes = panes.filter(pc.not_equal(panes[KIND], PaneKind.DROPPED.value))
    last = panes.take(_last_rows(panes, identity))
    retracted = pc.equal(last[KIND], PaneKind.RETRACTED.value)
    return Change(
        tuple(identity),
        last.filter(pc.invert(retracted)),
        last.filter(retracted).select(list(identity)),
    )


def _last_rows(table: pa.Table, columns: Sequence[str]) -> Any:
    """Returns the number of the last row of each group of rows that are equal in ``columns``, ascending."""
    numbered = table.select(list(columns)).append_column(_ROW, pa.array(np.arange(table.num_rows)))
    last = numbered.group_by(list(columns)).aggregate([(_ROW, "max")])[f"{_ROW}_max"]
    return pa.array(np.sort(last.to_numpy()))


def null_patterns(places: pa.Table) -> list[tuple[str, ...]]:
    """Returns which columns are null together: an entry for each combination that occurs. Most tables have one: ()."""
    with_nulls = [name for name in places.column_names if places[name].null_count]
    if not with_nulls:
        return [()]
    flags = pa.table({name: pc.is_null(places[name]) for name in with_nulls})
    found = flags.group_by(with_nulls).aggregate([]).to_pylist()
    return sorted(tuple(name for name in with_nulls if row[name]) for row in found)
