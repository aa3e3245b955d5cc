"""What each batch does to the rows of a table, as rows of another one beside it.

There are two such tables: that of ``changes=``, which says what was there before and what is there now, and that of
``undo=`` (:mod:`aion.sinks.undo`), which says what was there before. The database itself knows what a row replaces. So
all is written in one transaction, and values are copied inside the database: they never leave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from aion.errors import SchemaError
from aion.sinks.database import Database, TableName, add_column, create, identifier, identifiers
from aion.sinks.names import check_names
from aion.sinks.rows import TableChange

SEQ, BATCH, CHANGE, OLD = "seq", "batch", "change", "old_"
_OWN = {SEQ: pa.int64(), BATCH: pa.int64(), CHANGE: pa.string()}
DELETE, INSERT = "delete", "insert"


def changes_before(
    database: Database, table: TableName, change: TableChange, changes: TableName, batch: int, *, add: bool = False
) -> int:
    """Begins to record what a batch changes: what is in a table before it is. Returns the number of the record.

    Makes ``changes`` if it is missing, and with ``add``, its columns. Raises SchemaError if it cannot hold the rows.
    """
    values, declared = _values(change), database.columns(table)
    wanted = [(name, declared[name]) for name in (*change.identity, *values)]
    wanted += [(OLD + name, declared[name]) for name in values]
    prepare_record(database, changes, change, wanted, "changes", add=add)
    return record_before(database, table, changes, change, values, batch)


def changes_after(database: Database, table: TableName, change: TableChange, changes: TableName, seq: int) -> None:
    """Ends it when the table has been changed, with a row for each row that was replaced, added or deleted.

    If a pane may have several rows, nothing says which row of the next pane replaces which. So those that were there
    are deleted, and those that come are inserted.
    """
    _record(database, table, changes, seq, change, {name: name for name in _values(change)}, INSERT)
    of_batch = f"{identifier(SEQ)} = {seq}"
    if not change.single:
        database.query(f"DELETE FROM {changes} WHERE {of_batch} AND {identifier(CHANGE)} IS NULL")
        return
    kind, old_kind = identifier(change.kind), identifier(OLD + change.kind)
    # A window that came and went within one batch is in neither.
    database.query(f"DELETE FROM {changes} WHERE {of_batch} AND {kind} IS NULL AND {old_kind} IS NULL")
    what = f"CASE WHEN {old_kind} IS NULL THEN '{INSERT}' WHEN {kind} IS NULL THEN '{DELETE}' ELSE 'update' END"
    database.query(f"UPDATE {changes} SET {identifier(CHANGE)} = {what} WHERE {of_batch}")


def _values(change: TableChange) -> list[str]:
    return [name for name in change.rows.column_names if name not in change.identity]


def record_before(
    database: Database, table: TableName, record: TableName, change: TableChange, values: Sequence[str], batch: int
) -> int:
    """Adds the places of a batch to a record, and what a table has there now. Returns the number of the record.

    Where a row is there, ``change`` is DELETE and the values are in the columns with ``old_``. If a pane may have
    several rows, these have rows of their own, beside the one of the place.
    """
    ((last,),) = database.query(f"SELECT max({identifier(SEQ)}) FROM {record}")
    seq = 0 if last is None else int(last) + 1
    rows = change.places.group_by(list(change.identity)).aggregate([])
    for name, number in {SEQ: seq, BATCH: batch}.items():
        rows = rows.append_column(name, pa.array([number] * rows.num_rows, _OWN[name]))
    identity = (SEQ, *change.identity)
    database.replace(record, TableChange(identity, rows, rows.select(list(identity)).slice(0, 0)))
    _record(database, table, record, seq, change, {OLD + name: name for name in values}, DELETE)
    return seq


def prepare_record(
    database: Database,
    record: TableName,
    change: TableChange,
    columns: Sequence[tuple[str, str]],
    argument: str,
    *,
    add: bool,
) -> None:
    """Makes the table of a record if it is missing. ``columns``: their names and types. ``argument``: what asks for
    the table, for errors. Raises SchemaError if the table is there and lacks some that may not be added.
    """
    wanted = {name: database.type_of(pa.field(name, type_)) for name, type_ in _OWN.items()}
    for name, type_ in columns:
        if name in wanted:
            raise SchemaError(
                f"{argument}: two columns of {record} would have the name {name!r}; rename that of the rows"
            )
        wanted[name] = type_
    check_names(wanted, case=database.case, longest=database.longest_name)
    there = database.columns(record)
    if not there:
        create(database, record, wanted, [SEQ, *change.by_time], change.single)
    for name in [name for name in wanted if add and there and name not in (*there, *change.identity)]:
        add_column(database, record, name, wanted[name])
        there[name] = wanted[name]
    if missing := [name for name in wanted if name not in (there or wanted)]:
        raise SchemaError(
            f"{argument}: table {record} has no column {missing[0]!r}; its columns are {', '.join(there)}. Add the "
            "column, or use another table"
        )


def _record(
    database: Database,
    table: TableName,
    record: TableName,
    seq: int,
    change: TableChange,
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
            f"UPDATE {record} AS of_batch SET {identifier(CHANGE)} = '{what}', {copied} FROM {table} AS of_table "
            f"WHERE {of_batch} AND {same}"
            if change.single
            else f"INSERT INTO {record} ({names}) SELECT {values} FROM {record} AS of_batch "
            f"JOIN {table} AS of_table ON {same} WHERE {of_batch} AND of_batch.{identifier(CHANGE)} IS NULL"
        )
