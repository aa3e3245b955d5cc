"""What the chaos experiment compares: that it would find what must not be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from experiments.chaos_data import (
    COLUMNS,
    DELAY_S,
    SECOND_US,
    WINDOW_S,
    Row,
    Truth,
    batches_of,
    composition,
    differences,
    digest,
    events_of,
)
from experiments.chaos_query import POLICY

FILES = 14
FILE = [events_of(5, file, FILES, 60, 3) for file in range(FILES)]


def batches(query: str) -> dict[int, list[Row]]:
    """What LocalOperator makes of the files, one batch each, with the watermark that Spark would have."""
    how: dict[str, Any] = {
        "aggregates": {"n": A.count(), "total": A.sum("id"), "low": A.min("id"), "high": A.max("id")}
    }
    if query == "apply":

        def seen(key: Any, window: Any, batches: Any) -> dict[str, Any]:
            ids = [i for batch in batches for i in batch.column("id").to_pylist()]
            return {"n": len(ids), "total": sum(ids), "digest": digest(ids)}

        how = {"apply": seen, "schema": "n bigint, total bigint, digest string"}
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


@pytest.fixture(scope="module")
def truth() -> Truth:
    truth = Truth()
    for events in FILE:
        truth.add(events)
    return truth


def test_a_right_run_has_no_differences(query: str, right: dict[int, list[Row]], truth: Truth) -> None:
    assert truth.too_late
    assert {row["kind"] for rows in right.values() for row in rows} == {"on_time", "late", "dropped"}
    assert differences(query, right, right, truth, FILES) == []


def altered(right: dict[int, list[Row]], batch: int, change: Any) -> dict[int, list[Row]]:
    wrong = copy.deepcopy(right)
    change(wrong[batch])
    return wrong


def test_whatever_is_missing_twice_or_wrong_is_found(query: str, right: dict[int, list[Row]], truth: Truth) -> None:
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
        assert differences(query, wrong, right, truth, FILES), what
    # And what the undisturbed run has wrong as well is seen by the events.
    for what in ("an event is missing", "a row is missing"):
        assert differences(query, wrongs[what], wrongs[what], truth, FILES), what


def test_an_event_counted_twice_in_a_window_is_seen_by_the_events(
    query: str, right: dict[int, list[Row]], truth: Truth
) -> None:
    more = copy.deepcopy(truth)
    window = next(iter(more.windows))
    more.windows[window].append(more.windows[window][0])
    assert differences(query, right, right, more, FILES)


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


def test_what_a_query_wrote_is_read_by_batch(tmp_path: Path) -> None:
    (tmp_path / "000003.json").write_text('{"k": "a"}\n{"k": "b"}\n')
    (tmp_path / "000003.again-17").touch()
    (tmp_path / "000004.part").write_text("half")
    (tmp_path / "000005.json").touch()
    assert batches_of(tmp_path) == {0: [{"k": "a"}, {"k": "b"}], 1: []}
