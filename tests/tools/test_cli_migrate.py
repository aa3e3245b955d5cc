"""What ``aion migrate`` looks at before it starts a JVM."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from aion.cli import app


@pytest.fixture(autouse=True)
def no_jvm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Java that cannot run: what needs one fails with another error."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no java"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "metadata").write_text('{"id":"query"}')
    return folder


def test_a_checkpoint_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for given, said in (("nowhere", "there is no such folder"), ("empty", "it has no file 'metadata'")):
        run = CliRunner().invoke(app, ["migrate", str(tmp_path / given), str(tmp_path / "new")])
        assert run.exit_code == 2 and f"{given}: not the checkpoint of a streaming query; {said}" in run.output


@pytest.mark.parametrize("what", ["a file", "a folder"])
def test_a_new_checkpoint_that_is_there_already_is_said_at_once(checkpoint: Path, tmp_path: Path, what: str) -> None:
    new = tmp_path / "new"
    if what == "a folder":
        (new / "offsets").mkdir(parents=True)
    else:
        new.touch()
    run = CliRunner().invoke(app, ["migrate", str(checkpoint), str(new)])
    assert run.exit_code == 2 and "new: there is something already" in run.output


def test_a_secret_is_refused_and_not_repeated(checkpoint: Path) -> None:
    for given in ((str(checkpoint), "s3://me:hidden@bucket/cp"), ("s3://me:hidden@bucket/cp", "new")):
        run = CliRunner().invoke(app, ["migrate", *given])
        assert run.exit_code == 2 and "contains a secret" in run.output and "hidden" not in run.output


def test_a_name_that_no_operator_can_have_is_said_at_once(checkpoint: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["migrate", str(checkpoint), str(tmp_path / "new"), "--name", "0=a/b"])
    assert run.exit_code == 2 and "'a/b' becomes a folder name" in run.output


def test_then_java_is_needed(checkpoint: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["migrate", str(checkpoint), str(tmp_path / "new")])
    assert run.exit_code == 2 and "JAVA_HOME" in run.output
