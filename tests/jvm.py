"""The JVM of a test run: made for queries of a few rows, and ended with the run."""

from __future__ import annotations

import sys

# To compile queries of a few rows well takes longer than to run them.
OPTIONS = "-XX:TieredStopAtLevel=1"


def stop() -> None:
    """Ends the JVM that pyspark keeps for the next session, and so the executors and the state servers in it."""
    pyspark = sys.modules.get("pyspark")
    gateway = pyspark.SparkContext._gateway if pyspark else None
    if gateway is not None:
        assert pyspark is not None
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(60)
        pyspark.SparkContext._gateway = pyspark.SparkContext._jvm = None
