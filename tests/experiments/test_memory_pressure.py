"""The settings of `aion experiment memory-pressure`, its control group, and how it tells who died of memory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from aion.errors import ConfigError
from experiments.memory_pressure.limits import enter, limited, make_group
from experiments.memory_pressure.run import ending
from experiments.memory_pressure.settings import (
    PARTS,
    Cell,
    cell_spec,
    cells,
    load_settings,
)

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"


def test_the_papers_settings_are_the_papers() -> None:
    settings = load_settings(EXPERIMENTS / "paper.yaml", {})
    assert not settings.is_scaled
    assert settings.past_windows == list(range(1, 11))
    assert (settings.warm_up, settings.measured, settings.pace, settings.executions) == (10, 30, "real", "twice")
    assert settings.parts == PARTS
    assert len(set(cells(settings))) == 4 * 10 * 3 + 10 * len(PARTS)
    policy = cell_spec(settings, Cell("average", "tiered", 5))["policy"]
    assert (policy["lateness"]["initial_bound"], policy["lateness"]["coverage"]) == ("100 seconds", None)
    assert policy["trigger"]["executions"] == 1


def test_every_settings_file_is_valid_and_what_is_given_outranks_it() -> None:
    for path in EXPERIMENTS.glob("*.yaml"):
        assert load_settings(path, {}).workload
    settings = load_settings(EXPERIMENTS / "paper.yaml", {"scale": 0.2, "state": None, "past_windows": "1,4"})
    assert (settings.scale, settings.past_windows, settings.state) == (0.2, [1, 4], "8GiB")
    assert settings.is_scaled


def test_a_control_group_gets_the_limit_and_the_tree_enters_it(tmp_path: Path) -> None:
    make_group(tmp_path / "cell", 1 << 30)
    assert (tmp_path / "cell" / "memory.max").read_text() == str(1 << 30)
    done = subprocess.run(
        [*enter(tmp_path / "cell"), "sh", "-c", "echo $$"], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "cell" / "cgroup.procs").read_text() == done.stdout, "the command is who entered"
    with pytest.raises(ConfigError, match="control group"), limited(f"cgroup:{tmp_path}/none", 1, "x"):
        pass
    with pytest.raises(ConfigError, match="write auto"), limited("rlimit", 1, "x"):
        pass


@pytest.mark.parametrize(
    ("log", "killed", "kills", "status"),
    [
        ("java.lang.OutOfMemoryError: Java heap space", None, 0, "died"),
        ("MemoryError", None, 0, "died"),
        ("", "the tree took 5 bytes, above the limit", 0, "died"),
        ("", None, 1, "died"),
        ("", "stalled: no batch ended for 5 s", 0, "failed"),
        ("ValueError: no", None, 0, "failed"),
    ],
)
def test_deaths_of_memory_are_told_from_failures(
    tmp_path: Path, log: str, killed: str | None, kills: int, status: str
) -> None:
    (tmp_path / "log").write_text(f"something\n{log}\n")
    (tmp_path / "cell.json").write_text(json.dumps({"heap_bytes": 100}))
    assert ending(tmp_path, killed, 1, kills)["status"] == status
