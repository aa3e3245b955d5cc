"""State that is damaged, or somebody else's, is refused by name."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.core.query.plan import make_plan
from aion.errors import CorruptState, ForeignState, FormatError
from state_backends.format.definitions import NOT_COMPARED
from state_backends.versions.manifest import check_operator, load
from tests.durations import us
from tests.versions.host import IDENTITY, Host


def test_an_unknown_token_is_told(host: Host) -> None:
    token = host.commit(None, (0, 0))
    with pytest.raises(CorruptState, match=r"0000000007-unknown.*shard 3.*'tolls'"):
        host.open("0000000007-unknown")
    assert host.seqs(token, 0) == [0], "and harms nobody"


@pytest.mark.parametrize("what", ["missing", "empty", "truncated", "too long"])
def test_a_damaged_file_is_named(make: Callable[..., Host], what: str) -> None:
    host = make()
    token = host.commit(None, (0, 0), (1, 10))
    (name,) = host.files()
    path = host.folder / "state" / "files" / name
    data = path.read_bytes()
    host.stop()
    path.unlink()
    if what != "missing":
        path.write_bytes({"empty": b"", "truncated": data[:-7], "too long": data + b"x"}[what])
    host.start()
    with pytest.raises(CorruptState, match=re.escape(name)):
        host.open(token)
    path.write_bytes(data)
    assert host.seqs(token, 0, 10) == [0, 1], "a failed opening leaves the shard ready for another one"


def test_every_damage_to_a_manifest_is_noticed(make: Callable[..., Host]) -> None:
    host = make()
    token = host.commit(None, (0, 0), windows={"status": ["late"]})
    path, data = host.manifest(token), host.manifest(token).read_bytes()
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptState, match=r"manifest m\.json"):
                load(bytes(damaged), "m.json")
    for length in range(len(data) - 1):
        with pytest.raises(CorruptState, match=r"manifest m\.json"):
            load(data[:length], "m.json")
    host.stop()
    path.write_bytes(data[:40] + b"?" + data[41:])
    host.start()
    with pytest.raises(CorruptState, match=path.name):
        host.open(token)


def test_a_damaged_older_version_does_not_keep_the_current_one_from_opening(make: Callable[..., Host]) -> None:
    host = make()
    first = host.commit(None, (0, 0))
    second = host.commit(first, (1, 0))
    host.stop()
    host.manifest(first).write_bytes(b"damaged")
    host.start()
    assert host.seqs(second, 0) == [0, 1]


@pytest.mark.parametrize("number", [1, 3, 5])
@pytest.mark.parametrize("what", ["a manifest", "operator.json"])
def test_another_format_is_refused_and_is_not_called_damage(make: Callable[..., Host], what: str, number: int) -> None:
    host = make()
    token = host.commit(None, (0, 0))
    path = host.manifest(token) if what == "a manifest" else host.folder / "operator.json"
    value = json.loads(path.read_bytes().splitlines()[0])
    assert value["format"] == 4
    body = orjson.dumps({**value, "format": number, "news": True})
    path.write_bytes(body + b"\n%08x\n" % zlib.crc32(body))
    host.restart()
    with pytest.raises(FormatError, match=rf"{path.name}.*in format {number}; this Aion reads format 4"):
        host.open(token)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"query": "other"}, r"query 'query', not 'other'"),
        ({"operator": "sums"}, r"operator 'tolls', not 'sums'"),
        ({"shard": 4}, r"shard 3, not 4"),
        ({"shards": 16}, r"shards 8, not 16; set state.shards to 8"),
        ({"definition": {"key": ["j"], "windows": {"w": 1}}}, r"'tolls'.*key: was \['k'\]; is \['j'\]"),
        ({"definition": {"key": ["k"], "windows": {"w": 2}}}, r"windows: was \{'w': 1\}; is \{'w': 2\}"),
        ({"definition": {"key": ["k"], "windows": {"w": 1}, "time": "ts"}}, r"time: was none; is ts"),
        ({"definition": {"key": ["k"]}}, r"windows: was \{'w': 1\}; is none"),
    ],
)
def test_the_state_of_somebody_else_is_refused(
    make: Callable[..., Host], held: bool, changed: dict[str, Any], said: str
) -> None:
    host = make()
    token = host.commit(None, (0, 0))
    if not held:
        host.restart()
    with pytest.raises(ForeignState, match=said):
        host.open(token, replace(IDENTITY, **changed))
    assert host.seqs(token, 0) == [0], "and is still there for whose it is"


def test_a_shard_without_a_version_is_told_too(host: Host) -> None:
    """The others have state: this one is new, and would be filled with what belongs to them."""
    other = replace(IDENTITY, shards=16)
    host.commit(None)
    host.restart()
    with pytest.raises(ForeignState, match=r"operator\.json.*'tolls'.*shards 8, not 16"):
        host.shard.open(None, "0000000001-second", other)
    with pytest.raises(ForeignState, match=r"another definition.*windows: was \{'w': 1\}; is \{'w': 2\}"):
        host.shard.open(None, "0000000001-second", replace(IDENTITY, definition={"key": ["k"], "windows": {"w": 2}}))
    assert host.seqs(host.commit(None, (0, 0)), 0) == [0], "and is still there for whose it is"


@pytest.mark.parametrize("begins", [True, False])
def test_keys_that_would_be_looked_for_in_other_shards_are_refused(host: Host, begins: bool) -> None:
    """Whatever partitions Spark has by now: the ids of the shards and the types of the hashed keys stay."""
    identity = replace(IDENTITY, ids=(0, 3, 5), key_types=("int64",))
    attempt, _ = host.open(None, identity)
    host.shard.commit(attempt, {"next_seq": 0})
    token = None if begins else attempt
    for changed, said in [
        ({"ids": (0, 3, 6)}, r"other ids of shards: \[0, 3, 5\], not \[0, 3, 6\]"),
        ({"key_types": ("double",)}, r"other types.*\['int64'\], not \['double'\]"),
    ]:
        host.restart()
        with pytest.raises(ForeignState, match=said):
            host.shard.open(token, "0000000001-second", replace(identity, **changed))  # type: ignore[arg-type]
    assert host.shard.open(token, "0000000001-second", identity) == ({"next_seq": 0} if token else None)


def test_until_the_first_batch_is_through_everything_may_change(host: Host) -> None:
    other = replace(IDENTITY, shards=16)
    for identity in (IDENTITY, other):
        host.shard.open(None, "0000000000-first", identity)
        host.restart()
    host.shard.open(None, "0000000000-second", other)
    host.shard.commit("0000000000-second", {"next_seq": 0})
    host.restart()
    with pytest.raises(ForeignState, match="shards 16, not 8"):
        host.shard.open(None, "0000000001-third", IDENTITY)


@pytest.mark.parametrize("restarts", [True, False])
def test_a_failed_first_batch_may_run_again_with_another_definition(host: Host, restarts: bool) -> None:
    """Also on the host that still holds the shard: what the operator's shards share follows the second definition."""
    other = replace(IDENTITY, definition={"key": ["j"], "windows": {"w": 1}})
    host.shard.open(None, "0000000000-first", IDENTITY)
    if restarts:
        host.restart()
    host.shard.open(None, "0000000000-second", other)
    host.shard.commit("0000000000-second", {"next_seq": 0})
    host.restart()
    host.shard.open(None, "0000000001-another-shard", other)
    host.restart()
    with pytest.raises(ForeignState, match=r"key: was \['j'\]; is \['k'\]"):
        host.shard.open(None, "0000000001-third", IDENTITY)


