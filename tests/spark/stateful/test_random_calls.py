"""Random calls of the whole state API: each returns the same, and of the same types, on Spark's store and on Aion's."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from pyspark.sql import SparkSession

from tests.spark.stateful.interpreter import OUTPUT, SCALARS, Interpreter
from tests.spark.stateful.programs import COLUMNS, Program, a_program
from tests.spark.stateful.rig import Case, Output, both, compare


def how_many_calls() -> int:
    """The profile says how many: a few hundred by itself, tens of thousands for ``make proof``."""
    return (40 if settings.default.derandomize else 100) * settings.default.max_examples


def the_seed() -> int:
    """Always the same by itself, another one each time for ``make proof``."""
    profile = settings.default
    assert profile is not None
    return 1 if profile.derandomize else Random(os.urandom(8)).randrange(2**31)


@pytest.mark.parametrize(
    ("pandas", "time_mode"),
    [
        pytest.param(False, "eventTime", id="rows with timers"),
        pytest.param(True, "eventTime", id="pandas with timers"),
        pytest.param(True, "none", id="pandas"),
        pytest.param(False, "none", id="rows"),
    ],
)
@pytest.mark.proof
@pytest.mark.timeout(900)
def test_every_call_returns_what_it_returns_on_spark(
    spark: SparkSession, tmp_path: Path, pandas: bool, time_mode: str
) -> None:
    seed = the_seed()
    program = a_program(seed, how_many_calls(), timers=time_mode != "none")
    case = Case(
        lambda: Interpreter(pandas),
        COLUMNS,
        OUTPUT,
        program.batches,
        time_mode=time_mode,
        pandas=pandas,
        watermark=("ts", "5 seconds"),
        restart_after=program.restart_after,
    )
    aions, sparks = both(spark, tmp_path, lambda: case)
    check_calls(program, aions, sparks, seed)
    compare(aions, sparks)
    returned = sum(len(rows) for rows in sparks.values())
    assert returned >= sum(map(len, program.batches)) * (0.9 if time_mode == "none" else 0.5), "the test lost its calls"


OF_OTHER_TYPES = {
    "flag": ["1", "'x'"],
    "tiny": ["128", "300", "True"],
    "small": ["2**15"],
    "number": ["2**31", "1.0"],
    "long": ["2**63", "True", "'7'", "Decimal(7)"],
    "real": ["5", "0.1"],
    "double": ["5", "True", "Decimal('1.5')", "'x'"],
    "text": ["5", "1.5", "True", "[1]", "{'a': 1}"],
    "bytes": ["'abc'", "bytearray(b'abc')", "5"],
    "day": ["5", "'2020-01-01'", "datetime.datetime(2020, 1, 1, 5)"],
    "at": ["5", "datetime.date(2020, 1, 1)", "datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)"],
    "local": ["datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))"],
    "price": ["1.5", "1", "'1.5'", "Decimal('NaN')", "Decimal('1.005')", "Decimal('-0.00')"],
    "huge": ["1", "Decimal('1e-19')"],
}


@pytest.mark.proof
@pytest.mark.parametrize("pandas", [False, True], ids=["rows", "pandas"])
def test_values_of_other_types_become_what_they_become_on_spark(
    spark: SparkSession, tmp_path: Path, pandas: bool
) -> None:
    """Many become null without a word, such as 5 in a column of doubles."""
    calls = []
    for name, values in OF_OTHER_TYPES.items():
        place = list(SCALARS).index(name)
        for value in values:
            row = ", ".join(value if at == place else "None" for at in range(len(SCALARS)))
            calls += [f"('scalars', 'update', ({row}))", "('scalars', 'get')"]
    others = ["('count', 'update', [7])", "('count', 'get')", "('count', 'update', Row(n=8))", "('count', 'get')"]
    others += ["('count', 'update', 5)", "('log', 'appendValue', 'ab')", "('log', 'get')", "('log', 'put', None)"]
    others += ["('by_text', 'updateValue', (1,), (2,))", "('by_text', 'containsKey', ['1'])", "('by_text', 'iterator')"]
    program = Program([[("a", 1.0, seq, call) for seq, call in enumerate([*calls, *others])]], [])
    case = Case(lambda: Interpreter(pandas), COLUMNS, OUTPUT, program.batches, pandas=pandas)
    aions, sparks = both(spark, tmp_path, lambda: case)
    check_calls(program, aions, sparks, seed=0)
    compare(aions, sparks)


def check_calls(program: Program, aions: Output, sparks: Output, seed: int) -> None:
    """AssertionError with the first call that differs, and with those before it on the same state."""
    for batch in sorted(aions.keys() | sparks.keys()):
        returned = [{row[:2]: row[2] for row in of.get(batch, ()) if row[1] >= 0} for of in (aions, sparks)]
        for key, seq in sorted(returned[0].keys() | returned[1].keys(), key=lambda at: at[1]):
            one, other = (of.get((key, seq), "not called") for of in returned)
            assert one == other, "\n".join(
                [
                    f"seed {seed}, batch {batch}, key {key!r}, call {seq}: Aion {one}",
                    f"Spark {other}",
                    "after",
                    *program.before(key, seq)[-20:],
                ]
            )


@pytest.mark.proof
@pytest.mark.parametrize("pandas", [False, True], ids=["rows", "pandas"])
@pytest.mark.parametrize("ttl_ms", [1, 86_400_000], ids=["a millisecond", "a day"])
@pytest.mark.timeout(900)
def test_every_call_on_state_that_expires(spark: SparkSession, tmp_path: Path, pandas: bool, ttl_ms: int) -> None:
    """State of a millisecond lives as long as its batch, and state of a day to the end of the test."""
    seed = the_seed()
    program = a_program(seed, how_many_calls(), timers=False)
    case = Case(
        lambda: Interpreter(pandas, ttl_ms), COLUMNS, OUTPUT, program.batches, time_mode="processingTime", pandas=pandas
    )
    aions, sparks = both(spark, tmp_path, lambda: case)
    check_calls(program, aions, sparks, seed)
    compare(aions, sparks)
