"""Keyed values in any order of attempts, against a dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from state_backends.format.ordered_map import MapValue
from state_backends.store.io_thread import Priority
from tests.examples import some
from tests.io_thread.rig import result
from tests.stores.rig import nothing
from tests.versions.host import Host
from tests.versions.keyed_attempt import LocalKeyedAttempt

KEYS = st.one_of(
    st.binary(min_size=1, max_size=3), st.integers(0, 30).map(lambda n: b"key-%02d" % n), st.just(b"\xff\xff")
)
SIZES = st.sampled_from([1, 10, 300, 2000])


class KeyedMachine(RuleBasedStateMachine):
    """Attempts that put, delete, read and scan; that are committed, aborted, left; hosts that come and go.

    Blocks come and go beside the values. Spark asks for the newest version, or for an older one.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__()
        self.kind, self.folder = kind, folder
        self.versions: dict[str | None, dict[bytes, bytes]] = {None: {}}
        self.blocks: dict[str | None, int] = {None: 0}
        self.parents: dict[str | None, str | None] = {}
        self.chosen: str | None = None
        self.attempt: str | None = None
        self.mine: dict[bytes, bytes] = {}
        self.writes = 0

    @initialize(budget=st.sampled_from([2 << 10, 16 << 10, 1 << 20]))
    def begin(self, budget: int) -> None:
        self.host = Host(self.kind, self.folder, budget=budget)

    @property
    def values(self) -> LocalKeyedAttempt:
        assert self.attempt is not None
        return LocalKeyedAttempt(self.host.shard, self.attempt)

    def askable(self) -> list[str | None]:
        older: list[str | None] = [self.chosen]
        while older[-1] is not None:
            older.append(self.parents[older[-1]])
        return older

    @rule(data=st.data(), older=st.booleans())
    def open(self, data: st.DataObject, older: bool) -> None:
        if older:
            self.chosen = data.draw(st.sampled_from(self.askable()))
        self.attempt, snapshot = self.host.open(self.chosen)
        assert (snapshot or {}).get("version") == self.chosen
        self.mine = dict(self.versions[self.chosen])
        self.next_seq = self.blocks[self.chosen]

    @precondition(lambda self: self.attempt)
    @rule(keys=st.lists(KEYS, min_size=1, max_size=12), size=SIZES, needed=st.none() | st.integers(-5, 100))
    def put(self, keys: list[bytes], size: int, needed: int | None) -> None:
        values = []
        for key in keys:
            self.writes += 1
            value = (b"%d " % self.writes).ljust(size, b"v")
            values.append(MapValue(key, value, needed))
            self.mine[key] = value
        self.values.put(values)

    @precondition(lambda self: self.attempt)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.mine)) if self.mine else KEYS, max_size=10))
        self.values.put([MapValue(key, None) for key in keys])
        for key in keys:
            self.mine.pop(key, None)

    @precondition(lambda self: self.attempt)
    @rule(count=st.integers(1, 3))
    def append(self, count: int) -> None:
        assert self.attempt is not None
        self.host.append(self.attempt, *((self.next_seq + n, 0) for n in range(count)))
        self.next_seq += count

    @precondition(lambda self: self.attempt)
    @rule(keys=st.lists(KEYS, max_size=20))
    def get(self, keys: list[bytes]) -> None:
        keys = [*keys, *sorted(self.mine)[::3]]
        assert self.values.get(keys) == [self.mine.get(key) for key in keys]

    @precondition(lambda self: self.attempt)
    @rule(begin=st.just(b"") | KEYS, end=st.none() | KEYS, key=KEYS)
    def scan(self, begin: bytes, end: bytes | None, key: bytes) -> None:
        entries = self.values.scan(begin, end)
        wanted = [(k, self.mine[k]) for k in sorted(self.mine) if k >= begin and (end is None or k < end)]
        self.values.put([MapValue(b"\xfe" + key, b"put while a scan is under way")])
        self.mine[b"\xfe" + key] = b"put while a scan is under way"
        assert [(k, v) for k, v in entries if k[:1] != b"\xfe"] == [(k, v) for k, v in wanted if k[:1] != b"\xfe"]

    @precondition(lambda self: self.host.shard)
    @rule(keys=st.lists(KEYS, max_size=20))
    def expect(self, keys: list[bytes]) -> None:
        self.host.shard.expect([*keys, *sorted(self.mine)[::2]])

    @rule()
    def settle(self) -> None:
        """Merges come to their end."""
        result(self.host.io.submit(Priority.MAINTENANCE, nothing()))

    @precondition(lambda self: self.attempt)
    @rule(expected=st.none() | st.integers(-5, 100))
    def commit(self, expected: int | None) -> None:
        assert self.attempt is not None
        told: dict[str, Any] = {} if expected is None else {"expected_ms": expected}
        self.host.shard.commit(self.attempt, {"next_seq": self.next_seq, "version": self.attempt, **told})
        self.versions[self.attempt] = self.mine
        self.blocks[self.attempt] = self.next_seq
        self.parents[self.attempt] = self.chosen
        self.chosen, self.attempt = self.attempt, None
        self.host.map.validate()

    @precondition(lambda self: self.attempt)
    @rule(calls=st.integers(2, 6))
    def several(self, calls: int) -> None:
        """Commits one after another, so that runs are merged."""
        for n in range(calls):
            self.put([b"key-%02d" % n, b"key-%02d" % (n + 1)], 10, None)
            self.commit(None)
            self.settle()
            self.open(None, False)  # type: ignore[arg-type]

    @precondition(lambda self: self.attempt)
    @rule()
    def abort(self) -> None:
        assert self.attempt is not None
        self.host.shard.abort(self.attempt)
        self.attempt = None

    @rule()
    def restart(self) -> None:
        self.host.restart()
        self.attempt = None

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        self.host.restart()
        for token in self.askable():
            self.chosen = token
            self.attempt, _ = self.host.open(token)
            assert dict(self.values.scan(b"", None)) == self.versions[token]
            assert self.host.seqs(token, 0) == [*range(self.blocks[token])]
        self.host.stop()
        assert self.host.budget.cached_bytes == 0
        assert self.host.budget.used_bytes == 0


@pytest.mark.hypothesis
def test_keyed_values_in_any_order_of_attempts(kind: str, quick_folder: Path) -> None:
    folders = iter(range(10**9))
    run_state_machine_as_test(
        lambda: KeyedMachine(kind, quick_folder / str(next(folders))),
        settings=settings(some(1 / 2), stateful_step_count=40),
    )
