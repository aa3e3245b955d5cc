"""`aion experiment prestage`: its slow disk, what it makes of its runs, and a run in miniature."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.prestage import report
from experiments.prestage.disk import SlowDisk
from experiments.prestage.runs import Cell, write
from experiments.prestage.settings import MODES, PAYLOAD_BYTES, TRIGGERS, Disk, Settings
from state_backends.store.map.run_files import RunFiles
from state_backends.store.p_bucket import PBucket
from tests.stores.rig import Rig

SETTINGS = Settings(1 << 20, 4, 8, 2, (0.0, 2.0), (Disk.of("120"), Disk.of("fast")), 1)


def cell(mode: str, late_s: Sequence[float], *, disk: str = "120", gap_s: float = 2.0, checksum: int = 7) -> Cell:
    return Cell(
        mode,
        Disk.of(disk).name,
        gap_s,
        "planned",
        {"late": [*late_s]},
        {"late": [0.0]},
        {"late": 1},
        9,
        0,
        1,
        0.0,
        100,
        5,
        checksum,
    )


def test_a_slow_disk_takes_its_time_for_each_read_of_rows_and_bodies(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(PBucket, "fetch", PBucket.fetch)  # and so it is put back
    monkeypatch.setattr(os, "preadv", os.preadv)
    monkeypatch.setattr(RunFiles, "get", RunFiles.get)
    rig = make("rocksdb")
    rig.append((0, 0), (1, 10))
    rig.to_disk(0, 10)
    SlowDisk(20, moderate=0.8)
    begin = time.perf_counter()
    assert rig.read(0) == [0] and rig.read(10) == [1]
    assert time.perf_counter() - begin >= 0.1
    (tmp_path / "file").write_bytes(b"abc")
    with (tmp_path / "file").open("rb") as file:
        begin = time.perf_counter()
        assert os.preadv(file.fileno(), [bytearray(3)], 0) == 3
    assert time.perf_counter() - begin >= 0.05


def test_a_slow_disk_takes_its_time_for_each_value_a_few_at_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(_: Any, keys: Sequence[bytes], most_bytes: int) -> Iterator[int]:
        yield 1
        return [*keys]

    monkeypatch.setattr(RunFiles, "get", get)
    monkeypatch.setattr(PBucket, "fetch", PBucket.fetch)
    monkeypatch.setattr(os, "preadv", os.preadv)
    SlowDisk(100)
    keys = [b"%02d" % number for number in range(10)]
    for most_bytes, found in ((1000, keys), (3, keys[:4])):
        begin, steps = time.perf_counter(), RunFiles.get(None, keys, most_bytes)  # type: ignore[arg-type]
        with pytest.raises(StopIteration) as end:
            while True:
                next(steps)
        assert end.value.value == found, "it ends early after most_bytes"
        assert time.perf_counter() - begin >= len(found) / 100


@pytest.fixture
def make(tmp_path: Path) -> Any:
    rigs: list[Rig] = []

    def made(kind: str) -> Rig:
        rigs.append(Rig(kind, tmp_path / "rig"))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.close()


def test_a_window_s_events_come_in_parts_and_the_last_before_it_ends_for_good(tmp_path: Path) -> None:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    for number in (0, 3, 10):
        write(tmp_path, SETTINGS, number)
    found = {}
    for path in sorted(tmp_path.glob("*.parquet")):
        table = pq.read_table(path)
        minutes = pc.divide(pc.cast(table["ts"], "int64"), 60_000_000).to_numpy()
        first = int(minutes.max())
        found[path.stem] = {int(minute) - first: int((minutes == minute).sum()) for minute in set(minutes.tolist())}
        assert set(pc.binary_length(table["payload"]).to_pylist()) == {PAYLOAD_BYTES}
    part = SETTINGS.events // 4
    assert found["000000"] == {0: part}
    assert found["000003"] == {0: part, -1: part, -2: part, -3: part}
    assert found["000010"] == {0: part, -1: part, -2: part, -3: part, -7: SETTINGS.late}


def test_the_report_compares_medians_and_judges_what_was_asked(tmp_path: Path) -> None:
    cells = [
        cell("with", [0.01, 0.012]), cell("without", [0.2, 0.3]), cell("memory", [0.01]),
        cell("with", [0.5], gap_s=0.0), cell("without", [0.2], gap_s=0.0), cell("memory", [0.1], gap_s=0.0),
        cell("with", [0.02], disk="fast"), cell("without", [0.02], disk="fast"), cell("memory", [0.01], disk="fast"),
    ]  # fmt: skip
    assert report.seconds_of(cells[:1], "late") == pytest.approx(0.011)
    assert report.ratio(
        report.groups(cells)["120 reads/s", 2.0, "planned"], "late", "without", "with"
    ) == pytest.approx(0.25 / 0.011)
    same, pays, still = report.verdicts(cells)
    assert same.endswith("the same panes: holds")
    assert "120 reads/s, gap 2 s, planned, late" in pays and pays.endswith("22.7 and 1.10, holds")
    assert "120 reads/s, gap 0 s, planned, late" in still and still.endswith("0.40, does not hold")
    (slower,) = report.verdicts([*cells[:1], cell("without", [0.05]), cell("memory", [0.01])])[1:]
    assert slower.endswith("does not hold")
    assert "DOES NOT HOLD" in report.verdicts([*cells, cell("with", [1.0], checksum=8)])[0]
    assert report.table(cells).row_count == 3
    json_path, picture = report.write(tmp_path, {"experiment": "prestage"}, cells)
    assert len(json.loads(json_path.read_text())["cells"]) == 9
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_model_takes_the_gap_from_what_is_staged_first() -> None:
    def waits(on_time: float, late: float) -> dict[str, list[float]]:
        return {"on_time": [on_time], "late": [late]}

    cells = [cell("without", [0.5]), cell("memory", [0.01])]
    cells[0] = replace(cells[0], waited_s=waits(0.2, 0.4))
    modes = report.groups(cells)["120 reads/s", 2.0, "planned"]
    assert [report.foretold(modes, "late", gap_s) for gap_s in (0.0, 0.2, 0.5, 2.0)] == pytest.approx(
        [0.41, 0.41, 0.11, 0.01]
    )
    assert report.foretold(modes, "on_time", 0.0) is None, "nothing was measured in memory"


def test_disks_are_named_as_a_user_writes_them() -> None:
    assert [Disk.of(text) for text in ("fast", "120", "s3:30")] == [
        ("fast disk", None, None), ("120 reads/s", 120, None), ("S3, 30 ms", None, 30.0)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="slow"):
        Disk.of("slow")


@pytest.mark.proof
def test_a_run_in_miniature(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "aion.cli",
        "experiment",
        "prestage",
        "--window",
        "1",
        "--parts",
        "4",
        "--past",
        "8",
    ]
    command += ["--batches", "3", "--gaps", "1", "--disks", "120", "--triggers", "planned,own", "--runs", "1"]
    command += ["--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "all runs have the same panes: holds" in done.stdout
    cells = json.loads((tmp_path / "out" / "prestage.json").read_text())["cells"]
    assert [(cell["trigger"], cell["mode"]) for cell in cells] == [*itertools.product(TRIGGERS, MODES)]
    for trigger in TRIGGERS:
        for pane in ("final", "late"):
            waited = {c["mode"]: sum(c["waited_s"][pane]) for c in cells if c["trigger"] == trigger}
            assert waited["with"] < waited["without"] < waited["apart"], (trigger, pane)
