"""``aion rewind`` and ``aion fork``: a query goes back, or is copied, with its state."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import aion
import aion.state
from aion import aggregates as A
from aion.errors import ConfigError
from aion.execute.files.skipped import Records
from aion.sinks import going_back
from aion.spark.session.checkpoint_files import CheckpointFiles
from aion.spark.session.rewound import Rewound, complete
from aion.spark.taking_over import rewind as rewinding
from aion.spark.taking_over.fork import fork
from aion.spark.taking_over.tokens import tokens_of
from aion.tools.inspect.lineages import forget_gone
from aion.tools.inspect.state import set_back
from tests.object_store import ObjectStore
from tests.spark.conftest import EVENTS, EVENTS_DDL, SECOND, FileStream, table_of, take_all

DEFINITION: dict[str, Any] = {
    "key": "k",
    "time": "ts",
    "windows": {"minutes": aion.Tumbling("1 minute"), "visits": aion.Session("20 seconds")},
    "aggregates": {"n": A.count(), "total": A.sum("v")},
    "bound": "1 hour",
    "trigger": "every_batch",
}
Table = dict[tuple[Any, ...], tuple[Any, ...]]
rewind = partial(rewinding.rewind, tables_of=going_back.Tables)


def batch(number: int) -> list[tuple[str, int, float]]:
    """Events of a minute, and late ones of each minute before."""
    on_time = [(f"key-{i % 5}", 60 * number + 2 * i, float(i)) for i in range(20)]
    return on_time + [(f"key-{i % 3}", 60 * at + 7 * i, 1.0) for at in range(number) for i in range(3)]


class Query:
    """A query, and the table that it keeps: the newest row of each window."""

    def __init__(self, stream: FileStream, checkpoint: Path) -> None:
        self.stream, self.checkpoint = stream, checkpoint
        self.tables: dict[int, Table] = {}
        """The table after each batch, as the last run of the batch left it."""
        self.table: Table = {}

    def start(self, **trigger: Any) -> StreamingQuery:
        panes = aion.windowed(self.stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), **DEFINITION)
        writer = panes.writeStream.foreachBatch(self._keep).option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(**trigger) if trigger else writer).start()

    def run(self, *numbers: int) -> int:
        """Returns the last batch."""
        for number in numbers:
            self.stream.put(batch(number))
            self.start(availableNow=True).awaitTermination()
        return max(int(path.name) for path in (self.checkpoint / "commits").glob("[0-9]*"))

    def go_back(self, to: int) -> None:
        self.table = dict(self.tables[to])

    def _keep(self, rows: DataFrame, number: int) -> None:
        apply(self.table, [row.asDict() for row in rows.collect()])
        self.tables[number] = dict(self.table)


def apply(table: Table, rows: list[dict[str, Any]]) -> None:
    """The rows of a batch, in the order of their panes."""
    for row in sorted(rows, key=lambda row: row["pane_seq"]):
        name = row["k"], row["window"], row["window_start"], row["window_end"]
        if row["kind"] == "retracted":
            table.pop(name, None)
        else:
            table[name] = row["n"], row["total"]


def expected(stream: FileStream, numbers: int) -> set[tuple[Any, ...]]:
    """What the table has in the end: the rows of one operator without Spark that was never disturbed."""
    table: Table = {}
    with aion.LocalOperator(**DEFINITION) as operator:
        watermark = None
        for number in range(numbers):
            rows = operator.process(table_of(EVENTS, batch(number)), watermark).to_pylist()
            apply(table, rows)
            watermark = max(watermark or 0, SECOND * max(at for _, at, _ in batch(number)))
        apply(table, operator.advance(watermark).to_pylist())
    return _settled(table)


def _settled(table: Table) -> set[tuple[Any, ...]]:
    return {
        (key, window, start.replace(tzinfo=None), end.replace(tzinfo=None), *values)
        for (key, window, start, end), values in table.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a folder", "an object store"])
def test_a_query_goes_back_again_and_again(
    spark: SparkSession,
    stream: FileStream,
    tmp_path: Path,
    place: Callable[[str], None],
    bucket: ObjectStore,
    where: str,
) -> None:
    """In the end it has said what it would have said without that."""
    if where == "an object store":
        place(bucket.uri("state"))
    state, query = spark.conf.get("spark.aion.state.dir"), Query(stream, tmp_path / "checkpoint")
    middle = query.run(0, 1)
    before = query.run(2)
    seen = rewind(spark, str(query.checkpoint), middle, state_dir=state, dry_run=True)
    assert (seen.before, seen.to, seen.shards) == (before, middle, {"windowed": 2})
    assert query.run() == before
    for to in (middle, 0):
        assert rewind(spark, str(query.checkpoint), to, state_dir=state).to == to
        query.go_back(to)
        query.start(availableNow=True).awaitTermination()
    query.run(3)
    assert _settled(query.table) == expected(stream, 4)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_an_interrupted_command_is_completed_by_the_next_start(
    spark: SparkSession, stream: FileStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    place, query = spark.conf.get("spark.aion.state.dir"), Query(stream, tmp_path / "checkpoint")
    middle = query.run(0)
    query.run(1)
    delete, left = CheckpointFiles.delete, [calls]

    def dying(self: CheckpointFiles, name: str) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        delete(self, name)

    monkeypatch.setattr(CheckpointFiles, "delete", dying)
    with pytest.raises(KeyboardInterrupt):
        rewind(spark, str(query.checkpoint), middle, state_dir=place)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=rf"going back to batch {middle} was interrupted; complete it with --to"):
        rewind(spark, str(query.checkpoint), 0 if middle else 1, state_dir=place)
    query.go_back(middle)
    query.run(2)
    assert _settled(query.table) == expected(stream, 3)


def test_an_instant_is_the_last_batch_that_began_by_then(
    spark: SparkSession, stream: FileStream, tmp_path: Path
) -> None:
    place, query = spark.conf.get("spark.aion.state.dir"), Query(stream, tmp_path / "checkpoint")
    query.run(0, 1)
    files = CheckpointFiles(spark, str(query.checkpoint))
    begins = {b: files.metadata("offsets", b)["batchTimestampMs"] for b in files.batches("offsets")}
    at = datetime.fromtimestamp(begins[1] / 1000, UTC)
    assert rewind(spark, str(query.checkpoint), at.isoformat(), state_dir=place, dry_run=True).to == 1
    for to, said in (
        ("1999-01-01", r"no batch that is kept began at or before 1999.*the first one, 0, began at"),
        ("yesterday", "neither the number of a batch nor an instant like"),
        (77, "there is no batch 77 to go back to; the checkpoint has the batches 0 to"),
    ):
        with pytest.raises(ConfigError, match=said):
            rewind(spark, str(query.checkpoint), to, state_dir=place)
    with pytest.raises(ConfigError, match=r"which the checkpoint names after batch 0.*is this the query's state\.dir"):
        rewind(spark, str(query.checkpoint), 0, state_dir=str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="not the checkpoint of a streaming query"):
        rewind(spark, str(tmp_path), 0, state_dir=place)
    running = query.start()
    with pytest.raises(ConfigError, match="its query is running; stop it first"):
        rewind(spark, str(query.checkpoint), 0, state_dir=place)
    running.stop()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the same folder", "another folder", "an object store"])
def test_a_copy_goes_on_beside_the_original(
    spark: SparkSession,
    stream: FileStream,
    tmp_path: Path,
    place: Callable[[str], None],
    bucket: ObjectStore,
    where: str,
) -> None:
    """It is made while the original runs, and what becomes of the original afterwards does not matter."""
    if where == "an object store":
        place(bucket.uri("original"))
    old = spark.conf.get("spark.aion.state.dir")
    new = {"another folder": str(tmp_path / "state"), "an object store": bucket.uri("copy")}.get(where, old)
    query, copy = Query(stream, tmp_path / "checkpoint"), Query(stream, tmp_path / "copies" / "checkpoint")
    running = query.start()
    for number in range(2):
        stream.put(batch(number))
        take_all(running)
    done = fork(spark, str(query.checkpoint), str(copy.checkpoint), state_dir=old, new_state_dir=new)
    assert done.shards == {"windowed": 2}
    copy.table = dict(query.tables[done.batch])
    stream.put(batch(2))
    take_all(running)
    running.stop()
    if where == "another folder":  # nothing of the original is needed
        shutil.rmtree(Path(old) / running.id)
        shutil.rmtree(query.checkpoint)
    place(new)
    copy.run(3)
    assert _settled(copy.table) == expected(stream, 4)
    if where != "another folder":
        place(old)
        query.start(availableNow=True).awaitTermination()
        assert _settled(query.table) == expected(stream, 4)
    with pytest.raises(ConfigError, match="there is something already"):
        fork(spark, str(copy.checkpoint), str(copy.checkpoint), state_dir=new)


@pytest.mark.slow
def test_a_copy_does_not_begin_with_the_state_of_an_earlier_one(
    spark: SparkSession, stream: FileStream, tmp_path: Path
) -> None:
    """One that has never run leaves nothing that matters; one that has run leaves versions that are nobody's."""
    place, query = spark.conf.get("spark.aion.state.dir"), Query(stream, tmp_path / "checkpoint")
    copy = Query(stream, tmp_path / "copy")
    query.run(0)
    fork(spark, str(query.checkpoint), str(copy.checkpoint), state_dir=place)
    shutil.rmtree(copy.checkpoint)
    query.run(1)
    made = fork(spark, str(query.checkpoint), str(copy.checkpoint), state_dir=place)
    copy.table = dict(query.tables[made.batch])
    copy.run(2)
    assert _settled(copy.table) == expected(stream, 3)
    shutil.rmtree(copy.checkpoint)
    with pytest.raises(ConfigError, match=r"an earlier copy was at this place.*aion inspect STATE_DIR --forget --gone"):
        fork(spark, str(query.checkpoint), str(copy.checkpoint), state_dir=place)
    assert not copy.checkpoint.exists()
    forget_gone(place)
    made = fork(spark, str(query.checkpoint), str(copy.checkpoint), state_dir=place)
    copy.table = dict(query.tables[made.batch])
    copy.start(availableNow=True).awaitTermination()
    assert _settled(copy.table) == expected(stream, 3)


