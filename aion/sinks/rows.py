"""Which rows of a batch of panes a table has to hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.groups import number
from aion.aggregates.values import combined
from aion.core.operator.actions import PaneKind
from aion.core.query.columns import DROPPED_COLUMNS, WINDOW_COLUMNS
from aion.core.query.pane_parts import END, KIND, NAME, SEQ, START, Parts
from aion.errors import SchemaError


class Panes(NamedTuple):
    """What the columns of a batch of panes are.

    ``identity``: the columns of the key and those of the window. A pane replaces all rows that are equal in these.
    ``written``: the columns that a table has. ``seq``: the column that orders panes. ``single``: whether a pane has one
    row.
    """

    identity: tuple[str, ...]
    written: tuple[str, ...]
    kind: str
    seq: str
    single: bool

    @classmethod
    def of(cls, fields: Sequence[tuple[str, Mapping[str, Any]]], key: Sequence[str] | None) -> Panes:
        """Finds them in the columns' names and metadata. ``key``: the columns that the user names as the key, if any.

        Raises SchemaError if a part of the panes is missing.
        """
        names = [name for name, _ in fields]
        parts = Parts.of(fields)
        if key is not None:
            return cls._named(names, parts, key)
        if parts is None:
            raise SchemaError(
                f"no column says which part of a pane it is; write a result of aion.windowed, or pass key=[...]. The "
                f"columns are {', '.join(names)}"
            )
        if missing := parts.missing(KIND, SEQ):
            raise SchemaError(
                f"{' and '.join(missing)} of the windows {parts.said.name!r} is missing. A pane replaces the rows of "
                "its key and window, so keep these columns in the select (an alias is fine; another value is not), or "
                f"pass key=[...]. The columns are {', '.join(names)}"
            )
        columns = parts.columns
        window = [columns[part] for part in (NAME, START, END) if part in columns]
        identity = tuple(dict.fromkeys([*parts.keys, *window]))
        written = tuple(name for name in names if name not in parts.besides)
        return cls(identity, written, columns[KIND], columns[SEQ], parts.said.single)

    @classmethod
    def _named(cls, names: Sequence[str], parts: Parts | None, key: Sequence[str]) -> Panes:
        """The same if the user says what the key is. The columns of the window may be known by their names."""
        columns = {} if parts is None else parts.columns
        found = {part: columns.get(part, part) for part in (NAME, START, END, KIND, SEQ)}
        for needed in (*key, *(found[part] for part in (START, END, KIND, SEQ))):
            if needed not in names:
                raise SchemaError(f"there is no column {needed!r}; the columns are {', '.join(names)}")
        window = [found[part] for part in (NAME, START, END) if found[part] in names]
        besides = {*DROPPED_COLUMNS, found[SEQ]} if parts is None else parts.besides
        written = tuple(name for name in names if name not in besides)
        single = parts is None or parts.said.single
        return cls(tuple(dict.fromkeys([*key, *window])), written, found[KIND], found[SEQ], single)

    def change(self, panes: pa.Table) -> Change:
        """Returns what a batch of panes does to a table. Dropped rows do nothing.

        Of each key and window, the rows of the pane with the largest number count, wherever they are in the batch.
        """
        shown = _where(panes, pc.not_equal(panes[self.kind], PaneKind.DROPPED.value))
        last = _newest(shown, self.identity, self.seq)
        retracted = pc.equal(last[self.kind], PaneKind.RETRACTED.value)
        rows = _where(last, pc.invert(retracted)).select(list(self.written))
        gone = _where(last, retracted).select(list(self.identity))
        return Change(self.identity, rows, gone, self.kind, self.single)


@dataclass(frozen=True)
class Change:
    """What a batch does to a table.

    ``rows``: the rows to write. ``gone``: the ``identity`` columns of the rows to delete. Rows of the table that are
    equal to one of either in the ``identity`` columns are replaced or deleted. Nulls are equal to each other.
    ``kind``: the column with the kind of a pane. ``single``: whether ``rows`` has one row of each identity.
    """

    identity: tuple[str, ...]
    rows: pa.Table
    gone: pa.Table
    kind: str = KIND
    single: bool = True

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
        places = self.places
        both = pa.concat_tables([places, old.select(list(self.identity)).cast(places.schema)])
        of = _numbered(both, self.identity)
        stays = ~np.isin(of[places.num_rows :], of[: places.num_rows])
        return pa.concat_tables([_where(old, pa.array(stays)), self.rows], promote_options="default")

    def repeated(self) -> bool:
        """Returns whether two rows to write have the same identity."""
        of = _numbered(self.rows, self.identity)
        return len(np.unique(of)) < len(of)


def _where(table: pa.Table, mask: Any) -> pa.Table:
    """Copies nothing if all rows are chosen, as they mostly are."""
    return table if pc.all(mask).as_py() else table.filter(mask)


def _newest(table: pa.Table, columns: Sequence[str], seq: str) -> pa.Table:
    """Returns the rows with the largest ``seq`` among those that are equal in ``columns``, in their order."""
    of, seqs = _numbered(table, columns), combined(table[seq]).to_numpy(zero_copy_only=False)
    largest = np.full(int(of.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(largest, of, seqs)
    return _where(table, pa.array(seqs == largest[of]))


def _numbered(table: pa.Table, columns: Sequence[str]) -> Any:
    """Returns a number for each row. Rows that are equal in ``columns`` have the same one."""
    return number([combined(table[name]) for name in columns], table.num_rows).ids


def null_patterns(places: pa.Table) -> list[tuple[str, ...]]:
    """Returns which columns are null together: an entry for each combination that occurs. Most tables have one: ()."""
    with_nulls = [name for name in places.column_names if places[name].null_count]
    if not with_nulls:
        return [()]
    flags = pa.table({name: pc.is_null(places[name]) for name in with_nulls})
    found = flags.group_by(with_nulls).aggregate([]).to_pylist()
    return sorted(tuple(name for name in with_nulls if row[name]) for row in found)
