"""The events of the chaos experiment, and the comparison of what its queries yielded.

Everything follows from a seed. File ``i`` of a round has 10 seconds of event time and does not depend on other files,
and one file is one batch. So every run must yield the same rows in every batch, and what they must say can be computed
from the events alone. There is one exception, in Spark: if a JVM dies when the source has recorded a file but the query
has not, that file becomes part of the next batch. So the undisturbed run is given the batches of the disturbed one:
see :func:`composition`.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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


# -- the files -------------------------------------------------------------------------------------------


def write_file(folder: Path, number: int, table: Any) -> Path:
    """Writes one file of a stream. The source reads files in the order of their modification times."""
    import pyarrow.parquet as pq

    path = folder / f"{number:06d}.parquet"
    pq.write_table(table, path)
    os.utime(path, (1_600_000_000 + number, 1_600_000_000 + number))
    return path


def write_files(folder: Path, seed: int, files: int, count: int, payload_bytes: int) -> dict[str, list[Event]]:
    """Writes all files of a stream. Returns the events of each, by its name."""
    import pyarrow as pa

    found = {}
    folder.mkdir()
    types = [pa.string(), pa.timestamp("us", "UTC"), pa.int64(), pa.binary()]
    for file in range(files):
        events = events_of(seed, file, files, count, payload_bytes)
        columns = list(zip(*events, strict=True))[:4]
        arrays = [pa.array(values, type_) for values, type_ in zip(columns, types, strict=True)]
        path = write_file(folder, file, pa.table(arrays, ["k", "ts", "id", "payload"]))
        found[path.name] = events
    return found


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


def unread(what: str, written: Collection[str], batches: Iterable[Iterable[str]]) -> list[str]:
    """The files that no batch of a query read, in words. What must come out follows from what was read only."""
    missing = sorted(set(written).difference(*batches))
    return [f"{what}: {len(missing)} files were never read: {missing[:3]}"] if missing else []


# -- what must come out ----------------------------------------------------------------------------------

Row = dict[str, Any]
Batches = Mapping[int, Sequence[Row]]
"""The rows of each batch, numbered from 0."""
Input = Sequence[Sequence[Event]]
"""The events of each batch."""


class Workload(Protocol):
    """Queries over the events, and what must come out of them. It is in an object without state."""

    queries: tuple[str, ...]
    moments: Mapping[str, int]
    """When to kill, with weights: see :func:`experiments.chaos.faults.wait_for_moment`."""

    tables: Mapping[str, Sequence[str]]
    """The queries whose results a table can have, and its columns that do not depend on the batches."""

    def result(self, events: DataFrame, query: str) -> DataFrame:
        """What a query yields."""

    def shown(self, result: DataFrame, query: str) -> DataFrame:
        """What of a batch is compared: all columns of this. One of them is ``k``, the key."""

    def wrong(self, query: str, got: Batches, batches: Input) -> list[str]:
        """What differs from what the events must yield, in words, computed by plain loops over all events."""

    def too_late(self, batches: Input) -> int:
        """How many events come too late."""


def differences(workload: Workload, query: str, got: Batches, undisturbed: Batches, batches: Input) -> list[str]:
    """All differences, in words."""
    found: list[str] = []
    # Spark may or may not run one more batch without data after the last one.
    for batch in range(len(batches)):
        if batch not in got:
            found.append(f"{query}: batch {batch} never came out")
            continue
        found += compared(f"{query}: batch {batch}", got[batch], undisturbed.get(batch, ()), "the undisturbed run")
    return found + workload.wrong(query, got, batches)


def compared(what: str, mine: Iterable[Row], others: Iterable[Row], where: str) -> list[str]:
    """The difference of the rows of a batch, in any order. ``where``: where the others are from."""
    one, other = (Counter(repr(sorted(row.items())) for row in rows if row["k"] != FLUSH) for rows in (mine, others))
    more, less = one - other, other - one
    if not more and not less:
        return []
    return [
        f"{what} has {sum(more.values())} rows that {where} has not, and lacks {sum(less.values())}: "
        f"{sorted(more)[:1]} {sorted(less)[:1]}"
    ]
