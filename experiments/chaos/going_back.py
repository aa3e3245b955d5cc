"""Queries of the chaos experiment that go back by some batches, or are forked, with ``aion rewind`` and ``aion fork``.

Half of the rewinds are killed at a random moment. Then the next start of the query takes them back or completes them.
The files with the rows of batches that are undone are deleted here; a table goes back with the command, or by its sink.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.chaos.child import STARTING_S, ChaosError, environment
from experiments.chaos.data import FLUSH, FLUSHES, Workload
from experiments.chaos.query import GOING_BACK, RETAINED_TO_GO_BACK

REWIND, FORK = "rewind", "fork"
MOST_FILES = 8
"""A query goes back by this many files at most: they come again as one batch, and its watermark must not be so old that
an event which was too late is not any more."""
KILLED_SHARE = 0.5
ENOUGH_FILES = 20
"""With fewer files to come, queries that run might be at their end before a fork of them has begun."""


def files_of(folder: Path, query: str) -> int:
    """How many files the source of a query has seen."""
    sources = folder / f"checkpoint-{query}" / "sources" / "0"
    return 1 + max((int(path.name.partition(".")[0]) for path in sources.glob("[0-9]*")), default=-1)


def targets(folder: Path, query: str, files: int, floor: int) -> list[int]:
    """The batches to which a query can go back. ``files``: how many there are. ``floor``: the first batch."""
    checkpoint, seen = folder / f"checkpoint-{query}", files_of(folder, query)
    offsets, commits = (
        {int(path.name) for path in (checkpoint / name).glob("[0-9]*") if path.name.isdecimal()}
        for name in ("offsets", "commits")
    )
    found = []
    for path in sorted((folder / query).glob("*.offset")):
        batch = int(path.stem)
        kept = batch in commits and {batch - 1, batch} <= offsets
        if kept and batch >= floor and seen - 1 - int(path.read_text()) <= MOST_FILES:
            found.append(batch)
    # The last files must not come again as one batch: windows run one batch after the one that ends them.
    return found[:-1] if seen <= files - FLUSHES else []


def go_back(folder: Path, query: str, files: int, floor: int, state: str, rng: random.Random) -> str:
    """Sets a stopped query back by some batches, if there are some. Returns what happened."""
    from aion.core.query.sink_notes import REWOUND
    from aion.spark.session.rewound import NOTE

    if not (found := targets(folder, query, files, floor)):
        return f"{query} has no batch to go back to"
    to, checkpoint = rng.choice(found), folder / f"checkpoint-{query}"
    note, last = checkpoint / NOTE, checkpoint / REWOUND
    before, log = _id_of(last), folder / f"{REWIND}.log"
    how, killed = "", rng.random() < KILLED_SHARE
    with log.open("ab") as out:
        process = _command(out, folder, REWIND, str(checkpoint), "--to", str(to), "--state", state)
        if killed:
            wait_s = rng.uniform(0.0, 0.4)
            while process.poll() is None and not note.exists():
                time.sleep(0.001)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
            how = "" if process.poll() is not None else f", killed after {wait_s:.2f} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        elif process.wait(STARTING_S) != 0:
            raise ChaosError(f"{query} did not go back to batch {to}: {log.read_text(errors='replace')[-3000:]}")
    begun = _id_of(note)
    if begun is None and _id_of(last) == before:
        return f"{query} to batch {to}{how}: not begun"
    for path in (folder / query).iterdir():
        if int(path.name.partition(".")[0]) > to:
            path.unlink()
    return f"{query} to batch {to}{how}"


def _id_of(path: Path) -> str | None:
    return str(json.loads(path.read_text())["id"]) if path.exists() else None


def _command(out: Any, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Starts ``aion`` in a process group of its own: its JVM dies with it. What it leaves then is in ``folder``."""
    command, place = [sys.executable, "-m", "aion", *words], {"TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder)}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**environment(), **place}, cwd=folder,
        start_new_session=True,
    )  # fmt: skip


def fork(folder: Path, new: Path, queries: Sequence[str], tables: Sequence[str], state: str, files: int) -> str | None:
    """Copies queries, which may run, with what they wrote. Returns what happened, or None if it was too late."""
    new.mkdir()
    (new / GOING_BACK).touch()
    said = []
    for query in queries:
        (new / f"input-{query}").symlink_to((folder / f"input-{query}").resolve())
        checkpoint = new / f"checkpoint-{query}"
        log = new / f"{FORK}.log"
        with log.open("ab") as out:
            process = _command(out, new, FORK, str(folder / checkpoint.name), str(checkpoint), "--state", state)
            if process.wait(STARTING_S) != 0:
                raise ChaosError(f"{query} was not forked: {log.read_text(errors='replace')[-3000:]}")
        if files_of(new, query) > files - FLUSHES:
            shutil.rmtree(new)
            return None
        batch = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
        (new / query).mkdir()
        for path in sorted((folder / query).glob("*.*")):
            if int(path.name.partition(".")[0]) <= batch and ".again-" not in path.name:
                shutil.copy2(path, new / query)
        if query in tables:
            _take_table(folder / f"{query}.db", new / f"{query}.db", query, batch, new)
        said.append(f"{query} at batch {batch}")
    return ", ".join(said)


def _take_table(old: Path, new: Path, query: str, batch: int, folder: Path) -> None:
    """Copies a table as it was after a batch. The sink of the copy takes it over by its mark."""
    import aion
    from aion.sinks.marks import Goal, History

    with contextlib.closing(sqlite3.connect(old)) as theirs, contextlib.closing(sqlite3.connect(new)) as ours:
        theirs.backup(ours)
        ((of, checkpoint),) = ours.execute("SELECT query, checkpoint FROM aion_batches").fetchall()
    history = History(of, checkpoint)
    sink = aion.sinks.upsert(f"sqlite:///{new}", query, undo=f"{RETAINED_TO_GO_BACK} batches")
    sink.go_back(history, Goal(batch, "f" * 12))
    (folder / f"adopt-{query}").write_text(f"{history.digest}:{batch}")


def rows_of(folder: Path, query: str, columns: Sequence[str] = ()) -> list[tuple[Any, ...]]:
    """The rows of a query's table, but for those of the last events. Without ``columns``: all of them."""
    names = ", ".join(columns) or "*"
    with contextlib.closing(sqlite3.connect(folder / f"{query}.db")) as database:
        return sorted(database.execute(f"SELECT {names} FROM {query} WHERE k <> ?", (FLUSH,)), key=repr)


def compared_tables(workload: Workload, query: str, disturbed: Path, calm: Path, forked: Iterable[Path]) -> list[str]:
    """Compares the table of a query with that of the undisturbed run, and with those of its forks."""
    columns = workload.tables.get(query)
    if columns is None:
        return []
    found = _differences(f"{query}: the tables", rows_of(disturbed, query), rows_of(calm, query))
    for each in forked if columns else ():
        what = f"{each.name}: {query}: the tables"
        found += _differences(what, rows_of(each, query, columns), rows_of(disturbed, query, columns))
    return found


def _differences(what: str, mine: Sequence[Any], others: Sequence[Any]) -> list[str]:
    """How two tables differ, in words."""
    more, less = set(mine) - set(others), set(others) - set(mine)
    if not more and not less and len(mine) == len(others):
        return []
    return [f"{what} differ: {sorted(more, key=repr)[:2]} and {sorted(less, key=repr)[:2]}; {len(mine)}, {len(others)}"]
