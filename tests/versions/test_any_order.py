"""Attempts in any order, against what they committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.examples import some
from tests.stores.rig import EAGER
from tests.versions.host import Host


class ShardMachine(RuleBasedStateMachine):
    """Attempts that are committed, aborted, left, superseded; hosts that come and go; versions old and new.

    Spark asks for the version that it chose last, or for one that was committed on it (and so chooses that one), or,
    when a user goes back to an older checkpoint, for one that the chosen one came from. It never asks for others.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__()
        self.host = Host(kind, folder, limits=EAGER)
        # Every version: the seqs and slices of its blocks, by contents; and the version that it came from.
        self.versions: dict[str | None, dict[bytes, tuple[int, int]]] = {None: {}}
        self.parents: dict[str | None, str | None] = {}
        self.chosen: str | None = None
        self.rivals: list[str | None] = []  # what was committed on it: Spark may choose any of them
        self.attempt: str | None = None
        self.mine: dict[bytes, tuple[int, int]] = {}
        self.purging: set[int] = set()
        self.slices: set[int] = set()  # all that ever had a block: those without one must stay empty
        self.next_seq = 0
        self.clock = 0

    def askable(self) -> list[str | None]:
        older: list[str | None] = [self.chosen]
        while older[-1] is not None:
            older.append(self.parents[older[-1]])
        return [*older, *self.rivals]

    @rule(data=st.data(), other=st.booleans())
    def open(self, data: st.DataObject, other: bool) -> None:
        if other:
            self.chosen, self.rivals = data.draw(st.sampled_from(self.askable())), []
        self.attempt, snapshot = self.host.open(self.chosen)
        self.mine = dict(self.versions[self.chosen])
        self.purging = set()
        self.next_seq = snapshot["next_seq"] if snapshot else 0
        assert (snapshot or {}).get("version") == self.chosen

    @precondition(lambda self: self.attempt)
    @rule(count=st.integers(1, 5), slice_=st.integers(0, 3), late=st.booleans())
    def append(self, count: int, slice_: int, late: bool) -> None:
        assert self.attempt
        for _ in range(count):
            self.clock += 1
            slice_us = slice_ + 10 * (self.clock // 20)
            self.purging.discard(slice_us)  # what gets blocks is not purged
            self.slices.add(slice_us)
            known = set(self.host.blocks)
            self.host.append(self.attempt, (self.next_seq, slice_us), late=late)
            (data,) = self.host.blocks.keys() - known
            self.mine[data] = (self.next_seq, slice_us)
            self.next_seq += 1

    @precondition(lambda self: self.attempt and self.mine)
    @rule(data=st.data(), late=st.booleans())
    def compaction(self, data: st.DataObject, late: bool) -> None:
        """Replaces the last blocks of a slice by a new one."""
        assert self.attempt
        slice_us = data.draw(st.sampled_from(sorted({s for _, s in self.mine.values()})))
        if slice_us in self.purging:
            return
        seqs = sorted(seq for seq, s in self.mine.values() if s == slice_us)
        after = data.draw(st.sampled_from([-1, *seqs[:-1]]))
        known = set(self.host.blocks)
        self.host.append(self.attempt, (self.next_seq, slice_us), late=late)
        (new,) = self.host.blocks.keys() - known
        self.host.shard.replace(self.attempt, {slice_us: (after, seqs[-1])}, self.next_seq)
        self.mine = {d: (q, s) for d, (q, s) in self.mine.items() if s != slice_us or q <= after}
        self.mine[new] = (self.next_seq, slice_us)
        self.next_seq += 1

    @precondition(lambda self: self.attempt)
    @rule()
    def read(self) -> None:
        assert self.attempt
        found = self.host.read(self.attempt, *sorted(self.slices))
        wanted = sorted((s, seq, data) for data, (seq, s) in self.mine.items())
        assert found == [(seq, data) for _, seq, data in wanted]

    @precondition(lambda self: self.attempt)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        assert self.attempt
        slices = sorted({s for _, s in self.mine.values()})
        some = st.lists(st.sampled_from(slices), max_size=2, unique=True) if slices else st.just([])
        self.host.shard.release(self.attempt, data.draw(some))
        purge = data.draw(some)
        self.host.shard.release(self.attempt, purge=purge)
        self.purging |= set(purge)

    @precondition(lambda self: self.attempt)
    @rule()
    def commit(self) -> None:
        """Whether Spark takes the version shows when it asks for the next one."""
        assert self.attempt
        self.host.shard.commit(self.attempt, {"next_seq": self.next_seq, "version": self.attempt})
        self.versions[self.attempt] = {d: p for d, p in self.mine.items() if p[1] not in self.purging}
        self.parents[self.attempt] = self.chosen
        self.rivals.append(self.attempt)
        self.attempt = None

    @precondition(lambda self: self.attempt)
    @rule()
    def abort(self) -> None:
        assert self.attempt
        self.host.shard.abort(self.attempt)
        self.attempt = None

    @rule()
    def restart(self) -> None:
        self.host.restart()
        self.attempt = None

    def teardown(self) -> None:
        self.host.restart()
        for token in self.askable():
            blocks = self.versions[token]
            wanted = [seq for _, seq in sorted((s, q) for q, s in blocks.values())]
            assert self.host.seqs(token, *sorted(self.slices)) == wanted
        self.host.stop()


@pytest.mark.hypothesis
def test_any_order_of_attempts(kind: str, tmp_path: Path) -> None:
    folders = iter(range(10**9))
    run_state_machine_as_test(
        lambda: ShardMachine(kind, tmp_path / str(next(folders))),
        settings=settings(some(1 / 2), stateful_step_count=30),
    )
