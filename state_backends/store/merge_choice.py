"""Which files of a shard are worth merging. Pure.

Files of blocks (:func:`choose`): small ones of similar size, and ones with many dead bytes.

Every commit writes a file, so small files are merged. A file is deleted only as a whole, so a file with many dead bytes
is rewritten. The inputs of a merge stay on disk until no retained version names them. So merging itself takes disk
space, and is limited:

- Disk: a merge begins only if the disk then holds at most :attr:`Limits.disk` times the live bytes, or if the bytes
  that merges hold twice are at most :attr:`Limits.room` of the live bytes, or if no other merge holds anything twice.
- Files: a size class spans a factor of :attr:`Limits.fan_in`. In each class fewer than ``fan_in`` files remain, except
  files that together would exceed :attr:`Limits.file_share` of the live bytes, or the room.
- Writing: merging a class gives a file of a higher class, at least 1 + (fan_in - 1) / fan_in times as large as each
  input. Rewriting a file copies at most three bytes for each dead byte that it reclaims. Let a live byte owe
  ln(limit / size of its file). Merging a class pays at least ln 1.875 = 0.63 of it (fan_in 8). When x bytes of a file
  die, the rest of it owes at most x more (s ln(1 + x / s) <= x). So a byte that arrived in a file of size s is written
  at most 1 + (ln(limit / s) + 1) / 0.63 + 3 times on average: O(log).

For most windows, slices die in their order. So a file is merged with those that die next to it, and no file holds more
than a share of all bytes. Then files that are still partly alive have few dead bytes.

Runs of keyed values (:func:`neighbours`): every commit writes a run, and a key is looked up in all runs until it is
found. So the runs must stay few. Only neighbours are merged, because the newest value of a key counts.

- Runs: :data:`FAN_IN` neighbours are merged as soon as each of them is at most as large as the newer ones together. So
  if commits are of about the same size, there are at most three runs more than the binary logarithm of their number. In
  any case there are at most :data:`MOST_RUNS` when nothing is left to merge.
- Writing: such a merge at least doubles the size of the run that a byte is in, unless values were replaced. So a byte
  is written O(log) times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from state_backends.thresholds import threshold

MIB = 1 << 20
FAN_IN = threshold(4, 2)
"""The fewest runs that are worth a merge."""
MOST_RUNS = threshold(10, 3)
"""If there are more, some are merged whatever their sizes are."""


class FileView(NamedTuple):
    """A file: the bytes of its blocks, the bytes of its live blocks, and its newest live slice."""

    file_no: int
    size_bytes: int
    live_bytes: int
    newest_us: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Shares are of the live bytes. ``limit_bytes``: the largest merged file; a single rewritten file may be larger."""

    fan_in: int = threshold(8, 2)
    limit_bytes: int = threshold(64 * MIB, 4096)
    file_share: float = 1 / 8
    disk: float = 1.9
    room: float = 1 / 4
    dead: float = 1 / 3
    """Above this share of dead bytes, rewrite files that are a quarter dead; below it, files that are half dead."""
    worth_bytes: int = threshold(64 << 10, 64)
    """The fewest dead bytes that are worth writing a file."""


DEFAULTS = Limits()


class Choice(NamedTuple):
    """Files to merge into one, and why."""

    files: tuple[int, ...]
    reason: str


def choose(files: Iterable[FileView], *, held_bytes: int, disk_bytes: int, limits: Limits = DEFAULTS) -> Choice | None:
    """The next merge, or None.

    ``held_bytes``: the outputs of merges whose inputs are still on disk, because versions name them. ``disk_bytes``:
    all files of the shard, including those.
    """
    alive = sorted((f for f in files if f.live_bytes), key=lambda f: (f.newest_us, f.file_no))
    live = sum(f.live_bytes for f in alive)
    room = max(limits.disk * live - disk_bytes, limits.room * live - held_bytes)
    cap = min(limits.limit_bytes, int(limits.file_share * live))
    poor = _poor(alive, live, limits)
    if poor:
        chosen = _first_that_fit(poor, cap, 4 * limits.fan_in)
        total = sum(f.live_bytes for f in chosen)
        reclaimed = sum(f.size_bytes for f in chosen) - total
        if reclaimed >= limits.worth_bytes and (total <= room or not held_bytes):
            return Choice(tuple(f.file_no for f in chosen), "many of their bytes are dead")
    classes: dict[int, list[FileView]] = {}
    for file in alive:
        classes.setdefault(_size_class(file.live_bytes, limits.fan_in), []).append(file)
    for size_class in sorted(classes):  # small files first: that removes the most files for the bytes
        run = _run(classes[size_class], min(cap, int(room)), limits.fan_in)
        if run:
            return Choice(tuple(f.file_no for f in run), f"there are {len(run)} files of about this size")
    return None


def neighbours(sizes: Sequence[int]) -> tuple[int, int] | None:
    """The next merge of runs, as (first, one after the last). None if no merge is worth it. ``sizes``: oldest first."""
    for end in range(len(sizes), FAN_IN - 1, -1):
        begin, total = end - 1, sizes[end - 1]
        while begin > 0 and sizes[begin - 1] <= total:
            begin -= 1
            total += sizes[begin]
        if end - begin >= FAN_IN:
            return begin, end
    if len(sizes) <= MOST_RUNS:
        return None
    width = len(sizes) - MOST_RUNS + 2
    begin = min(range(len(sizes) - width + 1), key=lambda first: sum(sizes[first : first + width]))
    return begin, begin + width


def _poor(alive: Sequence[FileView], live: int, limits: Limits) -> list[FileView]:
    """Files with enough dead bytes to rewrite, the worst first."""
    dead = sum(f.size_bytes for f in alive) - live
    least = 0.75 if dead > limits.dead * live else 0.5
    poor = [f for f in alive if f.live_bytes < least * f.size_bytes]
    return sorted(poor, key=lambda f: (f.live_bytes / f.size_bytes, f.file_no))


def _first_that_fit(files: Sequence[FileView], cap: int, most: int) -> list[FileView]:
    """The first files, together at most ``cap`` live bytes; at least one file, at most ``most``."""
    chosen, total = [files[0]], files[0].live_bytes
    for file in files[1:most]:
        total += file.live_bytes
        if total > cap:
            break
        chosen.append(file)
    return chosen


def _run(files: Sequence[FileView], cap: int, fan_in: int) -> list[FileView]:
    """The first ``fan_in`` or more neighbours that together fit into ``cap``; empty if there are none."""
    for begin in range(len(files) - fan_in + 1):
        end, total = begin, 0
        while end < min(len(files), begin + 4 * fan_in) and total + files[end].live_bytes <= cap:
            total += files[end].live_bytes
            end += 1
        if end - begin >= fan_in:
            return list(files[begin:end])
    return []


def _size_class(size: int, base: int) -> int:
    """The integer part of the logarithm of ``size`` to ``base``."""
    number = 0
    while size >= base:
        size //= base
        number += 1
    return number
