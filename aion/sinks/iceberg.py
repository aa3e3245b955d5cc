"""Iceberg, through pyiceberg. The mark is in properties of the table, which change in the same commit as its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import groupby
from typing import Any, ClassVar

import pyarrow as pa

from aion.errors import ConfigError, SchemaError, needs_extra
from aion.sinks.bad_values import UTF8, YEARS_1_TO_9999, Rule
from aion.sinks.lake import Conflict, Places, plain
from aion.sinks.marks import History, Mark
from aion.sinks.versions import BATCH, CHECKPOINT, LAST, QUERY, Base, Commit, batch_of, said

with needs_extra("iceberg", "a sink in Iceberg"):
    import pyiceberg_core  # noqa: F401 (pyiceberg needs it for tables that are partitioned by time or bucket)
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import CommitFailedException, ValidationException
    from pyiceberg.expressions import AlwaysTrue, And, GreaterThanOrEqual, In, LessThanOrEqual
    from pyiceberg.table.snapshots import Operation, ancestors_of
    from pyiceberg.table.update.snapshot import ManageSnapshots

_WRITTEN = 2
_RUN, _DIGEST, _FILLED, _REWOUND = "aion.run", "aion.digest", "aion.filled", "aion.rewound"


class Iceberg:
    """A snapshot of a table."""

    case: ClassVar[bool] = True

    def __init__(self, table: str, options: Mapping[str, str]) -> None:
        if "." not in table:
            raise ConfigError(f"table: {table!r} is no table of a catalog; write 'namespace.table'")
        properties = dict(options)
        self._name = table
        self._catalog: Any = load_catalog(properties.pop("catalog", None), **properties)
        self._table: Any = self._catalog.load_table(table) if self._catalog.table_exists(table) else None
        if self._table is not None and self._table.metadata.format_version > _WRITTEN:
            raise SchemaError(
                f"table {table!r} has version {self._table.metadata.format_version} of the Iceberg format, and "
                f"pyiceberg writes tables up to version {_WRITTEN}; make one of that version (format-version)"
            )

    def columns(self) -> pa.Schema | None:
        return None if self._table is None else plain(self._table.schema().as_arrow())

    def create(self, schema: pa.Schema) -> None:
        self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
        self._table = self._catalog.create_table(self._name, schema=schema)

    def rules(self) -> Sequence[Rule]:
        return (UTF8, YEARS_1_TO_9999)

    def count(self) -> int:
        return int(self._table.scan().count())

    def mark(self, now: Mark) -> Mark | None:
        found = self._table.properties
        if BATCH not in found:
            return None
        filled = {"true": True, "false": False}.get(found.get(_FILLED, ""))
        history, batch = History(found[QUERY], found[CHECKPOINT]), int(found[BATCH])
        run, digest, rewound = map(found.get, (_RUN, _DIGEST, _REWOUND))
        return Mark(history, batch, run=run, digest=digest, filled=filled, rewound=rewound)

    @property
    def computed(self) -> set[str]:
        return set()

    def read(self, places: Places) -> pa.Table:
        return self._table.scan(row_filter=_filter(places)).to_arrow()

    def overwrite(self, places: Places, rows: pa.Table, mark: Mark, last: str | None = None) -> None:
        with self._commit(mark) as transaction:
            if places.values:
                transaction.overwrite(rows, overwrite_filter=_filter(places), snapshot_properties=said(mark, last))

    def commits(self, history: History, batches: int) -> Iterator[Commit]:
        """Yields the snapshots that lead to the table. One commit may have made several of them."""
        metadata = self._table.metadata
        for of, group in groupby(ancestors_of(metadata.current_snapshot(), metadata), _said):
            snapshots, words = list(group), {name: text for name, text in of if text is not None}
            others = [s for s in snapshots if s.summary is None or s.summary.operation is not Operation.REPLACE]
            newest = (others or snapshots)[0]
            what = f"{'a commit' if newest.summary is None else newest.summary.operation.value}, snapshot "
            yield Commit(
                snapshots[-1].parent_snapshot_id, f"{what}{newest.snapshot_id}", batch_of(words, history),
                words.get(LAST), bool(others),
            )  # fmt: skip

    def missing(self, version: int) -> str | None:
        there = self._table.metadata.snapshot_by_id(version)
        return None if there is not None else f"its snapshot {version} has expired"

    def count_at(self, version: int) -> int:
        return int(self._table.scan(snapshot_id=version).count())

    def restore(self, base: Base, mark: Mark, last: str) -> None:
        with self._commit(mark) as transaction:
            if base.version is not None:
                ManageSnapshots(transaction).set_current_snapshot(snapshot_id=base.version)
            elif base.empty and self._table.metadata.current_snapshot() is not None:
                transaction.delete(AlwaysTrue(), snapshot_properties=said(mark, last))

    @contextmanager
    def _commit(self, mark: Mark) -> Iterator[Any]:
        """Opens a transaction that also replaces the mark. Raises Conflict."""
        properties = said(mark, None) | {_FILLED: str(bool(mark.filled)).lower()}
        others = ((_RUN, mark.run), (_DIGEST, mark.digest), (_REWOUND, mark.rewound))
        properties |= {name: text for name, text in others if text is not None}
        try:
            with self._table.transaction() as transaction:
                yield transaction
                if unknown := {name for name, _ in others} & self._table.properties.keys() - properties.keys():
                    transaction.remove_properties(*unknown)
                transaction.set_properties(properties)
        except (CommitFailedException, ValidationException) as error:
            raise Conflict(str(error)) from error

    def close(self) -> None:
        self._catalog.close()


def _said(snapshot: Any) -> tuple[tuple[str, str | None], ...]:
    """Returns what a snapshot says of its batch."""
    properties = {} if snapshot.summary is None else snapshot.summary.additional_properties
    return tuple((name, properties.get(name)) for name in (QUERY, CHECKPOINT, BATCH, LAST))


def _filter(places: Places) -> Any:
    values = [v.isoformat(timespec="microseconds") if isinstance(v, datetime) else v for v in places.values]
    if places.between:
        return And(GreaterThanOrEqual(places.column, values[0]), LessThanOrEqual(places.column, values[1]))
    return In(places.column, values)
