"""Spark's other encoding of state, for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

ENCODING = "spark.sql.streaming.stateStore.encodingFormat"


@pytest.fixture
def avro(spark: SparkSession) -> Iterator[None]:
    spark.conf.set(ENCODING, "avro")
    yield
    spark.conf.unset(ENCODING)
