"""Converts result rows to pandas frames for pyspark without losing values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from state_backends.thresholds import threshold

FRAME_ROWS = threshold(1024)
FRAME_BYTES = threshold(1 << 20, 256)


def frames_of(results: Iterator[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
    """Yields the rows as frames. Few rows wait for more, since a frame has a cost of its own, in pandas and pyspark."""
    waiting: list[pa.RecordBatch] = []
    for batch in results:
        if batch.num_rows:
            waiting.append(batch)
            if sum(b.num_rows for b in waiting) >= FRAME_ROWS or batch.nbytes >= FRAME_BYTES:
                yield _joined(waiting)
                waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pd.DataFrame:
    return to_frame(batches[0] if len(batches) == 1 else pa.concat_batches(batches))


def to_frame(batch: pa.RecordBatch) -> pd.DataFrame:
    """Converts a batch to pandas with Arrow's types, so that integers with nulls stay integers and times stay exact.

    pyspark makes Arrow arrays of the frame again. Columns of pandas with Arrow's types come through as they are, and
    nested ones do, too, if nothing takes their values for objects of Python: see :class:`_Nested`.
    """
    columns = {
        name: pd.Series(_Nested(column) if pa.types.is_nested(column.type) else pd.arrays.ArrowExtensionArray(column))
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return pd.DataFrame(columns, index=pd.RangeIndex(batch.num_rows))


class _Nested(pd.arrays.ArrowExtensionArray):
    """Nested values that stay Arrow's.

    pyspark converts each nested value to objects that it takes for the right ones. Not all values have such objects:
    Python has no years after 9999 and no maps whose keys are structs. Beside a null, integers would become doubles, and
    NaN would become null. So a function that is applied to these values changes nothing, and a single one is a scalar
    of Arrow.
    """

    def map(self, mapper: Any, na_action: Any = None) -> _Nested:
        return self

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, int | np.integer):
            return super().__arrow_array__()[int(item)]
        return super().__getitem__(item)

    def __arrow_array__(self, type: pa.DataType | None = None) -> Any:
        values = super().__arrow_array__()
        return values if type is None or values.type == type else values.cast(type)
