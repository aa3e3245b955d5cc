"""What a client of Spark Connect does when one of its queries starts. The server calls nobody before the first batch.

So ``start`` of pyspark's writer for Connect is replaced (:func:`watch`). It looks at the operators first, and raises
what is wrong. What the query's tasks and sinks need to know becomes settings of the session while the query starts:
Spark gives each query a copy of the session. The state itself is looked at in a task, as only the executors may reach
its place.
"""

from __future__ import annotations

import inspect
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from aion import errors
from aion.base.time import duration_us
from aion.errors import AionError, ConfigError, WatermarkError
from aion.spark.session import failures, upstream
from aion.spark.session.checkpoint_files import RemoteFiles
from aion.spark.session.partitions import NOTE, rescaled
from aion.spark.session.plans import plan_of
from aion.spark.session.query_settings import BEGINS, CHECKPOINT, ENDS, EVERY, RESCALED, TEMPORARY
from aion.spark.session.rewound import begun
from aion.spark.session.sessions import master
from aion.spark.session.settings import CHECKPOINTS, of_queries
from aion.spark.session.undo import note_change
from aion.spark.session.workers import in_arrow
from aion.spark.start import downstream
from aion.spark.start.connect_batches import Batches
from aion.spark.start.kept_state import Look, Seen, StartedOperator, check_names, settings_of

_METHODS = ("start", "toTable")
_LOCATION = "checkpointLocation"
_OF_FILES = ("", "parquet", "orc", "json", "csv", "text", "avro")
"""The formats of Spark's sink for files. The first one is that of a writer that was given none."""
_operators: WeakKeyDictionary[Any, StartedOperator] = WeakKeyDictionary()
"""By the nodes of plans that are their roots."""
_watched: WeakSet[SparkSession] = WeakSet()
_turn = threading.Lock()


def remember(result: DataFrame, operator: StartedOperator) -> None:
    """Notes the operator whose result this is."""
    _operators[result._plan] = operator


def watch(spark: SparkSession) -> None:
    """Does its part whenever a query starts in this session from now on."""
    from pyspark.errors.exceptions.connect import AnalysisException
    from pyspark.sql.connect.streaming.readwriter import DataStreamWriter

    failures.advise(AnalysisException)
    _watched.add(spark)
    if not hasattr(DataStreamWriter.start, "__wrapped__"):
        for name, around in [*((name, _looking) for name in _METHODS), ("foreachBatch", _saying)]:
            stock = getattr(DataStreamWriter, name)
            setattr(DataStreamWriter, name, around(stock))
            note_change(f"remote {name}", partial(setattr, DataStreamWriter, name, stock))


