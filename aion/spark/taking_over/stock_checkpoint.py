"""The checkpoint of a query whose processors keep their state in Spark's own store: what it says, and the state."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructType

from aion.errors import ConfigError
from aion.spark.session.checkpoint_files import CheckpointFiles
from aion.spark.tasks.processor import ProcessorDefinition
from aion.spark.tasks.windows import WindowsDefinition
from aion.stateful.restore import TIMER, Declaration, key_column, state_column
from aion.stateful.variables import Kind

_KINDS = {"ValueState": Kind.VALUE, "ListState": Kind.LIST, "MapState": Kind.MAP}
_TIMERS = "TimerState"
_COLUMNS = {Kind.VALUE: "value", Kind.LIST: "list_value", Kind.MAP: "map_value"}
_METHODS = {"transformWithStateInPandasExec": True, "transformWithStateInPySparkExec": False}
"""Spark's operators that run a processor in Python. The value: whether its rows are frames of pandas."""
_OF_THE_JVM = "transformWithStateExec"


@dataclass(frozen=True)
class StockOperator:
    """A processor, as its state describes it. ``key``: the type of its keys. ``timers``: whether it may have some."""

    number: int
    pandas: bool
    time_mode: str
    output_mode: str
    key: StructType
    variables: tuple[Declaration, ...]
    timers: bool


class StockCheckpoint:
    """A checkpoint of a stopped query. Raises ConfigError if nothing in it can be taken over, and says why.

    ``batch``: the last batch that is complete. ``operators``: its processors in Python, by their numbers. ``others``:
    the names of all other operators with state. ``ids``: for each operator, the ids of the versions of its stores, by
    partition, or None if the checkpoint has a format without ids.
    """

    def __init__(self, spark: SparkSession, location: str) -> None:
        self._spark = spark
        self.files = CheckpointFiles(spark, location)
        if not self.files.exists("metadata") or not self.files.exists("offsets"):
            raise ConfigError(f"{location}: not the checkpoint of a streaming query; it has no metadata and no offsets")
        commits = self.files.batches("commits")
        if not commits:
            raise ConfigError(
                f"{location}: no batch of this query is complete, so there is no state; give the job a new checkpoint"
            )
        self.location = location
        self.batch = commits[-1]
        self.settings: Mapping[str, str] = self.files.metadata("offsets", self.batch)["conf"]
        self.watermark_ms = int(self.files.metadata("offsets", self.batch)["batchWatermarkMs"])
        commit = self.files.metadata("commits", self.batch)
        self.next_watermark_ms = int(commit.get("nextBatchWatermarkMs", 0))
        ids = commit.get("stateUniqueIds")
        self.ids = None if ids is None else {int(number): stores for number, stores in ids.items()}
        self.operators: dict[int, StockOperator] = {}
        self.others: dict[int, str] = {}
        self._find_operators()

    def state(self, operator: StockOperator) -> DataFrame:
        """Returns the state after the last complete batch. A row has a key, and one timer or the state of one variable.

        Lists are arrays, and maps are arrays of entries. Elements with a TTL are pairs of a value and an expiry.
        """
        parts = []
        if operator.timers:
            timers = self._read(operator.number, readRegisteredTimers="true")
            parts.append((TIMER, timers.select("key", F.col("expiration_timestamp_ms").alias(TIMER))))
        for number, variable in enumerate(operator.variables):
            content = F.col(_COLUMNS[variable.kind])
            name = state_column(number)
            found = self._variable(operator.number, variable.name)
            if variable.kind is Kind.MAP:
                content = F.map_entries(content)
            parts.append((name, found.select("key", content.alias(name))))
        types = {TIMER: LongType(), **{name: part.schema[name].dataType for name, part in parts}}
        names = [TIMER, *(state_column(number) for number in range(len(operator.variables)))]
        keys = [F.col("key").getField(f).alias(key_column(n)) for n, f in enumerate(operator.key.names)]
        rows = [
            part.select(*keys, *(F.col(n) if n == name else F.lit(None).cast(types[n]).alias(n) for n in names))
            for name, part in parts
        ]
        return reduce(DataFrame.union, rows)

    def _find_operators(self) -> None:
        self.files.check_path()
        found = self._spark.read.format("state-metadata").load(self.files.location)
        rows = {row["operatorId"]: row for row in found.collect()}
        if not rows:
            raise ConfigError(f"{self.location}: this query has no state; start it with Aion as it is")
        for number, row in sorted(rows.items()):
            name = row["operatorName"]
            if name == _OF_THE_JVM:
                raise ConfigError(
                    f"{self.location}: operator {number} is a processor in Scala or Java, which Aion cannot run"
                )
            if name in _METHODS:
                self.operators[number] = self._operator(number, name, json.loads(row["operatorProperties"]))
            else:
                self.others[number] = name
        if not self.operators:
            raise ConfigError(
                f"{self.location}: no transformWithState in Python is among the operators of this query, which are "
                f"{', '.join(self.others.values())}"
            )

    def _operator(self, number: int, name: str, properties: Mapping[str, Any]) -> StockOperator:
        variables = {found["stateName"]: found for found in properties["stateVariables"]}
        if ProcessorDefinition.STATE in variables or self._has_windows(number, variables):
            raise ConfigError(f"{self.location}: operator {number} runs on Aion already")
        kinds = {found["stateVariableType"] for found in variables.values()}
        if unknown := kinds - {*_KINDS, _TIMERS}:
            raise ConfigError(f"{self.location}: operator {number} has state of a kind that is not known: {unknown}")
        declared = []
        for variable in sorted(variables):
            kind = _KINDS.get(variables[variable]["stateVariableType"])
            if kind is not None:
                declared.append(self._declaration(number, variable, kind, variables[variable]["ttlEnabled"]))
        timers = any(found["stateVariableType"] == _TIMERS for found in variables.values())
        if not declared and not timers:
            raise ConfigError(f"{self.location}: operator {number} has no state variable and no timer to take over")
        first = (
            self._variable(number, declared[0].name) if declared else self._read(number, readRegisteredTimers="true")
        )
        key = first.schema["key"].dataType
        assert isinstance(key, StructType)
        return StockOperator(
            number=number,
            pandas=_METHODS[name],
            time_mode=properties["timeMode"],
            output_mode=properties["outputMode"],
            key=key,
            variables=tuple(declared),
            timers=timers,
        )

    def _has_windows(self, number: int, variables: Collection[str]) -> bool:
        """Returns whether this is an operator of ``aion.windowed``."""
        if WindowsDefinition.STATE not in variables:
            return False
        fields = self._variable(number, WindowsDefinition.STATE).schema["value"].dataType
        return isinstance(fields, StructType) and fields.names == WindowsDefinition.schema().names

    def _declaration(self, number: int, name: str, kind: Kind, expires: bool) -> Declaration:
        stored: Any = self._variable(number, name).schema[_COLUMNS[kind]].dataType
        key = None
        if kind is Kind.LIST:
            stored = stored.elementType
        elif kind is Kind.MAP:
            key, stored = stored.keyType, stored.valueType
        return Declaration(name, kind, stored["value"].dataType if expires else stored, key, expires)

    def _variable(self, operator: int, name: str) -> DataFrame:
        return self._read(operator, stateVarName=name, flattenCollectionTypes="false")

    def _read(self, operator: int, **options: str) -> DataFrame:
        reader = self._spark.read.format("statestore").options(**options)
        return reader.option("operatorId", operator).option("batchId", self.batch).load(self.files.location)
