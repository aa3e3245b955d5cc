"""The Python of the documents, run on Spark as it stands; what it leaves behind is compared with plain computations.

A page's blocks are one program. What they take for granted is given: the imports of the guide and ``events``.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion.config import SPARK_PREFIX
from tests import documents
from tests.documents import RECIPES, SAID, run_python
from tests.spark.conftest import settle
from tests.spark.truths import Event, equal, instant, newest, positions, seconds, tolls, visits, write

pytestmark = pytest.mark.timeout(900)  # on a loaded machine

Names = dict[str, Any]
UNREGISTERED = {"spark.local.dir"}  # which Spark reads by its name
OWN_NAMES = (
    SPARK_PREFIX, "spark.executorEnv.", "spark.yarn.appMasterEnv.", "spark.kubernetes.executor.volumes.emptyDir.",
    "spark.kubernetes.driver.secretKeyRef.", "spark.kubernetes.executor.secretKeyRef.",
)  # fmt: skip


def test_settings_of_spark_that_are_named_exist(spark: SparkSession) -> None:
    """As Spark itself says; but for our own, and environments, which have names of the user's."""
    named = {key: str(c) for c in documents.commands(("spark-submit",)) for key in documents.spark_settings(c)}
    for page in documents.PAGES:
        named |= dict.fromkeys(re.findall(r"`(spark\.[a-z]\w*\.[\w.]+)`", documents.read(page)[1]), page)
    java: Any = spark.sparkContext._jvm
    java.java.lang.Class.forName(
        "org.apache.spark.deploy.k8s.Config$"
    )  # which registers its settings when it is loaded
    entries = java.org.apache.spark.internal.config.ConfigEntry
    assert {"spark.executor.memoryOverhead", "spark.sql.shuffle.partitions"} <= named.keys()
    for key, where in named.items():
        if key not in UNREGISTERED and not key.startswith(OWN_NAMES):
            assert entries.findEntry(key) is not None, f"{where}: Spark has no {key}"
    assert entries.findEntry("spark.no.such.setting") is None


def test_plain_spark_has_no_sessions_in_update_mode(alone: SparkSession, tmp_path: Path) -> None:
    """As docs/start/comparison.md says."""
    stream = alone.readStream.format("rate").load().withWatermark("timestamp", "1 minute")
    sessions = stream.groupBy("value", F.session_window("timestamp", "1 minute")).count()
    with pytest.raises(AnalysisException, match="session window"):
        sessions.writeStream.format("memory").queryName("sessions").outputMode("update").start()


# -- the pages that share a stream ----------------------------------------------------------------------------

POSITIONS = pa.schema(
    [("ts", pa.timestamp("us", "UTC")), ("segment", pa.int32()), ("speed", pa.float64()), ("user", pa.string())]
)
DDL = "ts timestamp, segment int, speed double, user string"
THE_REST: Mapping[str, Any] = {
    "key": "segment",
    "time": "ts",
    "windows": aion.Tumbling("1 minute"),
    "aggregates": {"cars": A.count(), "speed": A.mean("speed")},
}


@dataclass
class Stage:
    """What a page is checked with: its names, its folder, all events that it got, and what was started for it."""

    spark: SparkSession
    stream: DataFrame
    events: list[Event]
    folder: Path
    names: Names

    def rows(self, name: str) -> DataFrame:
        """What a stream that the page defines, and does not start, yields of all that came."""
        table = f"{self.folder.name}-{name}".translate(str.maketrans("-.", "__"))
        stream: DataFrame = self.names[name]
        stream.writeStream.format("memory").queryName(table).trigger(availableNow=True).start().awaitTermination()
        return self.spark.table(table)


def check_guide(stage: Stage) -> None:
    # A batch computation over all events, the late ones included.
    panes = stage.spark.read.parquet(str(stage.folder / "tolls"))
    events = [e for e in stage.events if e["user"] != "end"]
    equal(newest(panes, "cars", "speed"), tolls(events, 60, 60) | tolls(events, 300, 60))
    assert {row["kind"] for row in panes.select("kind").distinct().collect()} >= {"on_time"}
    assert panes.where("late_events > 0").count()
    kept = {}
    with closing(sqlite3.connect(stage.folder / "visits.db")) as db:
        for segment, begin, end, cars in db.execute("SELECT segment, window_start, window_end, cars FROM visits"):
            kept[segment, instant(begin), instant(end)] = cars
    assert kept == visits(events, 30, key="segment")


def check_apply(stage: Stage) -> None:
    events = [e for e in stage.events if e["user"] != "end"]
    slowest: dict[Any, list[float]] = defaultdict(list)
    for e in events:
        start = e["ts"] // 60 * 60
        slowest[e["segment"], start, start + 60].append(e["speed"])
    truth = {place: (sum(sorted(found)[:10]) / len(found[:10]),) for place, found in slowest.items()}
    equal(newest(stage.rows("jams"), "slowest"), truth)


def check_local(stage: Stage) -> None:
    assert stage.names["operator"].close().num_rows == 0, "the page's own `with` has closed it"


