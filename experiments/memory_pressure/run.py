"""Runs cells, each in a fresh process tree under its limit. Keeps each result as a file, so that a sweep can resume."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aion.errors import ConfigError
from experiments.memory_pressure import flink_cell
from experiments.memory_pressure.agreement import agreement
from experiments.memory_pressure.limits import Limit, limited
from experiments.memory_pressure.measure import lines_of, measured
from experiments.memory_pressure.page_cache import Evictor
from experiments.memory_pressure.settings import Cell, Settings, cell_spec, cells, shape_of
from experiments.shared import bench
from experiments.shared.flink import class_path
from experiments.shared.tree import Tree, my_environment
from experiments.workloads import load, sources, topics
from experiments.workloads.application import FLINK

LOOK_S, SAMPLE_S = 0.25, 1.0
OUT_OF_MEMORY = (
    "java.lang.OutOfMemoryError",
    "SparkOutOfMemoryError",
    "OutOfMemory:",
    "MemoryError",
    "Cannot allocate memory",
    "ArrowMemoryError",
)
TAIL_CHARACTERS = 4_000
FINISHED = ("done", "died")

Show = Callable[[str, "Progress"], None]


@dataclass
class Progress:
    """The progress of a sweep, from which the time left is estimated."""

    total: int
    done: int = 0
    batches: int = 0
    batches_of_cell: int = 0
    begun: float = field(default_factory=time.monotonic)
    cell_begun: float = 0.0
    cell_seconds: list[float] = field(default_factory=list)

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until the end, from the cells so far; None if there is no data yet."""
        now_s = time.monotonic() - self.cell_begun
        one_s = sum(self.cell_seconds) / len(self.cell_seconds) if self.cell_seconds else None
        if one_s is None:
            if not self.batches:
                return None
            one_s = now_s / self.batches * self.batches_of_cell
        return max(0.0, one_s * (self.total - self.done) - min(now_s, one_s))


def sweep(settings: Settings, out: Path, show: Show, *, minutes: float | None = None) -> list[dict[str, Any]]:
    """The results of all cells. Does not rerun cells whose result is in ``out`` already, of the same settings and
    commit.

    ``minutes``: begin no cell after this time. The same sweep goes on with those that are left.
    """
    with _sigterm_like_ctrl_c():
        return _sweep(settings, out, show, time.monotonic() + 60 * minutes if minutes is not None else math.inf)


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that started processes are ended first, as with Ctrl-C."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop) if threading.current_thread() is threading.main_thread() else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _sweep(settings: Settings, out: Path, show: Show, until_s: float) -> list[dict[str, Any]]:
    todo = list(dict.fromkeys(cells(settings)))
    floors = {cell: kept(out, cell, cell_spec(settings, cell)) for cell in dict.fromkeys(c.its_floor for c in todo)}
    found = {cell: kept(out, cell, spec_of(settings, cell, floors)) for cell in todo}
    missing = [cell for cell in todo if found[cell] is None]
    needed = {cell.its_floor for cell in missing}
    progress = Progress(len(missing) + sum(floors[cell] is None for cell in needed))
    if len(missing) < len(todo):
        show(f"{len(todo) - len(missing)} of {len(todo)} cells are done already", progress)
    if others := [cell.name for cell in {*missing, *needed} if is_of_another_commit(out, cell)]:
        show(f"of another commit, so they run again: {', '.join(sorted(others))}", progress)
    if missing and settings.source == "kafka":
        _topics("check", settings, missing[0], data_folder(settings, missing[0], out))
    dead: dict[Any, int] = {}  # the fewest past windows with which a contender died

    def died(cell: Cell) -> None:
        dead[cell.contender] = min(cell.past_windows, dead.get(cell.contender, cell.past_windows))

    for cell in todo:
        if (earlier := found[cell]) and earlier["status"] == "died":
            died(cell)
    for cell in missing:
        died_with = dead.get(cell.contender, cell.past_windows)
        if settings.after_death == "stop" and died_with < cell.past_windows:
            found[cell] = {"status": "not run", "why": f"died with {died_with} past windows", **cell_key(cell)}
            progress.total -= 1
            continue
        if time.monotonic() >= until_s:
            found[cell] = {"status": "not run", "why": "the time for this part of the sweep was over", **cell_key(cell)}
            progress.total -= 1
            continue
        floor = floors[cell.its_floor]
        if floor is None:
            floor = floors[cell.its_floor] = run_next(settings, cell.its_floor, out, show, progress)
        if floor["status"] != "done":
            found[cell] = {
                "status": "failed",
                "why": f"its floor could not be measured: {floor['why']}",
                **cell_key(cell),
            }
            progress.total -= 1
            continue
        result = run_next(settings, cell, out, show, progress, floor_bytes(floor))
        found[cell] = result
        if result["status"] == "died":
            died(cell)
        data = data_folder(settings, cell, out)
        rest = {data_folder(settings, other, out) for other in missing if found[other] is None}
        if not settings.keep_data and data not in rest:
            if settings.source == "kafka":
                try:
                    _topics("drop", settings, cell, data)
                except (ConfigError, RuntimeError) as error:  # topics left behind are no reason to lose the results
                    show(f"{cell.name}: could not delete its topics: {error}", progress)
            shutil.rmtree(data, ignore_errors=True)
    return [result for result in found.values() if result is not None]


