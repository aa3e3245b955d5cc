"""A damaged state folder: whatever is damaged is named with its version, nobody reads on as if it were whole."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings
from typer.testing import CliRunner

import aion
from aion.cli import app
from aion.errors import ConfigError, StateError
from aion.tools.inspect.state import SET_ASIDE, inspect, set_back
from state_backends.backends import Stores
from state_backends.files.handed import HandedFile, name_of
from state_backends.files.names import HANDED_FOLDER
from state_backends.files.storage import LocalStorage
from state_backends.format.block import Block
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.versions.audit import ShardFinding, StateFolder, plan_repair
from state_backends.versions.lineage import digest_of
from state_backends.versions.manifest import Identity, runs_of
from state_backends.versions.shard import Shard
from tests.durations import us
from tests.operators import make
from tests.stores.rig import make_block

SLICES = (0, 10, 20)
POSITIONS = settings.default.max_examples  # of each file, in the corruption tests
Blocks = list[tuple[int, bytes]]


class Writer:
    """The versions of one shard, one for each batch, as a state server makes them."""

    def __init__(
        self, state: Path, shard: int, live: Path, *, query: str = "query", lineage: str = "", checkpoint: str = ""
    ) -> None:
        self.identity = Identity(query, "tolls", shard, 2, {}, checkpoint=checkpoint)
        self.folder = state / query / "tolls" / lineage / f"shard-{shard:05d}"
        self._live = live / str(shard)

    def __enter__(self) -> Writer:
        self._io = IoThread()
        self.shard = Shard(
            self.identity,
            LocalStorage(self.folder, self.folder.parent / HANDED_FOLDER),
            self._live,
            lambda p: Stores.of("tiered", p, self._io, MemoryBudget(1 << 20), bucket_limit_bytes=1 << 20),
            retain=100,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.shard.close()
        self._io.close()

    def commit(self, token: str | None, batch: int, seqs: Sequence[int]) -> str:
        attempt = f"{batch:010d}-{'ab'[self.identity.shard]}{batch}"
        self.shard.open(token, attempt, self.identity)
        for seq in seqs:
            salt = 1000 * self.identity.shard + seq
            self.shard.append(attempt, [(seq, False, make_block(SLICES[seq % 3], salt, 300))])
        snapshot = make(aion.Tumbling(us(10))).snapshot() | {"next_seq": seqs[-1] + 1}
        self.shard.commit(attempt, snapshot)
        return attempt

    def put(self, token: str | None, batch: int, *values: tuple[bytes, bytes | None]) -> str:
        """A version with keyed values more, by a processor without windows."""
        attempt = f"{batch:010d}-{'ab'[self.identity.shard]}{batch}"
        self.shard.open(token, attempt, self.identity)
        self.shard.put(attempt, [(key, value, None) for key, value in values])
        self.shard.commit(attempt, {"next_seq": 0, "counters": {}})
        return attempt

    def read(self, token: str) -> Blocks:
        """All blocks of a version, by an attempt that changes nothing."""
        self.shard.open(token, "reader", self.identity)
        try:
            return [(seq, bytes(block.stored)) for seq, block in self.shard.read("reader", SLICES)]
        finally:
            self.shard.abort("reader")

    def adopt(self, block: Block) -> None:
        """The first version, with a block that a child handed over."""
        self.shard.open(None, "0000000000-a", self.identity)
        self.shard.append("0000000000-a", [(0, False, block)])
        self.shard.commit("0000000000-a", make(aion.Tumbling(us(10))).snapshot() | {"next_seq": 1})


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Two shards; the first has versions of batches 0, 1, 2, the other of 0 and 2."""
    state = tmp_path / "state"
    for shard, batches in ((0, (0, 1, 2)), (1, (0, 2))):
        with Writer(state, shard, tmp_path / "live") as writer:
            token = None
            for n, batch in enumerate(batches):
                token = writer.commit(token, batch, range(4 * n, 4 * n + 4))
    return state


def look(state: Path) -> dict[str, ShardFinding]:
    folder = StateFolder(str(state))
    try:
        return {shard[2]: folder.check(shard) for shard in folder.shards()}
    finally:
        folder.close()


