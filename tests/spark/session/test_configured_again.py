"""A second ``aion.configure`` on a session that has had queries."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from tests.spark.conftest import EVENTS_DDL, FileStream


@pytest.fixture
def used(spark: SparkSession, stream: FileStream) -> Iterator[SparkSession]:
    """A session in which an operator was made. Its settings are put back."""
    before = dict(spark.conf.getAll)
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    aion.windowed(events, time="ts", windows=aion.Tumbling("1 minute"), aggregates={"n": A.count()})
    yield spark
    for key in [key for key in spark.conf.getAll if key.startswith("spark.aion.")]:
        spark.conf.unset(key)
    for key, value in before.items():
        if key.startswith("spark.aion."):
            spark.conf.set(key, value)


def warned(caplog: pytest.LogCaptureFixture, spark: SparkSession, **settings: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "aion"):
        assert aion.configure(SparkSession.builder, **settings).getOrCreate() is spark
    found = [record for record in caplog.records if record.name.startswith("aion.")]
    return [record.getMessage() for record in found if record.levelno >= logging.WARNING]


def test_what_it_cannot_change_is_named(used: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = warned(caplog, used, memory_victim="slowest", destage_idle_after="1 minute", lateness_coverage=0.5)
    assert "so spark.aion.memory.victim, spark.aion.destage.idle_after cannot change until the application ends" in line
    assert used.conf.get("spark.aion.lateness.coverage") == "0.5", "this holds for the next operator"


def test_the_same_settings_again_and_those_that_can_change_say_nothing(
    used: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    assert warned(caplog, used) == []
    assert warned(caplog, used, memory_victim="largest", lateness_coverage=0.5) == []
