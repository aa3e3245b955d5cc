"""Real databases for tests: files of SQLite and DuckDB, and a PostgreSQL server of the tests' own."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("sqlite", "postgresql", "duckdb")
WITHOUT_SERVER = "no PostgreSQL server is installed: initdb is neither on PATH nor in /usr/lib/postgresql"


@dataclass(frozen=True)
class Place:
    """A database, and how a test looks into it."""

    kind: str
    uri: str

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        """Runs one statement with the database's own driver, and commits."""
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.uri.removeprefix("sqlite:///"))) as db, db:
                return db.execute(sql).fetchall()
        if self.kind == "duckdb":
            import duckdb

            with duckdb.connect(self.uri.removeprefix("duckdb:///")) as db:
                db.execute("SET TimeZone = 'UTC'")
                return db.execute(sql).fetchall()
        import adbc_driver_postgresql.dbapi as adbc

        with adbc.connect(self.uri) as db, db.cursor() as cursor:
            cursor.execute(sql)
            rows = list(cursor.fetchall()) if cursor.description else []
            db.commit()
            return rows

    def rows(self, table: str, *columns: str) -> list[tuple[str, ...]]:
        """The rows as texts, in order."""
        texts = [f"CAST({column} AS {'varchar' if self.kind == 'duckdb' else 'text'})" for column in columns]
        return sorted(self.run(f"SELECT {', '.join(texts)} FROM {table}"), key=repr)


@contextmanager
def server() -> Iterator[str | None]:
    """Starts a PostgreSQL server on a unix socket; its URI. None: there is no such program.

    It refuses to run as root, so then another user runs it.
    """
    programs = [
        shutil.which("initdb"),
        *sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")), reverse=True),
    ]
    found = next((Path(program).resolve().parent for program in programs if program), None)
    if found is None:
        yield None
        return
    user: dict[str, Any] = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path must be short
    try:
        if user:
            shutil.chown(folder, user["user"], user["group"])
        data = folder / "data"
        quiet: dict[str, Any] = {"check": True, "stdout": subprocess.DEVNULL, "cwd": folder, **user}
        subprocess.run([found / "initdb", "-D", data, "-A", "trust", "-U", "tests", "-N", "-E", "UTF8"], **quiet)
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        subprocess.run([found / "pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", options, "start"], **quiet)
        try:
            yield f"postgresql://tests@/postgres?host={folder}"
        finally:
            subprocess.run([found / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop"], **quiet)
    finally:
        shutil.rmtree(folder)


def place(kind: str, folder: Path, server: str | None) -> Place:
    """An empty database, or on the server an empty schema that comes first."""
    if kind != "postgresql":
        return Place(kind, f"{kind}:///{folder / kind}")
    assert server is not None
    schema = f"schema_{uuid.uuid4().hex[:12]}"
    own = Place(kind, f"{server}&options=-csearch_path%3D{schema}")
    own.run(f"CREATE SCHEMA {schema}")
    return own
