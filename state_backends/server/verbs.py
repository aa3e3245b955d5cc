"""Everything that a client can ask of the state server: one row for each verb. Client, server and host walk this table.

A new verb needs a row here, a request type in :mod:`state_backends.server.requests`, and a method of its name where
it is carried out. The method gets the fields of the request as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from pydantic import ValidationError

from aion.errors import RequestError
from state_backends.server import requests
from state_backends.server.requests import ServerRequest


class By(Enum):
    """Who carries a verb out, by a method of the verb's name."""

    SERVER = "server"  # StateServer: the process and its executors
    HOST = "host"  # Host: opens and closes attempts, and knows all shards
    SHARD = "shard"  # Shard: the attempt that is at work on it


class Way(Enum):
    """How a verb travels."""

    JSON = "json"  # a JSON request and a JSON answer
    SENDS_BLOCKS = "sends blocks"  # blocks follow the request
    GETS_BLOCKS = "gets blocks"  # blocks are the answer


class Verb(NamedTuple):
    """A row of the table.

    ``request``: the type that checks what comes. ``locks``: the shard is locked meanwhile; a read is not, so it goes on
    beside appends. ``ends``: the attempt is over afterwards. ``again``: the verb changes the shard, so if the server is
    lost, the next one is asked again (:mod:`state_backends.server.session`). ``commit`` and ``abort`` need not be: they
    end the attempt.
    """

    request: type[ServerRequest]
    by: By
    way: Way = Way.JSON
    locks: bool = True
    ends: bool = False
    again: bool = False


VERBS: Mapping[str, Verb] = {
    "ping": Verb(requests.PingRequest, By.SERVER),
    "stats": Verb(requests.StatsRequest, By.HOST),
    "open": Verb(requests.OpenRequest, By.HOST),
    "learnt": Verb(requests.LearntRequest, By.HOST),
    "append": Verb(requests.AppendRequest, By.SHARD, Way.SENDS_BLOCKS, again=True),
    "read": Verb(requests.ReadRequest, By.SHARD, Way.GETS_BLOCKS, locks=False),
    "prestage": Verb(requests.PrestageRequest, By.SHARD),
    "replace": Verb(requests.ReplaceRequest, By.SHARD, again=True),
    "release": Verb(requests.ReleaseRequest, By.SHARD, again=True),
    "commit": Verb(requests.CommitRequest, By.HOST),
    "abort": Verb(requests.AbortRequest, By.SHARD, ends=True),
}


def request_of(name: str, body: bytes | None, way: Way) -> Any:
    """Checks a request for a verb. ``way``: how it came.

    Raises RequestError, also for a verb that does not exist or travels in another way.
    """
    verb = VERBS.get(name)
    if verb is None or verb.way is not way:
        there_are = ", ".join(known for known, verb in VERBS.items() if verb.way is way)
        raise RequestError(f"unknown action {name[:100]!r}; there are {there_are}")
    try:
        return verb.request.model_validate_json(body or b"")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise RequestError(f"{name}: {where + ': ' if where else ''}{first['msg'][:300]}") from None