def check_retractions(stage: Stage) -> None:
    with closing(sqlite3.connect(stage.folder / "visits.db")) as db:
        rows = db.execute("SELECT user, clicks FROM visits").fetchall()
        assert sorted(rows) == sorted(
            (user, clicks) for (user, *_), clicks in visits(stage.events, 1800).items() if user != "end"
        )


def check_panes(stage: Stage) -> None:
    day, minute = (window.timing for window in stage.names["windows"].values())
    assert (day.early_us, minute.bound_us) == (60_000_000, 7_200_000_000)


def check_chaining(stage: Stage) -> None:
    most: dict[Any, tuple[int, int]] = {}
    for (segment, begin, _), (cars, _) in tolls(stage.events[:-1], 60, 60).items():
        place = (segment, begin // 300 * 300, begin // 300 * 300 + 300)
        largest, total = most.get(place, (0, 0))
        most[place] = (max(largest, cars), total + cars)
    equal(newest(stage.rows("busiest"), "most", "all"), most)


def check_sinks(stage: Stage) -> None:
    with closing(sqlite3.connect(stage.folder / "tolls.db")) as db:
        found = db.execute("SELECT segment, window_start, window_end, cars, speed FROM tolls").fetchall()
    rows = {(segment, instant(begin), instant(end)): values for segment, begin, end, *values in found}
    equal({place: tuple(values) for place, values in rows.items()}, tolls(stage.events[:-1], 60, 60))
    lake = deltalake.DeltaTable(str(stage.folder / "lake")).to_pyarrow_table().to_pylist()
    merged = {
        (r["segment"], seconds(r["window_start"]), seconds(r["window_end"])): (r["cars"], r["speed"]) for r in lake
    }
    equal(merged, tolls(stage.events[:-1], 60, 60))
    assert (stage.folder / "dropped").exists() and not list((stage.folder / "dropped").rglob("*.parquet"))


def check_bad_values(stage: Stage) -> None:
    """The page only makes a sink. Here the sink gets results, and the name of one segment is not UTF-8."""
    name = F.when(F.col("segment") == 1, F.expr("CAST(X'61FF' AS STRING)")).otherwise(F.col("segment").cast("string"))
    panes = aion.windowed(
        stage.stream.withWatermark("ts", "20 seconds").withColumn("segment", name), name="careful", **THE_REST
    )
    writer = panes.writeStream.foreachBatch(stage.names["careful"]).trigger(availableNow=True)
    writer.option("checkpointLocation", str(stage.folder / "careful-cp")).start().awaitTermination()
    with closing(sqlite3.connect(stage.folder / "careful.db")) as db:
        found = {row[0] for row in db.execute("SELECT segment FROM tolls")}
    assert found == {"0", "a\ufffd"}


def check_empty_windows(stage: Stage) -> None:
    newest_ = F.max_by("cars", "pane_seq").alias("cars")
    table = stage.rows("minutes").where("kind != 'dropped'").groupBy("segment", "window_start").agg(newest_)
    table.write.parquet(str(stage.folder / "table"))  # Spark 4.3 cannot join a table of its memory sink with itself
    table = stage.spark.read.parquet(str(stage.folder / "table"))
    rows = stage.names["filled"](table, table.select("segment").distinct()).collect()
    found = {(row["segment"], seconds(row["window_start"])): row["cars"] for row in rows}
    truth = {(segment, begin): cars for (segment, begin, _), (cars, _) in tolls(stage.events[:-1], 60, 60).items()}
    begins = range(min(b for _, b in truth), max(b for _, b in truth) + 1, 60)
    assert found == {(s, b): truth.get((s, b), 0) for s in {s for s, _ in truth} for b in begins}


def check_changes(stage: Stage) -> None:
    rows = stage.rows("more").groupBy("segment", "window_start").agg(F.sum("more").alias("all")).collect()
    found = {(row["segment"], seconds(row["window_start"])): row["all"] for row in rows}
    truth = tolls(stage.events[:-1], 60, 60)
    assert found == {(segment, begin): cars for (segment, begin, _), (cars, _) in truth.items()}


def check_levels(stage: Stage) -> None:
    equal(newest(stage.rows("panes"), "cars", "speed"), tolls(stage.events[:-1], 60, 60))


def check_files(stage: Stage) -> None:
    # The event that ends all windows has no speed, so `where` leaves it out, and it does not move the watermark.
    events = [e for e in stage.events if e["speed"] > 0]
    over = max(e["ts"] for e in events) - 20
    truth = {place: values for place, values in tolls(events, 60, 60).items() if place[-1] <= over}
    equal(newest(stage.rows("panes"), "cars", "speed"), truth)


def check_tuning(stage: Stage) -> None:
    from aion.execute.record.trace import read_trace

    equal(newest(stage.rows("panes"), "cars", "speed"), tolls(stage.events[:-1], 60, 60))
    assert read_trace(stage.folder / "trace").events == len(stage.events)


def check_policies(stage: Stage) -> None:
    """What its class suggests: tests/config/test_cli_policy.py."""
    options = stage.names["builder"]._options
    assert options[f"{SPARK_PREFIX}policy"] == str(stage.folder / "my.yaml")
    assert options[f"{SPARK_PREFIX}memory.budget"] == "25%"
    (local,) = [one for one in stage.names[SAID] if isinstance(one, aion.LocalOperator)]
    assert local.policy.memory.budget == 1 << 30


SHARED: dict[str, tuple[Callable[[Stage], None], ...]] = {
    "docs/start/guide.md": (check_guide, check_local),
    "docs/reference/aggregates.md": (check_apply,),
    "docs/reference/panes.md": (check_panes, check_retractions),
    "docs/how-to/chaining.md": (check_chaining,),
    "docs/how-to/sinks.md": (check_sinks, check_changes, check_bad_values),
    "docs/how-to/bad-data.md#rows-of-empty-windows": (check_empty_windows,),
    "docs/inside/distribution.md": (check_levels,),
    "docs/how-to/files.md": (check_files,),
    "docs/operate/tuning.md": (check_tuning,),
    "docs/reference/policies.md": (check_policies,),
}
"""Pages, and sections of pages, with what is checked of each."""
ELSEWHERE = (
    {"README.md"}
    | {
        f"docs/{name}.md"
        for name in (
            "inside/store",
            "start/notebook",
            "operate/metrics",
            "how-to/stateful",
            "how-to/joins",
            "how-to/looking-into-state",
        )
    }
    | {*RECIPES, "docs/how-to/rehearsal.md"}
)
"""Those with tests of their own: here, in ``test_recipes.py``, and in others."""


def test_every_page_with_python_is_run() -> None:
    """Each block is in one of these places, and each place has a block."""
    places = SHARED.keys() | ELSEWHERE
    blocks = documents.blocks("python")
    found = {block: [place for place in places if documents.is_in(block, place)] for block in blocks}
    assert {str(block): them for block, them in found.items() if len(them) != 1} == {}
    assert {place for them in found.values() for place in them} == places


@pytest.fixture
def closing_later() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.proof
def test_what_pages_say_of_a_stream(
    alone: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closing_later: ExitStack
) -> None:
    stages = positions()
    folder = tmp_path / "positions"
    write(folder, stages[0], POSITIONS)
    stream = alone.readStream.schema(DDL).parquet(str(folder))
    given = {"aion": aion, "A": A, "spark": alone, "builder": SparkSession.builder, "events": stream}
    told: list[Stage] = []
    for page in SHARED:
        own = tmp_path / page.translate(str.maketrans("/#", "--"))
        own.mkdir()
        (own / "positions").symlink_to(folder)
        (own / "my.yaml").write_text("memory:\n  budget: 1GiB\n")
        monkeypatch.chdir(own)
        # The guide says all that it needs; the others go on from there.
        names = run_python(page, {} if page == "docs/start/guide.md" else given, own, THE_REST)
        stage = Stage(alone, stream, [e for events in stages for e in events], own, names)
        settle(alone)  # a query begins with a Python of its own: not many at once
        told.append(stage)
        for one in names[SAID]:
            if isinstance(one, aion.LocalOperator):
                closing_later.callback(one.close)
    monkeypatch.chdir(tmp_path)
    settle(alone)
    for events in stages[1:]:
        write(folder, events, POSITIONS)
        settle(alone)
    for query in alone.streams.active:
        query.stop()
    for checks, stage in zip(SHARED.values(), told, strict=True):
        for check in checks:
            check(stage)


# -- pages with streams of their own --------------------------------------------------------------------------


def test_the_query_of_the_readme_prints_what_it_says(
    alone: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_python("README.md", {}, tmp_path, {})
    (said,) = documents.blocks_of("README.md", "text")
    assert capsys.readouterr().out.strip() == said.text.strip()


@pytest.mark.proof
def test_the_example_of_the_page_on_progress(alone: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_python("docs/operate/metrics.md", {}, Path("unused"), {})
    query, metrics = run["query"], run["metrics"]
    progress = query.recentProgress
    assert len(capsys.readouterr().out.splitlines()) == len(progress) + 2 >= 6
    observed: Counter[str] = Counter()
    for batch in progress:
        observed.update(batch["observedMetrics"]["panes"].asDict())
    written = {row["kind"]: row["count"] for row in alone.table("watched").groupBy("kind").count().collect()}
    assert +observed == written
    assert {"on_time", "late"} <= written.keys()
    # One window's result has no key, and so is a row for each execution.
    told = metrics.queries[query.id]["watched"]["counters"]
    assert told["executions"] == metrics.operators["watched"]["executions"]
    assert {kind: n for kind, n in told["executions"].items() if n} == {**written}
    assert told["events"] == 4_000
    assert sum(told["lateness"]["events"].values()) == told["late_events"] > 0
    # Spark sees of the state what the page says.
    (stateful,) = progress[-1]["stateOperators"]
    assert stateful["numRowsTotal"] == metrics.queries[query.id]["watched"]["shards"]
