"""Carries out the folds that the operator orders (docs/folding.md): reads blocks, and puts others in their place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Protocol

from aion.core.compaction.blocks import Fold, Folded
from aion.core.ingest.key_ranges import equal_ranges
from aion.execute.applying import Decoded
from aion.execute.block_folder import BlockFolder, Owners
from state_backends.store.protocol import Only, StoredBlock
from state_backends.store.session import ShardSession

BlocksAsRows = Callable[[Iterator[StoredBlock]], Generator[Decoded, None, None]]


class FoldOperator(Protocol):
    """What folding needs of an operator."""

    @property
    def next_seq(self) -> int: ...
    def number(self, blocks: int) -> int: ...
    def handle(self, event: Folded) -> Sequence[object]: ...


def carry_out(
    folds: Sequence[Fold],
    operator: FoldOperator,
    session: ShardSession,
    folder: BlockFolder,
    decode_all: BlocksAsRows,
    limit_bytes: int,
    owners: Owners | None = None,
) -> None:
    """Folds, and what the operator orders thereupon. About ``limit_bytes`` of rows are held at once.

    New blocks are in their place before the old ones go: should it fail on the way, the old ones are all there, and
    the new ones are abandoned. ``owners``: see :meth:`aion.execute.block_folder.BlockFolder.fold`.
    """
    waiting = deque(folds)
    while waiting:
        group = _next_group(waiting, limit_bytes)
        below = operator.next_seq
        try:
            sizes = _fold(group, below, operator, session, folder, decode_all, limit_bytes, owners)
            session.replace({s: (fold.after, fold.until) for s, fold in group.items()}, below)
        except BaseException:
            session.abandon(below)
            raise
        for fold in group.values():
            actions = operator.handle(Folded(fold, sizes[fold.slice_us]))
            waiting += [action for action in actions if isinstance(action, Fold) and action not in waiting]


def _next_group(waiting: deque[Fold], limit_bytes: int) -> dict[int, Fold]:
    """Folds of different slices that are small enough together; one at least."""
    first = waiting.popleft()
    group, size = {first.slice_us: first}, first.size_bytes
    while waiting and waiting[0].slice_us not in group and size + waiting[0].size_bytes <= limit_bytes:
        fold = waiting.popleft()
        group[fold.slice_us] = fold
        size += fold.size_bytes
    return group


def _fold(
    group: Mapping[int, Fold],
    below: int,
    operator: FoldOperator,
    session: ShardSession,
    folder: BlockFolder,
    decode_all: BlocksAsRows,
    limit_bytes: int,
    owners: Owners | None,
) -> dict[int, int]:
    """Appends the blocks that stand for those of the group; their bytes, by slice."""
    sizes = dict.fromkeys(group, 0)
    spans = {s: (fold.after, fold.until) for s, fold in group.items()}
    parts = -(-sum(fold.size_bytes for fold in group.values()) // limit_bytes)
    # Of a run that is sorted by key only the blocks of the part are read each time.
    for low, high in equal_ranges(max(parts, 1)):
        only = Only(spans, None if parts <= 1 else [(low, high)], below)
        with closing(decode_all(session.read(list(group), only=only))) as decoded:
            blocks = [d if parts <= 1 else folder.within(d, low, high) for d in decoded]
        made = list(folder.fold(group, blocks, owners))
        del blocks
        first = operator.number(len(made))
        session.append([(first + i, fold.late, block) for i, (fold, block) in enumerate(made)])
        for fold, block in made:
            sizes[fold.slice_us] += block.size_bytes
    return sizes
