"""Where events come from: what the rest of :mod:`aion.spark` needs to know of a source."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, FloatType, StructField, StructType

from aion.base.hashing import ShardOfKeys
from aion.config import Policy
from aion.core.query.columns import ColumnName, key_names
from aion.core.query.plan import Plan
from aion.errors import SchemaError, WatermarkError
from aion.spark import NEWEST, OLDEST, numbers
from aion.spark.api.watermarks import FLAG, HELPER, WATERMARK, WatermarkRules, check_behind
from aion.spark.session import upstream
from aion.spark.session.group_counter import GroupCounter
from aion.spark.session.partials import grouped, said, why_in_python
from aion.spark.session.types import arrow_schema, check_text, quoted
from aion.spark.session.workers import in_arrow
from aion.spark.tasks.blocks import row_type
from aion.spark.tasks.child import FLAGGED, NO_EVENT, Child, ChildWork
from aion.spark.tasks.shards import hash_column, shard_of_group
from aion.spec import Spec


class Names:
    """The columns of a DataFrame, by the names that a specification has for them.

    A name means what it means for Spark: perhaps in another case, or a field of a column. Only what is used matters:
    another column may be of any type, and two others may have the same name. ``hidden``: columns that are none of the
    user's.
    """

    def __init__(self, df: DataFrame, hidden: Collection[str]) -> None:
        self._df = df
        self._fields = [field for field in df.schema if field.name not in hidden]
        self._refused: dict[str, SchemaError] = {}
        self._meant: dict[str, tuple[Column, StructField]] = {}
        self.schema = pa.schema([field for each in self._fields if (field := self._arrow(each)) is not None])

    def field(self, name: str) -> StructField:
        """Returns the column of this name. Raises KeyError if there is none."""
        return self._find(name)[1]

    def column(self, name: str) -> Column:
        """Returns the same for an expression. Raises KeyError."""
        return self._find(name)[0]

    def resolved(self, spec: Spec) -> tuple[Spec, pa.Schema]:
        """Returns a specification, and the columns with the names that it uses. Raises SchemaError.

        A key that is a field of a column gets the name that Spark gives to it, which is that of the field.
        """
        key = tuple(self._key(name, spec) for name in key_names(spec.key))
        spec = replace(spec, key=key) if spec.key is not None and key != key_names(spec.key) else spec
        if isinstance(spec.time, ColumnName):
            spec = replace(spec, time=self._time(spec.time))
        names = [name for name in spec.used_columns if name != "*"]
        every = spec.apply is not None and spec.apply.columns is None
        for name in (*names, *(self._refused if every else ())):
            if name in self._refused:
                raise self._refused[name]
        own = {field.name for field in self._fields} - self._meant.keys()
        more = [found for name in dict.fromkeys(names) if name not in own and (found := self._field_of(name))]
        renamed = {field.name.lower() for field in more} | {*self._meant}
        kept = [field for field in self.schema if field.name in {*names} & own or field.name.lower() not in renamed]
        return spec, pa.schema([*kept, *more])

    def _arrow(self, field: StructField) -> pa.Field | None:
        name = field.name
        if sum(each.name == name for each in self._fields) > 1:
            self._refused[name] = SchemaError(f"windowed: the DataFrame has two columns named {name!r}; rename one")
            return None
        try:
            return arrow_schema(StructType([field])).field(0)
        except SchemaError as error:
            self._refused[name] = error
            return None

    def _field_of(self, name: str) -> pa.Field | None:
        try:
            _, found = self._find(name)
        except KeyError:
            return None
        return pa.field(name, arrow_schema(StructType([found])).field(0).type)

    def _key(self, name: str, spec: Spec) -> str:
        if any(field.name == name for field in self._fields):
            return name
        try:
            column, found = self._find(name)
        except KeyError:
            return name
        if found.name != name:
            if found.name in {*spec.used_columns} - {name}:
                raise SchemaError(
                    f"key: {name!r} is called {found.name!r} in the result, as another column that is used here; "
                    "give it a column of its own with withColumn"
                )
            self._meant[found.name] = column, found
        return str(found.name)

    def _time(self, name: ColumnName) -> str:
        """Returns the name of the time. A field of a column has the one that it has as a text, too."""
        column, found = self._find(name)
        if str(name) == found.name or ("." in name and self._df.select(column).columns == [name.split(".")[-1]]):
            return str(name)
        self._meant[found.name] = column, found
        return str(found.name)

    def _find(self, name: str) -> tuple[Column, StructField]:
        """Raises KeyError if there is no such column, and SchemaError if there are several."""
        if name not in self._meant:
            for field in self._fields:
                if field.name == name:
                    return self._df[quoted(name)], field
            column = name.column if isinstance(name, ColumnName) else F.col(name)
            try:
                self._meant[str(name)] = column, self._df.select(column).schema[0]
            except PySparkException as error:
                if error.getCondition() == "AMBIGUOUS_REFERENCE":
                    raise SchemaError(f"{name!r} may be several columns: {error.getMessage()}") from error
                raise KeyError(name) from error
        return self._meant[name]


class Source(Protocol):
    """A stream of events."""

    @property
    def session(self) -> SparkSession: ...

    @property
    def schema(self) -> pa.Schema:
        """The columns of the events."""

    @property
    def rows_first(self) -> bool:
        """Returns whether the events of a batch belong before its watermark."""

    def timed(self, spec: Spec) -> Spec:
        """Returns a specification with the column of event times, which is that of the watermark if none is named.

        Raises SchemaError if it is not clear which.
        """

    def plan(self, spec: Spec) -> Plan:
        """Returns the plan for these events. Raises SchemaError, WindowError, ConfigError."""

    def policy(self, spec: Spec, policy: Policy) -> Policy:
        """Returns the policy of a call, with what the events require. Raises ConfigError."""

    @property
    def marked(self) -> frozenset[str]:
        """The columns that have a watermark."""

    def delay_us(self, time: str) -> int | None:
        """Returns the delay of the watermark. None if the watermark is on another column than ``time``."""

    def reading(self, plan: Plan) -> str | None:
        """Returns how the children read the events themselves, in words, or None if Spark reads them."""

    @property
    def clock(self) -> Sequence[str]:
        """Returns what moves the watermark besides events, and which events do not, in words."""

    @property
    def before(self) -> Sequence[str]:
        """Returns what comes before and matters, in words."""

    def why_in_python(self, plan: Plan, *, drops_bad_texts: bool) -> str | None:
        """Says why Python groups the events, or returns None if Spark's own functions do."""

    def children(self, work: ChildWork) -> tuple[DataFrame, GroupCounter | None]:
        """Returns the rows of blocks (:mod:`aion.spark.tasks.blocks`) that the children make of the events, with the
        watermark; and what counts the blocks, if Spark may group the events.
        """


