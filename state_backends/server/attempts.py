"""Keeps track of which attempt works on which shard of a host."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Collection, Container, Iterator
from typing import NamedTuple

from state_backends.format.errors import AionError, AttemptSuperseded, RequestError, ServerError, ServerUnreachable
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard

ShardKey = tuple[str, str, int]
"""(query, operator, number of the shard)."""


class Work(NamedTuple):
    """What an attempt works on. ``lock``: the lock of the shard."""

    key: ShardKey
    shard: Shard
    lock: threading.Lock

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the shard's lock. Closes the shard after an unexpected error.

        For example, a RocksDB that failed to write once may refuse all later writes. The versions are whole, so the
        next attempt rebuilds the shard from its version.
        """
        with self.lock:
            try:
                yield
            except AionError:
                raise
            except BaseException:
                with contextlib.suppress(Exception):
                    self.shard.close()
                raise


class Attempts:
    """The attempts that work on this host, by their names here. Invariant: at most one works on a shard.

    It also records to which run and operator each (query, name) belongs. It has its own lock.
    """

    def __init__(self) -> None:
        self.server = uuid.uuid4().hex
        """Identifies this server. An attempt that began here says so in its requests."""
        self._lock = threading.RLock()
        self._work: dict[str, Work] = {}  # by attempt
        self._at_work: dict[ShardKey, str] = {}
        self._owners: dict[tuple[str, str], tuple[str, str]] = {}  # (query, name) -> (run, operator's uid)
        self._places: dict[ShardKey, tuple[str, tuple[int, int]]] = {}  # the run, and the place of the last attempt

    def __len__(self) -> int:
        return len(self._work)

    def check(self, attempt: str, identity: Identity, run: str, uid: str, place: tuple[int, int] | None) -> ShardKey:
        """Returns the key of the shard that an attempt wants to open.

        Raises RequestError if the attempt works on another shard. Raises ServerError if two operators of one query have
        the same name, or one is in it twice, because they would share their state. ``place``: Spark's stage, and the
        partition in it. Attempts of one stage on a shard are in the same partition; in another one is a second copy.
        """
        key = (identity.query, identity.operator, identity.shard)
        with self._lock:
            if attempt in self._work and self._work[attempt].key != key:
                raise RequestError(f"open: attempt {attempt} works on another shard")
            owner = self._owners.get(key[:2])
            stateful = identity.definition.get("kind") == "stateful"
            if owner is not None and owner[0] == run and owner[1] != uid:
                raise ServerError(named_twice(identity.operator, stateful=stateful))
            self._owners[key[:2]] = (run, uid)
            if place is not None:
                known_run, known = self._places.get(key, (run, place))
                if known_run == run and known[0] == place[0] and known[1] != place[1]:
                    raise ServerError(used_twice(identity.operator, stateful=stateful))
                self._places[key] = run, place
        return key

    def begin(self, attempt: str, work: Work) -> None:
        """Starts an attempt on a shard. Ends the attempt that worked on it before."""
        with self._lock:
            self.end(self._at_work.get(work.key))
            self._at_work[work.key] = attempt
            self._work[attempt] = work

    def end(self, attempt: str | None) -> None:
        with self._lock:
            if attempt is None or attempt not in self._work:
                return
            key = self._work.pop(attempt).key
            if self._at_work.get(key) == attempt:
                del self._at_work[key]

    def at_work(self, key: ShardKey) -> bool:
        """Returns whether an attempt works on the shard."""
        return key in self._at_work

    def find(self, attempt: str, server: str = "") -> Work:
        """``server``: where the attempt began, as it says.

        Raises AttemptSuperseded if the attempt has ended, ServerUnreachable if it never began here.
        """
        with self._lock:
            if attempt in self._work:
                return self._work[attempt]
        if server == self.server:
            raise AttemptSuperseded(f"attempt {attempt} has ended, or another has taken its place")
        raise ServerUnreachable(f"attempt {attempt} never began here: the state server was restarted")

    def operators_of(self, runs: Container[str]) -> set[tuple[str, str]]:
        """Returns the operators, as (query, name), that belong to these runs."""
        with self._lock:
            return {operator for operator, (run, _) in self._owners.items() if run in runs}

    def forget(self, closed: Collection[ShardKey], remaining: Collection[ShardKey]) -> None:
        """Forgets shards that were closed. ``remaining``: the shards that are still on this host."""
        with self._lock:
            for key in closed:
                self.end(self._at_work.get(key))
                self._places.pop(key, None)
            operators = {key[:2] for key in remaining}
            self._owners = {operator: owner for operator, owner in self._owners.items() if operator in operators}


def named_twice(operator: str, *, stateful: bool) -> str:
    """Says that a query has two operators of this name."""
    return f"two operators of this query are both named {operator!r}; give each its own: {_call(stateful)}"


def used_twice(operator: str, *, stateful: bool) -> str:
    """Says that a query uses the result of an operator twice."""
    both = "use the batch" if stateful else "call aion.panes and aion.dropped"
    return (
        f"the result of the operator {operator!r} is used twice in this query, so its state would be written twice. "
        f"Use it once, and take it apart in foreachBatch: after batch.persist(), {both} there as often as you like. Or "
        f"make it twice, each with a state of its own: {_call(stateful)}"
    )


def _call(stateful: bool) -> str:
    return f"{'aion.group_by' if stateful else 'aion.windowed'}(..., name='...')"