def _saying(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def foreach_batch(self: Any, func: Any) -> Any:
        return stock(self, Batches(func) if self._session in _watched and callable(func) else func)

    return foreach_batch


def _looking(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def start(self: Any, *arguments: Any, **named: Any) -> Any:
        session = self._session
        if session not in _watched:
            return stock(self, *arguments, **named)
        given = inspect.signature(stock).bind(self, *arguments, **named).arguments
        settings = _settings(session, self, given)
        with _turn:  # they are the session's until the query has a session of its own
            for key, value in settings.items():
                session.conf.set(key, value)
            try:
                return stock(self, *arguments, **named)
            finally:
                for key in settings:
                    session.conf.unset(key)

    return start


def _settings(spark: SparkSession, writer: Any, given: dict[str, Any]) -> dict[str, str]:
    """Returns what a query's own session needs. Raises AionError if the query cannot run."""
    plan = writer._write_stream._child
    there = [_operators[node] for node in _nodes(plan) if node in _operators]
    own: dict[str, str] = {}
    if there:
        from pyspark.sql.connect.dataframe import DataFrame as Remote

        printed = plan_of(Remote(plan, spark))
        if spark.conf.get("spark.sql.streaming.multipleWatermarkPolicy") == "min" and upstream.waits_for_itself(
            printed
        ):
            raise WatermarkError(upstream.WAITS)
        # As the server prints a plan, it does not say which operator a root is.
        downstream.check(printed, lambda _: there[0].config if len(there) == 1 else None)
        own = of_queries(spark) | downstream.settings(printed)
    check_names(there)
    location = _location(spark, writer, given)
    if location is None:
        found, query, checkpoint, batch = {CHECKPOINT: TEMPORARY}, None, TEMPORARY, None
    else:
        files = RemoteFiles(spark, location)
        checkpoint = files.location
        found = {CHECKPOINT: checkpoint}
        batches = files.batches("commits")
        query = files.query if batches else None
        batch = max(batches, default=None)
        if there:
            found |= _rescaled(files, batches, writer, given)
            if (begins := files.first_batch(batches)) is not None:
                found[BEGINS] = str(begins)
    names = tuple(operator.config.name for operator in there)
    if writer._write_proto.available_now or writer._write_proto.once:
        found[ENDS] = json.dumps({"from": 0, "again": {}})  # each batch may be the last one
    if (every := writer._write_proto.processing_time_interval) and (every_ms := _milliseconds(every)) > 0:
        found[EVERY] = str(every_ms)
    for operator in there:
        look = Look(operator, query, checkpoint, master(spark).startswith("local"), batch, names)
        found |= settings_of(operator.config.name, _in_a_task(spark, look))
    return own | found


def _milliseconds(interval: str) -> int:
    """Returns the milliseconds of a trigger's interval. 0 for what only Spark's parser understands."""
    try:
        return duration_us(interval) // 1000
    except AionError:
        return 0


def _location(spark: SparkSession, writer: Any, given: dict[str, Any]) -> str | None:
    """Returns where a query has its checkpoint, as Spark decides it, or None if that is a temporary folder."""
    options = {**writer._write_proto.options, **given.get("options", {})}
    location = {name.lower(): value for name, value in options.items()}.get(_LOCATION.lower())
    if location is not None:
        return str(location)
    root = spark.conf.get(CHECKPOINTS, None)
    if root is None:
        return None
    name = given.get("queryName") or writer._write_proto.query_name or uuid.uuid4().hex
    location = f"{root.rstrip('/')}/{name}"
    writer.option(_LOCATION, location)
    return location


def _rescaled(files: RemoteFiles, batches: list[int], writer: Any, given: dict[str, Any]) -> dict[str, str]:
    """Returns which batches only changed the number of partitions, for sinks."""
    elsewhere = "start the query once in a session without .remote"
    if NOTE in files.names():
        raise ConfigError(f"{files.location}: aion rescale was interrupted there; run it again, or {elsewhere}")
    if begun(files) is not None:
        raise ConfigError(f"{files.location}: aion rewind was interrupted there; run it again, or {elsewhere}")
    idle = rescaled(files, batches)
    if idle is None:
        return {}
    start = writer._write_proto
    is_other = start.HasField("foreach_batch") or start.HasField("foreach_writer")
    if not is_other and str(given.get("format") or start.format).lower() in _OF_FILES:
        raise ConfigError(
            f"{files.location}: the query has new partitions, and its sink of files has not seen batch {idle[1]}, "
            f"which only changed them. Spark Connect cannot give it that batch; {elsewhere}"
        )
    return {RESCALED: json.dumps(idle)}


def _in_a_task(spark: SparkSession, look: Look) -> Seen:
    """Returns what a look returns on a host of the executors. Raises the AionError that it raises there."""
    rows = in_arrow(spark.range(0, 1, 1, 1), _Task(look), from_arrow_schema(_Task.ARROW)).collect()
    name, text, shards, past = rows[0]
    if name is not None:
        raise getattr(errors, name, AionError)(text)
    return Seen(None if shards is None else int(shards), past)


class _Task:
    """Spark's side of a look."""

    ARROW = pa.schema([("error", pa.string()), ("text", pa.string()), ("shards", pa.int32()), ("past", pa.string())])

    def __init__(self, look: Look) -> None:
        self._look = look

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            name = text = None
            seen = Seen()
            try:
                seen = self._look()
            except AionError as error:
                name, text = type(error).__name__, str(error)
            columns = {"error": name, "text": text, "shards": seen.shards, "past": seen.past}
            yield pa.RecordBatch.from_pylist([columns], schema=self.ARROW)


def _nodes(plan: Any) -> Iterator[Any]:
    """Returns a plan of the client and all below it, once for each use."""
    from pyspark.sql.connect.plan import LogicalPlan

    yield plan
    for part in vars(plan).values():
        for below in part if isinstance(part, list | tuple) else (part,):
            if isinstance(below, LogicalPlan):
                yield from _nodes(below)
