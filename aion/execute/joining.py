"""A join as a tenant of a shard: the policy says how late the rows of each side may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

import pyarrow as pa

from aion.base.identity import SECRET_BYTES
from aion.config import Policy
from aion.core.join.join import Join
from aion.core.join.plan import CHANGES, SIDES, JoinPlan
from aion.core.join.results import Net
from aion.core.lateness.bound import AdaptiveBound
from aion.core.lateness.observe import NewBounds
from aion.core.life.rules import FixedBound
from aion.execute.assembly import asked_bound, prestages
from aion.execute.panes.applying import as_texts
from aion.execute.tenant import Saved
from state_backends.format.ordered_map import LazyMap
from state_backends.thresholds import threshold

Snapshot: TypeAlias = Mapping[str, Any] | None
_NO_SECRET = bytes(SECRET_BYTES)
SECRET, BOUNDS = "identity_secret", "bounds_us"
_NEXT_KEYS = threshold(1 << 14, 3)  # more than a disk reads between two batches


class Joined:
    """See :class:`aion.execute.tenant.Tenant`. Rows come as (side, table).

    ``values``: the map of the shard. ``snapshot``: of the shard's version, or None if it has none yet. ``secret``: the
    key of identities in that case. It must be the same if a shard's first batch runs again: a sink may have its rows.
    """

    def __init__(
        self, plan: JoinPlan, policy: Policy, values: LazyMap, snapshot: Snapshot = None, secret: bytes = _NO_SECRET
    ) -> None:
        self._learnt = [
            AdaptiveBound(
                asked_bound(policy),
                model=policy.lateness.model,
                ahead_us=plan.last_us - plan.first_us,
                snapshot=None if snapshot is None else snapshot["sides"][name],
            )
            for name in SIDES
        ]
        left, right = (
            learnt if side.bound_us is None else FixedBound(side.bound_us, learnt)
            for side, learnt in zip(plan.sides, self._learnt, strict=True)
        )
        self.bounds: tuple[NewBounds, NewBounds] = left, right
        self._secret = secret if snapshot is None else bytes.fromhex(snapshot[SECRET])
        self.join = Join(plan, values, self.bounds, self._secret, as_texts, snapshot)
        self._net = Net() if plan.emit == CHANGES else None
        self._reads_ahead = prestages(policy) and values.on_disk

    def advance(self, at_us: int | None) -> Iterator[pa.RecordBatch]:
        if at_us is not None:
            yield from self._shown(self.join.advance(at_us))

    def arrive(self, rows: tuple[int, pa.Table]) -> Iterator[pa.RecordBatch]:
        return self._shown(self.join.arrive(*rows))

    def end_batch(self) -> Iterator[pa.RecordBatch]:
        yield from self._shown(self.join.end_batch())
        if self._net is not None:
            yield from self._net.end_batch()

    def _shown(self, results: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return results if self._net is None else self._net.take(results)

    @property
    def due_ms(self) -> int | None:
        due_us = self.join.due_us
        return None if due_us is None else -(-due_us // 1000)

    def save(self) -> Saved:
        sides = {name: bound.to_json() for name, bound in zip(SIDES, self._learnt, strict=True)}
        bounds = [bound.bound_for_new_window() for bound in self.bounds]
        own = {"next_seq": 0, "sides": sides, SECRET: self._secret.hex(), BOUNDS: bounds}
        keys = dict.fromkeys(islice(self.join.next_keys(), _NEXT_KEYS)) if self._reads_ahead else ()
        return Saved({**self.join.snapshot(), **own}, next_keys=[*keys])
