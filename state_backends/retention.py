"""What of a shard's folder nobody can ask for any more: old versions, failed attempts, remains of crashes. Pure.

Versions beyond ``minBatchesToRetain`` go, and the files that only they need. A file that a version has stopped
naming is never named again, so each version knows what goes with the one before it: a commit costs what is new, not
what is there. Whatever else lies in the folder is found by a sweep, on the first commit after opening and then once
every ``retain`` commits: it goes when it is certain that its attempt is over.

When is that? Spark has chosen the version that the current one came from. So other versions as old as that one lost,
and files of numbers that were given out before it belong to attempts that are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from state_backends.manifest import Manifest

MERGED = "-merged"
"""What the name of a merged file ends with, before its suffix."""


class Doomed(NamedTuple):
    """Names in the folders of manifests and of files: nobody needs them."""

    manifests: list[str]
    files: list[str]


@dataclass(slots=True)
class _Version:
    """A version that may be asked for. ``left``: files, with sizes, that its parent names and it does not."""

    token: str
    version: int
    next_file_no: int
    left: list[tuple[str, int]]
    merged_bytes: int


@dataclass(slots=True)
class _Strays:
    """What no retained version names: manifests with their versions, files with their numbers."""

    manifests: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)


class Retention:
    """What one shard's folder holds, as far as its owner knows, and what of it may go.

    ``chain``: the current version and those it came from, oldest first, as far as they are still there.
    """

    def __init__(self, retain: int, chain: Sequence[Manifest]) -> None:
        self._retain = retain
        self._versions: deque[_Version] = deque()
        self._named: dict[str, int] = {}  # by the current version, with sizes
        self._strays = _Strays()
        self._until_sweep = 0
        self.disk_bytes = 0
        """Of the files that retained versions name."""
        for manifest in chain:
            self._add(manifest)

    def committed(self, manifest: Manifest, in_hand: Callable[[str], bool]) -> Doomed:
        """There is a new version, a child of the one before. ``in_hand``: whether the store has a file."""
        self._add(manifest)
        self._until_sweep -= 1
        doomed = Doomed([], [])
        while len(self._versions) > self._retain:
            doomed.manifests.append(manifest_name(self._versions.popleft().token))
            oldest = self._versions[0]
            doomed.files.extend(name for name, _ in oldest.left)
            self.disk_bytes -= sum(size for _, size in oldest.left)
            oldest.left = []
        self._judge_strays(doomed, in_hand)
        return doomed

    @property
    def sweep_due(self) -> bool:
        """Whether to look through the folder with this commit."""
        return self._until_sweep <= 0

    def unknown(self, manifests: Iterable[str]) -> list[str]:
        """Of the names in the folder of manifests those that have to be looked into for :meth:`sweep`."""
        known = {manifest_name(v.token) for v in self._versions} | self._strays.manifests.keys()
        return sorted(set(manifests) - known)

    def sweep(self, versions: Mapping[str, int | None], files: Iterable[str], in_hand: Callable[[str], bool]) -> Doomed:
        """What the folder holds besides: ``versions`` of :meth:`unknown` manifests, and the names of all files.

        A manifest that is no whole one has no version (None). If its name says that it was never finished, its
        attempt was at work when the current version was made at the latest; otherwise it is not ours to judge.
        """
        self._until_sweep = self._retain
        current = self._versions[-1]
        for name, version in versions.items():
            if version is None and name.endswith(".part"):
                version = current.version
            if version is not None:
                self._strays.manifests[name] = version
        named = self._named.keys() | {name for v in self._versions for name, _ in v.left}
        for name in files:
            number = name.partition("-")[0]
            if name not in named and number.isdecimal():
                self._strays.files[name] = int(number)
        doomed = Doomed([], [])
        self._judge_strays(doomed, in_hand)
        return doomed

    def spared(self, doomed: Doomed) -> None:
        """What could not be deleted is doomed again next time."""
        self._strays.manifests.update(dict.fromkeys(doomed.manifests, -1))
        self._strays.files.update(dict.fromkeys(doomed.files, -1))

    @property
    def held_bytes(self) -> int:
        """Files made by merges that retained versions brought: what they replaced is still there, too."""
        return sum(v.merged_bytes for v in list(self._versions)[1:])

    def _add(self, manifest: Manifest) -> None:
        named = {f.name: f.size_bytes for f in manifest.files}
        new = {name: size for name, size in named.items() if name not in self._named}
        self._versions.append(
            _Version(
                manifest.token,
                manifest.version,
                manifest.next_file_no,
                [(name, size) for name, size in self._named.items() if name not in named],
                sum(size for name, size in new.items() if name.rpartition(".")[0].endswith(MERGED)),
            )
        )
        self.disk_bytes += sum(new.values())
        self._named = named

    def _judge_strays(self, doomed: Doomed, in_hand: Callable[[str], bool]) -> None:
        current = self._versions[-1]
        given_out = self._versions[-2].next_file_no if len(self._versions) > 1 else 0
        for name in [n for n, version in self._strays.manifests.items() if version < current.version]:
            del self._strays.manifests[name]
            doomed.manifests.append(name)
        for name, number in list(self._strays.files.items()):
            if name in self._named:  # written when it was seen, and named since
                del self._strays.files[name]
            elif number < given_out and not in_hand(name):
                del self._strays.files[name]
                doomed.files.append(name)


def manifest_name(token: str) -> str:
    return f"{token}.json"
