"""Stores that are closed, and looked over, after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from state_backends.backends import STORES
from tests.stores.rig import Rig


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes rigs that are closed, and looked over, after the test."""
    rigs: list[Rig] = []

    def make(kind: str, **options: Any) -> Rig:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        rigs.append(Rig(kind, folder, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.settle()
        rig.validate()
        rig.close()


@pytest.fixture
def rig(make: Callable[..., Rig], kind: str) -> Rig:
    return make(kind)