@pytest.mark.parametrize("how", ["rewind", "repair"])
def test_what_a_batch_that_is_undone_decided_about_files_is_forgotten(
    spark: SparkSession, tmp_path: Path, how: str
) -> None:
    """The next batch of its number has other files. What it decides must last, or it would read others when it runs
    again.
    """
    for name in ("metadata", "commits/1", "commits/2", "offsets/1", "offsets/2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"id": "query"}')
    for number in (1, 2):
        Records(str(tmp_path), "cars", number, (0, 1), 7).decide({"a": "it is damaged"})
    if how == "rewind":
        complete(CheckpointFiles(spark, str(tmp_path)), Rewound(1, 2, "name"))
    else:
        set_back(tmp_path, "query", 1)
    assert Records(str(tmp_path), "cars", 1, (0, 1), 8).known() == {"a": "it is damaged"}
    now = Records(str(tmp_path), "cars", 2, (0, 1), 8)
    assert now.decide({"a": None, "b": "it is damaged"}) == {"a": None, "b": "it is damaged"} == now.known()


@pytest.mark.slow
def test_a_checkpoint_that_spark_cannot_read_is_refused_until_it_is_copied(
    spark: SparkSession, stream: FileStream, tmp_path: Path
) -> None:
    """Spark's reader of state escapes its path twice."""
    place, query, new = spark.conf.get("spark.aion.state.dir"), Query(stream, tmp_path / "a b"), str(tmp_path / "new")
    query.run(0)
    query.run(1)
    old = str(query.checkpoint)
    calls: list[Callable[[str], Any]] = [
        lambda checkpoint: aion.read_state(spark, checkpoint).count(),
        lambda checkpoint: fork(spark, checkpoint, new, state_dir=place),
        lambda checkpoint: rewind(spark, checkpoint, 0, state_dir=place),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="path has a space"):
            call(old)
        with pytest.raises(ConfigError, match="Spark cannot reach 'nope://x'; give a path"):
            call("nope://x")
    query.checkpoint = tmp_path / "copy"
    shutil.copytree(old, query.checkpoint)
    with pytest.raises(ConfigError, match="Spark does not have its state after batch 99 any more"):
        tokens_of(spark, CheckpointFiles(spark, str(query.checkpoint)), 99)
    for call in calls:
        call(str(query.checkpoint))
    query.run(2)
    shutil.rmtree(old)
    with pytest.raises(ConfigError, match="put its folder state back"):
        calls[0](str(query.checkpoint))


@pytest.mark.slow
def test_what_cannot_be_copied_is_said(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    place, query = spark.conf.get("spark.aion.state.dir"), Query(stream, tmp_path / "checkpoint")
    query.run(0)
    old = str(query.checkpoint)
    for new, state, said in (
        (f"{old}/inside", place, "it would be inside of the checkpoint"),
        (
            str(tmp_path / "new"),
            str(tmp_path / "nothing"),
            r"versions that it names are not there \(\d of \d\); is this the query's",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            fork(spark, old, new, state_dir=state)
        assert not Path(new).exists()
    with pytest.raises(ConfigError, match="not in one file system or object store"):
        fork(spark, old, str(tmp_path / "new"), state_dir=place, new_state_dir="s3://bucket/state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "input"]


@pytest.mark.slow
def test_state_without_spark_is_that_of_the_batches_after_going_back(
    spark: SparkSession, stream: FileStream, tmp_path: Path, place: Callable[[str], None]
) -> None:
    """Other shards have events after the query went back than before."""
    place(state := str(tmp_path / "state"))

    def run(number: int, keys: str) -> int:
        pq.write_table(table_of(EVENTS, [(key, 1, 1.0) for key in keys]), stream.folder / f"{number}.parquet")
        panes = aion.windowed(stream.read(EVENTS_DDL).withWatermark("ts", "1 hour"), **DEFINITION)
        writer = panes.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return max(int(path.name) for path in (tmp_path / "checkpoint" / "commits").glob("[0-9]*"))

    def counts() -> dict[str, int]:
        rows = aion.state.read(state).read_all().to_pylist()
        return {row["k"]: row["n"] for row in rows if row["window"] == "minutes"}

    first = run(0, "abcdefgh")
    run(1, "abcdefgh")
    assert counts() == dict.fromkeys("abcdefgh", 2)
    rewind(spark, str(tmp_path / "checkpoint"), first, state_dir=state)
    assert counts() == dict.fromkeys("abcdefgh", 1)
    for number in (1, 2):
        assert run(number, "a") == first + number
        assert counts() == {**dict.fromkeys("abcdefgh", 1), "a": 1 + number}


@pytest.mark.slow
def test_the_commands_say_what_they_do(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    state, query = spark.conf.get("spark.aion.state.dir"), Query(stream, tmp_path / "checkpoint")
    query.run(0, 1)

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "aion", *words, "--state", state]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout

    said = run("fork", str(query.checkpoint), str(tmp_path / "copy"))
    assert "is the query as after batch" in said and "2 shards of 'windowed'" in said and str(tmp_path / "copy") in said
    said = run("rewind", str(query.checkpoint), "--to", "1")
    assert "goes back from batch" in said and "to batch 1.\nThe state of 'windowed' is as after batch 1, in 2" in said
    assert CheckpointFiles(spark, str(query.checkpoint)).batches("commits")[-1] == 1
    assert CheckpointFiles(spark, str(tmp_path / "copy")).batches("commits")[-1] > 1


class Tables:
    """A query whose panes go to tables in SQLite: one that can go back, and if asked one that cannot."""

    def __init__(self, stream: FileStream, folder: Path, *, other: bool = False) -> None:
        self.stream, self.checkpoint, self.file = stream, folder / "checkpoint", folder / "tables.db"
        uri = f"sqlite:///{self.file}"
        self.sinks: list[Any] = [aion.sinks.upsert(uri, "panes", undo="100 batches", changes="changes", dropped="late")]
        if other:
            self.sinks.append(aion.sinks.upsert(uri, "others"))
        self.copies: dict[int, list[Any]] = {}

    def run(self, *numbers: int) -> int:
        for number in numbers:
            self.stream.put(batch(number) + ([("key-0", -9_999, 1.0)] if number else []))
            self.start()
        return max(self.copies)

    def start(self) -> None:
        def write(rows: DataFrame, number: int) -> None:
            for sink in self.sinks:
                sink(rows, number)
            self.copies[number] = self.rows()

        panes = aion.windowed(self.stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), **DEFINITION)
        writer = panes.writeStream.foreachBatch(write).option("checkpointLocation", str(self.checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    def rows(self) -> list[Any]:
        with closing(sqlite3.connect(self.file)) as database:
            there = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            names = [name for (name,) in there if name in ("panes", "changes", "late")]
            return [(name, sorted(database.execute(f"SELECT * FROM {name}"), key=repr)) for name in sorted(names)]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_tables_go_back_with_their_query(
    spark: SparkSession, stream: FileStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """``killed``: the command dies before it comes to the tables. Then the sink itself takes its table back."""
    state, query = spark.conf.get("spark.aion.state.dir"), Tables(stream, tmp_path)
    middle = query.run(0, 1)
    query.run(2)
    end = query.rows()
    if killed:
        monkeypatch.setattr(going_back.Tables, "go_back", _dies)
        with pytest.raises(KeyboardInterrupt):
            rewind(spark, str(query.checkpoint), middle, state_dir=state)
    else:
        done = rewind(spark, str(query.checkpoint), middle, state_dir=state)
        assert (done.left, len(done.tables)) == ({}, 1)
        assert query.rows() == query.copies[middle]
    query.start()
    panes, before = (dict(rows)["panes"] for rows in (query.rows(), end))
    assert panes and [row[:5] for row in panes] == [row[:5] for row in before]
    assert dict(query.rows())["late"] and query.rows() != query.copies[middle]


class Lake(Tables):
    """The same with a table of Delta Lake, and another one for what was dropped."""

    def __init__(self, stream: FileStream, folder: Path) -> None:
        super().__init__(stream, folder)
        self.places = {"panes": folder / "lake", "late": folder / "left-out"}
        self.sinks = [aion.sinks.merge("delta", str(self.places["panes"]), dropped=str(self.places["late"]))]

    def rows(self) -> list[Any]:
        found = []
        for name, place in self.places.items():
            table = pa.table(QueryBuilder().register("t", DeltaTable(str(place))).execute("SELECT * FROM t").read_all())
            found.append((name, sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_tables_of_a_lake_go_back_with_their_query(
    spark: SparkSession, stream: FileStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    state, query = spark.conf.get("spark.aion.state.dir"), Lake(stream, tmp_path)
    middle = query.run(0, 1)
    query.run(2)
    end = query.rows()
    assert rewind(spark, str(query.checkpoint), middle, state_dir=state, dry_run=True).left == {}
    if killed:
        monkeypatch.setattr(going_back.Tables, "go_back", _dies)
        with pytest.raises(KeyboardInterrupt):
            rewind(spark, str(query.checkpoint), middle, state_dir=state)
        assert query.rows() == end
    else:
        done = rewind(spark, str(query.checkpoint), middle, state_dir=state)
        assert (done.left, list(done.tables)) == ({}, [str(query.places["panes"])])
        assert query.rows() == query.copies[middle]
    query.start()
    panes, before = (dict(rows)["panes"] for rows in (query.rows(), end))
    assert panes and [row[:5] for row in panes] == [row[:5] for row in before]
    assert len(dict(query.rows())["late"]) == len(dict(end)["late"])


def _dies(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_table_that_cannot_go_back_is_named(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    state, query = spark.conf.get("spark.aion.state.dir"), Tables(stream, tmp_path, other=True)
    middle = query.run(0)
    query.run(1)
    before = query.rows()
    with pytest.raises(ConfigError, match=r"nothing was changed.*--leave-tables.*\n  others of sqlite.*undo="):
        rewind(spark, str(query.checkpoint), middle, state_dir=state)
    assert query.rows() == before
    done = rewind(spark, str(query.checkpoint), middle, state_dir=state, leave_tables=True)
    assert [table.partition(" ")[0] for table in (*done.tables, *done.left)] == ["panes", "others"]
    assert query.rows() == query.copies[middle]
    with pytest.raises(StreamingQueryException, match="the checkpoint went back"):
        query.start()
