"""Keyed values and versions: runs that are merged, damaged, kept and deleted; values in memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from aion.errors import CorruptState, DiskError
from state_backends.files.names import MERGED
from state_backends.format.checksum import crc32
from state_backends.format.ordered_map import MapValue
from state_backends.store.io_thread import Priority, Steps
from state_backends.store.map.cache import VALUE_BYTES
from state_backends.versions.json_values import dumps
from state_backends.versions.manifest import load
from tests.stores.rig import nothing
from tests.versions.host import IDENTITY, Host, in_the_way
from tests.versions.keyed_attempt import LocalKeyedAttempt

MIB = 1 << 20
Make = Callable[..., Host]
Values = dict[bytes, bytes | None]


def settle(host: Host) -> None:
    host.io.submit(Priority.MAINTENANCE, nothing()).result()


def opened(host: Host, token: str | None) -> tuple[str, LocalKeyedAttempt]:
    attempt, _ = host.open(token)
    return attempt, LocalKeyedAttempt(host.shard, attempt)


def commit(host: Host, token: str | None, values: Values, **snapshot: object) -> str:
    attempt, keyed = opened(host, token)
    keyed.put([MapValue(key, value) for key, value in values.items()])
    host.shard.commit(attempt, {"next_seq": 0, **snapshot})
    settle(host)
    return attempt


def everything(host: Host, token: str | None) -> Values:
    attempt, keyed = opened(host, token)
    found: Values = dict(keyed.scan(b"", None))
    assert keyed.get(list(found)) == list(found.values())
    host.shard.abort(attempt)
    return found


def runs(host: Host, token: str) -> list[str]:
    """The names of a version's runs, oldest first."""
    manifest = load(host.manifest(token).read_bytes(), token)
    names = {file.file_no: file.name for file in manifest.files}
    return [names[number] for number in manifest.runs]


def numbered(numbers: Iterable[int], size: int = 100) -> Values:
    return {b"%06d" % n: random.Random(n).randbytes(size) for n in numbers}


# -- versions ---------------------------------------------------------------------------------------------


def test_a_version_names_its_runs_and_they_go_with_it(make: Make) -> None:
    host = make("tiered", retain=2, budget=MIB)
    tokens = [commit(host, None, numbered(range(1000)))]
    for n in range(8):
        tokens.append(commit(host, tokens[-1], numbered([n])))
        kept = tokens[-3:]
        assert host.manifests() == set(kept)
        assert host.files() == host.named_files(*kept)
        new = [path.name for path in (host.folder / "live" / "new").glob("*")]
        assert all(MERGED in name for name in new) and len(new) <= 1, "published runs have one name"
    assert runs(host, tokens[-1])[0].startswith("0000000000-"), "the large run was not merged with small ones"
    assert any(MERGED in name for name in runs(host, tokens[-1]))
    assert everything(host, tokens[-3]) == everything(host, tokens[-1]) == numbered(range(1000))


def test_a_version_of_an_aion_without_keyed_values_is_opened(make: Make) -> None:
    host = make()
    token = host.commit(None, (0, 0))
    path = host.manifest(token)
    line = path.read_bytes().splitlines()[0]
    assert b',"runs":[]' in line
    line = line.replace(b',"runs":[]', b"")
    path.write_bytes(line + b"\n%08x\n" % crc32(line))
    host.restart()
    assert host.seqs(token, 0) == [0]
    assert everything(host, commit(host, token, {b"k": b"v"}, next_seq=1)) == {b"k": b"v"}


# -- merging ----------------------------------------------------------------------------------------------


def test_runs_are_merged_and_deletions_end_with_the_oldest_run(make: Make, kind: str) -> None:
    host = make(kind, budget=MIB)
    token = commit(host, None, numbered(range(100), size=1))
    for begin in (0, 40, 80):
        token = commit(host, token, dict.fromkeys(numbered(range(begin, begin + 40))))
    assert host.map.stats().merges == 1, "four runs, and none is larger than the newer ones together"
    before = runs(host, token)
    token = commit(host, token, {b"new": b"value"})
    merged, _ = runs(host, token)
    assert MERGED in merged and merged > max(before)
    manifest = load(host.manifest(token).read_bytes(), token)
    assert [file.blocks for file in manifest.files] == [0, 1], "nothing of what was deleted is left"
    assert everything(host, token) == {b"new": b"value"}
    host.restart()
    assert everything(host, token) == {b"new": b"value"}


