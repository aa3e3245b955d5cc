"""The settings and the result of the chaos experiment: what was done, what was seen, and what differed."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import typer


@dataclass(frozen=True)
class Settings:
    """``kinds``: the faults to cause, in this order; after them the seed chooses. ``hosts``: 0 means no cluster.

    ``workload``: a key of WORKLOADS. ``store``: one of STORES, where the state is. ``rewinds``, ``forks``: how often a
    query goes back, or is forked, between the kills.
    A round has ``files_of_a_kill`` files for each of its kills, plus ``more_files``. If the files run out before all
    kills are done, another round follows.
    """

    kills: int
    seed: int
    kills_of_a_round: int = 50
    files_of_a_kill: float = 1.3
    more_files: int = 12
    events_of_a_file: int = 150
    payload_bytes: int = 400
    hosts: int = 0
    kinds: tuple[str, ...] = ()
    workload: str = "windows"
    store: str = "folder"
    rewinds: int = 0
    forks: int = 0


@dataclass
class Fault:
    """One fault: what was done, and in which batches.

    The last fault of a burst has the effects of all of it, until the next batch came out.
    """

    kind: str
    round: int
    kill: int | None
    pid: int
    note: str
    batches: list[int]
    next_batch_s: float = 0.0
    tasks_lost: int = 0
    turns: int = 0
    query_failures: int = 0


@dataclass
class Result:
    faults: list[Fault] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    batches: int = 0
    batches_again: int = 0
    rows: int = 0
    events: int = 0
    too_late: int = 0
    rounds: int = 0
    copies: int = 0
    repartitions: int = 0
    merged_files: int = 0
    handed_files: int = 0

    @property
    def kills(self) -> int:
        return sum(fault.kill is not None for fault in self.faults)

    def is_due(self, kind: str, wanted: int, kills: int) -> bool:
        """Whether there must be one more fault of a kind now. ``wanted`` of them are spread evenly over ``kills``."""
        return sum(fault.kind == kind for fault in self.faults) < math.ceil(wanted * (self.kills + 1) / kills)


def resumed(settings: Settings, out: Path) -> tuple[Result, float]:
    """The result of an interrupted run, and its seconds. Raises BadParameter if it had other settings."""
    path = out / "chaos.json"
    if not path.exists():
        return Result(), 0.0
    found = json.loads(path.read_text())
    options = {"seed": "--seed", "events_of_a_file": "--events", "payload_bytes": "--payload", "hosts": "--hosts"}
    options |= {name: f"--{name}" for name in ("workload", "store", "rewinds", "forks")}
    for name, now in asdict(settings).items():
        was = found["settings"].get(name, getattr(Settings, name, None))
        if was != now and name not in ("kills", "kinds"):
            raise typer.BadParameter(
                f"--resume continues the run in {path}, which had {options.get(name, name)} {was}, not {now}: "
                "use that value, or another --out"
            )
    result = found["result"]
    return Result(**{**result, "faults": [Fault(**fault) for fault in result["faults"]]}), float(found["seconds"])


def summary(result: Result) -> Iterator[str]:
    """The summary of all rounds, as lines."""
    counts = Counter(fault.kind for fault in result.faults)
    yield ""
    yield "done: " + ", ".join(f"{n} x {kind}" for kind, n in counts.most_common())
    slowest = max((fault.next_batch_s for fault in result.faults), default=0.0)
    yield (
        f"seen: {sum(f.tasks_lost for f in result.faults)} tasks and executors lost, "
        f"{sum(f.turns for f in result.faults)} tasks that continued with another server, "
        f"{len(result.failures)} queries that failed and were restarted; "
        f"longest wait for the next batch {slowest:.1f} s"
    )
    yield (
        f"also: {result.copies} checkpoints copied, and run next to their originals on one state folder; "
        f"{result.repartitions} repartitioned; {result.merged_files} merged files "
        f"and {result.handed_files} of handed-over blocks seen"
    )
    yield (
        f"compared: {result.batches} batches ({result.batches_again} came out twice), {result.rows} rows, "
        f"{result.events} events, {result.too_late} of them too late"
    )
    yield from result.differences[:20]
    others = len(result.faults) - result.kills
    yield f"{result.kills} kills, {len(result.differences)} differences ({others} other faults)"


def cause(failure: str) -> str:
    """Aion's error in the message of a failed query, or else the beginning of the message."""
    text = str(json.loads(failure)["error"])
    for line in text.splitlines():
        if re.search(r"\b(aion|state_backends\.format)\.errors\.", line):
            return line.strip()[:200]
    return text[:200]
