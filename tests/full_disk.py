"""A shard on a disk that is really full, and read-only: ``python -m tests.full_disk WAY FOLDER``, run by its test.

``tmpfs``: FOLDER is the mount point of a file system of 1 MiB of its own. ``rlimit``: the kernel refuses larger files
instead (EFBIG). Prints what was checked; fails with a traceback.
"""

from __future__ import annotations

import contextlib
import logging
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from aion.errors import DiskError
from state_backends.format.ordered_map import MapValue
from state_backends.store.io_thread import Priority
from tests.stores.rig import nothing
from tests.versions.host import Host
from tests.versions.keyed_attempt import LocalKeyedAttempt

BUDGET = 128 << 10


class Tmpfs:
    cause = "No space left on device"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def full(self, free_bytes: int) -> Iterator[None]:
        ballast = self.folder / "ballast"
        with ballast.open("wb", buffering=0) as out:
            with contextlib.suppress(OSError):
                while True:
                    out.write(bytes(4096))
            out.truncate(max(0, out.tell() - free_bytes))
        yield
        ballast.unlink()

    @contextlib.contextmanager
    def read_only(self, folder: Path) -> Iterator[None]:
        # A file system with open files cannot be made read-only, but a view of a folder in it can.
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        yield
        subprocess.run(["umount", folder], check=True)


class Rlimit:
    cause = "File too large"

    @contextlib.contextmanager
    def full(self, free_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Scenario:
    """A shard whose versions hold the seqs 0, 1, 2, ..., whatever the disk does."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.host = Host(kind, folder, budget=BUDGET, block_bytes=8 << 10)
        self.kind, self.folder = kind, folder
        self.token: str | None = None
        self.next_seq = 0

    def attempt(self, blocks: int = 4, *, late: bool = False) -> None:
        """The next version; raises what the shard raises, with the attempt given up."""
        attempt, _ = self.host.open(self.token)
        seqs = range(self.next_seq, self.next_seq + blocks)
        try:
            self.host.append(attempt, *((seq, seq // 8) for seq in seqs), late=late)
            self.host.shard.release(attempt, [self.next_seq // 8])
            self.host.shard.commit(attempt, {"next_seq": seqs.stop})
        except BaseException:
            self.host.shard.abort(attempt)
            raise
        self.token, self.next_seq = attempt, seqs.stop

    def refused(self, cause: str, **how: object) -> str:
        try:
            self.attempt(**how)  # type: ignore[arg-type]
        except DiskError as error:
            assert cause in str(error) and str(self.folder) in str(error), error
            assert self.host.shard.store is not None
            assert self.kind == "memory" or self.host.shard.store.stats().m_bucket_bytes <= BUDGET
            return str(error)
        raise AssertionError("it was not refused")

    def intact(self) -> None:
        assert self.host.seqs(self.token, *range(200)) == [*range(self.next_seq)]

    def failed_writes(self) -> int:
        assert self.host.shard.store is not None
        return self.host.shard.store.stats().failed_writes


def scenario(kind: str, folder: Path, way: Tmpfs | Rlimit) -> None:
    run = Scenario(kind, folder)
    for _ in range(3):
        run.attempt()
    for free in (0, 4 << 10, 12 << 10, 20 << 10):
        with way.full(free):
            said = run.refused(way.cause)
            run.refused(way.cause, late=True)
            assert run.failed_writes() > 0
            run.intact()
            if isinstance(way, Tmpfs):
                assert "make room" in said
        run.attempt()  # there is room again
        run.intact()
    with way.full(0):
        said = run.refused(way.cause, blocks=40, late=True)
        assert "memory is full" in said or kind == "memory", "an append was refused, not only the commit"
        run.intact()
        run.refused(way.cause)
    if isinstance(way, Tmpfs):
        with way.read_only(folder / "state"):
            said = run.refused("Read-only file system")
            assert "mount it writable" in said
            run.intact()
    run.attempt()
    run.host.restart()
    run.intact()
    tokens = [run.token]
    for _ in range(12):  # merging goes on, too
        run.attempt(blocks=1)
        tokens.append(run.token)
    run.host.restart()
    run.intact()
    left = run.host.files() - run.host.named_files(*run.host.manifests())
    assert not left, f"left behind: {left}"
    run.host.stop()


def keyed_scenario(kind: str, folder: Path, way: Tmpfs | Rlimit) -> None:
    """The same with keyed values: versions that cannot be written, and attempts that are too large for memory."""
    host = Host(kind, folder, budget=BUDGET)
    rng = random.Random(0)
    token: str | None = None
    wanted: dict[bytes, bytes] = {}

    def attempt(count: int = 20) -> None:
        nonlocal token, wanted
        name, _ = host.open(token)
        keyed = LocalKeyedAttempt(host.shard, name)
        change = {b"%d" % rng.randrange(100): rng.randbytes(1000) for _ in range(count)}
        try:
            for key, value in change.items():
                keyed.put([MapValue(key, value)])
            host.shard.commit(name, {"next_seq": 0})
        except BaseException:
            host.shard.abort(name)
            raise
        token, wanted = name, wanted | change
        host.io.submit(Priority.MAINTENANCE, nothing()).result()  # RocksDB has the new run

    def intact() -> None:
        name, _ = host.open(token)
        keyed = LocalKeyedAttempt(host.shard, name)
        assert keyed.get(sorted(wanted)) == [wanted[key] for key in sorted(wanted)]
        assert dict(keyed.scan(b"", None)) == wanted
        host.shard.abort(name)

    def refused(count: int = 20) -> None:
        try:
            attempt(count)
        except DiskError as error:
            assert way.cause in str(error) and str(folder) in str(error), error
        else:
            raise AssertionError("it was not refused")

    for _ in range(3):
        attempt()
    for free in (0, 4 << 10, 12 << 10):
        with way.full(free):
            refused()
            intact()
            refused(90)  # it wrote runs before; without them there must be another RocksDB, and there is no room for it
        intact()  # there is room again
        attempt()
        intact()
    for _ in range(6):  # merging goes on, too
        attempt(1)
    host.restart()
    intact()
    assert not host.files() - host.named_files(*host.manifests())
    host.stop()


def main() -> None:
    logging.disable(logging.CRITICAL)
    way, folder = sys.argv[1], Path(sys.argv[2])
    for kind in ("tiered", "rocksdb", "memory"):
        disk = Tmpfs(folder) if way == "tmpfs" else Rlimit()
        for story, own in ((scenario, folder / kind), (keyed_scenario, folder / f"{kind}-keyed")):
            story(kind, own, disk)
            if way == "tmpfs":
                subprocess.run(["rm", "-r", str(own)], check=True)
        print(f"{way}: {kind}: refused, intact, and on again")


if __name__ == "__main__":
    main()
