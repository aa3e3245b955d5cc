"""``aion.state.read``: the state of an operator, from what lies in its state folder."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pyarrow as pa

from aion.aggregates.functions import Aggregate
from aion.core.join.stored import stored_join
from aion.core.query.stored import stored_plan
from aion.errors import ConfigError, MissingState
from aion.state.columns import of_join, of_windows
from aion.state.filters import Asked, Instant, Key
from aion.state.joins import join_rows
from aion.state.versions import StoredOperator, manifest_of, operator_in, versions_at
from aion.state.windows import window_rows
from aion.zones import zone_rules
from state_backends.server.reading import HeldVersion, VersionReader, held
from state_backends.thresholds import threshold
from state_backends.versions.audit import StateFolder

MEMORY_BYTES = threshold(32 << 20, 256)
_ROWS = threshold(1 << 16, 3)
_TRIES = 5


def read(
    place: str,
    *,
    query: str | None = None,
    name: str | None = None,
    batch: int | None = None,
    key: Key | Sequence[Key] | None = None,
    window: tuple[Instant, Instant] | None = None,
    aggregates: Mapping[str, Aggregate] | None = None,
) -> pa.RecordBatchReader:
    """Returns the live windows of an operator, or the open rows of a join, as a stream of Arrow record batches.

    For example::

        rows = aion.state.read("state/", name="traffic", key={"segment": 7})
        duckdb.sql("select window_start, cars from rows order by 1").show()

    ``place``: the state folder, a path or a URI. ``query``, ``name``: choose the operator if the folder has several.
    ``batch``: the state after this batch. Without it, the state after the last complete one. The query may run on
    meanwhile: all that is read is of one batch. ``key``: only these keys, each a mapping of all key columns to values.
    ``window``: only windows that overlap ``[start, end)``, datetimes or microseconds since the epoch; of a join, rows
    with a time in it. What is not asked for is not read. ``aggregates``: as the query has them; needed only if some
    have functions of yours, because functions are not stored.

    A row of windows has the key, ``window`` (the name of the definition), ``window_start``, ``window_end``, the
    aggregates as a pane would have them now, ``events`` and ``late_events`` of the key, ``closes_at`` (the watermark at
    which the window is gone), ``bound`` (how long it is kept after its end), ``status`` (``active`` or ``late``),
    ``bytes`` (the encoded bytes of the slices that it lies in, for all keys), and ``tier`` (where these are now:
    ``memory`` if a state server of this host has all of them in memory, ``both`` if it has some, else ``disk``, or
    ``remote`` if all are only in an object store). Windows of ``apply=`` have no aggregates.
    ``window_end`` and ``closes_at`` of a window are null as long as events decide where it ends. A row of a join has
    ``side``, the key, the columns of its side, ``event_time``, ``matched`` (null if the join does not note it) and
    ``closes_at``.

    Raises ConfigError if the arguments do not fit the state, MissingState if the batch is not kept any more or nobody
    knows which of two attempts of a batch won, and StateError or StorageError if the state cannot be read.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(closing(StateFolder(place)))
        operator = operator_in(folder, query, name)
        if operator.kind == "stateful":
            raise ConfigError(f"{operator.place!r} is a stateful processor; use aion.read_state or aion inspect --key")
        request = StateRequest(operator, aggregates, key, window)
        versions = _held(stack, folder, operator, batch, request.shards(operator))
        batches = _Batches(stack.pop_all(), (b for version in versions for b in request.rows(version)))
    return pa.RecordBatchReader.from_batches(request.schema, batches)


class StateRequest:
    """What is asked of an operator, and how its rows look. ``schema``: of the answer."""

    def __init__(
        self,
        operator: StoredOperator,
        aggregates: Mapping[str, Aggregate] | None,
        key: Key | Sequence[Key] | None,
        window: tuple[Instant, Instant] | None,
    ) -> None:
        definition = operator.found["definition"]
        self._aggregates, self._is_join = aggregates, operator.kind == "join"
        if self._is_join:
            join = stored_join(definition)
            self.schema, keys = of_join(join), [join.left.schema.field(name) for name in join.key]
        else:
            plan = stored_plan(definition, zone_rules, aggregates)
            self.schema, keys = of_windows(plan), [plan.schema.field(name) for name in plan.key]
        self._asked = Asked.of(keys, key, window)

    def numbers(self, operator: StoredOperator) -> set[int] | None:
        """Returns the numbers of the shards in which the keys may be, or None if they may be in any."""
        return self._asked.shards(operator.found["ids"], operator.found["key_types"])

    def shards(self, operator: StoredOperator) -> list[str]:
        """Returns the folders of the shards in which the keys may be."""
        numbers = self.numbers(operator)
        if numbers is None:
            return operator.shards
        return [shard for shard in operator.shards if int(shard.rpartition("-")[2]) in numbers]

    def rows(self, version: HeldVersion) -> Iterator[pa.RecordBatch]:
        """Yields the rows of one shard."""
        with version.reading() as reader:
            for batch in self._of(reader):
                for begin in range(0, batch.num_rows, _ROWS):
                    yield batch.slice(begin, _ROWS)

    def _of(self, reader: VersionReader) -> Iterator[pa.RecordBatch]:
        definition = reader.manifest.identity.definition
        if self._is_join:
            return join_rows(stored_join(definition), reader, self._asked, self.schema)
        plan = stored_plan(definition, zone_rules, self._aggregates)
        return window_rows(plan, reader, self._asked, MEMORY_BYTES, self.schema)


def _held(
    stack: ExitStack, folder: StateFolder, operator: StoredOperator, batch: int | None, shards: Sequence[str]
) -> list[HeldVersion]:
    """Returns the versions of the shards, which stay as long as the stack is open.

    The query may delete one before it is held. Then this begins again with the newest ones, unless a batch was asked
    for.
    """
    for left in reversed(range(_TRIES)):
        try:
            with ExitStack() as trying:
                found = [
                    trying.enter_context(
                        held(folder.location, operator.names(shard), manifest_of(folder, operator, shard, token))
                    )
                    for shard, token in versions_at(folder, operator, batch, shards).items()
                ]
                stack.push(trying.pop_all())
                return found
        except MissingState:
            if batch is not None or not left:
                raise
    raise AssertionError("the last try returns or raises")


class _Batches:
    """An iterator that lets go of the versions when it is over, or when nobody has it any more."""

    def __init__(self, stack: ExitStack, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._release: Callable[[], Any] = weakref.finalize(self, _release, batches, stack)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            return next(self._batches)
        except BaseException:
            self._release()
            raise


def _release(batches: Any, stack: ExitStack) -> None:
    batches.close()
    stack.close()
