"""A join goes on with other columns, by an oracle: what each row has of the columns that there are now."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aion.core.join import evolution
from aion.core.join.evolution import JoinChange, change_of, settled_join
from aion.core.join.plan import FULL, HOW, INNER, LEFT, OUTER_LEFT, RIGHT, JoinPlan, Side, identity_of
from aion.core.join.stored import evolved_join, past_of, stored_join
from aion.errors import ForeignState
from aion.execute.joining import Joined
from state_backends.format.ordered_map import MemoryMap
from state_backends.versions.manifest import changes
from tests.core.join.test_join import LEFTS, POLICY, RIGHTS, Batch, Rig, Row, at, batches, tables

WIDER: dict[Any, Any] = {pa.int32(): pa.int64(), pa.float32(): pa.float64()}
Columns = dict[str, pa.DataType]


class Asked(NamedTuple):
    """The columns of a start. ``sides``: those of each side besides what it always has. ``key``: the type of one."""

    sides: tuple[Columns, Columns] = ({}, {})
    key: pa.DataType = pa.int64()

    def after(self, was: Asked) -> Asked:
        """Returns the same, but no column gets a narrower type than it had."""

        def wide(old: Any, new: pa.DataType) -> pa.DataType:
            return old if old is not None and WIDER.get(new) == old else new

        left, right = (
            {name: wide(old.get(name), type_) for name, type_ in new.items()}
            for old, new in zip(was.sides, self.sides, strict=True)
        )
        return Asked((left, right), wide(was.key, self.key))

    def schema(self, side: int) -> pa.Schema:
        always = [field.with_type(self.key) if field.name == "j" else field for field in (LEFTS, RIGHTS)[side]]
        return pa.schema([*always, *((f"{name}{side}", type_) for name, type_ in self.sides[side].items())])


class EvolvingRig(Rig):
    """A join that is started again with other columns, and the versions that it has made."""

    def __init__(self, asked: Asked, named: tuple[bool, bool], definition: JoinPlan) -> None:
        self.asked, self.named, self.original = asked, named, definition
        super().__init__(self.asking(asked))
        self.stored = stored(self.plan)
        self.values_of: dict[tuple[int, Row], dict[str, Any]] = {}
        self.versions: list[dict[str, Any]] = []
        self.keep_version()

    def asking(self, asked: Asked) -> JoinPlan:
        left, right = (
            side._replace(
                schema=asked.schema(n),
                identity=side.identity if self.named[n] or side.unique else identity_of(asked.schema(n), None),
            )
            for n, side in enumerate(self.original.sides)
        )
        return replace(self.original, left=left, right=right)

    def start(self, asked: Asked) -> JoinChange | None:
        """Starts it again, from the last version."""
        version, number = self.versions[-1], len(self.versions)
        self.asked = asked.after(version["asked"])
        asking = self.asking(self.asked)
        found = settled_join(self.stored, number)
        changed = change_of(found, asking, number)
        self.plan = evolved_join(asking, past_of(found) if changed is None else changed.past)
        self.stored = stored(self.plan)
        assert changes(version["definition"], self.plan.definition) == [], "each version that is kept can be opened"
        for name, value in copy.deepcopy(version["oracle"]).items():
            setattr(self, name, value)
        self.values = copy.deepcopy(version["values"])
        self.joined = Joined(self.plan, POLICY, self.values, version["snapshot"])
        for n, (was, now) in enumerate(zip(version["asked"].sides, self.asked.sides, strict=True)):
            for (side, _), row in self.values_of.items():
                if side == n:
                    evolve(row, n, was, now)
            for row in self.table.values():
                evolve(row, n, was, now)
        return changed

    def keep_version(self) -> None:
        oracle = {name: getattr(self, name) for name in ("table", "kept", "lines", "at_us", "values_of", "dropped")}
        self.versions.append(
            {
                "definition": self.stored,
                "asked": self.asked,
                "snapshot": json.loads(json.dumps(self.joined.save().snapshot)),
                "values": copy.deepcopy(self.values),
                "oracle": copy.deepcopy(oracle),
            }
        )

    def batch(self, batch: Batch) -> list[dict[str, Any]]:
        before = copy.deepcopy(self.kept)
        self._expect(batch)
        found = [*self.joined.advance(batch.to_us)]
        for (side, row), (_, table) in zip(batch.rows, tables(batch.rows), strict=True):
            columns = {f"{name}{side}": value_of(row, name) for name in self.asked.sides[side]}
            if not self.plan.sides[side].unique or row not in before[side]:
                self.values_of.setdefault((side, row), columns)
            schema = self.plan.sides[side].schema
            arrays = [
                pa.array([columns[field.name]], field.type)
                if field.name in columns
                else table.column(field.name).cast(field.type)
                for field in schema
            ]
            found += self.joined.arrive((side, pa.table(arrays, schema=schema)))
        found += self.joined.end_batch()
        results = self.taken(found, restarts=False)
        old = self.plan.emit == "changes"
        for row in results:
            if row["kind"] != "dropped":
                self.check_values(row, "old_" if old and row["kind"] == "retracted" else "")
        for row in self.table.values():
            self.check_values(row, "")
        return results

    def check_values(self, shown: dict[str, Any], prefix: str) -> None:
        for side, (time, value) in enumerate((("lt", "v"), ("rt", "w"))):
            if shown[prefix + time] is None:
                expected = dict.fromkeys(self.asked.sides[side])
                found = {name: shown[f"{prefix}{name}{side}"] for name in expected}
            else:
                row = Row(
                    shown["k"], shown["j"], round(shown[prefix + time].timestamp() * 1e6), int(shown[prefix + value])
                )
                expected = self.values_of[side, row]
                found = {name: shown[prefix + name] for name in expected}
            assert found == expected


def stored(plan: JoinPlan) -> dict[str, Any]:
    return dict(json.loads(json.dumps(plan.definition)))


def value_of(row: Row, name: str) -> Any:
    number = row.value * 100 + (row.t or 0) % 100
    return str(number) if name == "b" else number


def evolve(row: dict[str, Any], side: int, was: Columns, now: Columns) -> None:
    """A column that goes is gone for good: if it comes again, it is null."""
    for name in was:
        if name not in now:
            row.pop(f"{name}{side}", None)
    for name in now:
        if name not in was:
            row[f"{name}{side}"] = None


columns = st.fixed_dictionaries(
    {},
    optional={
        "a": st.sampled_from([pa.int32(), pa.int64()]),
        "b": st.just(pa.string()),
        "f": st.sampled_from([pa.float32(), pa.float64()]),
    },
).flatmap(lambda found: st.permutations(sorted(found)).map(lambda names: {name: found[name] for name in names}))
asked = st.builds(Asked, st.tuples(columns, columns), st.sampled_from([pa.int32(), pa.int64()]))
step = st.tuples(
    st.sampled_from(["goes on", "goes on", "restarts", "changes", "changes", "fails", "goes back"]),
    asked,
    st.integers(1, 3),
)
A32, A64, NONE = Asked(({"a": pa.int32()}, {})), Asked(({"a": pa.int64()}, {})), Asked()
ROW, PARTNER = Batch(1_000_000, [(LEFT, at(10))], False), Batch(1_000_000, [(RIGHT, at(12))], False)
IDLE = Batch(1_000_000, [], False)
COMES_AGAIN = [(ROW, ("changes", NONE, 1)), (IDLE, ("changes", A64, 1)), (PARTNER, ("goes on", NONE, 1))]
GOES_BACK = [(ROW, ("changes", NONE, 1)), (ROW, ("goes back", A32, 1)), (PARTNER, ("goes on", NONE, 1))]
FAILS = [(ROW, ("fails", NONE, 1)), (ROW, ("changes", A64, 1)), (PARTNER, ("goes on", NONE, 1))]


@example(COMES_AGAIN, A32, INNER, (0, 5), (20, 20), (False, False), (False, False), "all")
@example(GOES_BACK, A32, INNER, (0, 5), (20, 20), (False, False), (False, False), "all")
@example(FAILS, A32, OUTER_LEFT, (0, 5), (20, 20), (False, False), (True, True), "early changes")
@given(
    st.lists(st.tuples(batches.map(lambda some: some[0]), step), min_size=1, max_size=8),
    asked,
    st.sampled_from(HOW),
    st.tuples(st.integers(-6, 3), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    st.tuples(st.sampled_from([0, 3, 20]), st.sampled_from([0, 5, 20])),
    st.tuples(st.booleans(), st.booleans()),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(["all", "all", "final", "changes", "early", "early changes"]),
)
def test_each_row_has_the_columns_that_it_has_had_ever_since(
    some: list[tuple[Batch, tuple[str, Asked, int]]],
    first: Asked,
    how: str,
    within: tuple[int, int],
    bounds: tuple[int, int],
    unique: tuple[bool, bool],
    named: tuple[bool, bool],
    emit: str,
) -> None:
    """Restarts, first batches that fail, and checkpoints that go back lie between changes."""
    early, emit = "early" in emit and how != INNER, emit.replace("early", "").strip() or "all"
    sides = [
        Side(schema, time, ids, unique[n], bounds[n])
        for n, (schema, time, ids) in enumerate([(LEFTS, "lt", ("v",)), (RIGHTS, "rt", ("w",))])
    ]
    definition = JoinPlan(sides[LEFT], sides[RIGHT], ("k", "j"), *within, how, early=early, emit=emit)
    rig = EvolvingRig(first, named, definition)
    for number, (batch, (what, then, back)) in enumerate(some):
        # Rows that count once may be equal. Others have a number each, so that the oracle knows which is which.
        rows = [
            (side, row if unique[side] else row._replace(value=100 * number + at))
            for at, (side, row) in enumerate(batch.rows)
        ]
        rig.batch(Batch(batch.to_us, rows, False))
        rig.check()
        rig.keep_version()
        match what:
            case "restarts":
                assert rig.start(rig.asked) is None
            case "changes":
                rig.start(then)
            case "fails":
                rig.start(then)
                rows = [(side, row if unique[side] else row._replace(value=row.value + 50)) for side, row in rows]
                rig.batch(Batch(batch.to_us + 3, rows, False))
                rig.start(rig.versions[-1]["asked"])
            case "goes back":
                del rig.versions[max(len(rig.versions) - back, 1) :]
                rig.start(then)
    rig.batch(Batch(2_000_000, [], False))
    rig.check()
    rig.batch(Batch(10**12, [], False))
    assert not rig.values.values, "nothing is kept that nothing can match any more"


def join_of(left: pa.Schema, right: pa.Schema = RIGHTS, how: str = OUTER_LEFT, **other: Any) -> JoinPlan:
    ids = other.pop("ids", (None, None))
    unique = other.pop("unique", False)
    sides = [
        Side(schema, time, identity_of(schema, ids[n]), unique, 1000)
        for n, (schema, time) in enumerate([(left, "lt"), (right, "rt")])
    ]
    return JoinPlan(sides[LEFT], sides[RIGHT], ("k", "j"), 0, 5, how, **other)


MORE = LEFTS.append(pa.field("x", pa.int32()))


def with_type(schema: pa.Schema, name: str, type_: pa.DataType) -> pa.Schema:
    return pa.schema([field.with_type(type_) if field.name == name else field for field in schema])


@pytest.mark.parametrize(
    ("was", "now", "reason"),
    [
        (join_of(LEFTS), join_of(MORE, how=INNER), "only columns of its sides may come"),
        (join_of(LEFTS), join_of(MORE, early=True), "only columns of its sides may come"),
        (join_of(LEFTS), join_of(MORE, ids=(("v",), None)), "that identify a row of the left side stay"),
        (join_of(LEFTS, ids=(("v",), None)), join_of(MORE), "that identify a row of the left side stay"),
        (
            join_of(LEFTS, ids=(LEFTS.names, ["w"]), unique=True),
            join_of(MORE, ids=(MORE.names, ["w"]), unique=True),
            "that identify a row of the left side stay",
        ),
        (
            join_of(MORE),
            join_of(LEFTS.append(pa.field("X", pa.int32()))),
            "column x is called X now, and would be null in what is kept; call it x",
        ),
        (
            join_of(MORE),
            join_of(with_type(MORE, "x", pa.int16())),
            "column x of the left side was int32 and is int16, which does not hold all that is kept; cast it to int32",
        ),
        (join_of(MORE), join_of(with_type(MORE, "x", pa.string())), "was int32 and is string"),
        (
            join_of(MORE, on="x < w"),
            join_of(LEFTS, RIGHTS.append(pa.field("x", pa.int32())), on="x < w"),
            "column x was of the left side and is of the other one, and on= may need it",
        ),
    ],
)
def test_what_cannot_go_on_is_refused_with_the_reason(was: JoinPlan, now: JoinPlan, reason: str) -> None:
    with pytest.raises(ForeignState, match=reason):
        change_of(stored(was), now, 3)


def test_a_change_says_what_it_does() -> None:
    changed = change_of(stored(join_of(MORE)), join_of(with_type(LEFTS, "v", pa.int64()), RIGHTS.remove(3)), 3)
    assert changed is not None
    assert (changed.added, changed.removed, changed.wider) == ([[], []], [["x"], ["w"]], [[], []])
    changed = change_of(stored(join_of(MORE)), join_of(with_type(MORE, "x", pa.int64())), 3)
    assert changed is not None and changed.wider == [["x"], []]


def test_the_changes_of_a_definition_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evolution, "MOST_CHANGES", 3)
    plans = [join_of(MORE), join_of(LEFTS)]
    now = plans[1]
    for number in range(3):
        changed = change_of(stored(now), plans[number % 2], number)
        assert changed is not None
        now = evolved_join(plans[number % 2], changed.past)
    with pytest.raises(ForeignState, match="its columns have changed 3 times, which is the most"):
        change_of(stored(now), plans[1], 3)


def test_a_stored_definition_knows_the_columns_before() -> None:
    changed = change_of(stored(join_of(LEFTS)), join_of(MORE), 3)
    assert changed is not None
    now = evolved_join(join_of(MORE), changed.past)
    found = stored_join(stored(now))
    assert found.left.earlier == (LEFTS,) and found.right.earlier == ()
    assert settled_join(stored(now), 4) == stored(now)
    before = stored(join_of(LEFTS))
    assert json.loads(json.dumps(settled_join(stored(now), 3))) == before, "no batch has ended since"


def test_a_later_pane_with_one_more_column_replaces_the_earlier_one() -> None:
    def side(schema: pa.Schema) -> JoinPlan:
        sides = Side(schema, "lt", (), False, 1000, "all"), Side(RIGHTS, "rt", ("w",), False, 1000)
        return JoinPlan(*sides, ("k", "j"), 0, 5, FULL)

    def pane(plan: JoinPlan, values: list[Any], number: int) -> tuple[int, pa.Table]:
        came = [*values, "late", None, number]
        arrays = [pa.array([value], field.type) for value, field in zip(came, plan.left.arriving, strict=True)]
        return LEFT, pa.table(arrays, schema=plan.left.arriving)

    old, values = side(LEFTS), MemoryMap()
    first = Joined(old, POLICY, values)
    one = pa.table([["a"], [7], pa.array([12], RIGHTS.field("rt").type), [1.0]], schema=RIGHTS)
    for arrived in (pane(old, ["a", 7, 10, 5], 1), (RIGHT, one)):
        list(first.arrive(arrived))
    list(first.end_batch())
    changed = change_of(stored(old), side(MORE), 0)
    assert changed is not None
    now = evolved_join(side(MORE), changed.past)
    second = Joined(now, POLICY, values, first.save().snapshot)
    found = [*second.arrive(pane(now, ["a", 7, 10, 6, 9], 2)), *second.end_batch()]
    rows = [(row["kind"], row["v"], row["x"], row["w"]) for batch in found for row in batch.to_pylist()]
    assert rows == [("late", 6, 9, 1.0), ("retracted", 5, None, 1.0)]


def test_a_condition_sees_null_where_a_row_has_not_had_the_column() -> None:
    values = MemoryMap()
    first = Joined(join_of(LEFTS, how=INNER), POLICY, values)
    ((_, row),) = tables([(LEFT, at(10))])
    assert not [*first.arrive((LEFT, row)), *first.end_batch()]
    asking = join_of(MORE, how=INNER, condition=pc.field("x").is_null())
    changed = change_of(stored(join_of(LEFTS, how=INNER)), asking, 0)
    assert changed is not None
    second = Joined(evolved_join(asking, changed.past), POLICY, values, first.save().snapshot)
    ((_, partner),) = tables([(RIGHT, at(12))])
    found = [*second.arrive((RIGHT, partner)), *second.end_batch()]
    assert [(row["v"], row["x"]) for batch in found for row in batch.to_pylist()] == [(0, None)]
