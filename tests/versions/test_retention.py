"""What is kept, and what is deleted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from aion.errors import CorruptState
from state_backends.files.remote_storage import RemoteStorage
from tests.stores.rig import make_block
from tests.versions.host import IDENTITY, Host

_DIES = """
import os, sys
from pathlib import Path
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from state_backends.files.remote import Remote
from state_backends.files.remote_storage import RemoteStorage
from state_backends.files.storage import LocalStorage
from tests.files.rig import Hooked

where, folder, batch = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
if where == "remote":
    fs = SubTreeFileSystem(str(folder.parent), LocalFileSystem())
    dies = Hooked(fs, lambda call, path: os._exit(9) if call == "move" else None)
    storage = RemoteStorage(Remote("test://remote", (dies, folder.name)), "state", folder / "dead")
else:
    storage = LocalStorage(folder / "state")
    os.fsync = lambda fd: os._exit(9)
storage.claim(b"another", first=False, batch=batch)
"""


def test_versions_that_nobody_can_ask_for_are_deleted_with_their_files(host: Host) -> None:
    host.stop()
    host.retain = 3
    host.start()
    tokens: list[str] = []
    for i in range(8):
        tokens.append(host.commit(tokens[-1] if tokens else None, (2 * i, 0), (2 * i + 1, 10 + i), purge=[9 + i]))
        kept = tokens[-4:]  # Spark keeps three batches, and the last version may not be that of one yet
        assert host.manifests() == set(kept)
        assert host.files() == host.named_files(*kept)
    for i in (4, 5, 6, 7):
        assert host.seqs(tokens[i], *range(20)) == [*range(0, 2 * i + 1, 2), 2 * i + 1]
    with pytest.raises(CorruptState, match=tokens[3]):
        host.open(tokens[3])


def test_a_file_is_kept_as_long_as_a_version_needs_it(make: Callable[..., Host]) -> None:
    host = make(retain=1)
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
        assert host.manifests() == set(tokens[-4:])
        assert host.files() == host.named_files(*tokens[-4:])


@pytest.mark.parametrize("where", ["tiered", "remote"])
def test_what_failed_attempts_left_is_deleted_in_the_end(make: Callable[..., Host], where: str) -> None:
    """A version that Spark did not take, and what a host wrote before it was killed, are nobody's."""
    host = make(where, retain=2)
    first = host.commit(None, (0, 0))
    host.commit(first, (1, 0))  # Spark takes another one
    for name in (
        "0000000007-0000000001-killed.sst",
        "0000000008-0000000001-killed.part",
        "0000000009-0000000001-killed.sst.part",  # where files are renamed when they are whole, on HDFS for example
    ):
        (host.folder / "state" / "files" / name).write_bytes(b"what a host wrote that was killed before its commit")
    (host.folder / "state" / "manifests" / "0000000001-killed.part").write_bytes(b"{")
    host.restart()
    tokens = [first]
    for i in range(4):
        tokens.append(host.commit(tokens[-1], (1 + i, i), purge=[i - 1]))
    assert host.manifests() == set(tokens[-3:])
    assert host.files() == host.named_files(*tokens[-3:])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["tiered", "remote"])
def test_what_died_while_it_wrote_operator_json_leaves_nothing(make: Callable[..., Host], where: str) -> None:
    """It is removed as other files of dead attempts: not before Spark has decided about their batch."""
    host = make(where, retain=2)
    token, left = host.commit(None, (0, 0)), []
    for batch in (1, 900):
        died = subprocess.run([sys.executable, "-c", _DIES, where, str(host.folder), str(batch)], check=False)
        assert died.returncode == 9
        (part,) = set(host.folder.rglob("*operator*.part")) - set(left)
        left.append(part)
    assert len(left) == 2
    host.restart()
    for i in range(2):
        token = host.commit(token, (1 + i, i))
        if isinstance(host.storage, RemoteStorage):
            host.storage.settle()
        assert left[0].exists() == (not i), "another attempt of its batch may still write it"
    assert list(host.folder.rglob("*.part")) == left[1:], "a batch that no attempt works on yet"


def test_what_an_attempt_wrote_before_its_commit_is_seen_by_nobody(make: Callable[..., Host]) -> None:
    """So no sweep can take it, and none has to."""
    host = make()
    first = host.commit(None, (0, 0))
    before = host.files()
    attempt, _ = host.open(first)
    host.append(attempt, (1, 10), late=True)
    host.shard.release(attempt, [10])
    assert host.shard.store is not None
    host.shard.store.flush()
    assert [seq for seq, _ in host.read(attempt, 10)] == [1]
    assert host.files() == before
    host.restart()
    assert host.files() == before


def test_spark_may_give_up_the_newest_version_even_if_it_keeps_one_batch_only(make: Callable[..., Host]) -> None:
    host = make(retain=1)
    tokens = [host.commit(None, (0, 0))]
    for i in range(1, 5):
        host.commit(tokens[-1], (i, i), purge=[i - 1])  # the batch fails after this
        host.restart()
        assert host.seqs(tokens[-1], *range(10)) == [i - 1]
        tokens.append(host.commit(tokens[-1], (i, i), purge=[i - 1]))


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("damaged", [0, 3, 5])
def test_a_damaged_old_version_takes_no_other_one_with_it(make: Callable[..., Host], damaged: int) -> None:
    """The older ones are what a query is set back to."""
    host = make(retain=9)
    tokens = [host.commit(None, (0, 0))]
    for i in range(1, 7):
        tokens.append(host.commit(tokens[-1], (i, i)))
    host.stop()
    host.manifest(tokens[damaged]).write_bytes(b"damaged")
    host.start()
    for i in range(7, 9):
        tokens.append(host.commit(tokens[-1], (i, i)))
        host.restart()
    for i, token in enumerate(tokens):
        if i != damaged:
            assert host.seqs(token, *range(10)) == [*range(i + 1)]


@pytest.mark.parametrize("gone", [False, True])
def test_a_checkpoint_that_was_restored_from_a_backup_is_an_older_batch(make: Callable[..., Host], gone: bool) -> None:
    host = make(retain=3)
    tokens = [host.commit(None, (0, 0))]
    for i in range(1, 9):
        tokens.append(host.commit(tokens[-1], (i, i)))
    host.restart()
    if gone:
        with pytest.raises(CorruptState, match=r"at batch 2, but only batches 5 to 8 are kept here"):
            host.open(tokens[2])
        return
    again = [tokens[6]]
    for i in range(7, 14):  # past the batches of before
        again.append(host.commit(again[-1], (i, 100 + i)))
        assert host.seqs(again[-1], *range(200)) == [*range(i + 1)]
        host.restart()
    assert host.manifests() == set(again[-4:])
    assert host.files() == host.named_files(*again[-4:])


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


@pytest.mark.slow
def test_an_attempt_that_says_no_batch_sweeps_nothing(make: Callable[..., Host]) -> None:
    """What it would have to know is which batches Spark has decided about."""
    host = make(retain=1)
    first = host.commit(None, (0, 0))
    lost = host.commit(first, (1, 0))
    host.restart()
    token = first
    for i in range(4):
        host.shard.open(token, f"nameless-{i}", IDENTITY)
        host.shard.append(f"nameless-{i}", [(1 + i, False, make_block(0, 50 + i, 600))])
        host.shard.commit(f"nameless-{i}", {"next_seq": 2 + i})
        token = f"nameless-{i}"
    assert host.manifests() == {lost, "nameless-2", "nameless-3"}
    assert host.seqs(lost, 0) == [0, 1]
