"""What ``aion.sinks.merge`` leaves in real tables of Delta Lake and Iceberg."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aion
from aion.errors import ConfigError, SchemaError, SinkError
from aion.sinks import lake
from aion.sinks.marks import History
from tests.sinks.lakes import LAKES, Lake, fresh_threads
from tests.sinks.rig import QUERY, at, panes

pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match any records:UserWarning")


@pytest.fixture(params=LAKES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lake]:
    """A folder for tables of each kind."""
    with fresh_threads(request.param):
        yield Lake(request.param, tmp_path)


def test_the_newest_row_of_each_window_stays(place: Lake) -> None:
    write = place.sink().write
    write(panes([{"k": "a", "n": 1}, {"k": None, "n": 2}, {"k": "a", "n": 3, "pane": 1}, {"k": "c", "n": 1}]), at(0))
    assert place.rows("k", "n") == [("a", 3), ("c", 1), (None, 2)]
    write(panes([{"k": None, "n": 4}, {"k": "a", "minute": 1, "n": 5}, {"k": "c", "kind": "retracted"}]), at(1))
    write(panes([{"k": "a", "n": 9, "kind": "dropped"}]), at(2))
    write(panes([]), at(3))
    assert place.rows("k", "n", "window_start") == [
        ("a", 3, datetime(1970, 1, 1, tzinfo=UTC)),
        ("a", 5, datetime(1970, 1, 1, 0, 1, tzinfo=UTC)),
        (None, 4, datetime(1970, 1, 1, tzinfo=UTC)),
    ]


def test_a_batch_of_many_windows(place: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many to list them: all between the first and the last are read and written again."""
    monkeypatch.setattr(lake, "MOST_PLACES", 2)
    write = place.sink().write
    write(panes([{"k": "a", "n": 1, "minute": minute} for minute in range(5)]), at(0))
    write(panes([{"k": "a", "n": 2, "minute": minute} for minute in (0, 1, 3)]), at(1))
    assert place.rows("window_start", "n") == [
        (datetime(1970, 1, 1, 0, minute, tzinfo=UTC), n) for minute, n in enumerate((2, 2, 1, 2, 1))
    ]


def test_a_batch_is_one_commit_and_changes_nothing_when_it_is_run_again(place: Lake) -> None:
    write = place.sink().write
    write(panes([{"k": "a", "n": 1}]), at(0))
    write(panes([{"k": "a", "n": 2}]), at(1))

    def version() -> int:
        found = place.table()
        return int(found.version() if place.kind == "delta" else found.metadata.current_snapshot_id)

    before = version()
    write(panes([{"k": "a", "n": 2}]), at(1))
    assert place.rows("k", "n") == [("a", 2)] and version() == before
    if place.kind == "delta":
        assert before == 2  # made, and two batches


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize(
    ("now", "said"),
    [
        (at(1, History("other", "file:/other")), "has batch 3 of another query, query query"),
        (at(4, History(QUERY.query, "file:/copy")), "of the same query from another checkpoint location"),
        (at(1), "the checkpoint went back"),
        (at(6), "lacks those between"),
    ],
)
def test_a_batch_that_does_not_follow_is_refused_until_it_is_adopted(place: Lake, now: Any, said: str) -> None:
    place.sink().write(panes([{"k": "a", "n": 1}, {"k": "b", "n": 1}]), at(3))
    with pytest.raises(SinkError, match=said) as error:
        place.sink().write(panes([{"k": "a", "n": 2}]), now)
    assert f"adopt='{QUERY.digest}:3'" in str(error.value).splitlines()[0]
    assert place.rows("k", "n") == [("a", 1), ("b", 1)]
    adopting = place.sink(adopt=f"{QUERY.digest}:3")
    adopting.write(panes([{"k": "a", "n": 2}]), now)
    adopting.write(panes([{"k": "a", "n": 3}]), at(now.batch + 1, now.history))
    assert place.rows("k", "n") == [("a", 3), ("b", 1)]


def test_a_table_of_another_shape_is_refused(place: Lake) -> None:
    place.sink().write(panes([{"k": "a", "n": 1}]), at(0))
    with pytest.raises(SchemaError, match="no column 'm'"):
        place.sink().write(panes([{"k": "a", "m": 1}], pa.field("m", pa.int64())), at(1))
    with pytest.raises(SchemaError, match="column 'n' is int64, which cannot hold string"):
        place.sink().write(panes([{"k": "a", "n": "1"}], pa.field("n", pa.string())), at(1))
    narrower = panes([{"k": "a", "n": 7}], pa.field("n", pa.int32()))
    place.sink().write(narrower, at(1))
    assert place.rows("k", "n") == [("a", 7)]


def test_every_type_comes_back_as_it_was(place: Lake) -> None:
    values = {
        "flag": (pa.bool_(), True),
        "short": (pa.int16(), -(2**15)),
        "long": (pa.int64(), 2**63 - 1),
        "single": (pa.float32(), 1.5),
        "double": (pa.float64(), -math.inf),
        "text": (pa.string(), "ä'"),
        "bytes": (pa.binary(), b"\0\xff"),
        "day": (pa.date32(), date(1969, 12, 31)),
        "instant": (pa.timestamp("us", "UTC"), datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)),
        "money": (pa.decimal128(38, 2), Decimal("123456789012345678901234567890.10")),
        "list": (pa.list_(pa.int64()), [1, None]),
        "struct": (pa.struct([("a", pa.string())]), {"a": "x"}),
    }
    write = place.sink().write
    fields = [pa.field(name, type_) for name, (type_, _) in values.items()]
    for batch in range(2):
        row = {name: value for name, (_, value) in values.items()}
        write(panes([{"k": "a", **row}, {"k": "b"}], *fields), at(batch))
    content = place.content().sort_by("k")
    for name, (_, value) in values.items():
        assert content[name].to_pylist() == [value, None], name


def test_a_wrong_call_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'hudi'"):
        aion.sinks.merge("hudi", "t")
    with pytest.raises(ConfigError, match=r"namespace\.table"):
        aion.sinks.merge("iceberg", "t").write(panes([]), at(0))
    assert "secret" not in repr(aion.sinks.merge("delta", "t", options={"key": "secret"}))


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("other", ["sink", "stranger"])
def test_a_commit_of_somebody_else_in_between_is_not_overwritten(place: Lake, other: str) -> None:
    """Both have read the same windows, and the one that comes second knows less than what is there."""
    place.sink().write(panes([{"k": "a", "n": 1}]), at(0))
    first = place.sink()
    opened = first.kind()(first.table, first.options)
    windows = lake.Places("window_start", [datetime(1970, 1, 1, tzinfo=UTC)], False)
    old = opened.read(windows)
    if other == "sink":
        place.sink().write(panes([{"k": "b", "n": 2}]), at(1))
    else:
        place.append(old)
    with pytest.raises(Exception, match=r"(?i)concurren|conflict|were found matching the filter"):
        opened.overwrite(windows, old, at(1))
    opened.close()
    assert len(place.rows("k")) == 2
