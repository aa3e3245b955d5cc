"""Scenario files as data: what comes in, what comes out (tests/scenarios/README.md). In order, shuffled, rebundled."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

import aion
from aion import aggregates as A
from aion.core import windows as definitions

FOLDER = Path(__file__).parents[1] / "scenarios"
FILES = sorted(FOLDER.glob("*.yaml"))
SCHEMA = pa.schema([("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.float64()), ("gap", pa.string())])
WINDOWS = {
    "tumbling": aion.Tumbling,
    "sliding": aion.Sliding,
    "cumulative": aion.Cumulative,
    "calendar": aion.Calendar,
    "session": definitions.Session,
    "count": definitions.Count,
    "per_record": definitions.PerRecord,
}
STEPS = {"event", "watermark", "expect"}
KEYS = {"about", "windows", "key", "bound", "aggregates", "emit", "trigger", "in_order", "steps"}
Time = float | datetime
"""Seconds since the epoch, or a date and time with its offset from UTC."""
Row = dict[str, Any]
Events = list[Row]


@dataclass(frozen=True)
class Step:
    """What is done before the next look: batches of events (lists) and watermarks (µs); and what must come out."""

    actions: tuple[Events | int, ...]
    expected: tuple[Row, ...]


class Scenario:
    """A file, checked and in microseconds."""

    def __init__(self, path: Path) -> None:
        self._told: dict[str, Any] = yaml.safe_load(path.read_text())
        assert set(self._told) <= KEYS, f"{path.name}: unknown keys {set(self._told) - KEYS}"
        assert self._told["about"].strip()

    @cached_property
    def definition(self) -> dict[str, Any]:
        """The arguments of an operator."""
        return {
            "windows": [window(told) for told in self._told["windows"]],
            "time": "ts",
            "key": self._told.get("key"),
            "aggregates": {name: aggregate(told) for name, told in self._told["aggregates"].items()},
            "emit": self._told.get("emit", "all"),
        }

    @property
    def policy(self) -> dict[str, Any]:
        lateness = {"initial_bound": self._told["bound"], "coverage": None}
        return {"lateness": lateness, "trigger": self._told.get("trigger", {"kind": "every_batch"})}

    @property
    def commutes(self) -> bool:
        """Whether the order of the events of a batch makes no difference."""
        layout = aion.Spec(**self.definition).plan(SCHEMA).layout
        assert layout is not None
        return not self._told.get("in_order", False) and all(bound.commutative for bound in layout.bound)

    @property
    def steps(self) -> Iterator[Step]:
        actions: list[Events | int] = []
        for told in self._told["steps"]:
            ((kind, value),) = told.items()
            assert kind in STEPS, f"unknown step {kind!r}"
            if kind == "expect":
                yield Step(tuple(actions), tuple(in_seconds(row) for row in value))
                actions = []
            elif kind == "watermark":
                actions.append(micros(value))
            elif actions and isinstance(actions[-1], list):
                actions[-1].append(value)
            else:
                actions.append([value])
        assert not actions, "the steps end with something of which nothing is expected; end with expect"


def window(told: dict[str, dict[str, Any]]) -> Any:
    ((name, arguments),) = told.items()
    return WINDOWS[name](**arguments)


def aggregate(told: str | dict[str, Any]) -> A.Aggregate:
    if isinstance(told, str):
        return getattr(A, told)()  # type: ignore[no-any-return]
    ((name, columns),) = told.items()
    return getattr(A, name)(*([columns] if isinstance(columns, str) else columns))  # type: ignore[no-any-return]


def micros(time: Time) -> int:
    return round(seconds(time) * 1_000_000)


def seconds(time: Time) -> float:
    if not isinstance(time, datetime):
        return time
    assert time.tzinfo is not None, f"{time} has no offset from UTC; write e.g. 2024-03-31 12:00:00+02:00"
    return time.timestamp()


def table(events: Events) -> pa.Table:
    for event in events:
        assert "at" in event and set(event) <= {"at", "k", "v", "gap"}, f"an event has at, k, v and gap, not {event}"
    times = [None if e["at"] is None else micros(e["at"]) for e in events]
    columns = [
        pa.array([e.get("k") for e in events], pa.string()),
        pa.array(times, pa.int64()).cast(SCHEMA.field("ts").type),
        pa.array([e.get("v") for e in events], pa.float64()),
        pa.array([e.get("gap") for e in events], pa.string()),
    ]
    return pa.table(columns, schema=SCHEMA)


def replay(scenario: Scenario, how: random.Random | None, **policy: Any) -> Iterator[tuple[Step, list[Row]]]:
    """Each step with the rows that came out. ``how``: how events are shuffled, and into which batches they go."""
    with aion.LocalOperator(**scenario.definition, policy={**scenario.policy, **policy}) as operator:
        for step in scenario.steps:
            rows: list[Row] = []
            for action in step.actions:
                if isinstance(action, int):
                    rows += operator.advance(action).to_pylist()
                    continue
                for batch in bundles(action, how):
                    rows += operator.process(table(batch)).to_pylist()
            yield step, [plain(row) for row in rows]
        assert operator.close().num_rows == 0, "the last expect does not say everything"


def bundles(events: Events, how: random.Random | None) -> Iterator[Events]:
    """The events as one batch, or shuffled in several."""
    if how is None:
        yield events
        return
    rest = how.sample(events, len(events))
    while rest:
        size = how.randint(1, len(rest))
        yield rest[:size]
        rest = rest[size:]


def plain(row: Row) -> Row:
    """Times as seconds since the epoch, under the names that files have for them."""
    row = in_seconds(row)
    return {**row, "start": row["window_start"], "end": row["window_end"]}


def in_seconds(row: Row) -> Row:
    return {name: seconds(value) if isinstance(value, datetime) else value for name, value in row.items()}


def fits(expected: Row, row: Row) -> bool:
    """Whether all that is expected is so; unknown names are an error."""
    return all(row[name] == value for name, value in expected.items())


def unmatched(expected: Sequence[Row], rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """What was expected and did not come out, and what came out and was not expected."""
    left = list(rows)
    missing = []
    # Those that say most first: a row that says little would take another one's.
    for wanted in sorted(expected, key=len, reverse=True):
        found = next((i for i, row in enumerate(left) if fits(wanted, row)), None)
        if found is None:
            missing.append(wanted)
        else:
            del left[found]
    return missing, left


def newest(rows: Sequence[Row]) -> list[Row]:
    """The last row for each key and window, in the order in which they came; of dropped ones the sums.

    In other batches windows run more often, but their last panes are the same.
    """
    last: dict[Any, Row] = {}
    for row in rows:
        place = (row["window"], row["start"], row["end"], row.get("k"), row["kind"] == "dropped")
        if place[-1] and place in last:
            row = {**row, "events": row["events"] + last[place]["events"]}
        last.pop(place, None)
        last[place] = row
    return list(last.values())


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Panes, and what is none."""
    return [r for r in rows if r["kind"] != "dropped"], [r for r in rows if r["kind"] == "dropped"]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("backend", ["tiered", "rocksdb"])