@pytest.mark.usual_sizes
def test_a_deletion_stays_while_an_older_run_may_have_the_key(make: Make) -> None:
    host = make("rocksdb", budget=8 * MIB)
    token = commit(host, None, numbered(range(200), size=1000))
    for n in range(4):
        token = commit(host, token, {b"%06d" % n: None})
    token = commit(host, token, {b"%06d" % 4: None})
    assert len(runs(host, token)) == 3 and host.map.stats().merges == 1
    assert everything(host, token) == numbered(range(5, 200), size=1000)


@pytest.mark.slow
def test_the_runs_stay_few_however_many_commits_come(make: Make) -> None:
    host, rng = make("tiered", budget=64 << 10), random.Random(1)
    token, wanted, most = None, Values(), 0
    for _ in range(80):
        change = numbered(rng.sample(range(300), rng.choice([1, 5, 30])), size=rng.choice([10, 200]))
        change |= dict.fromkeys(rng.sample(sorted(wanted), min(len(wanted), 3)))
        token = commit(host, token, change)
        wanted = {key: value for key, value in (wanted | change).items() if value is not None}
        most = max(most, host.map.stats().runs)
    assert most <= 11
    assert everything(host, token) == wanted
    host.restart()
    assert everything(host, token) == wanted


def test_a_merge_that_ends_while_a_commit_publishes_is_not_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on slow storage: every merge begins after a commit, and ends after the next one has chosen its runs."""
    host = make("tiered", budget=MIB)
    publish = host.storage.publish
    gates: list[threading.Event] = []

    def closed_gate() -> Steps[None]:
        """Merges wait behind it, and what a task waits for does not."""
        gate = threading.Event()
        gates.append(gate)
        while not gate.wait(0.001):
            yield 0

    def publishes(new: Sequence[str], named: Sequence[str]) -> None:
        while gates:
            gates.pop().set()
        settle(host)
        host.io.submit(Priority.MAINTENANCE, closed_gate())
        publish(new, named)

    monkeypatch.setattr(host.storage, "publish", publishes)
    token, values = None, {}
    for n in range(24):
        change = numbered(range(10 * n, 10 * n + 10))
        values |= change
        attempt, keyed = opened(host, token)
        keyed.put([MapValue(key, value) for key, value in change.items()])
        host.shard.commit(attempt, {"next_seq": 0})
        token = attempt
    monkeypatch.undo()
    for gate in gates:
        gate.set()
    assert token is not None
    settle(host)
    stats = host.map.stats()
    assert stats.merges > 4 and stats.failed_merges == 0
    assert len(runs(host, token)) < 8
    token = commit(host, token, numbered([0]))
    assert everything(host, token) == values
    new = [path.name for path in (host.folder / "live" / "new").glob("*")]
    assert all(MERGED in name for name in new) and len(new) <= 1, "what a version names has one name"


@pytest.mark.usual_sizes
@pytest.mark.parametrize("how", ["aborted", "superseded", "the manifest cannot be written"])
def test_an_attempt_that_fails_leaves_the_merged_run_for_the_next(make: Make, how: str) -> None:
    host = make("tiered", budget=MIB)
    token = None
    for n in range(4):
        token = commit(host, token, numbered([n]))
    assert token is not None and host.map.stats().merges == 1
    attempt, keyed = opened(host, token)
    keyed.put([MapValue(b"lost", b"x")])
    if how == "the manifest cannot be written":
        with in_the_way(host.folder / "state" / "manifests"), pytest.raises(DiskError):
            host.shard.commit(attempt, {"next_seq": 0})
    if how != "superseded":
        host.shard.abort(attempt)
    assert everything(host, token) == numbered(range(4))
    last = commit(host, token, numbered([9]))
    assert len(runs(host, last)) == 2 and host.map.stats().merges == 1
    assert host.files() == host.named_files(*host.manifests())
    assert everything(host, last) == numbered([0, 1, 2, 3, 9])


def test_a_merge_of_a_damaged_run_changes_nothing_and_is_tried_less_often(make: Make) -> None:
    host = make("rocksdb", budget=MIB)
    tokens = [commit(host, None, numbered(range(100)))]
    damage(host.folder / "state" / "files" / runs(host, tokens[0])[0])
    host.restart()
    for n in range(12):
        attempt, keyed = opened(host, tokens[-1])
        keyed.put([MapValue(key, value) for key, value in numbered(range(n, n + 100)).items()])
        host.shard.commit(attempt, {"next_seq": 0})
        settle(host)
        tokens.append(attempt)
    stats = host.map.stats()
    assert 1 <= stats.failed_merges <= 4
    _, keyed = opened(host, tokens[-1])
    assert keyed.get([b"000050"]) == [numbered([50])[b"000050"]], "newer runs are whole"


# -- damage -----------------------------------------------------------------------------------------------


def damage(path: Path, at: float = 0.4) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0xFF
    path.unlink()  # a new file: RocksDB may have the old one open
    path.write_bytes(data)


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("how", ["missing", "emptied", "short", "swapped", "of another version", "a block", "its name"])
def test_a_damaged_run_is_an_error_with_names_and_never_other_values(make: Make, how: str) -> None:
    host = make("rocksdb", budget=8 * MIB)
    first = commit(host, None, numbered(range(1000)))
    second = commit(host, first, numbered(range(500, 1000), size=100))
    third = commit(host, second, numbered(range(1000)))
    host.stop()
    folder = host.folder / "state" / "files"
    _, middle, last = (folder / name for name in runs(host, third))
    data = middle.read_bytes()
    middle.unlink()
    match how:
        case "emptied":
            middle.write_bytes(b"")
        case "short":
            middle.write_bytes(data[:-1])
        case "swapped":
            middle.write_bytes(last.read_bytes())
        case "of another version":
            middle.write_bytes(last.read_bytes()[: len(data)].ljust(len(data), b"\0"))
        case "a block" | "its name":
            middle.write_bytes(data)
            damage(middle, 0.0001 if how == "its name" else 0.4)
    host.start()
    assert everything(host, first) == numbered(range(1000)), "older versions are whole"
    with pytest.raises(CorruptState, match=rf"{middle.name}.*version {second}|version {second}.*{middle.name}"):
        _, keyed = opened(host, second)
        keyed.get(list(numbered(range(1000))))
    with pytest.raises(CorruptState, match=f"version {second}"):
        _, keyed = opened(host, second)
        list(keyed.scan(b"", None))


def test_a_run_that_was_replaced_by_one_of_the_same_size_is_noticed(make: Make) -> None:
    host = make()
    first = commit(host, None, {b"k": b"1"})
    second = commit(host, first, {b"k": b"2"})
    host.stop()
    older, newer = (host.folder / "state" / "files" / name for name in runs(host, second))
    data = newer.read_bytes()
    newer.unlink()
    newer.write_bytes(older.read_bytes())
    manifest = host.manifest(second).read_bytes()
    size = b'"size_bytes":%d'
    line = manifest.splitlines()[0].replace(size % len(data), size % newer.stat().st_size)
    host.manifest(second).write_bytes(line + b"\n%08x\n" % crc32(line))
    host.start()
    with pytest.raises(CorruptState, match=f"{newer.name}: it is not the file that the manifest names"):
        host.open(second)
    newer.unlink()
    newer.write_bytes(data)
    host.manifest(second).write_bytes(manifest)
    assert everything(host, second) == {b"k": b"2"}


def test_a_manifest_that_names_a_run_without_its_file(make: Make) -> None:
    host = make()
    token = commit(host, None, {b"k": b"1"})
    path = host.manifest(token)
    line = path.read_bytes().splitlines()[0].replace(b',"runs":[0]', b',"runs":' + dumps([0, 7]))
    path.write_bytes(line + b"\n%08x\n" % crc32(line))
    host.restart()
    with pytest.raises(CorruptState, match="file 0000000007, a run, is not among the files"):
        host.open(token)


# -- attempts with many changes ---------------------------------------------------------------------------


def test_an_attempt_may_change_more_than_fits_into_memory(make: Make, kind: str) -> None:
    host = make(kind, budget=256 << 10)
    token = commit(host, None, numbered(range(100), size=1000))
    attempt, keyed = opened(host, token)
    wanted = numbered(range(100), size=1000)
    for round_ in range(5):
        for begin in range(0, 200, 10):
            change = numbered(range(begin, begin + 10), size=900 + round_)
            change[b"%06d" % begin] = None
            keyed.put([MapValue(key, value) for key, value in change.items()])
            wanted |= change  # type: ignore[arg-type]
            assert host.budget.used_bytes <= (256 << 10) // 2
    assert keyed.get([*wanted, b"none"]) == [*wanted.values(), None]
    live = {key: value for key, value in wanted.items() if value is not None}
    assert dict(keyed.scan(b"", None)) == live
    spilled = host.map.stats().runs
    assert spilled > 2
    host.shard.abort(attempt)
    assert everything(host, token) == numbered(range(100), size=1000)
    assert not list((host.folder / "live" / "new").glob("*"))
    last = commit(host, token, wanted)
    assert len(runs(host, last)) >= 3
    assert everything(host, last) == live


def test_an_attempt_whose_changes_cannot_be_written_fails_and_the_next_does_not(make: Make) -> None:
    host = make("tiered", budget=128 << 10)
    token = commit(host, None, numbered(range(10)))
    with in_the_way(host.folder / "live" / "new"):
        attempt, keyed = opened(host, token)
        with pytest.raises(DiskError, match="writing state"):
            keyed.put([MapValue(key, value) for key, value in numbered(range(100), size=2000).items()])
        host.shard.abort(attempt)
        attempt, keyed = opened(host, token)
        keyed.put([MapValue(b"a", b"b")])
        with pytest.raises(DiskError, match="writing state"):
            host.shard.commit(attempt, {"next_seq": 0})
        host.shard.abort(attempt)
        assert everything(host, token) == numbered(range(10))
    assert everything(host, commit(host, token, {b"a": b"b"})) == numbered(range(10)) | {b"a": b"b"}


# -- memory -----------------------------------------------------------------------------------------------


def test_what_is_in_memory_needs_no_disk(make: Make) -> None:
    host = make("tiered", budget=MIB)
    token = commit(host, None, numbered(range(1000)))
    _, keyed = opened(host, token)
    keyed.get([*numbered(range(1100)), b"never was"])
    assert host.map.stats().value_misses == 0, "all values are in memory, so others do not exist"
    host.restart()
    _, keyed = opened(host, token)
    keyed.get(list(numbered(range(100))))
    keyed.get(list(numbered(range(100))))
    stats = host.map.stats()
    assert (stats.value_hits, stats.value_misses, stats.values) == (100, 100, 100)
    assert host.shard.expect(list(numbered(range(50, 300))))
    settle(host)
    keyed.get(list(numbered(range(300))))
    stats = host.map.stats()
    assert (stats.value_misses, stats.values) == (100, 300)
    assert stats.value_bytes == host.budget.cached_bytes == 300 * (6 + 100 + VALUE_BYTES)


@pytest.mark.parametrize(("kind", "kept"), [("tiered", 800), ("rocksdb", 0), ("memory", 4000)])
def test_values_stay_in_memory_as_the_backend_says(make: Make, kind: str, kept: int) -> None:
    host = make(kind, budget=MIB)
    token = commit(host, None, numbered(range(4000), size=1000))
    assert host.map.stats().values == pytest.approx(kept, rel=0.15)
    attempt, keyed = opened(host, token)
    wanted = numbered(range(4000), size=1000)
    assert keyed.get(list(wanted)) == list(wanted.values())
    host.shard.abort(attempt)
    assert host.map.stats().values == pytest.approx(kept, rel=0.15)
    assert kind == "memory" or host.budget.cached_bytes <= MIB


def test_values_make_room_for_blocks(make: Make) -> None:
    host = make("tiered", budget=MIB, block_bytes=64 << 10)
    token = commit(host, None, numbered(range(4000), size=1000))
    before = host.budget.cached_bytes
    assert before > MIB * 0.8
    attempt, _ = host.open(token)
    host.append(attempt, *((seq, 0) for seq in range(6)))
    assert host.budget.used_bytes > 300 << 10
    assert host.budget.cached_bytes < before - (250 << 10)
    assert host.budget.left() >= host.budget.cached_bytes
    host.map.validate()


def test_values_that_are_needed_soon_stay_longest(make: Make) -> None:
    host = make("tiered", budget=MIB)
    attempt, keyed = opened(host, None)
    soon, late = numbered(range(0, 300), size=1000), numbered(range(300, 600), size=1000)
    keyed.put([MapValue(key, value, 50) for key, value in soon.items()])
    keyed.put([MapValue(key, value, 5000) for key, value in late.items()])
    host.shard.commit(attempt, {"next_seq": 0, "expected_ms": 100})
    settle(host)
    others = numbered(range(1000, 1900), size=1000)
    token = commit(host, attempt, others, expected_ms=100)
    _, keyed = opened(host, token)
    keyed.get(list(soon))
    assert host.map.stats().value_misses == 0, "values that were used later had to go before them"
    # They were needed, and they were read. Now they are like others.
    token = commit(host, token, others, expected_ms=100)
    _, keyed = opened(host, token)
    keyed.get(list(soon))
    assert host.map.stats().value_misses > 100


def test_an_attempt_at_another_version_sees_no_value_of_this_one(make: Make, kind: str) -> None:
    host = make(kind, budget=MIB)
    first = commit(host, None, {b"a": b"1", b"b": b"1"})
    second = commit(host, first, {b"a": b"2", b"b": None})
    for _ in range(2):
        assert everything(host, second) == {b"a": b"2"}
        assert everything(host, first) == {b"a": b"1", b"b": b"1"}
    host.shard.open(None, "0000000000-x", IDENTITY)
    assert LocalKeyedAttempt(host.shard, "0000000000-x").get([b"a"]) == [None]
