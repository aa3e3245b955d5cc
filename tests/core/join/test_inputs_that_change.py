"""A join of results of other operators, whose later rows replace earlier ones, by an oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.join.plan import ASOF, HOW, INNER, LEFT, RIGHT, JoinPlan, Side
from aion.errors import ConfigError
from tests.core.join.test_join import LEFTS, RIGHTS, Rig, Row, at, times

RETRACTED, DROPPED = "retracted", "dropped"


class Came(NamedTuple):
    """A row that came. ``number``: of this version."""

    row: Row
    kind: str
    number: int


def plan(
    how: str, within: tuple[int, int], bounds: tuple[int, int], before: tuple[str | None, str | None], **other: Any
) -> JoinPlan:
    delays = other.pop("delays", (0, 0))
    ids = [() if said else ("v", "w")[side] for side, said in enumerate(before)]
    left, right = (
        Side(schema, time, tuple(ids[side]), False, bounds[side], before[side], delays[side])
        for side, (schema, time) in enumerate([(LEFTS, "lt"), (RIGHTS, "rt")])
    )
    return JoinPlan(left, right, ("k", "j"), *within, how, **other)


class ChangingRig(Rig):
    """Results come before the watermark moves, and the last version of a row counts."""

    def __init__(self, definition: JoinPlan, condition: Callable[[Row, Row], bool] | None = None) -> None:
        super().__init__(definition, condition)
        self.versions: tuple[dict[Any, tuple[int, Row | None]], dict[Any, tuple[int, Row | None]]] = {}, {}
        self.told: list[str] = []

    def came(self, to_us: int, rows: list[tuple[int, Came]], *, restarts: bool) -> list[dict[str, Any]]:
        for side, (row, kind, number) in rows:
            if not self.plan.sides[side].is_result:
                if row.t is not None and row.t >= self.lines[side]:
                    self.kept[side].append(row)
            elif kind != DROPPED and row.t is not None and row.t >= self.lines[side]:
                known = self.versions[side].get((row.k, row.t))
                if known is None or known[0] < number:
                    self.versions[side][row.k, row.t] = number, None if kind == RETRACTED else row
        for side, said in enumerate(self.plan.sides):
            if said.is_result:
                self.kept[side][:] = [row for _, row in self.versions[side].values() if row is not None]
            assert said.bound_us is not None
            self.lines[side] = max(self.lines[side], to_us - said.bound_us)
        self.at_us = max(to_us, self.at_us or to_us)
        results = []
        for side, table in self.tables(rows):
            results += self.joined.arrive((side, table))
        results += self.joined.advance(to_us)
        results += self.joined.end_batch()
        found = self.taken(results, restarts=restarts)
        self.told += [row["event"] for row in found if row["reason"] == "the windows before dropped it"]
        return found

    def tables(self, rows: list[tuple[int, Came]]) -> list[tuple[int, pa.Table]]:
        found = []
        for side, (row, kind, number) in rows:
            said = self.plan.sides[side]
            values = [row.k, row.j, row.t, row.value]
            if said.is_result:
                values += [kind, f"it was {number}" if kind == DROPPED else None, None if kind == DROPPED else number]
            columns = [pa.array([value], field.type) for value, field in zip(values, said.arriving, strict=True)]
            found.append((side, pa.table(columns, schema=said.arriving)))
        return found

    def limits(self) -> tuple[int, int]:
        left, right = super().limits()
        return left - self.plan.right.delay_us, right - self.plan.left.delay_us


keys = st.sampled_from(["a", "a", "b", None])
came = st.builds(
    Came,
    st.builds(
        Row, st.sampled_from(["a", "a", "b", None]), st.just(7), st.one_of(times, times, st.none()), st.integers(0, 3)
    ),
    st.sampled_from(["on_time", "late", RETRACTED, DROPPED]),
    st.integers(0, 99),
)
batches = st.lists(
    st.tuples(
        st.integers(1_000_000, 1_000_050),
        st.lists(
            st.tuples(st.sampled_from([LEFT, RIGHT]), came),
            max_size=9,
            unique_by=lambda pair: (pair[0], pair[1].number),
        ),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@given(
    batches,
    st.sampled_from(HOW),
    st.tuples(st.integers(-6, 3), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    st.tuples(st.sampled_from([0, 5, 40]), st.sampled_from([0, 5, 40])),
    st.sampled_from([("all", None), (None, "all"), ("all", "all"), ("changes", "all")]),
    st.tuples(st.sampled_from([0, 7]), st.sampled_from([0, 7])),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["all", "all", "changes"]),
)
def test_the_table_is_the_join_of_the_newest_versions(
    some: list[tuple[int, list[tuple[int, Came]], bool]],
    how: str,
    within: tuple[int, int],
    bounds: tuple[int, int],
    before: tuple[str | None, str | None],
    delays: tuple[int, int],
    on: bool,
    early: bool,
    emit: str,
) -> None:
    """Versions come in any order within a batch. Later batches have larger numbers."""
    on = on and how != ASOF
    condition = pc.field("v") <= pc.field("w") if on else None
    longest = bounds[LEFT] + delays[LEFT], bounds[RIGHT] + delays[RIGHT]  # a result may come so long after its time
    definition = plan(
        how, within, longest, before, delays=delays, condition=condition, early=early and how != INNER, emit=emit
    )
    rig = ChangingRig(definition, (lambda left, right: left.value <= right.value) if on else None)
    for n, (to_us, rows, restarts) in enumerate(some):
        numbered = [(side, came._replace(number=came.number + 100 * n)) for side, came in rows]
        rig.came(to_us, numbered, restarts=restarts)
        rig.check()
    rig.came(2_000_000, [], restarts=True)
    rig.check()
    rig.came(10**12, [], restarts=True)
    assert not rig.values.values, "nothing is kept that nothing can match any more"


def test_what_the_operator_before_has_dropped_comes_out_as_dropped() -> None:
    rig = ChangingRig(plan("inner", (0, 5), (10, 10), ("all", None)))
    rig.came(1_000_000, [(LEFT, Came(Row("a", 7, None, 1), DROPPED, 5))], restarts=False)
    assert rig.told == ["it was 5"] and rig.dropped == {"left": 1}


@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_a_pair_is_late_if_a_result_says_that_it_is(side: int) -> None:
    """Results come after the watermark has passed their time."""
    rig = ChangingRig(plan("inner", (-5, 5), (100, 100), ("all", "all")))
    rig.came(1_000_030, [], restarts=False)
    rows = [(LEFT, Came(at(1), "on_time", 1)), (RIGHT, Came(at(1), "on_time", 1))]
    assert [row["kind"] for row in rig.came(1_000_030, rows, restarts=True)] == ["on_time"]
    found = rig.came(1_000_030, [(side, Came(at(1, value=3), "late", 2))], restarts=True)
    assert sorted(row["kind"] for row in found) == ["late", "retracted"]
    ((left, right),) = rig.shown()
    assert (left, right)[side] == at(1, value=3)


def test_a_row_that_is_gone_does_not_return_with_an_older_version() -> None:
    """Versions of one batch may come in parts, and the newest first."""
    rig = ChangingRig(plan("left", (0, 5), (100, 100), ("all", None)))
    for number, kind in ((1, "on_time"), (3, RETRACTED), (2, "late")):
        rig.came(1_000_030, [(LEFT, Came(at(1), kind, number))], restarts=True)
        rig.check()
    assert not rig.shown()


def test_results_that_may_be_replaced_are_never_final() -> None:
    with pytest.raises(ConfigError, match="emit='final': later results of the operator before replace earlier ones"):
        plan("left", (0, 5), (0, 0), (None, "all"), emit="final")
    assert not plan("left", (0, 5), (0, 0), (None, "final"), emit="final").takes_back
    assert plan("inner", (0, 5), (0, 0), ("all", None)).takes_back


def test_a_definition_says_that_its_rows_are_results() -> None:
    words = plan("inner", (0, 5), (0, 0), ("all", None)).definition["words"]
    assert words["left side: rows"] == [("results with emit='all'", "")] and "right side: rows" not in words
