"""Evaluates the log files of a cell: rates, memory and garbage collection of the batches after the warm-up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.shared.tree import KINDS

MIB = 1 << 20
YOUNG = ("PS Scavenge", "G1 Young Generation", "Copy")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file. Ignores a truncated last line."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def measured(
    folder: Path, spec: Mapping[str, Any], counts: Sequence[Sequence[int]], window_s: float = 0.0
) -> dict[str, Any]:
    """The figures of the measured batches, or of those there are, if the cell ended early.

    ``counts``: see ``sources.write_files``.
    """
    batches = {line["batch"]: line for line in lines_of(folder / "batches.jsonl")}
    warm_up = spec["warm_up"]
    chosen = [batch for batch in sorted(batches) if warm_up <= batch < warm_up + spec["measured"]]
    begin = batches[warm_up - 1]["t"] if warm_up - 1 in batches else None
    end = batches[chosen[-1]]["t"] if chosen else None
    samples = lines_of(folder / "samples.jsonl")
    progress = {line["batch"]: line for line in lines_of(folder / "progress.jsonl")}
    if begin is None and batches:
        begin = batches[min(batches)]["t"]  # it ended during the warm-up: use what there is

    def within(line: Mapping[str, Any]) -> bool:
        return (begin is None or line["t"] >= begin) and (end is None or line["t"] <= end)

    memory = lines_of(folder / "memory.jsonl")
    during = [line for line in samples if within(line)]
    return {
        "batches": len(chosen),
        "all_batches": len(batches),
        "memory_mib": memory_of([line for line in memory if within(line)]),
        "peak_mib": max((line["peak"] for line in memory), default=0) / MIB,
        "heap_mib": [line["heap"] / MIB for line in during],
        "ingestion": ingestion(progress, chosen, counts, window_s if spec["pace"] == "real" else 0.0),
        "processing": processing([batches[batch] for batch in chosen]),
        "gc": garbage(during),
        "panes": panes([batches[batch] for batch in chosen]),
        "dropped": sum(progress[batch]["dropped"] for batch in progress),
        "state": samples[-1].get("state") if samples else None,
    }


def panes(batches: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many windows were computed, by kind."""
    found: dict[str, int] = {}
    for batch in batches:
        for kind, count in batch.get("panes", {}).items():
            found[kind] = found.get(kind, 0) + count
    return found


def memory_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """MiB at each sample, by kind of process, and the ``total``."""
    found = {kind: [line[kind] / MIB for line in lines] for kind in KINDS}
    return {**found, "total": [sum(line[kind] for kind in KINDS) / MIB for line in lines]}


def ingestion(
    progress: Mapping[int, Mapping[str, Any]],
    chosen: Sequence[int],
    counts: Sequence[Sequence[int]],
    least_s: float = 0.0,
) -> dict[str, list[float]]:
    """Events/s of each batch: ``normal`` of the newest window; ``windows``: the mean over it and N past ones; ``all``.

    A batch brings the events of one window's time. Its time is from its start to the start of the next batch. So the
    rate includes the time that a source waits, and shows when a batch delays the next one. ``least_s``: the length of a
    window, if sources deliver in real time. It is a lower limit, since after a slow batch Spark starts a later one
    early. ``pace``: the rate as a share of the source's; empty if it has none.
    """
    found: dict[str, list[float]] = {"normal": [], "windows": [], "all": [], "pace": []}
    for batch in chosen:
        if batch not in progress or batch >= len(counts):
            continue
        following = progress.get(batch + 1)
        of = progress[batch]
        seconds = following["t"] - of["t"] if following else of["ms"]["triggerExecution"] / 1000
        seconds = max(seconds, of["ms"]["triggerExecution"] / 1000, least_s, 1e-3)
        late = counts[batch]
        found["normal"].append(late[0] / seconds)
        found["windows"].append(sum(late) / len(late) / seconds)
        found["all"].append(sum(late) / seconds)
        if least_s:
            found["pace"].append(least_s / seconds)
    return found


def processing(batches: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Events/s of each execution: ``normal`` at a window's end; ``all`` includes late and final ones."""
    found: dict[str, list[float]] = {"normal": [], "all": []}
    for batch in batches:
        for execution in batch["executions"]:
            rate = execution["events"] / max(execution["seconds"], 1e-6)
            found["all"].append(rate)
            if execution["kind"] == "on_time":
                found["normal"].append(rate)
    return found


def garbage(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The shares of the time, from first to last sample, spent on collecting the young and the old generation.

    G1's concurrent work counts as old.
    """
    if len(samples) < 2:
        return None
    first, last = samples[0], samples[-1]
    seconds = last["t"] - first["t"]
    taken = {"young": 0.0, "old": 0.0}
    times = {"young": 0, "old": 0}
    for name, (count, ms) in last["gc"].items():
        before = first["gc"].get(name, [0, 0])
        which = "young" if name in YOUNG else "old"
        taken[which] += (ms - before[1]) / 1000
        times[which] += count - before[0]
    return {
        "seconds": seconds,
        "young_share": taken["young"] / seconds,
        "old_share": taken["old"] / seconds,
        "young_collections": times["young"],
        "old_collections": times["old"],
    }
