"""A session that a command makes for its work, and stops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from aion.config.layers import Source as PolicySource
from aion.spark.api.configure import configure


@contextmanager
def session_of(
    command: str, settings: Mapping[str, str], policy: PolicySource | None = None, **overrides: Any
) -> Iterator[SparkSession]:
    """Makes a session, which is stopped at the end. ``policy``, ``overrides``: see ``configure``."""
    builder = SparkSession.builder.appName(f"aion {command}").config("spark.ui.enabled", "false")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = configure(builder, policy, **overrides).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()
