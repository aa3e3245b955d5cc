"""The border of the state server: every request is checked here, and nowhere else, before it touches anything.

A request is one JSON object of exactly these fields and types. Whatever becomes the name of a folder or a file is a
plain name. What does not fit raises RequestError, which says what is wrong with which field.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, TypeVar

import pyarrow as pa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from aion.core.ingest.block import Block
from aion.errors import RequestError
from state_backends.server import wire
from state_backends.store.backends import STORES, StoreConfig
from state_backends.store.protocol import Only
from state_backends.versions.manifest import Identity as StateIdentity

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,149}")
_URI = re.compile(r"[a-z][a-z0-9+.-]*://[^\0]+")
_MOST: Final = 2**63 - 1


def is_plain_name(text: str) -> bool:
    """Whether a text can be the name of a file or folder, and of nothing elsewhere: no path, and not hidden."""
    return _PLAIN_NAME.fullmatch(text) is not None


def _plain_name(text: str) -> str:
    if not is_plain_name(text):
        raise ValueError("is no plain name: letters, digits, '_', '-' and '.', not first a '.'")
    return text


def _place(text: str) -> str:
    """A folder by its whole path, or a URI; neither with a way up in it."""
    if _URI.fullmatch(text) is None and not (text.startswith("/") and "\0" not in text):
        raise ValueError("is neither an absolute path nor a URI")
    if ".." in text.split("/"):
        raise ValueError("has '..' in it")
    return text


def _snapshot(value: dict[str, Any]) -> dict[str, Any]:
    """The operator's; the server knows three fields of it: the number of the next block, what it counts, and what it
    tells the operator's other shards: ``lateness.standing`` whenever they are opened, ``lateness.lateness`` if asked.
    Metrics show ``lateness.histogram``, and the bound in ``lateness.standing``.
    """
    next_seq = value.get("next_seq")
    if not isinstance(next_seq, int) or isinstance(next_seq, bool) or not 0 <= next_seq <= _MOST:
        raise ValueError("next_seq is the number of the next block, and must be an integer from 0")
    if not isinstance(value.get("counters"), dict) or not _are_counts(value["counters"]):
        raise ValueError("counters must be numbers by name")
    if "lateness" in value:
        told = value["lateness"]
        if not isinstance(told, dict) or not all(isinstance(told.get(name), dict) for name in ("standing", "lateness")):
            raise ValueError("lateness must be an object with the objects standing and lateness")
        if not isinstance(told.get("histogram", {}), dict) or not _are_counts(told.get("histogram", {})):
            raise ValueError("lateness.histogram must be numbers by name")
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
Count = Annotated[int, Field(ge=0, le=_MOST)]
Length = Annotated[int, Field(ge=1, le=_MOST)]
Instant = Annotated[int, Field(ge=-_MOST, le=_MOST)]
Slices = tuple[Instant, ...]
Spans = tuple[tuple[Instant, Annotated[int, Field(ge=-1, le=_MOST)], Count], ...]
Snapshot = Annotated[dict[str, Any], AfterValidator(_snapshot)]
Seconds = Annotated[float, Field(ge=0)]


class Request(BaseModel):
    """Exactly these fields, of exactly these types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Ping(Request):
    """``executor_pid``: a process in whose absence the server has no reason to live; None from who only looks."""

    executor_pid: Annotated[int, Field(ge=1, le=1 << 22)] | None


class Stats(Request):
    pass


class Identity(Request):
    """See :class:`state_backends.versions.manifest.Identity`."""

    query: Name
    operator: Name
    shard: Annotated[int, Field(ge=0, lt=1 << 31)]
    shards: Annotated[int, Field(ge=1, lt=1 << 31)]
    definition: dict[str, Any]
    ids: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] = ()
    key_types: tuple[Text, ...] = ()
    checkpoint: Annotated[str, Field(max_length=3000)] = ""

    def known(self) -> StateIdentity:
        return StateIdentity(**{name: getattr(self, name) for name in type(self).model_fields})


