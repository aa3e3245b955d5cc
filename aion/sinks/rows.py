"""Which rows of a batch of panes a table has to hold. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.core.operator.actions import PaneKind
from aion.core.query.columns import DROPPED_COLUMNS, WINDOW_COLUMNS
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
    def by_time(self) -> list[str]:
        """The identity, windows first. New windows are at the end of such an index, and late ones near it."""
        first = [*WINDOW_COLUMNS[1:], WINDOW_COLUMNS[0]]
        return [*(c for c in first if c in self.identity), *(c for c in self.identity if c not in first)]

    @property
    def places(self) -> pa.Table:
        """The identity of each row that is written or deleted."""
        return pa.concat_tables([self.rows.select(list(self.identity)), self.gone])

    def merged(self, old: pa.Table) -> pa.Table:
        """Returns the rows of a part of a table after the change. ``old``: those before, with at least its columns."""
        retracted = pa.array([PaneKind.RETRACTED.value]).take(pa.array(np.zeros(self.gone.num_rows, np.int64)))
        gone = self.gone.append_column(KIND, retracted)
        everything = pa.concat_tables([old, self.rows, gone], promote_options="default")
        return change_of(everything, self.identity).rows


def identity_of(columns: Sequence[str], key: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the columns by which a row is found: the key's, and those of the window.

    Without ``key``, the key columns are those before ``window``. Raises SchemaError if a column is missing.
    """
    name, *bounds = WINDOW_COLUMNS
    if key is None:
        if name not in columns:
            raise SchemaError(
                f"there is no column {name!r}, and the columns before it are the key; pass key=[...]. "
                f"The columns are {', '.join(columns)}"
            )
        keys = tuple(columns[: columns.index(name)])
    else:
        keys = (key,) if isinstance(key, str) else tuple(key)
    for needed in (*keys, *bounds, KIND):
        if needed not in columns:
            raise SchemaError(f"there is no column {needed!r}; the columns are {', '.join(columns)}")
    return tuple(dict.fromkeys([*keys, *(c for c in WINDOW_COLUMNS if c in columns)]))


def written_columns(columns: Sequence[str]) -> list[str]:
    """Returns the columns without those that only dropped rows use."""
    return [name for name in columns if name not in DROPPED_COLUMNS]


def change_of(panes: pa.Table, identity: Sequence[str]) -> Change:
    """Returns what a batch of panes does to a table. Dropped rows do nothing.

    The rows of a key are in order, so the last row of a window counts.
    """
    last = _last_rows(_where(panes, pc.not_equal(panes[KIND], PaneKind.DROPPED.value)), identity)
    retracted = pc.equal(last[KIND], PaneKind.RETRACTED.value)
    return Change(tuple(identity), _where(last, pc.invert(retracted)), _where(last, retracted).select(list(identity)))


def _where(table: pa.Table, mask: Any) -> pa.Table:
    """Copies nothing if all rows are chosen, as they mostly are."""
    return table if pc.all(mask).as_py() else table.filter(mask)


def _last_rows(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Returns the last row of each group of rows that are equal in ``columns``, in their order."""
    numbered = table.select(list(columns)).append_column(_ROW, pa.array(np.arange(table.num_rows)))
    last = numbered.group_by(list(columns)).aggregate([(_ROW, "max")])[f"{_ROW}_max"].to_numpy()
    return table if len(last) == table.num_rows else table.take(pa.array(np.sort(last)))


def null_patterns(places: pa.Table) -> list[tuple[str, ...]]:
    """Returns which columns are null together: an entry for each combination that occurs. Most tables have one: ()."""
    with_nulls = [name for name in places.column_names if places[name].null_count]
    if not with_nulls:
        return [()]
    flags = pa.table({name: pc.is_null(places[name]) for name in with_nulls})
    found = flags.group_by(with_nulls).aggregate([]).to_pylist()
    return sorted(tuple(name for name in with_nulls if row[name]) for row in found)
