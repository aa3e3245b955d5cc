"""The main road on Spark: every feature end to end, against LocalOperator or the plain truth."""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from tests.spark.conftest import EVENTS, EVENTS_DDL, SECOND, FileStream, Sink, last_panes, plain

ALL = {
    "n": A.count(),
    "values": A.count("v"),
    "total": A.sum("v"),
    "average": A.mean("v"),
    "low": A.min("v"),
    "high": A.max("v"),
}
BOUND = {"lateness": {"initial_bound": "60 seconds", "coverage": None}, "trigger": {"kind": "every_batch"}}


def batches(seed: int, *, count: int = 6, size: int = 40) -> list[list[tuple[Any, ...]]]:
    """Batches of (key, seconds, value): time goes on by 20 s each, some events late, some too late, some null."""
    rng = random.Random(seed)
    result = []
    for number in range(count):
        rows: list[tuple[Any, ...]] = [("clock", 1000 + 20 * (number + 1), 0.0)]
        for _ in range(size):
            behind = rng.choice([0, 0, 0, 0, 25, 50, 130])
            at = 1000 + 20 * number + rng.randrange(20) - behind
            value = rng.choice([None, float(rng.randrange(100)), float(rng.randrange(100))])
            rows.append((rng.choice(["a", "b", None]), None if rng.random() < 0.03 else at, value))
        result.append(rows)
    return result


