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
