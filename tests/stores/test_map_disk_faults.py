"""Keyed values on a disk that fails: at any call, and full."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from aion.errors import DiskError
from state_backends.format.ordered_map import MapValue
from state_backends.store.map import run_files
from tests.io_thread.rig import result
from tests.stores.test_disk_faults import Faults
from tests.versions.host import Host
from tests.versions.keyed_attempt import LocalKeyedAttempt

Values = dict[bytes, bytes | None]


class Story:
    """Two batches on a shard of some versions, and what must be true of it whatever happens."""

    def __init__(self, folder: Path) -> None:
        # The budget is so small that an attempt writes runs before its commit.
        self.host = Host("tiered", folder, retain=3, budget=16 << 10)
        self.tokens: list[str | None] = [None]
        self.versions: dict[str | None, Values] = {None: {}}
        self.done = 0

    def begin(self) -> None:
        for n in range(4):  # the last one starts a merge
            self.next({b"%d" % k: b"%d" % n * 50 for k in range(n, n + 20)})

    def next(self, change: Values) -> None:
        """An attempt; given up if anything fails."""
        attempt = self.host.next_attempt(self.tokens[-1])
        wanted = self.versions[self.tokens[-1]] | change
        try:
            self.host.open(self.tokens[-1])
            keyed = LocalKeyedAttempt(self.host.shard, attempt)
            self.host.shard.expect(list(wanted)[:5])
            keyed.put([MapValue(key, value) for key, value in change.items()])
            assert keyed.get(list(wanted)) == list(wanted.values())
            live = {key: value for key, value in sorted(wanted.items()) if value is not None}
            assert dict(keyed.scan(b"", None)) == live
            self.host.shard.commit(attempt, {"next_seq": 0})
        except BaseException:
            self.host.shard.abort(attempt)
            raise
        self.versions[attempt] = dict(live)
        self.tokens.append(attempt)

    def go_on(self) -> None:
        """The batches that are not done yet."""
        plan: list[Values] = [
            {b"%d" % k: None if k % 3 else b"x" * 400 for k in range(30)},
            {b"%d" % k: b"y" * 100 for k in range(10, 20)},
        ]
        while self.done < len(plan):
            self.next(plan[self.done])
            self.done += 1
            self.settle()

    def settle(self) -> None:
        from state_backends.store.io_thread import Priority
        from tests.stores.rig import nothing

        result(self.host.io.submit(Priority.MAINTENANCE, nothing()))

    def holds(self, versions: int) -> None:
        for token in self.tokens[-1 : -versions - 1 : -1]:
            attempt, _ = self.host.open(token)
            keyed = LocalKeyedAttempt(self.host.shard, attempt)
            assert dict(keyed.scan(b"", None)) == self.versions[token], f"version {token}"
            assert keyed.get(list(self.versions[token])) == list(self.versions[token].values())
            self.host.shard.abort(attempt)
        self.host.map.validate()


WAYS = [("instead", errno.ENOSPC), ("after", errno.EIO), ("on", errno.EROFS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "step"),
    [*((*way, 13) for way in WAYS), *(pytest.param(*way, 1, marks=pytest.mark.proof) for way in WAYS)],
)
def test_a_fault_at_any_call(
    quick_folder: Path, monkeypatch: pytest.MonkeyPatch, how: str, code: int, step: int
) -> None:
    """One call of two batches fails, then the next one, until there is none that fails."""
    beginning = Story(quick_folder / "beginning")
    beginning.begin()
    beginning.host.stop()
    failures = 0
    for nth in range(1, 10_000, step):
        folder = quick_folder / f"{nth}"
        shutil.copytree(beginning.host.folder / "state", folder / "state")
        story = Story(folder)
        story.tokens, story.versions = list(beginning.tokens), dict(beginning.versions)
        story.host.attempts = beginning.host.attempts
        faults = Faults(folder, nth, how, code)
        try:
            with monkeypatch.context() as patch:
                install(faults, patch)
                try:
                    story.go_on()
                except DiskError as error:
                    failures += 1
                    assert str(folder) in str(error) and os.strerror(code) in str(error)
                finally:
                    faults.over()
            story.holds(1)
            story.go_on()
            story.holds(3)
            story.host.restart()
            story.holds(3)
            for n in range(3):
                story.next({b"last": b"%d" % n})
            kept = {str(token) for token in story.tokens[-4:]}
            assert story.host.manifests() == kept
            assert story.host.files() == story.host.named_files(*kept)
        except BaseException as error:
            error.add_note(f"call {nth} failed: {faults.failed[:1]}")
            raise
        finally:
            story.host.stop()
            shutil.rmtree(folder)
        if not faults.failed:
            break
    assert nth > 100 and failures > 25 / step


def install(faults: Faults, patch: pytest.MonkeyPatch) -> None:
    from state_backends.store import p_bucket

    faults.install(patch)
    rdict: Any = p_bucket.Rdict
    patch.setattr(run_files, "Rdict", rdict)
