"""Where the dropped rows of a query go."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.errors import ConfigError
from tests.sinks.rig import MINUTE, at, panes
from tests.sinks.tables import Table

pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match any records:UserWarning")
LATE = {"kind": "dropped", "reason": "late", "lateness_us": 7, "pane_seq": None, "event": '{"n": 1}'}


@pytest.mark.slow(but_first=True)
def test_dropped_rows_are_appended_once(table: Table) -> None:
    write = table.sink(dropped="left_out").write
    write(panes([{"k": "a", "n": 1}, {"k": "a", "n": 9, **LATE}, {"k": "a", "n": 9, **LATE}]), at(0))
    for _ in range(2):
        write(panes([{"k": None, "n": 8, "minute": 3, **LATE}]), at(1))
    write(panes([]), at(2))
    assert table.rows("k", "n") == [("a", "1")]
    found = table.rows("aion_query", "aion_batch", "k", "n", "reason", "lateness_us", "event", table="left_out")
    late = ("late", "7", '{"n": 1}')
    assert found == [("query", "0", "a", "9", *late)] * 2 + [("query", "1", None, "8", *late)]


@pytest.mark.slow(but_first=True)
def test_corrected_dropped_rows_replace_those_of_their_batch(table: Table) -> None:
    write = table.sink(dropped="left_out").write
    write(panes([{"k": "a", "n": 1, **LATE}]), at(0))
    for n in ([2, 3], [4], []):
        write(panes([{"k": "a", "n": 1}, *({"k": "a", "n": each, **LATE} for each in n)]), at(1))
        found = table.rows("aion_batch", "n", table="left_out")
        assert found == [("0", "1"), *(("1", str(each)) for each in n)]


def test_the_table_of_dropped_rows_is_there_from_the_first_batch_on(table: Table) -> None:
    table.sink(dropped="left_out").write(panes([{"k": "a", "n": 1}]), at(0))
    assert table.rows("aion_batch", table="left_out") == []


@pytest.mark.slow(but_first=True)
def test_rows_that_are_left_out_are_said_once_in_a_run(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for name, run in (("minutes", "first"), ("others", "first"), ("minutes", "second")):
        caplog.clear()
        begins = 2 if run == "second" else 0
        run = f"{run} {table.at}"  # the memory of what was said is that of the process
        table.sink(name).write(panes([{"k": "a", "n": 1}]), at(begins, run=run))
        assert not caplog.records
        for batch in (begins + 1, begins + 2):
            table.sink(name).write(panes([{"k": "a", "n": 1, **LATE}] * 3), at(batch, run=run))
        (record,) = caplog.records
        said = record.getMessage()
        assert "query query" in said and f"3 rows of kind 'dropped' in batch {begins + 1}" in said
        assert "dropped='TABLE'" in said and "dropped='ignore'" in said


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("dropped", ["ignore", "left_out"])
def test_nothing_is_said_if_the_user_knows(table: Table, dropped: str, caplog: pytest.LogCaptureFixture) -> None:
    table.sink(dropped=dropped).write(panes([{"k": "a", "n": 1, **LATE}]), at(0, run=f"known {table.at}"))
    assert not caplog.records and table.rows("k") == []


@pytest.mark.slow(but_first=True)
def test_the_event_is_kept_that_a_function_would_have_got(table: Table) -> None:
    with aion.LocalOperator(
        windows=aion.Tumbling("1 minute"), time="ts", key="k", aggregates={"n": A.count()}, bound="1 minute"
    ) as operator:
        write = table.sink(dropped="left_out").write

        def came(*minutes: int) -> pa.Table:
            ts = pa.array([m * MINUTE for m in minutes], pa.timestamp("us", "UTC"))
            return operator.process(pa.table({"k": ["u"] * len(minutes), "ts": ts}))

        write(came(0), at(0))
        write(operator.advance(30 * MINUTE), at(1))
        write(came(1, 1), at(2))
    assert table.rows("k", "n") == [("u", "1")]
    (found,) = table.rows("k", "n", "reason", table="left_out")
    assert found[:2] == ("u", "2") and found[2]


@pytest.mark.parametrize("more", [{"dropped": "t"}, {"dropped": "c", "changes": "c"}])
def test_a_table_is_not_two_things(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"dropped: '\w' is the name of another table"):
        aion.sinks.upsert("sqlite:///x.db", "t", **more)
    if "changes" not in more:
        with pytest.raises(ConfigError, match="dropped: 't' is the table itself"):
            aion.sinks.merge("delta", "t", **more)
