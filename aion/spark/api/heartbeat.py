"""The heartbeat as a source of Spark: its offsets are decisions, its rows are times for the watermark.

Spark runs the reader in a process of its own, on the host of the driver. It asks the driver how far its query is
(:mod:`aion.spark.start.positions`).
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructField, StructType, TimestampType

from aion.core.heartbeat import RUN, Beat, Heartbeat, HeartbeatSettings, Position
from aion.errors import StateError
from state_backends.server.server_folder import private

AT = "at"
_DELAY = "delay_us"
"""The delay of the watermark when an offset was decided, in that offset."""
_ROWS = pa.schema([(AT, pa.timestamp("us", "UTC"))])
_ANSWER_SECONDS = 120.0


class HeartbeatSource(DataSource):
    """``spark.readStream.format("aion_heartbeat")``. Options: the path of the driver's ``socket``, the ``delay_us`` of
    the watermark, and the fields of :class:`aion.core.heartbeat.HeartbeatSettings`.
    """

    @classmethod
    def name(cls) -> str:
        return RUN

    def schema(self) -> StructType:
        return StructType([StructField(AT, TimestampType())])

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        given = self.options
        numbers = {name: int(given[name]) for name in ("idle_us", "close_us", "until_us") if name in given}
        return _Reader(HeartbeatSettings(**numbers), given["socket"], int(given[_DELAY]))


class _Reader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, settings: HeartbeatSettings, driver: str, delay_us: int) -> None:
        self._run = uuid.uuid4().hex
        self._heartbeat = Heartbeat(self._run, settings)
        self._driver = driver
        self._delay_us = delay_us

    def prepareForTriggerAvailableNow(self) -> None:
        self._heartbeat.end_at(_now_us())

    def initialOffset(self) -> dict[str, Any]:
        return Beat().offset()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        beat = self._heartbeat.next(Beat.of(start), _now_us(), self._position)
        return {**beat.offset(), _DELAY: self._delay_us}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        # The watermark is where it was decided, although a restart may have changed the delay since.
        time_us, delay_us = Beat.of(end).time_us, end.get(_DELAY, self._delay_us)
        return [] if time_us is None else [InputPartition(time_us - delay_us + self._delay_us)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays([pa.array([partition.value], _ROWS.field(AT).type)], schema=_ROWS)

    def _position(self) -> Position:
        """Asks the driver how far this query is. Raises StateError and ServerError."""
        private(Path(self._driver).parent)  # nobody else can have put a socket there
        try:
            with socket.socket(socket.AF_UNIX) as driver:
                driver.settimeout(_ANSWER_SECONDS)
                driver.connect(self._driver)
                driver.sendall(f"{self._run}\n".encode())
                with driver.makefile("rb") as lines:
                    answer = json.loads(lines.readline() or b"{}")
        except OSError as error:
            raise StateError(f"the driver's Python does not say how far the query is: {error}") from error
        if "others" not in answer:
            raise StateError(
                f"the driver's Python does not know how far the query is: {answer.get('error', 'no answer')}"
            )
        watermark_us = answer["watermark_ms"] * 1000
        return Position(watermark_us + self._delay_us if watermark_us else None, tuple(answer["others"]))


def _now_us() -> int:
    return time.time_ns() // 1000
