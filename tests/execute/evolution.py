"""A query that starts again with other definitions, and what its panes are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from itertools import product
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.base.numbers import NEVER
from aion.core.query.evolution import Change, Version, change, finished, reached_us, same
from aion.core.query.evolved import evolved, of_shard
from aion.core.query.history import EVOLUTION, Evolution
from aion.core.windows import Aligned
from aion.execute.assembly import longest_bound_us, make_contents
from aion.execute.windows import Windows
from aion.spec import Spec
from tests.durations import us

SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("ts", pa.timestamp("us", "UTC")),
        ("v", pa.float64()),
        ("n", pa.int64()),
        ("gap", pa.duration("us")),
    ]
)


def definitions(**when: Any) -> dict[str, Any]:
    return {
        "ten": aion.Tumbling(us(10), **when),
        "thirty": aion.Tumbling(us(30), **when),
        "seven": aion.Tumbling(us(7), offset=us(3), **when),
        "hop": aion.Sliding(us(20), us(5), **when),
        "long": aion.Sliding(us(50), us(20), **when),
        "grows": aion.Cumulative(us(10), us(40), **when),
        "steps": aion.Cumulative(us(5), us(15), us(3), **when),
        "session": aion.Session(us(6), **when),
        "five": aion.Count(5, 2, **when),
        "record": aion.PerRecord(us(8)),
        "marked": aion.Punctuated(is_three),
        "own gaps": aion.Session(gap_column="gap", **when),
    }


def is_three(events: pa.RecordBatch) -> pa.Array:
    return pc.equal(events.column("n"), 3)


WINDOWS = definitions()
ALIGNED = [name for name, window in WINDOWS.items() if isinstance(window, Aligned)]
AGGREGATES = {
    "count": A.count(),
    "total": A.sum("n"),
    "mean": A.mean("v"),
    "top": A.max("n"),
    "last": A.last("n"),
    "distinct": A.count_distinct("n"),
    "all": A.collect_list("n"),
}


class Restarted:
    """An operator that keeps its blocks and its snapshot over restarts with other definitions."""

    def __init__(self, spec: Spec, schema: pa.Schema = SCHEMA) -> None:
        self.schema = schema
        self._local = aion.LocalOperator(spec, input_schema=schema)
        assert self._local._windows is not None
        self.definition = _stored(self._local._windows.plan.definition)
        self.batches = 0
        self.change: Change | None = None
        self.oldest: list[Version] = []
        """Other versions that are kept, besides the newest one."""

    def restart(self, spec: Spec, on_removed: str = "finish") -> None:
        local, plan = self._local, spec.plan(self.schema)
        assert local._windows is not None
        snapshot = orjson.loads(orjson.dumps(local._windows.save().snapshot))
        found = self.definition
        over = finished([snapshot], found, longest_bound_us(plan, local.policy))
        if over or not same(found, plan):
            at_us = reached_us(snapshot)
            self.change = change(
                found,
                plan,
                at_us=at_us,
                batch=self.batches,
                finished=over,
                on_removed=on_removed,
                oldest=[Version(found, snapshot), *self.oldest],
            )
            plan = evolved(plan, self.change.evolution)
        elif EVOLUTION in found:
            plan = evolved(plan, Evolution.of(found))
        self.definition = _stored(plan.definition)
        plan = of_shard(plan, snapshot)
        contents = make_contents(plan, local._codec, local.policy)
        local._windows = Windows(plan, local.policy, local._attempt, snapshot, contents)
        local._spec = spec

    def kept_bytes(self) -> tuple[int, int]:
        """The bytes of the definition, and of the snapshot's part about it."""
        assert self._local._windows is not None
        snapshot = self._local._windows.save().snapshot
        return len(orjson.dumps(self.definition)), len(orjson.dumps(snapshot.get(EVOLUTION)))

    def version(self) -> Version:
        assert self._local._windows is not None
        return Version(self.definition, orjson.loads(orjson.dumps(self._local._windows.save().snapshot)))

    def process(self, events: list[tuple[Any, int, int]], watermark: int | None) -> list[dict[str, Any]]:
        self.batches += 1
        found = self._local.process(table(events, self.schema), watermark)
        assert self._local._windows is not None
        self._local._windows.operator.validate()
        return self._with_columns(found)

    def close(self) -> list[dict[str, Any]]:
        return self._with_columns(self._local.close())

    def _with_columns(self, found: pa.Table) -> list[dict[str, Any]]:
        """The rows, each with the first windows that have its columns."""
        assert self._local._windows is not None
        history = self._local._windows.plan.history
        return [{**row, "since": {} if history is None else history.columns} for row in found.to_pylist()]

    def __enter__(self) -> Restarted:
        return self

    def __exit__(self, *error: object) -> None:
        self._local.close()


def _stored(definition: dict[str, Any]) -> dict[str, Any]:
    return dict(orjson.loads(orjson.dumps(definition)))


def table(events: list[tuple[Any, int, int]], schema: pa.Schema = SCHEMA) -> pa.Table:
    keys, times, numbers = zip(*events, strict=True) if events else ((), (), ())
    n = pa.array(numbers, pa.int64())
    times_us = pa.array(times, pa.int64()).cast(schema.field("ts").type)
    gaps = pc.add(pc.abs(n), 4).cast(pa.duration("us"))
    own = n.cast(schema.field("n").type)
    columns = {"k": pa.array(keys, schema.field("k").type), "ts": times_us, "v": n.cast(pa.float64()), "n": own}
    return pa.table(columns | {"gap": gaps})


