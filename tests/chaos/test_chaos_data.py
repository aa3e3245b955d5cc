"""What the chaos experiment compares: that it would find what must not be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark.sql
import pytest
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

import aion
from aion import aggregates as A
from aion.stateful.handle import Handle
from aion.stateful.keys import Group, Keys
from aion.stateful.run import ShardRun
from aion.stateful.variables import Variables
from experiments.chaos.data import (
    CLOCK,
    DELAY_S,
    FILE_S,
    FIRST_S,
    FLUSH,
    SECOND_US,
    WINDOW_S,
    Row,
    batches_of,
    composition,
    differences,
    events_of,
    unread,
)
from experiments.chaos.query import POLICY
from experiments.chaos.sessions import SPLIT, Sessions
from experiments.chaos.stateful import HOT, PARTS, Ledger, Stateful
from experiments.chaos.windows import COLUMNS, Windows, digest
from state_backends.format.ordered_map import MemoryMap

FILES = 14
FILE = [events_of(5, file, FILES, 60, 3) for file in range(FILES)]


def parsed(text: str) -> StructType:
    """A schema from DDL, which Spark would parse."""
    kinds = {"bigint": LongType(), "binary": BinaryType()}
    fields = (column.split(" ") for column in text.split(", "))
    return StructType([StructField(name, kinds[kind]) for name, kind in fields])


def batches(query: str) -> dict[int, list[Row]]:
    """What LocalOperator makes of the files, one batch each, with the watermark that Spark would have."""
    how: dict[str, Any] = {
        "aggregates": {"n": A.count(), "total": A.sum("id"), "low": A.min("id"), "high": A.max("id")}
    }
    if query == "apply":

        def seen(key: Any, window: Any, batches: Any) -> dict[str, Any]:
            ids = [i for batch in batches for i in batch.column("id").to_pylist()]
            return {"n": len(ids), "total": sum(ids), "digest": digest(ids)}

        how = {"apply": aion.Apply(seen, "n bigint, total bigint, digest string")}
    policy = {part: POLICY[part] for part in ("lateness", "trigger")}
    windows = aion.Tumbling(f"{WINDOW_S} seconds")
    found: dict[int, list[Row]] = {}
    latest_us = 0
    with aion.LocalOperator(key="k", time="ts", windows=windows, policy=policy, **how) as operator:
        for file, events in enumerate(FILE):
            ts = pa.array([e.ts_us for e in events], pa.timestamp("us", "UTC"))
            table = pa.table({"k": [e.k for e in events], "ts": ts, "id": [e.id for e in events]})
            rows = operator.advance(latest_us - DELAY_S * SECOND_US).to_pylist() if latest_us else []
            rows += operator.process(table).to_pylist()
            found[file] = [plain(row, query) for row in rows]
            latest_us = max(latest_us, *(e.ts_us for e in events))
    return found


def plain(row: dict[str, Any], query: str) -> Row:
    start_us = int(row["window_start"].timestamp()) * SECOND_US
    kept = {name: row[name] for name in ("k", *COLUMNS[query], "pane", "kind", "events", "late_events")}
    return {**kept, "window_start": start_us}


@pytest.fixture(scope="module", params=list(COLUMNS))
def query(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def right(query: str) -> dict[int, list[Row]]:
    return batches(query)


def test_a_right_run_has_no_differences(query: str, right: dict[int, list[Row]]) -> None:
    assert Windows().too_late(FILE) > 0
    assert {row["kind"] for rows in right.values() for row in rows} == {"on_time", "late", "dropped"}
    assert differences(Windows(), query, right, right, FILE) == []


def altered(right: dict[int, list[Row]], batch: int, change: Any) -> dict[int, list[Row]]:
    wrong = copy.deepcopy(right)
    change(wrong[batch])
    return wrong


def test_whatever_is_missing_twice_or_wrong_is_found(query: str, right: dict[int, list[Row]]) -> None:
    last = max(batch for batch, rows in right.items() if any(row["k"].startswith("key") for row in rows))
    number = next(i for i, row in enumerate(right[last]) if row["k"].startswith("key"))
    wrongs = {
        "a row is missing": altered(right, last, lambda rows: rows.pop(number)),
        "a row is there twice": altered(right, last, lambda rows: rows.append(rows[number])),
        "an event is missing": altered(right, last, lambda rows: rows[number].update(n=rows[number]["n"] - 1)),
        "another pane": altered(right, last, lambda rows: rows[number].update(pane=99)),
        "another kind": altered(right, last, lambda rows: rows[number].update(kind="dropped")),
        "a batch is missing": {batch: rows for batch, rows in right.items() if batch != last},
    }
    for what, wrong in wrongs.items():
        assert differences(Windows(), query, wrong, right, FILE), what
    # And what the undisturbed run has wrong as well is seen by the events.
    for what in ("an event is missing", "a row is missing"):
        assert differences(Windows(), query, wrongs[what], wrongs[what], FILE), what


def test_an_event_counted_twice_in_a_window_is_seen_by_the_events(query: str, right: dict[int, list[Row]]) -> None:
    more = [list(events) for events in FILE]
    more[3].append(next(event for event in more[3] if not event.too_late))
    assert differences(Windows(), query, right, right, more)


# -- sessions -----------------------------------------------------------------------------------------


def sessions() -> dict[int, list[Row]]:
    """What LocalOperator makes of the files, one batch each, with the watermark that Spark would have."""
    policy = {part: POLICY[part] for part in ("lateness", "trigger")}
    found: dict[int, list[Row]] = {}
    latest_us = 0
    with aion.LocalOperator(
        key=["k", "part"], time="ts", windows=aion.Session("12 seconds"), policy=policy, aggregates={"n": A.count()}
    ) as operator:
        for file, events in enumerate(FILE):
            ts = pa.array([e.ts_us for e in events], pa.timestamp("us", "UTC"))
            parts = [e.id % SPLIT for e in events]
            watermark_us = latest_us - DELAY_S * SECOND_US if latest_us else None
            table = pa.table({"k": [e.k for e in events], "part": parts, "ts": ts})
            found[file] = operator.process(table, watermark_us).to_pylist()
            latest_us = max(latest_us, *(e.ts_us for e in events))
    return found


def test_each_event_is_in_one_session_that_is_left_or_dropped() -> None:
    right = sessions()
    assert {"on_time", "late", "retracted", "dropped"} <= {row["kind"] for rows in right.values() for row in rows}
    assert Sessions().wrong("sessions", right, FILE) == []
    for kind in ("late", "retracted", "dropped"):
        batch, number = next(
            (batch, i)
            for batch, rows in right.items()
            for i, row in enumerate(rows)
            if row["kind"] == kind and row["k"] != CLOCK
        )
        less = altered(right, batch, lambda rows, number=number: rows.pop(number))
        assert Sessions().wrong("sessions", less, FILE), kind


# -- the stateful processor -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ledger() -> dict[int, list[Row]]:
    """What the processor makes of the files, with keyed values in memory."""
    keys = Keys(StructType([StructField("k", StringType()), StructField("part", LongType())]))
    rows_of = pyspark.sql.Row("id", "ms", "payload")
    store, snapshot = MemoryMap(), None
    latest_us = before_ms = now_ms = 0
    found: dict[int, list[Row]] = {}
    for file, events in enumerate(FILE):
        processor = Ledger(pandas=False)
        handle = Handle("eventTime", 1, parsed)
        processor.init(handle)
        handle.initialized()
        variables = Variables(None if snapshot is None else snapshot["stateful"])
        handle.begin_shard(variables)
        times = TimerValues(1, now_ms)
        run = ShardRun(processor, handle, variables, store, keys, times, now_ms, snapshot)
        came: dict[Any, list[Any]] = {}
        for event in events:
            if event.ts_us > before_ms * 1000:
                part = 0 if event.k == HOT else None if event.k in (CLOCK, FLUSH) else event.id % PARTS
                row = rows_of(event.id, event.ts_us // 1000, event.payload)
                came.setdefault((event.k, part), []).append(row)
        groups = [Group(keys.to_bytes(key), key, iter(rows), len(rows)) for key, rows in came.items()]
        found[file] = [row.asDict() for row in (*run.arrive(groups), *run.end_batch())]
        snapshot = run.save().snapshot
        latest_us = max(latest_us, *(event.ts_us for event in events))
        before_ms, now_ms = now_ms, latest_us // 1000 - DELAY_S * 1000
    return found


def test_the_processor_gives_what_the_events_say(ledger: dict[int, list[Row]]) -> None:
    workload = Stateful()
    assert workload.too_late(FILE) > 0
    assert {row["kind"] for rows in ledger.values() for row in rows} == {"rows", "window", "idle"}
    for query in workload.queries:
        assert differences(workload, query, ledger, ledger, FILE) == []


def test_whatever_the_processor_loses_or_repeats_is_found(ledger: dict[int, list[Row]]) -> None:
    workload = Stateful()
    for change in (
        lambda rows: rows.pop(),
        lambda rows: rows.append(rows[0]),
        lambda rows: rows[0].update(digest=1),
        lambda rows: rows[-1].update(at=1),
    ):
        wrong = altered(ledger, 7, change)
        assert differences(workload, "rows", wrong, ledger, FILE)
        assert differences(workload, "rows", wrong, wrong, FILE), "the events alone say it"
    lost = {batch: rows for batch, rows in ledger.items() if batch != 7}
    assert differences(workload, "rows", lost, ledger, FILE)
    in_time = next(e for e in FILE[3] if e.k != CLOCK and e.ts_us >= (FIRST_S + 3 * FILE_S) * SECOND_US)
    less = [*FILE[:3], [e for e in FILE[3] if e != in_time], *FILE[4:]]
    assert differences(workload, "rows", ledger, ledger, less), "a row that the list still has"


# -- what is read -----------------------------------------------------------------------------------------


def test_events_follow_from_the_seed() -> None:
    assert events_of(5, 3, FILES, 60, 3) == FILE[3]
    assert events_of(6, 3, FILES, 60, 3) != FILE[3]
    ids = [event.id for events in FILE for event in events]
    assert len(ids) == len(set(ids))


def test_the_batches_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    """As Spark writes it: a log of the source, compacted now and then; and how far into it each batch went."""
    source, offsets = tmp_path / "checkpoint-apply" / "sources" / "0", tmp_path / "apply"
    source.mkdir(parents=True)
    offsets.mkdir()

    def entry(number: int, name: str) -> str:
        return json.dumps({"path": f"file:///somewhere/{name}", "timestamp": 1, "batchId": number})

    (source / "1.compact").write_text("\n".join(["v1", entry(0, "a"), entry(1, "b")]))
    (source / "0").write_text("\n".join(["v1", entry(0, "a")]))
    (source / "2").write_text("\n".join(["v1", entry(2, "c")]))
    (source / "3").write_text("\n".join(["v1", entry(3, "d")]))
    (source / ".3.crc").write_bytes(b"\0")
    for batch, upto in enumerate([0, 2, 3, 3]):  # two at once in the second, none in the last
        (offsets / f"{batch:06d}.offset").write_text(str(upto))
    assert composition(tmp_path, "apply") == [["a"], ["b", "c"], ["d"]]


def test_a_file_that_was_never_read_is_a_difference() -> None:
    """Its events would be missing in every run, and in what must come out."""
    assert unread("q", ["a", "b", "c"], [["b"], ["a", "c"]]) == []
    assert unread("q", ["a", "b", "c"], [["b"], []]) == ["q: 2 files were never read: ['a', 'c']"]


def test_what_a_query_wrote_is_read_by_batch(tmp_path: Path) -> None:
    (tmp_path / "000003.json").write_text('{"k": "a"}\n{"k": "b"}\n')
    (tmp_path / "000003.again-17").touch()
    (tmp_path / "000004.part").write_text("half")
    (tmp_path / "000005.json").touch()
    assert batches_of(tmp_path) == {0: [{"k": "a"}, {"k": "b"}], 1: []}
