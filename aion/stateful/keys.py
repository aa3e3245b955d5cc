"""Groups the rows of a shard by key: frames of pandas, or Spark's rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import DoubleType, FloatType, LongType, Row, StructType

from aion.stateful.encoding import Codec
from aion.stateful.packing import pack, unpack
from aion.stateful.rows import python_values, row_maker
from state_backends.thresholds import threshold

_CODES_AT_ONCE = threshold(1 << 16, 1)
_ROWS_AT_ONCE = threshold(4096)
"""Rows are made for several keys together, up to this number. A key with more gets its rows one by one."""


class Group(NamedTuple):
    """The rows of one key. ``key``: as its bytes. ``values``: as the processor sees it. ``rows``: frames, or rows."""

    key: bytes
    values: tuple[Any, ...]
    rows: Iterator[Any]
    events: int


class Keys:
    """Converts grouping keys. Keys that Spark takes for equal have the same bytes."""

    def __init__(self, schema: StructType) -> None:
        self._codec = Codec(schema)
        self._floating = [isinstance(field.dataType, FloatType | DoubleType) for field in schema]
        self._long = [isinstance(field.dataType, LongType) for field in schema]

    def values(self, values: Iterable[Any]) -> tuple[Any, ...]:
        """Returns a key as the processor sees it. pandas has turned integers into doubles where one of them is null;
        those that a double cannot hold come as text.

        Since pandas 3, a null among texts is a NaN as well. With every version of pandas it is None here, and so the
        same key.
        """
        return tuple(
            int(value)
            if long and isinstance(value, str)
            else _whole(value)
            if not floating and isinstance(value, float)
            else value
            for value, floating, long in zip(values, self._floating, self._long, strict=True)
        )

    def to_bytes(self, values: tuple[Any, ...]) -> bytes:
        return self.packed(self._codec.plain(tuple(None if value is pd.NaT else value for value in values)))

    def packed(self, plain: Iterable[Any]) -> bytes:
        """Returns the bytes of a key in its plain form."""
        return pack([_canonical(value) for value in plain])

    def to_row(self, key: bytes) -> Row:
        """Returns a key as Spark hands it to ``handleExpiredTimer``."""
        return self._codec.row(unpack(key))


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)


def _canonical(value: Any) -> Any:
    """Leaves one zero and one NaN, at every depth."""
    if isinstance(value, float):
        return math.nan if math.isnan(value) else value + 0.0
    return [_canonical(inner) for inner in value] if isinstance(value, list) else value


def group_frames(frames: Sequence[pd.DataFrame], keys: Keys, key: Sequence[int], values: slice) -> Iterator[Group]:
    """Yields the groups of frames. ``key``: where the columns of the key are. ``values``: those that the processor
    gets.

    Not by name: pyspark gives a column another name if its own cannot be that of a field, such as ``_id``. The rows of
    a key come in the order of arrival.
    """
    if not frames:
        return
    frame = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
    columns = [frame.iloc[:, at] for at in key]
    order, edges = _stretches(_frame_codes(columns))
    rows = zip(*(column.take(order[edges[:-1]]) for column in columns), strict=True)
    order, edges, found = _by_bytes(order, edges, (keys.values(map(_listed, row)) for row in rows), keys)
    ordered = frame.iloc[:, values].take(order)
    inferred = [at for at in range(ordered.shape[1]) if _has_another_type(ordered.iloc[:, at])]
    for (data, of_key), (begin, end) in zip(found, pairwise(edges.tolist()), strict=True):
        # Nobody else reads these rows, so the user may change them.
        part = ordered.iloc[begin:end].copy(deep=False)
        part.index = pd.RangeIndex(end - begin)
        for at in inferred:
            part.isetitem(at, part.iloc[:, at].infer_objects().array)
        yield Group(data, of_key, iter((part,)), end - begin)


def group_table(table: pa.Table, keys: Keys, key: Sequence[int], names: Sequence[str]) -> Iterator[Group]:
    """Yields the groups of the rows of a table. ``key``: where the columns of the key are.

    ``names``: of the first columns, which the processor gets. The rows of a key come in the order of arrival.
    """
    if not table.num_rows:
        return
    columns = [table.column(at) for at in key]
    order, edges = _stretches(_table_codes(columns))
    firsts = pa.array(order[edges[:-1]])
    values = zip(*(column.take(firsts).to_pylist() for column in columns), strict=True)
    order, edges, found = _by_bytes(order, edges, values, keys)
    taken = pa.array(order)
    lists = [python_values(table.column(at).take(taken)) for at in range(len(names))]
    make, begins = row_maker(names), edges.tolist()
    rows: list[Any] = []
    first = 0  # of these rows
    for at, (data, of_key) in enumerate(found):
        begin, end = begins[at : at + 2]
        if end - first > len(rows):
            upto = begins[max(at + 1, bisect_right(begins, begin + _ROWS_AT_ONCE) - 1)]
            made = map(make, zip(*(values_of[begin:upto] for values_of in lists), strict=True))
            if upto - begin > _ROWS_AT_ONCE:
                yield Group(data, of_key, made, end - begin)
                continue
            first, rows = begin, list(made)
        yield Group(data, of_key, iter(rows[begin - first : end - first]), end - begin)


def distinct_keys(table: pa.Table, keys: Keys, key: Sequence[int]) -> list[bytes]:
    """Returns the keys of the rows of a table, as their bytes, in the order of arrival. ``key``: where its columns
    are.
    """
    columns = [table.column(at) for at in key]
    order, edges = _stretches(_table_codes(columns))
    taken = pa.array(np.sort(order[edges[:-1]]))
    values = zip(*(column.take(taken).to_pylist() for column in columns), strict=True)
    return list(dict.fromkeys(map(keys.to_bytes, values)))


def _frame_codes(columns: Sequence[pd.Series]) -> npt.NDArray[np.int64]:
    """Returns a number for each row, from 0 on. Rows with the same number have the same key."""
    try:
        if len(columns) == 1:
            return pd.factorize(columns[0], use_na_sentinel=False)[0].astype(np.int64, copy=False)
        groups = columns[0].groupby(list(columns), sort=False, dropna=False)
        return groups.ngroup().to_numpy().astype(np.int64, copy=False)
    except TypeError:  # lists and dicts have no hash
        return np.arange(len(columns[0]))


def _has_another_type(column: pd.Series) -> bool:
    """Returns whether a column holds objects only because other keys have nulls in it.

    This happens to booleans. With Spark's option for integers that may be null, it happens to integers, too.
    """
    return column.dtype == object and pd.api.types.infer_dtype(column, skipna=True) in ("boolean", "integer")


def _table_codes(columns: Sequence[pa.ChunkedArray]) -> npt.NDArray[np.int64]:
    """Returns a number for each row, from 0 on. Rows with the same number have the same key."""
    combined = np.zeros(len(columns[0]), np.int64)
    try:
        for column in columns:
            encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
            part: npt.NDArray[np.int64] = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
            if len(columns) == 1:
                return part
            _, combined = np.unique(combined * (len(encoded.dictionary) + 1) + part, return_inverse=True)
    except pa.ArrowNotImplementedError:  # Arrow has no dictionaries of lists and structs
        return np.arange(len(columns[0]))
    return combined


def _by_bytes(
    order: npt.NDArray[np.int64], edges: npt.NDArray[np.int64], values: Iterable[tuple[Any, ...]], keys: Keys
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[tuple[bytes, tuple[Any, ...]]]]:
    """Merges stretches of keys that have the same bytes, such as 0.0 and -0.0. Returns the stretches and their keys.

    ``order`` and ``edges``: see :func:`_stretches`. ``values``: the key of each stretch.
    """
    numbers: dict[bytes, int] = {}
    found: list[tuple[bytes, tuple[Any, ...]]] = []
    merged = []
    for value in values:
        data = keys.to_bytes(value)
        number = numbers.setdefault(data, len(found))
        if number == len(found):
            found.append((data, value))
        merged.append(number)
    if len(found) < len(merged):
        codes = np.empty(len(order), np.int64)
        codes[order] = np.repeat(merged, np.diff(edges))
        order, edges = _stretches(codes)
    return order, edges, found


def _stretches(codes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the order of rows by their numbers, those of a number as they arrived, and where each number begins and
    ends.

    Every number from 0 up to the largest one has rows.
    """
    edges = np.concatenate([[0], np.cumsum(np.bincount(codes))])
    # numpy sorts 16 bits at a time in linear time, which takes a quarter of the time of a sort of 64 bits.
    order = np.argsort(codes.astype(np.uint16), kind="stable")
    if len(edges) - 1 > _CODES_AT_ONCE:
        order = order[np.argsort((codes >> 16)[order].astype(np.uint16), kind="stable")]
    return order, edges


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
