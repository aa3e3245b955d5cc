"""Which rows of a batch of panes a table has to hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.groups import number
from aion.aggregates.values import combined
from aion.base.hashing import hash_rows
from aion.core.life.actions import PaneKind
from aion.core.query.columns import DROPPED_COLUMNS, NOT_OF_DROPPED, WINDOW_COLUMNS
from aion.core.query.pane_columns import END, KIND, NAME, SEQ, START, PaneColumns
from aion.errors import SchemaError
from aion.sinks.marks import NOTHING, digest_of

Mask = npt.NDArray[np.bool_]
KEPT = "__aion_kept"
"""The column that says which rows a table is to have. Without it, it has all."""


class Panes(NamedTuple):
    """What the columns of a batch of panes are.

    ``identity``: the columns of the key and those of the window. A pane replaces all rows that are equal in these.
    ``written``: the columns that a table has. ``seq``: the column that orders panes. ``start``: the one with the
    beginning of the window. ``single``: whether a pane has one row. ``dropped``: what a table of dropped rows has.
    """

    identity: tuple[str, ...]
    written: tuple[str, ...]
    kind: str
    seq: str
    start: str
    single: bool
    dropped: tuple[str, ...]

    @classmethod
    def of(cls, fields: Sequence[tuple[str, Mapping[str, Any]]], key: Sequence[str] | None) -> Panes:
        """Finds them in the columns' names and metadata. ``key``: the columns that the user names as the key, if any.

        Raises SchemaError if a part of the panes is missing.
        """
        names = [name for name, _ in fields]
        meaning = PaneColumns.of(fields)
        if key is not None:
            return cls._named(names, meaning, key)
        if meaning is None:
            raise SchemaError(
                f"no column says which part of a pane it is; write a result of aion.windowed, or pass key=[...]. The "
                f"columns are {', '.join(names)}"
            )
        if missing := meaning.missing(KIND, SEQ):
            raise SchemaError(
                f"{' and '.join(missing)} of the windows {meaning.said.name!r} is missing. A pane replaces the rows of "
                "its key and window, so keep these columns in the select (an alias is fine; another value is not), or "
                f"pass key=[...]. The columns are {', '.join(names)}"
            )
        columns = meaning.columns
        window = [columns[part] for part in (NAME, START, END) if part in columns]
        identity = tuple(dict.fromkeys([*meaning.keys, *window]))
        written = tuple(name for name in names if name not in meaning.besides)
        return cls(
            identity, written, columns[KIND], columns[SEQ], columns[START], meaning.said.single,
            _of_dropped(written, meaning.dropped),
        )  # fmt: skip

    @classmethod
    def _named(cls, names: Sequence[str], meaning: PaneColumns | None, key: Sequence[str]) -> Panes:
        """The same if the user says what the key is. The columns of the window may be known by their names."""
        columns = {} if meaning is None else meaning.columns
        found = {part: columns.get(part, part) for part in (NAME, START, END, KIND, SEQ)}
        for needed in (*key, *(found[part] for part in (START, END, KIND, SEQ))):
            if needed not in names:
                raise SchemaError(f"there is no column {needed!r}; the columns are {', '.join(names)}")
        window = [found[part] for part in (NAME, START, END) if found[part] in names]
        besides = {*DROPPED_COLUMNS, found[SEQ]} if meaning is None else meaning.besides
        written = tuple(name for name in names if name not in besides)
        single = meaning is None or meaning.said.single
        dropped = meaning.dropped if meaning is not None else [name for name in DROPPED_COLUMNS if name in names]
        identity = tuple(dict.fromkeys([*key, *window]))
        return cls(
            identity, written, found[KIND], found[SEQ], found[START], single, _of_dropped(written, dropped)
        )  # fmt: skip

    def change(self, panes: pa.Table) -> TableChange:
        """Returns what a batch of panes does to a table, and the dropped rows, which do nothing to it.

        Of each key and window, the rows of the pane with the largest number count, wherever they are in the batch.
        """
        shown = _where(panes, pc.not_equal(panes[self.kind], PaneKind.DROPPED.value))
        last = _newest(shown, self.identity, self.seq)
        retracted = pc.equal(last[self.kind], PaneKind.RETRACTED.value)
        current = _where(last, pc.invert(retracted))
        rows = current.select(list(self.written))
        gone = _where(last, retracted).select(list(self.identity))
        dropped = panes.filter(pc.equal(panes[self.kind], PaneKind.DROPPED.value)).select(list(self.dropped))
        change = TableChange(self.identity, rows, gone, self.kind, self.start, self.single, dropped)
        if KEPT not in current.column_names:
            return change
        kept = combined(current[KEPT]).to_numpy(zero_copy_only=False)
        return change.without(kept, np.ones(len(kept), np.bool_))


@dataclass(frozen=True)
class TableChange:
    """What a batch does to a table.

    ``rows``: the rows to write. ``removed``: the ``identity`` columns of the rows to delete. Rows of the table that are
    equal to one of either in the ``identity`` columns are replaced or deleted. Nulls are equal to each other.
    ``kind``: the column with the kind of a pane. ``start``: the one with the beginning of the window. ``single``:
    whether ``rows`` has one row of each identity. ``dropped``: events that were left out, if they are written anywhere.
    """

    identity: tuple[str, ...]
    rows: pa.Table
    removed: pa.Table
    kind: str = KIND
    start: str = START
    single: bool = True
    dropped: pa.Table | None = None

    @property
    def by_time(self) -> list[str]:
        """The identity, windows first. New windows are at the end of such an index, and late ones near it."""
        first = [*WINDOW_COLUMNS[1:], WINDOW_COLUMNS[0]]
        return [*(c for c in first if c in self.identity), *(c for c in self.identity if c not in first)]

    @property
    def places(self) -> pa.Table:
        """The identity of each row that is written or deleted."""
        return pa.concat_tables([self.rows.select(list(self.identity)), self.removed])

    @property
    def digest(self) -> str:
        """Tells changes apart. The order of rows does not matter."""
        tables = [table for table in (self.rows, self.removed, self.dropped) if table is not None]
        if not any(table.num_rows for table in tables):
            return NOTHING
        parts = list[str | bytes](self.identity)
        for table in tables:
            parts += [f"{field.name}: {field.type}" for field in table.schema]
            if table.num_rows:
                hashes = hash_rows([combined(column) for column in table.columns], 0)
                parts.append(np.sort(hashes).tobytes())
        return digest_of(*parts)

    def without(self, kept: Mask, found: Mask) -> TableChange:
        """Returns the change with some rows only. ``kept``: which. ``found``: those whose old rows the table may have.

        These go, unless other rows replace them.
        """
        if kept.all():
            return self
        of = _numbered(self.rows, self.identity)
        gone = ~kept & found & ~np.isin(of, of[kept])
        places = self.rows.select(list(self.identity))
        return replace(
            self,
            rows=self.rows.filter(pa.array(kept)),
            removed=pa.concat_tables([self.removed, places.filter(pa.array(gone))]),
        )

    def merged(self, old: pa.Table) -> pa.Table:
        """Returns the rows of a part of a table after the change. ``old``: those before, with at least its columns."""
        places = self.places
        both = pa.concat_tables([places, old.select(list(self.identity)).cast(places.schema)])
        of = _numbered(both, self.identity)
        stays = ~np.isin(of[places.num_rows :], of[: places.num_rows])
        return pa.concat_tables([_where(old, pa.array(stays)), self.rows], promote_options="default")


def _of_dropped(written: Sequence[str], dropped: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*(name for name in written if name not in NOT_OF_DROPPED), *dropped]))


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
