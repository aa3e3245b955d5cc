"""Flink as a contender of ``aion experiment ingest``: its jars, its program (``FlinkWindows.java``), and a run of it.

Flink is no dependency of Aion. Whoever wants the comparison downloads its jars from PyPI and passes their path.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.shared.flink import CHECKPOINT_MS, FlinkError, class_path, found_by
from experiments.shared.generate import EventPlan
from experiments.shared.stream import SKIPPED_BATCHES, Run

PROGRAM = Path(__file__).with_name("FlinkWindows.java")


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
        self._class_path = class_path(PROGRAM, jars, work)

    def run(self, job: FlinkJob, load: Load, work_dir: Path) -> Run:
        """One run to the end of the stream. The rate is that of the events after the first two batches."""
        events = load.events_per_batch * load.batches
        with tempfile.TemporaryDirectory(dir=work_dir, prefix="flink-") as checkpoints:
            arguments = (
                *(job.backend, job.mode),
                *(load.cores, events, load.events_per_batch * SKIPPED_BATCHES, load.events_per_batch),
                *(load.span_ms, load.window_ms, load.keys, load.payload_bytes, load.late_percent, load.past_windows),
                *(Path(checkpoints).absolute(), CHECKPOINT_MS),
            )
            found = found_by(PROGRAM, self._class_path, arguments)
        return as_run(job, load, found)


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
