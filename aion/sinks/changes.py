"""The changes of a table as rows of another one: what each batch made of each window, and what was there before.

The database itself knows what a row replaces. So both tables are written in one transaction, and values are copied
inside the database: they never leave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from aion.errors import SchemaError
from aion.sinks.database import Database, TableName, add_column, identifier
from aion.sinks.names import check_names
from aion.sinks.rows import Change, null_patterns

SEQ, BATCH, CHANGE, OLD = "seq", "batch", "change", "old_"
_OWN = {SEQ: pa.int64(), BATCH: pa.int64(), CHANGE: pa.string()}


def replace_and_record(
    database: Database, table: TableName, change: Change, changes: TableName, batch: int, *, add: bool = False
) -> None:
    """Applies a change to a table, and adds a row for each row that it replaces, adds or deletes to ``changes``.

    Makes ``changes`` if it is missing, and with ``add``, its columns. Raises SchemaError if it cannot hold the rows, or
    if a pane has several.
    """
    if change.repeated():
        raise SchemaError(
            "changes: a pane has several rows, and nothing says which row of the next pane replaces which; return one "
            "row for a key and window, e.g. with a list in it, or leave changes= out"
        )
    values = [name for name in change.rows.column_names if name not in change.identity]
    _prepare(database, changes, change, values, database.columns(table), add=add)
    ((last,),) = database.query(f"SELECT max({identifier(SEQ)}) FROM {changes}")
    seq = 0 if last is None else int(last) + 1
    rows = change.places
    for name, number in {SEQ: seq, BATCH: batch}.items():
        rows = rows.append_column(name, pa.array([number] * rows.num_rows, _OWN[name]))
    identity = (SEQ, *change.identity)
    database.replace(changes, Change(identity, rows, rows.select(list(identity)).slice(0, 0)))
    _copy(database, table, changes, seq, change, {OLD + name: name for name in values})
    database.replace(table, change)
    _copy(database, table, changes, seq, change, {name: name for name in values})
    kind, before = identifier(change.kind), identifier(OLD + change.kind)
    of_batch = f"{identifier(SEQ)} = {seq}"
    # A window that came and went within one batch is in neither.
    database.query(f"DELETE FROM {changes} WHERE {of_batch} AND {kind} IS NULL AND {before} IS NULL")
    what = f"CASE WHEN {before} IS NULL THEN 'insert' WHEN {kind} IS NULL THEN 'delete' ELSE 'update' END"
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
        columns = ", ".join(f"{identifier(name)} {type_}" for name, type_ in wanted.items())
        database.query(f"CREATE TABLE {changes} ({columns})")
        database.index(changes, [SEQ, *change.by_time], unique=True)
    for name in [name for name in wanted if add and there and name not in (*there, *change.identity)]:
        add_column(database, changes, name, wanted[name])
        there[name] = wanted[name]
    if missing := [name for name in wanted if name not in (there or wanted)]:
        raise SchemaError(
            f"changes: table {changes} has no column {missing[0]!r}; its columns are {', '.join(there)}. Add the "
            "column, or use another table"
        )


def _copy(
    database: Database, table: TableName, changes: TableName, seq: int, change: Change, columns: Mapping[str, str]
) -> None:
    """Copies values of the table's rows into the rows of this batch. ``columns``: from where, by the name there."""
    copied = ", ".join(f"{identifier(to)} = of_table.{identifier(of)}" for to, of in columns.items())
    for nulls in null_patterns(change.places):
        same = [
            f"of_batch.{name} IS NULL AND of_table.{name} IS NULL"
            if column in nulls
            else f"of_batch.{name} = of_table.{name}"
            for column in change.identity
            for name in (identifier(column),)
        ]
        database.query(
            f"UPDATE {changes} AS of_batch SET {copied} FROM {table} AS of_table "
            f"WHERE of_batch.{identifier(SEQ)} = {seq} AND {' AND '.join(same)}"
        )
