"""Carries out the operator's compactions (docs/compaction.md): reads blocks, and replaces them by fewer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Protocol

from aion.core.compaction.blocks import Compact, CompactionDone
from aion.core.ingest.key_ranges import equal_ranges
from aion.execute.applying import Decoded
from aion.execute.block_compactor import BlockCompactor, Owners
from state_backends.store.protocol import Only, StoredBlock
from state_backends.store.session import ShardSession

BlocksAsRows = Callable[[Iterator[StoredBlock]], Generator[Decoded, None, None]]


class CompactionOperator(Protocol):
    """What compaction needs of an operator."""

    @property
    def next_seq(self) -> int: ...
    def number(self, blocks: int) -> int: ...
    def handle(self, event: CompactionDone) -> Sequence[object]: ...


def carry_out(
    compactions: Sequence[Compact],
    operator: CompactionOperator,
    session: ShardSession,
    compactor: BlockCompactor,
    decode_all: BlocksAsRows,
    limit_bytes: int,
    owners: Owners | None = None,
) -> None:
    """Compactions, and what the operator orders thereupon. About ``limit_bytes`` of rows are held at once.

    New blocks are in their place before the old ones go: should it fail on the way, the old ones are all there, and
    the new ones are abandoned. ``owners``: see :meth:`aion.execute.block_compactor.BlockCompactor.compact`.
    """
    waiting = deque(compactions)
    while waiting:
        group = _next_group(waiting, limit_bytes)
        below = operator.next_seq
        try:
            sizes = _compact(group, below, operator, session, compactor, decode_all, limit_bytes, owners)
            session.replace({s: (compaction.after, compaction.until) for s, compaction in group.items()}, below)
        except BaseException:
            session.abandon(below)
            raise
        for compaction in group.values():
            actions = operator.handle(CompactionDone(compaction, sizes[compaction.slice_us]))
            waiting += [action for action in actions if isinstance(action, Compact) and action not in waiting]


def _next_group(waiting: deque[Compact], limit_bytes: int) -> dict[int, Compact]:
    """Compactions of different slices that are small enough together; one at least."""
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
    session: ShardSession,
    compactor: BlockCompactor,
    decode_all: BlocksAsRows,
    limit_bytes: int,
    owners: Owners | None,
) -> dict[int, int]:
    """Appends the blocks that stand for those of the group; their bytes, by slice."""
    sizes = dict.fromkeys(group, 0)
    spans = {s: (compaction.after, compaction.until) for s, compaction in group.items()}
    parts = -(-sum(compaction.size_bytes for compaction in group.values()) // limit_bytes)
    # Of a run that is sorted by key only the blocks of the part are read each time.
    for low, high in equal_ranges(max(parts, 1)):
        only = Only(spans, None if parts <= 1 else [(low, high)], below)
        with closing(decode_all(session.read(list(group), only=only))) as decoded:
            blocks = [d if parts <= 1 else compactor.within(d, low, high) for d in decoded]
        made = list(compactor.compact(group, blocks, owners))
        del blocks
        first = operator.number(len(made))
        session.append([(first + i, compaction.late, block) for i, (compaction, block) in enumerate(made)])
        for compaction, block in made:
            sizes[compaction.slice_us] += block.size_bytes
    return sizes