def test_a_definition_that_no_version_of_an_ended_batch_carries_is_not_held_against_a_later_one(host: Host) -> None:
    """The first batches had no rows for the operator, and the first one that had some failed."""
    other = replace(IDENTITY, definition={"key": ["j"], "windows": {"w": 1}})
    host.shard.open(None, "0000000004-first", IDENTITY)
    host.shard.commit("0000000004-first", {"next_seq": 0})
    host.restart()
    host.shard.open(None, "0000000004-second", other)
    host.shard.commit("0000000004-second", {"next_seq": 0})
    host.restart()
    with pytest.raises(ForeignState, match=r"key: was \['j'\]; is \['i'\]"):
        host.shard.open(None, "0000000005-third", replace(IDENTITY, definition={"key": ["i"], "windows": {"w": 1}}))
    assert host.shard.open("0000000004-second", "0000000005-third", other) == {"next_seq": 0}


def test_damage_to_what_the_shards_share_is_named(make: Callable[..., Host]) -> None:
    host = make()
    token = host.commit(None, (0, 0))
    path = host.folder / "operator.json"
    data = path.read_bytes()
    for damaged in (data.replace(b"tolls", b"t0lls"), data[:-5], b""):
        path.write_bytes(damaged)
        host.restart()
        with pytest.raises(CorruptState, match=r"operator\.json of operator 'tolls'"):
            host.shard.open(None, "0000000001-second", IDENTITY)
        with pytest.raises(CorruptState, match=r"operator\.json of operator 'tolls'"):
            host.open(token)
    path.write_bytes(data)
    assert host.seqs(token, 0) == [0]


