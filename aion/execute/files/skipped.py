"""Remembers which files of a batch were skipped, so that a batch that runs again skips the same ones.

A file that is damaged today may be repaired tomorrow, and a batch that failed in between runs again. Its panes may have
been written already, so it must read the same files again. A task therefore looks at all its files first, writes what
it decided for each, and only then uses an event. Whoever finds a decision follows it: a skipped file stays skipped, and
one that was read must still be readable.

There is one record for each task and batch, beside the query's checkpoint: if a checkpoint is copied or goes, its
decisions go with it. In a local or mounted folder the first record of a task is the only one, since a hard link cannot
replace a file. An object store has no such operation; there the record that was complete first counts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from aion.execute.files.places import place_of
from state_backends.files.remote import storage_errors
from state_backends.files.storage import make_folder, sync

FOLDER = "aion-files"
"""The folder in the checkpoint."""

Decisions = Mapping[str, str | None]
"""For each file, why it is skipped, or None if it is read."""


@dataclass(frozen=True)
class Records:
    """The records of one task of a batch.

    ``checkpoint``: as Spark writes it. ``name``: that of the stream within the query. ``task``: its number, and how
    many there are; after a restart there may be another number of them. ``attempt``: unique in the application.
    """

    checkpoint: str
    name: str
    batch: int
    task: tuple[int, int]
    attempt: int

    def known(self) -> dict[str, str | None]:
        """All decisions that a task may have to follow. Raises StorageError."""
        filesystem, folder = self._place()
        own, number = f"{self._task}-", f"-of-{self.task[1]:05d}-"
        with storage_errors(self.checkpoint):
            found = filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
            # Tasks of the same number of tasks have the same files, so the records of the others say nothing.
            names = [f for f in found if f.base_name.startswith(own) or number not in f.base_name]
            decisions: dict[str, str | None] = {}
            for file in sorted(names, key=lambda f: (f.mtime_ns, f.base_name)):
                if file.base_name.endswith(".json"):
                    with filesystem.open_input_stream(file.path) as stream:
                        for path, why in json.loads(stream.read()).items():
                            decisions.setdefault(path, why)
        return decisions

    def decide(self, decisions: Decisions) -> dict[str, str | None]:
        """Makes decisions durable, unless another attempt was first. Returns those that count. Raises StorageError."""
        filesystem, folder = self._place()
        data = json.dumps(decisions).encode()
        with storage_errors(self.checkpoint):
            if isinstance(filesystem, pafs.LocalFileSystem):
                write_once(Path(folder), f"{self._task}-first.json", data, self.attempt)
            else:
                filesystem.create_dir(folder, recursive=True)
                with filesystem.open_output_stream(f"{folder}/{self._task}-{self.attempt}.json") as out:
                    out.write(data)
        return {**decisions, **self.known()}

    def forget(self, retained: int) -> None:
        """Deletes the records of batches that Spark cannot run again. Raises StorageError."""
        filesystem, folder = self._place()
        above = folder.rpartition("/")[0]
        with storage_errors(self.checkpoint):
            for batch in filesystem.get_file_info(pafs.FileSelector(above, allow_not_found=True)):
                if batch.base_name.isdecimal() and int(batch.base_name) < self.batch - retained:
                    with contextlib.suppress(FileNotFoundError):
                        filesystem.delete_dir(batch.path)

    @property
    def _task(self) -> str:
        number, of = self.task
        return f"{number:05d}-of-{of:05d}"

    def _place(self) -> tuple[Any, str]:
        filesystem, root = place_of(self.checkpoint)
        return filesystem, f"{root.rstrip('/')}/{FOLDER}/{self.name}/{self.batch:010d}"


def write_once(folder: Path, name: str, data: bytes, attempt: int | str) -> None:
    """Writes a file, durably and whole, unless it exists."""
    make_folder(folder)
    unfinished = folder / f".{name}.{attempt}"
    try:
        with unfinished.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        with contextlib.suppress(FileExistsError):
            (folder / name).hardlink_to(unfinished)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(folder)
