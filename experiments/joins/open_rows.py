"""What a small batch of a join costs, by how many rows are open: one shard with a state server, without Spark."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from state_backends.thresholds import threshold

if TYPE_CHECKING:
    import pyarrow as pa

    from aion.config import Policy
    from aion.core.join.plan import JoinPlan
    from state_backends.server.client import StateClient

HOUR_US = 3_600_000_000
WITHIN_US = 2 * HOUR_US
READS_PER_S = 200
"""Of the disk on which :meth:`OpenRows.due` is measured."""
FILLED_AT_ONCE = threshold(500_000, 200)


class OpenRows:
    """A left outer join of orders and payments, with ``open_rows`` orders that are not paid yet.

    They were ordered within the last two hours, in any order of their keys. State is below ``work``. ``fetches``:
    whether state is fetched ahead. If it is given, the disk is slow (:data:`READS_PER_S`).
    """

    def __init__(self, open_rows: int, budget_mib: int, work: Path, *, fetches: bool | None = None) -> None:
        import numpy as np

        from aion.config import load_policy
        from state_backends.server.client import StateClient

        self._client: StateClient = StateClient.connect(f"joins-{uuid.uuid4()}", watch_pid=os.getpid())
        asked: dict[str, Any] = {"memory": {"budget": f"{budget_mib} MiB"}}
        if fetches is not None:
            disk = {"class": "experiments.prestage.disk:SlowDisk", "arguments": {"reads_per_s": READS_PER_S}}
            asked |= {"destage": disk, "prestage": {"mode": "predictive" if fetches else "none"}}
        self._policy: Policy = load_policy(asked)
        self._plan: JoinPlan = _plan()
        self._work, self._number = work, 0
        self._token: str | None = None
        self._random = np.random.default_rng(1)
        self._open = np.arange(open_rows)
        self._random.shuffle(self._open)
        ordered = 1 + self._random.integers(0, HOUR_US, open_rows)
        self._ordered = np.sort(ordered)
        for at in range(0, open_rows, FILLED_AT_ONCE):
            some = self._open[at : at + FILLED_AT_ONCE]
            self._batch(some, ordered[at : at + FILLED_AT_ONCE], some[:0], 0, right=0)
        self._at_us = WITHIN_US
        """The watermark of :meth:`due`: now the first orders have waited as long as they may."""

    def batch(self, rows: int) -> tuple[float, int]:
        """Runs a batch of new orders and of payments of open ones, as many of either. Returns seconds and results.

        Raises RuntimeError for results that cannot be right.
        """
        import numpy as np

        orders = 10**12 + self._number * rows + self._random.permutation(rows)
        payments, self._open = self._open[:rows], np.concatenate((self._open[rows:], orders))
        ordered = HOUR_US + self._random.integers(0, 1_000_000, rows)
        return self._batch(orders, ordered, payments, HOUR_US, right=len(payments))

    def due(self, rows: int) -> tuple[float, int]:
        """The same of new orders, in which about as many others turn out not to be paid."""
        import numpy as np

        step_us = HOUR_US * rows // len(self._open)
        before_us, self._at_us = self._at_us, self._at_us + step_us
        orders = 10**12 + self._number * rows + self._random.permutation(rows)
        ordered = self._at_us + np.arange(rows) * step_us // rows
        alone = np.diff(np.searchsorted(self._ordered, [before_us - WITHIN_US, self._at_us - WITHIN_US], "right"))
        return self._batch(orders, ordered, self._open[:0], self._at_us, right=int(alone[0]))

    def _batch(self, orders: Any, ordered: Any, payments: Any, at_us: int, *, right: int) -> tuple[float, int]:
        import numpy as np
        import pyarrow as pa

        from aion.execute.assembly import store_config
        from aion.execute.joining import Joined
        from state_backends.versions.manifest import Identity

        tables = []
        for side, ids, times in ((0, orders, ordered), (1, payments, np.full(len(payments), HOUR_US + 1_000_000))):
            stamps = pa.array(times).cast(pa.timestamp("us", "UTC"))
            schema = self._plan.sides[side].schema
            tables.append(pa.table([ids, stamps, self._random.random(len(ids))], schema=schema))
        begin = time.perf_counter()
        makes = f"{self._number:010d}-{uuid.uuid4().hex[:16]}"
        attempt = self._client.open(
            Identity("joins", "o", 0, 1, self._plan.definition), token=self._token, makes=makes, run="r",
            operator_uid="u", state_dir=str(self._work / "state"), store=store_config(self._policy),
        )  # fmt: skip
        joined = Joined(self._plan, self._policy, attempt, attempt.snapshot)
        found = sum(rows.num_rows for rows in joined.advance(at_us))
        for side, table in enumerate(tables):
            found += sum(rows.num_rows for rows in joined.arrive((side, table)))
        found += sum(rows.num_rows for rows in joined.end_batch())
        attempt.commit(*joined.save())
        self._token, self._number = makes, self._number + 1
        seconds = time.perf_counter() - begin
        if found != right:
            raise RuntimeError(f"{len(self._open):,} open orders: {right} results are right, not {found}")
        return seconds, found

    def close(self) -> None:
        self._client.close()


def _plan() -> JoinPlan:
    import pyarrow as pa

    from aion.core.join.plan import OUTER_LEFT, JoinPlan, Side

    def side(time_: str, value: str) -> Side:
        schema: pa.Schema = pa.schema([("id", pa.int64()), (time_, pa.timestamp("us", "UTC")), (value, pa.float64())])
        return Side(schema, time_, ("id",), False, HOUR_US)

    return JoinPlan(side("ordered", "price"), side("paid", "amount"), ("id",), 0, WITHIN_US, OUTER_LEFT)
