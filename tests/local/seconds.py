"""An operator of ten-second windows, and events for it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import aion
from aion import aggregates as A


def at(*seconds: float | None) -> pa.Array:
    return pa.array([None if s is None else round(s * 1_000_000) for s in seconds], pa.int64()).cast(
        pa.timestamp("us", "UTC")
    )


EVENTS = pa.table({"ts": at(1), "k": ["a"], "v": [1], "l": [[1]]})


def seconds_operator(**options: Any) -> aion.LocalOperator:
    defaults: dict[str, Any] = {"windows": aion.Tumbling("10 s"), "time": "ts", "aggregates": {"n": A.count()}}
    return aion.LocalOperator(**(defaults | options))


def applying(function: Any, schema: Any = "n bigint", **options: Any) -> aion.LocalOperator:
    return seconds_operator(aggregates=None, apply=aion.Apply(function, schema), **options)
