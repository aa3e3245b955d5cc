"""File systems, a real S3 server, and hosts; everything is closed after the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.files.rig import Host, Place
from tests.object_store import ObjectStore, serving


@pytest.fixture(scope="package")
def port() -> Iterator[int]:
    with serving() as port:
        yield port


@pytest.fixture
def bucket(port: int) -> ObjectStore:
    return ObjectStore(port)


@pytest.fixture
def hosts(bucket: ObjectStore, tmp_path: Path) -> Iterator[Any]:
    made: list[Host] = []

    def host(uri: str | None = None, **options: Any) -> Host:
        made.append(Host(uri or bucket.uri("state"), tmp_path / f"host-{len(made)}", **options))
        return made[-1]

    yield host
    for each in made:
        each.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(kind: str = "renamed", bucket: ObjectStore | None = None) -> Place:
        places.append(Place(kind, tmp_path, bucket))
        return places[-1]

    yield make
    for place in places:
        place.close()


@pytest.fixture(params=["local", "renamed", "in memory", "bucket", "bucket without boto3"])
def place(request: pytest.FixtureRequest, make: Callable[..., Place], monkeypatch: pytest.MonkeyPatch) -> Place:
    """Every kind of storage."""
    if request.param == "bucket without boto3":
        monkeypatch.setitem(sys.modules, "boto3", None)
    in_bucket = request.param.startswith("bucket")
    return make(request.param, request.getfixturevalue("bucket") if in_bucket else None)
