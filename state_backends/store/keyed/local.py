"""Keyed values of a store without versions: in one process, for as long as it lives."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from state_backends.files.names import SstFile
from state_backends.store.keyed.store import KeyedStore


class LocalValues:
    """Writes what was put to disk when it takes too much memory. It is a version that nobody can go back to."""

    def __init__(self, store: KeyedStore) -> None:
        self.store = store
        self._numbers = itertools.count()
        self._runs: dict[int, SstFile] = {}

    def settle(self) -> None:
        """Between two attempts: what was put stays."""
        if not self.store.is_large:
            return
        found = self.store.persist()
        before, self._runs = self._runs, {run.file_no: self._runs.get(run.file_no) or self._kept(run) for run in found}
        self.store.end([*self._runs.values()])
        for file_no in before.keys() - self._runs.keys():
            Path(before[file_no].path).unlink(missing_ok=True)
        self.store.compact()

    def _kept(self, run: SstFile) -> SstFile:
        """The same file under a name of its own: the store deletes the one that it has written."""
        path = Path(run.path).with_name(f"{run.name}.{next(self._numbers)}.kept")
        os.link(run.path, path)
        return SstFile(run.file_no, str(path), *run[2:])
