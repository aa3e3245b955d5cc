"""Closing leaves nothing behind."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aion
from aion.errors import ApplyError
from tests.local.seconds import applying, at, seconds_operator


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where LocalOperator puts its files in this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*.sst") if p.is_file()]


def eventually(condition: Callable[[], bool], seconds: float = 3.0) -> bool:
    """Whether what the I/O thread does in its own time comes about."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def test_closing_leaves_nothing(folder: Path) -> None:
    with seconds_operator(policy="disk_only") as operator:
        operator.process(pa.table({"ts": at(1, 11)}))
        assert eventually(lambda: bool(files(folder))), "it was on disk"
    assert list(folder.iterdir()) == []


def test_an_error_in_the_last_execution_leaves_nothing_either(folder: Path) -> None:
    def fails_later(key: tuple[Any, ...], window: aion.Window, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        if sum(batch.num_rows for batch in events) > 1:
            raise ValueError("not that many")
        return {"n": 1}

    operator = applying(fails_later)
    operator.process(pa.table({"ts": at(1)}))
    operator.advance(10_000_000)
    operator.process(pa.table({"ts": at(2)}))
    with pytest.raises(ApplyError, match="not that many"):
        operator.close()
    assert list(folder.iterdir()) == []


def test_state_that_nobody_needs_leaves_the_disk(folder: Path) -> None:
    with applying(
        lambda key, window, events: {"n": 0},
        policy={"state": {"backend": "rocksdb"}, "lateness": {"initial_bound": 0}},
    ) as operator:
        for i in range(10):
            operator.process(pa.table({"ts": at(10 * i + 1), "x": ["x" * 100_000]}))
            assert eventually(lambda: operator.store.stats().m_bucket_bytes == 0)
            operator.advance(10_000_000 * (i + 1))
        assert operator.store.stats().blocks == 0
        assert eventually(lambda: files(folder) == []), "files go while the operator runs"


def test_it_is_a_context_manager_that_closes_on_errors(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), seconds_operator() as operator:
        operator.process(pa.table({"ts": at(1)}))
        raise ZeroDivisionError
    assert list(folder.iterdir()) == []
