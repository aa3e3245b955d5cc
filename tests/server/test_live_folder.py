"""Folders that go with their server, on places that other hosts and containers may have mounted as well."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from state_backends.server import live_folder, processes
from state_backends.server.live_folder import ABANDONED_SECONDS, LOCK, LiveFolder, own_name, sweep


def test_one_is_made_with_its_lock_and_removed_with_its_parent(tmp_path: Path) -> None:
    folder = LiveFolder(tmp_path / ".live", own_name())
    assert folder.path.parent == tmp_path / ".live"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    sweep(tmp_path / ".live")
    assert folder.path.is_dir()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_that_of_a_dead_process_is_swept(tmp_path: Path) -> None:
    me = processes.me()
    dead = me._replace(started=me.started - 1)  # whose number is ours now
    for name in (f"{live_folder._host()}-{dead}", f".{live_folder._host()}-{dead}"):
        folder = tmp_path / name
        (folder / "rocksdb").mkdir(parents=True)
        (folder / LOCK).touch()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


FOREIGN = ["otherhost-{me}", "{host}-{pid}-{started}-1", "{pid}-1700000000000"]


@pytest.mark.parametrize("name", FOREIGN, ids=["another host's", "another container's", "an older version's"])
def test_what_cannot_be_judged_from_here_is_left_for_a_day(tmp_path: Path, name: str) -> None:
    me = processes.me()
    folder = tmp_path / name.format(me=me, host=live_folder._host(), pid=me.pid, started=me.started)
    folder.mkdir()
    (folder / LOCK).touch()
    sweep(tmp_path)
    assert folder.is_dir()
    touched_s = (folder / LOCK).stat().st_mtime
    sweep(tmp_path, touched_s + ABANDONED_SECONDS - 1)
    assert folder.is_dir()
    sweep(tmp_path, touched_s + ABANDONED_SECONDS + 1)
    assert not folder.exists()


def test_one_whose_lock_is_held_is_never_swept(tmp_path: Path) -> None:
    """As by a server in another container of this host, whose processes cannot be seen from here."""
    script = (
        "import sys; from pathlib import Path; from state_backends.server.live_folder import LiveFolder\n"
        "held = LiveFolder(Path(sys.argv[1]), 'otherhost-1-2-3'); print(flush=True); input()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin is not None and holder.stdout is not None
    with holder.stdin, holder.stdout:
        holder.stdout.readline()
        (folder,) = tmp_path.iterdir()
        os.utime(folder / LOCK, (0, 0))
        sweep(tmp_path)
        assert folder.is_dir()
        holder.kill()
        holder.wait()
    sweep(tmp_path)
    assert not folder.exists()


def test_touching_says_that_it_is_still_there(tmp_path: Path) -> None:
    folder = LiveFolder(tmp_path, own_name())
    os.utime(folder.path / LOCK, (0, 0))
    folder.touch()
    assert (folder.path / LOCK).stat().st_mtime > 0
    folder.close()


def test_one_that_was_removed_while_its_server_lives_is_locked_again(tmp_path: Path) -> None:
    folder = LiveFolder(tmp_path / ".live", own_name())
    shutil.rmtree(tmp_path / ".live")
    (folder.path / "shard").mkdir(parents=True)  # the server goes on working there
    folder.touch()
    assert not live_folder._is_free(folder.path / LOCK)
    sweep(tmp_path / ".live")
    assert (folder.path / "shard").is_dir()
    folder.close()
    assert list(tmp_path.iterdir()) == []
