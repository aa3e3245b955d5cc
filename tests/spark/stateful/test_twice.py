"""The result of one processor in two places of a query."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import aion
from aion.errors import ConfigError
from tests.spark.conftest import FileStream
from tests.spark.stateful import processors as p
from tests.spark.stateful.rig import Case, Output, compare, grouped_by_spark, run, to_the_end

CASE = Case(p.Count, [("k", pa.string())], "key string, n bigint", [[("a",), ("b",), ("a",)], [("b",)]], pandas=False)


def split(low: DataFrame, high: DataFrame) -> DataFrame:
    return low.where("n < 2").union(high.where("n >= 2"))


@pytest.mark.proof
def test_it_is_refused_and_what_the_error_says_to_do_gives_the_rows_of_stock_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    stream = FileStream(spark, tmp_path / "input", pa.schema(CASE.columns))

    def counted(name: str) -> Any:
        grouped = aion.group_by(stream.read("k string"), "k", name=name)
        return grouped.transformWithState(p.Count(), CASE.output, "update", "none")

    stream.put(CASE.batches[0])
    once = counted("counts")
    with pytest.raises(ConfigError, match="the operator 'counts' is used twice in this query"):
        to_the_end(split(once, once), tmp_path / "refused", CASE, {})
    stream.put(CASE.batches[1])
    made_twice: Output = {}
    to_the_end(split(counted("low"), counted("high")), tmp_path / "twice", CASE, made_twice)
    stocks = run(spark, tmp_path / "stock", Case(**{**vars(CASE), "then": lambda df: split(df, df)}), grouped_by_spark)
    compare(made_twice, stocks)
    assert len(stocks) == 2
