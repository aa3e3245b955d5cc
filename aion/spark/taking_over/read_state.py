"""``read_state``: the state of a query as rows. ``restoring``: the way back, from a processor's state to Spark's own.

Spark has one interface through which state can come from elsewhere: a DataFrame that is given as ``initialState`` when
a query starts with a new checkpoint. So offsets and watermark do not come along, and neither does a TTL: Spark sets the
time at which a value expires when it is written.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from aion.aggregates.functions import Aggregate
from aion.config import Policy, policy_from_text, policy_to_text
from aion.config.layers import Source as PolicySource
from aion.errors import ConfigError, MissingState
from aion.execute.assembly import store_config
from aion.spark.session.checkpoint_files import CheckpointFiles
from aion.spark.session.settings import conf, place_of_state, resolved_policy
from aion.spark.taking_over.tokens import tokens_of
from aion.spark.tasks.processor_task import ENCODING
from aion.spark.tasks.task import client_of
from aion.spec import check_name
from aion.state.filters import Instant, Key
from aion.state.reading import StateRequest
from aion.state.versions import StoredOperator
from aion.stateful.reading import PACKED, TIMERS, row_type, rows, unpacked
from aion.stateful.run import variables_of
from aion.stateful.variables import Variable
from state_backends.files.location import Location, locate, scratch
from state_backends.server.reading import held
from state_backends.versions.lineage import find_version, folders_with, operator_of, operators_of, read_version
from state_backends.versions.manifest import Identity, load
from state_backends.versions.retention import batch_of


def read_state(
    spark: SparkSession,
    checkpoint: str,
    *,
    name: str | None = None,
    batch: int | None = None,
    key: Key | Sequence[Key] | None = None,
    window: tuple[Instant, Instant] | None = None,
    aggregates: Mapping[str, Aggregate] | None = None,
    policy: PolicySource | None = None,
) -> DataFrame:
    """Returns the state of an operator of a query: live windows, open rows of a join, or the keys of a processor.

    For example::

        aion.read_state(spark, "checkpoint/", key={"segment": 7}).orderBy("window_start").show()

    ``checkpoint``: the query's. ``name``: the operator's, if the query has several. ``batch``: the state after this
    batch; without it, after the last complete one. The query may run meanwhile: Spark says which version of each shard
    belongs to the batch. Rows are those of :func:`aion.state.read`, and so are ``key``, ``window`` and ``aggregates``.
    What these leave out is not read; a condition in ``where`` is applied to rows that have been read.

    **The state of a stateful processor** has one row for each key, of a query that is stopped. The columns are those of
    the key, ``timers`` (ms), and one for each state variable: a struct, an array of structs, or for a map an array of
    structs of ``key`` and ``value``; null if there is nothing. The last one, ``packed``, is for :func:`restoring`.

    Raises ConfigError with the reason if this is not possible, or if it is not all of the state, as with a TTL.
    """
    if name is not None:
        check_name(name)
    files = CheckpointFiles(spark, checkpoint)
    commits = files.batches("commits")
    if not files.exists("metadata") or not commits:
        raise ConfigError(f"{checkpoint}: not the checkpoint of a streaming query with a complete batch")
    if batch is not None and batch not in commits:
        raise ConfigError(
            f"batch: {batch!r} is not one of the complete batches that are kept, {commits[0]} to {commits[-1]}"
        )
    resolved = resolved_policy(spark, policy, {})
    place = place_of_state(spark, resolved)
    location = locate(place)
    try:
        name, operator = _operator(location, files, place, name)
        named = tokens_of(spark, files, commits[-1] if batch is None else batch)
        tokens = _tokens_of(location, place, files.query, name, named)
        is_stateful = operator["definition"].get("kind") == "stateful"
        variables = _variables(location, files.query, name, tokens) if is_stateful else []
    finally:
        location.close()
    if not is_stateful:
        found = StoredOperator(files.query, name, operator)
        return _WindowsReader(place, found, aggregates, key, window).frame(spark, tokens)
    if any(str(active.id) == files.query for active in spark.streams.active):
        raise ConfigError(
            f"{checkpoint}: its query is running, and to read the state of a processor would end its tasks: stop it"
        )
    if not (batch is None and key is None and window is None and aggregates is None):
        raise ConfigError(f"{name!r} is a stateful processor: leave out batch=, key=, window= and aggregates=")
    by_name = files.metadata("offsets", commits[-1])["conf"].get(ENCODING) == "avro"
    identity = Identity(
        query=files.query,
        operator=name,
        shard=0,
        shards=operator["shards"],
        definition=operator["definition"],
        ids=tuple(operator["ids"]),
        key_types=tuple(operator["key_types"]),
        checkpoint=files.location,
    )
    return _of_processor(spark, resolved, identity, tokens, variables, by_name=by_name)


def _operator(location: Location, files: CheckpointFiles, place: str, name: str | None) -> tuple[str, dict[str, Any]]:
    """Returns the operator that is meant, and what its ``operator.json`` says. Raises ConfigError."""
    names = sorted(operators_of(location, files.query, files.location))
    if name is None and len(names) > 1:
        raise ConfigError(
            f"{place}: the query has several operators; choose one by name=: {', '.join(map(repr, names))}"
        )
    wanted = names[0] if name is None and names else name
    found = None if wanted is None else operator_of(location, files.query, wanted, files.location)
    if wanted is None or found is None:
        what = "any operator" if wanted is None else f"the operator {wanted!r}"
        there = f"; there is that of {', '.join(map(repr, names))}" if names else ""
        raise ConfigError(f"{place}: there is no state of {what} of query {files.query}{there}")
    return wanted, found


def _tokens_of(
    location: Location, place: str, query: str, name: str, named: Sequence[dict[int, str]]
) -> dict[int, str]:
    """Returns the versions of one operator among those that a checkpoint names. Raises ConfigError if some are lost."""
    for of_operator in named:
        there = {s: find_version(location, query, name, s, token, scratch()) for s, token in of_operator.items()}
        lost = [shard for shard, storage in there.items() if storage is None]
        if len(lost) == len(there):  # versions of another operator
            continue
        if lost:
            raise ConfigError(f"{place}: versions that the checkpoint names are missing, of the shards {lost}")
        return of_operator
    if named and all(named):
        raise ConfigError(f"{place}: none of the versions is there that the checkpoint names")
    return {}


def _variables(location: Location, query: str, name: str, tokens: Mapping[int, str]) -> list[Variable]:
    """Returns the variables with their newest schemas: a shard has those of the last batch that changed it."""
    found: dict[str, Variable] = {}
    for shard, token in sorted(tokens.items(), key=lambda named: batch_of(named[1])):
        storage = find_version(location, query, name, shard, token, scratch())
        assert storage is not None
        for variable in variables_of(load(storage.load(token), token).snapshot):
            found[variable.name] = variable
    return [found[variable] for variable in sorted(found)]


@dataclass(frozen=True)
class _WindowsReader:
    """A function for the shards of a task. Yields their windows or open rows, a page or some windows at a time."""

    place: str
    operator: StoredOperator
    aggregates: Mapping[str, Aggregate] | None
    key: Key | Sequence[Key] | None
    window: tuple[Instant, Instant] | None

    def frame(self, spark: SparkSession, tokens: Mapping[int, str]) -> DataFrame:
        """Returns the rows of :func:`aion.state.read`. ``tokens``: the version of each shard.

        ``tier`` is what the state server knows on the host where the task runs.
        """
        request = self._request()
        wanted = request.numbers(self.operator)
        rows = [(shard, token) for shard, token in sorted(tokens.items()) if wanted is None or shard in wanted]
        shards = spark.createDataFrame(rows, "shard int, token string").repartition(max(1, len(rows)), "shard")
        return shards.mapInArrow(self, from_arrow_schema(request.schema))

    def _request(self) -> StateRequest:
        return StateRequest(self.operator, self.aggregates, self.key, self.window)

    def __call__(self, shards: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        request = self._request()
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


def _of_processor(
    spark: SparkSession,
    policy: Policy,
    identity: Identity,
    tokens: Mapping[int, str],
    variables: Sequence[Variable],
    *,
    by_name: bool,
) -> DataFrame:
    name = identity.operator
    key = StructType.fromJson({"type": "struct", "fields": identity.definition["key"]})
    if expiring := [variable.name for variable in variables if variable.ttl_ms is not None]:
        raise ConfigError(
            f"{name!r}: the values of {', '.join(expiring)} expire, and Spark cannot be told when: a value that is "
            "written as initial state gets a whole new TTL"
        )
    taken = [*key.names, TIMERS, PACKED]
    if clash := [variable.name for variable in variables if variable.name in taken]:
        raise ConfigError(f"{name!r}: a column of the key and a state variable have the same name: {clash}")
    reader = _ProcessorReader(
        identity=identity,
        policy=policy_to_text(policy),
        place=place_of_state(spark, policy),
        application=spark.sparkContext.applicationId,
        retain_versions=int(conf(spark, "spark.sql.streaming.minBatchesToRetain")),
        key=key,
        variables=variables,
        by_name=by_name,
        run=uuid.uuid4().hex,
    )
    shards = spark.sparkContext.parallelize(sorted(tokens.items()), max(1, len(tokens)))
    return spark.createDataFrame(shards.mapPartitions(reader), row_type(key, variables), verifySchema=False)


@dataclass(frozen=True, kw_only=True)
class _ProcessorReader:
    """A function for partitions of (shard, token). Yields the state of their keys."""

    identity: Identity
    policy: str
    place: str
    application: str
    retain_versions: int
    key: StructType
    variables: Sequence[Variable]
    by_name: bool
    run: str
    """Identifies this use of the state, as the run of a query would."""

    def __call__(self, shards: Iterator[tuple[int, str]]) -> Iterator[Any]:
        policy = policy_from_text(self.policy)
        for shard, token in shards:
            attempt = client_of(self.application, policy).open(
                replace(self.identity, shard=shard),
                token=token,
                makes=f"{token[:10]}-{uuid.uuid4().hex[:16]}",
                run=self.run,
                operator_uid=self.run,
                state_dir=self.place,
                store=store_config(policy, retain_versions=self.retain_versions),
            )
            try:
                own = variables_of(attempt.snapshot, self.by_name)
                yield from rows(attempt, self.key, [own.define_as(variable) for variable in self.variables])
            finally:
                attempt.abort()


def restoring(processor: StatefulProcessor) -> StatefulProcessor:
    """Returns a processor that does what ``processor`` does, and takes its initial state from :func:`read_state`.

    For example::

        state = aion.read_state(spark, "checkpoint/").groupBy("user")
        events.groupBy("user").transformWithStateInPandas(
            aion.restoring(Count()), "user string, n long", "Update", "None", initialState=state
        )

    Group the DataFrame of :func:`read_state` by the columns of the key, and give it as ``initialState``. You may leave
    out rows, but not the column ``packed``: the state is taken from there, so other values in other columns change
    nothing.
    """
    return _Restoring(processor)


class _Restoring(StatefulProcessor):
    def __init__(self, processor: StatefulProcessor) -> None:
        self._processor = processor

    def init(self, handle: Any) -> None:
        self._noted = _Noting(handle)
        self._processor.init(self._noted)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return self._processor.handleInputRows(key, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        return self._processor.handleExpiredTimer(key, timerValues, expiredTimerInfo)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        rows = initialState[PACKED] if hasattr(initialState, "to_dict") else [initialState[PACKED]]
        for packed in rows:
            timers, values = unpacked(packed)
            for name, given in values.items():
                if (state := self._noted.states.get(name)) is None:  # the processor no longer has it
                    continue
                if hasattr(state, "appendValue"):
                    state.put(given)
                elif hasattr(state, "updateValue"):
                    for user_key, value in given:
                        state.updateValue(user_key, value)
                else:
                    state.update(given)
            for time_ms in timers:
                self._noted.registerTimer(time_ms)

    def close(self) -> None:
        self._processor.close()


class _Noting:
    """A processor's handle that notes the state variables by their names."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.states: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def getValueState(self, stateName: str, *arguments: Any, **named: Any) -> Any:
        return self._note(stateName, self._handle.getValueState(stateName, *arguments, **named))

    def getListState(self, stateName: str, *arguments: Any, **named: Any) -> Any:
        return self._note(stateName, self._handle.getListState(stateName, *arguments, **named))

    def getMapState(self, stateName: str, *arguments: Any, **named: Any) -> Any:
        return self._note(stateName, self._handle.getMapState(stateName, *arguments, **named))

    def _note(self, name: str, state: Any) -> Any:
        self.states[name] = state
        return state
