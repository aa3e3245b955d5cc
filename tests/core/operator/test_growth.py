"""A year of five-minute windows: neither what a version takes nor what an operator holds grows with the time."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.config import load_policy
from aion.core.compaction import BlockFact, Compact, CompactionDone
from aion.core.keyed.orders import RowArrivals
from aion.core.keyed.table import Table
from aion.core.lateness.bound import AdaptiveBound
from aion.core.lateness.observe import HALF_LIFE_US
from aion.core.life.actions import Arrived, BatchEnded, WatermarkAdvanced
from aion.core.operator.operator import Operator
from aion.core.packing import untable
from aion.core.query.plan import Plan, make_plan
from aion.execute.assembly import make_bound, make_operator
from state_backends.versions.manifest import Identity, Manifest, dump

MINUTE = 60_000_000
WIDTH = 5 * MINUTE
HOUR, DAY = 60 * MINUTE, 1440 * MINUTE
STEP = 12 * HOUR
BEGIN = 1_700_006_400_000_000 // DAY * DAY
FEW_PERCENT = 1.05


class Sizes(NamedTuple):
    manifest: int
    retained: int


def written(operator: Operator, plan: Plan) -> int:
    """Bytes of the manifest of a version that has no files."""
    identity = Identity("query", "operator", 0, 1, plan.definition)
    return len(dump(Manifest("token", None, 1, identity, (), (), 0, operator.snapshot())))


def retained(root: object) -> int:
    """Bytes of all objects that an operator refers to, but for code."""
    seen: set[int] = set()
    waiting, size = [root], 0
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, type | ModuleType | FunctionType | BuiltinFunctionType):
            continue
        seen.add(id(found))
        size += sys.getsizeof(found)
        waiting += gc.get_referents(found)
    return size


class Year:
    """An operator, and what comes: a step is twelve hours of events, a watermark behind them, and late ones.

    ``one_in``: of so many windows one has events. ``late``: windows that get late events in a step. ``stormy``: every
    other month these are ten times as late.
    """

    def __init__(
        self,
        windows: Any,
        *,
        bound: str,
        learns: bool,
        one_in: int,
        late: int,
        stormy: bool = False,
        half_life_us: int = 12 * HOUR,
    ) -> None:
        schema = pa.schema([("ts", pa.timestamp("us")), ("k", pa.string())])
        how: dict[str, Any] = {"aggregates": {"n": A.count()}, "apply": None, "outputs": None}
        self.plan = make_plan(schema, windows=windows, time="ts", key="k", **how)
        # What is learnt reaches back for four to eight half-lives: all of it is there within the first week.
        lateness = {"initial_bound": bound, "max_bound": bound, "coverage": 0.99 if learns else None}
        policy = load_policy({"lateness": lateness, "trigger": {"kind": "every_batch"}})
        learns_from = AdaptiveBound(
            make_bound(self.plan, policy, None).asked,
            half_life_us=half_life_us,
            ahead_us=max(window.reach_us for window in self.plan.windows.values()),
        )
        self.operator = make_operator(self.plan, policy, None, learns_from)
        self.draw = random.Random(7)
        self.one_in, self.late, self.stormy = one_in, late, stormy
        self.end = BEGIN

    def steps(self, until: int, every: int = STEP) -> Iterator[Sizes]:
        """How large both are after each day."""
        while self.end < until:
            self.step()
            if (self.end - BEGIN) % every == 0:
                yield Sizes(written(self.operator, self.plan), retained(self.operator))

    def step(self) -> None:
        self.tell(WatermarkAdvanced(self.end - MINUTE))
        begin, self.end = self.end, self.end + STEP
        width = min(window.reach_us for window in self.plan.grid.aligned.values()) if self.plan.grid.aligned else WIDTH
        starts = [s for s in range(begin, self.end, width) if s // width % self.one_in == 0]
        calm = not self.stormy or (self.end - BEGIN) // (30 * DAY) % 2 == 0
        for _ in range(self.late):
            back = int(self.draw.expovariate(1 / (20 if calm else 200)) * MINUTE)
            starts.append(max((begin - back) // WIDTH // self.one_in * self.one_in * WIDTH, BEGIN))
        facts = [BlockFact(start, self.draw.randrange(90, 110), self.draw.randrange(900, 1100)) for start in starts]
        self.tell(Arrived(facts, [self.rows(facts)]))
        self.tell(BatchEnded())

    def rows(self, facts: list[BlockFact]) -> RowArrivals | None:
        if not self.plan.keyed:
            return None
        times, events = (np.array([fact[i] for fact in facts], np.int64) for i in (0, 1))
        nothing = np.zeros(len(facts), np.int64)
        columns = {"first": times, "last": times, "events": events, "row": nothing, "mark": nothing}
        keys = pa.array([self.draw.choice("abcd") for _ in facts], pa.string())
        return RowArrivals(Table([keys], columns), np.arange(len(facts)))

    def tell(self, event: Any) -> None:
        for action in self.operator.handle(event):
            if isinstance(action, Compact):
                self.operator.number(1)
                self.tell(CompactionDone(action, action.size_bytes // 2))


TUMBLING, SLIDING = aion.Tumbling("5 min"), aion.Sliding("15 min", "5 min")
CASES: dict[str, dict[str, Any]] = {
    "dense, none late, fixed": {"windows": TUMBLING, "bound": "12 h", "learns": False, "one_in": 1, "late": 0},
    "dense, late, learnt": {"windows": TUMBLING, "bound": "12 h", "learns": True, "one_in": 1, "late": 6},
    "sparse, none late, learnt": {"windows": SLIDING, "bound": "1 day", "learns": True, "one_in": 7, "late": 0},
    "sparse, late, fixed": {"windows": TUMBLING, "bound": "1 day", "learns": False, "one_in": 7, "late": 6},
    "sessions": {"windows": aion.Session("5 min"), "bound": "12 h", "learns": False, "one_in": 28, "late": 2},
}


QUICK = {"dense, late, learnt", "sessions"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(of, id=name, marks=[pytest.mark.proof] * (name not in QUICK)) for name, of in CASES.items()]
)
def test_a_year_leaves_no_more_than_its_first_week(case: dict[str, Any]) -> None:
    year = Year(**case)
    week = most(year.steps(BEGIN + 7 * DAY))
    list(year.steps(BEGIN + 358 * DAY, every=365 * DAY))
    last = most(year.steps(BEGIN + 365 * DAY))
    assert sum(year.operator.counters.executions.values()) > 365 * DAY // WIDTH // case["one_in"] * 0.9
    assert last.manifest <= FEW_PERCENT * week.manifest
    assert last.retained <= FEW_PERCENT * week.retained


@pytest.mark.proof
def test_bounds_that_get_longer_and_shorter_leave_nothing() -> None:
    """After each change what is late is windows that were purged, and some that are remembered for it: for a while."""
    year = Year(TUMBLING, bound="2 days", learns=True, one_in=7, late=18, stormy=True)
    two_months = most(year.steps(BEGIN + 60 * DAY))
    list(year.steps(BEGIN + 150 * DAY, every=365 * DAY))
    last = most(year.steps(BEGIN + 180 * DAY))
    assert year.operator.lateness.counts and year.operator.counters.dropped
    assert last.manifest <= FEW_PERCENT * two_months.manifest
    assert last.retained <= FEW_PERCENT * two_months.retained


@pytest.mark.proof
def test_with_the_default_half_life_all_that_is_learnt_is_there_after_nine_weeks() -> None:
    """Until then it fills: of few late events each is remembered one by one."""
    year = Year(TUMBLING, bound="12 h", learns=True, one_in=1, late=6, half_life_us=HALF_LIFE_US)

    def learnt() -> Sizes:
        return Sizes(len(orjson.dumps(year.operator.lateness.to_json())), retained(year.operator.lateness))

    list(year.steps(BEGIN + 63 * DAY, every=365 * DAY))
    full = learnt()
    list(year.steps(BEGIN + 365 * DAY, every=365 * DAY))
    last = learnt()
    assert last.manifest <= FEW_PERCENT * full.manifest
    assert last.retained <= FEW_PERCENT * full.retained


def most(sizes: Iterator[Sizes]) -> Sizes:
    return Sizes(*map(max, zip(*sizes, strict=True)))


def test_a_week_of_minutes_takes_little_of_a_version() -> None:
    """As plain JSON, as it was before, they are more than ten times as much."""
    year = Year(aion.Tumbling("1 min"), bound="7 days", learns=False, one_in=1, late=0)
    list(year.steps(BEGIN + 8 * DAY, every=365 * DAY))
    snapshot = year.operator.snapshot()
    assert len(year.operator.windows) > 7 * DAY // MINUTE
    plain = [untable(snapshot[name]) for name in ("windows", "slices", "runs")]
    packed = [snapshot[name] for name in ("windows", "slices", "runs")]
    assert len(orjson.dumps(packed)) * 10 < len(orjson.dumps(plain))
    assert written(year.operator, year.plan) < 100_000
