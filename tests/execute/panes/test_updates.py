"""Events that replace earlier ones: windows of the panes of others have what a computation over all events gives."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.core.query.plan import Plan
from aion.core.query.updates import DROPPED, ORDER, RETRACTED, of_updates
from aion.errors import ConfigError, SchemaError, WindowError
from aion.spec import Spec

EVENTS = pa.schema([("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.int64())])
HIDDEN = (RETRACTED, DROPPED, ORDER)
SECOND = 1_000_000
KEPT: dict[str, Any] = {"bound": "1 hour", "trigger": "every_batch"}


class OfPanes(Spec):
    """A definition whose events are panes."""

    def plan(self, input_schema: pa.Schema) -> Plan:
        schema = pa.schema([field for field in input_schema if field.name not in HIDDEN])
        identity = [name for name in ("k", "window_start", "window_end") if name in schema.names]
        return of_updates(super().plan(schema), schema, identity)


def as_events(panes: pa.Table, order: Iterator[int]) -> pa.Table:
    """Panes as a child gets them."""
    panes = panes.filter(pa.compute.not_equal(panes.column("kind"), "dropped"))
    panes = panes.append_column(RETRACTED, pa.compute.equal(panes.column("kind"), "retracted"))
    panes = panes.append_column(DROPPED, pa.nulls(len(panes), pa.string()))
    return panes.append_column(ORDER, pa.array(list(itertools.islice(order, len(panes))), pa.int64()))


def medians(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    table = pa.Table.from_batches(list(events))
    assert not set(HIDDEN) & set(table.column_names)
    return {"panes": table.num_rows, "middle": float(median(table.column("total").to_pylist()))}


CONTENTS: dict[str, tuple[dict[str, Any], Callable[[list[list[int]]], Any]]] = {
    "aggregates": (
        {"aggregates": {"panes": A.count(), "top": A.max("n"), "middle": A.median("total"), "sum": A.sum("total")}},
        lambda of: {
            "panes": len(of),
            "top": max(map(len, of)),
            "middle": float(median(map(sum, of))),
            "sum": sum(map(sum, of)),
        },
    ),
    "apply": (
        {"apply": aion.Apply(medians, "panes long, middle double")},
        lambda of: {"panes": len(of), "middle": float(median(map(sum, of)))},
    ),
}
NAMES = {"aggregates": ("panes", "top", "middle", "sum"), "apply": ("panes", "middle")}
INNER: dict[str, tuple[Any, str]] = {
    "tumbling": (aion.Tumbling("1 minute"), "window_start"),
    "early": (aion.Tumbling("1 minute", early="batch"), "window_start"),
    "sessions": (aion.Session("20 seconds"), "window_end"),
}
OUTER: dict[str, Any] = {"tumbling": aion.Tumbling("5 minutes"), "sliding": aion.Sliding("6 minutes", "2 minutes")}
OUTER["grows"] = aion.Cumulative("2 minutes", "6 minutes")


def groups_of(inner: str, times: list[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """The values of the inner windows of a key, by interval."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    if inner != "sessions":
        for at, value in times:
            found[at // 60 * 60, at // 60 * 60 + 60].append(value)
        return found
    run: list[tuple[int, int]] = []
    for at, value in [*sorted(times), (10**9, 0)]:
        if run and at - run[-1][0] > 20:
            found[run[0][0], run[-1][0] + 20] = [v for _, v in run]
            run = []
        run.append((at, value))
    return found


def expected(inner: str, outer: str, content: str, events: list[tuple[str | None, int, int]], watermark: int) -> Any:
    size, slide = (300, 300) if outer == "tumbling" else (360, 120)

    def spans(at: int) -> list[tuple[int, int]]:
        if outer == "grows":
            first = at // size * size
            return [(first, end) for end in range(first + slide, first + size + 1, slide) if at < end]
        return [(first, first + size) for first in range(at // slide * slide, at - size, -slide)]

    by_key: dict[str | None, list[tuple[int, int]]] = defaultdict(list)
    for key, at, value in events:
        by_key[key].append((at, value))
    windows: dict[Any, list[list[int]]] = defaultdict(list)
    for key, times in by_key.items():
        for (start, end), values in groups_of(inner, times).items():
            at = end if inner == "sessions" else start
            if inner != "early" and end > watermark:
                continue
            for span in spans(at):
                if span[1] <= watermark:
                    windows[key, *span].append(values)
    return {where: CONTENTS[content][1](of) for where, of in windows.items()}


batches = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 900), st.integers(-5, 5)), min_size=1, max_size=6
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
@given(batches)
def test_windows_of_windows_are_those_of_all_events(inner: str, outer: str, content: str, given_: Any) -> None:
    window, time = INNER[inner]
    order, seen, latest = itertools.count(), [], 0
    first = aion.LocalOperator(
        key="k",
        time="ts",
        windows=window,
        input_schema=EVENTS,
        aggregates={"n": A.count(), "total": A.sum("v")},
        **KEPT,
    )
    definition = CONTENTS[content][0]
    spec = OfPanes(key="k", time=time, windows=OUTER[outer], **definition, **(KEPT | {"bound": "2 hours"}))
    shown: dict[Any, Any] = {}
    with first, aion.LocalOperator(spec) as second:
        for batch in given_:
            columns = [[e[0] for e in batch], pa.array([e[1] * SECOND for e in batch], EVENTS.field("ts").type)]
            rows = [first.process(pa.table([*columns, [e[2] for e in batch]], schema=EVENTS))]
            seen += batch
            latest = max(latest, *(e[1] for e in batch))
            rows.append(first.advance(latest * SECOND))
            panes = [second.process(as_events(pa.concat_tables(rows), order)), second.advance(latest * SECOND)]
            for row in pa.concat_tables(panes).to_pylist():
                assert row["kind"] != "dropped"
                where = row["k"], *(round(row[f"window_{edge}"].timestamp()) for edge in ("start", "end"))
                values = {name: row[name] for name in NAMES[content]}
                shown[where] = None if row["kind"] == "retracted" else values
            there = {where: row for where, row in shown.items() if row is not None}
            assert there == expected(inner, outer, content, seen, latest)


def test_what_cannot_be_made_of_updates_is_refused() -> None:
    schema = pa.schema([("k", pa.string()), ("window_start", pa.timestamp("us", "UTC")), ("n", pa.int64())])
    definition: dict[str, Any] = {"key": "k", "time": "window_start", "aggregates": {"n": A.count()}}
    tumbling = aion.Tumbling("1 minute")
    with pytest.raises(WindowError, match=r"belongs to single keys.*emit='final'"):
        OfPanes(windows=aion.Session("1 minute"), **definition).plan(schema)
    with pytest.raises(ConfigError, match="completeness: it counts events"):
        OfPanes(windows=tumbling, completeness=True, **definition).plan(schema)
    with pytest.raises(ConfigError, match="unique: panes of a window replace each other"):
        OfPanes(windows=tumbling, unique="n", **definition).plan(schema)
    with pytest.raises(SchemaError, match="a name that Aion needs"):
        taken = schema.append(pa.field(ORDER, pa.int64()))
        of_updates(Spec(windows=tumbling, **definition).plan(taken), taken, ["k"])
