"""What all sinks are: functions for ``foreachBatch`` that know which rows of a batch a table needs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from aion.core.query.pane_columns import PaneColumns, metadata_of_field
from aion.core.query.sink_notes import Note
from aion.errors import ConfigError
from aion.sinks.addresses import Address, Secret, without_secrets
from aion.sinks.bad_values import Rule, checked
from aion.sinks.dropped import IGNORE, left_out
from aion.sinks.marks import Content, Goal, History, Mark, begins_late, is_new
from aion.sinks.notes import note
from aion.sinks.rows import Panes, TableChange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger(__name__)
_warned: set[tuple[str, History, str | None]] = set()
"""The tables and runs for which this process has said that events are left out."""


@dataclass(frozen=True)
class Sink(ABC):
    """A function for ``foreachBatch``.

    ``key``: the key columns that the user names, if any. ``adopt``: the mark with which a table is taken over.
    ``dropped``: the table for dropped rows, or IGNORE. ``on_bad_value``: what happens to a value that the table cannot
    hold. ``where``: which rows the table has, as a condition in Spark's SQL.
    """

    table: str
    key: tuple[str, ...] | None
    adopt: str | None
    dropped: Address | None
    on_bad_value: str
    where: str | None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Raises SchemaError if the rows do not fit into the table, SinkError if the batch does not follow its last."""
        from aion.sinks.frames import mark_of, panes_of
        from aion.spark.session.types import meant

        mark = mark_of(batch, batch_id)
        key = None if self.key is None else [meant(batch.sparkSession, batch.columns, name) for name in self.key]
        panes = Panes.of([(field.name, field.metadata) for field in batch.schema], key)
        columns = dict.fromkeys([*panes.written, panes.seq, *panes.dropped])
        rows = panes_of(batch, list(columns), as_json=not self.nested, where=self.where)
        self._apply(panes.change(rows), mark)
        meaning = PaneColumns.of([(field.name, field.metadata) for field in batch.schema])
        operator = None if meaning is None else meaning.said.name
        found = Note(operator, self.table, "", panes.written, False, dropped=self.dropped_table)
        note(batch, mark.history.checkpoint, self.described(found))

    @property
    def dropped_table(self) -> str | None:
        """The name of the table for dropped rows, if there is one."""
        return None if self.dropped is None or self.dropped.shown == IGNORE else self.dropped.shown

    @abstractmethod
    def described(self, note: Note) -> Note:
        """Returns a note of the table with what only this kind of sink knows. It has no secret."""

    def write(self, rows: pa.Table, mark: Mark) -> None:
        """Applies the panes of a batch, as :class:`aion.LocalOperator` returns them. Raises what a call raises."""
        if self.where is not None:
            raise ConfigError("where: it is a condition for Spark; leave it out here, and give the table a view")
        panes = Panes.of([(field.name, metadata_of_field(field)) for field in rows.schema], self.key)
        self._apply(panes.change(rows), mark)

    def _apply(self, change: TableChange, mark: Mark) -> None:
        dropped = change.dropped
        if self.dropped is None or self.dropped.shown == IGNORE:
            change = replace(change, dropped=None)
        without_secrets(self.secrets, lambda: self.apply(change, mark))
        whose = (self.table, mark.history, mark.run)
        if self.dropped is None and dropped is not None and dropped.num_rows and whose not in _warned:
            _warned.add(whose)
            _log.warning(left_out(self.table, dropped.num_rows, mark))

    def checked(self, change: TableChange, mark: Mark, rules: Sequence[Rule]) -> tuple[TableChange, Mark]:
        """Returns what is written of a batch, and a mark that says so. Raises SinkError for a value that breaks a rule,
        unless the user says what happens to it."""
        change, done = checked(change, rules, self.on_bad_value)
        for each in done:
            _log.warning("table %r, batch %d of %s: %s", self.table, mark.batch, mark.history, each)
        return change, replace(mark, digest=change.digest)

    def is_new(self, found: Mark | None, content: Content, now: Mark, stays: str | None = None) -> bool:
        """Returns whether a batch must be written. Raises SinkError if it must not. ``stays``: why the table did not
        go back with the query, if it had to."""
        if (warning := begins_late(self.table, found, content, now)) is not None:
            _log.warning(warning)
        return is_new(self.table, found, content, now, self.adopt, stays)

    @property
    @abstractmethod
    def secrets(self) -> tuple[Secret, ...]:
        """What no text of an error may show."""

    @property
    @abstractmethod
    def nested(self) -> bool:
        """Whether a column can hold lists, maps and structs. If not, they are written as JSON."""

    @abstractmethod
    def apply(self, change: TableChange, mark: Mark) -> None:
        """Changes the table, in one transaction, unless the mark says that it has the batch.

        If the query was set back, and the table has batches after that, it goes back first.
        """

    @abstractmethod
    def takes_back(self, history: History, goal: Goal) -> str | None:
        """Returns why the table cannot go back to the end of a batch of a query, as a sentence. It only reads.

        Returns None if it can, or has nothing to take back. Raises SinkError if the table cannot be reached.
        """

    @abstractmethod
    def go_back(self, history: History, goal: Goal) -> bool:
        """Makes the table and those beside it what they were after a batch of a query. Returns whether it had to.

        False: the table belongs to another query, has no later batch, or has followed this rewind already. Raises
        SinkError if it cannot go back, or if it cannot be reached; then nothing has changed.
        """


def names(key: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the key columns that a user names."""
    return (key,) if isinstance(key, str) else None if key is None else tuple(key)


def check_where(where: object) -> None:
    """Raises ConfigError for what is no condition."""
    if where is not None and (not isinstance(where, str) or not where.strip()):
        raise ConfigError(f"where: {where!r} is not a condition in SQL; give e.g. where='cars > 5'")
