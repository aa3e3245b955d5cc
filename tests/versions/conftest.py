"""Hosts that are stopped after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.versions.host import KINDS, Host


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make(kind: str = "tiered", **options: Any) -> Host:
        hosts.append(Host(kind, tmp_path / str(len(hosts)), **options))
        return hosts[-1]

    yield make
    for host in hosts:
        host.stop()
        assert not (host.folder / "live").exists()


@pytest.fixture
def host(make: Callable[..., Host], kind: str) -> Host:
    return make(kind)
