"""Databases, one of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sinks.databases import KINDS, WITHOUT_SERVER, Place, place, server
from tests.sinks.lakes import LAKES, Lake, fresh_threads
from tests.sinks.tables import Table


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    with server() as uri:
        if uri is None:
            pytest.skip(WITHOUT_SERVER)
        yield uri


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A database of each kind; a test with it runs once for each."""
    kind = request.param
    return place(kind, tmp_path, request.getfixturevalue("postgresql") if kind == "postgresql" else None)


@pytest.fixture(params=[*KINDS, *LAKES])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Table]:
    """A place of each kind; pyiceberg keeps its threads otherwise."""
    kind = request.param
    if kind in LAKES:
        with fresh_threads(kind):
            yield Table(kind, Lake(kind, tmp_path))
    else:
        yield Table(
            kind, place(kind, tmp_path, request.getfixturevalue("postgresql") if kind == "postgresql" else None)
        )