def locally(tables: list[pa.Table], **definition: Any) -> list[dict[str, Any]]:
    """What LocalOperator yields for the micro-batches that Spark makes of these files."""
    rows: list[dict[str, Any]] = []
    watermark = 0
    with aion.LocalOperator(**definition) as operator:
        for table in tables:
            rows += operator.process(table, watermark or None).to_pylist()
            latest = max((t for t in table.column("ts").cast(pa.int64()).to_pylist() if t is not None), default=0)
            watermark = max(watermark, latest // 1000 * 1000)
        rows += operator.advance(watermark).to_pylist()  # Spark's last batch, without data
        rows += operator.close().to_pylist()
    return rows


def naive(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Spark's rows have times without a zone, in UTC here."""
    return [{k: v.replace(tzinfo=None) if isinstance(v, dt.datetime) else v for k, v in row.items()} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "definition",
    [
        pytest.param({"key": "k", "windows": aion.Tumbling("10 seconds"), "aggregates": ALL}, marks=pytest.mark.proof),
        pytest.param(
            {"windows": [aion.Tumbling("10 seconds"), aion.Sliding("30 seconds", "20 seconds")], "aggregates": ALL},
            marks=pytest.mark.proof,
        ),
        {
            "key": "k",
            "windows": aion.Tumbling("10 seconds", fill="zero", fill_for="40 seconds"),
            "aggregates": ALL,
        },
        {"key": "k", "windows": aion.Cumulative("10 seconds", "40 seconds", offset="5 seconds"), "aggregates": ALL},
        {
            "key": ["k", "v"],
            "windows": aion.Tumbling("20 seconds", offset="5 seconds"),
            "apply": aion.Apply(
                lambda key, window, events: {"n": sum(b.num_rows for b in events), "from": window.start},
                "n bigint, from bigint",
            ),
        },
    ],
    ids=["one key", "no key, two windows", "windows that are filled", "windows that grow", "several keys, apply"],
)
def test_the_same_panes_as_without_spark(stream: FileStream, sink: Sink, definition: dict[str, Any]) -> None:
    policy = {**BOUND, "state": {"shards": 1}}
    tables = [stream.put(rows) for rows in batches(1, count=3)]
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    got = sink.run(aion.windowed(events, time="ts", policy=policy, **definition))
    expected = naive(locally(tables, time="ts", policy=policy, **definition))
    kinds = {row["kind"] for row in got}
    assert kinds == {"on_time", "late", "dropped"}
    assert (0 in {row["events"] for row in got}) == (getattr(definition["windows"], "fill", None) is not None)
    assert plain(got) == plain(expected)


@pytest.mark.proof
def test_overlapping_windows_are_the_same_whichever_way_they_are_combined(stream: FileStream, sink: Sink) -> None:
    """Eager on Spark, as the policy there says, and lazy here."""
    policy = {**BOUND, "state": {"shards": 1}}
    tables = [stream.put(rows) for rows in batches(3, count=4)]
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    definition: dict[str, Any] = {
        "key": "k", "time": "ts", "windows": aion.Sliding("40 seconds", "1 second"), "aggregates": ALL,
    }  # fmt: skip
    eager = aion.windowed(events, policy={**policy, "execution": {"aggregation": "eager"}}, **definition)
    assert "overlap eager, as the policy says: runs of slices are combined first" in " ".join(
        aion.explain(events, policy={**policy, "execution": {"aggregation": "eager"}}, **definition).split()
    )
    got = sink.run(eager)
    expected = naive(locally(tables, policy={**policy, "execution": {"aggregation": "lazy"}}, **definition))
    assert len(got) > 300
    assert plain(got) == plain(expected)


@pytest.mark.proof
def test_a_window_before_1970_keeps_no_other_waiting(stream: FileStream, sink: Sink) -> None:
    """The second batch has no rows, so each shard has to be woken."""
    keys = [f"k{i}" for i in range(8)]
    stream.put([("end", 2000, 0.0), *((k, s, 1.0) for k in keys for s in (-86_400, 1001))])
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    definition: dict[str, Any] = {"windows": aion.Tumbling("10 seconds"), "aggregates": {"n": A.count()}}
    rows = sink.run(aion.panes(aion.windowed(events, key="k", time="ts", **definition)).drop("window"))
    assert sorted((row["k"], row["kind"], row["n"]) for row in rows) == [
        (k, "on_time", 1) for k in keys for _ in range(2)
    ]


def test_late_rows_are_not_dropped_and_nothing_is_lost(stream: FileStream, sink: Sink) -> None:
    rows = [row for batch in batches(2) for row in batch]
    for batch in batches(2):
        stream.put(batch)
    stream.put([("clock", 5000, 0.0)])
    events = stream.read(EVENTS_DDL).withWatermark("ts", "5 seconds")
    got = sink.run(
        aion.windowed(
            events, key="k", time="ts", windows=aion.Tumbling("10 seconds"), aggregates={"n": A.count()}, policy=BOUND
        )
    )
    last = last_panes(got, "k")
    dropped = [row for row in got if row["kind"] == "dropped"]
    # The clock's own last window is still open.
    assert sum(r["events"] for r in last.values()) + sum(r["events"] for r in dropped) == len(rows)
    assert sum(r["late_events"] for r in last.values()) > 0
    assert {r["reason"] for r in dropped} == {"later than the window's bound", "the event time is null"}
    assert all(r["n"] == r["events"] for r in got)
    assert all(r["lateness_us"] >= 60 * SECOND for r in dropped if r["window_start"])


def test_panes_and_dropped_split_the_result(stream: FileStream, spark: SparkSession) -> None:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "5 seconds")
    result = aion.windowed(events, key="k", time="ts", windows=aion.Tumbling("10 seconds"), aggregates=ALL)
    common = ["k", "window", "window_start", "window_end", *ALL]
    assert aion.panes(result).columns == [*common, "pane", "kind", "events", "late_events", "closes_at", "pane_seq"]
    extra = ["kind", "events", "late_events", "event_time", "lateness_us", "reason", "event"]
    assert aion.dropped(result).columns == [*common, *extra]


@pytest.mark.proof
@pytest.mark.parametrize("keeps", ["partials", "events"])
def test_backends_give_the_same_panes(stream: FileStream, spark: SparkSession, tmp_path: Path, keeps: str) -> None:
    for rows in batches(3):
        stream.put(rows)
    how: dict[str, Any] = (
        {"aggregates": ALL}
        if keeps == "partials"
        else {"apply": aion.Apply(lambda k, w, e: {"s": sum(b.num_rows for b in e)}, "s int")}
    )
    results = {}
    for backend in ("tiered", "memory", "rocksdb"):
        folder = tmp_path / backend
        events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
        policy = {
            **BOUND,
            "state": {"backend": backend, "compression": "zstd" if backend == "rocksdb" else "none"},
            "memory": {"budget": "4KiB", "bucket_limit": "1KiB"},
        }
        result = aion.windowed(
            events, key="k", time="ts", windows=aion.Sliding("20 seconds", "10 seconds"), policy=policy, **how
        )
        results[backend] = plain(Sink(folder).run(result))
    assert results["tiered"] == results["memory"] == results["rocksdb"]
    assert len(results["tiered"]) > 50


def server_pid(spark: SparkSession) -> int:
    from state_backends.server.client import runtime_dir

    return int((runtime_dir(spark.sparkContext.applicationId) / "pid").read_text())


@pytest.mark.parametrize("server", [pytest.param("lives on", marks=pytest.mark.proof), "is killed"])
def test_restart_from_a_checkpoint_goes_on_exactly(
    stream: FileStream, spark: SparkSession, sink: Sink, server: str
) -> None:
    definition: dict[str, Any] = {
        "key": "k", "time": "ts", "windows": aion.Tumbling("10 seconds"), "aggregates": ALL, "policy": BOUND,
    }  # fmt: skip
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    first, *second = batches(4, count=3)
    tables = [stream.put(first)]
    sink.run(aion.windowed(events, **definition))
    if server == "is killed":
        os.kill(server_pid(spark), signal.SIGKILL)
    tables += [stream.put(rows) for rows in second]
    got = sink.run(aion.windowed(events, **definition))
    undisturbed = naive(locally(tables, **definition))
    # The run that stopped had one batch more, without data, so it executed some windows earlier.
    assert plain(strip(last_panes(got, "k").values())) == plain(strip(last_panes(undisturbed, "k").values()))
    dropped = [sum(r["events"] for r in rows if r["kind"] == "dropped") for rows in (got, undisturbed)]
    assert dropped[0] == dropped[1] > 0


def strip(rows: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("pane", "kind", "late_events")} for row in rows]


