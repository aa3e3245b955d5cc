"""What can be deleted from a shard's folder: old versions, failed attempts, remains of crashes. Pure.

The rule: every version that Spark may still name can be opened, whole. So a file or manifest is deleted only if it is
certain that no retained version names it and that its attempt is over:

- A manifest carries its history: the older versions that are kept, each with the files that it names and its successor
  does not. So a version knows what goes with the oldest one without reading other manifests, and a damaged manifest
  hides nothing. Spark keeps ``minBatchesToRetain`` batches. It may also give up the newest version, while its batch is
  not complete. So there is one version more than Spark keeps batches.
- Every name begins with its attempt, and so with its batch (:func:`batch_of`). Only versions that descend from that
  attempt can name it. When a task works on a later batch, Spark has decided about all earlier ones. So a name of an
  earlier batch that is not in the history is dead for good.
- This judges only names that were listed when the shard was opened. What another host leaves there later waits for the
  next opening: it may belong to a query that was set back to an older batch and runs again.
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
    """The names in the folder of one shard, as its owner knows them, and which of them may go.

    ``keep``: how many versions are kept, the current one included. ``past``: the kept versions before the current one,
    oldest first. ``floor``: only names of later batches are judged; see :func:`floor_of`. ``manifests``, ``files``: the
    names that were listed.
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
        """Bytes of the files that kept versions name, as of the last commit."""

    def following(self, parent: Manifest | None, files: Iterable[FileEntry]) -> list[Past]:
        """The versions before one that is made from ``parent`` and names ``files``, oldest first."""
        if parent is None:
            return []
        old, new = {f.name for f in parent.files}, {f.name: f.size_bytes for f in files}
        left = tuple((f.name, f.size_bytes) for f in parent.files if f.name not in new)
        merged = sum(size for name, size in new.items() if name not in old and is_merged(name))
        return [*self._past, Past(parent.token, left, merged)]

    def history(self, past: Sequence[Past]) -> tuple[Past, ...]:
        """The part of ``past`` that is written into the manifest."""
        return tuple(past[-min(self._keep - 1, MOST_PAST) :])

    def committed(self, manifest: Manifest, past: Sequence[Past], batch: int) -> Doomed:
        """An attempt of ``batch`` has made a new version after ``past``. Returns what may go."""
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
        """These could not be deleted. They are tried again with the next commit."""
        self._manifests.update(dict.fromkeys(doomed.manifests, self._floor + 1))
        self._files.update(dict.fromkeys(doomed.files, self._floor + 1))

    @property
    def held_bytes(self) -> int:
        """Bytes of merged files whose inputs are kept for older versions."""
        return sum(p.merged_bytes for p in self._past)


def batch_of(attempt: str) -> int:
    """The batch of an attempt. Its name begins with it: ten digits and ``-``.

    -1 for other names: such an attempt may be of any batch, so it deletes nothing that others left.
    """
    digits = attempt.partition("-")[0]
    return int(digits) if len(digits) == 10 and digits.isdecimal() else -1


def floor_of(past: Sequence[Past]) -> int:
    """The batch down to which everything is known, if the versions before ``past`` cannot be read."""
    return batch_of(past[0].token) if past else -1


def manifest_name(token: str) -> str:
    return f"{token}.json"


def _batches(names: Iterable[str], pattern: re.Pattern[str]) -> dict[str, int]:
    """The batch in each name. Names without a batch are not judged."""
    return {name: int(found[1]) for name in names if (found := pattern.fullmatch(name))}
