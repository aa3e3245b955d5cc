"""The events of the chaos experiment, the panes they must yield, and the comparison with what the queries yielded.

Everything follows from a seed. File ``i`` of a round has 10 seconds of event time and does not depend on other files,
and one file is one batch. So every run must yield the same panes in every batch, and the last panes can be computed
from the events alone. There is one exception, in Spark: if a JVM dies when the source has recorded a file but the query
has not, that file becomes part of the next batch. So the undisturbed run is given the batches of the disturbed one:
see :func:`composition`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SECOND_US = 1_000_000
FIRST_S = 1_700_000_000
FILE_S = 10
WINDOW_S = 20
DELAY_S = 5
LATEST_S = 90  # late, but within the bound
BOUND_S = 100
TOO_LATE_S = 250
KEYS = 5
CLOCK, FLUSH = "clock", "flush"
FLUSHES = 4
"""So many files at the end have only a FLUSH event. A fault may join two files to one batch, and windows run one batch
after the one that moves the watermark past them."""
DDL = "k string, ts timestamp, id bigint, payload binary"


class Event(NamedTuple):
    """``id``: unique, so that a sum over ids shows whether an event is missing or counted twice."""

    k: str
    ts_us: int
    id: int
    payload: bytes
    too_late: bool


def events_of(seed: int, file: int, files: int, count: int, payload_bytes: int) -> list[Event]:
    """The events of one of ``files`` files. The last files move the watermark past all windows."""
    begin_s = FIRST_S + file * FILE_S
    first_id = file * 10_000_000
    if file >= files - FLUSHES:
        at_s = FIRST_S + files * FILE_S + 100_000 + file
        return [Event(FLUSH, at_s * SECOND_US, first_id, b"", False)]
    rng = random.Random(f"{seed} {file}")
    events = [Event(CLOCK, (begin_s + FILE_S) * SECOND_US - 1, first_id, b"", False)]
    for number in range(1, count):
        behind_us, too_late = 0, False
        fate = rng.random()
        if fate < 0.3:
            behind_us = rng.randrange(LATEST_S * SECOND_US)
        elif fate < 0.32 and file >= 2:  # there is a watermark by then
            behind_us, too_late = TOO_LATE_S * SECOND_US, True
        ts_us = begin_s * SECOND_US + rng.randrange(FILE_S * SECOND_US) - behind_us
        key = f"key {rng.randrange(KEYS)}"
        events.append(Event(key, ts_us, first_id + number, rng.randbytes(payload_bytes), too_late))
    return events


# -- the expected result ----------------------------------------------------------------------------------


WindowOfKey = tuple[str, int]
"""A key, and the start of its window in microseconds."""


def digest(ids: Iterable[int]) -> str:
    """A digest of the set of events; their order does not matter."""
    return hashlib.sha256(",".join(map(str, sorted(ids))).encode()).hexdigest()[:16]


@dataclass
class Truth:
    """Computed by plain loops over all events: the ids in each window of each key, and the ids that came too late."""

    windows: dict[WindowOfKey, list[int]] = field(default_factory=dict)
    too_late: list[int] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.k == FLUSH:
                continue
            if event.too_late:
                self.too_late.append(event.id)
                continue
            start_us = event.ts_us // (WINDOW_S * SECOND_US) * (WINDOW_S * SECOND_US)
            self.windows.setdefault((event.k, start_us), []).append(event.id)

    def last_panes(self, query: str) -> dict[WindowOfKey, list[Any]]:
        """The expected values of the last pane of each window of each key."""
        if query == "aggregates":
            return {k: [len(ids), sum(ids), min(ids), max(ids)] for k, ids in self.windows.items()}
        return {k: [len(ids), sum(ids), digest(ids)] for k, ids in self.windows.items()}


COLUMNS = {"aggregates": ("n", "total", "low", "high"), "apply": ("n", "total", "digest")}
"""The queries, and the value columns of their panes."""

# -- the files -------------------------------------------------------------------------------------------


def write_file(folder: Path, number: int, table: Any) -> None:
    """Writes one file of a stream. The source reads files in the order of their modification times."""
    import pyarrow.parquet as pq

    path = folder / f"{number:06d}.parquet"
    pq.write_table(table, path)
    os.utime(path, (1_600_000_000 + number, 1_600_000_000 + number))


def write_batches(source: Path, folder: Path, batches: list[list[str]]) -> None:
    """Writes one file for each batch, made of the files that the batch names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for number, names in enumerate(batches):
        write_file(folder, number, pa.concat_tables([pq.read_table(source / name) for name in names]))


