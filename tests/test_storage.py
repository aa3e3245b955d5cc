"""Where versions lie: every kind of storage keeps whole things under their names, or says by name what is wrong."""

from __future__ import annotations

import os
import resource
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pyarrow.fs as pafs
import pytest

from aion.errors import CorruptState, DiskError, StorageError
from state_backends.backends import STORES, StoreConfig
from state_backends.files import remote as remote_module
from state_backends.files.location import LocalLocation, RemoteLocation, locate, scratch
from state_backends.files.names import Doomed, SstFile
from state_backends.files.remote import Remote
from state_backends.files.remote_storage import RemoteStorage
from state_backends.files.storage import LocalStorage
from state_backends.server import requests
from state_backends.server.host import Host
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard
from tests.stores.rig import make_block
from tests.test_io_thread import PATIENCE

URI = "test://place/of?state"


class Hooked:
    """A file system of pyarrow's that asks ``before(call, path)`` first, which may raise, or wait."""

    def __init__(self, fs: Any, before: Callable[[str, str], None]) -> None:
        self._fs, self._before = fs, before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        if not callable(found):
            return found

        def call(first: Any, *rest: Any, **options: Any) -> Any:
            self._before(name, str(getattr(first, "base_dir", first)))
            return found(first, *rest, **options)

        return call


