"""A join, by an oracle: after each batch the table has what a join of all rows has that were not dropped."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aion.config import load_policy
from aion.core.join.join import Join
from aion.core.join.plan import ASOF, FULL, HOW, INNER, LEFT, OUTER_LEFT, RIGHT, JoinPlan, Side
from aion.core.lateness.observe import Lateness
from aion.errors import ConfigError
from aion.execute.joining import Joined
from state_backends.format.ordered_map import MemoryMap
from state_backends.thresholds import TINY, threshold

POLICY = load_policy("standard", {})
LEFTS = pa.schema([("k", pa.string()), ("j", pa.int64()), ("lt", pa.timestamp("us", "UTC")), ("v", pa.int64())])
RIGHTS = pa.schema([("k", pa.string()), ("j", pa.int64()), ("rt", pa.timestamp("us", "UTC")), ("w", pa.float64())])


def plan(
    how: str = INNER, within: tuple[int, int] = (0, 5), bounds: tuple[int, int] = (4, 6), **other: Any
) -> JoinPlan:
    unique = other.pop("unique", (False, False))
    ids = other.pop("ids", (("j", "v"), ("j", "w")))
    left = Side(LEFTS, "lt", ids[LEFT], unique[LEFT], bounds[LEFT])
    right = Side(RIGHTS, "rt", ids[RIGHT], unique[RIGHT], bounds[RIGHT])
    return JoinPlan(left, right, ("k", "j") if other.pop("two_keys", False) else ("k",), *within, how, **other)


class Row(NamedTuple):
    k: str | None
    j: int
    t: int | None
    value: int


@dataclass
class Batch:
    to_us: int
    rows: list[tuple[int, Row]]
    restarts: bool


def tables(rows: list[tuple[int, Row]]) -> list[tuple[int, pa.Table]]:
    """As they may come: neighbours of one side together."""
    found: list[tuple[int, pa.Table]] = []
    for side, row in rows:
        schema = (LEFTS, RIGHTS)[side]
        values = [row.k, row.j, row.t, row.value]
        columns = [pa.array([value], field.type) for value, field in zip(values, schema, strict=True)]
        found.append((side, pa.table(columns, schema=schema)))
    return found


class Rig:
    """A join, the table that a sink makes of its results, and what is expected of it."""

    def __init__(self, definition: JoinPlan, condition: Callable[[Row, Row], bool] | None = None) -> None:
        self.plan, self.condition = definition, condition
        self.values = MemoryMap()
        self.joined = Joined(definition, POLICY, self.values)
        self.table: dict[str, dict[str, Any]] = {}
        self.results: list[dict[str, Any]] = []
        self.kept: tuple[list[Row], list[Row]] = [], []
        self.dropped: Counter[str] = Counter()
        self.lines = [-(10**9), -(10**9)]
        self.at_us: int | None = None

    def batch(self, batch: Batch) -> list[dict[str, Any]]:
        self._expect(batch)
        rows = [*self.joined.advance(batch.to_us)]
        for side, table in tables(batch.rows):
            rows += self.joined.arrive((side, table))
        rows += self.joined.end_batch()
        return self.taken(rows, restarts=batch.restarts)

    def taken(self, batches: list[pa.RecordBatch], *, restarts: bool) -> list[dict[str, Any]]:
        """Ends a batch: a sink takes its results. Returns them as rows."""
        results = [row for some in batches for row in some.to_pylist()]
        saved = json.loads(json.dumps(self.joined.save().snapshot))
        if restarts:
            self.values = copy.deepcopy(self.values)
            self.joined = Joined(self.plan, POLICY, self.values, saved)
        if self.plan.emit == "changes":
            assert max(Counter(row["pair"] for row in results if row["pair"]).values(), default=1) == 1
        for row in results:
            if row["kind"] == "dropped":
                self.dropped[row["side"]] += 1
            elif row["kind"] == "retracted":
                if self.plan.emit == "changes":
                    values = {field.name for field in self.plan.values}
                    was = self.table[row["pair"]]
                    assert {name: row["old_" + name] for name in values} == {name: was[name] for name in values}
                    assert not any(row[name] is not None for name in values)
                assert self.table.pop(row["pair"])["pane_seq"] < row["pane_seq"], "only what was shown is taken back"
            else:
                before = self.table.get(row["pair"])
                again = before is not None and before["kind"] == "early" != row["kind"] and self.plan.emit == "all"
                assert before is None or again, "each result comes once"
                self.table[row["pair"]] = row
        self.results += results
        return results

    def _expect(self, batch: Batch) -> None:
        if self.at_us is None or batch.to_us > self.at_us:
            self.at_us = batch.to_us
            for side, said in enumerate(self.plan.sides):
                assert said.bound_us is not None
                self.lines[side] = max(self.lines[side], batch.to_us - said.bound_us)
        for side, row in batch.rows:
            if row.t is None or row.t < self.lines[side]:
                continue
            if self.plan.sides[side].unique and row in self.kept[side]:
                continue
            self.kept[side].append(row)

    def matches(self, left: Row, right: Row) -> bool:
        same = left.k is not None and left.k == right.k and (len(self.plan.key) == 1 or left.j == right.j)
        assert left.t is not None and right.t is not None
        near = self.plan.first_us <= right.t - left.t <= self.plan.last_us
        return same and near and (self.condition is None or self.condition(left, right))

    def expected(self) -> Counter[tuple[Any, ...]]:
        lefts, rights = self.kept
        how, limits = self.plan.how, self.limits()
        found: Counter[tuple[Any, ...]] = Counter()
        for left in lefts:
            partners = [right for right in rights if self.matches(left, right)]
            due = self.plan.early or (left.t or 0) + self.plan.last_us <= limits[LEFT]
            if how == ASOF:
                if due:
                    newest = max((p.t or 0 for p in partners), default=None)
                    found[left, next((p for p in partners if p.t == newest), None)] += 1
                continue
            for right in partners:
                found[left, right] += 1
            if not partners and due and how in (OUTER_LEFT, FULL):
                found[left, None] += 1
        for right in rights:
            due = self.plan.early or (right.t or 0) - self.plan.first_us <= limits[RIGHT]
            if due and how in ("right", FULL) and not any(self.matches(left, right) for left in lefts):
                found[None, right] += 1
        return found

    def limits(self) -> tuple[int, int]:
        assert self.at_us is not None
        if self.plan.emit == "final":
            return self.lines[RIGHT] - 1, self.lines[LEFT] - 1
        return self.at_us, self.at_us

    def shown(self) -> Counter[tuple[Any, ...]]:
        return Counter((row_of(row, "lt", "v"), row_of(row, "rt", "w")) for row in self.table.values())

    def check(self) -> None:
        expected, shown = self.expected(), self.shown()
        if self.plan.how == ASOF:  # of rows at one time, any may be the newest
            expected, shown = (
                Counter({(left, right and right.t): n for (left, right), n in found.items()})
                for found in (expected, shown)
            )
        assert shown == expected
        for row in self.table.values():
            if row["lt"] is None or row["rt"] is None:
                side = LEFT if row["rt"] is None else RIGHT
                time = round(row[("lt", "rt")[side]].timestamp() * 1e6)
                is_due = time + self.plan.interval(side)[1] <= self.limits()[side]
                again = self.plan.emit == "all"
                assert (row["kind"] == "early") is not is_due or not again, (
                    "an early row comes once more, when it is due"
                )


def row_of(row: dict[str, Any], time: str, value: str) -> Row | None:
    if row[time] is None:
        return None
    j = row["j"]
    return Row(row["k"], j, round(row[time].timestamp() * 1e6), int(row[value]))


times = st.integers(1_000_000, 1_000_040)
row = st.builds(
    Row,
    st.sampled_from(["a", "b", "c", None]),
    st.just(7),
    st.one_of(times, times, times, st.none()),
    st.integers(0, 2),
)
batches = st.lists(
    st.builds(
        Batch,
        st.integers(1_000_000, 1_000_050),
        st.lists(st.tuples(st.sampled_from([LEFT, RIGHT]), row), max_size=9),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def at(micros: int, key: str = "a", value: int = 0) -> Row:
    return Row(key, 7, 1_000_000 + micros, value)


SEEN = Batch(1_000_030, [(LEFT, at(1, "c"))], restarts=True)
DUE_AT_ONCE = Batch(1_000_030, [(LEFT, at(20)), *((LEFT, at(35, "b", n)) for n in range(5)), (RIGHT, at(21))], False)
KEPT_LONG = [Batch(1_000_000, [(LEFT, at(10))], True), Batch(1_000_029, [], True)]
TWICE = [Batch(1_000_000, [(LEFT, at(10))], True), Batch(1_000_000, [(LEFT, at(10))], True)]


@example([SEEN, DUE_AT_ONCE], OUTER_LEFT, (0, 5), (20, 20), (False, False), "all")
@example([SEEN, DUE_AT_ONCE], ASOF, (0, 5), (20, 20), (False, False), "all")
@example([*KEPT_LONG, Batch(1_000_029, [(RIGHT, at(12))], False)], INNER, (0, 5), (0, 20), (False, False), "all")
@example(TWICE, OUTER_LEFT, (0, 5), (20, 20), (False, False), "all")
@example(TWICE, OUTER_LEFT, (0, 5), (20, 20), (True, False), "all")
@given(
    batches,
    st.sampled_from(HOW),
    st.tuples(st.integers(-6, 3), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    st.tuples(st.sampled_from([0, 3, 20]), st.sampled_from([0, 5, 20])),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(["all", "all", "final", "changes", "early", "early changes"]),
)
def test_the_table_is_the_join_of_all_rows_that_were_not_dropped(
    some: list[Batch],
    how: str,
    within: tuple[int, int],
    bounds: tuple[int, int],
    unique: tuple[bool, bool],
    emit: str,
) -> None:
    early, emit = "early" in emit and how != INNER, emit.replace("early", "").strip() or "all"
    rig = Rig(plan(how, within, bounds, unique=unique, two_keys=True, early=early, emit=emit))
    for batch in some:
        rig.batch(batch)
        rig.check()
    rig.batch(Batch(2_000_000, [], restarts=True))
    rig.check()
    rig.batch(Batch(10**12, [], restarts=True))
    assert not rig.values.values, "nothing is kept that nothing can match any more"


def test_a_condition_decides_about_pairs() -> None:
    """A row whose pairs all fail it has no partner. A null is not true."""
    rows = [
        (LEFT, Row("a", 7, 1_000_000, 1)),
        (LEFT, Row("b", 7, 1_000_000, 2)),
        (RIGHT, Row("a", 7, 1_000_001, 1)),
        (RIGHT, Row("b", 7, 1_000_001, 1)),
    ]
    conditions: list[Any] = [
        lambda pairs: pc.less_equal(pairs.column("v"), pairs.column("w")),
        lambda pairs: [a <= b for a, b in zip(*(pairs.column(n).to_pylist() for n in ("v", "w")), strict=True)],
        pc.field("v") <= pc.field("w"),
    ]
    for condition in conditions:
        definition = plan(FULL, bounds=(1000, 1000), condition=condition, two_keys=True)
        rig = Rig(definition, lambda left, right: left.value <= right.value)
        rig.batch(Batch(1_000_100, rows, restarts=True))
        assert rig.shown() == {
            (rows[0][1], rows[2][1]): 1, (rows[1][1], None): 1, (None, rows[3][1]): 1,
        }  # fmt: skip
    with pytest.raises(ConfigError, match=r"returned 3 values of type int64 for [12] pairs"):
        Rig(plan(bounds=(1000, 1000), condition=lambda pairs: [1, 2, 3], two_keys=True)).batch(
            Batch(1_000_100, rows, restarts=False)
        )


def test_early_rows_need_no_watermark() -> None:
    joined = Joined(plan(OUTER_LEFT, early=True, two_keys=True), POLICY, MemoryMap())
    ((_, one),) = tables([(LEFT, at(1))])
    found = [*joined.advance(None), *joined.arrive((LEFT, one)), *joined.end_batch()]
    assert [row["kind"] for batch in found for row in batch.to_pylist()] == ["early"]


def test_what_early_does_not_go_with_is_refused() -> None:
    with pytest.raises(ConfigError, match="early: with how='inner' no row without a partner comes out"):
        plan(INNER, early=True, two_keys=True)
    with pytest.raises(ConfigError, match="early: with emit='final' nothing comes out"):
        plan(FULL, early=True, emit="final", two_keys=True)


def test_a_key_with_very_many_rows_is_read_in_parts() -> None:
    """So much of it is in memory at once as the new rows and one chunk need."""
    count = threshold(30_000, 60)
    definition = plan(OUTER_LEFT, (0, 5), (10**6, 10**6), two_keys=True)
    values = Watched()
    joined = Joined(definition, POLICY, values)
    each = {"k": ["hot"] * count, "j": [7] * count, "v": [*range(count)]}
    many = pa.table({**each, "lt": pa.array([1_000_000] * count, LEFTS.field("lt").type)}).select(LEFTS.names)
    assert not [*joined.arrive((LEFT, many.cast(LEFTS)))] and not [*joined.end_batch()]
    values.largest = 0
    one = pa.table([["hot"], [7], pa.array([1_000_003], RIGHTS.field("rt").type), [1.0]], schema=RIGHTS)
    found = [*joined.arrive((RIGHT, one)), *joined.end_batch()]
    assert sum(batch.num_rows for batch in found) == count
    assert 0 < values.largest < sum(map(len, values.values.values())) / 5


class Watched(MemoryMap):
    """Knows how many bytes were asked for at once."""

    largest = 0

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found = super().get(keys)
        self.largest = max(self.largest, sum(len(value) for value in found if value is not None))
        return found


@pytest.mark.slow
@pytest.mark.skipif(TINY, reason="it takes many rows to learn from")
def test_bounds_are_learnt_for_each_side() -> None:
    """Left rows are never late, and right ones are up to 570 seconds."""
    policy = load_policy("standard", {"lateness.initial_bound": "1 hour"})
    definition = plan(INNER, (0, 1_000_000), two_keys=True)
    definition = replace(
        definition, left=definition.left._replace(bound_us=None), right=definition.right._replace(bound_us=None)
    )
    joined = Joined(definition, policy, MemoryMap())
    second, now = 1_000_000, 0
    for batch in range(400):
        now = batch * 60 * second
        list(joined.advance(now))
        rows = [(LEFT, Row("a", 7, now + n, n)) for n in range(1, 40)]
        rows += [(RIGHT, Row("a", 7, now - (n % 20) * 30 * second, n)) for n in range(1, 40)]
        for side in (LEFT, RIGHT):
            both = pa.concat_tables([table for of, table in tables(rows) if of == side])
            assert not [row for some in joined.arrive((side, both)) for row in some.to_pylist() if row["side"]]
        list(joined.end_batch())
    left, right = (bound.bound_for_new_window() for bound in joined.bounds)
    assert left == 3600 * second, "no row of this side was late, so nothing is known"
    assert 570 * second <= right < 3600 * second


def test_a_row_at_the_line_of_its_side_is_taken_and_one_before_it_is_dropped() -> None:
    rig = Rig(plan(FULL, bounds=(4, 6), two_keys=True))
    rig.batch(Batch(1_000_010, [], False))
    rig.batch(Batch(1_000_010, [(LEFT, at(6)), (LEFT, at(5)), (RIGHT, at(4)), (RIGHT, at(3))], False))
    assert rig.dropped == {"left": 1, "right": 1}
    rig.check()


@pytest.mark.parametrize(("late", "newest"), [(4, 4), (2, 3)])
def test_a_late_partner_is_shown_in_place_of_an_older_one_only(late: int, newest: int) -> None:
    rig = Rig(plan(ASOF, within=(-5, 0), bounds=(20, 20), two_keys=True))
    rig.batch(Batch(1_000_010, [(LEFT, at(5)), (RIGHT, at(3))], restarts=True))
    rig.batch(Batch(1_000_010, [(RIGHT, at(late))], restarts=True))
    assert rig.shown() == {(at(5), at(newest)): 1}


class Growing:
    """A bound that gets longer with each watermark."""

    def __init__(self) -> None:
        self.bound_us = 0
        self.lateness = Lateness()

    def bound_for_new_window(self) -> int:
        return self.bound_us

    def reason_for_new_window(self) -> int:
        return 0

    def observe(self, end_us: int, at_us: int, events: int) -> None: ...

    def observe_on_time(self, end_us: int, events: int) -> None: ...

    def observe_all_on_time(self, ends_us: Any, events: Any) -> None: ...

    def observe_state(self, slice_us: int, at_us: int, size_bytes: int) -> None: ...

    def advance(self, from_us: int | None, to_us: int) -> None:
        self.bound_us += 10

    def to_json(self) -> dict[str, Any]:
        return {}


def test_what_was_too_late_stays_too_late_if_the_bound_gets_longer() -> None:
    join = Join(
        plan(two_keys=True), MemoryMap(), (Growing(), Growing()), b"\0" * 16, lambda rows: pa.nulls(len(rows), "string")
    )
    list(join.advance(1_000_010))
    list(join.advance(1_000_011))  # its line would be 9 µs before the one so far
    ((_, row),) = tables([(LEFT, at(-1))])
    found = [*join.arrive(LEFT, row), *join.end_batch()]
    assert [row["kind"] for batch in found for row in batch.to_pylist()] == ["dropped"]
