"""Where versions lie: every kind of storage keeps whole things under their names."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aion.errors import CorruptState
from state_backends.files.names import ToDelete
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


@pytest.mark.slow(but_first=True)
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
    storage.delete(ToDelete(["0001-a.json"], []))
    storage.delete(ToDelete(["0001-a.json"], []))
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


@pytest.mark.parametrize("kind", ["local", "renamed", "in memory"])
def test_two_hosts_that_write_one_file_at_a_time_do_not_share_its_unfinished_name(
    make: Callable[..., Place], kind: str
) -> None:
    place = make(kind)
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


@pytest.mark.slow(but_first=True)
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
        other.delete(ToDelete([], [name]))
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
