"""Databases, one of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sinks.databases import KINDS, WITHOUT_SERVER, Place, place, server


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
