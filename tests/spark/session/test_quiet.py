"""What a query writes to the standard error of its program."""

from __future__ import annotations

import pytest

from tests.spark.program import Program

pytestmark = pytest.mark.slow


def test_spark_says_nothing_of_its_workers(program: Program) -> None:
    workers = ("TransformWithStateInPandas Python worker", "StateServer")
    assert [line for line in program.log if any(said in line for said in workers)] == []
    assert any(workers[0] in line for line in program.stock_log), "what is not Aion's stays as it is"


def test_what_the_user_prints_and_errors_still_show(program: Program) -> None:
    assert "the user prints" in program.lines
    assert any("the user's error" in line for line in program.lines)


def test_the_users_own_customization_runs_in_each_python(program: Program) -> None:
    # The program, the three processes in which Spark makes the operators, and the daemon of the workers.
    assert program.lines.count("the user customizes") >= 5
