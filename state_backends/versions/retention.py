"""What of a shard's folder nobody can name any more: old versions, failed attempts, remains of crashes. Pure.

The rule: every version that Spark may still name can be opened, whole. So a name goes only when it is certain that no
retained version has it and that the attempt it belongs to is over:

- A manifest carries its history: the versions before it that are kept, each with the files that it names and its
  successor does not. So a version knows what goes with the oldest one without reading any other manifest, and a
  damaged manifest hides nothing. Spark keeps ``minBatchesToRetain`` batches and may still give up the newest version,
  whose batch is not through. That makes one version more than Spark keeps batches.
- Everything is named after the attempt that made it, and with that after its batch (:func:`batch_of`). Only versions
  that come from that attempt's can name it. When a task works on a later batch, Spark has decided about all earlier
  ones. So what belongs to an earlier batch, and is not in the history, is dead for good.
- Only names that were listed when the shard was opened are judged that way. What another host leaves there later waits
  for the next opening: it may belong to a query that was set back to an older batch and runs again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from state_backends.files.names import Doomed, is_merged
from state_backends.versions.manifest import FileEntry, Manifest, Past

MOST_PAST = 256
"""The most versions that one history lists. The manifest of the oldest of them lists the ones before."""
_MANIFEST_NAME = re.compile(r"(\d{10})-.*\.(json|part)")
_FILE_NAME = re.compile(r"\d{10}-(\d{10})-.*\.(sst|part)")


class Retention:
    """The folder of one shard, as its owner knows it, and what of it may go.

    ``keep``: how many versions are kept, the current one included. ``past``: the kept ones before the current one,
    oldest first. ``floor``: of the listed names, only those of later batches are judged; see :func:`floor_of`.
    ``manifests``, ``files``: the names that were listed.
    """

    def __init__(
        self,
        keep: int,
        past: Sequence[Past] = (),
        *,
        floor: int = -1,
        manifests: Iterable[str] = (),
        files: Iterable[str] = (),
    ) -> None:
        self._keep = keep
        self._past = list(past)
        self._floor = floor
        self._manifests = _batches(manifests, _MANIFEST_NAME)
        self._files = _batches(files, _FILE_NAME)
        self.disk_bytes = 0
        """Of the files that kept versions name, as of the last commit."""

    def following(self, parent: Manifest | None, files: Iterable[FileEntry]) -> list[Past]:
        """What comes before a version that names ``files`` and is made of ``parent``, oldest first."""
        if parent is None:
            return []
        old, new = {f.name for f in parent.files}, {f.name: f.size_bytes for f in files}
        left = tuple((f.name, f.size_bytes) for f in parent.files if f.name not in new)
        merged = sum(size for name, size in new.items() if name not in old and is_merged(name))
        return [*self._past, Past(parent.token, left, merged)]

    def history(self, past: Sequence[Past]) -> tuple[Past, ...]:
        """The part of ``past`` that stands in the manifest."""
        return tuple(past[-min(self._keep - 1, MOST_PAST) :])

    def committed(self, manifest: Manifest, past: Sequence[Past], batch: int) -> Doomed:
        """There is a new version after ``past``, made by an attempt of ``batch``."""
        expired, self._past = list(past[: 1 - self._keep]), list(past[1 - self._keep :])
        doomed = Doomed([manifest_name(p.token) for p in expired], [name for p in expired for name, _ in p.left])
        self.disk_bytes = sum(f.size_bytes for f in manifest.files)
        self.disk_bytes += sum(size for p in self._past for _, size in p.left)
        versions = {manifest_name(token) for token in (manifest.token, *(p.token for p in self._past))}
        named = {f.name for f in manifest.files} | {name for p in self._past for name, _ in p.left}
        for strays, kept, dead in (
            (self._manifests, versions, doomed.manifests),
            (self._files, named, doomed.files),
        ):
            for name in [name for name, of in strays.items() if self._floor < of < batch]:
                del strays[name]
                if name not in kept and name not in dead:
                    dead.append(name)
        return doomed

    def spared(self, doomed: Doomed) -> None:
        """What could not be deleted is doomed again with the next commit."""
        self._manifests.update(dict.fromkeys(doomed.manifests, self._floor + 1))
        self._files.update(dict.fromkeys(doomed.files, self._floor + 1))

    @property
    def held_bytes(self) -> int:
        """Bytes of files made by merges, while the files that they replaced are kept for older versions."""
        return sum(p.merged_bytes for p in self._past)


def batch_of(attempt: str) -> int:
    """The batch of an attempt, which its name begins with: ten digits and ``-``.

    -1 for a name that says none: such an attempt may be of any batch, so nothing that others left goes for it.
    """
    digits = attempt.partition("-")[0]
    return int(digits) if len(digits) == 10 and digits.isdecimal() else -1


def floor_of(past: Sequence[Past]) -> int:
    """The batch down to which everything is known, where what comes before ``past`` cannot be found out."""
    return batch_of(past[0].token) if past else -1


def manifest_name(token: str) -> str:
    return f"{token}.json"


def _batches(names: Iterable[str], pattern: re.Pattern[str]) -> dict[str, int]:
    """The batch that each name says; other names are not ours to judge."""
    return {name: int(found[1]) for name in names if (found := pattern.fullmatch(name))}