def test_a_failing_commit_is_retried_and_counts_once(
    stream: FileStream, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aion.spark.api import stream as module
    from aion.spark.tasks.root import Root

    def make() -> type:
        # A class that is local to a function travels to the workers by value.
        class FlakyRoot(Root):
            def close(self) -> None:
                from pyspark import TaskContext

                context = TaskContext.get()
                if context is not None and self._works and context.attemptNumber() == 0:
                    raise OSError("the disk is on fire")
                super().close()

        return FlakyRoot

    tables = [stream.put(rows) for rows in batches(5, count=2)]
    definition: dict[str, Any] = {
        "key": "k",
        "time": "ts",
        "windows": aion.Tumbling("10 seconds"),
        "aggregates": ALL,
        "policy": {**BOUND, "state": {"shards": 1}},
    }
    monkeypatch.setattr(module, "Root", make())
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    got = sink.run(aion.windowed(events, **definition))
    assert plain(got) == plain(naive(locally(tables, **definition)))


@pytest.mark.slow
def test_a_function_that_raises_names_key_and_window_and_commits_nothing(stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 1001, 1.0), ("b", 1002, 2.0)])
    stream.put([("a", 1030, 1.0)])

    def run(function: Any) -> list[dict[str, Any]]:
        events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
        return sink.run(
            aion.windowed(
                events,
                key="k",
                time="ts",
                windows=aion.Tumbling("10 seconds"),
                apply=aion.Apply(function, "n int"),
            )
        )

    def broken(key: Any, window: Any, events: Any) -> Any:
        return {"n": 1 // (key[0] != "b")}

    with pytest.raises(Exception, match=r"ApplyError.*key \('b',\).*1970-01-01T00:16:40Z.*ZeroDivisionError"):
        run(broken)
    got = run(lambda key, window, events: {"n": sum(b.num_rows for b in events)})
    assert [(r["k"], r["n"], r["pane"]) for r in sorted(got, key=lambda r: r["k"])] == [("a", 1, 0), ("b", 1, 0)]


@pytest.mark.proof
def test_changed_windows_are_refused_by_name(stream: FileStream, sink: Sink) -> None:
    def run(size: str) -> None:
        events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
        sink.run(aion.windowed(events, key="k", time="ts", windows=aion.Tumbling(size), aggregates=ALL))

    stream.put([("a", 1001, 1.0)])
    run("10 seconds")
    stream.put([("a", 1002, 1.0)])
    with pytest.raises(Exception, match=r"definition: windows: was tumbling 10 seconds; is tumbling 20 seconds"):
        run("20 seconds")


@pytest.mark.proof
def test_state_of_a_newer_format_is_refused(stream: FileStream, sink: Sink, spark: SparkSession) -> None:
    import zlib

    def run() -> None:
        events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
        windows = aion.Tumbling("10 seconds")
        sink.run(aion.windowed(events, key="k", time="ts", windows=windows, aggregates=ALL))

    stream.put([("a", 1001, 1.0)])
    run()
    os.kill(server_pid(spark), signal.SIGKILL)
    state = Path(spark.conf.get("spark.aion.state.dir") or "")
    manifests = list((state / sink.query_id).rglob("manifests/*.json"))
    assert manifests
    for manifest in manifests:
        body = manifest.read_bytes().rstrip(b"\n").rpartition(b"\n")[0].replace(b'"format":4', b'"format":99', 1)
        manifest.write_bytes(body + b"\n%08x\n" % zlib.crc32(body))
    stream.put([("a", 1002, 1.0)])
    with pytest.raises(Exception, match=r"FormatError.*written in format 99; this Aion reads format 4"):
        run()


@pytest.mark.proof
def test_two_operators_of_one_query_need_names(stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 1001, 1.0)])
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")

    def counted(column: str, name: str) -> Any:
        return aion.windowed(
            events, key=column, time="ts", windows=aion.Tumbling("10 seconds"), aggregates={"n": A.count()}, name=name
        ).select(F.col(column).cast("string").alias("key"), "n", "kind", "pane", "events")

    with pytest.raises(Exception, match=r"two operators of this query are both named 'windowed'"):
        sink.run(counted("k", "windowed").union(counted("v", "windowed")))
    twice = counted("k", "twice")
    with pytest.raises(Exception, match=r"the result of the operator 'twice' is used twice in this query"):
        sink.run(twice.filter("kind <> 'dropped'").union(twice.filter("kind = 'dropped'")))