def test_in_order(path: Path, backend: str) -> None:
    for number, (step, rows) in enumerate(replay(Scenario(path), None, state={"backend": backend})):
        assert unmatched(step.expected, rows) == ([], []), f"{path.name}, expect number {number}"


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("path", [p for p in FILES if Scenario(p).commutes], ids=lambda path: path.stem)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (1, 2))])
def test_shuffled_and_rebundled(path: Path, seed: int) -> None:
    tiny = {"memory": {"budget": "2KiB", "bucket_limit": "700B"}, "blocks": {"target": "64B"}}
    for number, (step, rows) in enumerate(replay(Scenario(path), random.Random(seed), **tiny)):
        panes, dropped = split(newest(rows))
        told, told_dropped = split(step.expected)
        told = [{name: value for name, value in row.items() if name != "pane"} for row in told]
        assert unmatched(told, panes) == ([], []), f"{path.name}, expect number {number}"
        lost = sum(row["events"] for row in dropped)
        assert lost == sum(row.get("events", row.get("n")) for row in told_dropped), f"{path.name}, number {number}"


def test_there_are_scenarios_and_most_of_them_can_be_shuffled() -> None:
    commuting = [path for path in FILES if Scenario(path).commutes]
    assert len(FILES) >= 8
    assert len(commuting) >= 7
    assert FOLDER / "order_of_arrival.yaml" not in commuting


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"tumbling": {"size": "10s", "offset": "3s"}}, aion.Tumbling("10s", "3s")),
        ({"sliding": {"size": "25s", "slide": "10s"}}, aion.Sliding("25s", "10s")),
        ({"cumulative": {"step": "10s", "size": "1m"}}, aion.Cumulative("10s", "1m")),
        ({"session": {"gap": "5s"}}, definitions.Session("5s")),
        ({"count": {"n": 3, "slide": 1}}, definitions.Count(3, 1)),
        ({"per_record": {"size": "5s"}}, definitions.PerRecord("5s")),
        ({"calendar": {"every": "1 week", "zone": "UTC"}}, aion.Calendar("1 week", "UTC")),
    ],
)
def test_every_kind_of_window_can_be_written(told: dict[str, Any], expected: Any) -> None:
    assert window(told) == expected


def test_a_scenario_that_is_not_so_fails(tmp_path: Path) -> None:
    text = (FOLDER / "tumbling.yaml").read_text()
    for right, wrong in (("total: 3", "total: 4"), ("expect: []", "expect: [{start: 0}]"), (", total: 4}", ", n: 2}")):
        path = tmp_path / "wrong.yaml"
        path.write_text(text.replace(right, wrong, 1))
        assert any(unmatched(step.expected, rows) != ([], []) for step, rows in replay(Scenario(path), None))
