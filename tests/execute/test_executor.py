"""The executor carries out the operator's actions in the order in which they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

import aion
from aion.core.compaction import Compact
from aion.core.life.actions import (
    Append,
    Destage,
    EmitUntimed,
    Execute,
    Execution,
    PaneKind,
    Prestage,
    Purge,
    WindowRef,
)
from aion.core.query.plan import make_plan
from aion.execute.executor import Executor
from aion.execute.panes.contents import RowContents
from state_backends.store.protocol import StoredBlock
from tests.durations import us
from tests.stores.rig import make_block


class Given:
    """An operator that orders what it is given, and numbers blocks from 10 on."""

    keyed = ()
    next_seq = 10

    def __init__(self, actions: Sequence[Any]) -> None:
        self._actions = actions

    def actions(self, event: Any) -> Iterator[Any]:
        yield from self._actions if type(event).__name__ == "Arrived" else ()

    def handle(self, event: Any) -> Sequence[Any]:
        return ()

    def number(self, blocks: int) -> int:
        return self.next_seq

    def number_panes(self) -> int:
        return 0


class Noted(RowContents):
    """An attempt and contents at once, which note what they are asked."""

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self.asked: list[str] = []

    compacts = True
    compaction_bytes = 100

    def append(self, blocks: Any) -> None:
        if numbers := [seq for seq, _, _ in blocks]:
            self.asked.append(f"append {numbers}")

    def read(self, slices: Sequence[int], **how: Any) -> Iterator[StoredBlock]:
        return iter(())

    def prestage(self, slices: Sequence[int]) -> None:
        self.asked.append(f"prestage {list(slices)}")

    def replace(self, spans: Any, below: int) -> None:
        self.asked.append(f"replace {spans}")

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        self.asked.append(f"release {list(destage)} {list(purge)}")

    def untimed(self, orders: Sequence[Any], blocks: Any) -> Iterator[pa.RecordBatch]:
        self.asked.append(f"dropped {[order.index for order in orders]}")
        return iter(())

    def panes(self, order: Execute, blocks: Any, keys: Any) -> Iterator[pa.RecordBatch]:
        self.asked.append(f"panes of {order.start_us.tolist()}")
        return iter(())

    def compacted(self, group: Any, blocks: Any, part: Any, owners: Any) -> list[Any]:
        self.asked.append(f"compact {list(group)}")
        return []


def execute(start: int) -> Execute:
    return Execute.of([Execution(WindowRef(0, start, start + 10), PaneKind.LATE, 1, -1, 0, 1, 1)], (start,))


def asked(*actions: Any) -> list[str]:
    plan = make_plan(
        pa.schema([("ts", pa.timestamp("us"))]),
        key=None, time="ts", windows=aion.Tumbling(us(10)), aggregates=None, apply=len, outputs="n long",
    )  # fmt: skip
    noted = Noted(plan)
    executor = Executor(plan, Given(actions), noted, noted)  # type: ignore[arg-type]
    assert list(executor.arrive([make_block(0, n) for n in range(4)])) == []
    return noted.asked


def test_actions_are_carried_out_in_their_order() -> None:
    drop = [EmitUntimed(n, "no time") for n in range(2)]
    append = [Append(n, 0, n + 5, False) for n in range(2, 4)]
    compact = [Compact(0, -1, 3, 9, False), Compact(10, -1, 4, 9, False)]
    compacted = ["compact [0, 10]", "replace {0: (-1, 3), 10: (-1, 4)}"]
    assert asked(*drop, *append, Prestage((0,)), execute(0), *compact, execute(10)) == [
        "dropped [0, 1]", "append [7, 8]", "prestage [0]", "panes of [0]", *compacted, "panes of [10]",
    ]  # fmt: skip
    assert asked(execute(10), Prestage((0,)), *append, *compact, *drop, execute(0)) == [
        "panes of [10]", "prestage [0]", "append [7, 8]", *compacted, "dropped [0, 1]", "panes of [0]",
    ]  # fmt: skip


def test_neighbours_release_slices_together() -> None:
    found = asked(execute(0), Destage((0,)), Purge((10, 20)), Destage((30,)), execute(10), Purge((40,)))
    assert found == ["panes of [0]", "release [0, 30] [10, 20]", "panes of [10]", "release [] [40]"]