@pytest.mark.slow
def test_values_of_every_type_reach_the_function_and_come_back(spark: SparkSession, tmp_path: Path) -> None:
    schema = pa.schema(
        [
            ("ts", pa.timestamp("us", "UTC")),
            ("s", pa.string()),
            ("b", pa.binary()),
            ("d", pa.date32()),
            ("m", pa.decimal128(12, 3)),
            ("i", pa.int64()),
            ("l", pa.list_(pa.int32())),
            ("o", pa.struct([("x", pa.int32()), ("y", pa.string())])),
        ]
    )
    ddl = "ts timestamp, s string, b binary, d date, m decimal(12,3), i bigint, l array<int>, o struct<x:int,y:string>"
    row = (
        1001, 'a "quoted", ü', b"\x00\xff", dt.date(2024, 2, 29), 12, 2**62 + 1, [1, None, 3], {"x": None, "y": "z"},
    )  # fmt: skip
    stream = FileStream(spark, tmp_path / "input", schema)
    stream.put([row, (1002, *[None] * 7)])
    stream.put([(1100, *[None] * 7)])
    events = stream.read(ddl).withWatermark("ts", "0 seconds")
    got = Sink(tmp_path).run(
        aion.windowed(
            events,
            time="ts",
            windows=aion.Tumbling("10 seconds"),
            apply=aion.Apply(
                lambda key, window, events: [
                    {f"r_{name}": value for name, value in r.items()} for b in events for r in b.to_pylist()
                ],
                ", ".join(f"r_{part}" for part in ddl.split(", ")),
            ),
        )
    )
    values, nulls = sorted(got, key=lambda r: r["r_ts"])
    assert [values[f"r_{n}"] for n in "sdil"] == [row[1], row[3], row[5], row[6]]
    assert (bytes(values["r_b"]), float(values["r_m"]), values["r_o"]) == (row[2], 12.0, row[7])
    assert all(nulls[f"r_{n}"] is None for n in "sbdmilo")


@pytest.mark.proof
def test_punctuated_watermarks(spark: SparkSession, tmp_path: Path) -> None:
    stream = FileStream(spark, tmp_path / "input", EVENTS)
    stream.put([("a", 1001, 1.0), ("a", 1035, 2.0)])
    stream.put([("flush", 1010, 0.0)])
    stream.put([("a", 1002, 3.0)])
    events = stream.read(EVENTS_DDL).withColumn("flushed", F.expr("if(k = 'flush', ts, null)"))
    got = Sink(tmp_path).run(
        aion.windowed(
            events.withWatermark("flushed", "0 seconds"),
            key="k",
            time="ts",
            windows=aion.Tumbling("10 seconds"),
            aggregates={"total": A.sum("v")},
            policy=BOUND,
        )
    )
    assert sorted((r["k"], r["kind"], r["total"]) for r in got) == [("a", "late", 4.0), ("a", "on_time", 1.0)]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["rows", pytest.param("files", marks=pytest.mark.proof)])
def test_columns_and_windows_may_have_any_names(spark: SparkSession, tmp_path: Path, source: str) -> None:
    """Dots, spaces and backticks mean something in Spark's expressions."""
    schema = pa.schema([("a.b", pa.string()), ("my ts", pa.timestamp("us", "UTC")), ("`v`", pa.float64())])
    ddl = "`a.b` string, `my ts` timestamp, ```v``` double"
    stream = FileStream(spark, tmp_path / "input", schema)
    tables = [stream.put([("x", 1.0, 2.0), ("y", 2.0, 3.0), (None, 65.0, 5.0)]), stream.put([("x", 130.0, 7.0)])]
    definition: dict[str, Any] = {
        "key": "a.b",
        "time": "my ts",
        "windows": {"w.1 `ü`": aion.Tumbling("1 minute")},
        "aggregates": {"n.1": A.sum("`v`"), "the `mean`": A.mean("`v`")},
    }
    if source == "files":
        path = str(tmp_path / "input")
        events: Any = aion.read_files(spark, path, schema=ddl, watermark=("my ts", "0 s"), max_files_per_trigger=1)
    else:
        events = stream.read(ddl).withWatermark("`my ts`", "0 seconds")
    rows = Sink(tmp_path).run(aion.windowed(events, **definition))
    with aion.LocalOperator(**definition) as operator:
        operator.process(tables[0])
        expected = operator.process(tables[1], 65_000_000).to_pylist() + operator.advance(130_000_000).to_pylist()
    assert plain(rows) == plain(naive(expected)) and len(rows) == 3
