"""What a batch changed of the result of a join: each pair once, with the values before it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.core.join.plan import PAIR
from aion.core.life.actions import PaneKind


class Net:
    """Keeps the results of a batch until its end, because a later one may take an earlier one back."""

    def __init__(self) -> None:
        self._results: list[pa.RecordBatch] = []

    def take(self, results: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Keeps pairs. Yields dropped rows."""
        for batch in results:
            is_dropped = pc.equal(batch.column("kind"), PaneKind.DROPPED.value)
            if is_dropped.true_count:
                yield batch.filter(is_dropped)
            if is_dropped.true_count < batch.num_rows:
                self._results.append(batch.filter(pc.invert(is_dropped)))

    def end_batch(self) -> Iterator[pa.RecordBatch]:
        """Yields the last row of each pair that is there now and was not before the batch, or the other way round."""
        if not self._results:
            return
        rows = pa.Table.from_batches(self._results).combine_chunks()
        self._results.clear()
        pairs = rows.column(PAIR).combine_chunks().dictionary_encode().indices.to_numpy()
        _, first = np.unique(pairs, return_index=True)
        last = len(pairs) - 1 - np.unique(pairs[::-1], return_index=True)[1]
        gone = pc.equal(rows.column("kind"), PaneKind.RETRACTED.value).to_numpy()
        # A row that is taken back first was there before the batch.
        changed = np.sort(last[gone[first] == gone[last]])
        yield from rows.take(pa.array(changed)).combine_chunks().to_batches()