class Place:
    """A file system, and the hosts that have storages of one shard there."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.hosts = 0
        self.remotes: list[Remote] = []
        self.before: Callable[[str, str], None] = lambda call, path: None
        fs = (
            pafs._MockFileSystem()
            if kind == "in memory"
            else pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())
        )
        self.fs = Hooked(fs, lambda call, path: self.before(call, path))

    def storage(self, shard: str = "shard") -> Any:
        """That of a new host, which has copies of nothing."""
        self.hosts += 1
        if self.kind == "local":
            return LocalStorage(self.folder / shard)
        self.remotes.append(Remote(URI, (self.fs, "base")))
        return RemoteStorage(self.remotes[-1], f"query/{shard}", self.folder / f"copies-{self.hosts}")

    def close(self) -> None:
        for remote in self.remotes:
            remote.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    places: list[Place] = []

    def make(kind: str = "renamed") -> Place:
        places.append(Place(kind, tmp_path))
        return places[-1]

    yield make
    for place in places:
        place.close()


@pytest.fixture(params=["local", "renamed", "in memory"])
def place(request: pytest.FixtureRequest, make: Callable[[str], Place]) -> Place:
    return make(request.param)


def write(storage: Any, name: str, data: bytes) -> SstFile:
    """A file as PBucket leaves it: whole, under its name."""
    storage.files.mkdir(parents=True, exist_ok=True)
    path = storage.files / name
    path.write_bytes(data)
    return SstFile(int(name.partition("-")[0]), str(path), len(data), zlib.crc32(data), 0, 1)


def here(storage: Any, file: SstFile) -> SstFile:
    """The file as a manifest names it to another host."""
    return file._replace(path=str(storage.files / file.name))


def published(storage: Any, *names: str) -> None:
    storage.publish(names, names)


def manifests(storage: Any) -> list[str]:
    return sorted(storage.listing()[0])


def files(storage: Any) -> list[str]:
    return sorted(storage.listing()[1])


# -- what they have in common -----------------------------------------------------------------------------------


def test_what_is_kept_is_for_its_user_only(place: Place) -> None:
    """Whatever the umask of the process."""
    storage, other = place.storage(), place.storage("other")
    file = write(storage, "0001-t.sst", b"x" * 100)
    Path(file.path).chmod(0o600)  # another name of a file has its mode
    published(storage, file.name)
    before = os.umask(0o022)
    try:
        other.take(storage, [file.name])
        other.save("0000000001-t", b"{}")
        if place.kind != "local":
            other.fetch([here(other, file)])
    finally:
        os.umask(before)
    folder = place.folder / "other" if place.kind == "local" else other.files
    made = [folder, *folder.rglob("*")]
    assert len(made) > 1
    assert not [path for path in made if path.stat().st_mode & 0o077]


def test_manifests_are_what_was_saved(place: Place) -> None:
    storage = place.storage()
    assert manifests(storage) == []
    for token in ("0001-a", "0002.b"):
        storage.save(token, token.encode() * 1000)
    for other in (storage, place.storage()):
        assert sorted(manifests(other)) == ["0001-a.json", "0002.b.json"]
        assert other.load("0002.b") == b"0002.b" * 1000
        with pytest.raises(FileNotFoundError):
            other.load("0003")
    storage.delete(Doomed(["0001-a.json"], []))
    storage.delete(Doomed(["0001-a.json"], []))
    if isinstance(storage, RemoteStorage):
        storage.settle()
    assert manifests(place.storage()) == manifests(storage) == ["0002.b.json"]


def test_what_another_host_wrote_first_stays(place: Place) -> None:
    """Hosts write ``operator.json``, and the manifests that a copy takes, at the same time."""
    one, other = place.storage(), place.storage()
    assert other.claim(b"the other's", first=True) == b"the other's"
    assert one.claim(b"one's", first=True) == b"the other's" == one.owner()
    other.save("0000000001-taken", b"the other's", first=True)
    one.save("0000000001-taken", b"the other's", first=True)
    with pytest.raises(CorruptState, match=r"0000000001-taken\.json is there already, and is not what"):
        one.save("0000000001-taken", b"one's", first=True)
    assert one.load("0000000001-taken") == b"the other's"
    assert one.claim(b"changed", first=False) == b"changed" == other.owner()
    assert manifests(one) == ["0000000001-taken.json"], "and nothing is left beside it"


def test_two_hosts_that_write_one_file_at_a_time_do_not_share_its_unfinished_name(place: Place) -> None:
    storages = [place.storage() for _ in range(2)]
    started = threading.Barrier(2)

    def claims(storage: Any) -> set[bytes]:
        found = set()
        for number in range(50):
            started.wait(PATIENCE)
            found.add(storage.claim(b"%d" % number * 1000, first=False))
        return found

    with ThreadPoolExecutor(2) as pool:
        for claimed in pool.map(claims, storages):
            assert len(claimed) == 50
    assert storages[0].owner() == b"49" * 1000


def test_files_are_what_was_published(place: Place) -> None:
    storage = place.storage()
    several = [write(storage, f"000{i}-t.sst", os.urandom(1000 * i + 1)) for i in range(3)]
    published(storage, *[f.name for f in several])
    assert sorted(files(storage)) == [f.name for f in several]
    other = place.storage()
    copies = [here(other, f) for f in several[1:]]
    other.fetch(copies)
    assert [Path(c.path).read_bytes() for c in copies] == [Path(f.path).read_bytes() for f in several[1:]]
    for name in (several[0].name, several[0].name, "0009-none.sst"):
        other.delete(Doomed([], [name]))
    if isinstance(other, RemoteStorage):
        other.settle()
    assert sorted(files(place.storage())) == sorted(files(other)) == [f.name for f in several[1:]]


def test_closing_lets_go_of_copies_only(place: Place) -> None:
    storage = place.storage()
    published(storage, write(storage, "0001-t.sst", b"x").name)
    storage.close()
    assert storage.files.exists() == (place.kind == "local")
    assert files(place.storage()) == ["0001-t.sst"]


def test_shards_know_nothing_of_one_another(place: Place) -> None:
    one, two = place.storage("one"), place.storage("two")
    one.save("t", b"1")
    published(one, write(one, "0001-t.sst", b"x").name)
    assert (manifests(two), files(two)) == ([], [])


# -- file systems that are not local ----------------------------------------------------------------------------


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
    monkeypatch.setattr(remote_module, "_CHUNK_BYTES", 1 << 10)
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
        storage.delete(Doomed([], [f"{i - 1}-t.sst"]))
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
    storage.delete(Doomed([], ["0001-t.sst"]))
    storage.settle()
    assert "could not be deleted: test://place/of?state: not yours" in caplog.text
    assert files(place.storage()) == ["0001-t.sst"], "retention will find it again"


def test_a_file_system_that_cannot_be_reached_is_named() -> None:
    remote = Remote("nowhere://to/be/found")
    storage = RemoteStorage(remote, "query/shard", Path("unused"))
    for _ in range(2):
        with pytest.raises(StorageError, match=r"^state\.dir nowhere://to/be/found: "):
            manifests(storage)
    remote.close()


# -- while it takes its time ------------------------------------------------------------------------------------

IDENTITY = Identity("query", "tolls", 0, 2, {})
FIRST = "0000000000-first"


class SlowUploads:
    """Uploads of one shard that wait until they may go on."""

    def __init__(self, place: Place, shard: str) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.shard = shard
        place.before = self.before

    def before(self, call: str, path: str) -> None:
        if call == "open_output_stream" and f"/{self.shard}/" in path:
            self.begun.set()
            assert self.may_end.wait(PATIENCE)


def test_nobody_waits_for_the_uploads_of_another_shard(make: Callable[..., Place], tmp_path: Path) -> None:
    """Nor does a reader of the same one, or whatever the I/O thread has to do for them."""
    place = make()
    io, budget = IoThread(), MemoryBudget(1 << 20)
    shards = [
        Shard(
            IDENTITY,
            place.storage(f"shard-{i}"),
            tmp_path / f"live-{i}",
            lambda p: STORES["tiered"](p, io, budget, bucket_limit_bytes=1 << 20),
            retain=2,
        )
        for i in range(2)
    ]
    blocks = [make_block(0, n, 1000) for n in range(2)]
    for i, shard in enumerate(shards):
        shard.open(None, FIRST, IDENTITY)
        shard.append(FIRST, [(0, True, blocks[i])])
    slow = SlowUploads(place, "shard-0")
    with ThreadPoolExecutor(1) as pool:
        committed = pool.submit(shards[0].commit, FIRST, {"next_seq": 1})
        assert slow.begun.wait(PATIENCE)
        shards[1].commit(FIRST, {"next_seq": 1})
        assert sorted(p.name for p in (tmp_path / "base/query").glob("*/manifests/*")) == ["0000000000-first.json"]
        store = shards[0].store
        assert store is not None and store.size_on_disk([0]), "written, and let go"
        assert [bytes(b.block.stored) for b in store.read([0])] == [bytes(blocks[0].stored)]
        store.prestage([0])
        assert [bytes(b.block.stored) for b in store.read([0])] == [bytes(blocks[0].stored)]
        assert store.stats().staging.misses == 1, "the second time it was prestaged"
        assert not committed.done()
        slow.may_end.set()
        committed.result(PATIENCE)
    assert {shard.token for shard in shards} == {FIRST}
    for shard in shards:
        shard.close()
    io.close()


def test_a_host_stages_for_others_while_a_shard_commits(
    make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make()
    remote = Remote(URI, (place.fs, "base"))
    monkeypatch.setattr("state_backends.server.host.locate", lambda _: RemoteLocation(remote, tmp_path / "scratch"))
    clock = [0.0]
    host = Host(clock=lambda: clock[0])
    config = StoreConfig(backend="tiered", budget_bytes=32 << 20, bucket_limit_bytes=1 << 20)

    def open_(shard: int, token: str | None, attempt: str) -> Shard:
        request = {
            "identity": asdict(Identity("q", "o", shard, 2, {})),
            "store": config.to_json(),
            "state_dir": URI,
            "run": "r",
            "operator_uid": "u",
            "others": False,
            "token": token,
            "makes": attempt,
            "attempt": attempt,
        }
        opening = requests.OpenRequest.model_validate_json(orjson.dumps(request))
        assert host.open(opening)["rebuilt"] == (token is None)
        return host.attempts.find(attempt)[1]

    try:
        for i in range(2):
            shard = open_(i, None, f"0000000000-first-{i}")
            shard.append(f"0000000000-first-{i}", [(0, True, make_block(0, i, 1000))])
            shard.commit(f"0000000000-first-{i}", {"next_seq": 1, "counters": {}})
        clock[0] = 100.0  # so that the next batch is expected in 100 s
        open_(0, "0000000000-first-0", "0000000001-second-0")
        open_(1, "0000000000-first-1", "0000000001-second-1")
        for i in range(2):
            _, shard, lock = host.attempts.find(f"0000000001-second-{i}")
            with lock:
                shard.commit(f"0000000001-second-{i}", {"next_seq": 1, "counters": {}})
            host.plan_prestage(("q", "o", i), f"0000000001-second-{i}", [0], [])
        stores = [host.attempts.find(f"0000000001-second-{i}")[1].store for i in range(2)]
        clock[0] = 1000.0
        with host.attempts.find("0000000001-second-0")[2]:  # as if it were at its commit
            host.tick_prestages()
            assert stores[1] is not None and [*stores[1].read([0])]
            assert stores[1].stats().staging.misses == 0
        host.tick_prestages()
        assert stores[0] is not None and [*stores[0].read([0])]
        assert stores[0].stats().staging.misses == 0, "what waited for the lock is not forgotten"
    finally:
        host.close()
    assert not (tmp_path / "scratch").exists()


# -- which one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{}", "file://{}", "file:{}"])
def test_a_path_is_local_however_it_is_written(tmp_path: Path, text: str) -> None:
    location = locate(text.format(tmp_path))
    assert isinstance(location, LocalLocation)
    assert location.live == tmp_path / ".live"
    storage = location.storage(["query", "tolls", "shard-00000"], tmp_path / "unused", "lineage")
    assert storage.files == tmp_path / "query" / "tolls" / "shard-00000" / "files"


def test_copies_lie_on_sparks_local_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/disk1/blockmgr-123,/mnt/disk2/blockmgr-456")
    location = locate("s3://bucket/state")
    assert isinstance(location, RemoteLocation)
    folder = tmp_path / "disk1" / f"aion-{os.getuid()}"
    assert location.live == folder / ".live"
    assert folder.stat().st_mode & 0o777 == 0o700
    location.close()
    assert not folder.exists()


def test_copies_lie_in_no_folder_that_others_can_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    folder = tmp_path / f"aion-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(StorageError, match=rf"{folder} must be a folder, not a link, that only this user can enter"):
        scratch()
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(StorageError, match=r"not a link"):
        scratch()
    folder.unlink()
    folder.write_text("in the way")
    with pytest.raises(StorageError, match="cannot make a folder for copies of remote files"):
        locate("s3://bucket/state")