def spec_of(windows: list[str], aggregates: list[str], early: str | None = None, **more: Any) -> Spec:
    found = WINDOWS if early is None else definitions(early=early)
    return Spec(
        windows={name: found[name] for name in windows},
        key="k",
        time="ts",
        aggregates={name: AGGREGATES[name] for name in aggregates},
        bound="60 microseconds",
        trigger=None if more.get("emit") == "final" else "every_batch",
        **more,
    )


Events = list[tuple[str, int, int]]
Batches = list[tuple[Events, int]]


def whole(spec: Spec, batches: Batches) -> dict[tuple[str, str, int, int], dict[str, Any]]:
    """The last rows of a query that was never touched, by window, key, start and end."""
    with closing(aion.LocalOperator(spec, input_schema=SCHEMA)) as operator:
        rows = [row for events, watermark in batches for row in operator.process(table(events), watermark).to_pylist()]
        rows += operator.close().to_pylist()
    return newest(rows)


def newest(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int, int], dict[str, Any]]:
    return {
        (r["window"], r["k"], micros(r["window_start"]), micros(r["window_end"])): r
        for r in rows
        if r["kind"] != "dropped"
    }


def micros(instant: Any) -> int:
    return int(instant.timestamp() * 1_000_000 + 0.5)


def compared(row: Mapping[str, Any], columns: list[str]) -> dict[str, Any]:
    return {name: sorted(row[name]) if isinstance(row[name], list) else row[name] for name in columns}


def check(phases: list[tuple[list[str], list[str], Batches]], **more: Any) -> None:
    """Runs phases, each with its windows and aggregates, and compares each window with a query of all batches."""
    first, *rest = phases
    with Restarted(spec_of(first[0], first[1], **more)) as running:
        rows = [row for events, watermark in first[2] for row in running.process(events, watermark)]
        for windows, aggregates, some in rest:
            if more.get("emit") == "changes":
                keep_only(rows, aggregates)
            running.restart(spec_of(windows, aggregates, **more))
            rows += [row for events, watermark in some for row in running.process(events, watermark)]
        rows += running.close()
    check_rows(rows, phases, running.definition, **more)


def keep_only(rows: list[dict[str, Any]], aggregates: list[str]) -> None:
    """Leaves out what later rows do not say whether it has changed: all but the columns that come from now on."""
    for row in rows:
        for name in {*AGGREGATES, "events"} - {*aggregates}:
            row.pop(name, None)


def check_rows(
    rows: list[dict[str, Any]],
    phases: list[tuple[list[str], list[str], Batches]],
    definition: dict[str, Any],
    **more: Any,
) -> None:
    batches = [batch for *_, some in phases for batch in some]
    # A definition that is new may show an early pane before one that was there would. So only what has ended counts.
    ended_us = max(watermark for _, watermark in batches) if "early" in more else NEVER
    found = newest(rows)
    names = list(dict.fromkeys(name for windows, *_ in phases for name in windows))
    oracle = whole(spec_of(names, list(AGGREGATES), **more), batches)
    evolution = Evolution.of(definition)
    limits: dict[str, list[tuple[float, float]]] = {}
    for kept in evolution.windows:
        since = float("-inf") if kept.since_us is None else kept.since_us
        until = float("inf") if kept.until_us is None else kept.until_us
        if kept.until_us is not None or not kept.over:
            limits.setdefault(kept.name, []).append((since, until))
    found, oracle = (
        {key: row for key, row in some.items() if micros(row["window_end"]) <= ended_us} for some in (found, oracle)
    )
    wanted = {key for key in oracle if any(low <= key[2] < high for low, high in limits.get(key[0], []))}
    assert wanted == found.keys()
    for key in wanted:
        row, right = found[key], oracle[key]
        if more.get("emit") != "changes":
            assert row["events"] == right["events"], key
        columns = [name for name in AGGREGATES if name in row]
        without = [name for name in columns if key[2] < row["since"].get(name, key[2])]
        assert all(row[name] is None for name in without), key
        full = [name for name in columns if name not in without]
        assert compared(row, full) == compared(right, full), (key, row["kind"], right["kind"])


def phases() -> st.SearchStrategy[list[tuple[list[str], list[str], Batches]]]:
    """Some definitions, and batches of events that may be late. The watermark never goes back."""
    events = st.tuples(st.sampled_from("ab"), st.integers(-40, 40), st.integers(-3, 3))
    batches = st.lists(st.tuples(st.lists(events, max_size=6), st.integers(0, 40)), min_size=1, max_size=3)
    some = st.lists(st.sampled_from(ALIGNED), min_size=1, max_size=3, unique=True)
    columns = st.lists(st.sampled_from([*AGGREGATES][:5]), min_size=1, max_size=4, unique=True)
    return st.lists(st.tuples(some, columns, batches), min_size=2, max_size=4).map(_in_time)


def _in_time(drawn: list[tuple[list[str], list[str], Batches]]) -> list[tuple[list[str], list[str], Batches]]:
    """Times of events become those behind or ahead of a watermark that moves."""
    at, found = 50, []
    for windows, columns, batches in drawn:
        some: Batches = []
        for events, step in batches:
            some.append(([(k, at + t, n) for k, t, n in events], at))
            at += step
        found.append((windows, columns, some))
    return found


MODES: list[dict[str, Any]] = [
    dict(mode)
    for emit, unique, completeness, early in product(
        ["all", "changes", "final"], [(), ("n",)], [False, True], [None, us(4), "batch"]
    )
    if emit != "final" or early is None
    for mode in [
        {"emit": emit, "completeness": completeness}
        | ({"unique": unique} if unique else {})
        | ({"early": early} if early else {})
    ]
]
