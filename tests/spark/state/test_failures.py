"""How a query that fails says why: what it raises, and what it writes to the standard error of its program."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from aion.spark.session.failures import brief
from tests.spark.program import Program


@pytest.mark.parametrize("ask", ["show", "toPandas", "collect", "count", "write"])
def test_who_asks_a_stream_for_its_rows_is_told_what_to_do(spark: SparkSession, tmp_path: Path, ask: str) -> None:
    events = spark.readStream.schema("k string, ts timestamp").parquet(str(tmp_path)).withWatermark("ts", "1 second")
    panes = aion.windowed(events, key="k", time="ts", windows=aion.Tumbling("1 minute"), aggregates={"n": A.count()})
    for df in (panes, aion.panes(panes).select("n")):
        with pytest.raises(AnalysisException) as raised, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # toPandas warns of the same error
            getattr(df, ask)()
        assert str(raised.value).startswith("A stream, such as the result of aion.windowed, has no rows before")
        assert str(raised.value).count("A stream, such") == 1 and "streaming" in str(raised.value)
    with pytest.raises(AnalysisException) as other:
        spark.sql("SELECT nothing").collect()
    assert "aion" not in str(other.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apply", "apply, asked later"])
def test_the_error_of_a_users_function_comes_first_and_once_with_his_lines(program: Program, name: str) -> None:
    first, *more = program.said[name].splitlines()
    assert first.startswith("ApplyError: apply for key (")
    assert ": KeyError: " in first
    assert len(more) <= 20
    assert any('queries.py", line' in line and "in looks_up" in line for line in more)
    assert "    return names[event.num_rows]" in more
    assert not any("ApplyError" in line or "pyspark" in line or "aion/" in line for line in more)
    assert any("runId = " in line for line in more)


@pytest.mark.slow
def test_state_that_is_not_there_is_not_called_damage_but_looked_for(program: Program) -> None:
    assert "begun" not in program.said
    first, *more = program.said["state deleted"].splitlines()
    assert first.startswith(
        f"MissingState: the state of operator 'windowed' is not in {program.folder}/aion-state, where it is looked for "
        "because state.dir is not set: 'aion-state' in the folder in which the driver was started. Set "
        "spark.aion.state.dir to the folder that has it; if it was deleted, start with a new checkpoint. Spark "
    )
    assert len(more) <= 20


@pytest.mark.slow
def test_the_log_has_the_error_without_the_calls_inside_spark(program: Program) -> None:
    assert any("ApplyError: apply for key (" in line for line in program.log)
    assert any("in looks_up" in line for line in program.log)
    assert [line for line in program.log if line.startswith("\tat ")] == []
    assert len(program.log) < 150  # of two queries that fail


@pytest.mark.slow
def test_the_errors_of_stock_spark_stay_as_they_are(program: Program) -> None:
    text = program.said["stock"]
    assert text.startswith("[STREAM_FAILED]")
    assert "Traceback (most recent call last):" in text
    assert "Logical Plan:" in text
    assert any(line.startswith("\tat org.apache.spark") for line in program.stock_log)


@pytest.mark.slow
def test_a_program_that_ends_after_an_error_does_not_fail_again(program: Program) -> None:
    assert [line for line in program.stock_log if "ListenerBus" in line] == []


ABORTED = """\
[STREAM_FAILED] Query [id = a, runId = b] terminated with exception: Job aborted due to stage failure: Task 0 in stage \
3.0 failed 4 times, most recent failure: Lost task 0.3: org.apache.spark.api.python.PythonException: \
[PYTHON_EXCEPTION] An exception was thrown from the Python worker: state_backends.format.errors.ForeignState: the \
state is another's
 SQLSTATE: 38000
\tat org.apache.spark
Driver stacktrace: SQLSTATE: XXKST
=== Streaming Query ===
Logical Plan:
"""


def test_an_error_in_an_aborted_job_is_as_brief() -> None:
    assert brief(ABORTED) == "ForeignState: the state is another's\nQuery [id = a, runId = b]"


OF_A_SINK = """\
[STREAM_FAILED] Query [id = a, runId = b] terminated with exception: [FOREACH_BATCH_USER_FUNCTION_ERROR] An error \
occurred in the user provided function in foreach batch sink. Reason: An exception was raised by the Python Proxy. \
Return Message: Traceback (most recent call last):
  File "pyspark/sql/utils.py", line 163, in call
    self.func(DataFrame(jdf, wrapped_session_jdf), batch_id)
aion.errors.SinkError: the table has batch 5
 SQLSTATE: 39000 SQLSTATE: XXKST
=== Streaming Query ===
Logical Plan:
"""


def test_an_error_of_a_sink_is_as_brief() -> None:
    assert brief(OF_A_SINK) == "SinkError: the table has batch 5\nQuery [id = a, runId = b]"


def test_an_error_that_is_not_aions_is_not_changed() -> None:
    text = ABORTED.replace("state_backends.format.errors.ForeignState", "ValueError")
    assert brief(text) == text
    text = OF_A_SINK.replace("aion.errors.SinkError", "ValueError")
    assert brief(text) == text
    asked = f"{ABORTED}\n\nJVM stacktrace:\nat x"
    assert brief(asked) == asked
