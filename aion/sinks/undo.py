"""What ``undo=`` keeps of the last batches of a table in a database, so that the table can go back.

Before a batch changes a table, what it replaces is recorded in a table beside (``..._undo``), in the same transaction.
The table :data:`ENTRIES` has a row for each batch that can be taken back: the mark that the table had before it, and
what else the batch wrote. From the table's mark, these lead from batch to batch. Where one is missing, the table cannot
go back further.

A batch that comes again with other rows adds to the record of the first time. Of each place, the oldest record after
the batch to which a table goes back says what was there then.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from aion.errors import ConfigError
from aion.sinks.changes import BATCH, CHANGE, OLD, SEQ, prepare_record, record_before
from aion.sinks.database import Database, TableName, identifier, identifiers
from aion.sinks.dropped import BATCH as DROPPED_BATCH
from aion.sinks.dropped import QUERY as DROPPED_QUERY
from aion.sinks.marks import Content, Goal, Mark, follows
from aion.sinks.rows import TableChange

ENTRIES = "aion_undo"
"""The table with a row for each batch that can be taken back. It is in the same schema as the marks."""
SUFFIX = "_undo"
_TOUCHED, _FIRST = "aion_touched", "aion_first"
_BATCHES = re.compile(r"\s*(\d+)\s+batch(es)?\s*")


def batches_of(undo: str | None) -> int | None:
    """Returns how many batches a text such as ``"100 batches"`` means. Raises ConfigError for another one."""
    if undo is None:
        return None
    found = _BATCHES.fullmatch(undo) if isinstance(undo, str) else None
    if found is None or int(found[1]) < 1:
        number = undo if isinstance(undo, int) and not isinstance(undo, bool) and undo > 0 else 100
        raise ConfigError(f"undo: {undo!r} does not say how many batches; write undo='{number} batches'")
    return int(found[1])


def undo_table(table: TableName) -> TableName:
    """Returns the name of the table with what batches replaced in another one."""
    return table.beside(table.table + SUFFIX)


@dataclass(frozen=True)
class _Entry:
    """A batch that can be taken back.

    ``seq``: the first record of it. ``last``: the batch before, or None if the table had no mark; ``run``, ``digest``
    and ``filled`` are of its mark. ``identity``: by which columns its rows are found. ``changes``: the table with its
    changes and its first number there. ``dropped``: the table with its dropped rows.
    """

    batch: int
    seq: int
    last: int | None
    run: str | None
    digest: str | None
    filled: bool | None
    identity: tuple[str, ...]
    changes: tuple[str, int] | None
    dropped: str | None


def record(
    database: Database, table: TableName, change: TableChange, batches: int | None, before: Mark | None,
    content: Content, now: Mark,
) -> None:  # fmt: skip
    """Records what a batch will replace. To be called before it is written. ``batches``: how many can be taken back.

    ``before`` and ``content``: the mark of the table, and what it has. Without ``batches``, nothing is recorded, and
    nothing that was can be taken back any more if this batch does not follow the last one.
    """
    again, entries = before == now, _entries(database, table)
    # Rows of another query, or of batches that came in another order, are not what this one's records lead back to.
    broken = not again and not follows(before, now) and bool(entries)
    if entries and (broken or (batches is None and again) or entries[0].identity != change.identity):
        _forget(database, table)
        entries = []
    begins = content is not Content.ROWS and not (before is not None and before.history == now.history)
    known = any(entry.batch == now.batch for entry in entries)
    if batches is None or not (follows(before, now) or begins or (again and known)):
        return
    _make_entries(database, table)
    beside = undo_table(table)
    values = _values(database, table, change)
    declared = database.columns(table)
    wanted = [(name, declared[name]) for name in change.identity] + [(OLD + name, declared[name]) for name in values]
    prepare_record(database, beside, change, wanted, "undo", add=True)
    seq = record_before(database, table, beside, change, values, now.batch)
    if not known:
        last = None if begins else before
        full = None if last is None or last.filled is None else int(last.filled)
        _insert(
            database, _entries_table(table), name=table.table, batch=now.batch, seq=seq,
            last_batch=None if last is None else last.batch, run=None if last is None else last.run,
            digest=None if last is None else last.digest, filled=full,
            tables=json.dumps({"identity": change.identity}),
        )  # fmt: skip


def _values(database: Database, table: TableName, change: TableChange) -> list[str]:
    """The columns that are recorded: all that can be written again, also those that this batch does not write."""
    identity = change.identity if database.case else [name.lower() for name in change.identity]
    return [name for name in database.insertable(table) if (name if database.case else name.lower()) not in identity]


def record_beside(
    database: Database, table: TableName, batch: int, changes: tuple[str, int] | None, dropped: str | None
) -> None:
    """Records which other tables a batch wrote. ``changes``: its name, and the number that the batch has there."""
    found = next((entry for entry in _entries(database, table) if entry.batch == batch), None)
    if found is not None:
        tables = {"identity": found.identity, "changes": found.changes or changes, "dropped": dropped or found.dropped}
        database.query(
            f"UPDATE {_entries_table(table)} SET tables = ? WHERE name = ? AND batch = ?",
            json.dumps(tables), table.table, batch,
        )  # fmt: skip


def prune(database: Database, table: TableName, batch: int, batches: int) -> None:
    """Deletes what only a table that goes back by more than ``batches`` would need."""
    entries = _entries_table(table)
    database.query(f"DELETE FROM {entries} WHERE name = ? AND batch <= ?", table.table, batch - batches)
    ((first,),) = database.query(f"SELECT min(seq) FROM {entries} WHERE name = ?", table.table)
    if first is not None:
        database.query(f"DELETE FROM {undo_table(table)} WHERE {identifier(SEQ)} < {int(first)}")


def why_not(database: Database, table: TableName, found: Mark, goal: Goal) -> str | None:
    """Returns why a table cannot go back to a batch, as a sentence, or None if it can. It only reads."""
    shown = ".".join(part for part in table if part is not None)
    if not database.columns(table):
        return f"Table {shown!r} does not exist any more, so it cannot go back to batch {goal.batch}"
    if isinstance(at := _chain(database, table, found, goal), list):
        return None
    if at == found.batch:
        return (
            f"Table {shown!r} has batch {at} and cannot go back to batch {goal.batch}, because its sink did not record "
            "what that batch replaced: a sink with undo='100 batches' does so for the batches that it writes"
        )
    return (
        f"Table {shown!r} has batch {found.batch} and cannot go back to batch {goal.batch}, because its sink has no "
        f"record of what batch {at} replaced; batch {at} is the oldest to which it can go (undo= says how many "
        "batches are recorded)"
    )


def taken_back(database: Database, table: TableName, found: Mark, goal: Goal) -> Mark | None:
    """Takes back what a table and those beside it have of batches after ``goal``, if :func:`why_not` has no reason.

    Returns the mark that the table must get, or None if it had none then.
    """
    undone = _chain(database, table, found, goal)
    assert isinstance(undone, list), "the caller has asked why_not"
    first = min(entry.seq for entry in undone)
    _restore(database, table, undone[-1].identity, first)
    for entry in undone:
        if entry.changes is not None and database.columns(changes := TableName.of(entry.changes[0])):
            database.query(
                f"DELETE FROM {changes} WHERE {identifier(SEQ)} >= {entry.changes[1]} "
                f"AND {identifier(BATCH)} > {goal.batch}"
            )
        if entry.dropped is not None and database.columns(dropped := TableName.of(entry.dropped)):
            where = f"{identifier(DROPPED_QUERY)} = ? AND {identifier(DROPPED_BATCH)} > ?"
            database.query(f"DELETE FROM {dropped} WHERE {where}", found.history.query, goal.batch)
    database.query(f"DELETE FROM {_entries_table(table)} WHERE name = ? AND batch > ?", table.table, goal.batch)
    oldest = undone[-1]
    if oldest.last is None:
        return None
    same = oldest.last == goal.batch
    return replace(
        found, batch=goal.batch, run=oldest.run if same else None, digest=oldest.digest if same else None,
        filled=oldest.filled, rewound=goal.rewind,
    )  # fmt: skip


def _restore(database: Database, table: TableName, identity: tuple[str, ...], first: int) -> None:
    """Gives the places of all records from ``first`` on the rows that were there before the first of them."""
    beside, names = undo_table(table), list(identity)
    seq = identifier(SEQ)
    database.query(
        f"CREATE TEMPORARY TABLE {_TOUCHED} AS SELECT {identifiers(names)}, min({seq}) AS {_FIRST} FROM {beside} "
        f"WHERE {seq} >= {first} GROUP BY {identifiers(names)}"
    )
    patterns = _patterns(database, names)
    database.delete(table, _TOUCHED, patterns)
    there = database.columns(beside)
    values = [name for name in database.insertable(table) if OLD + name in there]
    columns = identifiers([*names, *values])
    selected = ", ".join([identifiers(names, "old."), identifiers([OLD + name for name in values], "old.")])
    for same in database.same(patterns, "touched", "old"):
        database.query(
            f"INSERT INTO {table} ({columns}) SELECT {selected} FROM {_TOUCHED} AS touched JOIN {beside} AS old "
            f"ON old.{seq} = touched.{_FIRST} AND {same} WHERE old.{identifier(CHANGE)} IS NOT NULL"
        )
    database.query(f"DROP TABLE {_TOUCHED}")
    database.query(f"DELETE FROM {beside} WHERE {seq} >= {first}")


def _patterns(database: Database, names: list[str]) -> pa.Table:
    """Returns rows with nulls where places have nulls together."""
    flags = ", ".join(f"CASE WHEN {name} IS NULL THEN 0 ELSE 1 END" for name in map(identifier, names))
    rows = database.query(f"SELECT DISTINCT {flags} FROM {_TOUCHED}")
    columns = [pa.array([None if row[at] == 0 else 1 for row in rows], pa.int64()) for at in range(len(names))]
    return pa.table(columns, names=names)


def _chain(database: Database, table: TableName, found: Mark, goal: Goal) -> list[_Entry] | int:
    """Returns the batches to take back, the newest first; or the batch that cannot be."""
    entries = {entry.batch: entry for entry in _entries(database, table)}
    if not database.columns(undo_table(table)):
        entries = {}
    undone, at = list[_Entry](), found.batch
    while at > goal.batch:
        if at not in entries:
            return at
        undone.append(entries[at])
        if (last := entries[at].last) is None:
            break
        at = last
    return undone


def _entries(database: Database, table: TableName) -> list[_Entry]:
    """Returns what can be taken back, the newest first."""
    entries = _entries_table(table)
    if not database.columns(entries):
        return []
    columns = "batch, seq, last_batch, run, digest, filled, tables"
    found = list[_Entry]()
    for batch, seq, last, run, digest, filled, text in database.query(
        f"SELECT {columns} FROM {entries} WHERE name = ? ORDER BY batch DESC", table.table
    ):
        tables = json.loads(text)
        changes = tables.get("changes")
        found.append(
            _Entry(
                int(batch), int(seq), last, run, digest, None if filled is None else bool(filled),
                tuple(tables["identity"]), None if changes is None else tuple(changes), tables.get("dropped"),
            )
        )  # fmt: skip
    return found


def _forget(database: Database, table: TableName) -> None:
    database.query(f"DELETE FROM {_entries_table(table)} WHERE name = ?", table.table)
    if database.columns(beside := undo_table(table)):
        database.query(f"DROP TABLE {beside}")


def _entries_table(table: TableName) -> TableName:
    return table.beside(ENTRIES)


def _make_entries(database: Database, table: TableName) -> None:
    """Makes it without a key: DuckDB lets no transaction delete a row and insert another one with the same key."""
    if not database.columns(entries := _entries_table(table)):
        database.query(
            f"CREATE TABLE IF NOT EXISTS {entries} (name text NOT NULL, batch bigint NOT NULL, seq bigint NOT NULL, "
            "last_batch bigint, run text, digest text, filled bigint, tables text NOT NULL)"
        )


def _insert(database: Database, table: TableName, **values: Any) -> None:
    known = {name: value for name, value in values.items() if value is not None}
    places = ", ".join("?" * len(known))
    database.query(f"INSERT INTO {table} ({', '.join(known)}) VALUES ({places})", *known.values())
