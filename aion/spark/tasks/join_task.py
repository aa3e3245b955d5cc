"""A join in a task of its root: rows of both sides come packed, and results go to Spark as frames."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa

from aion.base.identity import SECRET_BYTES
from aion.config import Policy
from aion.core.join.stored import evolved_join
from aion.execute.joining import Joined
from aion.spark.tasks.frames import frames_of
from aion.spark.tasks.join_child import SIDE, JoinConfig, packed_in
from aion.spark.tasks.shards import past_here
from aion.spark.tasks.tenants import Batch, Tenants
from state_backends.server.client import RemoteAttempt


class JoinTenants(Tenants):
    """See :class:`aion.spark.tasks.tenants.Tenants`."""

    def __init__(self, config: JoinConfig, policy: Policy) -> None:
        past = past_here(config.name)
        self._plan = evolved_join(config.plan, None if past is None else json.loads(past))
        self._policy, self._name = policy, config.name
        self.definition = self._plan.definition
        self.store, self.asks = {}, {}
        self.rows_first = any(side.is_result for side in config.plan.sides)

    def open(
        self, attempt: RemoteAttempt, batch: Batch
    ) -> tuple[Joined, Callable[[Iterable[pd.DataFrame]], Iterator[tuple[int, pa.Table]]]]:
        def tables(frames: Iterable[pd.DataFrame]) -> Iterator[tuple[int, pa.Table]]:
            for frame in frames:
                for packed in filter(len, packed_in(frame)):
                    rows = pa.ipc.open_stream(packed).read_all()
                    side = int(rows.schema.metadata[SIDE])
                    schema = self._plan.sides[side].arriving
                    columns = [
                        column if column.type == field.type else column.cast(field.type)
                        for column, field in zip(rows.columns, schema, strict=True)
                    ]
                    yield side, pa.table(columns, schema=schema)

        said = f"{batch.query}\n{self._name}\n{batch.shard}".encode()
        secret = hashlib.blake2b(said, digest_size=SECRET_BYTES).digest()
        return Joined(self._plan, self._policy, attempt, attempt.snapshot, secret), tables

    def results(self, results: Iterator[Any]) -> Iterator[pd.DataFrame]:
        return frames_of(results)
