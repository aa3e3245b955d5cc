"""A life of an operator that has some of everything in its snapshot; what an older Aion made of it is in a file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

import aion
from aion import aggregates as A
from aion.config import load_policy
from aion.core.compaction.blocks import Fold, Folded
from aion.core.operator.actions import Arrived, BatchEnded, BlockFact, Event, WatermarkAdvanced
from aion.core.operator.keyed.orders import Arrivals
from aion.core.operator.keyed.table import Table
from aion.core.operator.operator import Operator
from aion.core.plan import make_plan
from aion.execute.assembly import make_operator

SECOND = 1_000_000
PLAN = make_plan(
    pa.schema([("ts", pa.timestamp("us")), ("k", pa.string())]),
    windows={"ten": aion.Tumbling("10 seconds"), "slide": aion.Sliding("30 s", "10 s"), "visit": aion.Session("5 s")},
    time="ts",
    key="k",
    aggregates={"n": A.count()},
    apply=None,
    outputs=None,
)


def operator(snapshot: dict[str, Any] | None = None, bound: str = "20 s") -> Operator:
    policy = {"lateness": {"initial_bound": bound, "coverage": None}, "trigger": {"kind": "count", "count": 25}}
    return make_operator(PLAN, load_policy(policy), snapshot)


def live(of: Operator, steps: list[tuple[int, list[tuple[int, int]]]]) -> list[str]:
    """Watermarks in seconds with the seconds and events of the blocks that come then; all that is ordered, in words."""
    said: list[str] = []

    def tell(event: Event) -> None:
        for action in of.handle(event):
            said.append(str(action) if not hasattr(action, "windows") else type(action).__name__)
            if isinstance(action, Fold):
                of.number(1)
                tell(Folded(action, action.size_bytes // 2))

    for watermark, blocks in steps:
        tell(WatermarkAdvanced(watermark * SECOND))
        facts = [BlockFact(second // 10 * 10 * SECOND, events, 100 * events) for second, events in blocks]
        times = np.array([second * SECOND for second, _ in blocks], np.int64)
        rows = {
            "first": times,
            "last": times,
            "events": np.array([events for _, events in blocks], np.int64),
            "row": np.zeros(len(blocks), np.int64),
            "mark": np.zeros(len(blocks), np.int64),
        }
        keys = pa.array(["abc"[second % 3] for second, _ in blocks], pa.string())
        tell(Arrived(facts, Arrivals(Table([keys], rows), np.arange(len(blocks)))))
        tell(BatchEnded())
    return said


BEFORE = [
    (1, [(second, 20) for second in range(0, 50, 3)]),
    (22, [(5, 9), (17, 30), (18, 2), (55, 9)]),
    (43, [(15, 3), (36, 7), (31, 40), (77, 1), (2, 2)]),
    (51, [(38, 3), (49, 3), (48, 5), (44, 1)]),
]
AFTER = [
    (52, [(21, 1), (44, 8), (81, 8), (9, 8)]),
    (60, [(35, 30), (44, 8), (90, 8), (29, 1)]),
    (95, [(72, 3), (95, 8), (61, 1)]),
    (200, [(180, 3), (181, 8), (201, 1)]),
]
