"""Sorts rows by several columns at once, by small integers that stand for the values. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Codes = tuple[npt.NDArray[np.int32], int]
_MOST = 2**63 - 1


def codes_of(column: pa.ChunkedArray) -> Codes:
    """A small integer for each value, numbered by first appearance, and the number of different values."""
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    return encoded.indices.to_numpy(zero_copy_only=False), len(encoded.dictionary)


def ranks_of(values: npt.NDArray[np.int64]) -> Codes:
    """A small integer for each value, in the order of the values, and the number of different values."""
    encoded = pa.array(values).dictionary_encode()
    distinct = encoded.dictionary.to_numpy()
    ranks = np.empty(len(distinct), np.int32)
    ranks[np.argsort(distinct)] = np.arange(len(distinct), dtype=np.int32)
    return ranks[encoded.indices.to_numpy()], len(distinct)


def sorted_by(codes: list[Codes], rows: int) -> npt.NDArray[np.int64] | None:
    """The rows sorted by the codes, the first code first, or None if they are sorted already. The sort is stable."""
    total = 1
    combined = np.zeros(rows, np.int64)
    for indices, distinct in codes:
        if total * distinct > _MOST:  # the product would overflow: number them again, in the same order
            combined = np.unique(combined, return_inverse=True)[1]
            total = rows
        total *= max(distinct, 1)
        combined = combined * max(distinct, 1) + indices
    if bool((combined[1:] >= combined[:-1]).all()):
        return None
    # numpy sorts 16-bit integers by radix, in linear time.
    small = combined.astype(np.uint16) if total <= 1 << 16 else combined
    return np.argsort(small, kind="stable")
