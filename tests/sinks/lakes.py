"""Real tables of Delta Lake and Iceberg for tests."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa

import aion
from aion.sinks.merge import Merge

LAKES = ("delta", "iceberg")


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
        from pyiceberg.catalog import load_catalog

        with load_catalog(None, **self._options) as catalog:
            return catalog.load_table(f"tests.{table}")

    def content(self, table: str = "minutes") -> pa.Table:
        found = self.table(table)
        return found.to_pyarrow_table() if self.kind == "delta" else found.scan().to_arrow()

    def empty(self) -> None:
        self.table().delete()

    def delete(self) -> None:
        if self.kind == "delta":
            shutil.rmtree(self._folder / "minutes")
            return
        from pyiceberg.catalog import load_catalog

        with load_catalog(None, **self._options) as catalog:
            catalog.drop_table("tests.minutes")

    def rows(self, *columns: str, table: str = "minutes") -> list[tuple[Any, ...]]:
        content = self.content(table)
        return sorted(zip(*(content[name].to_pylist() for name in columns), strict=True), key=repr)
