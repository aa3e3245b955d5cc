"""Which files of a shard are worth merging into one: size-tiered, and by what is dead in them. Pure.

Every commit writes a file, so small ones are merged; and a file in which much is dead is rewritten, since a file is
deleted only as a whole. What a merge replaces stays on disk until no retained version names it, so merging itself
takes room, and is kept within it:

- Disk: a merge is begun only if the disk then holds at most :attr:`Limits.disk` times the live bytes, or if what
  merges hold twice is at most :attr:`Limits.room` of them, or if no other merge holds anything twice.
- Files: of each size class, which spans a factor of :attr:`Limits.fan_in`, fewer than that many are left, but for
  those that would exceed :attr:`Limits.file_share` of the live bytes together, or the room.
- Writing: a merge of a class gives a file of a higher one, at least 1 + (fan_in - 1) / fan_in times as large as each
  of its inputs; a rewriting copies at most three bytes for each dead one that it reclaims. Let a live byte owe
  ln(limit / size of its file). A merge of a class pays at least ln 1.875 = 0.63 of it (fan_in 8); the death of x
  bytes adds at most x to what the rest of their file owes (s ln(1 + x / s) <= x). So a byte that came in a file of
  size s is written at most 1 + (ln(limit / s) + 1) / 0.63 + 3 times on average: O(log).

Slices die in their order, for most windows. So files are merged with those that die next to them, and the bytes of
no file are more than a share of all: then little is dead in files of which something is alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIB = 1 << 20


class FileView(NamedTuple):
    """A file as the choice sees it: bytes of its blocks, and of the live ones among them; its newest live slice."""

    file_no: int
    size_bytes: int
    live_bytes: int
    newest_us: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Shares are of the live bytes. ``limit_bytes``: of a merged file; a single one that is rewritten may be larger."""

    fan_in: int = 8
    limit_bytes: int = 64 * MIB
    file_share: float = 1 / 8
    disk: float = 1.9
    room: float = 1 / 4
    dead: float = 1 / 3
    """From so many dead bytes on, files of which a quarter is dead are rewritten, too; before, those with a half."""
    worth_bytes: int = 64 << 10
    """Fewer dead bytes than that are not worth a file."""


DEFAULTS = Limits()


class Choice(NamedTuple):
    """Files to merge into one, and why."""

    files: tuple[int, ...]
    reason: str


def choose(files: Iterable[FileView], *, held_bytes: int, disk_bytes: int, limits: Limits = DEFAULTS) -> Choice | None:
    """The next merge, or None.

    ``held_bytes``: outputs of merges whose inputs are still on disk, for versions that name them; ``disk_bytes``: all
    files of the shard, those included.
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
            return Choice(tuple(f.file_no for f in chosen), "much of them is dead")
    classes: dict[int, list[FileView]] = {}
    for file in alive:
        classes.setdefault(_size_class(file.live_bytes, limits.fan_in), []).append(file)
    for size_class in sorted(classes):  # small files first: most files for the bytes
        run = _run(classes[size_class], min(cap, int(room)), limits.fan_in)
        if run:
            return Choice(tuple(f.file_no for f in run), f"there are {len(run)} of about their size")
    return None


def _poor(alive: Sequence[FileView], live: int, limits: Limits) -> list[FileView]:
    """Files to rewrite for what is dead in them, the worst first."""
    dead = sum(f.size_bytes for f in alive) - live
    least = 0.75 if dead > limits.dead * live else 0.5
    poor = [f for f in alive if f.live_bytes < least * f.size_bytes]
    return sorted(poor, key=lambda f: (f.live_bytes / f.size_bytes, f.file_no))


def _first_that_fit(files: Sequence[FileView], cap: int, most: int) -> list[FileView]:
    """The first files, up to ``cap`` live bytes; at least one."""
    chosen, total = [files[0]], files[0].live_bytes
    for file in files[1:most]:
        total += file.live_bytes
        if total > cap:
            break
        chosen.append(file)
    return chosen


def _run(files: Sequence[FileView], cap: int, fan_in: int) -> list[FileView]:
    """The first ``fan_in`` neighbours or more that fit ``cap`` together; none if there are no such."""
    for begin in range(len(files) - fan_in + 1):
        end, total = begin, 0
        while end < min(len(files), begin + 4 * fan_in) and total + files[end].live_bytes <= cap:
            total += files[end].live_bytes
            end += 1
        if end - begin >= fan_in:
            return list(files[begin:end])
    return []


def _size_class(size: int, base: int) -> int:
    """The whole part of log(size) to the base."""
    number = 0
    while size >= base:
        size //= base
        number += 1
    return number
