"""The tables of a query that goes back. Notes in its checkpoint say which they are, and sinks can take them back."""

from __future__ import annotations

from collections.abc import Container, Sequence

from aion.core.query.sink_notes import Note
from aion.errors import AionError, SinkError
from aion.sinks.marks import Goal, History
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
        raise SinkError(f"table {note}: {error}") from error.__cause__
    raise SinkError(
        f"table {note}: the checkpoint does not say in which lake it is, because an earlier version of Aion wrote the "
        "note; the next batch of the query writes a new one"
    )


class Tables:
    """The tables that a query has noted. ``batch``: to whose end they go back. ``rewind``: the name of that order."""

    def __init__(self, notes: Sequence[Note], query: str, checkpoint: str, batch: int, rewind: str) -> None:
        self._notes = notes
        self._history, self._goal = History(query, checkpoint), Goal(batch, rewind)

    def reasons(self) -> dict[str, str]:
        """Returns why tables cannot go back, by table, as sentences. It only reads."""
        found = {}
        for note in self._notes:
            try:
                reason = of_note(note).takes_back(self._history, self._goal)
            except SinkError as error:
                can = note.undo is not None or not note.uri
                later = "; it goes back when its sink gets its next batch" if can else ""
                reason = f"it cannot be reached from here ({error}){later}"
            if reason is not None:
                found[str(note)] = reason
        return found

    def go_back(self, *, besides: Container[str]) -> None:
        """Takes all tables back but some. A table that has gone back already stays as it is. Raises SinkError."""
        for note in self._notes:
            if str(note) not in besides:
                of_note(note).go_back(self._history, self._goal)
