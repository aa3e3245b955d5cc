"""What can be deleted from a shard's folder: old versions, failed attempts, remains of crashes. Pure.

The rule: every version that Spark may still ask for can be opened, whole. So a file or manifest is deleted only if it
is certain that no retained version names it and that its attempt is over:

- A manifest carries its history: the older versions that are kept, each with the files that it names but the next
  version does not. So deleting the oldest version needs no other manifest, and a damaged manifest hides nothing. Spark
  keeps ``minBatchesToRetain`` batches. It may also give up the newest version while its batch is not complete. So one
  version more is kept.
- The name of a manifest or file contains its attempt, and so its batch (:func:`batch_of`). Only that attempt and
  versions that descend from it can name the file. When a task works on a later batch, Spark has decided about all
  earlier batches. So a file of an earlier batch that the history does not name is dead for good.
- Only names that were listed when the shard was opened are judged. What another host leaves there later waits for the
  next opening: it may belong to a query that was set back to an older batch and runs again.
- In the first batch of a lineage, tasks take versions of other lineages into the folders of all shards: first the
  files, then the manifest (:mod:`state_backends.versions.lineage`). So a shard whose version was taken, or that has
  none yet, is listed in its next batch. Then these tasks are over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from state_backends.files.names import ToDelete, is_merged
from state_backends.thresholds import threshold
from state_backends.versions.manifest import FileEntry, Manifest, Past

MOST_PAST = threshold(256, 3)
"""The most versions that one history lists. The manifest of the oldest one lists those before it."""
_MANIFEST_NAME = re.compile(r"(\d{10})-.*\.(json|part)")
_FILE_NAME = re.compile(r"\d{10}-(\d{10})-.*\.(sst|bodies|part)")


class Retention:
    """The manifests and files of one shard that its host knows of, and which of them may be deleted.

    ``keep``: how many versions are kept, including the current one. ``past``: the kept versions before the current one,
    oldest first. ``floor``: only names of later batches are judged; see :func:`floor_of`. ``unlisted_in``: the batch in
    which the folder must not be listed yet. ``manifests``, ``files``: see :meth:`note`.
    """

    def __init__(
        self,
        keep: int,
        past: Sequence[Past] = (),
        *,
        floor: int = -1,
        unlisted_in: int | None = None,
        manifests: Iterable[str] = (),
        files: Iterable[str] = (),
    ) -> None:
        self._keep = keep
        self._past = list(past)
        self._floor, self._unlisted_in = floor, unlisted_in
        self._manifests: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self.note(manifests, files)
        self.disk_bytes = 0
        """Bytes of the files that the kept versions name, as of the last commit."""

    def begins(self, batch: int, listing: Callable[[], tuple[Iterable[str], Iterable[str]]]) -> None:
        """A batch begins. The names in the folder are noted, if that had to wait for this batch."""
        if self._unlisted_in is not None and batch > self._unlisted_in:
            self.note(*listing())
            self._unlisted_in = None

    def following(self, parent: Manifest | None, files: Iterable[FileEntry]) -> list[Past]:
        """Returns the versions before a new one that is made from ``parent`` and names ``files``. Oldest first."""
        if parent is None:
            return []
        old, new = {f.name for f in parent.files}, {f.name: f.size_bytes for f in files}
        left = tuple((f.name, f.size_bytes) for f in parent.files if f.name not in new)
        merged = sum(size for name, size in new.items() if name not in old and is_merged(name))
        return [*self._past, Past(parent.token, left, merged)]

    def history(self, past: Sequence[Past]) -> tuple[Past, ...]:
        """Returns the part of ``past`` that the manifest lists."""
        return tuple(past[-min(self._keep - 1, MOST_PAST) :])

    def committed(self, manifest: Manifest, past: Sequence[Past], batch: int) -> ToDelete:
        """Records the new version that an attempt of ``batch`` has made after ``past``. Returns what may be deleted."""
        expired, self._past = list(past[: 1 - self._keep]), list(past[1 - self._keep :])
        to_delete = ToDelete([manifest_name(p.token) for p in expired], [name for p in expired for name, _ in p.left])
        self.disk_bytes = sum(f.size_bytes for f in manifest.files)
        self.disk_bytes += sum(size for p in self._past for _, size in p.left)
        versions = {manifest_name(token) for token in (manifest.token, *(p.token for p in self._past))}
        named = {f.name for f in manifest.files} | {name for p in self._past for name, _ in p.left}
        for listed, needed, dead in (
            (self._manifests, versions, to_delete.manifests),
            (self._files, named, to_delete.files),
        ):
            for name in [name for name, its_batch in listed.items() if self._floor < its_batch < batch]:
                del listed[name]
                if name not in needed and name not in dead:
                    dead.append(name)
        return to_delete

    def retry(self, to_delete: ToDelete) -> None:
        """Makes the next commit delete these again, because they could not be deleted.

        They outlive the shard, too: they are among the names that are listed when it is opened.
        """
        self._manifests.update(dict.fromkeys(to_delete.manifests, self._floor + 1))
        self._files.update(dict.fromkeys(to_delete.files, self._floor + 1))

    def note(self, manifests: Iterable[str], files: Iterable[str]) -> None:
        """Adds names to those that are judged when a later batch is committed."""
        self._manifests.update(_batches(manifests, _MANIFEST_NAME))
        self._files.update(_batches(files, _FILE_NAME))

    @property
    def held_bytes(self) -> int:
        """Bytes of merged files whose inputs still exist because older versions need them."""
        return sum(p.merged_bytes for p in self._past)


def batch_of(attempt: str) -> int:
    """Returns the batch of an attempt, from its name, which begins with ten digits and ``-``.

    -1 for other names. Such an attempt may belong to any batch, so it deletes nothing that other attempts left.
    """
    digits = attempt.partition("-")[0]
    return int(digits) if len(digits) == 10 and digits.isdecimal() else -1


def floor_of(past: Sequence[Past]) -> int:
    """Returns the batch of the oldest known version, if the versions before ``past`` cannot be read. -1 if ``past`` is
    empty.

    What is older may belong to a version that cannot be read, so it is not deleted.
    """
    return batch_of(past[0].token) if past else -1


def manifest_name(token: str) -> str:
    return f"{token}.json"


def _batches(names: Iterable[str], pattern: re.Pattern[str]) -> dict[str, int]:
    """Returns the batch of each name. Leaves out names without a batch: they are not judged."""
    return {name: int(found[1]) for name in names if (found := pattern.fullmatch(name))}
