"""What ``aion explain`` says of the last batches of a query, from the versions in its state folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aion.cli import app
from aion.core.periodic import Tumbling
from aion.core.slicing.grid import NO_SLICE
from aion.tools.inspect.tables import called
from state_backends.backends import Stores
from state_backends.files.storage import LocalStorage
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard
from tests.durations import us
from tests.operators import advance, arrive, end_batch, make

DEFINITION = {"windows": [["tens", Tumbling(us(10)).spec()]]}
Commit = Callable[..., str]


@pytest.fixture
def commit(tmp_path: Path) -> Iterator[Callable[[int], Commit]]:
    """Returns a function that commits a batch of a shard: its number, the version before, and the snapshot."""
    io, shards = IoThread(), list[Shard]()

    def of(number: int, *, operator: str = "tolls") -> Commit:
        identity = Identity("5f1d-query", operator, number, 2, DEFINITION)
        shard = Shard(
            identity,
            LocalStorage(tmp_path / "state" / identity.query / operator / f"shard-{number:05d}"),
            tmp_path / "live" / operator / str(number),
            lambda p: Stores.of("tiered", p, io, MemoryBudget(1 << 20), StoreOptions(bucket_limit_bytes=1 << 20)),
            retain=10,
        )
        shards.append(shard)

        def commit(batch: int, token: str | None, snapshot: dict[str, Any], attempt: str = "a") -> str:
            makes = f"{batch:010d}-{attempt}"
            shard.open(token, makes, identity)
            shard.commit(makes, snapshot)
            return makes

        return commit

    yield of
    for shard in shards:
        shard.close()
    io.close()


@pytest.fixture
def state(tmp_path: Path, commit: Callable[[int], Commit]) -> Path:
    """Two shards of windows of ten microseconds; the second one has nothing to do in batch 1."""
    first, second = make(bound=20), make(bound=20)
    of_first, of_second = commit(0), commit(1)
    arrive(first, 0, events=5)
    end_batch(first)
    token = of_first(0, None, first.snapshot())
    arrive(second, 0, events=2)
    end_batch(second)
    other = of_second(0, None, second.snapshot())
    advance(first, 12)  # the window ends
    arrive(first, 0, 10, events=3)  # three of these are late
    end_batch(first)
    of_first(1, token, first.snapshot(), "given-up")  # Spark went on from the other attempt
    token = of_first(1, token, first.snapshot(), "kept")
    advance(first, 40)  # its bound has passed
    arrive(first, 0, events=1)  # too late
    end_batch(first)
    of_first(2, token, first.snapshot())
    advance(second, 40)
    end_batch(second)
    of_second(2, other, second.snapshot())
    return tmp_path / "state"


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "220"})
    assert done.exit_code == code, done.output
    return done.output


def rows(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│┃").split("│")] for line in output.splitlines() if "│" in line]


def test_each_batch_has_a_row_and_each_reason_a_sentence(state: Path) -> None:
    said = run(str(state))
    head = next(line for line in said.splitlines() if "┃" in line)
    assert [cell.strip() for cell in head.strip("┃").split("┃")] == [
        "batch", "watermark", "shards", "events", "late", "dropped", "new windows", "removed",
        "ran on time", "ran late",
    ]  # fmt: skip
    assert rows(said) == [
        ["0", "none", "2", "7", "0", "0", "2", "0", "0", "0"],
        ["1", "1970-01-01T00:00:00.000012Z", "1", "6", "3", "0", "1", "0", "1", "1"],
        ["2", "1970-01-01T00:00:00.000040Z", "2", "1", "1", "1", "0", "3", "2", "0"],
    ]
    assert "tolls of query 5f1d-query: up to batch 2, 2 shards" in said
    assert "ran on time: the watermark passed the window's end" in said
    assert "ran late: a batch brought late events (trigger.kind: every_batch)" in said
    assert "dropped: 1 events came after the bounds of their windows" in said
    assert "ran at last:" not in said and "ran early:" not in said
    assert "kept now: no windows" in said and "tolls: new windows are kept for " in said


def test_events_without_a_time_are_not_called_late(tmp_path: Path, commit: Callable[[int], Commit]) -> None:
    operator = make(bound=20)
    arrive(operator, NO_SLICE, events=3)
    end_batch(operator)
    commit(0)(0, None, operator.snapshot())
    said = run(str(tmp_path / "state"))
    assert "no time: 3 of the dropped events had no time that windows could use" in said
    assert "after the bounds" not in said and "dropped: events without a time" in said
    assert rows(said) == [["0", "1", "3", "3", "3"]]


def test_a_bound_that_was_asked_for_is_called_so(state: Path) -> None:
    assert "are kept for 0.02 ms: given by bound=, or by lateness.initial_bound without coverage" in run(str(state))


def test_shards_are_counted_although_their_ids_are_not_in_a_row(tmp_path: Path) -> None:
    """Ids are chosen so that Spark spreads them evenly; the folders have these names."""
    assert [called(f"shard-{i:05d}", (0, 2)) for i in (0, 2)] == ["0", "1 (shard-00002)"]
    assert called("shard-00007", ()) == "7"


@pytest.mark.slow
def test_fewer_batches_and_a_query_by_its_id_or_operator(state: Path) -> None:
    whole = run(str(state))
    for name in ("5f1d-query", "5f1d", "tolls"):
        assert run(name, "--state", str(state)) == whole
    assert [row[0] for row in rows(run(str(state), "--batches", "1"))] == ["2"]


def test_the_default_folder_is_that_of_a_session(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.rename(state.parent / "aion-state")
    monkeypatch.chdir(state.parent)
    assert len(rows(run("tolls"))) == 3


def test_a_processor_without_windows(tmp_path: Path, commit: Callable[..., Commit]) -> None:
    counters = {"events": 3, "dropped": 0, "keys": 2, "timers": 0, "fired_timers": 0}
    of_shard = commit(0, operator="visits")
    token = of_shard(4, None, {"next_seq": 0, "counters": counters})
    of_shard(5, token, {"next_seq": 0, "counters": {**counters, "events": 7, "dropped": 1}})
    assert rows(run(str(tmp_path / "state"))) == [["4", "1", "3", "0", "2"], ["5", "1", "4", "1", "0"]]


def test_a_damaged_manifest_is_said_and_the_rest_is_shown(state: Path) -> None:
    (damaged,) = (state / "5f1d-query" / "tolls" / "shard-00000" / "manifests").glob("0000000002*")
    damaged.write_bytes(damaged.read_bytes()[:-3])
    said = run(str(state), code=1)
    assert "damaged: 5f1d-query/tolls/shard-00000/manifests/0000000002-a.json" in said
    assert [row[:3] for row in rows(said)] == [
        ["0", "none", "2"], ["1", "1970-01-01T00:00:00.000012Z", "1"], ["2", "1970-01-01T00:00:00.000040Z", "1"],
    ]  # fmt: skip


def test_what_cannot_be_shown_is_said(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no state of such a query; it has 5f1d-query (tolls)" in run("other", "--state", str(state), code=2)
    assert "there is no such folder" in run(str(tmp_path / "nowhere"), code=2)
    monkeypatch.chdir(tmp_path)
    assert "no aion-state in this one" in run("tolls", code=2)
    (tmp_path / "empty").mkdir()
    assert "no state of any query" in run("empty", code=2)
