"""The kinds of databases, by their URIs."""

from __future__ import annotations

from contextlib import AbstractContextManager

from aion.errors import ConfigError
from aion.sinks.addresses import Address
from aion.sinks.database import Database


def kind_of(address: Address) -> type[Database]:
    """Returns the kind of database that a URI names. Raises ConfigError, or MissingExtra without its driver."""
    scheme = address.scheme
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


def opened(uri: str) -> AbstractContextManager[Database]:
    """Returns a transaction on the database of a URI. Raises what :func:`kind_of` raises."""
    address = Address.of(uri)
    return kind_of(address).open(address)