def batches_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The rows that a query wrote, by batch, numbered from 0.

    Spark's own batch numbers may have gaps: repartitioning a checkpoint uses one up.
    """
    paths = sorted(folder.glob("??????.json"))
    return {number: [json.loads(line) for line in path.read_text().splitlines()] for number, path in enumerate(paths)}


# -- the batches ------------------------------------------------------------------------------------------


def composition(work: Path, query: str) -> list[list[str]]:
    """The file names of each batch of a finished query, in the order of the batches."""
    of_source: dict[int, list[str]] = {}
    for path in (work / f"checkpoint-{query}" / "sources" / "0").iterdir():
        if re.fullmatch(r"\d+(\.compact)?", path.name):
            for line in path.read_text().splitlines()[1:]:
                entry = json.loads(line)
                names = of_source.setdefault(entry["batchId"], [])
                name = entry["path"].rpartition("/")[2]
                if name not in names:  # a compacted log repeats earlier entries
                    names.append(name)
    batches, noted = [], -1
    for path in sorted((work / query).glob("*.offset")):
        upto = int(path.read_text())
        batches.append([name for number in range(noted + 1, upto + 1) for name in of_source[number]])
        noted = upto
    return [batch for batch in batches if batch]  # the batch after the last file is empty


# -- the actual result ------------------------------------------------------------------------------------

Row = dict[str, Any]
Batches = Mapping[int, Sequence[Row]]


def last_panes(batches: Batches, query: str) -> dict[WindowOfKey, list[Any]]:
    """The values of the last pane of each window of each key."""
    last: dict[WindowOfKey, Row] = {}
    for _, rows in sorted(batches.items()):
        for row in rows:
            key = row["k"], row["window_start"]
            if row["kind"] == "dropped" or row["k"] == FLUSH:
                continue
            if key not in last or row["pane"] > last[key]["pane"]:
                last[key] = row
    return {key: [row[c] for c in COLUMNS[query]] for key, row in last.items()}


def dropped_events(batches: Batches) -> int:
    return sum(row["events"] for rows in batches.values() for row in rows if row["kind"] == "dropped")


def differences(query: str, got: Batches, undisturbed: Batches, truth: Truth, batches: int) -> list[str]:
    """All differences, in words. ``batches``: how many batches to compare one by one."""
    found: list[str] = []
    # Spark may or may not run one more batch without data after the last one.
    for batch in range(batches):
        if batch not in got:
            found.append(f"{query}: batch {batch} never came out")
            continue
        mine, other = _plain(got[batch]), _plain(undisturbed.get(batch, ()))
        if mine != other:
            more, less = mine - other, other - mine
            found.append(f"{query}: batch {batch} has {sum(more.values())} rows that the undisturbed run has not, "
                         f"and lacks {sum(less.values())}: {sorted(more)[:1]} {sorted(less)[:1]}")  # fmt: skip
    panes, expected = last_panes(got, query), truth.last_panes(query)
    for where, others in (("the undisturbed run", last_panes(undisturbed, query)), ("the events", expected)):
        found += [
            f"{query}: {key}: last pane {panes.get(key)}, from {where} {others.get(key)}"
            for key in sorted(panes.keys() | others.keys())
            if panes.get(key) != others.get(key)
        ]
    if (dropped := dropped_events(got)) != len(truth.too_late):
        found.append(f"{query}: {dropped} events came out as dropped, {len(truth.too_late)} were too late")
    return found


def _plain(rows: Iterable[Row]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows if row["k"] != FLUSH)