SCHEMA = pa.schema([("ts", pa.timestamp("us")), ("k", pa.string()), ("j", pa.string()), ("v", pa.int64())])


def definition(**changed: Any) -> dict[str, Any]:
    """What a user's definition is to stored state, by way of a manifest."""
    arguments: dict[str, Any] = {
        "key": ["k", "j"],
        "time": "ts",
        "windows": {"a": aion.Tumbling(us(10)), "b": aion.Tumbling(us(20))},
        "aggregates": {"n": A.count(), "s": A.sum("v"), "m": A.mean("v")},
        "apply": None,
        "outputs": None,
    }
    plan = make_plan(changed.pop("schema", SCHEMA), **(arguments | changed))
    return orjson.loads(orjson.dumps(plan.definition))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "changed",
    [
        {"key": ["j", "k"]},
        {"key": ["k"]},
        {"windows": {"a": aion.Tumbling(us(10))}},
        {"windows": {"a": aion.Tumbling(us(10)), "b": aion.Tumbling(us(30))}},
        {"windows": {"b": aion.Tumbling(us(20)), "a": aion.Tumbling(us(10))}},
        {"windows": {"a": aion.Tumbling(us(10)), "b": aion.Tumbling(us(20)), "c": aion.Tumbling(us(40))}},
        {"aggregates": {"n": A.count()}},
        {"aggregates": {"n": A.count(), "s": A.sum("v"), "x": A.max("v")}},
        {"aggregates": None, "apply": len, "outputs": "n int"},
        {"schema": SCHEMA.set(3, pa.field("v", pa.float64()))},
        {"schema": SCHEMA.set(1, pa.field("k", pa.int64()))},
    ],
    ids=[
        "keys swapped", "a key less", "a window less", "another size", "windows in another order", "a window more",
        "partials less", "other partials", "events instead", "another type", "another type of key",
    ],
)  # fmt: skip
def test_a_definition_that_stored_state_does_not_fit_is_refused(
    make: Callable[..., Host], changed: dict[str, Any]
) -> None:
    """Windows are stored by their numbers, and keys and partials by their places."""
    host = make()
    identity = replace(IDENTITY, definition=definition())
    attempt, _ = host.open(None, identity)
    host.shard.commit(attempt, {"next_seq": 0})
    with pytest.raises(ForeignState, match="another definition"):
        host.open(attempt, replace(identity, definition=definition(**changed)))


