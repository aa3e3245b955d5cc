"""The process of one cell: Spark with one query. It logs its measurements line by line, so that a crash loses little.

``python -m experiments.memory_pressure.cell FOLDER`` reads ``cell.json`` there and writes ``started.json``,
``batches.jsonl`` (when each batch was done, and how long its executions took), ``progress.jsonl`` (Spark's reports),
``samples.jsonl`` (heap, garbage collection, state; once a second) and, at the end, ``done.json`` or ``error.txt``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from experiments.memory_pressure.settings import shape_of
from experiments.shared.state_server import state_server
from experiments.workloads import application, load, sources
from experiments.workloads.model import Probe

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession

SAMPLE_S = 1.0
POLL_S = 0.2
COLLECTORS = {"parallel": "-XX:+UseParallelGC", "g1": "-XX:+UseG1GC"}


JVM_SIZES = "-XX:MaxMetaspaceSize=320m -XX:ReservedCodeCacheSize=128m -XX:MaxDirectMemorySize=256m"
"""What a JVM may take beside its heap: classes, compiled code, buffers. Spark needs about half of each."""


def java_options(spec: Mapping[str, Any]) -> str:
    """The collector, and sizes. A heap without state has a fixed size, and all of it is in memory from the start.

    Otherwise it would grow with the garbage of a long run up to its limit, whatever is kept elsewhere. A heap that has
    the state grows with the state.
    """
    is_fixed = spec["floor"] or spec["native_bytes"]
    heap = [f"-Xms{spec['heap_bytes'] >> 20}m", "-XX:+AlwaysPreTouch"] if is_fixed else []
    return " ".join([COLLECTORS[spec["collector"]], *heap, JVM_SIZES])


class Timed(Probe):
    """Records when executions begin and end. ``began`` is before the first event is read, so that waiting counts."""

    def __call__(self, function: Any) -> Any:
        def timed(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> Any:
            began = time.time()
            found = function(key, window, events)
            if isinstance(found, pa.Table):
                stamps = [pa.repeat(pa.scalar(at, pa.float64()), found.num_rows) for at in (began, time.time())]
                return found.append_column("began", stamps[0]).append_column("ended", stamps[1])
            return {**found, "began": began, "ended": time.time()}

        return timed

    def schema(self, schema: str) -> str:
        return f"{schema}, began double, ended double"


def session(spec: dict[str, Any], folder: Path) -> SparkSession:
    """A fresh session with the cell's heap. It has Aion's settings only if it is a cell of Aion."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.driver.memory": f"{spec['heap_bytes'] >> 20}m",
        # A JVM without heap ends at once instead of lingering.
        "spark.driver.extraJavaOptions": f"{java_options(spec)} -XX:+ExitOnOutOfMemoryError",
        "spark.local.dir": str(folder / "work" / "spark"),
        "spark.sql.shuffle.partitions": str(spec["cores"]),
        "spark.sql.files.openCostInBytes": str(spec["cores"]),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.numRecentProgressUpdates": "20",
        "spark.sql.warehouse.dir": str(folder / "work" / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    settings |= application.settings_of(spec["backend"], spec.get("native_bytes"))
    builder = SparkSession.builder.master(f"local[{spec['cores']}]").appName(f"aion {spec['workload']}")
    for key, value in settings.items():
        builder = builder.config(key, value)
    if application.is_aion(spec["backend"]):
        import aion

        builder = aion.configure(builder, state_dir=str(folder / "work" / "state"))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def executions(rows: pa.Table) -> list[dict[str, Any]]:
    """By window and pane: events, and seconds from the start of the first call of its function to the end of the last.

    Rows without ``began`` come from stages with built-in aggregates.
    """
    if "began" not in rows.column_names or not rows.num_rows:
        return []
    wanted = ["stage", "window_start", "pane", "kind", "events", "began", "ended"]
    frame: pd.DataFrame = rows.select(wanted).to_pandas().dropna(subset=["began"])
    calls = frame.drop_duplicates(["stage", "window_start", "pane", "began", "ended"])
    found = calls.groupby(["stage", "window_start", "pane", "kind"], as_index=False).agg(
        events=("events", "sum"), began=("began", "min"), ended=("ended", "max")
    )
    found["seconds"] = found["ended"] - found["began"]
    records = found[["stage", "kind", "events", "seconds"]].to_dict("records")
    return [{str(name): value for name, value in record.items()} for record in records]


def panes_by_kind(rows: pa.Table) -> dict[str, int]:
    """How many windows of all stages were computed, by kind of pane."""
    windows = rows.select(["stage", "window_start", "pane", "kind"]).group_by(["stage", "window_start", "pane", "kind"])
    counts = windows.aggregate([]).group_by("kind").aggregate([([], "count_all")])
    return {row["kind"]: row["count_all"] for row in counts.to_pylist()}


class Watcher(threading.Thread):
    """Writes samples of the JVM and the state server, and Spark's progress reports, once a second."""

    def __init__(self, spark: SparkSession, query: Any, spec: dict[str, Any], folder: Path) -> None:
        super().__init__(name="watcher", daemon=True)
        self.spark, self.query, self.folder = spark, query, folder
        self.aion = application.is_aion(spec["backend"])
        self.reported = -1
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(SAMPLE_S):
            try:
                self.look()
            except Exception:  # the JVM may be gone; the thread that waits for the query reports that
                return

    def look(self) -> None:
        _append(self.folder / "samples.jsonl", {"t": time.time(), **heap(self.spark), **self.state()})
        for report in self.query.recentProgress:
            if report["batchId"] > self.reported:
                self.reported = report["batchId"]
                _append(self.folder / "progress.jsonl", abridged(report))

    def state(self) -> dict[str, Any]:
        if not self.aion:
            return {}
        import aion

        state = aion.metrics.state(self.spark)
        if state is None:
            return {}
        names = ("m_bucket_bytes", "disk_only_bytes", "failed_writes", "staging", "operators", "io")
        return {"state": {name: getattr(state, name) for name in names}}


def heap(spark: SparkSession) -> dict[str, Any]:
    """Bytes of heap in use, and [collections, milliseconds] so far of each garbage collector."""
    management = spark.sparkContext._jvm.java.lang.management.ManagementFactory
    beans = management.getGarbageCollectorMXBeans()
    gc = {bean.getName(): [bean.getCollectionCount(), bean.getCollectionTime()] for bean in beans}
    return {"heap": management.getMemoryMXBean().getHeapMemoryUsage().getUsed(), "gc": gc}


def abridged(report: Any) -> dict[str, Any]:
    """The parts of a progress report from which rates are computed."""
    from datetime import datetime

    return {
        "batch": report["batchId"],
        "t": datetime.fromisoformat(report["timestamp"]).timestamp(),
        "rows": report["numInputRows"],
        "ms": report["durationMs"],
        "dropped": sum(operator["numRowsDroppedByWatermark"] for operator in report["stateOperators"]),
        "state_rows": sum(operator["numRowsTotal"] for operator in report["stateOperators"]),
    }


def run(folder: Path) -> None:
    spec = json.loads((folder / "cell.json").read_text())
    workload = load(spec["workload"])
    shape = shape_of(spec)
    batches = spec["warm_up"] + spec["measured"]
    spark = session(spec, folder)
    system = spark.sparkContext._jvm.java.lang
    started = {"application": spark.sparkContext.applicationId, "java": system.System.getProperty("java.version")}
    (folder / "started.part").write_text(json.dumps({**started, "driver": os.getpid()}))
    (folder / "started.part").rename(folder / "started.json")

    def seen(batch: int, rows: pa.Table) -> None:
        done = {"batch": batch, "t": time.time(), "rows": rows.num_rows, "executions": executions(rows)}
        done["panes"] = panes_by_kind(rows)
        _append(folder / "batches.jsonl", done)

    data = Path(spec["data"])
    streams = sources.read(
        spark,
        workload,
        shape,
        batches=batches,
        folder=data if spec["source"] != "rate" else None,
        kafka=spec["kafka"] if spec["source"] == "kafka" else None,
        aion=application.runs_twice(spec["backend"]),
    )
    # Stock Spark copies a list before it calls the function, so the time of the call alone would be misleading.
    probe = Timed() if application.runs_twice(spec["backend"]) else Probe()
    panes = application.panes_of(workload, spec["backend"], streams, shape, probe, spec["policy"])
    at_once = spec["pace"] == "max" and spec["source"] != "rate"
    every = None if at_once else shape.window if spec["pace"] == "real" else "0 seconds"
    keep_us = (shape.past_windows + 4) * shape.window_us
    with _server(spec, started["application"], system, folder / "server.log"):
        query = application.start(
            workload, spec["backend"], panes, shape, folder / "work", every=every, keep_us=keep_us, seen=seen
        )
        watcher = Watcher(spark, query, spec, folder)
        watcher.start()
        try:
            while not query.awaitTermination(POLL_S):
                if every and _batches_done(folder) >= batches:
                    break
            watcher.done.set()
            watcher.join()
            watcher.look()
        finally:
            query.stop()
    (folder / "done.json").write_text(json.dumps(started))
    spark.stop()


def _server(spec: dict[str, Any], application_id: str, system: Any, log: Path) -> AbstractContextManager[Any]:
    """Runs the state server of a cell that has one of its own. The others have the usual one, which tasks start."""
    if spec["server"] is None:
        return nullcontext()
    return state_server(application_id, int(system.ProcessHandle.current().pid()), spec["server"], log)


def _batches_done(folder: Path) -> int:
    path = folder / "batches.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line, default=str) + "\n")


def end_with(parent: int) -> None:
    """Ends this process when its parent, the sweep, is gone: a sweep that was killed cannot end its cells."""
    while os.getppid() == parent:
        time.sleep(SAMPLE_S)
    os._exit(1)  # the JVM ends with the pipe that it reads from


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(os.getppid(),), name="parent", daemon=True).start()
    place = Path(sys.argv[1]).absolute()
    code = 0
    try:
        run(place)
    except BaseException:
        (place / "error.txt").write_text(traceback.format_exc())
        code = 1
    # Not sys.exit: threads that wait for a dead JVM would keep the process alive.
    sys.stderr.flush()
    os._exit(code)
