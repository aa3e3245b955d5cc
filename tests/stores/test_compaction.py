"""The choice of what to merge, and of what to delete: alone, and over the life of a shard that is only simulated."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_backends.files.names import MERGED, ToDelete
from state_backends.store.merge_choice import Choice, FileView, Limits, choose
from state_backends.versions.manifest import FileEntry, Identity, Manifest, Past
from state_backends.versions.retention import Retention, floor_of, manifest_name
from tests.examples import some

KIB, MIB = 1 << 10, 1 << 20
LIMITS = Limits(worth_bytes=1)
IDENTITY = Identity("q", "o", 0, 1, {})


def file_view(number: int, live: int, dead: int = 0, newest: int | None = None) -> FileView:
    return FileView(number, live + dead, live, number if newest is None else newest)


def chosen(files: Iterable[FileView], held: int = 0, disk: int = 0, limits: Limits = LIMITS) -> list[int]:
    choice = choose(files, held_bytes=held, disk_bytes=disk, limits=limits)
    return list(choice.files) if choice else []


views = st.builds(
    file_view,
    number=st.integers(0, 10**6),
    live=st.integers(1, 200 * MIB) | st.integers(1, 100),
    dead=st.just(0) | st.integers(0, 200 * MIB),
    newest=st.integers(0, 100),
)
many = st.lists(views, max_size=60, unique_by=lambda f: f.file_no)
held = st.integers(0, 1 << 32)


# -- one choice -----------------------------------------------------------------------------------------------


@pytest.mark.usual_sizes
def test_files_of_a_size_are_merged_when_there_are_enough() -> None:
    few = [file_view(i, 100) for i in range(7)]
    large = [file_view(i, 10_000) for i in range(10, 13)]
    assert chosen([*few, *large]) == []
    assert chosen([*large, file_view(7, 110), *few]) == [*range(8)]


@pytest.mark.usual_sizes
def test_neighbours_are_merged_and_the_oldest_first() -> None:
    files = [file_view(i, 100, newest=1000 - i) for i in range(20)]
    assert chosen([*files, file_view(99, 10**6)]) == [*range(19, -1, -1)]


@pytest.mark.usual_sizes
def test_small_files_first() -> None:
    assert chosen([file_view(i, 5000 if i < 9 else 50) for i in range(18)]) == [*range(9, 18)]


def test_a_file_that_is_mostly_dead_is_rewritten() -> None:
    files = [file_view(i, 1000) for i in range(3)]
    assert chosen([*files, file_view(5, 400, dead=390)]) == []
    assert chosen([*files, file_view(5, 400, dead=401)]) == [5]
    assert chosen([*files, file_view(5, 100, dead=101), file_view(6, 100, dead=300)]) == [6, 5]


def test_a_file_of_which_a_third_is_dead_is_rewritten_if_much_is_dead_in_all() -> None:
    assert chosen([file_view(1, 1000, dead=400), file_view(2, 1000)]) == []
    assert chosen([file_view(1, 1000, dead=400), file_view(2, 1000, dead=300)]) == [1]


@pytest.mark.usual_sizes
def test_little_that_is_dead_is_not_worth_a_file() -> None:
    files = [file_view(1, 10 * KIB, dead=20 * KIB)]
    assert chosen(files, limits=Limits()) == []
    assert chosen([file_view(1, 10 * KIB, dead=64 * KIB)], limits=Limits()) == [1]


@pytest.mark.usual_sizes
def test_merging_waits_for_room() -> None:
    files = [file_view(i, 100) for i in range(100)]  # merging all of a class at once would take 12.5 % of them
    live = sum(f.live_bytes for f in files)
    assert chosen(files, held=live, disk=int(1.7 * live))
    assert chosen(files, held=live, disk=int(1.85 * live)) == []
    assert chosen(files, held=int(0.1 * live), disk=10 * live), "some room there is always"
    assert chosen(files, held=int(0.2 * live), disk=10 * live) == []


def test_a_large_file_is_rewritten_even_without_room_but_not_two_at_once() -> None:
    files = [file_view(1, 1000, dead=9000), file_view(2, 1000, dead=8000)]
    assert chosen(files, disk=19_000) == [1]
    assert chosen(files, held=1000, disk=20_000) == []


@given(many, held, held, st.integers(2, 10))
def test_what_is_chosen_is_worth_it(files: list[FileView], held: int, disk: int, fan_in: int) -> None:
    limits = Limits(fan_in=fan_in, worth_bytes=1)
    choice = choose(files, held_bytes=held, disk_bytes=disk, limits=limits)
    if choice is None:
        return
    assert len(set(choice.files)) == len(choice.files)
    inputs = [f for f in files if f.file_no in choice.files]
    output, live = sum(f.live_bytes for f in inputs), sum(f.live_bytes for f in files)
    assert len(inputs) == 1 or output <= min(limits.limit_bytes, live / 8)
    assert not held or held + output <= live / 4 or disk + output <= 1.9 * live
    reclaimed = sum(f.size_bytes for f in inputs) - output
    if "dead" in choice.reason:
        assert output < 3 * reclaimed
    else:
        assert len(inputs) >= fan_in
        largest = max(f.live_bytes for f in inputs)
        assert output > largest * (1 + (fan_in - 1) / fan_in), "every byte lands in a larger file"


@given(many)
def test_where_nothing_is_chosen_there_are_few_files_and_little_is_dead(files: list[FileView]) -> None:
    """And the order in which files are named does not matter."""
    choice = choose(files, held_bytes=0, disk_bytes=0, limits=LIMITS)
    assert choice == choose(files[::-1], held_bytes=0, disk_bytes=0, limits=LIMITS)
    if choice is not None:
        return
    live, size = sum(f.live_bytes for f in files), sum(f.size_bytes for f in files)
    assert size - live <= live / 3 or all(4 * f.live_bytes >= 3 * f.size_bytes for f in files)
    assert all(2 * f.live_bytes >= f.size_bytes for f in files)
    cap = min(64 * MIB, live / 8)
    small = [f for f in files if f.live_bytes <= cap / 8 / 8]  # eight times the largest of a class fit
    assert all(n < 8 for n in Counter(int(math.log(f.live_bytes + 0.5, 8)) for f in small).values())


def test_nothing_comes_of_nothing() -> None:
    assert choose([], held_bytes=0, disk_bytes=0) is None
    assert isinstance(choose([file_view(1, 1, dead=MIB)], held_bytes=0, disk_bytes=0), Choice)


# -- the life of a shard --------------------------------------------------------------------------------------


class Folder:
    """A shard without I/O: a file for every batch, slices that die, versions that are kept, merges that take a while.

    Every batch brings events of its slice and late ones. Whatever is deleted must not be needed by a kept version.
    """

    def __init__(self, seed: int, window: int, retain: int, mean_bytes: int, bursts: bool, crashes: float) -> None:
        self.random = random.Random(seed)
        self.window, self.retain, self.mean_bytes, self.bursts, self.crashes = (
            window, retain, mean_bytes, bursts, crashes,
        )  # fmt: skip
        self.live: dict[int, dict[int, int]] = {}  # file -> slice -> live bytes
        self.size: dict[int, int] = {}  # of every file that ever was
        self.disk: dict[str, int] = {}
        self.manifests: dict[str, Manifest] = {}
        self.chain: list[Manifest] = []
        self.dying: list[int] = []  # bytes that died with each version
        self.next_file_no = 0
        self.merge: tuple[int, tuple[int, ...], int] | None = None  # the batch in which it is done, inputs, output
        self.retention = Retention(retain)
        self.written = self.copied = 0
        self.names: dict[int, str] = {}

    def batch(self, number: int) -> None:
        self.number = number
        if self.merge and self.merge[0] <= number:
            self.use_merged()
        self.write(number)
        died = 0
        for file in list(self.live):
            slices = self.live[file]
            died += sum(slices.pop(s) for s in [s for s in slices if s <= number - self.window])
            if not slices:
                del self.live[file]
        self.dying.append(died)
        self.commit(number)
        if self.random.random() < self.crashes:
            self.crash(number)
        elif self.merge is None:
            self.choose(number)

    def write(self, number: int) -> None:
        size = self.mean_bytes
        if self.bursts:
            size = int(size * self.random.lognormvariate(-0.5, 1))
        slices: Counter[int] = Counter()
        for _ in range(8):
            late = self.random.random() < 0.1
            age = int(self.random.expovariate(4 / self.window)) if late else 0
            slices[max(number - min(age, self.window - 1), 0)] += 1 + size // 8
        self.written += slices.total()
        self.add(dict(slices), "")

    def add(self, slices: dict[int, int], mark: str) -> int:
        number = self.next_file_no
        self.next_file_no += 1
        self.live[number] = slices
        self.size[number] = sum(slices.values())
        self.names[number] = f"{number:010d}-{self.number:010d}-t{mark}.sst"
        self.disk[self.names[number]] = self.size[number]
        return number

    def commit(self, number: int) -> None:
        files = tuple(FileEntry(no, self.names[no], self.size[no], 0, 0, 1) for no in sorted(self.live))
        self.disk.update((f.name, f.size_bytes) for f in files)
        parent = self.chain[-1] if self.chain else None
        past = self.retention.following(parent, files)
        history = self.retention.history(past)
        token = parent.token if parent else None
        manifest = Manifest(
            f"{number:010d}-t", token, number + 1, IDENTITY, files, self.next_file_no, {}, history=history
        )
        self.chain.append(manifest)
        self.manifests[manifest_name(manifest.token)] = manifest
        self.delete(self.retention.committed(manifest, past, number))
        kept = self.chain[-self.retain :]
        assert self.manifests.keys() >= {manifest_name(m.token) for m in kept}
        needed = {f.name: f.size_bytes for m in kept for f in m.files}
        assert self.disk.keys() >= needed.keys(), "a version that may be asked for lost a file"
        assert self.retention.disk_bytes == sum(needed.values()) or self.chain[0] is not kept[0]

    def delete(self, to_delete: ToDelete) -> None:
        for name in to_delete.files:
            self.disk.pop(name, None)  # a merged file that died before it was named is deleted by who made it
        for name in to_delete.manifests:
            del self.manifests[name]

    def choose(self, number: int) -> None:
        views = [FileView(no, self.size[no], sum(of.values()), max(of)) for no, of in self.live.items()]
        held, disk = self.retention.held_bytes, self.retention.disk_bytes
        choice = choose(views, held_bytes=held, disk_bytes=disk, limits=LIMITS)
        if choice:
            slices: Counter[int] = Counter()
            for no in choice.files:
                slices.update(self.live[no])
            self.copied += slices.total()
            output = self.add(dict(slices), MERGED)
            del self.live[output]  # it is not there before it is whole
            del self.disk[self.names[output]]  # and nobody sees it before a version names it
            self.merge = (number + self.random.randrange(1, 4), choice.files, output)

    def use_merged(self) -> None:
        assert self.merge
        _, inputs, output = self.merge
        self.merge = None
        slices: Counter[int] = Counter()
        for no in inputs:
            slices.update(self.live.pop(no, {}))
        if slices:
            self.live[output] = dict(slices)
            self.names[output] = f"{output:010d}-{self.number:010d}-t{MERGED}.sst"

    def crash(self, number: int) -> None:
        """Another host goes on from the last version; attempts of that batch left a version and a file."""
        self.merge = None
        self.manifests[f"{number:010d}-lost.json"] = self.chain[-1]
        self.disk[f"{self.next_file_no:010d}-{number + 1:010d}-lost.sst"] = 1
        self.next_file_no = self.chain[-1].next_file_no
        self.live = {no: of for no, of in self.live.items() if no in {f.file_no for f in self.chain[-1].files}}
        past = self.chain[-1].history
        self.retention = Retention(self.retain, past, manifests=self.manifests, files=self.disk)

    @property
    def live_bytes(self) -> int:
        return sum(sum(of.values()) for of in self.live.values())

    @property
    def retained_bytes(self) -> int:
        """Live in some version that is kept."""
        return self.live_bytes + sum(self.dying[-self.retain + 1 :] if self.retain > 1 else [])


@some(1 / 2)
@given(
    seed=st.integers(0, 1000),
    window=st.sampled_from([3, 40, 200, 600]),
    retain=st.sampled_from([2, 10, 40]),
    mean_bytes=st.sampled_from([100, 100 * KIB, 2 * MIB]),
    bursts=st.booleans(),
)
def test_disk_files_and_writing_are_bounded(seed: int, window: int, retain: int, mean_bytes: int, bursts: bool) -> None:
    folder = Folder(seed, window, retain, mean_bytes, bursts, crashes=0)
    for number in range(window + 250):
        folder.batch(number)
        live, disk = folder.live_bytes, sum(folder.disk.values())
        assert disk <= 2 * folder.retained_bytes + 2 * MIB, "what the kept versions hold, and room to merge"
        if number > window and retain <= window / 15 and not bursts:
            assert disk <= 2 * live
            assert len(folder.live) <= 7 * math.log(live, 8) + 8 * 8
    size = max(folder.written / (window + 250), 1)
    often = 1 + (math.log(max(64 * MIB / size, 1)) + 1) / 0.63 + 3
    assert folder.written + folder.copied <= often * folder.written


@pytest.mark.usual_sizes
def test_a_byte_is_not_written_often() -> None:
    """The bound is a bound: what happens with a usual load is less."""
    folder = Folder(1, window=300, retain=20, mean_bytes=16 * KIB, bursts=False, crashes=0)
    for number in range(1200):
        folder.batch(number)
    assert folder.copied < 2.5 * folder.written
    assert len(folder.live) < 60


@pytest.mark.usual_sizes
@some(1 / 5)
@given(seed=st.integers(0, 1000), window=st.sampled_from([3, 40]), retain=st.sampled_from([2, 5, 20]))
def test_crashes_leave_nothing_for_good(seed: int, window: int, retain: int) -> None:
    folder = Folder(seed, window, retain, 100 * KIB, bursts=True, crashes=0.1)
    for number in range(150):
        folder.batch(number)
    folder.crashes = 0
    for number in range(150, 150 + 3 * retain + 10):
        folder.batch(number)
    kept = folder.chain[-retain:]
    assert folder.manifests.keys() == {manifest_name(m.token) for m in kept}
    assert folder.disk.keys() == {f.name for m in kept for f in m.files}


# -- what lies in a folder besides ----------------------------------------------------------------------------


def manifest(version: int, *files: str) -> Manifest:
    entries = tuple(FileEntry(int(name[:10]), name, 10, 0, 0, 1) for name in files)
    return Manifest(f"{version:010d}-v", None, version, IDENTITY, entries, 100, {})


def of(number: int, batch: int, mark: str = "", attempt: str = "v") -> str:
    return f"{number:010d}-{batch:010d}-{attempt}{mark}.sst"


def follow(retention: Retention, parent: Manifest | None, child: Manifest) -> ToDelete:
    """``child`` is committed by an attempt of the batch that its version has for a number."""
    return retention.committed(child, retention.following(parent, child.files), child.version)


def test_versions_beyond_go_with_the_files_that_only_they_need() -> None:
    retention = Retention(2)
    a, b, c, d = (of(n, n) for n in range(1, 5))
    versions = [manifest(1, a, b), manifest(2, b, c), manifest(3, c, d), manifest(4)]
    assert follow(retention, None, versions[0]) == ([], [])
    assert follow(retention, versions[0], versions[1]) == ([], [])
    assert retention.disk_bytes == 30
    assert follow(retention, versions[1], versions[2]) == (["0000000001-v.json"], [a])
    assert follow(retention, versions[2], versions[3]) == (["0000000002-v.json"], [b])
    assert retention.disk_bytes == 20


def test_of_what_lies_there_only_that_goes_whose_batch_is_decided() -> None:
    old, named, lost, rival, half, later = (
        of(1, 3), of(2, 5), of(3, 5, attempt="lost"), of(4, 6, attempt="rival"),
        of(5, 5, attempt="half").replace(".sst", ".part"), of(6, 9, attempt="later"),
    )  # fmt: skip
    retention = Retention(
        3,
        [Past("0000000004-v", ((old, 10),), 0)],
        manifests=[
            "0000000004-v.json", "0000000005-v.json", "0000000005-lost.json", "0000000006-rival.json",
            "0000000001-damaged.json", "0000000005-half.part", "0000000009-later.json", "notes.json",
        ],
        files=[old, named, lost, rival, half, later, "notes.txt"],
    )  # fmt: skip
    fifth, sixth, seventh = manifest(5, named), manifest(6, named), manifest(7, named)
    found = follow(retention, fifth, sixth)
    assert set(found.manifests) == {"0000000005-lost.json", "0000000001-damaged.json", "0000000005-half.part"}
    assert set(found.files) == {lost, half}, "a rival of this batch may be the one that Spark chooses"
    found = follow(retention, sixth, seventh)
    assert (set(found.manifests), set(found.files)) == ({"0000000004-v.json", "0000000006-rival.json"}, {old, rival})
    assert follow(retention, seventh, manifest(8, named)) == (["0000000005-v.json"], []), "later ones are not judged"


def test_where_older_versions_cannot_be_found_nothing_older_goes() -> None:
    known = [Past("0000000004-v", (), 0)]
    names = ["0000000003-v.json", "0000000004-v.json", "0000000005-lost.json"]
    retention = Retention(9, known, floor=floor_of(known), manifests=names, files=[of(1, 3), of(2, 5)])
    assert follow(retention, manifest(5), manifest(6)) == (["0000000005-lost.json"], [of(2, 5)])


def test_what_could_not_be_deleted_is_tried_again() -> None:
    retention = Retention(2)
    file = of(1, 1)
    versions = [manifest(1, file), *(manifest(n) for n in range(2, 6))]
    follow(retention, None, versions[0])
    follow(retention, versions[0], versions[1])
    to_delete = follow(retention, versions[1], versions[2])
    assert to_delete == (["0000000001-v.json"], [file])
    retention.retry(to_delete)
    again = follow(retention, versions[2], versions[3])
    assert again == (["0000000002-v.json", "0000000001-v.json"], [file])
    assert follow(retention, versions[3], versions[4]) == (["0000000003-v.json"], [])


@pytest.mark.parametrize("merged", [False, True])
def test_what_merges_hold_twice_is_known_from_the_history(merged: bool) -> None:
    first, second = manifest(1, of(1, 1), of(2, 1)), manifest(2, of(9, 2, MERGED if merged else ""))
    retention = Retention(2)
    follow(retention, None, first)
    follow(retention, first, second)
    assert retention.held_bytes == (10 if merged else 0)
    follow(retention, second, manifest(3, of(9, 2, MERGED if merged else "")))
    assert retention.held_bytes == 0, "the inputs went with the first version"
