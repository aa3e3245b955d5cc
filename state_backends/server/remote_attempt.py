"""An attempt's work on one shard, through the state server. It survives the death of the server.

Before its commit, an attempt only appends blocks, replaces blocks, releases slices and puts values. What it has read,
and the panes that it has made, are in the worker. So if the server dies, the attempt resumes on the next server: it
opens the shard again at the version that it started from, sends the same blocks with the same numbers and the same
values in the same order, and repeats the call that failed. A read continues after the last block that it yielded,
because every server yields the blocks in the same order; a scan after the last key, a get after the last value. Nothing
is computed twice, so no pane is yielded twice.

If files of the server's host are damaged or missing, the attempt does the same once: the server makes the shard anew
from its version. If that does not help, the version itself is damaged, and the task fails.

Blocks and values that were sent are kept until the commit, up to the client's ``ReplayRoom`` for all attempts. An
attempt that has sent more cannot resume: it fails with ServerUnreachable, and Spark runs its task again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from policies.sizing import Execution
from state_backends.files.bodies import Bodies, Places
from state_backends.format.block import Block
from state_backends.format.errors import CorruptBlock, CorruptState, ServerUnreachable, StateError
from state_backends.format.ordered_map import Change
from state_backends.server import wire
from state_backends.server.verbs import VERBS
from state_backends.store.protocol import Only, StoredBlock
from state_backends.thresholds import threshold

REPLAY_BYTES = 64 << 20
MOST_SERVERS = 4
ABORT_SECONDS = 10.0

log = logging.getLogger(__name__)
BlocksToAppend = Sequence[tuple[int, bool, Block]]
"""(seq, late, block)."""
ToSend = BlocksToAppend | Sequence[Change]
_DAMAGE = CorruptBlock, CorruptState
_KEYS_AT_ONCE = threshold(1 << 16, 2)  # keys of one request
_VALUE_BYTES = 128  # what a value that is kept takes besides key and value


class _Sent(NamedTuple):
    """A request that must be repeated if the server is lost."""

    name: str
    request: dict[str, Any]
    content: ToSend | None
    size_bytes: int = 0


class ReplayRoom:
    """How many bytes all attempts of a client together may keep to send again. Attempts of several threads share it."""

    def __init__(self, size_bytes: int) -> None:
        self._lock = threading.Lock()
        self.size_bytes = self.left_bytes = size_bytes

    def take(self, size_bytes: int) -> bool:
        """Returns whether there was room for these bytes. If so, they are taken."""
        with self._lock:
            if size_bytes > self.left_bytes:
                return False
            self.left_bytes -= size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self.left_bytes += size_bytes


class Connection(Protocol):
    """What an attempt needs of a client. Every method raises ServerUnreachable if the server is gone."""

    generation: int
    """The number of the current server. It increases with every reconnect."""

    replay: ReplayRoom

    def call(
        self, name: str, request: dict[str, Any], sent: ToSend | None = None, *, timeout: float | None = None
    ) -> Any: ...
    def reconnect(self, seen: int) -> None: ...


class RemoteAttempt:
    """A :class:`state_backends.store.attempt.ShardAttempt` on a shard in the state server.

    ``opening``: the request that opens the shard; see requests.OpenRequest. Every call raises what the server raised
    (AttemptSuperseded if another attempt works on the shard now), or ServerUnreachable if Spark must run the task
    again.
    """

    def __init__(self, client: Connection, opening: dict[str, Any]) -> None:
        self._client = client
        self._opening = opening
        self.makes: str = opening["makes"]
        """The token of the version that the commit makes."""
        self._name = self.makes  # the current server's name for this attempt
        self.servers = 1
        """How often this attempt has opened the shard: once, and again after each lost server or broken call."""
        self._made_anew = False  # the shard, after damage
        self._sent: list[_Sent] | None = []  # it is None if that was too much, or is over
        self._kept_bytes = 0
        self._waiting: list[_Sent] = []  # requests that go with the next one
        self._answer: dict[str, Any] = {}
        seen = client.generation
        try:
            self._open()
        except ServerUnreachable as error:
            self._resume(error, seen)

    # -- the answer to opening the shard ------------------------------------------------------------------

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """The operator's state in the version that the attempt started from, or None if there was no version yet."""
        found: dict[str, Any] | None = self._answer["snapshot"]
        return found

    @property
    def finds_others(self) -> bool:
        """Whether a shard that begins has versions in its folder. Failed attempts may have left them."""
        return bool(self._answer.get("finds_others", False))

    @property
    def rebuilt(self) -> bool:
        """Whether the server rebuilt the shard from the files of its version. Then none of it is in memory."""
        return bool(self._answer.get("rebuilt", False))

    @property
    def on_disk(self) -> bool:
        """See :class:`state_backends.format.ordered_map.LazyMap`."""
        return bool(self._answer.get("on_disk", False))

    @property
    def others(self) -> tuple[int, Sequence[Any]]:
        """The number of the operator's other shards on the server, and their different ``learnt_bound``s."""
        found = self._answer.get("others", {"shards": 0, "learnt_bound": []})
        return found["shards"], found["learnt_bound"]

    @property
    def disk_times(self) -> tuple[Sequence[tuple[int, float, float]], Sequence[tuple[int, float]]]:
        """How long the disk took since an attempt last asked for it. Empty if this attempt did not ask.

        (bytes, seconds, seconds of waiting) of each prestage, and (bytes, seconds) of each file.
        """
        found = self._answer.get("disk_times", {"staged": [], "written": []})
        return found["staged"], found["written"]

    def mapped(self, block: Block) -> Block:
        """Returns the block; if a child has handed it over, one that opens its body when it is first read."""
        return self._bodies.of(block)

    # -- work ---------------------------------------------------------------------------------------------

    def learnt(self) -> tuple[int, Sequence[Any], Sequence[Any]]:
        """Like :attr:`others`, but now; and what each of these shards has observed of lateness."""
        found = self._call("learnt")
        return found["shards"], found["learnt_bound"], found["learnt"]

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        sent = list(blocks)
        self._call("append", sent, sum(block.size_bytes for _, _, block in sent))

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        yielded: list[int] = []
        number = 0

        def request() -> dict[str, Any]:
            nonlocal number
            number = 0
            return {"slices": list(slices), "blocking": blocking, "only": _as_json(only)}

        for stored in self._answers("read", request):
            number += 1
            if number > len(yielded):
                yielded.append(stored.seq)
                yield StoredBlock(stored.seq, self.mapped(stored.block))
            elif stored.seq != yielded[number - 1]:
                raise StateError(
                    f"the rebuilt shard yields block {stored.seq} where block {yielded[number - 1]} was before"
                )

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        self._call("prestage", slices=list(slices), only=_as_json(only))

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        self._call("replace", spans=_triples(spans), below=below)

    def abandon(self, from_seq: int) -> None:
        """Does nothing: an attempt in which something fails is undone as a whole."""

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        self._call("release", destage=list(destage), purge=list(purge))

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See :class:`state_backends.format.ordered_map.LazyMap` for this and the next three."""
        return list(self.stream(keys))

    def stream(self, keys: Sequence[bytes]) -> Iterator[bytes | None]:
        done = 0

        def request() -> dict[str, Any]:
            return {"keys": wire.pack_keys(keys[done : done + _KEYS_AT_ONCE])}

        while done < len(keys):
            for value in self._answers("get", request):
                done += 1
                yield value

    def put(self, values: Sequence[Change]) -> None:
        if values:
            sent = list(values)
            size = sum(len(value[0]) + len(value[1] or b"") + _VALUE_BYTES for value in sent)
            self._call("put", sent, size)

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        def request() -> dict[str, Any]:
            return {"begin": wire.pack_key(begin), "end": None if end is None else wire.pack_key(end)}

        for key, value in self._answers("scan", request):
            begin = key + b"\0"  # the next key that is possible
            yield key, value

    def commit(
        self,
        snapshot: dict[str, Any],
        prestage: Sequence[int] = (),
        executions: Sequence[Execution] = (),
        later: Sequence[int] = (),
        keys: Sequence[bytes] = (),
    ) -> None:
        """Commits. ``prestage``, ``keys``: what the next attempt will probably read. ``executions``: of this attempt.

        ``later``: slices that attempts after the next one will probably read, the soonest first.

        The server may die after the commit and before its answer. Then the same blocks are committed again as the same
        version. That is safe, because nobody asks for the version before this returns.
        """
        tuples = [tuple(execution) for execution in executions]
        ahead = {"prestage": list(prestage), "later": list(later), "keys": wire.pack_keys(keys) if keys else None}
        self._call("commit", snapshot=snapshot, executions=tuples, **ahead)
        self._forget()

    def abort(self) -> None:
        self._forget()
        with contextlib.suppress(StateError):
            # This may fail: the next attempt undoes what was not committed. And the task should fail with its own
            # error, not with an error of this request.
            self._client.call("abort", self._me, timeout=ABORT_SECONDS)

    # -- another server -----------------------------------------------------------------------------------

    def _answers(self, name: str, request: Callable[[], dict[str, Any]]) -> Iterator[Any]:
        """Yields what a verb answers with, as it comes. Asks the next server if this one is lost.

        ``request``: the fields of the request, for what has not been yielded yet. Called for each server.
        """
        while True:
            seen, servers, carried = self._client.generation, self.servers, len(self._waiting)
            try:
                for found in self._client.call(name, self._request(request())):
                    self._arrived(carried)
                    carried = 0
                    yield found
                self._arrived(carried)
                return
            except ServerUnreachable as error:
                # Another call may have noticed before this one, and the attempt is on the next server already.
                if self.servers == servers:
                    self._resume(error, seen)
            except _DAMAGE as error:
                self._make_anew(error)

    def _call(self, name: str, content: ToSend | None = None, size_bytes: int = 0, /, **request: Any) -> Any:
        """Sends a request, or keeps it for the next one. Repeats it on the next server if this one is lost.

        ``content``: the blocks or values that follow it, with ``size_bytes``.
        """
        if VERBS[name].waits:
            self._waiting.append(_Sent(name, request, None))
            return None
        while True:
            seen = self._client.generation
            try:
                answer = self._client.call(name, self._request(request), content)
                break
            except ServerUnreachable as error:
                self._resume(error, seen)
            except _DAMAGE as error:
                self._make_anew(error)
        self._arrived(len(self._waiting))
        if VERBS[name].replay:
            self._keep(_Sent(name, request, content, size_bytes))
        return answer

    def _request(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns a request with these fields, and with those that have waited for it."""
        return {**self._me, "before": [(sent.name, sent.request) for sent in self._waiting], **fields}

    @property
    def _me(self) -> dict[str, Any]:
        return {"attempt": self._name, "server": self._answer["server"]}

    def _arrived(self, count: int) -> None:
        """The server has done the first ``count`` requests that waited."""
        for sent in self._waiting[:count]:
            self._keep(sent)
        del self._waiting[:count]

    def _resume(self, lost: ServerUnreachable, seen: int) -> None:
        """Opens the shard on the next server and repeats what was sent. Raises ServerUnreachable if it cannot."""
        while True:
            if self._sent is None:
                raise ServerUnreachable(
                    f"the state server was lost ({lost}), and this task had sent more than the "
                    f"{self._client.replay.size_bytes / (1 << 20):.0f} MiB that a worker keeps to send again"
                ) from None
            if self.servers == MOST_SERVERS:
                raise ServerUnreachable(
                    f"the state server was lost {MOST_SERVERS} times in one task; the last time: {lost}"
                ) from None
            self._rename()
            log.warning("attempt %s continues on another server as %s: %s", self.makes, self._name, lost)
            try:
                self._client.reconnect(seen)
                seen = self._client.generation
                self._open_again(self._sent)
                return
            except ServerUnreachable as again:
                lost = again

    def _make_anew(self, damage: StateError) -> None:
        """Opens the shard again, which makes it anew, and repeats what was sent. Raises ``damage`` the second time."""
        if self._made_anew or self._sent is None:
            raise damage
        self._made_anew = True
        self._rename()
        log.warning("attempt %s opens its shard again as %s: %s", self.makes, self._name, damage)
        seen = self._client.generation
        try:
            self._open_again(self._sent)
        except ServerUnreachable as error:
            self._resume(error, seen)

    def _rename(self) -> None:
        self.servers += 1
        self._name = f"{self.makes}.{self.servers}"

    def _open_again(self, to_send: Sequence[_Sent]) -> None:
        self._open()
        for sent in to_send:
            self._client.call(sent.name, {**self._me, **sent.request}, sent.content)

    def _open(self) -> None:
        self._answer = self._client.call("open", {**self._opening, "attempt": self._name})
        places = Places(*self._answer.get("bodies", ((),)))
        self._bodies = Bodies(places, _fetch if places.uri else None)

    def _keep(self, sent: _Sent) -> None:
        if self._sent is None:
            return
        if not self._client.replay.take(sent.size_bytes):
            self._forget()
            return
        self._kept_bytes += sent.size_bytes
        self._sent.append(sent)

    def _forget(self) -> None:
        self._sent = None
        self._client.replay.give_back(self._kept_bytes)
        self._kept_bytes = 0


def _fetch(places: Places, reference: Block) -> bytes:
    from state_backends.files.handed_remote import fetch_body  # only here: it takes 0.2 s to import

    return fetch_body(places, reference)


def _triples(spans: Mapping[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
    return [(slice_us, after, until) for slice_us, (after, until) in spans.items()]


def _as_json(only: Only | None) -> dict[str, Any] | None:
    if only is None:
        return None
    return {"spans": None if only.spans is None else _triples(only.spans), "keys": only.keys, "below": only.below}
