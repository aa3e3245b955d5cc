"""An attempt's work on one shard, through the state server; it survives the server.

What an attempt did before its commit is nothing but the blocks that it appended and the slices that it released; what
it read, and the panes it made of that, are the worker's. So if the server dies, the attempt takes another turn: the
shard is opened again, on whatever server there is then, at the version that the attempt started from; the same blocks
are appended under the same numbers; and the call that failed is made again. A read goes on behind the last block that
it yielded: blocks come in the same order from any server. Nothing is computed twice, so nothing can be yielded twice.

The blocks are kept until the commit, up to ``REPLAY_BYTES`` for all sessions of a worker. An attempt that sent more
cannot take another turn: it fails with ServerUnreachable, and Spark runs its task again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from aion.core.ingest.block import Block
from aion.errors import ServerUnreachable, StateError
from policies.sizing import Execution
from state_backends.store.protocol import Only, StoredBlock

REPLAY_BYTES = 64 << 20
TURNS = 4
ABORT_SECONDS = 10.0

log = logging.getLogger(__name__)
T = TypeVar("T")


class Blocks(NamedTuple):
    """Appended blocks: (seq, late, block)."""

    blocks: Sequence[tuple[int, bool, Block]]


class Released(NamedTuple):
    destage: Sequence[int]
    purge: Sequence[int]


class Superseded(NamedTuple):
    """Blocks that are read no more, (slice, after, until): those from ``below`` on stand for them."""

    spans: Sequence[tuple[int, int, int]]
    below: int


class Connection(Protocol):
    """What a session needs of a client. Everything raises ServerUnreachable when the server is gone."""

    generation: int
    """Which server it is, or was; goes up with every reconnect."""

    replay_bytes_left: int
    """What sessions may still keep, together."""

    def act(self, name: str, request: dict[str, Any], timeout: float | None = None) -> Any: ...
    def put(self, session: str, blocks: Iterable[tuple[int, bool, Block]]) -> None: ...
    def get(self, session: str, slices: Sequence[int], **how: Any) -> Iterator[StoredBlock]: ...
    def reconnect(self, seen: int) -> None: ...


class RemoteSession:
    """The executor's ``Session`` protocol. ``opening``: the request that opens the shard; see requests.Open.

    Every call raises what the server raised (SessionSuperseded once another attempt is at work), or
    ServerUnreachable when there is no going on without Spark's running the task again.
    """

    def __init__(self, client: Connection, opening: dict[str, Any]) -> None:
        self._client = client
        self._opening = opening
        self.attempt: str = opening["attempt"]
        self._session = self.attempt
        self._turns = 1
        self._sent: list[Blocks | Released | Superseded] | None = []
        self._kept_bytes = 0
        self._answer: dict[str, Any] = {}
        seen = client.generation
        try:
            self._open()
        except ServerUnreachable as error:
            self._take_another_turn(error, seen)

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """The operator's, as of the version that the attempt started from; None for the very first."""
        found: dict[str, Any] | None = self._answer["snapshot"]
        return found

    @property
    def rebuilt(self) -> bool:
        """Whether the server had to build the shard from its version's files: nothing of it is in memory then."""
        return bool(self._answer.get("rebuilt", False))

    @property
    def others(self) -> tuple[int, Sequence[Any]]:
        """Of how many other shards of the operator their server knows, and the different things they stand on."""
        found = self._answer.get("others", {"shards": 0, "told": []})
        return found["shards"], found["told"]

    @property
    def moved(self) -> tuple[Sequence[tuple[int, float, float]], Sequence[tuple[int, float]]]:
        """Bytes and seconds of prestages, with those that they waited for their turn, and of files written.

        Since an attempt was told last; none if it was not asked for.
        """
        found = self._answer.get("moved", {"staged": [], "written": []})
        return found["staged"], found["written"]

    def learnt(self) -> tuple[int, Sequence[Any], Sequence[Any]]:
        """The same as of now, and what each of them observed of lateness."""
        found = self._act("learnt")
        return found["shards"], found["told"], found["learnt"]

    @property
    def turns(self) -> int:
        """Servers that this attempt has worked with, or turns at one."""
        return self._turns

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        sending = Blocks(list(blocks))
        self._going_on(lambda: self._client.put(self._session, sending.blocks))
        self._keep(sending, sum(block.size_bytes for _, _, block in sending.blocks))

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        taken: list[int] = []
        how = {"blocking": blocking, **_told(only)}
        while True:
            seen = self._client.generation
            try:
                for number, stored in enumerate(self._client.get(self._session, slices, **how)):
                    if number < len(taken):
                        if stored.seq != taken[number]:
                            raise StateError(
                                f"the rebuilt shard yields block {stored.seq} where block {taken[number]} was before"
                            )
                        continue
                    taken.append(stored.seq)
                    yield stored
                return
            except ServerUnreachable as error:
                self._take_another_turn(error, seen)

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        self._act("prestage", slices=list(slices), **_told(only))

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        superseded = Superseded([(s, after, until) for s, (after, until) in spans.items()], below)
        self._act("supersede", **superseded._asdict())
        self._keep(superseded, 0)

    def abandon(self, from_seq: int) -> None:
        """Nothing to do: an attempt in which something failed is undone as a whole."""

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        self._act("release", destage=list(destage), purge=list(purge))
        self._keep(Released(list(destage), list(purge)), 0)

    def commit(
        self, snapshot: dict[str, Any], prestage: Sequence[int] = (), executions: Sequence[Execution] = ()
    ) -> None:
        """``prestage``: slices that the next attempt is expected to read; ``executions``: those of this one.

        If the server dies after it has committed and before it says so, the version is written again, of the same
        blocks: until this returns nobody asks for it.
        """
        self._act(
            "commit",
            snapshot=snapshot,
            prestage=list(prestage),
            executions=[tuple(execution) for execution in executions],
        )
        self._forget()

    def abort(self) -> None:
        self._forget()
        with contextlib.suppress(StateError):
            # It need not succeed: whoever opens the shard next undoes what is not committed. And what is wrong with
            # the attempt is what its task fails with, not that its session is over.
            self._client.act("abort", {"session": self._session}, ABORT_SECONDS)

    # -- another turn -------------------------------------------------------------------------------------

    def _act(self, name: str, **request: Any) -> Any:
        return self._going_on(lambda: self._client.act(name, {"session": self._session, **request}))

    def _going_on(self, call: Callable[[], T]) -> T:
        """The call, if need be again in another turn."""
        while True:
            seen = self._client.generation
            try:
                return call()
            except ServerUnreachable as error:
                self._take_another_turn(error, seen)

    def _take_another_turn(self, lost: ServerUnreachable, seen: int) -> None:
        """Brings a server to where this attempt was. Raises ServerUnreachable if that cannot be."""
        while True:
            if self._sent is None:
                raise ServerUnreachable(
                    f"the state server was lost ({lost}) after this task had sent it more than the "
                    f"{REPLAY_BYTES >> 20} MiB that a worker keeps to send again"
                ) from lost
            if self._turns == TURNS:
                raise ServerUnreachable(
                    f"the state server was lost {TURNS} times in one task, at last: {lost}"
                ) from lost
            self._turns += 1
            self._session = f"{self.attempt}.{self._turns}"
            log.warning("attempt %s goes on as %s: %s", self.attempt, self._session, lost)
            try:
                self._client.reconnect(seen)
                seen = self._client.generation
                self._open()
                for sent in self._sent:
                    match sent:
                        case Blocks(blocks):
                            self._client.put(self._session, blocks)
                        case Released(destage, purge):
                            request = {"session": self._session, "destage": destage, "purge": purge}
                            self._client.act("release", request)
                        case Superseded():
                            self._client.act("supersede", {"session": self._session, **sent._asdict()})
                return
            except ServerUnreachable as again:
                lost = again

    def _open(self) -> None:
        self._answer = self._client.act("open", {**self._opening, "session": self._session})

    def _keep(self, sent: Blocks | Released | Superseded, size_bytes: int) -> None:
        if self._sent is None:
            return
        if size_bytes > self._client.replay_bytes_left:
            self._forget()
            return
        self._client.replay_bytes_left -= size_bytes
        self._kept_bytes += size_bytes
        self._sent.append(sent)

    def _forget(self) -> None:
        self._sent = None
        self._client.replay_bytes_left += self._kept_bytes
        self._kept_bytes = 0


def _told(only: Only | None) -> dict[str, Any]:
    """As it travels."""
    if only is None:
        return {}
    spans = None if only.spans is None else [(s, after, until) for s, (after, until) in only.spans.items()]
    return {"spans": spans, "keys": only.keys, "below": only.below}
