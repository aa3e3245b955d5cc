"""`aion inspect --repair` and `--forget`: what is damaged or not needed is set aside, and nothing else is touched."""

from __future__ import annotations

import zlib
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

import aion
from aion.cli import app
from aion.errors import ConfigError
from aion.tools.inspect.state import SET_ASIDE, set_back
from state_backends.files.handed import HandedFile, name_of
from state_backends.files.names import HANDED_FOLDER
from state_backends.versions.audit import StateFolder, plan_repair
from state_backends.versions.lineage import digest_of
from tests.durations import us
from tests.operators import make
from tests.state_folders import SLICES, Writer, batches_of, look, newest_file, two_shards, write_checkpoint
from tests.stores.rig import make_block


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return two_shards(tmp_path)


# -- repair ---------------------------------------------------------------------------------------------------


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


@pytest.mark.slow(but_first=True)
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
        assert f"written in format {number}; this Aion reads format 4: use the {age} Aion that wrote" in said
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


def test_the_checkpoint_must_be_that_query_s(tmp_path: Path) -> None:
    (tmp_path / "metadata").write_text('{"id":"another"}')
    with pytest.raises(ConfigError, match="not the checkpoint of query"):
        set_back(tmp_path, "query", 1)


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
