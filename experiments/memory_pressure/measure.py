"""What a cell's own lines say: rates, memory, garbage collection, of the batches after the warm-up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.memory_pressure.tree import KINDS

MIB = 1 << 20
YOUNG = ("PS Scavenge", "G1 Young Generation", "Copy")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON; a last one that was cut off is left out."""
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
    """Of the measured batches; of those there are, if it ended before. ``counts``: see ``sources.write_files``."""
    batches = {line["batch"]: line for line in lines_of(folder / "batches.jsonl")}
    warm_up = spec["warm_up"]
    chosen = [batch for batch in sorted(batches) if warm_up <= batch < warm_up + spec["measured"]]
    begin = batches[warm_up - 1]["t"] if warm_up - 1 in batches else None
    end = batches[chosen[-1]]["t"] if chosen else None
    samples = lines_of(folder / "samples.jsonl")
    progress = {line["batch"]: line for line in lines_of(folder / "progress.jsonl")}
    if begin is None and batches:
        begin = batches[min(batches)]["t"]  # it ended while it warmed up: what there is of it

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
        "dropped": sum(progress[batch]["dropped"] for batch in progress),
        "state": samples[-1].get("state") if samples else None,
    }


def memory_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """MiB at each sample, by kind of process and in ``total``."""
    found = {kind: [line[kind] / MIB for line in lines] for kind in KINDS}
    return {**found, "total": [sum(line[kind] for kind in KINDS) / MIB for line in lines]}


def ingestion(
    progress: Mapping[int, Mapping[str, Any]],
    chosen: Sequence[int],
    counts: Sequence[Sequence[int]],
    least_s: float = 0.0,
) -> dict[str, list[float]]:
    """Events/s of each batch: ``normal`` in the newest window; ``windows`` the mean of it and the N before it; ``all``.

    A batch brings what a window's time brings. It takes from its begin to that of the next one, so that a source that
    waits its time is waited for, and one that has to wait for the batch before is seen to. ``least_s``: the time of a
    window where no source brings its events in less; after a batch that took too long Spark begins the next one but one
    early.
    """
    found: dict[str, list[float]] = {"normal": [], "windows": [], "all": []}
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
    return found


def processing(batches: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Events/s of each execution: ``normal`` those at a window's end, ``all`` the late and the final ones as well."""
    found: dict[str, list[float]] = {"normal": [], "all": []}
    for batch in batches:
        for execution in batch["executions"]:
            rate = execution["events"] / max(execution["seconds"], 1e-6)
            found["all"].append(rate)
            if execution["kind"] == "on_time":
                found["normal"].append(rate)
    return found


def garbage(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Shares of the time between first and last sample that the collector of the young and of the old generation took.

    What G1 does beside the program counts as old.
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
