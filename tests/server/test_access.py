"""Who reaches a state server, and what it gives away."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil
import pytest

from aion import errors
from state_backends.server.client import StateClient, running_servers, runtime_dir
from state_backends.server.server_folder import SOCKET
from tests.server.conftest import Victim, act, altered, listening, opening, server_of


@pytest.mark.slow
def test_only_its_user_can_reach_it(victim: Victim) -> None:
    folder = runtime_dir(victim.application)
    for place in (folder, folder.parent):
        assert place.lstat().st_mode & 0o777 == 0o700
        assert place.lstat().st_uid == os.getuid()
    assert (folder / SOCKET).lstat().st_mode & 0o777 == 0o600
    assert all(path.lstat().st_mode & 0o077 == 0 for path in (victim.state / ".live").rglob("*"))


def test_it_listens_on_no_port(victim: Victim) -> None:
    pid = server_of(victim.application).pid
    assert listening(pid) == []
    sockets = {c.laddr for c in psutil.Process(pid).net_connections("unix") if c.laddr}
    assert sockets == {str(runtime_dir(victim.application) / SOCKET)}


def test_it_knows_no_secret(victim: Victim) -> None:
    server = psutil.Process(server_of(victim.application).pid)
    assert not any("swordfish" in argument for argument in server.cmdline())
    assert not any("swordfish" in value for value in server.environ().values())
    assert server.environ()["AWS_PROFILE"] == "tests"  # what reaching the storage may need


@pytest.mark.parametrize("what", ["open to others", "a link", "a file"])
def test_a_place_that_is_not_the_users_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    place = runtime_dir("app").parent
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    if what == "open to others":
        place.mkdir()
        place.chmod(0o770)
    elif what == "a link":
        place.symlink_to(private)
    else:
        place.touch()
    with pytest.raises((errors.ServerError, FileExistsError), match=r"that only this user can enter|File exists"):
        StateClient.connect("app", watch_pid=os.getpid())
    assert list(private.iterdir()) == []


IMPOSTOR = """
import os, socket, sys

place, user = sys.argv[1], int(sys.argv[2])
with socket.socket(socket.AF_UNIX) as server:
    server.bind(place)
    os.chmod(place, 0o777)
    os.setuid(user)
    server.listen()
    print("listens", flush=True)
    heard = 0
    while heard == 0:
        connection, _ = server.accept()
        with connection:
            heard = len(connection.recv(1 << 16))
            print(heard, flush=True)
"""


@contextlib.contextmanager
def impostor(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another user's process that listens where a server should be, and says how many bytes each client sends."""
    if os.getuid() != 0:
        pytest.skip("only root can run as somebody else")
    command = [sys.executable, "-c", IMPOSTOR, str(folder / SOCKET), "12345"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        try:
            yield process
        finally:
            process.kill()


LOOKS = {
    "connects": lambda: StateClient.connect("app", watch_pid=os.getpid()),
    "finds": lambda: StateClient.find("app"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_folder_that_another_user_made_before_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = runtime_dir("app")
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)
    with impostor(folder) as process:
        for place in (folder, folder.parent):
            os.chown(place, 12345, 12345)
        with pytest.raises(errors.ServerError, match="that only this user can enter"):
            LOOKS[look]()
        assert running_servers() == []
        process.kill()
        assert process.communicate() == ("", None), "nobody connected"


@pytest.mark.parametrize("look", LOOKS)
def test_nothing_is_sent_to_another_users_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str) -> None:
    """Whoever it was that let it into the user's own folder."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = runtime_dir("app")
    folder.parent.mkdir(mode=0o700)
    folder.mkdir(mode=0o700)
    with impostor(folder) as process:
        with pytest.raises(errors.ServerError, match=r"a process of another user \(12345\) listens on"):
            LOOKS[look]()
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"


def test_the_state_of_another_user_is_not_touched(tmp_path: Path, victim: Victim) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    folder = tmp_path / "query" / "windowed"
    folder.mkdir(parents=True)
    os.chown(folder, 12345, 12345)
    with pytest.raises(errors.ServerError, match=r"windowed belongs to another user \(12345\)"):
        act(
            victim,
            "open",
            orjson.dumps(altered(altered(opening(victim), "state_dir", str(tmp_path)), "identity.shard", 2)),
        )
    assert list(folder.iterdir()) == []


def test_processes_of_another_user_are_not_waited_for(victim: Victim) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can run as somebody else")
    other = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, user=12345, cwd="/")
    assert other.stdin is not None
    with other.stdin, pytest.raises(errors.RequestError, match="belongs to another user"):
        act(victim, "ping", b'{"executor_pid":%d}' % other.pid)
    other.wait()
