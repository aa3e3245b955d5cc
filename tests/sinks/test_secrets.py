"""No text of a sink has a password: not its ``repr``, not its errors, not what they were raised from, not the log."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Mapping
from typing import Any

import pytest

import aion
from aion.errors import ConfigError
from aion.sinks.addresses import Address
from tests.sinks.rig import at, panes

pytestmark = pytest.mark.filterwarnings("ignore:Query string argument")
SECRET = "Xq7Zw9"


def texts_of(call: Any, log: pytest.LogCaptureFixture) -> str:
    """All that a call that fails says."""
    log.set_level(logging.DEBUG)
    with pytest.raises(BaseException) as error:
        call()
    seen, texts = error.value, list[str]()
    while seen is not None:
        texts += [str(seen), repr(seen)]
        seen = seen.__cause__ or seen.__context__  # type: ignore[assignment]
    return "\n".join([*texts, *traceback.format_exception_only(error.value), log.text])


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("postgresql://me:Xq7%Zw9@host/db", "%25"),
        ("postgresql://me:a%20Xq7Zw9%@host/db", "%25"),
        ("postgresql://me:Xq7/Zw9@host/db", "%2F"),
        ("postgresql://me:Xq7@Zw9@host/db", "%40"),
        ("postgresql://me:Xq7]Zw9@host/db", "a character that a URI cannot have"),
        ("postgresql://me:Xq7#Zw9@host/db", "a character that a URI cannot have"),
        ("postgresql://me:Xq7 Zw9@host/db", "a character that a URI cannot have"),
        ("postgresql://me:Xq7Zw9/db", "a port that is no number"),
        ("postgresql://me:Xq7?Zw9@host/db", "%3F"),
        ("postgresql://me@host/db?password=Xq7&Zw9", "%26"),
        ("postgresql://me@host/db?password=Xq7=Zw9", "%3D"),
        ("postgresql:me:Xq7Zw9@host/db", "sqlite:///PATH"),
        ("Xq7Zw9:me@host/db", "sqlite:///PATH"),
        ("host=here password=Xq7Zw9", "sqlite:///PATH"),
        ("postgresql+psycopg://me:Xq7Zw9@host/db", "'postgresql[+]psycopg' is no database"),
        ("sqlite://me:Xq7Zw9@host/db", "names no file"),
        ("duckdb://me:Xq7Zw9@host/db", "names no file"),
    ],
)
def test_a_wrong_uri_is_refused_at_once_without_its_password(
    uri: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=said):
        aion.sinks.upsert(uri, "t")
    found = texts_of(lambda: aion.sinks.upsert(uri, "t"), caplog)
    assert not any(part in found for part in (SECRET, "Xq7", "Zw9"))


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://me:Xq7Zw9@/db?host=/nowhere",
        "POSTGRESQL://me:Xq7Zw9@/db?host=/nowhere",
        "postgresql://me:Xq7%5aw9@127.0.0.1:1,[::1]:1/db",
        "postgresql://127.0.0.1:1/db?user=me&password=Xq7Zw9",
        "postgresql://127.0.0.1:1/db?Xq7Zw9=1",  # a password that has a "&"
        "postgresql://127.0.0.1:1/db?connect_timeout=Xq7Zw9",
    ],
)
def test_a_server_that_cannot_be_reached_hides_the_password(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    sink = aion.sinks.upsert(uri, "t")
    assert SECRET not in repr(sink) and SECRET not in repr(pickle.loads(pickle.dumps(sink)))
    found = texts_of(lambda: sink.write(panes([]), at(0)), caplog)
    assert SECRET not in found and "Xq7%5aw9" not in found


@pytest.mark.parametrize(
    "call",
    [
        lambda uri: aion.sinks.upsert("t", uri),
        lambda uri: aion.sinks.upsert("sqlite:///t.db", uri),
        lambda uri: aion.sinks.upsert("sqlite:///t.db", "t", changes=uri),
        lambda uri: aion.sinks.upsert("sqlite:///t.db", "t", dropped=uri),
        lambda uri: aion.sinks.upsert(f"host=here password={uri}", "t"),
        lambda uri: aion.sinks.merge(uri, "delta"),
        lambda uri: aion.sinks.merge("delta", uri, dropped=uri),
        lambda uri: aion.sinks.merge("iceberg", uri).write(panes([]), at(0)),
        lambda uri: aion.sinks.merge("delta", uri, dropped="t").write(panes([]), at(0)),
    ],
)
def test_a_uri_in_the_wrong_place_is_not_shown(call: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert SECRET not in texts_of(lambda: call("postgresql://me:Xq7Zw9@host/db"), caplog)


def test_a_right_uri_is_taken_as_it_is(postgresql: str) -> None:
    """With a password that has each odd character, behind percent signs."""
    uri = postgresql.replace("tests@", "tests:%25%40%2F%3A%23@")
    assert uri != postgresql
    sink = aion.sinks.upsert(uri, "of_a_password")
    sink.write(panes([{"k": "a", "n": 1}]), at(0))
    sink.write(panes([{"k": "a", "n": 2}]), at(1))


@pytest.mark.parametrize(
    ("format", "table", "options"),
    [
        ("iceberg", "a.t", {"uri": "nope://me:Xq7Zw9@host/db"}),
        ("iceberg", "a.t", {"type": "sql", "uri": "postgresql+nope://me:Xq7Zw9@host/db"}),
        ("iceberg", "a.t", {"type": "sql", "uri": "sqlite:////nowhere/Xq7Zw9?password=Xq7Zw9"}),
        ("iceberg", "a.t", {"type": "Xq7Zw9", "secret": "Xq7Zw9"}),
        ("iceberg", "a.t", {"py-catalog-impl": "nope.Nope", "token": "Xq7Zw9"}),
        ("delta", "nope://me:Xq7Zw9@bucket/x", {}),
        ("delta", "nope://bucket/x?sig=Xq7Zw9", {}),
        ("delta", "gs://b/x", {"GOOGLE_SERVICE_ACCOUNT_KEY": "{Xq7Zw9"}),
        ("delta", "abfss://c@a.dfs.core.windows.net/x", {"AZURE_STORAGE_SAS_TOKEN": "Xq7Zw9%"}),
    ],
)
def test_tables_of_a_lake_hide_their_secrets(
    format: str, table: str, options: Mapping[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    sink = aion.sinks.merge(format, table, options=options)
    assert SECRET not in repr(sink)
    assert SECRET not in texts_of(lambda: sink.write(panes([]), at(0)), caplog)


def test_an_address_is_shown_without_its_secrets() -> None:
    shown = {
        "postgresql://me:Xq7Zw9@host:1/db?password=Xq7Zw9": "postgresql://host:1/db",
        "sqlite:///a@b:c/db": "sqlite:///a@b:c/db",
        "s3://bucket/x?sig=Xq7Zw9": "s3://bucket/x",
        "abfss://container@account.dfs.core.windows.net/x": "abfss://account.dfs.core.windows.net/x",
        "namespace.table": "namespace.table",
    }
    assert {text: str(Address.of(text)) for text in shown} == shown
