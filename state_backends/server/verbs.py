"""Everything that a client can ask of the state server: a table with a row for each verb.

Client, server and host all use this table. A new verb needs a row here, a request type in
:mod:`state_backends.server.requests`, and a method with its name in the class that serves it. The method gets the
fields of the request as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import pyarrow as pa
from pydantic import ValidationError

from state_backends.format.errors import RequestError
from state_backends.server import requests, wire
from state_backends.server.requests import ServerRequest
from state_backends.store.protocol import StoredBlock


class By(Enum):
    """The class that serves a verb, by a method with the verb's name."""

    SERVER = "server"  # StateServer: for the process and its executors
    HOST = "host"  # Host: for what begins or ends attempts, or concerns several shards
    SHARD = "shard"  # Shard: for what an attempt does on its shard


class Way(Enum):
    """How a verb's request and answer are sent."""

    JSON = "json"  # a JSON request and a JSON answer
    SENDS = "sends"  # Arrow batches follow the request
    GETS = "gets"  # Arrow batches are the answer


class Carries(NamedTuple):
    """What the Arrow batches of a request or an answer carry.

    ``pack`` makes batches of blocks or values; ``unpack`` gets a list of them back from one batch.
    """

    schema: pa.Schema
    pack: Callable[[Iterable[Any]], Iterator[pa.RecordBatch]]
    unpack: Callable[[pa.RecordBatch], Iterable[Any]]


APPENDED = Carries(wire.BLOCKS, wire.pack, requests.blocks)
READ = Carries(
    wire.BLOCKS,
    lambda found: wire.pack(((b.seq, False, b.block) for b in found), wire.READ_MESSAGE_BYTES),
    lambda message: (StoredBlock(seq, block) for seq, _, block in wire.unpack(message)),
)
PUT = Carries(wire.VALUES, wire.pack_values, requests.values)
FOUND = Carries(wire.FOUND, wire.pack_found, wire.unpack_found)
ENTRIES = Carries(wire.ENTRIES, wire.pack_entries, wire.unpack_entries)


class Verb(NamedTuple):
    """A row of the table. ``carries``: what its Arrow batches carry, unless its way is JSON.

    ``request``: the type that checks the request. ``locks``: whether the shard is locked meanwhile. A read does not
    lock it, so it can run beside appends. ``ends``: the verb ends the attempt. ``replay``: the verb changes the shard,
    so its requests are repeated if the server is lost (:mod:`state_backends.server.remote_attempt`). ``commit`` and
    ``abort`` need no replay, because they end the attempt. ``waits``: nobody needs its answer, so a client sends its
    requests with the attempt's next request: see requests.AttemptRequest.
    """

    request: type[ServerRequest]
    by: By
    way: Way = Way.JSON
    carries: Carries | None = None
    locks: bool = True
    ends: bool = False
    replay: bool = False
    waits: bool = False


VERBS: Mapping[str, Verb] = {
    "ping": Verb(requests.PingRequest, By.SERVER),
    "stats": Verb(requests.StatsRequest, By.HOST),
    "open": Verb(requests.OpenRequest, By.HOST),
    "learnt": Verb(requests.LearntRequest, By.HOST),
    "append": Verb(requests.AppendRequest, By.SHARD, Way.SENDS, APPENDED, replay=True),
    "read": Verb(requests.ReadRequest, By.SHARD, Way.GETS, READ, locks=False),
    "prestage": Verb(requests.PrestageRequest, By.SHARD),
    "replace": Verb(requests.ReplaceRequest, By.SHARD, replay=True, waits=True),
    "release": Verb(requests.ReleaseRequest, By.SHARD, replay=True, waits=True),
    "get": Verb(requests.GetRequest, By.SHARD, Way.GETS, FOUND, locks=False),
    "put": Verb(requests.PutRequest, By.SHARD, Way.SENDS, PUT, replay=True),
    "scan": Verb(requests.ScanRequest, By.SHARD, Way.GETS, ENTRIES, locks=False),
    "expect": Verb(requests.ExpectRequest, By.HOST),
    "tiers": Verb(requests.TiersRequest, By.HOST),
    "commit": Verb(requests.CommitRequest, By.HOST),
    "abort": Verb(requests.AbortRequest, By.SHARD, ends=True),
}


def addressed(name: str, body: bytes) -> bytes:
    """Returns a request that Arrow batches follow or answer: the name of the verb, a newline, and the JSON."""
    return name.encode() + b"\n" + body


def address_of(request: bytes | None) -> tuple[str, bytes]:
    """Returns the name of the verb, and the JSON."""
    name, _, body = (request or b"").partition(b"\n")
    return name.decode(errors="replace"), body


def request_of(name: str, body: bytes | None, way: Way) -> Any:
    """Parses and checks a request for a verb. ``way``: how it was sent.

    Raises RequestError, also if the verb does not exist or is sent in another way.
    """
    verb = VERBS.get(name)
    if verb is None or verb.way is not way:
        names = ", ".join(known for known, verb in VERBS.items() if verb.way is way)
        raise RequestError(f"unknown action {name[:100]!r}; there are {names}")
    try:
        return verb.request.model_validate_json(body or b"")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise RequestError(f"{name}: {where + ': ' if where else ''}{first['msg'][:300]}") from None
