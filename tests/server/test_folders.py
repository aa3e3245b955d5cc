"""The folders of a state server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from state_backends.files.location import LocalLocation
from state_backends.files.requests import Requests
from state_backends.format.errors import StorageError
from state_backends.server import folders
from state_backends.server.folders import Folders
from tests.versions.host import IDENTITY


def test_each_shard_has_a_folder_of_shared_memory_that_goes_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "shared_memory", lambda: tmp_path / "shm")
    found = Folders(lambda state_dir: LocalLocation(Path(state_dir)))
    staged = [found.of(str(tmp_path / "state"), replace(IDENTITY, shard=n), Requests(), 0, None).staged for n in (0, 1)]
    assert len({*staged}) == 2 and all(path is not None and (tmp_path / "shm") in path.parents for path in staged)
    found.close()
    assert not (tmp_path / "shm").exists()


@pytest.mark.parametrize("fault", ["no room", "not ours"])
def test_without_shared_memory_shards_are_opened_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    def shared_memory() -> Path:
        if fault == "not ours":
            raise StorageError("/dev/shm/aion-0 must be a folder that only this user can enter")
        (tmp_path / "shm").write_text("in the way")
        return tmp_path / "shm"

    monkeypatch.setattr(folders, "shared_memory", shared_memory)
    found = Folders(lambda state_dir: LocalLocation(Path(state_dir)))
    for shard in (0, 1):
        assert found.of(str(tmp_path / "state"), replace(IDENTITY, shard=shard), Requests(), 0, None).staged is None
    assert len([r for r in caplog.records if "are not staged, but read when they are needed" in r.message]) == 1
    found.close()
