"""Merges runs in the background, so that few must be searched. :mod:`~state_backends.store.merge_choice` chooses them.

The I/O thread writes the merged run step by step, when nothing else waits. The next commit names it instead of its
inputs. Until a version does, nothing depends on it. An attempt that fails, and a commit that had chosen its runs before
the merge ended, leave it for the next one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple

from state_backends.files.names import MERGED, SstFile
from state_backends.store.io import Io, Steps
from state_backends.store.map.run_files import RunFiles
from state_backends.store.merge_choice import neighbours
from state_backends.store.merge_turns import MergeTurns

log = logging.getLogger(__name__)


class _Merged(NamedTuple):
    run: SstFile
    inputs: tuple[SstFile, ...]


class RunMerger:
    """Keeps the number of runs low. It owns the merged run that no version names yet. ``lock``: the store's."""

    def __init__(self, files: RunFiles, io: Io, lock: threading.RLock) -> None:
        self._files, self._lock = files, lock
        self._turns = MergeTurns(io)
        self._merged: _Merged | None = None
        self.merges = self.merged_bytes = self.failed_merges = 0

    def compact(self, runs: Sequence[SstFile]) -> None:
        """Starts a merge if it is worth it. ``runs``: those of the last version, oldest first."""
        with self._lock:
            if self._turns.due() and self._merged is None and (chosen := neighbours([run.size_bytes for run in runs])):
                begin, end = chosen
                self._turns.begin(self._steps(tuple(runs[begin:end]), oldest=not begin))

    def applied(self, runs: Sequence[SstFile]) -> list[SstFile]:
        """The runs that a new version names: with the merged run in the place of its inputs. Hold the lock."""
        if self._merged is None:
            return list(runs)
        inputs = {run.file_no for run in self._merged.inputs}
        found: list[SstFile] = []
        for run in runs:
            if run.file_no not in inputs:
                found.append(run)
            elif run.file_no == self._merged.inputs[0].file_no:
                found.append(self._merged.run)
        return found

    def named(self, runs: Collection[SstFile]) -> None:
        """A version has these runs. Hold the lock.

        A merge may have ended after the commit chose its runs. Then the next version takes the merged run, because this
        one still has the inputs.
        """
        if self._merged is not None and any(run.file_no == self._merged.run.file_no for run in runs):
            self._drop()  # the version has a link to it

    def _drop(self) -> None:
        merged, self._merged = self._merged, None
        if merged is not None:
            self._files.delete(merged.run)

    def stop(self) -> None:
        """Cancels the merge under way, and deletes a merged run that no version names."""
        with self._lock:
            self._turns.stop()
            self._drop()

    def _steps(self, runs: tuple[SstFile, ...], *, oldest: bool) -> Steps[None]:
        log.debug("merging runs %s", [run.file_no for run in runs])
        try:
            merged = yield from self._files.merge(runs, MERGED, oldest=oldest)
        except Exception as error:
            with self._lock:
                self.failed_merges += 1
                self._turns.failed()
            log.error("cannot merge runs %s; they stay as they are: %s", [run.name for run in runs], error)
            return
        with self._lock:
            self._turns.succeeded()
            self.merges += 1
            self.merged_bytes += merged.size_bytes
            if not self._turns.closing:
                self._merged = _Merged(merged, runs)
                return
        self._files.delete(merged)
