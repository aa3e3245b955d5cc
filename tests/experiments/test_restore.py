"""`aion experiment restore`, in miniature: shards are what it says they are, and are opened as often as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from aion import cli
from experiments.restore.command import Case, check_room, fill, measure, numbers, shard_in


def test_shards_have_as_many_files_and_bytes_as_were_asked_for(tmp_path: Path) -> None:
    for case in (Case(files=3, mib=6), Case(files=8, mib=1)):
        folder = tmp_path / str(case.files)
        token, blocks = fill(case, folder)
        files = list((folder / "versions" / "files").iterdir())
        assert len(files) == case.files
        assert sum(f.stat().st_size for f in files) == pytest.approx(case.mib << 20, rel=0.1)
        with shard_in(folder) as shard:
            shard.open(token, "reader", shard.identity)
            assert sum(1 for _ in shard.read("reader", range(0, 600_000_000, 60_000_000))) == blocks


def test_every_shard_is_opened_in_every_run(tmp_path: Path) -> None:
    found = measure([Case(1, 1), Case(2, 1)], 2, tmp_path)
    assert [len(f[name]) for f in found.values() for name in ("open_s", "first_block_s")] == [2, 2, 2, 2]
    assert min(min(f["open_s"]) for f in found.values()) > 0
    assert list(tmp_path.iterdir()) == [], "it leaves nothing"


def test_the_command_prints_and_writes_what_it_found(tmp_path: Path) -> None:
    options = ["--sizes-mib", "1,2", "--files", "2", "--file-counts", "1,3", "--size-mib", "1", "--runs", "1"]
    done = CliRunner().invoke(cli.app, ["experiment", "restore", *options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "2 times the bytes in as many files" in done.output
    results = json.loads((tmp_path / "restore.json").read_text())["results"]
    assert [(r["files"], r["mib"]) for part in results.values() for r in part] == [(2, 1), (2, 2), (1, 1), (3, 1)]


@pytest.mark.parametrize("text", ["", "x", "1,0", "-1", "1.5"])
def test_wrong_numbers_are_told(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="write numbers above 0"):
        numbers(text)
    assert numbers(" 5, 1,5") == [1, 5]


def test_a_disk_without_room_is_told_before_it_is_full(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="MiB free; the shards need"):
        check_room(tmp_path, 1 << 60)
