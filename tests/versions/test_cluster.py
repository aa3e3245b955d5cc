"""A cluster in one process: hosts, tasks, attempts, merges, sweeps, copies and crashes in any order, against one rule.

Every version that Spark may still name can be opened, whole. Spark may name the version that it chose last, those that
attempts of the present batch have committed on it, and those of the batches that it keeps, which a user restores from a
backup. There is a Spark for each lineage: one for the original, one for each copy of its checkpoint.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from aion.errors import CorruptState
from state_backends.backends import Stores
from state_backends.files.bodies import Bodies
from state_backends.files.handed import HandedFile, name_of, sweep
from state_backends.files.handed_remote import HandedPlace, create, read_body
from state_backends.files.location import LocalLocation, Location, RemoteLocation
from state_backends.files.names import HANDED_FOLDER
from state_backends.files.remote import Remote
from state_backends.format.block import Block
from state_backends.store.io_thread import IoThread, Priority, Steps
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.versions.lineage import digest_of, home_of
from state_backends.versions.shard import Shard
from tests.examples import some
from tests.stores.rig import EAGER, make_block
from tests.versions.host import IDENTITY

HOSTS = 2
NAMES = IDENTITY.query, IDENTITY.operator, "shard-00003"
Blocks = dict[int, tuple[int, bytes]]
"""The live blocks of a version: seq -> slice, contents."""
OPTIONS = StoreOptions(bucket_limit_bytes=8 << 10, limits=EAGER)


@dataclass
class Lineage:
    """One Spark: ``chosen`` are the versions of the batches that it keeps, oldest first; the last one is current.

    ``handed``: what the children of the present batch have handed over. All attempts of roots get the same.
    """

    checkpoint: str
    batch: int = 0
    chosen: list[str | None] = field(default_factory=lambda: [None])
    rivals: list[str] = field(default_factory=list)
    handed: list[Block] = field(default_factory=list)


@dataclass
class Attempt:
    lineage: Lineage
    name: str
    token: str | None
    shard: Shard
    blocks: Blocks
    next_seq: int
    purging: set[int] = field(default_factory=set)
    handed: set[Any] = field(default_factory=set)

    @property
    def is_present(self) -> bool:
        """Whether Spark still waits for it."""
        return self.token == self.lineage.chosen[-1] and int(self.name[:10]) == self.lineage.batch


class Cluster(RuleBasedStateMachine):
    def __init__(self, kind: str, folder: Path, retain: int) -> None:
        super().__init__()
        self.folder, self.retain = folder, retain
        self.numbers = itertools.count()
        self.io = [IoThread() for _ in range(HOSTS + 1)]  # the last host only looks
        self.remotes: list[Remote] = []
        self.locations = [self.location(kind, host) for host in range(HOSTS + 1)]
        self.shards: dict[tuple[str, int], Shard] = {}
        self.versions: dict[str | None, Blocks] = {None: {}}
        self.lineages = [Lineage("original")]
        self.attempts: list[Attempt] = []
        self.bodies: dict[Any, bytes] = {}
        self.clock = 0

    def location(self, kind: str, host: int) -> Location:
        if kind == "local":
            return LocalLocation(self.folder / "state")
        import pyarrow.fs as pafs

        (self.folder / "state").mkdir(parents=True, exist_ok=True)
        fs = pafs.SubTreeFileSystem(str(self.folder), pafs.LocalFileSystem())
        self.remotes.append(Remote("test://remote", (fs, "state")))
        return RemoteLocation(self.remotes[-1], self.folder / f"host-{host}")

    def shard(self, lineage: Lineage, host: int) -> Shard:
        """The host's hold on the shard for one application; it outlives tasks."""
        key = lineage.checkpoint, host
        if key not in self.shards:
            live = self.folder / "live" / str(next(self.numbers))
            identity = replace(IDENTITY, checkpoint=lineage.checkpoint)
            location, copies = self.locations[host], live / "copies"
            self.shards[key] = Shard(
                identity,
                location.storage(NAMES, copies, digest_of(lineage.checkpoint)),
                live / "shard",
                lambda p: Stores.of("tiered", p, self.io[host], MemoryBudget(16 << 10), OPTIONS),
                retain=self.retain,
                home=lambda now: home_of(location, now, copies),
            )
        return self.shards[key]

    # -- tasks --------------------------------------------------------------------------------------------

    @rule(data=st.data(), host=st.integers(0, HOSTS - 1))
    def begin(self, data: st.DataObject, host: int) -> None:
        """An attempt of the present batch; another one, on this host or another, may be at work."""
        lineage = data.draw(st.sampled_from(self.lineages))
        shard, token = self.shard(lineage, host), lineage.chosen[-1]
        name = f"{lineage.batch:010d}-{next(self.numbers)}"
        snapshot = shard.open(token, name, replace(IDENTITY, checkpoint=lineage.checkpoint))
        self.attempts = [a for a in self.attempts if a.shard is not shard]  # it took their place
        next_seq = snapshot["next_seq"] if snapshot else 0
        self.attempts.append(Attempt(lineage, name, token, shard, dict(self.versions[token]), next_seq))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), count=st.integers(1, 4), late=st.booleans())
    def append(self, data: st.DataObject, count: int, late: bool) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        for _ in range(count):
            self.clock += 1
            slice_us = 10 * (self.clock // 8)
            if slice_us in attempt.purging:
                continue
            block = make_block(slice_us, next(self.numbers), 600)
            attempt.shard.append(attempt.name, [(attempt.next_seq, late, block)])
            attempt.blocks[attempt.next_seq] = slice_us, bytes(block.body)
            attempt.next_seq += 1

    @rule(data=st.data(), host=st.integers(0, HOSTS - 1), count=st.integers(1, 3))
    def hand_over(self, data: st.DataObject, host: int, count: int) -> None:
        """By a child of the present batch. Nobody may ever use it."""
        lineage = data.draw(st.sampled_from(self.lineages))
        self.clock += 1
        digest, slice_us = digest_of(lineage.checkpoint), 10 * (self.clock // 8)
        name, location = name_of(lineage.batch, digest, str(next(self.numbers))), self.locations[host]
        if isinstance(location, RemoteLocation):
            file = create(location.remote, HandedPlace.of(self.folder / f"host-{host}", NAMES, digest), name)
        else:
            file = HandedFile(self.folder.joinpath("state", *NAMES[:2], HANDED_FOLDER), name)
        with closing(file):
            blocks = [make_block(slice_us, next(self.numbers), 600) for _ in range(count)]
            references = [file.add(block) for block in blocks]
            self.bodies |= {
                reference.at: bytes(block.body) for reference, block in zip(references, blocks, strict=True)
            }
            file.end()
            file.seal()
        lineage.handed += references

    @precondition(lambda self: any(a.is_present and a.lineage.handed for a in self.attempts))
    @rule(data=st.data())
    def append_handed(self, data: st.DataObject) -> None:
        """All that the children of the batch have handed over so far. The worker can read it at once."""
        attempt = data.draw(st.sampled_from([a for a in self.attempts if a.is_present and a.lineage.handed]))
        for block in attempt.lineage.handed:
            slice_us = block.header.slice_us
            if slice_us in attempt.purging or block.at in attempt.handed:
                continue
            attempt.handed.add(block.at)
            attempt.shard.append(attempt.name, [(attempt.next_seq, False, block)])
            attempt.blocks[attempt.next_seq] = slice_us, self.bodies[block.at]
            assert self.body(attempt.shard, block) == self.bodies[block.at]
            attempt.next_seq += 1

    @rule(data=st.data())
    def sweep(self, data: st.DataObject) -> None:
        """By a task of the present batch, or of an older one that still runs. Only where files are local."""
        lineage = data.draw(st.sampled_from(self.lineages))
        batch = data.draw(st.integers(0, lineage.batch))
        sweep(self.folder.joinpath("state", *NAMES[:2], HANDED_FOLDER), digest_of(lineage.checkpoint), batch)

    def body(self, shard: Shard, block: Block) -> bytes:
        """What a worker of this host reads."""
        remote = self.remotes[0] if self.remotes else None
        fetch = None if remote is None else lambda places, b: read_body(remote, places, b.at, b.header.body_bytes)
        return bytes(Bodies(shard.bodies, fetch).of(block).body)

    @precondition(lambda self: any(a.blocks for a in self.attempts))
    @rule(data=st.data())
    def purge(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from([a for a in self.attempts if a.blocks]))
        oldest = min(slice_us for slice_us, _ in attempt.blocks.values())
        attempt.shard.release(attempt.name, purge=[oldest])
        attempt.purging.add(oldest)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Also of an attempt whose batch is long decided: nobody told it."""
        attempt = data.draw(st.sampled_from(self.attempts))
        try:
            attempt.shard.commit(attempt.name, {"next_seq": attempt.next_seq})
        except CorruptState:
            # What was handed over may be gone, but only if nobody waits for this attempt.
            assert attempt.handed and not attempt.is_present
            attempt.shard.abort(attempt.name)
            self.attempts.remove(attempt)
            return
        self.attempts.remove(attempt)
        self.versions[attempt.name] = {q: b for q, b in attempt.blocks.items() if b[0] not in attempt.purging}
        lineage = attempt.lineage
        if attempt.is_present:
            lineage.rivals.append(attempt.name)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        attempt.shard.abort(attempt.name)
        self.attempts.remove(attempt)

    @rule(host=st.integers(0, HOSTS - 1))
    def settle(self, host: int) -> None:
        """What is merged in the background comes to its end."""

        def nothing() -> Steps[None]:
            return
            yield 0

        self.io[host].submit(Priority.MAINTENANCE, nothing()).result()

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.shards)))
        shard = self.shards.pop(key)
        self.attempts = [a for a in self.attempts if a.shard is not shard]
        shard.close()

    # -- Spark, and its users -----------------------------------------------------------------------------

    @precondition(lambda self: any(one.rivals for one in self.lineages))
    @rule(data=st.data())
    def decide(self, data: st.DataObject) -> None:
        """The batch is through; attempts that are still at work on it do not hear of that."""
        lineage = data.draw(st.sampled_from([one for one in self.lineages if one.rivals]))
        kept = [*lineage.chosen, data.draw(st.sampled_from(lineage.rivals))]
        lineage.chosen, lineage.rivals, lineage.batch = kept[-self.retain :], [], lineage.batch + 1
        lineage.handed = []

    @precondition(lambda self: any(one.rivals for one in self.lineages))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """The batch fails as a whole after its tasks have committed, and runs again."""
        lineage = data.draw(st.sampled_from([one for one in self.lineages if one.rivals]))
        lineage.rivals = []

    @precondition(lambda self: len(self.lineages) < 3)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """The checkpoint, as of the batch that is through."""
        of = data.draw(st.sampled_from([one for one in self.lineages if one.chosen[-1] is not None] or [None]))
        if of is not None:
            self.lineages.append(Lineage(f"copy-{len(self.lineages)}", of.batch, [of.chosen[-1]]))
            self.open_whole(self.lineages[-1], of.chosen[-1])

    @precondition(lambda self: any(len(one.chosen) > 1 for one in self.lineages))
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """A backup of the checkpoint, after the query was stopped; its servers may live on."""
        lineage = data.draw(st.sampled_from([one for one in self.lineages if len(one.chosen) > 1]))
        at = data.draw(st.integers(0, len(lineage.chosen) - 2))
        if lineage.chosen[at] is None:
            return
        self.attempts = [a for a in self.attempts if a.lineage is not lineage]
        lineage.batch -= len(lineage.chosen) - 1 - at
        lineage.chosen, lineage.rivals, lineage.handed = lineage.chosen[: at + 1], [], []

    # -- the rule -----------------------------------------------------------------------------------------

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        lineage = data.draw(st.sampled_from(self.lineages))
        self.open_whole(lineage, data.draw(st.sampled_from([*lineage.chosen, *lineage.rivals])))

    def open_whole(self, lineage: Lineage, token: str | None) -> None:
        """On a host that holds nothing."""
        shard = self.shard(lineage, HOSTS)
        try:
            name = f"{lineage.batch + 1:010d}-look-{next(self.numbers)}"
            shard.open(token, name, replace(IDENTITY, checkpoint=lineage.checkpoint))
            wanted = {(seq, *block) for seq, block in self.versions[token].items()}
            slices = sorted({slice_us for _, slice_us, _ in wanted})
            read = [(seq, block) for seq, block in shard.read(name, slices)]
            bodies = [bytes(block.body) if block.at is None else self.body(shard, block) for _, block in read]
            found = [(seq, block.header.slice_us, body) for (seq, block), body in zip(read, bodies, strict=True)]
            assert set(found) == wanted and len(found) == len(wanted)
            shard.abort(name)
        finally:
            del self.shards[lineage.checkpoint, HOSTS]
            shard.close()

    def teardown(self) -> None:
        try:
            for lineage in self.lineages:
                for token in (*lineage.chosen, *lineage.rivals):
                    self.open_whole(lineage, token)
        finally:
            for shard in self.shards.values():
                shard.close()
            for io in self.io:
                io.close()
            for remote in self.remotes:
                remote.close()
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Any]:
    numbers = itertools.count()
    yield lambda: tmp_path / str(next(numbers))


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["local", "remote"])
@pytest.mark.parametrize("retain", [1, 3])
def test_every_version_that_spark_may_name_can_be_opened_whole(folders: Any, kind: str, retain: int) -> None:
    run_state_machine_as_test(
        lambda: Cluster(kind, folders(), retain),
        settings=settings(some(1 / 2), stateful_step_count=40),
    )
