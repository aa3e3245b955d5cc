"""``emit="changes"``: a row for each key and window that a batch changed, with the values that were shown before."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.errors import ConfigError, SchemaError

EVENTS = pa.schema([("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.float64())])
SECOND = 1_000_000
KEPT: dict[str, Any] = {"key": "k", "time": "ts", "bound": "10 minutes", "trigger": "every_batch"}
WINDOWS: dict[str, Any] = {
    "tumbling": aion.Tumbling("1 minute"),
    "early": aion.Sliding("2 minutes", "1 minute", early="batch"),
    "grows": aion.Cumulative("1 minute", "3 minutes"),
    "sessions": aion.Session("20 seconds"),
    "early_sessions": aion.Session("40 seconds", early="batch"),
    "cut": aion.Session("40 seconds", max_duration="100 seconds", early="30 seconds"),
    "counts": aion.Count(3),
}
# An operator has windows of both kinds, or of one. Rows of different windows have nothing to do with each other.
ALIGNED = ("tumbling", "early", "grows")
KINDS: dict[str, dict[str, Any]] = {
    "aligned": {name: WINDOWS[name] for name in ALIGNED},
    "of keys": {name: window for name, window in WINDOWS.items() if name not in ALIGNED},
}


def some(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    total = sum(v for batch in events for v in batch.column("v").to_pylist() if v is not None)
    return [] if total > 9 else [{"total": total, "seen": [total]}]


CONTENTS: dict[str, Any] = {
    "aggregates": {"aggregates": {"n": A.count(), "total": A.sum("v"), "top": A.max("v")}},
    "apply": {"apply": aion.Apply(some, "total double, seen array<double>")},
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


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("lateness", ["10 minutes", "30 seconds"])  # with the second, windows go while others come
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("windows", KINDS)
@given(batches, st.sampled_from(["1 KiB", "256 MiB"]))
def test_changes_say_what_was_shown_before(
    windows: str, content: str, lateness: str, given_: list[list[Any]], memory: str
) -> None:
    definition = {"windows": KINDS[windows], "input_schema": EVENTS, **KEPT, **CONTENTS[content]}
    definition["bound"] = lateness
    with (
        aion.LocalOperator(emit="changes", policy={"apply": {"memory": memory}}, **definition) as changing,
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


@pytest.mark.parametrize("window", [aion.Session("20 seconds"), aion.Count(2), aion.PerRecord("20 seconds")], ids=repr)
def test_nothing_is_left_of_what_was_shown_of_windows_of_keys(window: Any) -> None:
    """Each of them ends at a time of its own. So whatever stays for each end would grow for ever."""
    with aion.LocalOperator(
        emit="changes", windows=window, input_schema=EVENTS, aggregates={"n": A.count()}, **KEPT
    ) as operator:
        operator.process(table([("a", 61 * at, 1.0) for at in range(8)]))
        operator.advance(600 * SECOND)
        assert [*operator._attempt.scan(b"s", b"t")]
        operator.advance(6000 * SECOND)
        assert not [*operator._attempt.scan(b"s", b"t")]


def test_a_session_that_goes_on_takes_back_its_early_rows() -> None:
    """However long it lasts: its first early row ended long before the bound."""
    session = aion.Session("30 seconds", early="batch")
    with aion.LocalOperator(
        emit="changes",
        windows=session,
        input_schema=EVENTS,
        aggregates={"n": A.count()},
        **(KEPT | {"bound": "10 seconds"}),
    ) as operator:
        rows = []
        for at in [*range(0, 600, 20), 1000]:
            rows += operator.process(table([("a", at, 1.0)]), max(at - 5, 0) * SECOND).to_pylist()
        rows += operator.advance(990 * SECOND).to_pylist()
        kept = [*operator._attempt.scan(b"s", b"t")]
    total = sum((row["n"] or 0) - (row["old_n"] or 0) for row in rows if row["kind"] != "dropped")
    assert total == 31, "30 events of one session, and the one of the second session's early row"
    assert len(kept) == 2, "the first session is gone, and so is what was shown of it: a head and a page are left"


def best(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    """The largest values, with their numbers: as many rows as there are different values, but for zeros."""
    values = [v for batch in events for v in batch.column("v").to_pylist() if v]
    counts = {v: sum(other == v for other in values) for v in values if v == v}
    return [{"v": v, "n": counts[v]} for v in sorted(counts, reverse=True)]


@pytest.mark.slow
@pytest.mark.parametrize("lateness", ["10 minutes", "30 seconds"])
@pytest.mark.parametrize("windows", KINDS)
@given(batches)
def test_a_row_of_a_pane_takes_the_place_of_the_same_row_of_the_pane_before(
    windows: str, lateness: str, given_: list[list[Any]]
) -> None:
    """All rows of a pane come if one of them has changed. Those that the pane before had beyond them are taken back."""
    definition = {"windows": KINDS[windows], "input_schema": EVENTS, "apply": aion.Apply(best, "v double, n long")}
    definition |= KEPT | {"bound": lateness}
    with (
        aion.LocalOperator(emit="changes", **definition) as changing,
        aion.LocalOperator(**definition) as showing,
    ):
        shown: dict[Any, list[Any]] = {}
        latest = None
        for events in given_:
            changes, panes = (operator.process(table(events), latest).to_pylist() for operator in (changing, showing))
            before = dict(shown)
            newest = {place(row): row["pane_seq"] for row in panes if row["kind"] != "dropped"}
            for where in newest:
                shown.pop(where, None)
            for row in panes:
                if row["kind"] not in ("dropped", "retracted") and row["pane_seq"] == newest[place(row)]:
                    shown.setdefault(place(row), []).append((row["v"], row["n"]))
            found: dict[Any, tuple[list[Any], list[Any]]] = {}
            for row in changes:
                if row["kind"] != "dropped":
                    old, new = found.setdefault(place(row), ([], []))
                    if row["old_n"] is not None:
                        old.append((row["old_v"], row["old_n"]))
                    if row["kind"] != "retracted":
                        new.append((row["v"], row["n"]))
            wanted = {
                where: (before.get(where, []), shown.get(where, []))
                for where in before.keys() | shown.keys()
                if before.get(where) != shown.get(where)
            }
            assert found == wanted
            times = [at * SECOND for _, at, _ in events]
            latest = max([*times, latest] if latest is not None else times, default=None)


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


ROUNDING: dict[str, Any] = {
    "variance": A.variance("v"),
    "shares": A.approx_percentile("v", [0.37, 0.9], accuracy=2),
    "own": A.aggregate(
        "v",
        name="own",
        partial="total double",
        lift=lambda v: pc.multiply(v.fill_null(0.0), 0.1),
        combine=lambda left, right: pc.add(left[0], right[0]),
        lower=lambda total: total,
        result="double",
    ),
}


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("windows", KINDS)
@pytest.mark.parametrize("nulls", [False, True])
def test_only_an_event_changes_a_result_that_rounds(windows: str, nulls: bool) -> None:
    """Its last digit also depends on how its partials were grouped, which differs from one execution to the next."""
    # Functions of the user's own get nulls, so a null is an event to them.
    rounding = {name: of for name, of in ROUNDING.items() if not (nulls and name == "own")}
    given_ = {"windows": KINDS[windows], "aggregates": rounding, "input_schema": EVENTS, **KEPT}
    random, latest = Random(7), 0
    shown: dict[Any, tuple[list[Any], list[float]]] = {}
    came: dict[str, list[tuple[int, float]]] = {"a": [], "b": []}
    with aion.LocalOperator(emit="changes", **given_) as operator:
        for batch in range(30):
            events = [
                (
                    random.choice("ab"),
                    max(0, batch * 10 + random.randint(-200, 10)),
                    None if nulls and random.random() < 0.5 else random.gauss(3, 1),
                )
                for _ in range(random.randint(1, 6))
            ]
            rows = operator.process(table(events), latest * SECOND).to_pylist()
            for k, at, v in events:
                if v is not None:
                    came[k].append((at, v))
            for row in (row for row in rows if row["kind"] != "dropped"):
                start, end = (row[f"window_{edge}"].timestamp() for edge in ("start", "end"))
                within = sorted(v for at, v in came[row["k"]] if start <= at < end)
                before, seen = shown.pop(place(row), ([None] * len(rounding), []))
                assert [row[f"old_{name}"] for name in rounding] == before, "what was shown, to the last digit"
                if row["kind"] != "retracted":
                    # A count window is another one if an event of its time takes another's place.
                    assert row["window"] == "counts" or within != seen or not seen, "nothing came"
                    shown[place(row)] = [row[name] for name in rounding], within
            latest = max([latest, *(at - 15 for _, at, _ in events)])
