"""``aion top``: one frame of it, of servers that run; and what its speeds are measured from."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from aion.cli import app
from aion.tools.top import NO_SERVER, Look, frame
from state_backends.server.client import running_servers
from tests.operators import advance, arrive, end_batch, make
from tests.server.conftest import STORE, Connect, block, open_shard, server_of


def shown(looks: dict[int, Look], before: dict[int, Look]) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(frame(looks, before))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def row(lines: list[str], first: str) -> list[str]:
    found, *_ = [line.split() for line in lines if line.split()[:1] == [first]]
    return found


@pytest.mark.slow
def test_one_frame(application: str, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    client, operator = connect(), make(bound=50_000_000)
    arrive(operator, 0, 20_000_000, events=1_500)
    advance(operator, 40_000_000)
    arrive(operator, 0, events=1_000)
    end_batch(operator)
    attempt = open_shard(client, tmp_path, None, "t1", store=replace(STORE, metrics_port=0))
    attempt.append([(0, False, block(*range(100)))])
    attempt.commit({**operator.snapshot(), "next_seq": 1})
    pid, port = server_of(application).pid, client.stats()["metrics_port"]

    done = CliRunner().invoke(app, ["top", "--once"])
    assert done.exit_code == 0, done.output
    monkeypatch.setenv("COLUMNS", "80")
    narrow = CliRunner().invoke(app, ["top", "--once"]).output
    assert "…" not in narrow and "4,000" in narrow, narrow
    monkeypatch.setenv("COLUMNS", "200")
    lines = done.output.splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith(f"state server {pid}: ")]
    assert lines[first].endswith(f" resident, metrics on port {port}")
    own = lines[first : first + 20]
    # Nothing to measure a speed from, and no window with late events is gone.
    events, windows = (line.split() for line in own if line.split()[:1] == ["windowed"])
    late = ["1,000", "(25.0%)", "0", "≤", "1", "minute,", "≤", "1", "minute"]
    assert events == ["windowed", "query", "1", "4,000", *late]
    # No bound has been judged. Executions: none early, two on time, one late, none final. A commit, and no restore.
    assert windows == ["windowed", "2", "50", "s", "0", "2", "1", "0", "1", "0"]
    assert row(own, "write")[1] == "0"
    assert int(row(own, "write")[2]) >= 1

    # The same, a while later.
    looks = {pid: Look.of(stats, 10.0) for pid, stats in running_servers()}
    arrive(operator, 0, events=500)
    end_batch(operator)
    attempt = open_shard(client, tmp_path, "t1", "t2", store=replace(STORE, metrics_port=0))
    attempt.commit({**operator.snapshot(), "next_seq": 1})
    later = {pid: Look.of(stats, 12.0) for pid, stats in running_servers()}
    columns = row(shown({pid: later[pid]}, looks), "windowed")
    assert columns[3:5] == ["4,500", "250"], "events, and how many came in each of the two seconds"


def test_without_a_server_it_says_so() -> None:
    assert shown({}, {}) == [NO_SERVER]


def test_a_server_of_another_aion_is_shown_as_far_as_it_can_be() -> None:
    look = Look.of({"budget_bytes": 1 << 20, "used_bytes": 1 << 19}, 0.0)
    lines = shown({7: look}, {})
    assert lines[0] == "state server 7: 0 B resident"
    assert lines[1].startswith("budget   512 KiB of 1 MiB (50%), ")


def test_intervals_are_checked() -> None:
    done = CliRunner().invoke(app, ["top", "--every", "0"])
    assert done.exit_code == 2
