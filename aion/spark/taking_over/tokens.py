"""The versions of shards that a checkpoint names. They are values in Spark's own state, one for each shard."""

from __future__ import annotations

import json

from pyspark.sql import SparkSession

from aion.spark.session.checkpoint_files import CheckpointFiles
from aion.spark.tasks.processor import ProcessorDefinition
from aion.spark.tasks.windows import WindowsDefinition

VARIABLES = (WindowsDefinition.STATE, ProcessorDefinition.STATE)
"""The state variables of windows and joins, and of stateful processors."""
_PYTHON = ("transformWithStateInPandasExec", "transformWithStateInPySparkExec")


def tokens_of(spark: SparkSession, files: CheckpointFiles, batch: int) -> list[dict[int, str]]:
    """Returns the versions after a batch, by shard, of each operator that has some. Spark keeps no names of operators.

    Raises PySparkException if Spark no longer has its state after that batch.
    """
    found = []
    operators = spark.read.format("state-metadata").option("batchId", batch).load(files.location).collect()
    for operator in operators:
        if operator["operatorName"] not in _PYTHON:
            continue
        said = json.loads(operator["operatorProperties"])["stateVariables"]
        names = [name for each in said if (name := each["stateName"]) in VARIABLES]
        if not names:
            continue
        state = spark.read.format("statestore").options(stateVarName=names[0], operatorId=str(operator["operatorId"]))
        rows = state.option("batchId", batch).load(files.location)
        if "token" not in rows.schema["value"].dataType.fieldNames():
            continue  # a processor of the user, with a variable of this name
        tokens = rows.selectExpr("key.*", "value.token").collect()
        found.append({int(shard): str(token) for shard, token in tokens if token is not None})
    return found