def compared(definition: dict[str, Any]) -> dict[str, Any]:
    return {what: value for what, value in definition.items() if what not in NOT_COMPARED}


def test_what_stored_state_does_not_depend_on_may_change() -> None:
    assert compared(definition()) == compared(
        definition(aggregates={"cars": A.count(), "total": A.sum("v"), "average": A.avg("v")})
    )
    kept = {"aggregates": None, "apply": len, "outputs": "n int"}
    assert compared(definition(**kept)) == compared(definition(**{**kept, "apply": print, "outputs": "other string"}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"aggregates": {"cars": A.count(), "speed": A.mean("v"), "top": A.max("v")}},
         "aggregates: was cars, speed; is cars, speed, top"),
        ({"aggregates": {"cars": A.count(), "speed": A.max("v")}},
         "aggregates: was cars, speed (mean(v) of int64); is cars, speed (max(v) of int64)"),
        ({"schema": SCHEMA.set(3, pa.field("v", pa.float64())), "aggregates": {"cars": A.count(), "total": A.sum("v")}},
         "aggregates: was cars, total (sum(v) of int64); is cars, total (sum(v) of double)"),
        ({"windows": {"a": aion.Tumbling("1 minute"), "b": aion.Tumbling("20 seconds")}},
         "windows: was a (tumbling 10 seconds), b; is a (tumbling 1 minute), b"),
        ({"windows": {"a": aion.Tumbling("10 seconds")}}, "windows: was a, b; is a"),
        ({"windows": {"b": aion.Tumbling("20 seconds"), "a": aion.Tumbling("10 seconds")}},
         "windows: was a, b; is b, a"),
        ({"key": ["k"]}, "key: was k, j; is k"),
        ({"key": ["j", "k"]}, "key: was k, j; is j, k"),
        ({"schema": SCHEMA.set(1, pa.field("k", pa.int64()))}, "key: was k (string), j; is k (int64), j"),
        ({"emit": "final"}, "emit: was all; is final"),
        ({"unique": ["k", "v"]}, "unique: was none; is k, v, j"),
        ({"aggregates": None, "apply": len, "outputs": "n int"},
         "aggregates: was cars, speed; is none; columns: was none; is v"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("back", [False, True])
def test_what_differs_is_said_in_the_users_words(changed: dict[str, Any], said: str, back: bool) -> None:
    how: dict[str, Any] = {
        "aggregates": {"cars": A.count(), "speed": A.mean("v")},
        "windows": {"a": aion.Tumbling("10 seconds"), "b": aion.Tumbling("20 seconds")},
    }
    if "schema" in changed and "aggregates" in changed:  # the same ones, of a column of another type
        how["aggregates"] = changed["aggregates"]
    was, now = definition(**how), definition(**{**how, **changed})
    if back:
        was, now = now, was
        said = re.sub(r"was ([^;]*); is ([^;]*)", r"was \2; is \1", said)
    found = orjson.loads(orjson.dumps({"definition": was}))
    with pytest.raises(ForeignState) as refused:
        check_operator(found, replace(IDENTITY, definition=now), "the state")
    assert str(refused.value) == (
        f"operator 'tolls' was started with another definition: {said}. What it keeps is for that one: change it back, "
        "or start the query with a new checkpoint"
    )


@pytest.mark.slow
def test_a_definition_from_before_words_were_stored_opens_and_is_compared() -> None:
    check_operator({"definition": compared(definition())}, replace(IDENTITY, definition=definition()), "the state")
    with pytest.raises(ForeignState, match=r"windows: was .*10000000.*; is .*20000000"):
        was = compared(definition(windows={"a": aion.Tumbling("10 seconds")}))
        now = definition(windows={"a": aion.Tumbling("20 seconds")})
        check_operator({"definition": was}, replace(IDENTITY, definition=now), "the state")
