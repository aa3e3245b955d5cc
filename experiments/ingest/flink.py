"""Flink as a contender of ``aion experiment ingest``: its jars, its program (``FlinkWindows.java``), and a run of it.

Flink is no dependency of Aion. Whoever wants the comparison downloads its jars from PyPI and passes their path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.shared.generate import EventPlan
from experiments.shared.stream import SKIPPED_BATCHES, Run

PROGRAM = Path(__file__).with_name("FlinkWindows.java")
LIBRARY = re.compile(r"pyflink/lib/.*\.jar")
CHECKPOINT_MS = 2_000
HEAP = "6g"
# What Flink's own start script opens to its serialisers on Java 17.
OPENED = ("java.base/java.util", "java.base/java.lang", "java.base/java.time")
HOW_TO_GET = (
    "Flink is not measured. For its jars (330 MB): pip download --no-deps -d out apache-flink-libraries==2.3.0, "
    "then --flink out/apache_flink_libraries-2.3.0-py2.py3-none-any.whl"
)


class FlinkError(RuntimeError):
    """Flink's jars or a Java compiler are missing, or a run failed. The message has the end of what it printed."""


@dataclass(frozen=True, slots=True)
class FlinkJob:
    """A contender: Flink with one of its state backends, and with events kept for a function or a running mean."""

    label: str
    backend: Literal["hashmap", "rocksdb"]
    mode: Literal["kept", "mean"]
    is_aion: bool = False


JOBS = {
    "flink-heap": FlinkJob("Flink, heap, events kept", "hashmap", "kept"),
    "flink-rocksdb": FlinkJob("Flink, RocksDB, events kept", "rocksdb", "kept"),
    "flink-mean": FlinkJob("Flink, heap, running mean", "hashmap", "mean"),
}


@dataclass(frozen=True, slots=True)
class Load:
    """The stream of a run, as ``experiments.shared.generate.EventPlan`` describes it. Times in milliseconds."""

    events_per_batch: int
    batches: int
    cores: int
    payload_bytes: int
    keys: int
    late_percent: int
    past_windows: int
    span_ms: int
    window_ms: int

    @classmethod
    def of(cls, plan: EventPlan, batches: int, cores: int) -> Load:
        return cls(
            events_per_batch=plan.events_per_batch,
            batches=batches,
            cores=cores,
            payload_bytes=plan.payload_bytes,
            keys=plan.keys,
            late_percent=round(plan.late_share * 100),
            past_windows=plan.past_windows,
            span_ms=plan.span_us // 1_000,
            window_ms=plan.window_us // 1_000,
        )


class Flink:
    """Flink's program, compiled once. ``jars``: a folder with them, or the wheel that has them."""

    def __init__(self, jars: Path, work: Path) -> None:
        libraries = sorted(str(jar.absolute()) for jar in _unpacked(jars, work).rglob("*.jar"))
        if not any("flink-dist" in jar for jar in libraries):
            raise FlinkError(f"no flink-dist jar in {jars}. {HOW_TO_GET}")
        self._libraries = os.pathsep.join(libraries)
        self._classes = _compiled(self._libraries, work)

    def run(self, job: FlinkJob, load: Load, work_dir: Path) -> Run:
        """One run to the end of the stream. The rate is that of the events after the first two batches."""
        events = load.events_per_batch * load.batches
        with tempfile.TemporaryDirectory(dir=work_dir, prefix="flink-") as checkpoints:
            command = [
                *("java", f"-Xmx{HEAP}"),
                *(f"--add-opens={name}=ALL-UNNAMED" for name in OPENED),
                *("-cp", f"{self._libraries}{os.pathsep}{self._classes}", PROGRAM.stem, job.backend, job.mode),
                *map(str, (load.cores, events, load.events_per_batch * SKIPPED_BATCHES, load.events_per_batch)),
                *map(str, (load.span_ms, load.window_ms, load.keys, load.payload_bytes)),
                *map(str, (load.late_percent, load.past_windows)),
                *(str(Path(checkpoints).absolute()), str(CHECKPOINT_MS)),
            ]
            printed = _printed(command)
        return as_run(job, load, json.loads(next(line for line in printed.splitlines() if line.startswith("{"))))


def as_run(job: FlinkJob, load: Load, found: dict[str, Any]) -> Run:
    """A run from the line that the program printed. Raises FlinkError if events are missing or were dropped."""
    events = load.events_per_batch * load.batches
    if found["events"] != events or found["dropped"]:
        raise FlinkError(f"{job.label}: {found['events']:,} of {events:,} events, {found['dropped']:,} dropped")
    return Run(
        events=events,
        steady_events_per_s=load.events_per_batch * (load.batches - SKIPPED_BATCHES) / found["measured_s"],
        whole_events_per_s=events / found["wall_s"],
        wall_s=found["wall_s"],
        dropped_by_spark=0,
        progress=[{**asdict(load), **found}],
    )


def _unpacked(jars: Path, work: Path) -> Path:
    """The folder of the jars. A wheel is unpacked once."""
    if jars.is_dir():
        return jars
    if not zipfile.is_zipfile(jars):
        raise FlinkError(f"{jars} is neither a folder nor a wheel. {HOW_TO_GET}")
    folder = work / jars.stem
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=work) as unfinished, zipfile.ZipFile(jars) as wheel:
            wheel.extractall(unfinished, [name for name in wheel.namelist() if LIBRARY.fullmatch(name)])
            shutil.copytree(unfinished, folder)
    return folder


def _compiled(libraries: str, work: Path) -> Path:
    """The folder with the program's classes. It is compiled again when the program or the jars are others."""
    if shutil.which("javac") is None:
        raise FlinkError(
            "there is no javac; Flink's program is compiled with a JDK, for example openjdk-17-jdk-headless"
        )
    digest = hashlib.sha256(PROGRAM.read_bytes() + libraries.encode()).hexdigest()[:10]
    folder = work / f"flink-classes-{digest}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=work) as unfinished:
            _printed(["javac", "-cp", libraries, "-d", unfinished, str(PROGRAM)])
            shutil.copytree(unfinished, folder)
    return folder


def _printed(command: list[str]) -> str:
    """What a command printed. Raises FlinkError with its last lines if it failed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise FlinkError(f"{command[0]} ended with {done.returncode}:\n{last}")
    return done.stdout
