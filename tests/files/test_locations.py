"""Which storage a path or a URI means, and where a host keeps copies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aion.errors import StorageError
from state_backends.files.location import LocalLocation, RemoteLocation, locate, scratch


@pytest.mark.parametrize("text", ["{}", "file://{}", "file:{}"])
def test_a_path_is_local_however_it_is_written(tmp_path: Path, text: str) -> None:
    location = locate(text.format(tmp_path))
    assert isinstance(location, LocalLocation)
    assert location.live == tmp_path / ".live"
    storage = location.storage(["query", "tolls", "shard-00000"], tmp_path / "unused", "lineage")
    assert storage.files == tmp_path / "query" / "tolls" / "shard-00000" / "files"


def test_copies_lie_on_sparks_local_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/disk1/blockmgr-123,/mnt/disk2/blockmgr-456")
    location = locate("s3://bucket/state")
    assert isinstance(location, RemoteLocation)
    folder = tmp_path / "disk1" / f"aion-{os.getuid()}"
    assert location.live == folder / ".live"
    assert folder.stat().st_mode & 0o777 == 0o700
    location.close()
    assert not folder.exists()


def test_copies_lie_in_no_folder_that_others_can_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    folder = tmp_path / f"aion-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(StorageError, match=rf"{folder} must be a folder, not a link, that only this user can enter"):
        scratch()
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(StorageError, match=r"not a link"):
        scratch()
    folder.unlink()
    folder.write_text("in the way")
    with pytest.raises(StorageError, match="cannot make a folder for temporary files"):
        locate("s3://bucket/state")
