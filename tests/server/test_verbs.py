"""The table of verbs agrees with the methods that carry them out, and with the attempt that asks for them."""

from __future__ import annotations

import base64
import inspect
from typing import Any

import pytest

from aion.errors import RequestError
from state_backends.server.host import Host
from state_backends.server.main import StateServer
from state_backends.server.remote_attempt import RemoteAttempt
from state_backends.server.requests import AttemptRequest
from state_backends.server.verbs import APPENDED, PUT, VERBS, By, Way, request_of
from state_backends.versions.json_values import dumps
from state_backends.versions.shard import Shard

WHERE: dict[By, Any] = {By.SERVER: StateServer, By.HOST: Host, By.SHARD: Shard}
ELSEWHERE = {"expect", "tiers", "ping", "stats", "open"}
"""Verbs that no attempt asks for."""


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_is_a_method_that_takes_the_fields_of_its_request(name: str) -> None:
    verb = VERBS[name]
    parameters = list(inspect.signature(getattr(WHERE[verb.by], name)).parameters)
    if verb.by is not By.SHARD:
        assert parameters == ["self", "request"]
        return
    assert issubclass(verb.request, AttemptRequest)
    fields = [field for field in verb.request.model_fields if field not in AttemptRequest.model_fields]
    content = {APPENDED: ["blocks"], PUT: ["values"]}[verb.carries] if verb.way is Way.SENDS and verb.carries else []
    assert parameters == ["self", "attempt", *content, *fields]
    assert (verb.carries is None) == (verb.way is Way.JSON)


def test_an_attempt_can_ask_for_every_verb_of_an_attempt() -> None:
    assert {name for name in VERBS if hasattr(RemoteAttempt, name)} == VERBS.keys() - ELSEWHERE


@pytest.mark.parametrize("keys", ["", "AAAA", "not base64", base64.b64encode(b"x" * 100).decode()])
def test_what_are_no_keys_is_refused(keys: str) -> None:
    with pytest.raises(RequestError, match="get: keys"):
        request_of("get", dumps({"attempt": "a", "keys": keys}), Way.GETS)


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_that_travels_otherwise_is_refused(name: str) -> None:
    for way in set(Way) - {VERBS[name].way}:
        with pytest.raises(RequestError, match="unknown action"):
            request_of(name, b"{}", way)
