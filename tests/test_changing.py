"""``emit="changes"``: a row for each key and window that a batch changed, with the values that were shown before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.errors import ApplyError, ConfigError, SchemaError

EVENTS = pa.schema([("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.float64())])
SECOND = 1_000_000
KEPT: dict[str, Any] = {"key": "k", "time": "ts", "lateness": "10 minutes", "trigger": "every_batch"}
WINDOWS: dict[str, Any] = {
    "tumbling": aion.Tumbling("1 minute"),
    "early": aion.Sliding("2 minutes", "1 minute", early="batch"),
    "sessions": aion.Session("20 seconds"),
    "early_sessions": aion.Session("40 seconds", early="batch"),
    "cut": aion.Session("40 seconds", max_duration="100 seconds", early="30 seconds"),
    "counts": aion.Count(3),
}


def some(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    total = sum(v for batch in events for v in batch.column("v").to_pylist() if v is not None)
    return [] if total > 9 else [{"total": total, "seen": [total]}]


CONTENTS: dict[str, Any] = {
    "aggregates": {"aggregates": {"n": A.count(), "total": A.sum("v"), "top": A.max("v")}},
    "apply": {"apply": some, "schema": "total double, seen array<double>"},
}
batches = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", None]), st.integers(0, 400), st.sampled_from([0.0, 1.0, 5.0, float("nan"), None])
        ),
        max_size=6,
    ),
    min_size=1,
    max_size=7,
)


def table(events: list[tuple[Any, ...]]) -> pa.Table:
    times = pa.array([at * SECOND for _, at, _ in events], pa.int64()).cast(EVENTS.field("ts").type)
    return pa.table([pa.array([e[0] for e in events], pa.string()), times, [e[2] for e in events]], schema=EVENTS)


def place(row: dict[str, Any]) -> Any:
    return row["k"], row["window"], row["window_start"], row["window_end"]


def said(row: dict[str, Any], names: list[str], old: str = "") -> str:
    return repr([row[old + name] for name in names])


@pytest.mark.parametrize("lateness", ["10 minutes", "30 seconds"])  # with the second, windows go while others come
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("window", WINDOWS)
@given(batches)
def test_changes_say_what_was_shown_before(window: str, content: str, lateness: str, given_: list[list[Any]]) -> None:
    definition = {"windows": WINDOWS[window], "input_schema": EVENTS, **KEPT, **CONTENTS[content]}
    definition["lateness"] = lateness
    with (
        aion.LocalOperator(emit="changes", **definition) as changing,
        aion.LocalOperator(**definition) as showing,
    ):
        names = ["n", "total", "top"] if content == "aggregates" else ["total", "seen"]
        shown: dict[Any, str] = {}
        latest = None
        for events in given_:
            changes, panes = (operator.process(table(events), latest).to_pylist() for operator in (changing, showing))
            nulls = {f"old_{name}": None for name in names}
            dropped, also = (
                [repr(sorted((row | nulls).items())) for row in of if row["kind"] == "dropped"]
                for of in (changes, panes)
            )
            assert dropped == also
            before, wanted = dict(shown), {}
            for row in panes:
                if row["kind"] == "retracted":
                    shown.pop(place(row), None)
                elif row["kind"] != "dropped":
                    shown[place(row)] = said(row, names)
            for where in before.keys() | shown.keys():
                if before.get(where) != shown.get(where):
                    wanted[where] = before.get(where), shown.get(where)
            nothing = repr([None] * len(names))
            found = {}
            for row in changes:
                if row["kind"] != "dropped":
                    assert place(row) not in found, "one row"
                    old = said(row, names, "old_")
                    new = None if row["kind"] == "retracted" else said(row, names)
                    found[place(row)] = None if old == nothing and place(row) not in before else old, new
            assert found == wanted
            times = [at * SECOND for _, at, _ in events]
            latest = max([*times, latest] if latest is not None else times, default=None)


def test_what_was_shown_goes_with_the_window() -> None:
    """A shard does not keep it longer than panes can come."""
    with aion.LocalOperator(
        emit="changes", windows=WINDOWS["tumbling"], input_schema=EVENTS, aggregates={"n": A.count()}, **KEPT
    ) as operator:
        for minute in range(60):
            operator.process(table([("a", minute * 60, 1.0)]), minute * 60 * SECOND)
        kept = [key for key, _ in operator._attempt.scan(b"s", b"t")]
        assert 2 * 9 <= len(kept) <= 2 * 13  # a head and a page for each window of the last ten minutes


def test_a_session_that_goes_on_takes_back_its_early_rows() -> None:
    """However long it lasts: its first early row ended long before the bound."""
    session = aion.Session("30 seconds", early="batch")
    with aion.LocalOperator(
        emit="changes",
        windows=session,
        input_schema=EVENTS,
        aggregates={"n": A.count()},
        **(KEPT | {"lateness": "10 seconds"}),
    ) as operator:
        rows = []
        for at in [*range(0, 600, 20), 1000]:
            rows += operator.process(table([("a", at, 1.0)]), max(at - 5, 0) * SECOND).to_pylist()
        rows += operator.advance(990 * SECOND).to_pylist()
        kept = [key for key, _ in operator._attempt.scan(b"sr", b"ss")]
    total = sum((row["n"] or 0) - (row["old_n"] or 0) for row in rows if row["kind"] != "dropped")
    assert total == 31, "30 events of one session, and the one of the second session's early row"
    assert len(kept) == 1, "the first session is gone, and so is what was shown of it"


def test_several_rows_of_a_function_are_refused() -> None:
    def twice(key: Any, window: Any, events: Any) -> list[dict[str, Any]]:
        return [{"n": 1}, {"n": 2}]

    definition = {"windows": WINDOWS["tumbling"], "input_schema": EVENTS, "apply": twice, "schema": "n long", **KEPT}
    with (
        aion.LocalOperator(emit="changes", **definition) as operator,
        pytest.raises(ApplyError, match="one row for a key and window, and the function returned several"),
    ):
        operator.process(table([("a", 1, 1.0)]))
        operator.advance(100 * SECOND)


def test_names_that_would_clash_and_words_that_are_not_known_are_refused() -> None:
    with pytest.raises(SchemaError, match="'old_n' is what 'n' was"):
        aion.LocalOperator(
            emit="changes",
            windows=WINDOWS["tumbling"],
            input_schema=EVENTS,
            aggregates={"n": A.count(), "old_n": A.count()},
            **KEPT,
        )
    with pytest.raises(ConfigError, match="give 'all', 'final' or 'changes'"):
        aion.Spec(emit="some", windows=WINDOWS["tumbling"], time="ts", aggregates={"n": A.count()})  # type: ignore[arg-type]
