"""File systems that are not local: what they cost, and what happens when they refuse."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest

from aion.errors import CorruptState, DiskError, StorageError
from state_backends.files import remote as remote_module
from state_backends.files import requests as requests_module
from state_backends.files.names import ToDelete
from state_backends.files.remote import Remote
from state_backends.files.remote_storage import RemoteStorage
from tests.files.rig import (
    Place,
    files,
    here,
    manifests,
    published,
    write,
)
from tests.io_thread.rig import PATIENCE


def test_a_task_that_waits_for_a_connection_that_is_closed_gets_an_exception(make: Callable[..., Place]) -> None:
    place, go_on = make(), threading.Event()
    storage = place.storage()
    file = write(storage, "0001-t.sst", b"x")
    published(storage, file.name)
    other = place.storage()
    remote = place.remotes[-1]
    busy = [remote.pool.submit(go_on.wait, PATIENCE) for _ in range(remote_module.THREADS)]
    with ThreadPoolExecutor(2) as threads:
        fetching = threads.submit(other.fetch, [here(other, file)])
        while not remote.pool._work_queue.qsize():
            time.sleep(0)
        closing = threads.submit(remote.close)
        with pytest.raises(CancelledError):
            fetching.result(PATIENCE)
        go_on.set()
        closing.result(PATIENCE)
    assert all(future.result() for future in busy)


def test_a_file_is_fetched_once_and_checked_when_it_is(make: Callable[..., Place]) -> None:
    place = make()
    storage, other = place.storage(), place.storage()
    file = write(storage, "0001-t.sst", os.urandom(5000))
    published(storage, file.name)
    other.fetch([here(other, file)])
    opened: list[str] = []
    place.before = lambda call, path: opened.append(path) if call.startswith("open_input") else None
    other.fetch([here(other, file)])
    assert opened == [], "opening must not read what is there"


def test_copies_that_a_version_does_not_need_make_room(make: Callable[..., Place]) -> None:
    storage = make().storage()
    one, two = (write(storage, f"000{i}-t.sst", b"x") for i in range(2))
    published(storage, one.name, two.name)
    storage.release([one.name])
    assert [p.name for p in storage.files.iterdir()] == [two.name]
    assert sorted(files(storage)) == [one.name, two.name], "older versions still need it"
    storage.fetch([one])
    assert [p.name for p in storage.files.iterdir()] == [one.name]


@pytest.mark.parametrize("what", ["flipped", "truncated", "longer", "emptied", "missing", "another"])
def test_a_damaged_file_is_named_and_no_copy_of_it_stays(make: Callable[..., Place], what: str) -> None:
    place = make()
    storage, other = place.storage(), place.storage()
    good, bad = (write(storage, f"000{i}-t.sst", os.urandom(5000)) for i in range(2))
    published(storage, good.name, bad.name)
    path = place.folder / "base/query/shard/files" / bad.name
    data = path.read_bytes()
    path.unlink()
    if what != "missing":
        flipped = data[:999] + bytes([data[999] ^ 4]) + data[1000:]
        other_file = Path(good.path).read_bytes()
        damaged = {
            "flipped": flipped,
            "truncated": data[:-1],
            "longer": data + b"x",
            "emptied": b"",
            "another": other_file,
        }
        path.write_bytes(damaged[what])
    with pytest.raises(CorruptState, match=rf"file {bad.name}.*test://place/of/query/shard/files/{bad.name}"):
        other.fetch([here(other, good), here(other, bad)])
    assert [p.name for p in other.files.iterdir()] == [good.name]


def test_a_download_for_which_this_host_has_no_room_names_this_host(make: Callable[..., Place]) -> None:
    place = make()
    storage, other = place.storage(), place.storage()
    file = write(storage, "0001-t.sst", bytes(2 << 20))
    published(storage, file.name)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        with pytest.raises(
            DiskError, match=f"keeping a copy of remote state in {other.files} failed: .*File too large"
        ):
            other.fetch([here(other, file)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(other.files.iterdir()), "nothing takes up room"
    other.fetch([here(other, file)])


@pytest.mark.parametrize("call", ["open_output_stream", "move", "create_dir"])
def test_what_could_not_be_uploaded_is_not_there(make: Callable[..., Place], call: str) -> None:
    place = make()
    storage = place.storage()
    file = write(storage, "0001-t.sst", b"x" * 100)

    def refuse(name: str, path: str) -> None:
        if name == call:
            raise OSError("no more space in the cloud\nwith details")

    place.before = refuse
    for publish in (lambda: published(storage, file.name), lambda: storage.save("t", b"manifest")):
        with pytest.raises(StorageError, match=r"^test://place/of/query/shard/.*: no more space in the cloud$"):
            publish()
    place.before = lambda *_: None
    left = [*files(place.storage()), *manifests(place.storage())]
    assert all(name.endswith(".part") for name in left), "which retention finds when the shard is opened"
    assert Path(file.path).exists(), "the next attempt may have more luck"
    published(storage, file.name)
    assert file.name in files(place.storage())


def test_a_large_file_goes_in_parts(make: Callable[..., Place], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "WHOLE_BYTES", 1 << 10)
    monkeypatch.setattr(remote_module, "_UNCONFIRMED_BYTES", 3 << 10)
    place = make()
    storage, other = place.storage(), place.storage()
    file = write(storage, "0001-t.sst", os.urandom(10_001))
    published(storage, file.name)
    other.fetch([here(other, file)])
    assert Path(here(other, file).path).read_bytes() == Path(file.path).read_bytes()


def test_a_version_costs_a_request_for_each_file_and_one_for_its_manifest(make: Callable[..., Place]) -> None:
    """Nothing is listed or asked for on the way; and what goes does so behind it."""
    place = make("in memory")
    storage = place.storage()
    calls: list[str] = []
    place.before = lambda call, path: calls.append(call)
    for i in range(5):
        published(storage, write(storage, f"{i}-t.sst", b"x").name)
        storage.save(f"token-{i}", b"m")
        storage.delete(ToDelete([], [f"{i - 1}-t.sst"]))
    storage.settle()
    assert calls.count("open_output_stream") == 10
    assert "get_file_info" not in calls


def test_what_cannot_be_deleted_is_no_error(make: Callable[..., Place], caplog: pytest.LogCaptureFixture) -> None:
    place = make()
    storage = place.storage()
    published(storage, write(storage, "0001-t.sst", b"x").name)

    def refuse(call: str, path: str) -> None:
        if call == "delete_file":
            raise PermissionError("not yours")

    place.before = refuse
    storage.delete(ToDelete([], ["0001-t.sst"]))
    storage.settle()
    assert "could not be deleted: test://place/of?state: not yours" in caplog.text
    assert files(place.storage()) == ["0001-t.sst"], "retention will find it again"


def test_what_cannot_be_deleted_keeps_no_other_file(make: Callable[..., Place]) -> None:
    """It is tried again with the next commit, and so are those that were to be deleted with it."""
    place = make()
    storage = place.storage()
    kept, *others = (f"000{n}-t.sst" for n in range(4))
    published(storage, *(write(storage, name, b"x").name for name in (kept, *others)))

    def refuse(call: str, path: str) -> None:
        if call == "delete_file" and path.endswith(kept):
            raise PermissionError("not yours")

    place.before = refuse
    storage.delete(ToDelete(["a.json"], [kept, *others]))
    storage.settle()
    assert files(place.storage()) == [kept]
    assert storage.delete(ToDelete([], [])) == ToDelete(["a.json"], [kept, *others])


def test_a_file_system_that_cannot_be_reached_is_named() -> None:
    remote = Remote("nowhere://to/be/found")
    storage = RemoteStorage(remote, "query/shard", Path("unused"))
    for _ in range(2):
        with pytest.raises(StorageError, match=r"^state\.dir nowhere://to/be/found: "):
            manifests(storage)
    remote.close()
