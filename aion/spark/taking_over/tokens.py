"""The versions of shards that a checkpoint names. They are values in Spark's own state, one for each shard."""

from __future__ import annotations

import json

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aion.errors import ConfigError
from aion.spark.session.checkpoint_files import CheckpointFiles
from aion.spark.tasks.processor import ProcessorDefinition
from aion.spark.tasks.windows import WindowsDefinition

VARIABLES = (WindowsDefinition.STATE, ProcessorDefinition.STATE)
"""The state variables of windows and joins, and of stateful processors."""
_PYTHON = ("transformWithStateInPandasExec", "transformWithStateInPySparkExec")


def tokens_of(spark: SparkSession, files: CheckpointFiles, batch: int) -> list[dict[int, str]]:
    """Returns the versions after a batch, by shard, of each operator that has some. Spark keeps no names of operators.

    Raises ConfigError if Spark cannot read its state after that batch, or no longer has it.
    """
    try:
        return _tokens_of(spark, files, batch)
    except PySparkException as error:
        files.check_path()
        raise ConfigError(f"{files.location}: Spark does not have its state after batch {batch} any more") from error
    except Py4JJavaError as error:
        first, *_ = str(error.java_exception).splitlines()
        raise ConfigError(
            f"{files.location}: Spark cannot read its state. If the checkpoint was moved, put its folder state back "
            f"where it was, too, because Spark knows files in it by their whole path ({first})"
        ) from error


def _tokens_of(spark: SparkSession, files: CheckpointFiles, batch: int) -> list[dict[int, str]]:
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
