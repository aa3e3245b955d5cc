"""`aion inspect` names what is damaged in a state folder with its version, and shows what is there."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from typer.testing import CliRunner

from aion.cli import app
from aion.errors import StateError
from aion.tools.inspect.state import inspect
from state_backends.versions.manifest import runs_of
from tests.state_folders import Writer, look, two_shards, write_checkpoint

POSITIONS = settings.default.max_examples  # of each file, in the corruption tests


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return two_shards(tmp_path)


def damages(data: bytes, other: bytes, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Ways in which a file's bytes may come to be others."""
    yield "emptied", b""
    yield "swapped", other
    for position in sorted({0, len(data) - 1, *rng.sample(range(len(data)), min(POSITIONS, len(data)))}):
        flipped = bytearray(data)
        flipped[position] ^= 1 << rng.randrange(8)
        yield f"flipped at {position}", bytes(flipped)
        yield f"truncated to {position}", data[:position]


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow(but_first=True)
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


@pytest.mark.slow(but_first=True)
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


@pytest.mark.slow
def test_a_place_that_cannot_be_reached_is_named() -> None:
    uri = "gs://anonymous@bucket/state?scheme=http&endpoint_override=127.0.0.1:1&retry_limit_seconds=1"
    run = CliRunner().invoke(app, ["inspect", uri])
    assert run.exit_code == 2
    assert re.sub(r"\s", "", run.output).startswith(f"{uri}:"), run.output
