"""Versions of a shard: what Spark's token names is what is opened, whatever happened since."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

import aion
from aion import aggregates as A
from aion.errors import CorruptState, ForeignState, FormatError, SessionSuperseded
from aion.plan import make_plan
from state_backends.block import Block
from state_backends.checkpoint import Shard
from state_backends.compaction import DEFAULTS, Limits
from state_backends.depot import LocalDepot
from state_backends.io_thread import IoThread
from state_backends.manifest import FileEntry, Identity, Manifest, dump, load
from state_backends.p_bucket import PBucket
from state_backends.remote import Remote, RemoteDepot
from state_backends.retention import MERGED
from state_backends.stores import STORES
from state_backends.tiered import MemoryBudget
from tests.test_store_contract import EAGER, make_block

IDENTITY = Identity("query", "tolls", 3, 8, {"key": ["k"], "windows": {"w": 1}})


KINDS = [*STORES, "remote"]
"""The stores, their versions in a local folder; and the tiered one with versions on a file system that is not local."""


class Host:
    """A host that holds one shard, and can be replaced by another that knows its folder only."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        retain: int = 100,
        limits: Limits = DEFAULTS,
        budget: int = 16 << 10,
        block_bytes: int = 600,
    ) -> None:
        self.kind, self.folder, self.retain, self.limits = kind, folder, retain, limits
        self.budget_bytes, self.block_bytes = budget, block_bytes
        self.blocks: dict[bytes, int] = {}
        self.attempts = 0
        self.start()

    def start(self) -> None:
        self.io = IoThread()
        self.depot: LocalDepot | RemoteDepot = LocalDepot(self.folder / "state")
        if self.kind == "remote":
            # What pyarrow reaches by its own means; here it is a local folder, so that tests can look into it.
            fs = SubTreeFileSystem(str(self.folder.parent), LocalFileSystem())
            self.remote = Remote("test://remote", (fs, self.folder.name))
            self.depot = RemoteDepot(self.remote, "state", self.folder / "copies")
        self.shard = Shard(IDENTITY, self.depot, self.folder / "live", self.make_store, retain=self.retain)

    def make_store(self, p_bucket: PBucket) -> Any:
        store = STORES["tiered" if self.kind == "remote" else self.kind]
        options: dict[str, Any] = {"bucket_limit_bytes": self.budget_bytes // 2, "limits": self.limits}
        return store(p_bucket, self.io, MemoryBudget(self.budget_bytes), **options)

    def stop(self) -> None:
        self.shard.close()
        self.io.close()
        if self.kind == "remote":
            self.remote.close()
            shutil.rmtree(self.folder / "copies", ignore_errors=True)  # the next host has none

    def restart(self) -> None:
        self.stop()
        self.start()

    def open(self, token: str | None, identity: Identity = IDENTITY) -> tuple[str, dict[str, Any] | None]:
        """A new attempt on a version, and its snapshot."""
        self.attempts += 1
        attempt = f"attempt-{self.attempts}"
        return attempt, self.shard.open(token, attempt, identity)

    def append(self, attempt: str, *blocks: tuple[int, int], late: bool = False) -> None:
        """Blocks as (seq, slice); each has contents of its own, also if its seq was given before."""
        for seq, slice_us in blocks:
            block = make_block(slice_us, len(self.blocks), self.block_bytes)
            self.blocks[bytes(block.data)] = seq
            self.shard.append(attempt, [(seq, late, block)])

    def commit(self, token: str | None, *blocks: tuple[int, int], purge: Sequence[int] = (), **snapshot: Any) -> str:
        """The next version: these blocks more, these slices less."""
        attempt, old = self.open(token)
        self.append(attempt, *blocks)
        self.shard.purge(attempt, purge)
        next_seq = max([seq + 1 for seq, _ in blocks], default=old["next_seq"] if old else 0)
        self.shard.commit(attempt, {"next_seq": next_seq, **snapshot})
        return attempt

    def read(self, attempt: str, *slices: int) -> list[tuple[int, Block]]:
        stored = [(seq, bytes(block.data)) for seq, block in self.shard.read(attempt, slices)]
        assert all(self.blocks[data] == seq for seq, data in stored)
        return stored  # type: ignore[return-value]

    def seqs(self, token: str | None, *slices: int) -> list[int]:
        attempt, _ = self.open(token)
        seqs = [seq for seq, _ in self.read(attempt, *slices)]
        self.shard.abort(attempt)
        return seqs

    def manifest(self, token: str) -> Path:
        return self.folder / "state" / "manifests" / f"{token}.json"

    def settle(self) -> None:
        """What is to be deleted is deleted in the background where that takes its time."""
        if isinstance(self.depot, RemoteDepot):
            self.depot.settle()

    def manifests(self) -> set[str]:
        self.settle()
        return {path.stem for path in (self.folder / "state" / "manifests").glob("*")}

    def files(self) -> set[str]:
        """What lies there, but for what merging has under way: it is the store's, not yet a version's."""
        self.settle()
        names = {path.name for path in (self.folder / "state" / "files").glob("*")}
        named = self.named_files(*self.manifests())
        return {name for name in names if MERGED not in name or name in named}

    def named_files(self, *tokens: str) -> set[str]:
        return {f.name for t in tokens for f in load(self.manifest(t).read_bytes(), t).files}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make(kind: str = "tiered", **options: Any) -> Host:
        hosts.append(Host(kind, tmp_path / str(len(hosts)), **options))
        return hosts[-1]

    yield make
    for host in hosts:
        host.stop()
        assert not (host.folder / "live").exists()


@pytest.fixture
def host(make: Callable[..., Host], kind: str) -> Host:
    return make(kind)


# -- versions -------------------------------------------------------------------------------------------------


def test_a_version_is_opened_by_its_token(host: Host) -> None:
    attempt, snapshot = host.open(None)
    assert snapshot is None
    host.append(attempt, (0, 0), (1, 10))
    assert [seq for seq, _ in host.read(attempt, 0, 10)] == [0, 1], "one's own blocks are there at once"
    host.shard.commit(attempt, {"next_seq": 2, "windows": [1, 2]})
    again, snapshot = host.open(attempt)
    assert snapshot == {"next_seq": 2, "windows": [1, 2]}
    assert [seq for seq, _ in host.read(again, 0, 10)] == [0, 1]


def test_versions_build_on_one_another(host: Host) -> None:
    token = None
    for i in range(5):
        token = host.commit(token, (i, 0), (100 + i, 10 + i), purge=[9 + i])
    assert host.seqs(token, *range(20)) == [0, 1, 2, 3, 4, 104]
    manifest = load(host.manifest(token).read_bytes(), "the last")
    assert (manifest.version, manifest.token) == (5, token)


def test_a_new_host_opens_what_another_one_committed(host: Host) -> None:
    first = host.commit(None, (0, 0), (1, 10))
    second = host.commit(first, (2, 0), purge=[10], note="x" * 1000)
    host.restart()
    attempt, snapshot = host.open(second)
    assert snapshot == {"next_seq": 3, "note": "x" * 1000}
    assert [seq for seq, _ in host.read(attempt, 0, 10)] == [0, 2]
    host.append(attempt, (3, 20))
    host.shard.commit(attempt, {"next_seq": 4})
    host.restart()
    assert host.seqs(attempt, 0, 10, 20) == [0, 2, 3]


def test_an_attempt_that_is_aborted_leaves_no_trace(host: Host) -> None:
    token = host.commit(None, (0, 0), (1, 10))
    files = host.files()
    attempt, _ = host.open(token)
    host.append(attempt, (2, 0), (3, 20), late=True)
    host.shard.destage(attempt, [0, 20])
    host.shard.purge(attempt, [10])
    host.shard.abort(attempt)
    assert host.seqs(token, 0, 10, 20) == [0, 1]
    assert host.files() == files
    assert host.shard.rebuilds == 1, "undone without rebuilding"


def test_an_attempt_that_just_stops_leaves_no_trace_either(host: Host) -> None:
    token = host.commit(None, (0, 0))
    attempt, _ = host.open(token)
    host.append(attempt, (1, 0))
    host.shard.purge(attempt, [0])
    assert host.seqs(token, 0) == [0], "another one opens, and nobody told the first to stop"
    assert host.commit(token, (1, 0))
    assert host.shard.rebuilds == 1


def test_a_very_first_attempt_can_be_undone_too(host: Host) -> None:
    attempt, _ = host.open(None)
    host.append(attempt, (0, 0))
    host.shard.destage(attempt, [0])
    assert host.seqs(None, 0) == []
    assert host.seqs(host.commit(None, (0, 0)), 0) == [0]


def test_spark_may_ask_for_an_older_version(host: Host) -> None:
    """The commit came through, and Spark chose another attempt all the same."""
    first = host.commit(None, (0, 0), (1, 10))
    host.commit(first, (2, 0), purge=[10])
    rebuilds = host.shard.rebuilds
    third = host.commit(first, (2, 20))
    assert host.shard.rebuilds == rebuilds + 1
    assert host.seqs(third, 0, 10, 20) == [0, 1, 2]
    assert host.seqs(first, 0, 10, 20) == [0, 1]
    assert host.seqs(None, 0, 10, 20) == []


def test_purging_waits_for_the_commit(host: Host) -> None:
    token = host.commit(None, (0, 0), (1, 10))
    attempt, _ = host.open(token)
    host.shard.purge(attempt, [0])
    assert [seq for seq, _ in host.read(attempt, 0, 10)] == [0, 1]
    host.shard.commit(attempt, {"next_seq": 2})
    assert host.seqs(attempt, 0, 10) == [1]
    assert host.seqs(token, 0, 10) == [0, 1]


def test_a_commit_without_news_writes_no_file(host: Host) -> None:
    first = host.commit(None, (0, 0))
    files = host.files()
    second = host.commit(first)
    assert host.files() == files
    host.restart()
    assert host.seqs(second, 0) == [0]


def test_slices_that_die_in_the_batch_that_brought_them_are_not_in_the_version(host: Host) -> None:
    token = host.commit(None, (0, 0), (1, 10), purge=[0])
    assert sum(f.blocks for f in load(host.manifest(token).read_bytes(), token).files) == 1
    everything = host.commit(token, (2, 20), purge=[10, 20])
    assert host.named_files(everything) == set()
    host.restart()
    assert host.seqs(everything, 0, 10, 20) == []


@pytest.mark.parametrize("how", ["another opened", "aborted", "committed", "never opened"])
def test_an_attempt_that_is_over_is_told_so(host: Host, how: str) -> None:
    attempt, _ = host.open(None)
    if how == "another opened":
        host.open(None)
    elif how == "aborted":
        host.shard.abort(attempt)
    elif how == "committed":
        host.shard.commit(attempt, {"next_seq": 0})
    else:
        attempt = "stranger"
    for call in (
        lambda: host.shard.append(attempt, []),
        lambda: list(host.shard.read(attempt, [0])),
        lambda: host.shard.destage(attempt, [0]),
        lambda: host.shard.purge(attempt, [0]),
        lambda: host.shard.commit(attempt, {"next_seq": 0}),
    ):
        with pytest.raises(SessionSuperseded, match=rf"shard 3.*{attempt}"):
            call()


def test_a_superseded_attempt_cannot_abort_the_one_at_work(host: Host) -> None:
    old, _ = host.open(None)
    new, _ = host.open(None)
    host.append(new, (0, 0))
    host.shard.abort(old)
    host.shard.commit(new, {"next_seq": 1})
    assert host.seqs(new, 0) == [0]


# -- commits that fail ------------------------------------------------------------------------------------------


def test_a_commit_whose_files_cannot_be_written_is_none(host: Host) -> None:
    token = host.commit(None, (0, 0))
    attempt, _ = host.open(token)
    host.append(attempt, (1, 0))
    with in_the_way(host.folder / "state" / "files"), pytest.raises(OSError):
        host.shard.commit(attempt, {"next_seq": 2})
    host.shard.abort(attempt)
    assert host.manifests() == {token}
    assert host.seqs(token, 0) == [0]
    assert host.seqs(host.commit(token, (1, 0)), 0) == [0, 1]


def test_a_commit_whose_manifest_cannot_be_written_is_none(host: Host) -> None:
    token = host.commit(None, (0, 0))
    attempt, _ = host.open(token)
    host.append(attempt, (1, 0))
    with in_the_way(host.folder / "state" / "manifests"), pytest.raises(OSError):
        host.shard.commit(attempt, {"next_seq": 2})
    host.shard.abort(attempt)
    assert host.seqs(token, 0) == [0]
    last = host.commit(token, (1, 0))
    assert host.seqs(last, 0) == [0, 1]
    assert host.files() == host.named_files(token, last), "nobody would ever delete the others"


class in_the_way:
    """For a while there is a file where a folder should be."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.away = folder, folder.with_suffix(".away")

    def __enter__(self) -> None:
        self.folder.rename(self.away)
        self.folder.write_text("in the way")

    def __exit__(self, *_: object) -> None:
        self.folder.unlink()
        self.away.rename(self.folder)


# -- state that is damaged --------------------------------------------------------------------------------------


def test_an_unknown_token_is_told(host: Host) -> None:
    token = host.commit(None, (0, 0))
    with pytest.raises(CorruptState, match=r"0007-unknown.*shard 3.*'tolls'"):
        host.open("0007-unknown")
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


def test_a_newer_format_is_told_apart_from_damage(make: Callable[..., Host]) -> None:
    host = make()
    token = host.commit(None, (0, 0))
    path = host.manifest(token)
    value = json.loads(path.read_bytes().splitlines()[0])
    body = orjson.dumps({**value, "format": value["format"] + 1, "news": True})
    path.write_bytes(body + b"\n%08x\n" % zlib.crc32(body))
    host.restart()
    with pytest.raises(FormatError, match=rf"{path.name}.*format {value['format'] + 1}.*format {value['format']}"):
        host.open(token)


# -- state of somebody else -------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"query": "other"}, r"query 'query', not 'other'"),
        ({"operator": "sums"}, r"operator 'tolls', not 'sums'"),
        ({"shard": 4}, r"shard 3, not 4"),
        ({"shards": 16}, r"shards 8, not 16.*shuffle partitions"),
        ({"definition": {"key": ["j"], "windows": {"w": 1}}}, r"'tolls'.*key: was \['k'\], is \['j'\]"),
        ({"definition": {"key": ["k"], "windows": {"w": 2}}}, r"windows: was \{'w': 1\}, is \{'w': 2\}"),
        ({"definition": {"key": ["k"], "windows": {"w": 1}, "time": "ts"}}, r"time: was None, is ts"),
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
    host.open(None)
    host.restart()
    with pytest.raises(ForeignState, match=r"operator\.json.*'tolls'.*shards 8, not 16"):
        host.open(None, other)
    with pytest.raises(ForeignState, match=r"another definition.*windows: was \{'w': 1\}, is \{'w': 2\}"):
        host.open(None, replace(IDENTITY, definition={"key": ["k"], "windows": {"w": 2}}))
    assert host.seqs(host.commit(None, (0, 0)), 0) == [0], "and is still there for whose it is"


def test_until_the_first_batch_is_through_everything_may_change(host: Host) -> None:
    other = replace(IDENTITY, shards=16)
    for identity in (IDENTITY, other):
        host.shard.open(None, "0000000000-first", identity)
        host.restart()
    host.shard.open(None, "0000000001-second", other)
    host.restart()
    with pytest.raises(ForeignState, match="shards 16, not 8"):
        host.shard.open(None, "0000000001-second", IDENTITY)


def test_damage_to_what_the_shards_share_is_named(make: Callable[..., Host]) -> None:
    host = make()
    token = host.commit(None, (0, 0))
    path = host.folder / "operator.json"
    data = path.read_bytes()
    for damaged in (data.replace(b"tolls", b"t0lls"), data[:-5], b""):
        path.write_bytes(damaged)
        host.restart()
        with pytest.raises(CorruptState, match=r"operator\.json of operator 'tolls'"):
            host.open(None)
    assert host.seqs(token, 0) == [0], "a shard that has a version does not need it"


SCHEMA = pa.schema([("ts", pa.timestamp("us")), ("k", pa.string()), ("j", pa.string()), ("v", pa.int64())])


def definition(**changed: Any) -> dict[str, Any]:
    """What a user's definition is to stored state, by way of a manifest."""
    arguments: dict[str, Any] = {
        "key": ["k", "j"],
        "time": "ts",
        "windows": {"a": aion.Tumbling(10), "b": aion.Tumbling(20)},
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
        {"windows": {"a": aion.Tumbling(10)}},
        {"windows": {"a": aion.Tumbling(10), "b": aion.Tumbling(30)}},
        {"windows": {"b": aion.Tumbling(20), "a": aion.Tumbling(10)}},
        {"windows": {"a": aion.Tumbling(10), "b": aion.Tumbling(20), "c": aion.Tumbling(40)}},
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


def test_what_stored_state_does_not_depend_on_may_change() -> None:
    assert definition() == definition(aggregates={"cars": A.count(), "total": A.sum("v"), "average": A.avg("v")})
    kept = {"aggregates": None, "apply": len, "outputs": "n int"}
    assert definition(**kept) == definition(**{**kept, "apply": print, "outputs": "other string"})


# -- manifests --------------------------------------------------------------------------------------------------


@given(
    st.builds(
        Manifest,
        token=st.text(max_size=5),
        parent=st.none() | st.text(max_size=5),
        version=st.integers(1, 2**40),
        identity=st.just(IDENTITY),
        files=st.lists(
            st.builds(FileEntry, st.integers(0, 2**63 - 1), st.text(), *[st.integers(0, 2**40)] * 4),
            max_size=3,
        ).map(tuple),
        purged=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple),
        snapshot=st.dictionaries(st.text(max_size=3), st.integers(-(2**63), 2**63 - 1) | st.text(max_size=3)),
    )
)
def test_a_manifest_is_what_was_written(manifest: Manifest) -> None:
    try:
        data = dump(manifest)
    except orjson.JSONEncodeError:
        return  # text that is no text: lone surrogates
    assert load(data, "m") == manifest
    assert data.count(b"\n") == 2, "one object, and its checksum"


# -- what is kept, and what is deleted --------------------------------------------------------------------------


def test_versions_that_nobody_can_ask_for_are_deleted_with_their_files(host: Host) -> None:
    host.stop()
    host.retain = 3
    host.start()
    tokens: list[str] = []
    for i in range(8):
        tokens.append(host.commit(tokens[-1] if tokens else None, (2 * i, 0), (2 * i + 1, 10 + i), purge=[9 + i]))
        kept = tokens[-3:]
        assert host.manifests() == set(kept)
        assert host.files() == host.named_files(*kept)
    for i in (5, 6, 7):
        assert host.seqs(tokens[i], *range(20)) == [*range(0, 2 * i + 1, 2), 2 * i + 1]
    with pytest.raises(CorruptState, match=tokens[4]):
        host.open(tokens[4])


def test_a_file_is_kept_as_long_as_a_version_needs_it(make: Callable[..., Host]) -> None:
    host = make(retain=2)
    first = host.commit(None, (0, 0))
    (name,) = host.files()
    second = host.commit(first, (1, 10), purge=[0])
    assert name in host.files(), "the first version needs it"
    third = host.commit(second)
    assert name not in host.files()
    assert host.seqs(third, 0, 10) == [1]


def test_a_new_host_deletes_what_the_one_before_would_have(make: Callable[..., Host]) -> None:
    host = make(retain=3)
    tokens: list[str] = []
    for i in range(6):
        tokens.append(host.commit(tokens[-1] if tokens else None, (i, i), purge=[i - 1]))
        host.restart()
        assert host.manifests() == set(tokens[-3:])
        assert host.files() == host.named_files(*tokens[-3:])


def test_what_failed_attempts_left_is_deleted_in_the_end(make: Callable[..., Host]) -> None:
    """A version that Spark did not take, and what a host wrote before it was killed, are nobody's."""
    host = make(retain=2)
    first = host.commit(None, (0, 0))
    host.commit(first, (1, 0))  # Spark takes another one
    attempt, _ = host.open(first)
    host.append(attempt, (1, 10), late=True)
    host.shard.destage(attempt, [10])
    assert host.shard.store is not None
    host.shard.store.flush()
    host.restart()  # killed, as far as the folder can tell: nothing is rolled back
    (half,) = (name for name in host.files() if name.endswith(f"-{attempt}.sst"))
    (host.folder / "state" / "files" / half.replace(".sst", ".part")).write_bytes(b"and while it wrote")
    tokens = [first]
    for i in range(4):
        tokens.append(host.commit(tokens[-1], (1 + i, i), purge=[i - 1]))
    assert host.manifests() == set(tokens[-2:])
    assert host.files() == host.named_files(*tokens[-2:])


def test_nothing_is_deleted_before_spark_has_chosen(make: Callable[..., Host]) -> None:
    """Several attempts of one batch may come to a commit; any of them may be the one that Spark takes."""
    host = make(retain=2)
    for base in (None, host.commit(None, (0, 0))):
        rivals = []
        for i in range(4):
            rivals.append(host.commit(base, (10 + i, 10)))
            if i == 1:
                host.restart()
        for i, rival in enumerate(rivals):
            assert host.seqs(rival, 10) == [10 + i]
        assert base is None or host.seqs(base, 0) == [0]


def test_a_shard_can_be_moved_with_its_folder(make: Callable[..., Host]) -> None:
    host = make()
    token = host.commit(None, (0, 0), (1, 10))
    host.stop()
    shutil.copytree(host.folder / "state", host.folder / "elsewhere" / "state")
    host.folder = host.folder / "elsewhere"
    host.start()
    assert host.seqs(token, 0, 10) == [0, 1]


# -- everything in any order ------------------------------------------------------------------------------------


class ShardMachine(RuleBasedStateMachine):
    """Attempts that are committed, aborted, left, superseded; hosts that come and go; versions old and new.

    Spark asks for the version that it chose last, or for one that was committed on it (and so chooses that one), or,
    when a user goes back to an older checkpoint, for one that the chosen one came from. It never asks for others.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__()
        self.host = Host(kind, folder, limits=EAGER)
        # Every version: the seqs and slices of its blocks, by contents; and the version that it came from.
        self.versions: dict[str | None, dict[bytes, tuple[int, int]]] = {None: {}}
        self.parents: dict[str | None, str | None] = {}
        self.chosen: str | None = None
        self.rivals: list[str | None] = []  # what was committed on it: Spark may choose any of them
        self.attempt: str | None = None
        self.mine: dict[bytes, tuple[int, int]] = {}
        self.purging: set[int] = set()
        # Slices that are purged never come back, in no version that comes from the one that purged them.
        self.dead: dict[str | None, set[int]] = {None: set()}
        self.next_seq = 0
        self.clock = 0

    def askable(self) -> list[str | None]:
        older: list[str | None] = [self.chosen]
        while older[-1] is not None:
            older.append(self.parents[older[-1]])
        return [*older, *self.rivals]

    @rule(data=st.data(), other=st.booleans())
    def open(self, data: st.DataObject, other: bool) -> None:
        if other:
            self.chosen, self.rivals = data.draw(st.sampled_from(self.askable())), []
        self.attempt, snapshot = self.host.open(self.chosen)
        self.mine = dict(self.versions[self.chosen])
        self.purging = set()
        self.next_seq = snapshot["next_seq"] if snapshot else 0
        assert (snapshot or {}).get("version") == self.chosen

    @precondition(lambda self: self.attempt)
    @rule(count=st.integers(1, 5), slice_=st.integers(0, 3), late=st.booleans())
    def append(self, count: int, slice_: int, late: bool) -> None:
        assert self.attempt
        for _ in range(count):
            self.clock += 1
            slice_us = slice_ + 10 * (self.clock // 20)
            if slice_us in self.purging | self.dead[self.chosen]:
                continue
            known = set(self.host.blocks)
            self.host.append(self.attempt, (self.next_seq, slice_us), late=late)
            (data,) = self.host.blocks.keys() - known
            self.mine[data] = (self.next_seq, slice_us)
            self.next_seq += 1

    @precondition(lambda self: self.attempt and self.mine)
    @rule(data=st.data(), late=st.booleans())
    def fold(self, data: st.DataObject, late: bool) -> None:
        """The last blocks of a slice are superseded by a new one."""
        assert self.attempt
        slice_us = data.draw(st.sampled_from(sorted({s for _, s in self.mine.values()})))
        if slice_us in self.purging:
            return
        seqs = sorted(seq for seq, s in self.mine.values() if s == slice_us)
        after = data.draw(st.sampled_from([-1, *seqs[:-1]]))
        known = set(self.host.blocks)
        self.host.append(self.attempt, (self.next_seq, slice_us), late=late)
        (new,) = self.host.blocks.keys() - known
        self.host.shard.supersede(self.attempt, {slice_us: (after, seqs[-1])}, self.next_seq)
        self.mine = {d: (q, s) for d, (q, s) in self.mine.items() if s != slice_us or q <= after}
        self.mine[new] = (self.next_seq, slice_us)
        self.next_seq += 1

    @precondition(lambda self: self.attempt)
    @rule()
    def read(self) -> None:
        assert self.attempt
        slices = sorted({s for _, s in self.mine.values()})
        found = self.host.read(self.attempt, *slices)
        wanted = sorted((s, seq, data) for data, (seq, s) in self.mine.items())
        assert found == [(seq, data) for _, seq, data in wanted]

    @precondition(lambda self: self.attempt)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        assert self.attempt
        slices = sorted({s for _, s in self.mine.values()})
        some = st.lists(st.sampled_from(slices), max_size=2, unique=True) if slices else st.just([])
        self.host.shard.destage(self.attempt, data.draw(some))
        purge = data.draw(some)
        self.host.shard.purge(self.attempt, purge)
        self.purging |= set(purge)

    @precondition(lambda self: self.attempt)
    @rule()
    def commit(self) -> None:
        """Whether Spark takes the version shows when it asks for the next one."""
        assert self.attempt
        self.host.shard.commit(self.attempt, {"next_seq": self.next_seq, "version": self.attempt})
        self.versions[self.attempt] = {d: p for d, p in self.mine.items() if p[1] not in self.purging}
        self.parents[self.attempt] = self.chosen
        self.rivals.append(self.attempt)
        self.dead[self.attempt] = self.dead[self.chosen] | self.purging
        self.attempt = None

    @precondition(lambda self: self.attempt)
    @rule()
    def abort(self) -> None:
        assert self.attempt
        self.host.shard.abort(self.attempt)
        self.attempt = None

    @rule()
    def restart(self) -> None:
        self.host.restart()
        self.attempt = None

    def teardown(self) -> None:
        self.host.restart()
        for token in self.askable():
            blocks = self.versions[token]
            slices = sorted({s for _, s in blocks.values()})
            assert self.host.seqs(token, *slices) == [seq for _, seq in sorted((s, q) for q, s in blocks.values())]
        self.host.stop()


def test_any_order_of_attempts(kind: str, tmp_path: Path) -> None:
    folders = iter(range(10**9))
    run_state_machine_as_test(
        lambda: ShardMachine(kind, tmp_path / str(next(folders))),
        settings=settings(max_examples=max(settings.default.max_examples // 2, 1), stateful_step_count=30),
    )
