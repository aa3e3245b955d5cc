"""A query that is started again with another definition goes on with its state, or says why it cannot."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import Result
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

import aion
from aion import aggregates as A
from aion.cli import app
from aion.errors import ForeignState
from aion.sinks.going_back import Tables
from aion.spark.api.rescale import rescale
from aion.spark.taking_over.rewind import rewind
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes

WINDOWS = {
    "minute": aion.Tumbling("1 minute"),
    "five": aion.Tumbling("5 minutes"),
    "hop": aion.Sliding("2 minutes", "40 seconds"),
    "quiet": aion.Session("1 minute"),
}
LENGTHS = {"minute": 60, "five": 300, "hop": 120}
FOUR_SHARDS = {"state": {"shards": 4}}


def query(stream: FileStream, windows: list[str], **changes: Any) -> DataFrame:
    definition = {
        "key": "k",
        "time": "ts",
        "windows": {name: WINDOWS[name] for name in windows},
        "aggregates": {"n": A.count()},
        "bound": "1 hour",
        "trigger": "every_batch",
    }
    return aion.windowed(stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), **definition | changes)


def found(rows: list[Any], *columns: str) -> dict[tuple[str, str, int], tuple[Any, ...]]:
    return {
        (window, key, int(start.timestamp())): tuple(row.get(name) for name in columns)
        for (key, window, start), row in last_panes(rows, "k").items()
    }


def test_windows_and_columns_come_and_go(
    stream: FileStream, sink: Sink, tmp_path: Path, place: Callable[[str], None]
) -> None:
    place(str(tmp_path / "state"))
    stream.put([("a", 10, 1.0), ("b", 70, 2.0)])
    sink.run(query(stream, ["minute"]))
    stream.put([("a", 20, 3.0), ("a", 130, 4.0), ("b", 75, 5.0)])
    rows = sink.run(query(stream, ["five", "minute"], aggregates={"n": A.count(), "top": A.max("v")}))
    stream.put([("a", 30, 6.0), ("a", 140, 7.0), ("a", 310, 8.0), ("b", 80, 9.0), ("a", 1000, 0.0)])
    rows = sink.run(query(stream, ["five"], aggregates={"n": A.count(), "top": A.max("v")}))
    for command in ("inspect", "explain"):
        shown = CliRunner().invoke(app, [command, str(tmp_path / "state")])
        assert shown.exit_code == 0, shown.output
    stream.put([("a", 1001, 0.0)])
    rows = sink.run(query(stream, ["five"], aggregates={"n": A.count(), "top": A.max("v")}))
    last = found(rows, "n", "top")
    assert last["minute", "a", 0] == (3, None)
    assert last["minute", "b", 60] == (3, None)
    assert last["minute", "a", 120] == (2, 7.0)
    assert last["five", "a", 300] == (1, 8.0)
    assert not {key for key in last if key[0] == "five" and key[2] < 300}, "they began before the change"
    assert ("minute", "a", 300) not in last


@pytest.mark.slow
def test_a_query_that_has_had_no_event_yet_may_change(stream: FileStream, sink: Sink) -> None:
    """Its second start leaves a definition without any version."""
    for _ in range(2):
        stream.put([])
        sink.run(query(stream, ["minute"]))
    stream.put([("a", 10, 1.0)])
    stream.put([("a", 20, 2.0), ("a", 1000, 0.0)])
    rows = sink.run(query(stream, ["five"], aggregates={"top": A.max("v")}))
    assert found(rows, "top") == {("five", "a", 0): (2.0,)}


@pytest.mark.proof
def test_earlier_definitions_go_when_no_version_that_is_kept_needs_them(
    stream: FileStream, sink: Sink, spark: SparkSession, tmp_path: Path, place: Callable[[str], None]
) -> None:
    place(str(tmp_path / "state"))
    spark.conf.set("spark.sql.streaming.minBatchesToRetain", "1")
    one, steps = {"state": {"shards": 1}}, []
    try:
        for number in range(5):
            for second in (0, 100, 200):
                stream.put([("a", 100_000 * number + second, 1.0)])
            columns = {"n": A.count(), "top": A.max("v")} if number % 2 else {"n": A.count()}
            rows = sink.run(query(stream, ["minute"], aggregates=columns, policy=one))
            (stored,) = (tmp_path / "state").rglob("operator.json")
            evolution = orjson.loads(stored.read_bytes().splitlines()[0])["definition"].get("evolution", {"steps": []})
            steps.append((len(evolution["steps"]), evolution.get("gone", 0)))
    finally:
        spark.conf.unset("spark.sql.streaming.minBatchesToRetain")
    assert steps == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    last = found(rows, "n")
    assert {last["minute", "a", (100_000 * number + 100) // 60 * 60] for number in range(5)} == {(1,)}


@pytest.mark.proof
def test_a_damaged_manifest_of_an_attempt_that_failed_hides_no_shard(
    stream: FileStream, sink: Sink, tmp_path: Path, place: Callable[[str], None]
) -> None:
    """A change that overlooked the shard would begin before its events, and show some of them."""
    place(str(tmp_path / "state"))
    stream.put([("a", 10, 1.0), ("a", 1000, 2.0), ("a", 1001, 2.0)])
    sink.run(query(stream, ["minute"]))
    folders = [path for path in (tmp_path / "state").rglob("manifests") if any(path.iterdir())]
    assert folders
    for folder in folders:
        (folder / f"0000000001-{'f' * 16}.json").write_text("{")
    stream.put([("a", 1002, 3.0), ("a", 1300, 4.0), ("a", 2000, 5.0)])
    last = found(sink.run(query(stream, ["minute", "five"])), "n")
    assert ("five", "a", 900) not in last, "it began before the change"
    assert last["five", "a", 1200] == (1,) and last["minute", "a", 960] == (3,)


@pytest.mark.proof
def test_windows_in_another_order_go_on(stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 10, 1.0), ("a", 70, 2.0)])
    sink.run(query(stream, ["minute", "five"]))
    stream.put([("a", 20, 3.0), ("a", 1000, 0.0), ("a", 1001, 0.0)])
    rows = sink.run(query(stream, ["five", "minute"]))
    assert [found(rows, "n")[key] for key in [("minute", "a", 0), ("minute", "a", 60), ("five", "a", 0)]] == [
        (2,), (1,), (3,),
    ]  # fmt: skip


@pytest.mark.slow
def test_what_cannot_go_on_is_refused_with_the_reason(stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 10, 1.0)])
    sink.run(query(stream, ["minute"]))
    stream.put([("a", 20, 1.0)])
    with pytest.raises(ForeignState, match=r"key: was k; is none. It cannot go on with this one: key was k \(string\)"):
        sink.run(query(stream, ["minute"], key=None))
    with pytest.raises(ForeignState, match="'quiet' is new, and its windows depend on all events of a key"):
        sink.run(query(stream, ["minute", "quiet"]))
    stream.put([("a", 100, 1.0)])
    rows = sink.run(query(stream, ["minute"]))
    stream.put([("a", 100, 1.0)])
    rows = sink.run(query(stream, ["minute"]))
    assert found(rows, "n")["minute", "a", 0] == (2,)


@pytest.mark.proof
def test_a_change_whose_first_batch_fails_can_be_taken_back(
    spark: SparkSession, stream: FileStream, sink: Sink, tmp_path: Path
) -> None:
    """Tasks have written state for the new definition, but Spark has not ended the batch."""
    stream.put([("a", 10, 1.0)])
    sink.run(query(stream, ["minute"]))
    stream.put([("a", 20, 2.0), ("a", 130, 3.0)])
    changed = query(stream, ["five"], aggregates={"top": A.max("v")})
    failing = changed.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint")).foreachBatch(_fail).start()
    with pytest.raises(StreamingQueryException, match="the sink is not there"):
        failing.awaitTermination()
    rows = sink.run(query(stream, ["minute"]))
    stream.put([("a", 30, 1.0), ("a", 1000, 0.0)])
    rows = sink.run(query(stream, ["minute"]))
    assert found(rows, "n")["minute", "a", 0] == (3,)
    assert found(rows, "n")["minute", "a", 120] == (1,)


@pytest.mark.proof
def test_windows_that_are_dropped_go_at_once(stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 10, 1.0), ("a", 70, 2.0)])
    sink.run(query(stream, ["minute", "five"]))
    stream.put([("a", 20, 3.0), ("a", 200, 0.0), ("a", 400, 0.0)])
    sink.run(query(stream, ["five"], on_removed="drop"))
    stream.put([("a", 500, 0.0)])
    rows = found(sink.run(query(stream, ["five"])), "n")
    assert rows["five", "a", 0] == (4,)
    assert not [key for key in rows if key[0] == "minute" and rows[key] != (1,)]


@pytest.mark.slow
def test_diff_says_beforehand_what_a_start_would_do(
    stream: FileStream, sink: Sink, tmp_path: Path, place: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    place(str(tmp_path / "state"))
    stream.put([("a", 10, 1.0)])
    sink.run(query(stream, ["minute"]))
    (tmp_path / "job_of_diff.py").write_text(
        "import aion\n"
        "from aion import aggregates as A\n"
        "now = aion.Spec(key='k', time='ts', windows={'minute': aion.Tumbling('1 minute')}, bound='1 hour',\n"
        "                aggregates={'n': A.count()})\n"
        "later = aion.Spec(key='k', time='ts', windows={'hour': aion.Tumbling('1 hour')}, bound='1 hour',\n"
        "                  aggregates={'n': A.count(), 'top': A.max('v')})\n"
        "other = aion.Spec(key='v', time='ts', windows=aion.Tumbling('1 minute'), aggregates={'n': A.count()})\n"
    )
    monkeypatch.chdir(tmp_path)

    def run(what: str) -> Result:
        arguments = ["diff", "checkpoint", f"job_of_diff:{what}", "--schema", EVENTS_DDL, "--state", "state"]
        return CliRunner().invoke(app, arguments)

    assert run("now").stdout == "windowed:\n  nothing changes\n"
    assert run("later").stdout.splitlines() == [
        "windowed:",
        "  windows 'hour' begin with the one at 1970-01-01T01:00:00Z",
        "  columns 'top' begin with windows from 1970-01-01T00:01:00Z on, and are null in earlier ones",
        "  no windows of 'minute' begin any more, and those that have begun finish",
    ]
    refused = run("other")
    assert refused.exit_code == 2
    assert "key was k (string) and is v (double)" in " ".join(refused.output.split())


@pytest.mark.proof
def test_diff_knows_the_tables_that_a_query_writes_to(
    stream: FileStream,
    tmp_path: Path,
    place: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place(str(tmp_path / "state"))
    uri, checkpoint = f"sqlite:///{tmp_path}/tolls.db", str(tmp_path / "checkpoint")

    def write(at: int, definition: DataFrame, **options: Any) -> None:
        stream.put([("a", at, 1.0)])
        sink = aion.sinks.upsert(uri, "tolls", **options)
        writer = definition.writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint)
        writer.trigger(availableNow=True).start().awaitTermination()

    def said() -> list[str]:
        arguments = ["diff", "checkpoint", "job_of_table:more", "--schema", EVENTS_DDL, "--state", "state"]
        done = CliRunner().invoke(app, arguments)
        return [line for line in done.stdout.splitlines() if "table" in line]

    (tmp_path / "job_of_table.py").write_text(
        "import aion\n"
        "from aion import aggregates as A\n"
        "more = aion.Spec(key='k', time='ts', windows={'minute': aion.Tumbling('1 minute')}, bound='1 hour',\n"
        "                 aggregates={'n': A.count(), 'top': A.max('v')})\n"
    )
    monkeypatch.chdir(tmp_path)
    write(10, query(stream, ["minute"]))
    assert said() == [
        f"  table tolls of {uri} has no column 'top', so the first batch would fail: add it (ALTER TABLE) before, or "
        "give upsert add_columns=True"
    ]
    write(100, query(stream, ["minute"]), add_columns=True)
    (tmp_path / "checkpoint" / "aion-sinks" / "torn.json").write_text('{"operator": ')  # a note is not needed
    assert said() == [f"  table tolls of {uri} has no column 'top'; its sink adds it with the first batch"]
    with caplog.at_level("WARNING", logger="aion.spark.start.kept_state"):
        write(200, query(stream, ["minute"], aggregates={"n": A.count(), "top": A.max("v")}), add_columns=True)
    assert f"when the query last wrote to it, table tolls of {uri} has no column 'top'; its sink" in caplog.text
    write(300, query(stream, ["minute"], aggregates={"n": A.count(), "top": A.max("v")}), add_columns=True)
    assert said() == []
    with closing(sqlite3.connect(tmp_path / "tolls.db")) as db:
        assert {name for _, name, *_ in db.execute("PRAGMA table_info(tolls)")} >= {"n", "top"}


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_changes_ends_in_the_panes_of_a_query_that_was_never_touched(
    seed: int, spark: SparkSession, stream: FileStream, sink: Sink, tmp_path: Path, place: Callable[[str], None]
) -> None:
    """Other definitions, other partitions, batches that fail, and late events, in any order."""
    place(str(tmp_path / "state"))
    rng, checkpoint = random.Random(seed), str(sink.folder / "checkpoint")
    events: list[tuple[str, int, float]] = []
    windows, columns, at = ["minute"], {"n": A.count()}, 100
    rows: list[Any] = []
    for step in range(8):
        at += rng.randrange(200)
        some = [(f"k{rng.randrange(6)}", max(at - rng.randrange(300), 0), float(rng.randrange(9))) for _ in range(8)]
        stream.put([*some, ("clock", at, 0.0)])
        events += some
        match rng.choice(["windows", "columns", "rescale", "fail"]):
            case "windows":
                windows = ["minute", *rng.sample(["five", "hop"], rng.randrange(3))]
            case "columns":
                columns = {"n": A.count(), **({"top": A.max("v")} if "top" not in columns else {})}
            case "rescale" if step:
                rescale(
                    spark, str(sink.folder / "checkpoint"), rng.choice([1, 2, 4]), state_dir=str(tmp_path / "state")
                )
            case "fail" if step:
                other = query(stream, ["minute", "five"], aggregates={"top": A.max("v")}, policy=FOUR_SHARDS)
                failing = other.writeStream.option("checkpointLocation", checkpoint)
                with pytest.raises(StreamingQueryException):
                    failing.foreachBatch(_fail).start().awaitTermination()
        rows = sink.run(query(stream, windows, aggregates=columns, policy=FOUR_SHARDS))
    stream.put([("clock", at + 1000, 0.0)])
    sink.run(query(stream, windows, aggregates=columns, policy=FOUR_SHARDS))
    stream.put([("clock", at + 1001, 0.0)])
    rows = sink.run(query(stream, windows, aggregates=columns, policy=FOUR_SHARDS))
    last = {key: row for key, row in found(rows, "n", "top").items() if key[1] != "clock"}
    for (window, key, start), (n, top) in last.items():
        of_window = [v for k, t, v in events if k == key and start <= t < start + LENGTHS[window]]
        assert n == len(of_window), (window, key, start)
        assert top in (None, max(of_window)), (window, key, start)
    assert {key[1:] for key in last if key[0] == "minute"} == {(k, t // 60 * 60) for k, t, _ in events}


def _fail(batch: DataFrame, number: int) -> None:
    batch.collect()
    raise RuntimeError("the sink is not there")


@pytest.mark.slow
@pytest.mark.parametrize("then", ["as before", "with another change"])
def test_a_query_that_goes_back_over_changes_has_the_definition_of_then(
    stream: FileStream, sink: Sink, spark: SparkSession, tmp_path: Path, place: Callable[[str], None], then: str
) -> None:
    """Windows that were left out have gone on, and new ones begin where the events of then end, not later ones."""
    place(str(tmp_path / "state"))
    stream.put([("a", 10, 1.0)])
    sink.run(query(stream, ["minute"]))
    to = max(map(int, (path.name for path in (tmp_path / "checkpoint" / "commits").glob("[0-9]*"))))
    for second, windows in ((1000, ["five"]), (2000, ["hop"]), (3000, ["hop"])):
        stream.put([("a", second, 1.0)])
        sink.run(query(stream, windows))
    rewind(spark, str(tmp_path / "checkpoint"), to, state_dir=str(tmp_path / "state"), tables_of=Tables)
    sink.forget_after(to)
    stream.put([("a", 4000, 1.0)])
    last = found(sink.run(query(stream, ["minute"] if then == "as before" else ["minute", "five"])), "n")
    minutes = {("minute", "a", second // 60 * 60) for second in (10, 1000, 2000, 3000)}
    fives = {("five", "a", second // 300 * 300) for second in (1000, 2000, 3000)}
    assert {key for key in last if key[2] < 3900} == (minutes if then == "as before" else minutes | fives)


@pytest.mark.slow
def test_a_change_begins_where_the_batches_that_were_made_again_end(
    stream: FileStream, sink: Sink, spark: SparkSession, tmp_path: Path, place: Callable[[str], None]
) -> None:
    """There are also versions of the same batches that were undone: the rewinds ended before they deleted these.

    They have fewer events.
    """
    place(str(tmp_path / "state"))
    one = {"state": {"shards": 1}}
    stream.put([("a", 10, 1.0)])
    sink.run(query(stream, ["minute"], policy=one))
    stream.put([("a", 1000, 1.0)])
    sink.run(query(stream, ["minute"], policy=one))
    for second in (1001, 2000):
        (shard,) = (tmp_path / "state").rglob("manifests")
        shutil.copytree(shard, kept := tmp_path / str(second))
        rewind(spark, str(tmp_path / "checkpoint"), 1, state_dir=str(tmp_path / "state"), tables_of=Tables)
        shutil.copytree(kept, shard, dirs_exist_ok=True)
        sink.forget_after(1)
        stream.put([("a", second, 1.0)])
        sink.run(query(stream, ["minute"], policy=one))
    last = max(path.name[:10] for path in shard.iterdir())
    assert len([path for path in shard.iterdir() if path.name.startswith(last)]) == 3, "two were undone"
    stream.put([("a", 4000, 1.0), ("a", 5000, 1.0)])
    rows = found(sink.run(query(stream, ["minute", "five"], policy=one)), "n")
    assert min(start for window, _, start in rows if window == "five") == 3900
