"""A query whose definition changes between two starts gives the panes of queries that were never touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.core.query.evolution import finished
from aion.core.query.evolved import evolved, of_shard
from aion.core.query.history import Evolution
from aion.errors import ForeignState
from aion.execute.panes.rows import TOO_LATE
from aion.spec import Spec
from state_backends.format.definitions import FOLLOWS, digest
from tests.durations import us
from tests.examples import some
from tests.execute.evolution import (
    AGGREGATES,
    MODES,
    SCHEMA,
    WINDOWS,
    Batches,
    Restarted,
    check,
    check_rows,
    definitions,
    keep_only,
    micros,
    newest,
    phases,
    spec_of,
)


def test_a_column_that_is_added_begins_with_windows_after_the_change() -> None:
    batch = [("a", t, t) for t in (1, 12, 25)]
    later = [("a", t, t) for t in (2, 13, 26, 31, 45)]
    with Restarted(spec_of(["ten"], ["count", "mean"])) as running:
        running.process(batch, None)
        running.process([], 21)
        running.restart(spec_of(["ten"], ["count", "mean", "top"]))
        assert running.change is not None
        assert running.change.at_us == 30
        assert running.change.columns == ("top",)
        rows = newest(running.process(later, 21) + running.process([], 60) + running.close())
    assert {key[2]: (row["count"], row["mean"], row["top"]) for key, row in rows.items()} == {
        0: (2, 1.5, None), 10: (2, 12.5, None), 20: (2, 25.5, None), 30: (1, 31.0, 31), 40: (1, 45.0, 45),
    }  # fmt: skip


def test_windows_that_grow_finish_their_stretch_with_the_steps_that_it_began_with() -> None:
    """From the change on, they grow by other steps."""

    def spec(step: int, size: int) -> Spec:
        return replace(spec_of(["ten"], ["count"]), windows={"so far": aion.Cumulative(us(step), us(size))})

    with Restarted(spec(10, 30)) as running:
        rows = running.process([("a", 1, 1), ("a", 12, 1)], 11)
        running.restart(spec(5, 20))
        assert running.change is not None and running.change.at_us == 20
        rows += running.process([("a", 3, 1), ("a", 22, 1), ("a", 41, 1)], 11)
        rows += running.process([], 100)
        rows += running.close()
    found = {key[2:]: row["count"] for key, row in newest(rows).items()}
    before = {(0, 10): 2, (0, 20): 3, (0, 30): 4}
    assert found == before | {(20, 25): 1, (20, 30): 1, (20, 35): 1, (20, 40): 1} | {
        (40, end): 1 for end in (45, 50, 55, 60)
    }


def filling(*names: str) -> Spec:
    windows = {"filled": aion.Tumbling(us(10), fill="zero", fill_for=us(40)), "other": aion.Tumbling(us(30))}
    return replace(spec_of(["ten"], ["count"]), windows={name: windows[name] for name in names})


def filled_of(rows: list[dict[str, Any]]) -> list[tuple[int, str, int]]:
    found = [(micros(r["window_start"]), r["kind"], r["count"]) for r in rows if r["window"] == "filled"]
    return sorted(found)


def keys_kept(running: Restarted) -> int:
    return len([*running._local._attempt.scan(b"f", b"g")])


def test_windows_that_are_filled_finish_and_begin_anew_with_the_next_event() -> None:
    with Restarted(filling("filled")) as running:
        running.process([("a", 1, 1)], None)
        assert filled_of(running.process([], 21)) == [(0, "on_time", 1), (10, "on_time", 0)]
        running.restart(filling("other"))
        assert running.change is not None and running.change.at_us == 21
        assert filled_of(running.process([("a", 12, 1)], 21)) == [(10, "late", 1)]
        assert filled_of(running.process([("a", 61, 1)], 50)) == [(20, "on_time", 0)], "it began before the change"
        running.restart(filling("other", "filled"))
        assert running.change.at_us == 70
        assert filled_of(running.process([("a", 95, 1)], 80)) == []
        assert filled_of(running.process([], 120)) == [(90, "on_time", 1), (100, "on_time", 0), (110, "on_time", 0)]
        running.process([], 1000)
        assert keys_kept(running) == 0


def test_windows_that_are_filled_and_dropped_leave_no_keys() -> None:
    with Restarted(filling("filled", "other")) as running:
        running.process([("a", 1, 1), ("b", 2, 1)], None)
        assert filled_of(running.process([], 21)) == [(0, "on_time", 1)] * 2 + [(10, "on_time", 0)] * 2
        assert keys_kept(running) > 0
        running.restart(filling("other"), on_removed="drop")
        assert filled_of(running.process([("a", 3, 1)], 45)) == []
        assert keys_kept(running) == 0


def test_windows_that_are_filled_keep_keys_with_their_types() -> None:
    narrow = pa.schema([pa.field("k", pa.int32()), *[field for field in SCHEMA if field.name != "k"]])
    with Restarted(filling("filled"), narrow) as running:
        running.process([(1, 1, 1)], None)
        running.schema = pa.schema([pa.field("k", pa.int64()), *[field for field in SCHEMA if field.name != "k"]])
        with pytest.raises(ForeignState, match="windows with a fill keep keys with their types"):
            running.restart(filling("filled"))


@given(st.lists(st.sets(st.sampled_from([*AGGREGATES][:4]), min_size=1), min_size=2, max_size=4), st.data())
def test_changes_go_on_with_other_aggregates(columns: list[set[str]], data: st.DataObject) -> None:
    """A value that was shown is the old value as long as its column stays. One that was not shown is null."""
    names = {row: data.draw(st.permutations(sorted(chosen))) for row, chosen in enumerate(columns)}
    shown: dict[Any, dict[str, Any]] = {}  # what was last shown of each window, by column
    stays: dict[Any, set[str]] = {}  # which of these columns have been there ever since
    latest = 0
    with Restarted(spec_of(["ten", "hop"], names[0], emit="changes")) as running:
        for number, chosen in names.items():
            if number:
                running.restart(spec_of(["ten", "hop"], chosen, emit="changes"))
                for there in stays.values():
                    there &= {*chosen}
            for _ in range(2):
                times = data.draw(st.lists(st.integers(max(latest - 70, 0), latest + 20), min_size=1, max_size=4))
                rows = running.process([("ab"[t % 2], t, t) for t in times], latest)
                latest = max(latest, *times)
                for row in rows:
                    if row["kind"] == "dropped":
                        continue
                    where = row["k"], row["window"], row["window_start"]
                    before = shown.get(where, {})
                    for name in chosen:
                        may = [before.get(name)] if name in stays.get(where, chosen) else [before.get(name), None]
                        assert row[f"old_{name}"] in may, (where, name)
                    shown[where] = {**before, **{name: row[name] for name in chosen}}
                    stays[where] = {*chosen}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("windows", "more_bytes"), [(["ten"], 0), (["ten", "hop"], 200)], ids=["the same windows", "windows come and go"]
)
def test_what_no_version_needs_of_earlier_definitions_is_forgotten(windows: list[str], more_bytes: int) -> None:
    """A query may change each day for years. Only a definition that went leaves its number, in a few bytes."""
    ways = [(["ten"], ["count"]), (windows, ["count", "total"]), (["ten"], ["count", "top"])]
    definitions, snapshots = [], []
    with Restarted(spec_of(*ways[0])) as running:
        for number in range(24):
            for at in range(1000 * number, 1000 * number + 900, 100):
                running.process([("a", at, 1), ("b", at + 7, 2)], at)
            running.restart(spec_of(*ways[(number + 1) % len(ways)]))
            if number % 3 == 2:
                sizes = running.kept_bytes()
                definitions.append(sizes[0])
                snapshots.append(sizes[1])
        evolution = Evolution.of(running.definition)
    assert len(evolution.steps) <= 2 and evolution.changes == 24 and len(running.definition[FOLLOWS]) <= 2
    assert definitions[-1] - definitions[2] <= 5 * more_bytes + 20
    assert snapshots[-1] - snapshots[2] <= 20


def test_what_a_version_that_is_kept_needs_is_not_forgotten() -> None:
    """Spark may go back to it, and a shard that has had no events for long is still at one."""
    with Restarted(spec_of(["ten"], ["count"])) as running:
        running.process([("a", 1, 1)], 0)
        old = running.version()
        running.oldest.append(old)
        for number, names in enumerate((["count", "total"], ["count"], ["count", "top"])):
            running.process([("a", 1000 * number, 1)], 1000 * number)
            running.restart(spec_of(["ten"], names))
        evolution = Evolution.of(running.definition)
        assert len(evolution.steps) == evolution.changes == 3
        plan = evolved(spec_of(["ten"], ["count", "top"]).plan(SCHEMA), evolution)
        shard = of_shard(plan, old.snapshot)
        assert shard.history is not None and shard.history.step_of(0) == 0
        running.oldest.clear()
        for number, names in enumerate((["count"], ["count", "top"]), 4):
            running.process([("a", 1000 * number, 1)], 1000 * number)
            running.restart(spec_of(["ten"], names))
        assert digest(old.definition) not in running.definition[FOLLOWS]
        plan = evolved(plan, Evolution.of(running.definition))
        with pytest.raises(ForeignState, match="a version is from before change 1 of the definition"):
            of_shard(plan, old.snapshot)


def test_no_change_is_before_an_event_that_ever_came() -> None:
    """Not even if nothing of it is kept: the second of two changes would show one of six events."""
    five = [("a", t, t) for t in range(100, 105)]
    with Restarted(spec_of(["ten"], ["count"])) as running:
        running.process(five, None)
        running.process([], 50)
        running.restart(spec_of(["thirty"], ["count"]), on_removed="drop")
        running.process([("a", 60, 1)], 51)
        running.restart(spec_of(["seven"], ["count"]), on_removed="drop")
        assert running.change is not None and running.change.at_us is not None and running.change.at_us >= 110
        rows = running.process([("a", 104, 1), ("a", 130, 1)], 60) + running.process([], 300)
    assert [row["count"] for row in rows if row["kind"] == "on_time"] == [1]


def test_a_definition_that_finishes_keeps_its_own_bound_trigger_and_early_panes() -> None:
    def spec(windows: dict[str, Any]) -> Spec:
        return Spec(
            windows=windows, key="k", time="ts", aggregates={"count": A.count()}, bound=us(5), trigger="every_batch"
        )

    slow = aion.Tumbling(us(20), early="batch", bound=us(200), trigger={"kind": "count", "count": 2})
    with Restarted(spec({"slow": slow})) as running:
        running.process([("a", 1, 1)], None)
        running.restart(spec({"ten": aion.Tumbling(us(10))}))
        early = running.process([("a", 2, 1)], 3)
        running.process([("a", 40, 1)], 30)
        one = running.process([("a", 3, 1)], 100)  # later than the bound of the query
        running.restart(spec({"ten": aion.Tumbling(us(10)), "other": aion.Tumbling(us(7))}))
        two = running.process([("a", 4, 1)], 150)
    of_slow = [[(row["kind"], row["count"]) for row in rows if row["window"] == "slow"] for rows in (early, one, two)]
    assert of_slow == [[("early", 2)], [], [("late", 4)]]


def test_windows_that_go_finish_and_those_that_come_begin_after_the_change() -> None:
    first = [("a", t, t) for t in (1, 12, 25)]
    then = [("a", t, t) for t in (3, 14, 27, 38, 55, 61)]
    check(
        [(["ten"], ["count", "total"], [(first, 15)]), (["hop", "thirty"], ["count", "total"], [(then, 15), ([], 200)])]
    )


def test_windows_in_another_order_are_the_same_windows() -> None:
    batch = [("a", t, t) for t in (1, 12, 25)]
    check([(["ten", "thirty", "hop"], ["count"], [(batch, 15)]), (["hop", "ten", "thirty"], ["count"], [(batch, 15)])])


@pytest.mark.slow
@some(3)
@given(phases())
def test_any_changes_give_the_panes_of_queries_that_were_never_touched(
    drawn: list[tuple[list[str], list[str], Batches]],
) -> None:
    check(drawn)


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("more", MODES, ids=lambda more: "-".join(map(str, more.values())))
@some(0.3)
@given(drawn=phases())
def test_any_changes_give_these_panes_whatever_else_the_query_asks_for(
    more: dict[str, Any], drawn: list[tuple[list[str], list[str], Batches]]
) -> None:
    check(drawn, **more)


OF_KEYS = st.sampled_from(
    [["session"], ["five"], ["record"], ["marked"], ["own gaps"], ["session", "ten"], ["hop", "five", "own gaps"]]
)


@some(0.5)
@given(phases(), OF_KEYS, st.sampled_from(MODES))
def test_columns_also_come_and_go_beside_windows_of_keys_whatever_else_the_query_asks_for(
    drawn: list[tuple[list[str], list[str], Batches]], windows: list[str], more: dict[str, Any]
) -> None:
    check([(windows, columns, batches) for _, columns, batches in drawn], **more)


@given(phases(), OF_KEYS)
def test_columns_also_come_and_go_beside_windows_of_keys(
    drawn: list[tuple[list[str], list[str], Batches]], windows: list[str]
) -> None:
    check([(windows, columns, batches) for _, columns, batches in drawn])


def values(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    rows = [row for batch in events for row in batch.to_pylist()]
    return {"rows": len(rows), "lacking": sum(row["v"] is None for row in rows), "sum": sum(row["n"] for row in rows)}


def applied(windows: list[str], *columns: str, early: str | None = None, **more: Any) -> Spec:
    found = WINDOWS if early is None else definitions(early=early)
    return Spec(
        windows={name: found[name] for name in windows},
        key="k",
        time="ts",
        apply=aion.Apply(values if "v" in columns else without_v, "rows long, lacking long, sum long", columns=columns),
        bound="60 microseconds",
        trigger=None if more.get("emit") == "final" else "every_batch",
        **more,
    )


def without_v(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    rows = [row for batch in events for row in batch.to_pylist()]
    return {"rows": len(rows), "lacking": len(rows), "sum": sum(row["n"] for row in rows)}


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("more", MODES, ids=lambda more: "-".join(map(str, more.values())))
def test_a_function_goes_on_with_other_windows_and_columns(more: dict[str, Any]) -> None:
    """An event that came before its column was asked for has a null there."""
    with Restarted(applied(["ten", "long"], "n", **more)) as running:
        rows = running.process([("a", 5, 1), ("a", 14, 2), ("b", 8, 3)], 9)
        running.restart(applied(["ten", "seven"], "n", "v", **more))
        rows += running.process([("a", 6, 4), ("a", 24, 5)], 12)
        running.restart(applied(["seven"], "n", **more))
        rows += running.process([("a", 7, 6), ("a", 38, 7)], 12) + running.process([], 60)
        rows += running.process([], 200) + running.close()
        found = {key[:3]: (row["rows"], row["lacking"], row["sum"]) for key, row in newest(rows).items()}
    assert found["ten", "a", 0] == (3, 3, 11)
    assert found["ten", "b", 0] == (1, 1, 3)
    assert found["long", "a", 0] == (6, 6, 25)


@pytest.mark.slow
@given(phases(), st.sampled_from(MODES))
def test_a_key_gets_a_wider_type(drawn: list[tuple[list[str], list[str], Batches]], more: dict[str, Any]) -> None:
    """Blocks that are compacted are found by hashes of keys, also of negative ones, which more bits make other ones."""
    keys = {"a": -7, "b": 9}
    narrow = SCHEMA.set(0, pa.field("k", pa.int32()))
    (windows, aggregates, first), *rest = drawn
    with Restarted(spec_of(windows, aggregates, **more), narrow) as running:
        rows = [row for events, at in first for row in running.process([(keys[k], t, n) for k, t, n in events], at)]
        running.schema = narrow.set(0, pa.field("k", pa.int64()))
        for windows, aggregates, some in rest:
            if more.get("emit") == "changes":
                keep_only(rows, aggregates)
            running.restart(spec_of(windows, aggregates, **more))
            rows += [row for events, at in some for row in running.process([(keys[k], t, n) for k, t, n in events], at)]
        rows += running.close()
    check_rows(
        [{**row, "k": {v: k for k, v in keys.items()}[row["k"]]} for row in rows], drawn, running.definition, **more
    )


def test_an_event_that_comes_again_is_known_by_a_wider_key() -> None:
    narrow = SCHEMA.set(0, pa.field("k", pa.int32()))
    with Restarted(spec_of(["ten"], ["count"], unique=["n"], emit="changes"), narrow) as running:
        running.process([(7, 1, 1), (-7, 2, 2)], 5)
        running.schema = narrow.set(0, pa.field("k", pa.int64()))
        running.restart(spec_of(["ten"], ["count"], unique=["n"], emit="changes"))
        rows = running.process([(7, 1, 1), (-7, 2, 2), (-7, 2, 3)], 20)
    assert sorted((row["k"], row["old_count"], row["count"]) for row in rows) == [(-7, None, 2), (7, None, 1)]


@pytest.mark.parametrize(
    ("column", "type_", "windows", "unique"),
    [
        ("n", pa.string(), "ten", ("n",)),
        ("n", pa.float64(), "session", ("n",)),
        ("ts", pa.timestamp("us"), "ten", ("n",)),
        ("ts", pa.timestamp("us"), "session", None),
        ("ts", pa.timestamp("us"), "five", None),
    ],
)
def test_a_type_by_which_earlier_events_would_not_be_known_is_refused(
    column: str, type_: pa.DataType, windows: str, unique: Any
) -> None:
    """Sessions would lose the events that they have, and what has come would count again."""
    spec = replace(spec_of([windows], ["count"]), unique=unique)
    with Restarted(spec) as running:
        running.process([("a", 1, 1)], None)
        running.schema = SCHEMA.set(SCHEMA.names.index(column), pa.field(column, type_))
        with pytest.raises(ForeignState, match=f"column {column} was .* and is .*known by its values"):
            running.restart(spec)


@pytest.mark.parametrize("windows", ["ten", "session", "five"])
def test_values_of_another_type_are_not_counted_as_others(windows: str) -> None:
    """A sketch has only hashes, and each type has its own. So the column begins anew."""
    spec = replace(spec_of([windows], ["count"]), aggregates={"different": A.approx_count_distinct("n")})
    with Restarted(spec, SCHEMA.set(3, pa.field("n", pa.int32()))) as running:
        running.process([("a", t, t) for t in range(5)], None)
        running.schema = SCHEMA
        running.restart(spec)
        assert running.change is not None and running.change.columns == ("different",)
        rows = running.process([("a", t, t) for t in range(5)], 0) + running.process([], 60)
    assert {row["different"] for row in rows if row["window_start"].microsecond == 0} == {None}


def test_a_definition_that_went_is_over_when_its_last_window_is_and_not_before() -> None:
    """Windows of 50 µs begin before the change. They are kept for 60 µs, or for as long as the call says now."""
    with Restarted(spec_of(["ten", "long"], ["count"])) as running:
        running.process([("a", 1, 1)], None)
        running.restart(spec_of(["ten"], ["count"]))
        assert running.change is not None and running.change.at_us is not None
        last_us = running.change.at_us + 50 + 60
        running.process([], 10_000)
        definition, snapshot = running.version()
    for watermark_us, bound_us, over in ((last_us - 1, 60, set()), (last_us, 60, {1}), (last_us, 61, set())):
        assert finished([{**snapshot, "watermark_us": watermark_us}], definition, bound_us) == over


@pytest.mark.parametrize(
    ("was", "now"), [(pa.int64(), pa.int32()), (pa.float64(), pa.float32()), (pa.int64(), pa.float64())], ids=str
)
def test_a_type_that_does_not_hold_what_is_kept_is_refused(was: pa.DataType, now: pa.DataType) -> None:
    """Values and keys that do not fit would become others."""
    spec = applied(["ten"], "n")
    with Restarted(spec, SCHEMA.set(3, pa.field("n", was))) as running:
        running.process([("a", 1, 1)], None)
        running.schema = SCHEMA.set(3, pa.field("n", now))
        with pytest.raises(ForeignState, match=f"column n was {was} and is {now}, which does not hold all"):
            running.restart(spec)
    spec = spec_of(["ten"], ["count"])
    with Restarted(spec, SCHEMA.set(0, pa.field("k", was))) as running:
        running.process([(7, 1, 1)], None)
        running.schema = SCHEMA.set(0, pa.field("k", now))
        with pytest.raises(ForeignState, match="key was"):
            running.restart(spec)


@pytest.mark.parametrize("windows", ["ten", "session", "five"])
def test_a_function_does_not_take_the_place_of_aggregates(windows: str) -> None:
    """What is kept for one is nothing to the other: all events would have no key, and no values."""
    ways = [spec_of([windows], ["count"]), applied([windows], "n")]
    for before, after in (ways, reversed(ways)):
        with Restarted(before) as running:
            running.process([("a", 1, 1)], None)
            with pytest.raises(
                ForeignState, match="apply= keeps events, aggregates= does not, and one became the other"
            ):
                running.restart(after)


def test_columns_called_like_types_are_refused_where_the_state_does_not_tell_which_is_which() -> None:
    schema = pa.schema([*list(SCHEMA)[:2], ("int64", pa.int64())])

    def spec_with(*names: str) -> Spec:
        made = {"low": A.min("int64"), "last": A.last("int64")}
        aggregates = {name: made[name] for name in names}
        return Spec(windows={"ten": WINDOWS["ten"]}, key="k", time="ts", aggregates=aggregates, bound="1 minute")

    clear = Restarted(spec_with("last"), schema)
    clear.restart(spec_with("low", "last"))
    assert clear.change is not None
    clear.close()
    unclear = Restarted(spec_with("low", "last"), schema)
    with pytest.raises(ForeignState, match="called like a type"):
        unclear.restart(spec_with("low"))
    unclear.close()


@pytest.mark.parametrize("function", [A.min, A.collect_list])
def test_a_column_in_another_case_is_refused_and_not_null(function: Callable[[str], Any]) -> None:
    """Spark may take both names for one column."""

    def of(name: str) -> tuple[Spec, pa.Schema]:
        spec = Spec(
            windows={"ten": WINDOWS["ten"]}, key="k", time="ts", aggregates={"x": function(name)}, bound="1 minute"
        )
        return spec, pa.schema([*list(SCHEMA)[:2], (name, pa.int64())])

    with closing(Restarted(*of("v"))) as running:
        spec, running.schema = of("V")
        with pytest.raises(
            ForeignState, match="column v is called V now, and would be null in what is kept; call it v"
        ):
            running.restart(spec)


def test_no_time_is_left_out_between_windows_of_one_name_and_the_next() -> None:
    """The first windows go on until the others begin."""

    def spec(name: str) -> Spec:
        return replace(spec_of(["ten"], ["count"]), windows={"w": WINDOWS[name]})

    with Restarted(spec("ten")) as running:
        rows = running.process([("a", 1, 1), ("a", 10, 1)], 11)
        running.restart(spec("thirty"))
        assert running.change is not None and running.change.at_us == 20
        rows += running.process([("a", 15, 1), ("a", 21, 1), ("a", 31, 1)], 11)
        running.restart(spec("seven"))
        assert running.change is not None and running.change.at_us == 40
        rows += running.process([("a", 61, 1), ("a", 69, 1)], 11)
        rows += running.process([], 200) + running.close()
    assert {key[2:]: row["count"] for key, row in newest(rows).items()} == {
        (0, 10): 1, (10, 20): 2, (20, 30): 1, (30, 60): 1, (59, 66): 1, (66, 73): 1,
    }  # fmt: skip


@pytest.mark.parametrize("columns", [["count"], ["all"]])
def test_an_event_whose_windows_went_with_their_definition_is_dropped_with_a_reason(columns: list[str]) -> None:
    def dropped(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        names = ("k", "window", "reason", "events", "lateness_us")
        return sorted(tuple(row[name] for name in names) for row in rows if row["kind"] == "dropped")

    why = "older than the definitions of the windows"
    with Restarted(spec_of(["ten"], columns)) as running:
        running.process([("a", 1, 1)], 0)
        running.process([], 11)
        running.restart(spec_of(["thirty"], columns))
        assert not dropped(running.process([("a", 2, 1)], 20)), "its window is kept"
        assert dropped(running.process([("a", 3, 1), ("b", 65, 1)], 95)) == [("a", "ten", TOO_LATE, 1, 85)]
        running.restart(spec_of(["thirty"], columns))
        lost = running.process([("a", 4, 1), ("a", 5, 1), ("b", 41, 1), ("b", 61, 1)], 95)
        assert dropped(lost) == [("a", None, why, 2, 95)]
        assert running.restart(spec_of(["ten", "thirty"], columns)) is None
        assert dropped(running.process([("a", 6, 1)], 95)) == [("a", None, why, 1, 95)]
    taken = newest(lost).items()
    assert {key[2]: row["events"] for key, row in taken if key[1] == "b" and row["window"] == "thirty"} == {
        30: 1,
        60: 2,
    }


@pytest.mark.slow
@some(0.5)
@given(phases(), st.lists(st.sampled_from(["ten", "thirty", "seven"]), min_size=4, max_size=4))
def test_each_event_is_in_a_window_of_its_name_or_dropped_however_often_the_name_changes(
    drawn: list[tuple[list[str], list[str], Batches]], names: list[str]
) -> None:
    def spec(number: int) -> Spec:
        return replace(spec_of(["ten"], ["count"]), windows={"w": WINDOWS[names[number]]})

    came = [event for *_, batches in drawn for events, _ in batches for event in events]
    with Restarted(spec(0)) as running:
        rows: list[dict[str, Any]] = []
        for number, (*_, batches) in enumerate(drawn):
            if number:
                running.restart(spec(number))
            rows += [row for events, watermark in batches for row in running.process(events, watermark)]
        rows += running.process([], 1000) + running.close()
    dropped = sum(row["events"] for row in rows if row["kind"] == "dropped")
    shown = newest(rows)
    held = [sum(k == key and start <= t < end for _, k, start, end in shown) for key, t, _ in came]
    assert held.count(0) <= dropped
    assert len(came) - dropped <= sum(row["events"] for row in shown.values()) <= sum(held)
