"""From the note that a checkpoint has of a table to a sink that can make the table what it was after a batch."""

from __future__ import annotations

from aion.core.query.sink_notes import Note
from aion.errors import AionError, SinkError
from aion.sinks.merge import merge
from aion.sinks.sink import Sink
from aion.sinks.upsert import upsert


def of_note(note: Note) -> Sink:
    """Returns a sink for :meth:`~aion.sinks.sink.Sink.takes_back` and :meth:`~aion.sinks.sink.Sink.go_back`.

    A note has no password: that of the environment is used (``PGPASSWORD``, ``~/.pgpass``, ``AWS_...``). Raises
    SinkError for a note of an earlier version that does not say where the table is, or if the driver is not installed.
    """
    try:
        if note.uri:
            return upsert(note.connect or note.uri, note.table, changes=note.changes, dropped=note.dropped)
        if note.kind:
            return merge(note.kind, note.table, options=note.options, dropped=note.dropped)
    except AionError as error:
        raise SinkError(f"table {note}: {error}") from error
    raise SinkError(
        f"table {note}: the checkpoint does not say in which lake it is, because an earlier version of Aion wrote the "
        "note; the next batch of the query writes a new one"
    )
