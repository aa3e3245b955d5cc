"""Notes in a checkpoint of the tables that its query writes to (:mod:`aion.core.query.sink_notes`)."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from aion.core.query.sink_notes import FOLDER, Note
from aion.errors import AionError
from aion.sinks.addresses import Address

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_noted: dict[tuple[str, str], str] = {}
log = logging.getLogger(__name__)


def columns_now(note: Note) -> Sequence[str]:
    """Returns the columns of a table; those that were written last if the table cannot be read from here."""
    from aion.sinks.database import TableName, file_of
    from aion.sinks.uris import kind_of

    address = Address.of(note.connect or note.uri)
    try:
        if address.scheme in ("sqlite", "duckdb") and not file_of(address).exists():
            return note.columns  # to open it would make it
        with kind_of(address).open(address) as database:
            return tuple(database.columns(TableName.of(note.table))) or note.columns
    except (AionError, OSError):
        return note.columns


def note(batch: DataFrame, checkpoint: str, found: Note) -> None:
    """Writes a note into the checkpoint of a query, if it is another one than the last."""
    from aion.spark.session.checkpoint_files import CheckpointFiles
    from aion.spark.session.sessions import is_remote

    text, name = json.dumps(asdict(found)), _name(found)
    if _noted.get((checkpoint, name)) == text or is_remote(batch.sparkSession) or not checkpoint:
        return
    try:
        CheckpointFiles(batch.sparkSession, checkpoint).write(f"{FOLDER}/{name}", text)
    except Exception as error:  # of Java, too
        log.warning(
            "the table %s is not noted in the checkpoint, so aion diff and aion rewind do not know of it: %s",
            found,
            error,
        )
    _noted[checkpoint, name] = text


def _name(found: Note) -> str:
    return hashlib.sha256(f"{found.uri} {found.table}".encode()).hexdigest()[:16] + ".json"
