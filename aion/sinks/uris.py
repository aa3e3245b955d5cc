"""The kinds of databases, by their URIs."""

from __future__ import annotations

from urllib.parse import urlsplit

from aion.errors import ConfigError
from aion.sinks.database import Database


def kind_of(uri: str) -> type[Database]:
    """Returns the kind of database that a URI names. Raises ConfigError, or MissingExtra without its driver."""
    scheme = urlsplit(uri).scheme
    if scheme == "sqlite":
        from aion.sinks.sqlite import Sqlite

        return Sqlite
    if scheme in ("postgresql", "postgres"):
        from aion.sinks.postgresql import PostgreSQL

        return PostgreSQL
    if scheme == "duckdb":
        from aion.sinks.duckdb import DuckDB

        return DuckDB
    raise ConfigError(
        f"uri: {scheme or 'without a scheme'!r} is no database that upsert knows; write sqlite:///PATH, "
        "postgresql://USER@HOST/DATABASE or duckdb:///PATH"
    )
