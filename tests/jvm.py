"""Spark's classes, loaded and verified once for all JVMs of a test run instead of once in each: class data sharing.

Of what a session and its first query take, loading classes is a fifth. ``python -m tests.jvm FILE`` writes them into
an archive; a JVM that finds none there, or one of another Java or Spark, loads its classes as ever.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHIVE = "AION_TEST_JVM_ARCHIVE"


def java() -> Path:
    home = os.environ.get("JAVA_HOME")
    return (Path(home, "bin", "java") if home else Path(shutil.which("java") or "java")).resolve()


def archive_in(folder: Path) -> Path:
    """Where the archive is to be, for the Java and the Spark that there are."""
    import pyspark

    what = f"{java()} {pyspark.__file__} {pyspark.__version__}"
    return folder / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.jsa"


def begin(archive: Path) -> subprocess.Popen[bytes]:
    """Starts writing the archive; it is there, whole, when the process has ended."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.jvm", str(archive)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def options() -> str:
    """Of a JVM that runs queries of a few rows: to compile them well would take it longer than they run."""
    archive = os.environ.get(ARCHIVE, "")
    # What is handed over in the environment is split at blanks: a folder with one in its name has no archive.
    usable = len(archive.split()) == 1
    return "-XX:TieredStopAtLevel=1" + (f" -XX:SharedArchiveFile={archive}" if usable else "")


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


def write(archive: Path) -> None:
    """Runs a streaming query, so that its classes are loaded, in a JVM that leaves them in the archive."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    begun = archive.with_name(f"{archive.name}.{os.getpid()}")
    wanted = f"--driver-java-options '-XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit={begun}'"
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--master local[2] {wanted} pyspark-shell"
    with tempfile.TemporaryDirectory() as folder:
        builder = (
            SparkSession.builder.appName("classes")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "1")
            .config("spark.sql.warehouse.dir", f"{folder}/warehouse")
            .config(
                "spark.sql.streaming.stateStore.providerClass",
                "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
            )
        )
        spark = builder.getOrCreate()
        spark.range(10).write.parquet(f"{folder}/in")
        times = spark.readStream.schema("id bigint").parquet(f"{folder}/in")
        times = times.withColumn("t", F.timestamp_seconds("id")).withWatermark("t", "0 seconds")
        counts = times.groupBy(F.window("t", "2 seconds")).agg(F.count("*").alias("n")).select("window.start", "n")
        query = counts.writeStream.format("parquet").trigger(availableNow=True)
        query.option("path", f"{folder}/out").option("checkpointLocation", f"{folder}/cp").start().awaitTermination()
        spark.read.parquet(f"{folder}/out").toPandas()
        spark.stop()
    stop()
    # One that is cut short makes a JVM that takes it crash.
    subprocess.run([java(), f"-XX:SharedArchiveFile={begun}", "-version"], check=True)
    begun.rename(archive)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
