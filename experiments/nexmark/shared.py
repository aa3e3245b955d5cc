"""What a query of Nexmark is, and what several need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from experiments.nexmark.events import SECOND_US

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TEN_S, TWO_S = 10 * SECOND_US, 2 * SECOND_US
DELAY = "2 seconds"
Row = tuple[Any, ...]


@dataclass(frozen=True)
class Query:
    """``asks``: what it answers. ``mode``: Spark's output mode for stock Spark. ``rows``: of a batch of the result."""

    asks: str
    aion: Callable[[DataFrame], DataFrame]
    spark: Callable[[DataFrame], DataFrame]
    truth: Callable[[pa.Table], set[Row]]
    newest: Callable[[list[Mapping[str, Any]]], set[Row]]
    mode: str = "append"
    by_arrival: bool = False


def us(instant: Any) -> int:
    found: int = round(instant.timestamp() * SECOND_US)
    return found


def of_kind(table: pa.Table, *kinds: str) -> pa.Table:
    return table.filter(pa.compute.is_in(table.column("kind"), pa.array(kinds)))


def times(table: pa.Table) -> Any:
    return table.column("ts").cast(pa.int64()).to_numpy()
