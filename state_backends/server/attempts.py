"""Which attempt is at work on which shard of a host."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Collection, Container, Iterator
from typing import NamedTuple

from aion.errors import AionError, RequestError, ServerError, ServerUnreachable, SessionSuperseded
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard

ShardKey = tuple[str, str, int]
"""Query, operator, number of the shard."""

_REMEMBERED = 32  # sessions of a shard that are over and may still ask


class Work(NamedTuple):
    """What an attempt works on. ``lock``: of the shard."""

    key: ShardKey
    shard: Shard
    lock: threading.Lock

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the shard's lock. Closes the shard when something fails that should not.

        If RocksDB fails to write once, it may refuse to write ever after. The versions are whole: the next attempt gets
        the shard built from them.
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
    """The sessions under which attempts are known here. Invariant: a shard has one at most.

    It also owns which operator of which run a name belongs to. It has a lock of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._work: dict[str, Work] = {}  # by session
        self._at_work: dict[ShardKey, str] = {}
        self._over: dict[ShardKey, deque[str]] = {}
        self._owners: dict[tuple[str, str], tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._work)

    def check(self, session: str, identity: Identity, run: str, uid: str) -> ShardKey:
        """The key of the shard that a session wants to open.

        Raises RequestError if the session is at work on another shard. Raises ServerError if two operators of one query
        have the same name: they would share their state.
        """
        key = (identity.query, identity.operator, identity.shard)
        with self._lock:
            if session in self._work and self._work[session].key != key:
                raise RequestError(f"open: session {session} is at work on another shard")
            owner = self._owners.get(key[:2])
            if owner is not None and owner[0] == run and owner[1] != uid:
                raise ServerError(
                    f"two operators of this query are both named {identity.operator!r}; "
                    "give each its own: aion.windowed(..., name='...')"
                )
            self._owners[key[:2]] = (run, uid)
        return key

    def begin(self, session: str, work: Work) -> None:
        """From now on this session is at work on the shard. The one before is over."""
        with self._lock:
            self.end(self._at_work.get(work.key))
            self._at_work[work.key] = session
            self._work[session] = work

    def end(self, session: str | None) -> None:
        with self._lock:
            if session is None or session not in self._work:
                return
            key = self._work.pop(session).key
            self._over.setdefault(key, deque(maxlen=_REMEMBERED)).append(session)
            if self._at_work.get(key) == session:
                del self._at_work[key]

    def is_at_work(self, key: ShardKey) -> bool:
        return key in self._at_work

    def find(self, session: str) -> Work:
        """Raises SessionSuperseded if the session is over, ServerUnreachable if it was never opened here."""
        with self._lock:
            if session in self._work:
                return self._work[session]
            if any(session in over for over in self._over.values()):
                raise SessionSuperseded(f"session {session} is over: it was ended, or another attempt took its place")
        raise ServerUnreachable(f"session {session} was never opened here: the state server was restarted")

    def operators_of(self, runs: Container[str]) -> set[tuple[str, str]]:
        """The operators, as (query, name), that belong to these runs."""
        with self._lock:
            return {operator for operator, (run, _) in self._owners.items() if run in runs}

    def forget(self, gone: Collection[ShardKey], held: Collection[ShardKey]) -> None:
        """The shards ``gone`` are closed. ``held``: those that are still here."""
        with self._lock:
            for key in gone:
                self.end(self._at_work.get(key))
                self._over.pop(key, None)
            operators = {key[:2] for key in held}
            self._owners = {operator: owner for operator, owner in self._owners.items() if operator in operators}
