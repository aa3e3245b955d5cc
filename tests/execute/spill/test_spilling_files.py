"""The files of a window too large for memory go when they are no longer needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aion.errors import ApplyError
from aion.execute.panes.applying import apply_window
from aion.execute.spill.spilling import Room
from state_backends.store.protocol import StoredBlock
from tests.spilled import block_of, digest, execute, files_in, plan_of, rows_of, spilled


def test_files_are_gone_when_all_is_read(tmp_path: Path) -> None:
    during: list[int] = []

    def apply(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
        during.append(len(files_in(tmp_path)))
        return digest(key, window, events)

    assert len(rows_of(spilled(apply, tmp_path))) == 60
    assert during[0] > 1
    # It lets go of one file after the other.
    assert during[-1] < during[0]
    assert files_in(tmp_path) == []


def test_files_are_gone_when_the_function_raises(tmp_path: Path) -> None:
    def apply(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
        next(events)
        raise ZeroDivisionError("mine")

    with pytest.raises(ApplyError, match="ZeroDivisionError: mine"):
        list(spilled(apply, tmp_path))
    assert files_in(tmp_path) == []


def test_files_are_gone_when_nobody_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aion.execute.panes.applying.ROWS_AT_ONCE", 1)
    panes = spilled(digest, tmp_path)
    next(panes)
    assert files_in(tmp_path) != []
    panes.close()  # type: ignore[attr-defined]
    assert files_in(tmp_path) == []


def test_files_are_gone_when_a_block_cannot_be_read(tmp_path: Path) -> None:
    def stored() -> Iterator[StoredBlock]:
        for i in range(3):
            yield StoredBlock(i, block_of([1, 2, 3] * 100, range(300)))
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        list(apply_window(plan_of(digest), execute(3), stored(), room=Room(9000, str(tmp_path))))
    assert files_in(tmp_path) == []


def test_a_full_disk_is_an_error_and_no_wrong_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = []

    def open_full(**_: object) -> Any:
        full.append(Path("/dev/full").open("w+b"))  # noqa: SIM115
        return full[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", open_full)
    with pytest.raises(OSError, match="No space left"):
        list(spilled(digest, tmp_path))
    assert full


@pytest.mark.usual_sizes
def test_windows_that_fit_use_no_files(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    stored = [StoredBlock(0, block_of([i % 6 for i in range(100)], range(100)))]
    rows = rows_of(apply_window(plan_of(digest), execute(1), iter(stored), room=Room(folder=str(missing))))
    assert len(rows) == 6
    with pytest.raises(FileNotFoundError):
        list(apply_window(plan_of(digest), execute(1), iter(stored), room=Room(9, str(missing))))
