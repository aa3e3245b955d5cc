"""Carries out the operator's compactions (docs/inside/window-costs.md): reads blocks and replaces them with fewer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from aion.core.compaction import Compact, CompactionDone
from aion.core.ingest.key_ranges import equal_ranges
from aion.execute.block_compactor import Owners
from state_backends.format.block import Block
from state_backends.store.attempt import ShardAttempt
from state_backends.store.protocol import Only, StoredBlock


class CompactionOperator(Protocol):
    """The part of an operator that compaction needs."""

    @property
    def next_seq(self) -> int: ...
    def number(self, blocks: int) -> int: ...
    def handle(self, event: CompactionDone) -> Sequence[object]: ...


class Compacting(Protocol):
    """The part of :class:`aion.execute.contents.Contents` that compaction needs."""

    @property
    def compaction_bytes(self) -> int: ...
    def compacted(
        self,
        group: Mapping[int, Compact],
        blocks: Iterator[StoredBlock],
        part: tuple[int, int] | None,
        owners: Owners | None,
    ) -> list[tuple[Compact, Block]]: ...


def carry_out(
    compactions: Sequence[Compact],
    operator: CompactionOperator,
    attempt: ShardAttempt,
    contents: Compacting,
    owners: Owners | None = None,
) -> None:
    """Carries out compactions, and those that the operator orders after them.

    It holds about ``contents.compaction_bytes`` at once.

    New blocks are in place before the old ones go. If it fails half-way, all old blocks are still there, and the new
    ones are abandoned. ``owners``: see :meth:`aion.execute.block_compactor.BlockCompactor.compact`.
    """
    waiting = deque(compactions)
    while waiting:
        group = _next_group(waiting, contents.compaction_bytes)
        below = operator.next_seq
        try:
            sizes = _compact(group, below, operator, attempt, contents, owners)
            attempt.replace({s: (compaction.after, compaction.until) for s, compaction in group.items()}, below)
        except BaseException:
            attempt.abandon(below)
            raise
        for compaction in group.values():
            actions = operator.handle(CompactionDone(compaction, sizes[compaction.slice_us]))
            # The answer is all that is due in this slice now. What was ordered before does not know the new run.
            waiting = deque(other for other in waiting if other.slice_us != compaction.slice_us)
            waiting += [action for action in actions if isinstance(action, Compact)]


def _next_group(waiting: deque[Compact], limit_bytes: int) -> dict[int, Compact]:
    """The next compactions of different slices that are small enough together. At least one."""
    first = waiting.popleft()
    group, size = {first.slice_us: first}, first.size_bytes
    while waiting and waiting[0].slice_us not in group and size + waiting[0].size_bytes <= limit_bytes:
        compaction = waiting.popleft()
        group[compaction.slice_us] = compaction
        size += compaction.size_bytes
    return group


def _compact(
    group: Mapping[int, Compact],
    below: int,
    operator: CompactionOperator,
    attempt: ShardAttempt,
    contents: Compacting,
    owners: Owners | None,
) -> dict[int, int]:
    """Appends the blocks that replace those of the group. Returns their bytes by slice."""
    sizes = dict.fromkeys(group, 0)
    spans = {s: (compaction.after, compaction.until) for s, compaction in group.items()}
    parts = -(-sum(compaction.size_bytes for compaction in group.values()) // contents.compaction_bytes)
    # Runs are sorted by key, so each part reads only its own blocks of a run.
    for low, high in equal_ranges(max(parts, 1)):
        only = Only(spans, None if parts <= 1 else [(low, high)], below)
        blocks = attempt.read(list(group), only=only)
        made = contents.compacted(group, blocks, None if parts <= 1 else (low, high), owners)
        if not made:  # sessions needed none of these rows
            continue
        first = operator.number(len(made))
        attempt.append([(first + i, compaction.late, block) for i, (compaction, block) in enumerate(made)])
        for compaction, block in made:
            sizes[compaction.slice_us] += block.size_bytes
    return sizes
