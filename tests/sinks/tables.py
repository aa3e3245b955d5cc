"""Places for tables of every kind that a sink can write: databases and lakes alike."""

from __future__ import annotations

from typing import Any

import aion
from aion.sinks.sink import Sink
from tests.sinks.databases import Place
from tests.sinks.lakes import Lake


class Table:
    """A place for tables of a kind, and what they hold."""

    def __init__(self, kind: str, at: Lake | Place) -> None:
        self.kind, self.at = kind, at

    def sink(self, table: str = "minutes", **more: Any) -> Sink:
        if isinstance(self.at, Lake):
            if more.get("dropped") not in (None, "ignore"):
                more["dropped"] = self.at.name(more["dropped"])
            return self.at.sink(table, **more)
        return aion.sinks.upsert(self.at.uri, table, **more)

    def rows(self, *columns: str, table: str = "minutes") -> list[tuple[str | None, ...]]:
        """The rows as texts, in order."""
        if isinstance(self.at, Lake):
            found = self.at.rows(*columns, table=table)
        else:
            found = self.at.rows(table, *columns)
        return sorted((tuple(None if v is None else str(v) for v in row) for row in found), key=repr)

    def lose(self, how: str) -> None:
        """Empties or deletes the table, as a user does."""
        if isinstance(self.at, Place):
            self.at.run("DELETE FROM minutes" if how == "emptied" else "DROP TABLE minutes")
        elif how == "emptied":
            self.at.empty()
        else:
            self.at.delete()
