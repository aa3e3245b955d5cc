"""Checks every request to the state server, before anything else happens. Nothing is checked anywhere else.

A request is one JSON object with exactly these fields and types. Names of folders and files must be plain names. A
request that does not fit raises RequestError, which names the field and the problem.
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from state_backends.backends import StoreConfig
from state_backends.format.block import Block
from state_backends.format.errors import RequestError
from state_backends.format.plain_names import PLAIN, is_plain
from state_backends.server import wire
from state_backends.store.protocol import Only
from state_backends.versions.manifest import Identity

_LONGEST_NAME: Final = 150  # the name of a file consists of others
_URI = re.compile(r"[a-z][a-z0-9+.-]*://[^\0]+")
_MOST: Final = 2**63 - 1


def _plain_name(text: str) -> str:
    """Checks a name for a file or folder, so that it cannot be a path or a hidden file."""
    if not is_plain(text) or len(text) > _LONGEST_NAME:
        raise ValueError(f"is not a plain name: use at most {_LONGEST_NAME} {PLAIN}")
    return text


def _state_dir(text: str) -> str:
    """Checks an absolute path or a URI. It must not contain '..'."""
    if _URI.fullmatch(text) is None and not (text.startswith("/") and "\0" not in text):
        raise ValueError("is neither an absolute path nor a URI")
    if ".." in text.split("/"):
        raise ValueError("must not contain '..'")
    return text


def _snapshot(value: dict[str, Any]) -> dict[str, Any]:
    """Checks the operator's state. The server reads four fields of it.

    ``next_seq``: the number of the next block. ``counters``: the operator's counters. ``lateness``: what the operator's
    other shards get: ``learnt_bound`` when they are opened, ``lateness`` when they ask for it. Metrics show
    ``lateness.histogram``, and the bound in ``lateness.learnt_bound``. ``expected_ms``, if there is one: keyed values
    that are needed up to this time stay in memory before others (policies/destage.py).
    """
    expected_ms = value.get("expected_ms")
    if expected_ms is not None and (not isinstance(expected_ms, int) or isinstance(expected_ms, bool)):
        raise ValueError("expected_ms must be an integer: the time up to which the next attempt needs keyed values")
    next_seq = value.get("next_seq")
    if not isinstance(next_seq, int) or isinstance(next_seq, bool) or not 0 <= next_seq <= _MOST:
        raise ValueError("next_seq is the number of the next block, and must be an integer of 0 or more")
    if not isinstance(value.get("counters"), dict) or not _are_counts(value["counters"]):
        raise ValueError("counters must be an object of numbers")
    if "lateness" in value:
        late = value["lateness"]
        if not isinstance(late, dict) or not all(
            isinstance(late.get(name), dict) for name in ("learnt_bound", "lateness")
        ):
            raise ValueError("lateness must be an object with the objects learnt_bound and lateness")
        if not isinstance(late.get("histogram", {}), dict) or not _are_counts(late.get("histogram", {})):
            raise ValueError("lateness.histogram must be an object of numbers")
    return value


def _are_counts(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_are_counts, value.values()))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sorted_ranges(value: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    ends = [end for low_high in value for end in low_high]
    if any(before > after for before, after in itertools.pairwise(ends)):
        raise ValueError("ranges of keys must be sorted and disjoint")
    return value


Name = Annotated[str, AfterValidator(_plain_name)]
Text = Annotated[str, Field(max_length=1000)]
Number = Annotated[int, Field(ge=0, le=_MOST)]
Length = Annotated[int, Field(ge=1, le=_MOST)]
Instant = Annotated[int, Field(ge=-_MOST, le=_MOST)]
Slices = tuple[Instant, ...]
Spans = tuple[tuple[Instant, Annotated[int, Field(ge=-1, le=_MOST)], Number], ...]
Snapshot = Annotated[dict[str, Any], AfterValidator(_snapshot)]
Seconds = Annotated[float, Field(ge=0)]


def _by_slice(spans: Spans) -> dict[int, tuple[int, int]]:
    return {s: (after, until) for s, after, until in spans}


class ServerRequest(BaseModel):
    """A request has exactly these fields, of exactly these types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class PingRequest(ServerRequest):
    """Asks whether the server works. ``executor_pid``: the client's executor, or None if the client only observes.

    ``daemon_pid``: the executor's process that started the client. The server ends when all its executors have ended,
    or all their daemons.
    """

    executor_pid: Annotated[int, Field(ge=1, le=1 << 22)] | None
    daemon_pid: Annotated[int, Field(ge=1, le=1 << 22)] | None = None


class StatsRequest(ServerRequest):
    pass


class IdentityFields(ServerRequest):
    """See :class:`state_backends.versions.manifest.Identity`."""

    query: Name
    operator: Name
    shard: Annotated[int, Field(ge=0, lt=1 << 31)]
    shards: Annotated[int, Field(ge=1, lt=1 << 31)]
    definition: dict[str, Any]
    ids: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] = ()
    key_types: tuple[Text, ...] = ()
    checkpoint: Annotated[str, Field(max_length=3000)] = ""

    def identity(self) -> Identity:
        return Identity(**{name: getattr(self, name) for name in type(self).model_fields})


