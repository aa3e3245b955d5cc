"""What a checkpoint knows of the tables that its query writes to, and which columns a new definition needs there. Pure.

A sink notes it beside the checkpoint's logs: a file for each table, in the folder FOLDER, when its first batch has come
and when its columns change. A note is for people: a query works without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

FOLDER = "aion-sinks"
REWOUND = "aion-rewound.json"
"""The file of a checkpoint that says to which batch it went back last, so that sinks can follow."""
_FIRST = ("operator", "table", "uri", "columns", "adds")
"""What notes have always had."""


@dataclass(frozen=True)
class Note:
    """``operator``: whose panes are written, or None if the panes do not say. ``uri``: of the database, without a
    password; empty for a lake. ``columns``: those that were written. ``adds``: whether the sink adds columns to its
    table.

    The others are empty in the notes of earlier versions. ``kind``: of the store, such as ``postgresql`` or ``delta``.
    ``undo``: how many batches the sink of a database can take back, if any. ``changes`` and ``dropped``: the names of
    the tables beside it. ``connect``: a URI with which somebody whose environment has the password can connect.
    ``options``: those of a lake without secrets.
    """

    operator: str | None
    table: str
    uri: str
    columns: tuple[str, ...]
    adds: bool
    kind: str = ""
    undo: int | None = None
    changes: str | None = None
    dropped: str | None = None
    connect: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str | bytes) -> Note:
        found: dict[str, Any] = json.loads(text)
        newer = {each.name: found[each.name] for each in fields(cls) if each.name in found and each.name not in _FIRST}
        columns, adds = tuple(found["columns"]), bool(found["adds"])
        return cls(found["operator"], found["table"], found["uri"], columns, adds, **newer)

    def __str__(self) -> str:
        return self.table if not self.uri else f"{self.table} of {self.uri}"


def notes_of(texts: Iterable[str | bytes]) -> tuple[Note, ...]:
    """Returns notes, but for those that were not written to the end, or by another version of Aion."""
    found = []
    for text in texts:
        with suppress(ValueError, KeyError, TypeError):
            found.append(Note.of(text))
    return tuple(found)


def written(note: Note) -> Sequence[str]:
    """Returns the columns that were written last."""
    return note.columns


def lacking(
    notes: Iterable[Note],
    operator: str,
    columns: Sequence[str],
    columns_of: Callable[[Note], Sequence[str]] = written,
) -> list[str]:
    """Says which tables lack columns that an operator will write. ``columns``: those that its result gets now; a query
    may leave out others on purpose. ``columns_of``: what a table has.
    """
    said = []
    for note in notes:
        there = columns_of(note)
        missing = [name for name in columns if name not in there]
        if note.operator not in (None, operator) or not missing:
            continue
        said.append(
            f"table {note} has no column {', '.join(map(repr, missing))}"
            + (
                "; its sink adds it with the first batch"
                if note.adds
                else ", so the first batch would fail: add it (ALTER TABLE) before, or give upsert add_columns=True"
            )
        )
    return said
