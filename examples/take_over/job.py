"""A job as many have it: stock Spark, with a stateful processor. Nothing in it knows Aion."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle


class Balance(StatefulProcessor):
    """What each account has, and how many bookings made it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.balance = handle.getValueState("balance", "total bigint, bookings bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total, bookings = self.balance.get() or (0, 0)
        for row in rows:
            total, bookings = total + row["amount"], bookings + 1
        self.balance.update((total, bookings))
        yield Row(account=key[0], total=total, bookings=bookings)

    def close(self) -> None: ...


def main(bookings: str, checkpoint: str, result: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    stream = spark.readStream.schema("account string, amount bigint").option("maxFilesPerTrigger", 1).parquet(bookings)
    balances = stream.groupBy("account").transformWithState(
        Balance(), "account string, total bigint, bookings bigint", "Update", "None"
    )

    def write(batch: Any, number: int) -> None:
        batch.coalesce(1).write.mode("overwrite").parquet(f"{result}/batch={number}")

    writer = balances.writeStream.outputMode("update").option("checkpointLocation", checkpoint).foreachBatch(write)
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