class OpenRequest(ServerRequest):
    """Starts an attempt. ``token``: the version to start from. ``makes``: the token of the version to make.

    ``attempt``: this server's name for the attempt. An attempt that lost its server opens the shard again on the next
    one: under another name, and with the same ``makes``. ``place``: the number of Spark's stage, and of the partition
    in it, where the task is; it is None for an attempt that only reads. ``next_start``: the seconds between the times
    at which the query's trigger starts batches, and those until the next such time; it is None where batches start as
    soon as rows come. ``others``: whether the answer contains what the operator's other shards have learnt.
    ``disk_times``: whether it contains how long the disk took to stage and to write, since a client last asked for
    that. ``committed``: the last batch that Spark has committed, if a shard that had versions by then must have a
    token. -1: nothing is known of that, or this attempt brings the first version. ``asked``: see
    :func:`state_backends.versions.opening.check_begins`.
    """

    identity: IdentityFields
    token: Name | None
    attempt: Name
    makes: Name
    run: Text
    operator_uid: Text
    place: tuple[int, int] | None = None
    next_start: tuple[Seconds, Seconds] | None = None
    state_dir: Annotated[str, Field(max_length=3000), AfterValidator(_state_dir)]
    store: StoreConfig
    others: bool
    disk_times: bool = False
    committed: int = -1
    asked: bool = False


class AttemptRequest(ServerRequest):
    """A request of an attempt. The other fields are the arguments of the method that serves it.

    ``server``: where the attempt began. ``before``: earlier requests of the attempt that waited for this one, as
    (verb, request), in their order.
    """

    attempt: Name
    server: Text = ""
    before: tuple[tuple[Name, dict[str, Any]], ...] = ()


class LearntRequest(AttemptRequest):
    """Asks what the operator's other shards on this host have observed of lateness, as of their last commits."""


class AppendRequest(AttemptRequest):
    """Appends the blocks that follow, as Arrow batches of the schema ``wire.BLOCKS``."""


class OnlySome(ServerRequest):
    """See :class:`state_backends.store.protocol.Only`. ``spans``: (slice, after, until)."""

    spans: Spans | None = None
    keys: Annotated[tuple[tuple[Number, Number], ...], AfterValidator(_sorted_ranges)] | None = None
    below: Number | None = None


def _only(value: OnlySome | None) -> Only | None:
    if value is None:
        return None
    return Only(None if value.spans is None else _by_slice(value.spans), value.keys, value.below)


class ReadRequest(AttemptRequest):
    slices: Slices
    blocking: bool
    only: Annotated[OnlySome | None, AfterValidator(_only)] = None


class PrestageRequest(AttemptRequest):
    slices: Slices
    only: Annotated[OnlySome | None, AfterValidator(_only)] = None


class ReplaceRequest(AttemptRequest):
    """See :meth:`state_backends.store.attempt.ShardAttempt.replace`. ``spans``: (slice, after, until)."""

    spans: Annotated[Spans, AfterValidator(_by_slice)]
    below: Number


class ReleaseRequest(AttemptRequest):
    destage: Slices
    purge: Slices


def _keys(text: str) -> list[bytes]:
    try:
        return wire.unpack_keys(text)
    except (ValueError, OSError, EOFError, pa.ArrowException) as error:
        raise ValueError(f"are not keys: {error}") from None


def _key(text: str | None) -> bytes | None:
    return None if text is None else wire.unpack_key(text)


Keys = Annotated[str, AfterValidator(_keys)]
"""Keys as :func:`state_backends.server.wire.pack_keys` packs them. The field's value is a list of bytes."""


class GetRequest(AttemptRequest):
    keys: Keys


class PutRequest(AttemptRequest):
    """Sets the values that follow, as Arrow batches of the schema ``wire.VALUES``."""


class ScanRequest(AttemptRequest):
    """``begin``, ``end``: keys in base64. ``begin`` may be empty. Without ``end``, to the last key."""

    begin: Annotated[str, AfterValidator(_key)]
    end: Annotated[str | None, AfterValidator(_key)]


class ExpectRequest(ServerRequest):
    """Says which keyed values the next attempt on a shard will read. The answer: whether that is of use."""

    query: Text
    operator: Text
    shard: Number
    keys: Keys


class TiersRequest(ServerRequest):
    """Asks where the bytes of a shard's version ``token`` are: see :meth:`Host.tiers`.

    ``below``: the version has no block with this number or a higher one.
    """

    query: Text
    operator: Text
    shard: Number
    token: Name
    below: Number


class CommitRequest(AttemptRequest):
    """Commits. ``prestage``, ``keys``: what the next attempt will probably read. ``later``: what those after it will.

    ``executions``: see policies.sizing.Execution.
    """

    snapshot: Snapshot
    prestage: Slices
    later: Slices = ()
    keys: Keys | None = None
    executions: tuple[tuple[Number, Seconds, Seconds], ...]


class AbortRequest(AttemptRequest):
    pass


def blocks(message: pa.RecordBatch | None) -> list[tuple[int, bool, Block]]:
    """Returns the (seq, late, block) in a message. Raises RequestError, CorruptBlock, FormatError."""
    if message is None:
        raise RequestError("append: the message has no blocks")
    if message.schema != wire.BLOCKS:
        raise RequestError("append: the columns of the message are not those of blocks")
    if any(column.null_count for column in message.columns):
        raise RequestError("append: a block, or its number or lateness, is null")
    return list(wire.unpack(message))


def values(message: pa.RecordBatch | None) -> list[tuple[bytes, bytes | None, int | None]]:
    """Returns the (key, value, needed_ms) in a message. Raises RequestError."""
    if message is None:
        raise RequestError("put: the message has no values")
    if message.schema != wire.VALUES:
        raise RequestError("put: the columns of the message are not those of keyed values")
    keys, values, needed_ms = message.columns
    if keys.null_count:
        raise RequestError("put: a key is null")
    for what, column in (("key", keys), ("value", values)):
        if pc.min(pc.binary_length(column)).as_py() == 0:
            raise RequestError(f"put: a {what} is empty")
    return list(zip(keys.to_pylist(), values.to_pylist(), needed_ms.to_pylist(), strict=True))
