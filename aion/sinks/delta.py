"""Delta Lake, through deltalake. The mark is in the commit: application transactions, and the query as metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from aion.errors import SchemaError, needs_extra
from aion.sinks.addresses import Address
from aion.sinks.bad_values import UTF8, YEARS_1_TO_9999, Rule, empty
from aion.sinks.lake import Conflict, Places, plain
from aion.sinks.marks import History, Mark
from aion.sinks.versions import BATCH, CHECKPOINT, LAST, QUERY, Base, Commit, batch_of, said

with needs_extra("delta", "a sink in Delta Lake"):
    import deltalake
    from deltalake.exceptions import CommitFailedError, DeltaError
    from deltalake.fs import DeltaStorageHandler

_HISTORY, _RUN, _DIGEST, _FILLED, _REWOUND = "aion.history", "aion.run", "aion.digest", "aion.filled", "aion.rewound"
_UNKNOWN = -1
_NAME = "aion_table"
_GENERATED = "delta.generationExpression"
_IDENTITY_COLUMNS = 6
"""The version of the protocol that has them; deltalake refuses it."""
_WRITTEN = {
    "appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "generatedColumns", "invariants",
    "timestampNtz", "v2Checkpoint",
}  # fmt: skip
"""The features of tables that deltalake writes, as tests show."""
_INSTEAD = {
    "deletionVectors": "set delta.enableDeletionVectors=false, run REORG TABLE ... APPLY (PURGE), and drop the feature"
}
_CONFLICT = re.compile("concurrent|changed since last commit|failed to commit transaction", re.IGNORECASE)
_LAST_COMMITS = 1_000
_OTHERS = 10
"""How many commits of others there may be for each of ours."""


class Delta:
    """A version of a table."""

    case: ClassVar[bool] = False

    def __init__(self, table: str, options: Mapping[str, str]) -> None:
        self._uri, self._shown = table, str(Address.of(table))
        self._options = dict(options)
        self._table: Any = None
        if deltalake.DeltaTable.is_deltatable(table, self._options):
            self._table = deltalake.DeltaTable(table, storage_options=self._options)
            self._check()

    def _check(self) -> None:
        """Raises SchemaError if the engine does not write such tables, or not rightly."""
        protocol, settings = self._table.protocol(), self._table.metadata().configuration
        features = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
        if protocol.min_writer_version == _IDENTITY_COLUMNS:
            features.add("identityColumns")
        for feature in sorted(features - _WRITTEN):
            raise SchemaError(
                f"table {self._shown!r} has the Delta feature {feature!r}, and deltalake does not write such tables "
                f"rightly; {_INSTEAD.get(feature, 'drop the feature')}, or use another table"
            )
        if settings.get("delta.appendOnly") == "true":
            raise SchemaError(
                f"table {self._shown!r} has delta.appendOnly=true, and newer panes replace older ones; set it to "
                "false, or use another table"
            )

    def columns(self) -> pa.Schema | None:
        return None if self._table is None else plain(pa.schema(self._table.schema().to_arrow()))

    def create(self, schema: pa.Schema) -> None:
        self._table = deltalake.DeltaTable.create(self._uri, schema, storage_options=self._options)

    def rules(self) -> Sequence[Rule]:
        return (UTF8, YEARS_1_TO_9999, empty(self._table.metadata().partition_columns))

    def count(self) -> int:
        return int(self._table.count())

    def mark(self, now: Mark) -> Mark | None:
        batch, number, run, digest, filled, rewound = map(
            self._table.transaction_version, (BATCH, _HISTORY, _RUN, _DIGEST, _FILLED, _REWOUND)
        )
        if batch is None or number is None:
            return None
        history = now.history if number == _number(now.history.digest) else self._other(number)
        full = None if filled is None else bool(filled)
        return Mark(history, batch, run=_text(run), digest=_text(digest), filled=full, rewound=_text(rewound))

    def _other(self, number: int) -> History:
        """Returns the query of the last commit with a mark. Old commits are cleaned up, and then only its number is
        left."""
        for commit in self._table.history(_LAST_COMMITS):
            if QUERY in commit:
                return History(commit[QUERY], commit[CHECKPOINT])
        return History(_text(number) or "", "")

    @property
    def computed(self) -> set[str]:
        return {field.name for field in self._table.schema().fields if _GENERATED in field.metadata}

    def read(self, places: Places) -> pa.Table:
        """Reads with the engine that writes. Another one sees nulls where columns are mapped to other names."""
        sql = f"SELECT * FROM {_NAME} WHERE {_where(places)}"
        return pa.table(deltalake.QueryBuilder().register(_NAME, self._table).execute(sql).read_all())

    def overwrite(self, places: Places, rows: pa.Table, mark: Mark, last: str | None = None) -> None:
        mode, where = ("overwrite", _where(places)) if places.values else ("append", None)
        commit = _properties(mark, last)
        with _conflicts():
            deltalake.write_deltalake(self._table, rows, mode=mode, predicate=where, commit_properties=commit)

    def commits(self, history: History, batches: int) -> Iterator[Commit]:
        for info in self._table.history(_LAST_COMMITS + _OTHERS * batches):
            version, batch = int(info["version"]), batch_of(info, history)
            what = f"{info.get('operation', 'a commit')}, version {version}"
            changes = batch is None and self._changes(version)
            yield Commit(version - 1, what, batch, info.get(LAST), changes)

    def _changes(self, version: int) -> bool:
        """Returns whether a commit of somebody else changed rows, columns or settings of the table, or may have."""
        try:
            with self._files().open_input_file(f"_delta_log/{version:020}.json") as file:
                actions = [json.loads(line) for line in file.read().splitlines() if line.strip()]
        except FileNotFoundError:
            return True
        for action in actions:
            if "metaData" in action or "protocol" in action:
                return True
            if any(action[kind].get("dataChange", True) for kind in ("add", "remove") if kind in action):
                return True
        return False

    def _files(self) -> pafs.FileSystem:
        return pafs.PyFileSystem(DeltaStorageHandler(self._table.table_uri, self._options))

    def _at(self, version: int) -> Any:
        return deltalake.DeltaTable(self._uri, version=version, storage_options=self._options)

    def missing(self, version: int) -> str | None:
        try:
            then = self._at(version)
        except DeltaError:
            return f"the log of its version {version} has been cleaned up"
        paths = sorted(_paths(then) - _paths(self._table))
        found = self._files().get_file_info(paths) if paths else []
        if any(info.type == pafs.FileType.NotFound for info in found):
            return f"files of its version {version} have been vacuumed"
        return None

    def count_at(self, version: int) -> int:
        return int(self._at(version).count())

    def restore(self, base: Base, mark: Mark, last: str) -> None:
        commit = _properties(mark, last)
        with _conflicts():
            if base.version is not None:
                self._table.restore(base.version, commit_properties=commit)
                return
            rows = pa.schema(self._table.schema().to_arrow()).empty_table()
            mode, where = ("overwrite", "true") if base.empty else ("append", None)
            deltalake.write_deltalake(self._table, rows, mode=mode, predicate=where, commit_properties=commit)

    def close(self) -> None:
        """There is no connection."""


def _properties(mark: Mark, last: str | None) -> deltalake.CommitProperties:
    numbers = {
        BATCH: mark.batch,
        _HISTORY: _number(mark.history.digest),
        _RUN: _number(mark.run),
        _DIGEST: _number(mark.digest),
        _FILLED: int(bool(mark.filled)),
        _REWOUND: _number(mark.rewound),
    }
    return deltalake.CommitProperties(
        custom_metadata=said(mark, last),
        app_transactions=[deltalake.Transaction(name, number) for name, number in numbers.items()],
    )


@contextmanager
def _conflicts() -> Iterator[None]:
    try:
        yield
    except CommitFailedError as error:
        if _CONFLICT.search(str(error)):
            raise Conflict(str(error)) from error
        raise


def _paths(table: Any) -> set[str]:
    """Returns the files of a version. The log has their paths as URLs."""
    return {unquote(path) for path in pa.table(table.get_add_actions())["path"].to_pylist()}


def _where(places: Places) -> str:
    column, texts = '"' + places.column.replace('"', '""') + '"', [_literal(value) for value in places.values]
    if places.between:
        return f"{column} >= {texts[0]} AND {column} <= {texts[1]}"
    if not texts:
        return "false"
    return f"{column} IN ({', '.join(texts)})"


def _literal(value: datetime | int) -> str:
    if isinstance(value, int):
        return str(value)
    if value.tzinfo is None:
        return f"'{value:%Y-%m-%d %H:%M:%S.%f}'"
    return f"'{value.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}Z'"


def _number(digest: str | None) -> int:
    """An application transaction has a number, and no text."""
    return _UNKNOWN if digest is None else int(digest, 16)


def _text(number: int | None) -> str | None:
    return None if number in (None, _UNKNOWN) else f"{number:012x}"