class Store(Request):
    """See :class:`state_backends.store.backends.StoreConfig`; the policies' arguments are checked by who is made of
    them.
    """

    backend: Annotated[str, Field(pattern="|".join(f"^{name}$" for name in STORES))]
    budget_bytes: Annotated[int, Field(ge=1, le=_MOST)] | None
    budget_share: Annotated[float, Field(ge=0, le=1)]
    bucket_limit_bytes: Annotated[int, Field(ge=1, le=_MOST)]
    windows: Annotated[tuple[tuple[Length, Length, Count], ...], Field(max_length=1024)]
    keep_fraction: Annotated[float, Field(ge=0, le=1)]
    prestages: bool
    blocking: bool
    io_threads: Annotated[int, Field(ge=1, le=1024)]
    rate_limit_bytes_per_s: Annotated[int, Field(ge=1, le=_MOST)] | None
    retain_versions: Annotated[int, Field(ge=1, le=1 << 31)]
    destage: dict[str, Any]
    destage_class: Text | None
    prestage: dict[str, Any]
    prestage_class: Text | None
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None

    def config(self) -> StoreConfig:
        return StoreConfig(**{name: getattr(self, name) for name in type(self).model_fields})


class Open(Request):
    """``token``: the version to start from. ``attempt``: the one to make of it. ``session``: this turn at it.

    An attempt that was cut off from its server takes another turn, with another name. ``others``: whether the answer is
    to tell what the operator's other shards here found. ``moved``: or what the disk took to stage and to write since
    the answer that told that last.
    """

    identity: Identity
    token: Name | None
    attempt: Name
    session: Name
    run: Text
    operator_uid: Text
    state_dir: Annotated[str, Field(max_length=3000), AfterValidator(_place)]
    store: Store
    others: bool
    moved: bool = False


class _OfSession(Request):
    session: Name


class Learnt(_OfSession):
    """What the operator's other shards here observed, as of their last commits."""


class Put(_OfSession):
    """Blocks follow, as Arrow batches of ``wire.BLOCKS``."""


class _OfSlices(_OfSession):
    """``spans``, as (slice, after, until), ``keys`` and ``below``: see :class:`state_backends.store.protocol.Only`."""

    slices: Slices
    spans: Spans | None = None
    keys: Annotated[tuple[tuple[Count, Count], ...], AfterValidator(_sorted_ranges)] | None = None
    below: Count | None = None

    def only(self) -> Only | None:
        if self.spans is None and self.keys is None and self.below is None:
            return None
        return Only(None if self.spans is None else spans_by_slice(self.spans), self.keys, self.below)


def spans_by_slice(spans: Spans) -> dict[int, tuple[int, int]]:
    return {s: (after, until) for s, after, until in spans}


class Read(_OfSlices):
    blocking: bool


class Prestage(_OfSlices):
    pass


class Supersede(_OfSession):
    """Blocks that those from ``below`` on stand for: (slice, after, until), by the numbers of arrival."""

    spans: Spans
    below: Count


class Release(_OfSession):
    destage: Slices
    purge: Slices


class Commit(_OfSession):
    """``prestage``: slices that the next attempt is expected to read; ``executions``: see policies.sizing.Execution."""

    snapshot: Snapshot
    prestage: Slices
    executions: tuple[tuple[Count, Seconds, Seconds], ...]


class Abort(_OfSession):
    pass


ACTIONS: Mapping[str, type[Request]] = {
    "ping": Ping,
    "stats": Stats,
    "open": Open,
    "learnt": Learnt,
    "prestage": Prestage,
    "release": Release,
    "supersede": Supersede,
    "commit": Commit,
    "abort": Abort,
}

R = TypeVar("R", bound=Request)


def action(name: str, body: bytes) -> Request:
    """The request of an action. Raises RequestError, also for an action that there is not."""
    kind = ACTIONS.get(name)
    if kind is None:
        raise RequestError(f"unknown action {name[:100]!r}; there are {', '.join(ACTIONS)}")
    return parse(kind, body, name)


def parse(kind: type[R], body: bytes | None, what: str) -> R:
    """A request out of JSON. Raises RequestError."""
    try:
        return kind.model_validate_json(body or b"")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise RequestError(f"{what}: {where + ': ' if where else ''}{first['msg'][:300]}") from None


def blocks(message: pa.RecordBatch | None, after: int) -> list[tuple[int, bool, Block]]:
    """The blocks of a message; they are numbered in the order of arrival, from above ``after``.

    Raises RequestError, CorruptBlock, FormatError.
    """
    if message is None:
        raise RequestError("put: a message without blocks")
    if message.schema != wire.BLOCKS:
        raise RequestError("put: the columns are not those of blocks")
    if any(column.null_count for column in message.columns):
        raise RequestError("put: a block, or what belongs to it, is null")
    found = list(wire.unpack(message))
    _check_order((seq for seq, _, _ in found), after)
    return found


def _check_order(seqs: Iterable[int], after: int) -> None:
    for seq in seqs:
        if seq <= after:
            raise RequestError(f"put: block {seq} comes after block {after}; numbers only grow")
        after = seq
