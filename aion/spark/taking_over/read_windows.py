"""The live windows of an operator, or the open rows of a join, as a DataFrame. Each task reads some shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from aion.aggregates.functions import Aggregate
from aion.errors import MissingState
from aion.state.filters import Instant, Key
from aion.state.reading import StateRequest
from aion.state.versions import StoredOperator
from state_backends.files.location import locate, scratch
from state_backends.server.reading import held
from state_backends.versions.lineage import folders_with, read_version


def read_windows(
    spark: SparkSession,
    place: str,
    operator: StoredOperator,
    tokens: Mapping[int, str],
    *,
    key: Key | Sequence[Key] | None,
    window: tuple[Instant, Instant] | None,
    aggregates: Mapping[str, Aggregate] | None,
) -> DataFrame:
    """Returns the rows of :func:`aion.state.read`. ``tokens``: the version of each shard.

    ``tier`` is what the state server knows on the host where the task runs.
    """
    reader = _Reader(place, operator, aggregates, key, window)
    request = reader.request()
    wanted = request.numbers(operator)
    rows = [(shard, token) for shard, token in sorted(tokens.items()) if wanted is None or shard in wanted]
    shards = spark.createDataFrame(rows, "shard int, token string").repartition(max(1, len(rows)), "shard")
    return shards.mapInArrow(reader, from_arrow_schema(request.schema))


@dataclass(frozen=True)
class _Reader:
    """A function for the shards of a task. Yields their rows, a page or some windows at a time."""

    place: str
    operator: StoredOperator
    aggregates: Mapping[str, Aggregate] | None
    key: Key | Sequence[Key] | None
    window: tuple[Instant, Instant] | None

    def request(self) -> StateRequest:
        return StateRequest(self.operator, self.aggregates, self.key, self.window)

    def __call__(self, shards: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        request = self.request()
        for some in shards:
            for row in some.to_pylist():
                yield from self._rows(request, **row)

    def _rows(self, request: StateRequest, shard: int, token: str) -> Iterator[pa.RecordBatch]:
        query, name = self.operator.query, self.operator.place
        with closing(locate(self.place)) as location:
            names = folders_with(location, query, name, shard, token, scratch())
            if names is None:
                raise MissingState(
                    f"{self.place}: version {token} of shard {shard} was deleted before it was read; call "
                    "aion.read_state again, or let Spark keep more batches with spark.sql.streaming.minBatchesToRetain"
                )
            manifest = read_version(location.storage(names, location.live, "read"), token)
            with held(location, names, manifest) as version:
                yield from request.rows(version)