def damages(data: bytes, other: bytes, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Ways in which a file's bytes may come to be others."""
    yield "emptied", b""
    yield "swapped", other
    for position in sorted({0, len(data) - 1, *rng.sample(range(len(data)), min(POSITIONS, len(data)))}):
        flipped = bytearray(data)
        flipped[position] ^= 1 << rng.randrange(8)
        yield f"flipped at {position}", bytes(flipped)
        yield f"truncated to {position}", data[:position]


# -- lineages -------------------------------------------------------------------------------------------------


def test_what_a_child_handed_over_to_several_shards_is_on_disk_once(tmp_path: Path) -> None:
    handed, digest = tmp_path / "state" / "query" / "tolls" / HANDED_FOLDER, digest_of("")
    with closing(HandedFile(handed, name_of(0, digest, "child"))) as file:
        references = [file.add(make_block(SLICES[n], n, 100_000)) for n in range(2)]
        file.end()
        file.seal()
    for shard, reference in enumerate(references):
        with Writer(tmp_path / "state", shard, tmp_path / "live") as writer:
            writer.adopt(reference)
    (handed / name_of(9, digest, "left")).touch()
    (handed / name_of(9, "other", "left")).touch()
    with closing(StateFolder(str(tmp_path / "state"))) as folder:
        (lineage,) = folder.lineages()
        assert 200_000 < lineage.bytes < 220_000
        folder.forget(lineage)
    left = [path.name for path in (tmp_path / "state").rglob("*") if path.suffix in (".bodies", ".sst", ".json")]
    assert sorted(left) == sorted([name_of(9, "other", "left"), "operator.json"])


# -- corruption -----------------------------------------------------------------------------------------------


def test_whatever_is_damaged_is_named_by_inspect(state: Path) -> None:
    rng = random.Random(1)
    files = sorted(p for p in state.rglob("*") if p.is_file())
    assert len(files) == 11, "a file and a manifest for each of five versions, and what the shards have in common"
    for path in files:
        data = path.read_bytes()
        other = next(p for p in files if p.suffix == path.suffix and p.parts[-3] != path.parts[-3])
        mine = {"shard-00000", "shard-00001"} if path.name == "operator.json" else {path.parts[-3]}
        for how, content in damages(data, other.read_bytes(), rng):
            path.write_bytes(content)
            found = look(state)
            where = str(path.relative_to(state))
            lines = [line for finding in found.values() for line in finding.damage]
            assert any(line.startswith(f"{where}: ") for line in lines), (how, where, lines)
            assert mine == {name for name, finding in found.items() if finding.damage}, how
        path.write_bytes(data)
    assert not any(finding.damage for finding in look(state).values())


@pytest.mark.parametrize("suffix", [".json", ".sst"])
def test_a_damaged_version_is_an_error_with_names_and_never_other_blocks(
    state: Path, tmp_path: Path, suffix: str
) -> None:
    rng = random.Random(2)
    with Writer(state, 0, tmp_path / "live") as writer:
        files = sorted(writer.folder.rglob("*" + suffix))
        newest = max(p.stem for p in (writer.folder / "manifests").iterdir())
        whole = writer.read(newest)
        other = next((state / "query/tolls/shard-00001").rglob("*" + suffix)).read_bytes()
    for path in files if suffix == ".sst" else [writer.folder / "manifests" / f"{newest}.json"]:
        data = path.read_bytes()
        for how, content in damages(data, other, rng):
            path.unlink()  # not in place: RocksDB's link would see it
            path.write_bytes(content)
            with Writer(state, 0, tmp_path / "live") as writer:
                try:
                    read = writer.read(newest)
                except StateError as error:
                    assert path.name in str(error), (how, error)
                    assert suffix == ".json" or newest in str(error), (how, error)
                else:
                    assert suffix == ".sst" and read == whole, f"{how}: only bytes that hold nothing may go unnoticed"
        path.write_bytes(data)


def test_a_missing_file_is_named_with_its_versions(state: Path) -> None:
    path = min((state / "query/tolls/shard-00000/files").iterdir())
    path.unlink()
    finding = look(state)["shard-00000"]
    assert finding.damage == [
        f"query/tolls/shard-00000/files/{path.name}: it is missing; "
        "named by version 0000000000-a0, 0000000001-a1, 0000000002-a2"
    ]
    assert finding.newest is None


# -- repair ---------------------------------------------------------------------------------------------------


def newest_file(state: Path, shard: int, batch: int) -> Path:
    (path,) = (state / f"query/tolls/shard-{shard:05d}/files").glob(f"*-{batch:010d}-*.sst")
    return path


@pytest.mark.parametrize(
    ("damaged", "batch"),
    [([(0, 2)], 1), ([(1, 2)], 1), ([(0, 1)], 0), ([(0, 2), (1, 2)], 1), ([(0, 1), (1, 2)], 0), ([(1, 0)], None)],
)
def test_the_newest_batch_after_which_every_shard_is_whole(
    state: Path, damaged: list[tuple[int, int]], batch: int | None
) -> None:
    for shard, of_batch in damaged:
        newest_file(state, shard, of_batch).write_bytes(b"")
    plan = plan_repair("query", list(look(state).values()))
    assert (plan.batch, plan.last) == (batch, 2)
    assert plan.replay == range((-1 if batch is None else batch) + 1, 3)


def test_of_two_attempts_of_the_last_batch_both_must_be_whole(state: Path, tmp_path: Path) -> None:
    """Which one Spark chose only its checkpoint knows."""
    with Writer(state, 0, tmp_path / "live") as writer:
        writer.shard.open("0000000001-a1", "0000000002-zz", writer.identity)
        writer.shard.append("0000000002-zz", [(8, False, make_block(0, 77, 300))])
        writer.shard.commit("0000000002-zz", make(aion.Tumbling(us(10))).snapshot() | {"next_seq": 9})
    findings = list(look(state).values())
    assert plan_repair("query", findings).batch == 2
    (state / "query/tolls/shard-00000/manifests/0000000002-a2.json").write_bytes(b"")
    assert plan_repair("query", list(look(state).values())).batch == 1


def test_a_shard_that_is_younger_than_the_batch_had_no_state_then(state: Path) -> None:
    shard = state / "query/tolls/shard-00001"
    for path in (*shard.glob("manifests/0000000002*"), *shard.glob("files/*-0000000002-*")):
        path.unlink()
    (first,) = shard.glob("manifests/*.json")
    first.rename(first.with_name("0000000001-b0.json"))
    newest_file(state, 0, 1).write_bytes(b"")
    assert plan_repair("query", list(look(state).values())).batch is None, "its token is not its name"


def test_repair_sets_aside_what_is_damaged_and_sets_the_checkpoint_back(state: Path, tmp_path: Path) -> None:
    path = newest_file(state, 0, 2)
    path.write_bytes(path.read_bytes()[:-1])
    checkpoint = tmp_path / "checkpoint"
    for log in ("offsets", "commits"):
        (checkpoint / log).mkdir(parents=True)
        for batch in range(3):
            (checkpoint / log / str(batch)).write_text("v1")
            (checkpoint / log / f".{batch}.crc").write_text("")
    (checkpoint / "metadata").write_text('{"id":"query"}')
    run = CliRunner().invoke(app, ["inspect", str(state), "--repair", "--checkpoint", str(checkpoint)])
    assert run.exit_code == 0, run.output
    said = " ".join(run.output.split())
    assert "the newest batch after which every shard is whole is 1; replay: 2" in said
    assert sorted(p.name for p in (checkpoint / "commits").iterdir()) == [".0.crc", ".1.crc", "0", "1"]
    assert sorted(p.name for p in (checkpoint / SET_ASIDE / "offsets").iterdir()) == [".2.crc", "2"]
    assert path.with_name(path.name + ".damaged").exists() and not path.exists()
    assert CliRunner().invoke(app, ["inspect", str(state)]).exit_code == 0
    with Writer(state, 0, tmp_path / "live") as writer:
        assert [seq for seq, _ in writer.read("0000000001-a1")] == [0, 3, 6, 1, 4, 7, 2, 5]


@pytest.mark.parametrize("others", [True, False], ids=["beside others", "alone"])
def test_a_damaged_operator_json_of_a_query_that_has_no_shard_yet(tmp_path: Path, others: bool) -> None:
    """It keeps the query from starting, so it is found and set aside like any other."""
    state, checkpoint = tmp_path / "state", write_checkpoint(tmp_path / "checkpoint", "new")
    if others:
        with Writer(state, 0, tmp_path / "live", query="old") as writer:
            writer.commit(None, 0, range(4))
    path = state / "new/tolls/operator.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    found = CliRunner().invoke(app, ["inspect", str(state)])
    assert found.exit_code == 1 and "damaged: new/tolls/operator.json" in " ".join(found.output.split())
    assert path.exists()
    given = ["--repair", "--checkpoint", str(checkpoint)]
    run = CliRunner().invoke(app, ["inspect", str(state), *given])
    assert run.exit_code == 0, run.output
    assert "no batch of it has ended yet" in " ".join(run.output.split())
    assert not path.exists() and batches_of(checkpoint) == ["0", "1", "2"]
    left = CliRunner().invoke(app, ["inspect", str(state)])
    assert left.exit_code == 0 if others else "no state of any query" in left.output


def test_nothing_is_changed_without_repair(state: Path) -> None:
    newest_file(state, 1, 2).write_bytes(b"")
    before = {p: p.read_bytes() for p in state.rglob("*") if p.is_file()}
    assert CliRunner().invoke(app, ["inspect", str(state)]).exit_code == 1
    assert {p: p.read_bytes() for p in state.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("name", ["shard-00000/manifests/0000000002-a2.json", "operator.json"])
@pytest.mark.parametrize("number", [2, 99])
def test_another_format_is_not_damage_to_be_set_aside(state: Path, name: str, number: int) -> None:
    path = state / "query/tolls" / name
    body = path.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[0].replace(b'"format":4', b'"format":%d' % number)
    path.write_bytes(body + b"\n%08x\n" % zlib.crc32(body))
    for switch in ([], ["--repair"]):
        found = CliRunner().invoke(app, ["inspect", str(state), *switch])
        said = " ".join(found.output.split())
        age = "older" if number == 2 else "newer"
        assert f"written in format {number}; this Aion reads the formats 3 and 4: use the {age} Aion that wrote" in said
        assert "damaged:" not in said and "new checkpoint" not in said
        assert found.exit_code == 2 and path.exists()
    other = newest_file(state, 1, 0)
    other.write_bytes(b"")
    found = CliRunner().invoke(app, ["inspect", str(state), "--repair"])
    said = " ".join(found.output.split())
    assert f"{other.name}: it has 0 bytes" in said and "new checkpoint" not in said
    assert found.exit_code == 1 and other.exists() and path.exists()


def test_a_repair_that_repairs_nothing_says_so(tmp_path: Path) -> None:
    with Writer(tmp_path / "state", 0, tmp_path / "live") as writer:
        writer.commit(None, 0, range(4))
    newest_file(tmp_path / "state", 0, 0).unlink()
    run = CliRunner().invoke(app, ["inspect", str(tmp_path / "state"), "--repair"])
    assert run.exit_code == 1 and "it was not repaired" in run.output, run.output


@pytest.mark.parametrize(
    "command", [["inspect"], ["inspect", "--lineages"], ["explain"], ["explain", "query", "--state"]]
)
@pytest.mark.parametrize(
    "uri", ["s3://me:hidden-secret@bucket/state", "s3://bucket/state?secret_key=hidden-secret&region=x"]
)
def test_a_secret_in_a_uri_is_refused_and_not_repeated(command: list[str], uri: str) -> None:
    run = CliRunner().invoke(app, [*command, uri])
    assert run.exit_code == 2 and "contains a secret" in run.output
    assert "hidden-secret" not in run.output


def test_all_lineages_whose_checkpoints_are_gone_can_be_forgotten_at_once(tmp_path: Path) -> None:
    state = tmp_path / "state"
    write_checkpoint(tmp_path / "here", "query-1")
    places = {("query-1", ""): "here", ("query-1", "lineage-0123456789ab"): "gone", ("query-2", ""): "gone too"}
    for (query, lineage), name in places.items():
        checkpoint = f"file:{tmp_path / name}"
        with Writer(state, 0, tmp_path / "live", query=query, lineage=lineage, checkpoint=checkpoint) as writer:
            writer.commit(None, 0, range(4))
    run = CliRunner().invoke(app, ["inspect", str(state), "--forget", "--gone"])
    assert run.exit_code == 0, run.output
    assert "deleted: query-1/lineage-0123456789ab" in run.output and "deleted: query-2/first" in run.output
    with closing(StateFolder(str(state))) as folder:
        assert [(lineage.query, lineage.name) for lineage in folder.lineages()] == [("query-1", "first")]
    run = CliRunner().invoke(app, ["inspect", str(state), "--forget", "--gone"])
    assert run.exit_code == 0 and "nothing was deleted" in run.output


def test_the_checkpoint_must_be_that_query_s(tmp_path: Path) -> None:
    (tmp_path / "metadata").write_text('{"id":"another"}')
    with pytest.raises(ConfigError, match="not the checkpoint of query"):
        set_back(tmp_path, "query", 1)


def write_checkpoint(folder: Path, query: str) -> Path:
    for log in ("offsets", "commits"):
        (folder / log).mkdir(parents=True)
        for batch in range(3):
            (folder / log / str(batch)).write_text("v1")
    (folder / "metadata").write_text(f'{{"id":"{query}"}}')
    return folder


def batches_of(checkpoint: Path) -> list[str]:
    return sorted(p.name for p in (checkpoint / "commits").iterdir())


def test_of_several_damaged_states_only_that_of_the_checkpoint_is_repaired(tmp_path: Path) -> None:
    """Two queries, and a copy of the second one's checkpoint: each is repaired on its own, in any order."""
    state = tmp_path / "state"
    places = {
        "first": ("query-1", ""),
        "second": ("query-2", ""),
        "copy": ("query-2", "lineage-0123456789ab"),
    }
    damaged = {}
    for name, (query, lineage) in places.items():
        write_checkpoint(tmp_path / name, query)
        location = f"file:{tmp_path / name}"
        with Writer(state, 0, tmp_path / "live", query=query, lineage=lineage, checkpoint=location) as writer:
            token = None
            for batch in range(3):
                token = writer.commit(token, batch, range(4 * batch, 4 * batch + 4))
        (damaged[name],) = writer.folder.glob("files/*-0000000002-*.sst")
        damaged[name].write_bytes(b"")
    left = dict(damaged)
    for name, as_uri in (("second", False), ("copy", True), ("first", False)):
        given = f"file://{tmp_path / name}/" if as_uri else str(tmp_path / name)
        run = CliRunner().invoke(app, ["inspect", str(state), "--repair", "--checkpoint", given])
        left.pop(name)
        assert run.exit_code == (1 if left else 0), run.output
        assert batches_of(tmp_path / name) == ["0", "1"]
        for other, path in left.items():
            assert path.exists() and batches_of(tmp_path / other) == ["0", "1", "2"], (name, other)
    assert CliRunner().invoke(app, ["inspect", str(state)]).exit_code == 0


def test_a_checkpoint_that_is_not_of_this_state_changes_nothing(state: Path, tmp_path: Path) -> None:
    path = newest_file(state, 0, 2)
    path.write_bytes(b"")
    write_checkpoint(tmp_path / "other", "another")
    for given, says in (
        (str(tmp_path / "other"), "is not the checkpoint of a query in this folder, query"),
        (str(tmp_path / "nowhere"), "nowhere is not a folder"),
        (str(tmp_path), "is not the checkpoint of a query; it has no file 'metadata'"),
        ("s3://bucket/cp", "--checkpoint: s3://bucket/cp is not on this machine"),
    ):
        run = CliRunner().invoke(app, ["inspect", str(state), "--repair", "--checkpoint", given])
        assert run.exit_code == 2 and says in run.output, run.output
        assert path.exists()


# -- what it shows --------------------------------------------------------------------------------------------


def test_inspect_shows_what_is_there(state: Path) -> None:
    run = CliRunner().invoke(app, ["inspect", str(state)])
    assert run.exit_code == 0, run.output
    for part in ("query query", "tolls", "0 to 2", "every version is whole", "watermark", "lateness"):
        assert part in run.output, run.output


@pytest.mark.parametrize("columns", [None, "60"])
def test_nothing_that_inspect_shows_is_cut_off(
    state: Path, columns: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pipe, and on a narrow terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
    run = CliRunner().invoke(app, ["inspect", str(state)], env={} if columns is None else {"COLUMNS": columns})
    assert run.exit_code == 0 and "…" not in run.output, run.output
    assert ("tolls    │     0 │        3 │  0 to 2" in run.output) == (columns is None), run.output


@pytest.mark.parametrize("switch", [[], ["--lineages"]])
def test_a_folder_that_is_no_state_folder(tmp_path: Path, switch: list[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "cp", "query")
    for given, code, says in (
        (str(tmp_path / "nowhere"), 2, "nowhere: there is no such folder; give the folder of spark.aion.state.dir"),
        (str(tmp_path / "file"), 2, "file: this is not a folder"),
        (str(tmp_path / "cp"), 2, "cp is the checkpoint of a query; give the folder of its state"),
        ("fsspec+nothing://x", 2, "state.dir fsspec+nothing://x: "),
        ("", 2, "'' is not a state folder; give a path or a URI"),
        (str(tmp_path / "empty"), 2, "empty: no state of any query; is it the folder of spark.aion.state.dir?"),
    ):
        run = CliRunner().invoke(app, ["inspect", given, *switch])
        assert run.exit_code == code and says in " ".join(run.output.split()), run.output


@pytest.mark.parametrize("switch", [[], ["--lineages"], ["--forget", "first"], ["--key", '{"k": 1}']])
def test_checkpoint_without_repair_is_refused(state: Path, switch: list[str]) -> None:
    run = CliRunner().invoke(app, ["inspect", str(state), "--checkpoint", str(state), *switch])
    assert run.exit_code == 2 and "--checkpoint requires --repair" in run.output


@pytest.mark.parametrize("how", ["missing", "a folder"])
def test_a_key_cannot_be_looked_up_without_operator_json(state: Path, how: str) -> None:
    path = state / "query" / "tolls" / "operator.json"
    path.unlink()
    if how == "a folder":
        path.mkdir()
    run = CliRunner().invoke(app, ["inspect", str(state), "--key", '{"k": 1}'])
    assert run.exit_code == 2 and "query/tolls/operator.json" in run.output, run.output


# -- keyed values -----------------------------------------------------------------------------------------


def test_keyed_values_are_listed_and_their_runs_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    with Writer(state, 0, tmp_path / "live") as writer:
        first = writer.put(None, 0, (b"a", b"1"), (b"b", b"2"))
        second = writer.put(first, 1, (b"a", None))
    assert inspect(str(state), repair=False, checkpoint=None, contents=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "keyed values, as of the newest whole version of each shard" in said and "every version is whole" in said
    assert re.search(r"tolls │ 2 │ 3 │", said), said
    (finding,) = look(state).values()
    assert finding.newest is not None and finding.newest.token == second and not finding.orphans
    assert finding.newest.manifest is not None
    assert [run.blocks for run in runs_of(finding.newest.manifest)] == [2, 1]
    run = next((state / "query").rglob(f"*{second}.sst"))
    data = bytearray(run.read_bytes())
    data[len(data) // 3] ^= 1
    run.write_bytes(data)
    (finding,) = look(state).values()
    assert finding.newest is not None and finding.newest.token == first
    assert any(run.name in line and "checksum" in line for line in finding.damage)
    assert not inspect(str(state), repair=False, checkpoint=None, contents=True)


def test_a_place_that_cannot_be_reached_is_named() -> None:
    uri = "gs://anonymous@bucket/state?scheme=http&endpoint_override=127.0.0.1:1&retry_limit_seconds=1"
    run = CliRunner().invoke(app, ["inspect", uri])
    assert run.exit_code == 2
    assert re.sub(r"\s", "", run.output).startswith(f"{uri}:"), run.output