class Rows:
    """A streaming DataFrame with an event in each row. Raises WatermarkError or SchemaError if it cannot be used.

    ``caller``: who needs it. ``is_lossy``: late rows may be lost before they are in it.
    """

    rows_first = False

    def __init__(self, df: DataFrame, caller: str, *, is_lossy: bool) -> None:
        _check_stream(df)
        if not is_lossy:
            upstream.check(caller, df)
        self._rules = WatermarkRules.of(df.schema)
        if self._rules is not None:
            check_behind(df, self._rules)
        self._df = df
        self.session = df.sparkSession
        self._names = Names(df, hidden=(HELPER, FLAG))
        self.schema = self._names.schema

    def timed(self, spec: Spec) -> Spec:
        if spec.time is not None:
            return spec
        marked = sorted(self.marked) if self._rules is None else [self._rules.time]
        if len(marked) != 1:
            raise SchemaError(
                f"time: several columns have a watermark: {', '.join(marked)}; name the one with the event times, e.g. "
                f"time={marked[0]!r}"
            )
        return replace(spec, time=marked[0])

    def plan(self, spec: Spec) -> Plan:
        spec, self.schema = self._names.resolved(spec)
        return spec.plan(self.schema)

    def policy(self, spec: Spec, policy: Policy) -> Policy:
        return policy

    @property
    def marked(self) -> frozenset[str]:
        return frozenset(field.name for field in self._df.schema if WATERMARK in field.metadata)

    def delay_us(self, time: str) -> int | None:
        on_helper = self._rules is not None and self._rules.time == time
        marked = self._df.schema[HELPER] if on_helper else self._names.field(time)
        delay_ms = marked.metadata.get(WATERMARK)
        return None if delay_ms is None else int(delay_ms) * 1000

    def reading(self, plan: Plan) -> None:
        return None

    @property
    def clock(self) -> Sequence[str]:
        return () if self._rules is None else self._rules.sentences()

    @property
    def before(self) -> Sequence[str]:
        return [
            f"{name} drops rows that are later than the watermark, before they get here"
            for name in upstream.lossy(self._df)
        ]

    def children(self, work: ChildWork) -> tuple[DataFrame, GroupCounter | None]:
        """Only the columns that are needed are sent to Python, under names that pyspark need not quote."""
        columns = {name: self._column(name, work.plan) for name in work.plan.schema.names}
        needed = [column.alias(f"column{number}") for number, column in enumerate(columns.values())]
        types = [self._names.field(name).dataType for name in work.plan.key]
        if not ShardOfKeys.covers(work.key_types):
            keys = zip((columns[name] for name in work.plan.key), types, strict=True)
            needed.append(hash_column([*keys]).alias("__aion_hash"))
        flag = self._flag(work.plan)
        if flag is not None:
            needed.append(flag.cast("tinyint").alias(FLAG))
        rows, counter = self._df.select(*needed), None
        if self.why_in_python(work.plan, drops_bad_texts=work.settings.drops_bad_texts) is None:
            flagged = {**FLAGGED, NO_EVENT: None}
            sent = [F.col(f"column{work.plan.schema.get_field_index(name)}") for name in work.plan.key]
            shard = shard_of_group([*zip(sent, types, strict=True)], work.tree.shards) if not work.tree.levels else None
            flags = None if flag is None else FLAG
            rows, counter = grouped(rows, work.plan, work.name, shard=shard, flags=flags, flagged=flagged)
        child = Child(work, has_flags=flag is not None, counter=counter)
        return in_arrow(rows, child, row_type(work.tree, level=0)), counter

    def why_in_python(self, plan: Plan, *, drops_bad_texts: bool) -> str | None:
        if numbers(self.session.version) > numbers(NEWEST):
            return said(f"Aion was tried with Spark {OLDEST} to {NEWEST}, and this is {self.session.version}")
        return why_in_python(self.session, plan, drops_bad_texts=drops_bad_texts)

    def _flag(self, plan: Plan) -> Column | None:
        """Which rows no window takes, or are no events, or None if all are events, and windows may take them."""
        if self._rules is None:
            return None
        # What has the time of these windows is an event of theirs, though it may have none for the watermark.
        is_event = ((flag := self._df[FLAG]) == NO_EVENT) & self._names.column(plan.time).isNotNull()
        return F.when(is_event, F.lit(0)).otherwise(flag)

    def _column(self, name: str, plan: Plan) -> Column:
        column = self._names.column(name)
        type_ = self._names.field(name).dataType
        if name in plan.key or not plan.apply:
            check_text(self._names.field(name))
        if name in plan.key and isinstance(type_, DoubleType | FloatType):
            # As in Spark's own grouping, -0.0 and 0.0 are one key.
            return (column + F.lit(0.0)).cast(type_)
        return column


def _check_stream(df: DataFrame) -> None:
    if not isinstance(df, DataFrame):
        raise WatermarkError(
            f"windowed: a streaming DataFrame is needed, or what aion.read_files returns, not {type(df).__name__}"
        )
    if not df.isStreaming:
        raise WatermarkError(
            "windowed: the DataFrame is not a stream; read it with spark.readStream, "
            "or use aion.LocalOperator for a finite table"
        )
    if not any(WATERMARK in field.metadata for field in df.schema) and not upstream.has_windows(df):
        raise WatermarkError(
            "windowed: the DataFrame has no watermark, so no window would ever run; call e.g. "
            ".withWatermark('ts', '20 seconds') before windowed, and keep that column in the DataFrame"
        )
    if any(WATERMARK in field.metadata for field in df.schema) and upstream.has_windows(df):
        raise WatermarkError(
            "windowed: the DataFrame has results of another aion.windowed and a watermark of its own. Spark uses the "
            "smallest watermark of a query, so each would wait for the other, and nothing would come out. Leave this "
            "withWatermark out: panes bring the watermark of the windows before (docs/how-to/chaining.md)"
        )
