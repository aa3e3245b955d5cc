"""Which of the rows that come a join takes, and which it drops. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.base.numbers import EARLIEST_US, LATEST_US
from aion.core.join.plan import KIND_BEFORE, JoinPlan
from aion.core.join.results import Results
from aion.core.join.rows import LATE, JoinRows
from aion.core.lateness.observe import NewBounds, observe_late
from aion.core.life.actions import PaneKind
from aion.core.life.arrival import UNTIMED
from aion.core.slicing.grid import BEYOND_SLICE, DROPPED_SLICE, NO_SLICE

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
TOO_LATE = "later than the bound of its side"
_SECOND_US = 1_000_000


class JoinArrivals:
    """Takes rows apart. ``bounds``: of both sides. ``secret``: the key of identities."""

    def __init__(self, plan: JoinPlan, bounds: tuple[NewBounds, NewBounds], secret: bytes, results: Results) -> None:
        self._plan, self._bounds, self._secret, self._results = plan, bounds, secret, results

    def accepted(
        self, side: int, table: pa.Table, line_us: int, at_us: int | None
    ) -> tuple[JoinRows, list[pa.RecordBatch]]:
        """Returns the rows that are taken, and dropped rows: of those without a time that can be used, and of those
        that are too late. ``line_us``: earlier rows are too late. ``at_us``: the watermark, or None if there is none.
        """
        said, counters = self._plan.sides[side], self._results.counters
        table, dropped = self._dropped_before(side, table)
        times = table.column(said.time).cast(pa.int64()).combine_chunks()
        none = times.is_null().to_numpy(zero_copy_only=False)
        at = times.fill_null(0).to_numpy()
        beyond = ~none & ((at < EARLIEST_US) | (at > LATEST_US))
        timed = ~(none | beyond)
        late = timed & self._are_late(side, table, at, at_us)
        too_late = timed & (at < line_us)
        counters.came(len(at))
        counters.came_late(int(late.sum()))
        counters.drop_untimed(int((~timed).sum()))
        counters.drop(int(too_late.sum()))
        if not said.is_result:
            self._observe(side, at, timed, late, at_us)
        for mask, reason, lateness_us in (
            (none, UNTIMED[NO_SLICE], None),
            (beyond, UNTIMED[BEYOND_SLICE], None),
            (too_late, TOO_LATE, None if at_us is None else at_us - at[too_late]),
        ):
            if mask.any():
                dropped.append(self._results.dropped(side, table.filter(pa.array(mask)), reason, lateness_us))
        kept = timed & ~too_late
        rows = JoinRows.of(self._plan, side, table if kept.all() else table.filter(pa.array(kept)), self._secret)
        rows.flags[late[kept]] |= LATE
        return rows, dropped

    def _dropped_before(self, side: int, table: pa.Table) -> tuple[pa.Table, list[pa.RecordBatch]]:
        """Takes out what the operator before has dropped."""
        if not self._plan.sides[side].is_result:
            return table, []
        fell = pc.equal(table.column(KIND_BEFORE), PaneKind.DROPPED.value)
        before, counters = table.filter(fell), self._results.counters
        if not before.num_rows:
            return table, []
        counters.came(before.num_rows)
        counters.drop_untimed(before.num_rows)
        return table.filter(pc.invert(fell)), [self._results.dropped(side, before, UNTIMED[DROPPED_SLICE], None)]

    def _are_late(self, side: int, table: pa.Table, at: Ints, at_us: int | None) -> Flags:
        said = self._plan.sides[side]
        if said.is_result:
            # Results come after the watermark has passed their time. Only they themselves say whether they are late.
            kinds = [PaneKind.LATE.value, *([PaneKind.FINAL.value] if said.changes else [])]
            found = pc.is_in(table.column(KIND_BEFORE), pa.array(kinds))
            return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)
        return np.zeros(len(at), np.bool_) if at_us is None else at <= at_us

    def _observe(self, side: int, at: Ints, timed: Flags, late: Flags, at_us: int | None) -> None:
        bound, seconds = self._bounds[side], at // _SECOND_US * _SECOND_US
        if at_us is not None and late.any():
            observe_late(bound, *np.unique(seconds[late], return_counts=True), at_us)
        if (in_time := timed & ~late).any():
            bound.observe_all_on_time(*np.unique(seconds[in_time], return_counts=True))