def spec_of(settings: Settings, cell: Cell, floors: Mapping[Cell, Any]) -> dict[str, Any] | None:
    """The spec of a cell; None as long as its floor is not known."""
    floor = floors[cell.its_floor]
    return None if floor is None or floor["status"] != "done" else cell_spec(settings, cell, floor_bytes(floor))


def floor_bytes(floor: Mapping[str, Any]) -> int:
    """The most memory that a tree took without state, its whole basic heap included."""
    return round(float(floor["measured"]["peak_mib"]) * (1 << 20))


def run_next(
    settings: Settings, cell: Cell, out: Path, show: Show, progress: Progress, floor_bytes: int = 0
) -> dict[str, Any]:
    progress.batches, progress.cell_begun = 0, time.monotonic()
    result = run_cell(settings, cell, out, show, progress, floor_bytes)
    progress.done += 1
    progress.cell_seconds.append(time.monotonic() - progress.cell_begun)
    return result


def cell_key(cell: Cell) -> dict[str, Any]:
    return {
        "workload": cell.workload,
        "backend": cell.backend,
        "past_windows": cell.past_windows,
        "part": cell.part,
    }


def kept(out: Path, cell: Cell, spec: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The earlier result of a cell, if the cell finished and had the same specification and commit."""
    result = _earlier(out, cell)
    if result is None or result["status"] not in FINISHED or is_of_another_commit(out, cell):
        return None
    return result if result["spec"] == json.loads(json.dumps(spec)) else None


def is_of_another_commit(out: Path, cell: Cell) -> bool:
    """Whether there is an earlier result of a cell that other code has made. Outside git, nobody knows."""
    result = _earlier(out, cell)
    return result is not None and result.get("commit", bench.commit()) != bench.commit()


def _earlier(out: Path, cell: Cell) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        result: dict[str, Any] = json.loads((out / "cells" / f"{cell.name}.json").read_text())
        return result
    return None


def data_folder(settings: Settings, cell: Cell, out: Path) -> Path:
    shape = settings.cell_shape(cell)
    return out / "data" / f"{cell.workload}-{cell.past_windows:02d}-{shape.digest(cell.workload)}"


def _topics(what: Literal["check", "fill", "drop"], settings: Settings, cell: Cell, data: Path) -> None:
    assert settings.kafka is not None
    workload, shape = load(cell.workload), settings.cell_shape(cell)
    topics.apart(what, workload, shape, data, settings.kafka, settings.batches_of(cell), my_environment())


def run_cell(
    settings: Settings, cell: Cell, out: Path, show: Show, progress: Progress, floor_bytes: int = 0
) -> dict[str, Any]:
    """Runs one cell, from generating its events to its result, which it writes to ``out``/cells."""
    spec = cell_spec(settings, cell, floor_bytes)
    batches = progress.batches_of_cell = spec["warm_up"] + spec["measured"]
    folder = (out / "cells" / cell.name).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data = data_folder(settings, cell, out).absolute()
    show(f"{cell.name}: events", progress)
    shape = settings.cell_shape(cell)
    counts = sources.write_files(load(cell.workload), shape, batches, data)
    if spec["source"] == "kafka":
        show(f"{cell.name}: topics", progress)
        _topics("fill", settings, cell, data)
    more = {"data": str(data)}
    if cell.backend in FLINK:
        assert settings.flink is not None
        more["classpath"] = class_path(flink_cell.PROGRAM, Path(settings.flink), out.absolute() / "flink")
        flink_cell.write_events(data, batches)
    bench.write_json(folder / "cell.json", {**spec, **more})
    load_before = os.getloadavg()
    with limited(spec["limit"], spec["limit_bytes"], cell.name) as limit:
        begun = time.time()
        ending = run_tree(settings, spec, folder, limit, lambda: show(cell.name, progress), progress)
        ending |= {"seconds": time.time() - begun, "limit": limit.words, "limit_kind": limit.kind}
    result = {
        **cell_key(cell),
        **ending,
        "load_average": [load_before, os.getloadavg()],
        "measured": measured(folder, spec, counts, shape.window_us / 1e6),
        "spec": spec,
        "commit": bench.commit(),
    }
    if result["status"] == "done":
        result |= agreement(folder / "work" / "results", data, spec)
    if cell.floor:
        shutil.rmtree(data, ignore_errors=True)
    bench.write_json(out / "cells" / f"{cell.name}.json", result)
    shutil.rmtree(folder / "work", ignore_errors=True)
    return result


def run_tree(
    settings: Settings,
    spec: Mapping[str, Any],
    folder: Path,
    limit: Limit,
    show: Callable[[], None],
    progress: Progress,
) -> dict[str, Any]:
    """Starts the tree, samples its memory, and returns how it ended. None of its processes is left afterwards."""
    module = flink_cell.__name__ if spec["backend"] in FLINK else "experiments.memory_pressure.cell"
    command = [*limit.prefix, sys.executable, "-m", module, str(folder)]
    # With an arena for each thread, glibc keeps freed memory, and RocksDB takes far more than its limit.
    environment = {**my_environment(), "MALLOC_ARENA_MAX": "2"}
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    tree = Tree(child.pid)
    killed: str | None = None
    try:
        with Evictor(folder / "work") as evictor:
            killed = _watch(settings, spec, folder, limit, show, progress, child, tree, evictor)
    finally:
        tree.end()
        if child.returncode is None:  # otherwise its pid may belong to another process by now
            child.kill()
        child.wait()
    return ending(folder, killed, child.returncode, limit.kills()) | {"page_cache": evictor.found}


def _watch(
    settings: Settings,
    spec: Mapping[str, Any],
    folder: Path,
    limit: Limit,
    show: Callable[[], None],
    progress: Progress,
    child: subprocess.Popen[bytes],
    tree: Tree,
    evictor: Evictor,
) -> str | None:
    """Waits until the tree ends and returns None, or returns why it has to be killed."""
    window_s = shape_of(spec).window_us / 1e6
    stall_s = max(settings.stall_s, 20 * window_s)
    moved_at, next_look, last = time.monotonic(), 0.0, 0
    with (folder / "memory.jsonl").open("a") as samples:
        while child.poll() is None:
            if tree.application is None and (started := folder / "started.json").exists():
                tree.application = json.loads(started.read_text())["application"]
            used = tree.look()
            # Use the smaller of two samples: a process that forks during a sample is counted twice.
            now_bytes = sum(used.values())
            total, last = min(now_bytes, last), now_bytes
            samples.write(json.dumps({"t": time.time(), **used, "peak": total}) + "\n")
            samples.flush()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + SAMPLE_S
                batches = len(lines_of(folder / "batches.jsonl"))
                if batches > progress.batches:
                    progress.batches, moved_at = batches, now
                    evictor.wake()
                show()
            if limit.watched and total > limit.limit_bytes:
                return f"the tree took {total:,} bytes, above the limit"
            if limit.kills():
                return "the kernel killed a process of the control group"
            if now - moved_at > stall_s:
                return f"stalled: no batch ended for {stall_s:.0f} s"
            time.sleep(LOOK_S)
    return None


def ending(folder: Path, killed: str | None, code: int | None, kernel_kills: int) -> dict[str, Any]:
    """The ``status`` of a cell (done, died of memory, or failed), and the reason."""
    if (folder / "done.json").exists() and killed is None:
        return {"status": "done"}
    error = folder / "error.txt"
    text = _tail(folder / "log") + (error.read_text() if error.exists() else "")
    reason = next((line.strip() for line in text.splitlines() if any(sign in line for sign in OUT_OF_MEMORY)), None)
    if kernel_kills and (killed is None or "control group" not in killed):
        killed = "the kernel killed a process of the control group"
    if killed is not None and not killed.startswith("stalled"):
        return {"status": "died", "why": killed}
    if reason is not None:
        return {"status": "died", "why": reason[:300]}
    if killed is not None and (full := heap_share(folder)) > 0.9:
        return {"status": "died", "why": f"{killed}, with {full:.0%} of the heap in use"}
    return {"status": "failed", "why": killed or f"exit code {code}", "log": text[-TAIL_CHARACTERS:]}


def heap_share(folder: Path) -> float:
    """The share of the JVM's maximum heap in use in the last samples; 0 if there are none."""
    samples = lines_of(folder / "samples.jsonl")[-10:]
    heap_bytes: int = json.loads((folder / "cell.json").read_text())["heap_bytes"]
    return max((float(sample["heap"]) for sample in samples), default=0.0) / heap_bytes


def _tail(path: Path) -> str:
    """The lines of a log that mention memory errors, and its last lines."""
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").splitlines()
        memory_errors: Iterator[str] = (line for line in lines if any(sign in line for sign in OUT_OF_MEMORY))
        return "\n".join([*memory_errors, "", *lines[-40:], ""])
    return ""
