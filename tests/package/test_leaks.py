"""The guard of all tests: it notices what outlives a test, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import leaks
from tests.leaks import nothing_is_left_behind


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE", 0.0)


def a_thread(folder: Path) -> Callable[[], object]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    thread.start()
    return lambda: (end.set(), thread.join())


def a_process(folder: Path) -> Callable[[], object]:
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input() # forgotten"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # before, it need not even have its command line
    return lambda: process.communicate(b"end\n")


def an_open_file(folder: Path) -> Callable[[], object]:
    file = (folder / "elsewhere" / "forgotten").open("w")
    return file.close


def a_deleted_file_that_is_open(folder: Path) -> Callable[[], object]:
    end = an_open_file(folder)
    (folder / "elsewhere" / "forgotten").unlink()
    return end


def a_folder(folder: Path) -> Callable[[], object]:
    (folder / "temporary" / "forgotten").mkdir()
    return (folder / "temporary" / "forgotten").rmdir


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("leak", [a_thread, a_process, an_open_file, a_deleted_file_that_is_open, a_folder])
def test_what_is_left_behind_is_named(leak: Callable[[Path], Callable[[], object]], tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with nothing_is_left_behind([tmp_path / "temporary"], [tmp_path]):
        leak(tmp_path)()
    with pytest.raises(AssertionError, match=r"outlives the test: .*forgotten"):  # noqa: SIM117
        with nothing_is_left_behind([tmp_path / "temporary"], [tmp_path]):
            end = leak(tmp_path)
    end()


def test_what_is_ending_has_the_time_to_end(tmp_path: Path) -> None:
    end = threading.Event()
    with nothing_is_left_behind([], [tmp_path]):
        threading.Thread(target=end.wait, name="ending").start()
        threading.Timer(0.05, end.set).start()


def test_what_was_there_before_may_stay(tmp_path: Path) -> None:
    file = (tmp_path / "open").open("w")
    with nothing_is_left_behind([tmp_path], [tmp_path]):
        pass
    file.close()


def test_processes_of_processes_are_found_by_their_environment(tmp_path: Path) -> None:
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    mark = f"AION_LEAKS={tmp_path.name}"
    environment = dict([mark.split("=")])
    first = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, env=environment)
    first.wait()
    assert first.stdin is not None
    assert len(leaks.descendants(mark)) == 1, "the one that it started, and that nobody waits for"
    first.stdin.close()  # which it inherited
    assert leaks.wait_for_the_end_of(mark) == []
