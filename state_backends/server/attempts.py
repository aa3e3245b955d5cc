"""Keeps track of which attempt works on which shard of a host."""

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
"""(query, operator, number of the shard)."""

_REMEMBERED = 32  # ended sessions of a shard, whose clients may still send requests


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
    """The sessions of the attempts that work on this host. Invariant: a shard has at most one session.

    It also records to which run and operator each (query, name) belongs. It has its own lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._work: dict[str, Work] = {}  # by session
        self._sessions: dict[ShardKey, str] = {}
        self._ended: dict[ShardKey, deque[str]] = {}
        self._owners: dict[tuple[str, str], tuple[str, str]] = {}  # (query, name) -> (run, operator's uid)

    def __len__(self) -> int:
        return len(self._work)

    def check(self, session: str, identity: Identity, run: str, uid: str) -> ShardKey:
        """The key of the shard that a session wants to open.

        Raises RequestError if the session works on another shard. Raises ServerError if two operators of one query have
        the same name, because they would share their state.
        """
        key = (identity.query, identity.operator, identity.shard)
        with self._lock:
            if session in self._work and self._work[session].key != key:
                raise RequestError(f"open: session {session} works on another shard")
            owner = self._owners.get(key[:2])
            if owner is not None and owner[0] == run and owner[1] != uid:
                raise ServerError(
                    f"two operators of this query are both named {identity.operator!r}; "
                    "give each its own: aion.windowed(..., name='...')"
                )
            self._owners[key[:2]] = (run, uid)
        return key

    def begin(self, session: str, work: Work) -> None:
        """Starts a session on a shard. Ends the session that worked on it before."""
        with self._lock:
            self.end(self._sessions.get(work.key))
            self._sessions[work.key] = session
            self._work[session] = work

    def end(self, session: str | None) -> None:
        with self._lock:
            if session is None or session not in self._work:
                return
            key = self._work.pop(session).key
            self._ended.setdefault(key, deque(maxlen=_REMEMBERED)).append(session)
            if self._sessions.get(key) == session:
                del self._sessions[key]

    def has_session(self, key: ShardKey) -> bool:
        return key in self._sessions

    def find(self, session: str) -> Work:
        """Raises SessionSuperseded if the session has ended, ServerUnreachable if it was never opened here."""
        with self._lock:
            if session in self._work:
                return self._work[session]
            if any(session in ended for ended in self._ended.values()):
                raise SessionSuperseded(f"session {session} has ended, or another attempt has taken its place")
        raise ServerUnreachable(f"session {session} was never opened here: the state server was restarted")

    def operators_of(self, runs: Container[str]) -> set[tuple[str, str]]:
        """The operators, as (query, name), that belong to these runs."""
        with self._lock:
            return {operator for operator, (run, _) in self._owners.items() if run in runs}

    def forget(self, closed: Collection[ShardKey], remaining: Collection[ShardKey]) -> None:
        """Forgets shards that were closed. ``remaining``: the shards that are still on this host."""
        with self._lock:
            for key in closed:
                self.end(self._sessions.get(key))
                self._ended.pop(key, None)
            operators = {key[:2] for key in remaining}
            self._owners = {operator: owner for operator, owner in self._owners.items() if operator in operators}
