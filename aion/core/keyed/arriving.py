"""The rows that come for the windows of one definition: which of them are accepted, and how they join. Pure.

Rows join when all of a batch are there. If they need more pages than are in memory at once, they join some pages at a
time. First there are as many pages as these rows will need, because a page that gets too long is in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from aion.base.numbers import sum_of, sums_by
from aion.core.keyed.assigners import INDEX, Flags, Sessions
from aion.core.keyed.closing import BEFORE_ALL
from aion.core.keyed.in_memory import WindowsInMemory
from aion.core.keyed.orders import EmitDroppedRows, RowArrivals
from aion.core.keyed.table import Ints, Table, hashes_of
from aion.core.keyed.waiting import RowsInMemory, WaitingRows
from aion.core.lateness.observe import observe_late
from aion.core.life.definition import Claim, Turn

_NOTHING = np.empty(0, np.int64)


class ArrivingRows:
    """The rows that come for the windows of ``memory``. ``snapshot``: of these windows.

    ``settled_us``: an event before then is only needed or accepted if a row of the index reaches it. It never goes
    back. ``waiting``: the rows of the batch at work, which are not in the index yet.
    """

    def __init__(self, memory: WindowsInMemory, snapshot: Mapping[str, Any] | None) -> None:
        self._memory, self._assigner = memory, memory.assigner
        reach_us = self._assigner.reach_us
        state = snapshot or {"settled_us": BEFORE_ALL - reach_us, "reach_us": reach_us, "next_id": 0}
        self.settled_us: int = state["settled_us"]
        self.reach_us: int = state["reach_us"]
        self.next_id: int = state["next_id"]
        self.waiting: WaitingRows = RowsInMemory()
        self._joined: list[Ints] = []  # the pages that rows of the batch are in, as long as there are as many pages

    def write(self) -> None:
        """Writes the pages that changed, and keeps none in memory. All rows of a batch must have joined."""
        assert not len(self.waiting), "rows join their windows before these are written"
        self._memory.write()
        self._joined = []

    def arrive(self, rows: RowArrivals | None, turn: Turn) -> Claim:
        """Decides which rows are taken. ``rows``: see :meth:`Arrivals.hashed`.

        The orders to drop include rows that are taken for later windows but came too late for the one that ends at
        them.
        """
        if rows is None:
            return Claim()
        seen = rows.seen_by(self._memory.definition)
        taken, lost = self.accepted(seen), np.zeros(len(seen), np.bool_)
        drops: list[EmitDroppedRows] = []
        for reason, which in self._assigner.unusable(seen):
            drops += self._dropped(rows, seen, which, None, reason)
            lost |= which
        taken &= ~lost
        late, count = (~taken & ~lost) | self.misses_own(seen), 0
        if late.any():
            assert turn.at_us is not None, "nothing is late without a watermark"
            drops += self._dropped(rows, seen, late, turn.at_us, None)
            too_late = seen.take(~taken & ~lost)
            # They teach as any other late event does.
            observe_late(self._memory.bound, self._assigner.alone(too_late)[1], too_late["events"], turn.at_us)
            count = sum_of(too_late["events"])
        lost |= late
        blocks, block_of = np.unique(rows.block[lost], return_inverse=True)
        dropped = dict(zip(blocks.tolist(), sums_by(block_of, seen["events"][lost], len(blocks)).tolist(), strict=True))
        kept = frozenset(np.unique(rows.block[taken]).tolist())
        return Claim(kept, None, drops, dropped, count, (seen, rows.block), taken)

    def _dropped(
        self, rows: RowArrivals, seen: Table, which: Flags, now_us: int | None, reason: str | None
    ) -> Iterator[EmitDroppedRows]:
        """Returns orders to emit these rows as dropped.

        ``now_us``: the watermark that they came too late for. It is None if they have a ``reason`` instead.
        """
        lost, blocks = seen.take(which), rows.block[which]
        starts, ends = self._assigner.alone(lost)
        for block in np.unique(blocks).tolist():
            own = blocks == block
            late_us = None if now_us is None else now_us - ends[own]
            yield EmitDroppedRows(
                block, self._memory.definition, lost["row"][own], starts[own], ends[own], late_us, reason
            )

    def keep(self, claim: Claim, seqs: Mapping[int, int]) -> None:
        """Adds the rows that were taken to those of the batch."""
        if claim.rows is not None and claim.rows.any():
            seen, blocks = claim.taken
            seq_of = np.full(max(seqs) + 1, -1, np.int64)
            seq_of[[*seqs]] = [*seqs.values()]
            self.add(seen.take(claim.rows), seq_of[blocks[claim.rows]])

    def accepted(self, new: Table) -> Flags:
        """A mask of the rows of an arrival that do not come too late."""
        if self._memory.closed_us == BEFORE_ALL:
            return np.ones(len(new), np.bool_)
        nothing = Table.empty(self._memory.key_types, INDEX)
        accepted = self._assigner.accepted(nothing, new, self._memory.closed_us, self.settled_us)
        doubtful = np.flatnonzero(self._assigner.doubtful(new, self._memory.closed_us))
        rows = new.take(doubtful)
        for some, index in self._looked_up(rows):
            accepted[doubtful[some]] = self._assigner.accepted(
                index, rows.take(some), self._memory.closed_us, self.settled_us
            )
        return accepted

    def misses_own(self, new: Table) -> Flags:
        """A mask of the rows that come too late for the window that ends at them. Later windows may still take them."""
        return self._assigner.misses_own(new, self._memory.closed_us)

    def owners(self, rows: Table) -> Ints:
        """The id of the session that each row of a block belongs to, by its key and ``first``. -1: no live session."""
        assert isinstance(self._assigner, Sessions), "only a session owns its rows; other windows may share them"
        owners = np.full(len(rows), -1, np.int64)
        for some, index in self._looked_up(rows.replaced(hash=hashes_of(rows))):
            owners[some] = self._assigner.owners(index, rows.take(some))
        return owners

    def _looked_up(self, rows: Table) -> Iterator[tuple[Ints, Table]]:
        """Some rows at a time: their numbers, and an index that has all rows of their keys.

        If more pages are needed than are in memory at once, they do not stay there.
        """
        if not len(rows):
            return
        first, *others = self._memory.kept.groups(self._memory.kept.of(rows["hash"]))
        if not others:
            self._memory.read(first.pages)
            yield first.items, self._memory.index
            return
        for group in (first, *others):
            yield group.items, self._memory.kept.peek(group.pages)[0] if len(group.pages) else self._memory.index

    def add(self, new: Table, seqs: Ints) -> None:
        """Adds rows to those of the batch. ``seqs``: of each row's block."""
        ids = np.arange(self.next_id, self.next_id + len(new))
        self.next_id += len(new)
        zeros = np.zeros(len(new), np.int64)
        self.waiting.add(Table(new.keys, {**new.columns, "id": ids, "seq": seqs, "late_events": zeros}))

    def join(self, turn: Turn) -> int:
        """The rows of the batch join their windows. Returns how many of their events came late.

        Not before all are there: whether an event is late or too late must not depend on the order in which the groups
        of a batch come, because Spark's shuffle changes it when a task runs again.
        """
        self._memory.at_us = now_us = turn.at_us
        rows, late = len(self.waiting), [(_NOTHING, _NOTHING)]
        for piece in self.waiting.take():
            groups = self._memory.kept.groups(self._memory.kept.of(piece["hash"]))
            if len(groups) > 1 or len(piece) < rows:
                if not self._joined:
                    self._make_pages(piece, rows)
                groups = self._memory.kept.groups(self._memory.kept.of(piece["hash"]))
            late.extend(self._join(piece, some, now_us) for some in self._memory.in_groups(groups) if len(some))
            if len(piece) < rows:
                self._memory.let_pages_go(self._memory.kept.pages)
        ends, events = (np.concatenate(column) for column in zip(*late, strict=True))
        if now_us is None or not len(ends):
            return 0
        observe_late(self._memory.bound, ends, events, now_us)
        cells, cell_of = np.unique(self._memory.cells.of(ends), return_inverse=True)
        came = sums_by(cell_of, events, len(cells))
        self._memory.cells.table.came(self._memory.cells.rows(cells), came, np.ones(len(cells), np.bool_), 0)
        return sum_of(events)

    def _make_pages(self, rows: Table, all_rows: int) -> None:
        """Makes about as many pages as the rows of the batch need. ``rows``: some of them."""
        self._memory.let_pages_go(self._memory.kept.pages)
        there = self._memory.kept.rest.sums["rows"]
        if self._assigner.by_event:
            most = there + all_rows
        else:  # they are at least as many as either the keys that came or what is there
            hashes = np.sort(rows["hash"])  # np.unique is ten times slower
            keys = 1 + int(np.count_nonzero(hashes[1:] != hashes[:-1]))
            most = max(there, keys * all_rows // len(rows))
        self._memory.resize(max(self._memory.kept.wanted(most), self._memory.kept.pages))

    def _join(self, piece: Table, some: Ints, now_us: int | None) -> tuple[Ints, Ints]:
        """Some rows join the windows in memory. Returns the ends of windows, and how many events came late for them."""
        rows = piece if len(some) == len(piece) else piece.take(some)
        self._joined.append(self._memory.kept.each_of(rows["hash"]))
        self.reach_us = max(self.reach_us, self._assigner.reaches(rows))
        added = self._assigner.add(self._memory.index, rows, now_us)
        self._memory.replace(added.grown)
        ends, end_of = np.unique(added.late_ends_us, return_inverse=True)
        return ends, sums_by(end_of, added.late_events, len(ends))

    def pages_left(self) -> Ints:
        """The pages that rows of the batch are in and that are not in memory any more."""
        return self._memory.kept.missing(np.concatenate([_NOTHING, *self._joined]))

    def snapshot(self) -> dict[str, Any]:
        return {"settled_us": self.settled_us, "reach_us": self.reach_us, "next_id": self.next_id}
