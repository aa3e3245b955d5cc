"""What a checkpoint knows of the tables of its query, so that ``aion diff`` can say which of them lack a column.

A sink notes it beside the checkpoint's logs: a file for each table, in the folder FOLDER, when its first batch has come
and when its columns change. A note is for people: a query works without it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from aion.errors import AionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FOLDER = "aion-sinks"
_noted: dict[tuple[str, str], str] = {}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Note:
    """``operator``: whose panes are written; None: the panes do not say. ``uri``: of the database, without a password;
    empty for a lake. ``columns``: those that were written. ``adds``: whether the sink adds columns to its table.
    """

    operator: str | None
    table: str
    uri: str
    columns: tuple[str, ...]
    adds: bool

    @classmethod
    def of(cls, text: str) -> Note:
        found: dict[str, Any] = json.loads(text)
        return cls(found["operator"], found["table"], found["uri"], tuple(found["columns"]), bool(found["adds"]))

    def __str__(self) -> str:
        return self.table if not self.uri else f"{self.table} of {self.uri}"

    def columns_now(self) -> tuple[str, ...]:
        """Returns the columns of the table; those that were written last if the table cannot be read from here."""
        from aion.sinks.database import TableName, file_of
        from aion.sinks.uris import kind_of

        try:
            if self.uri.startswith(("sqlite:", "duckdb:")) and not file_of(self.uri).exists():
                return self.columns  # to open it would make it
            with kind_of(self.uri).open(self.uri) as database:
                return tuple(database.columns(TableName.of(self.table))) or self.columns
        except (AionError, OSError):
            return self.columns


def without_secrets(uri: str) -> str:
    """Returns a URI without a password and without parameters."""
    return re.sub(r"(//[^/@:]*):[^/@]*@", r"\1@", uri.partition("?")[0])


def note(batch: DataFrame, checkpoint: str, found: Note) -> None:
    """Writes a note into the checkpoint of a query, if it is another one than the last."""
    from aion.spark.checkpoint_files import CheckpointFiles
    from aion.spark.sessions import is_remote

    text, name = json.dumps(asdict(found)), _name(found)
    if _noted.get((checkpoint, name)) == text or is_remote(batch.sparkSession) or not checkpoint:
        return
    try:
        CheckpointFiles(batch.sparkSession, checkpoint).write(f"{FOLDER}/{name}", text)
    except Exception as error:  # of Java, too
        log.warning("the table %s is not noted in the checkpoint, so aion diff does not know of it: %s", found, error)
    _noted[checkpoint, name] = text


def _name(found: Note) -> str:
    return hashlib.sha256(f"{found.uri} {found.table}".encode()).hexdigest()[:16] + ".json"


def lacking(notes: Iterable[Note], operator: str, new: Sequence[str], before: Sequence[str]) -> list[str]:
    """Says which tables lack columns that an operator will write. ``new``: its result columns. ``before``: those that
    it has had, which a query may leave out on purpose.
    """
    said = []
    for found in notes:
        if found.operator not in (None, operator):
            continue
        there = found.columns_now()
        missing = [name for name in new if name not in there and name not in before]
        if not missing:
            continue
        columns = ", ".join(map(repr, missing))
        said.append(
            f"table {found} has no column {columns}; its sink adds it with the first batch"
            if found.adds
            else f"table {found} has no column {columns}, so the first batch would fail: add it (ALTER TABLE) before, "
            "or give upsert add_columns=True"
        )
    return said
