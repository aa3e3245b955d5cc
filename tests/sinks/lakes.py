"""Real tables of Delta Lake and Iceberg for tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import aion
from aion.sinks.lake import plain
from aion.sinks.merge import Merge

LAKES = ("delta", "iceberg")


@contextmanager
def fresh_threads(kind: str) -> Iterator[None]:
    """A context at whose end no threads are left; pyiceberg keeps its own otherwise."""
    yield
    if kind == "iceberg":
        from pyiceberg.utils.concurrent import ExecutorFactory

        ExecutorFactory.get_or_create().shutdown()
        ExecutorFactory._instance = None


class Lake:
    """A place for tables, and what they hold."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self._options = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}

    def sink(self, table: str = "minutes", **more: Any) -> Merge:
        options = self._options if self.kind == "iceberg" else None
        return aion.sinks.merge(self.kind, self.name(table), options=options, **more)

    def name(self, table: str) -> str:
        return str(self._folder / table) if self.kind == "delta" else f"tests.{table}"

    def table(self, table: str = "minutes") -> Any:
        if self.kind == "delta":
            from deltalake import DeltaTable

            return DeltaTable(str(self._folder / table))
        with self.catalog() as catalog:
            return catalog.load_table(f"tests.{table}")

    def exists(self, table: str) -> bool:
        if self.kind == "delta":
            return (self._folder / table).exists()
        with self.catalog() as catalog:
            return bool(catalog.table_exists(f"tests.{table}"))

    def catalog(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return load_catalog(None, **self._options)

    @property
    def options(self) -> dict[str, str]:
        return self._options if self.kind == "iceberg" else {}

    def put(self, rows: pa.Table, by: str | None = None, table: str = "minutes") -> None:
        """Appends, also columns that the table does not have. Makes the table if there is none, in partitions."""
        if self.kind == "delta":
            from deltalake import write_deltalake

            how: dict[str, Any] = {"partition_by": by} if by else {}
            write_deltalake(self.name(table), rows, mode="append", schema_mode="merge", **how)
            return
        with self.catalog() as catalog:
            catalog.create_namespace_if_not_exists("tests")
            made = catalog.create_table_if_not_exists(self.name(table), rows.schema)
            with made.update_schema() as update:
                update.union_by_name(rows.schema)
            if by and not made.spec().fields:
                with made.update_spec() as spec:
                    spec.add_identity(by)
            made.append(rows)

    def append(self, rows: pa.Table) -> None:
        if self.kind == "delta":
            from deltalake import write_deltalake

            write_deltalake(self.table(), rows, mode="append")
        else:
            self.table().append(rows)

    def set(self, properties: dict[str, str]) -> None:
        if self.kind == "delta":
            self.table().alter.set_table_properties(properties)
            return
        with self.table().transaction() as transaction:
            transaction.set_properties(properties)

    def content(self, table: str = "minutes") -> pa.Table:
        found = self.table(table)
        if self.kind == "iceberg":
            return found.scan().to_arrow()
        from deltalake import QueryBuilder

        rows = pa.table(QueryBuilder().register("t", found).execute("SELECT * FROM t").read_all())
        return rows.cast(plain(pa.schema(found.schema().to_arrow())))

    def empty(self) -> None:
        self.table().delete()

    def delete(self) -> None:
        if self.kind == "delta":
            shutil.rmtree(self._folder / "minutes")
            return
        with self.catalog() as catalog:
            catalog.drop_table("tests.minutes")

    def rows(self, *columns: str, table: str = "minutes") -> list[tuple[Any, ...]]:
        content = self.content(table)
        return sorted(zip(*(content[name].to_pylist() for name in columns), strict=True), key=repr)
