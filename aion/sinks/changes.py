"""The changes of a table as rows of another one: what each batch made of each window, and what was there before.

The database itself knows what a row replaces. So both tables are written in one transaction, and values are copied
inside the database: they never leave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from aion.errors import SchemaError
from aion.sinks.database import Database, TableName, add_column, create, identifier, identifiers
from aion.sinks.names import check_names
from aion.sinks.rows import Change

SEQ, BATCH, CHANGE, OLD = "seq", "batch", "change", "old_"
_OWN = {SEQ: pa.int64(), BATCH: pa.int64(), CHANGE: pa.string()}


def replace_and_record(
    database: Database, table: TableName, change: Change, changes: TableName, batch: int, *, add: bool = False
) -> None:
    """Applies a change to a table, and adds a row for each row that it replaces, adds or deletes to ``changes``.

    If a pane may have several rows, nothing says which row of the next pane replaces which. So those that were there
    are deleted, and those that come are inserted.

    Makes ``changes`` if it is missing, and with ``add``, its columns. Raises SchemaError if it cannot hold the rows.
    """
    values = [name for name in change.rows.column_names if name not in change.identity]
    _prepare(database, changes, change, values, database.columns(table), add=add)
    ((last,),) = database.query(f"SELECT max({identifier(SEQ)}) FROM {changes}")
    seq = 0 if last is None else int(last) + 1
    rows = change.places.group_by(list(change.identity)).aggregate([])
    for name, number in {SEQ: seq, BATCH: batch}.items():
        rows = rows.append_column(name, pa.array([number] * rows.num_rows, _OWN[name]))
    identity = (SEQ, *change.identity)
    database.replace(changes, Change(identity, rows, rows.select(list(identity)).slice(0, 0)))
    before, now = {OLD + name: name for name in values}, {name: name for name in values}
    _record(database, table, changes, seq, change, before, "delete")
    database.replace(table, change)
    _record(database, table, changes, seq, change, now, "insert")
    of_batch = f"{identifier(SEQ)} = {seq}"
    if not change.single:
        database.query(f"DELETE FROM {changes} WHERE {of_batch} AND {identifier(CHANGE)} IS NULL")
        return
    kind, old_kind = identifier(change.kind), identifier(OLD + change.kind)
    # A window that came and went within one batch is in neither.
    database.query(f"DELETE FROM {changes} WHERE {of_batch} AND {kind} IS NULL AND {old_kind} IS NULL")
    what = f"CASE WHEN {old_kind} IS NULL THEN 'insert' WHEN {kind} IS NULL THEN 'delete' ELSE 'update' END"
    database.query(f"UPDATE {changes} SET {identifier(CHANGE)} = {what} WHERE {of_batch}")


def _prepare(
    database: Database,
    changes: TableName,
    change: Change,
    values: Sequence[str],
    declared: Mapping[str, str],
    *,
    add: bool,
) -> None:
    """Makes the table if it is missing, with the types that the other one has."""
    wanted = {name: database.type_of(pa.field(name, type_)) for name, type_ in _OWN.items()}
    for name in [*change.identity, *values, *(OLD + name for name in values)]:
        if name in wanted:
            raise SchemaError(
                f"changes: two columns of {changes} would have the name {name!r}; rename that of the rows"
            )
        wanted[name] = declared[name.removeprefix(OLD) if name not in declared else name]
    check_names(wanted, case=database.case, longest=database.longest_name)
    there = database.columns(changes)
    if not there:
        create(database, changes, wanted, [SEQ, *change.by_time], change.single)
    for name in [name for name in wanted if add and there and name not in (*there, *change.identity)]:
        add_column(database, changes, name, wanted[name])
        there[name] = wanted[name]
    if missing := [name for name in wanted if name not in (there or wanted)]:
        raise SchemaError(
            f"changes: table {changes} has no column {missing[0]!r}; its columns are {', '.join(there)}. Add the "
            "column, or use another table"
        )


def _record(
    database: Database,
    table: TableName,
    changes: TableName,
    seq: int,
    change: Change,
    columns: Mapping[str, str],
    what: str,
) -> None:
    """Copies values of the table's rows of the windows of this batch. ``columns``: from where, by the name there.

    If a pane has one row, they go into the rows of this batch. Otherwise each makes a row, of the change ``what``.
    """
    own, of_batch = [SEQ, BATCH, *change.identity], f"of_batch.{identifier(SEQ)} = {seq}"
    names = identifiers([CHANGE, *own, *columns])
    values = ", ".join([f"'{what}'", identifiers(own, "of_batch."), identifiers(columns.values(), "of_table.")])
    copied = ", ".join(f"{identifier(to)} = of_table.{identifier(of)}" for to, of in columns.items())
    for same in database.same(change.places, "of_batch", "of_table"):
        database.query(
            f"UPDATE {changes} AS of_batch SET {copied} FROM {table} AS of_table WHERE {of_batch} AND {same}"
            if change.single
            else f"INSERT INTO {changes} ({names}) SELECT {values} FROM {changes} AS of_batch "
            f"JOIN {table} AS of_table ON {same} WHERE {of_batch} AND of_batch.{identifier(CHANGE)} IS NULL"
        )
