"""Groups the rows of a shard by key: frames of pandas, or Spark's rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import IntegralType, Row, StructType

from aion.stateful.encoding import Codec, normalized
from aion.stateful.packing import pack, unpack


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
        self._integral = [isinstance(field.dataType, IntegralType) for field in schema]

    def values(self, values: Iterable[Any]) -> tuple[Any, ...]:
        """A key as the processor sees it. pandas has turned integers into doubles where one of them is null."""
        return tuple(
            _whole(value) if integral and isinstance(value, float) else value
            for value, integral in zip(values, self._integral, strict=True)
        )

    def to_bytes(self, values: tuple[Any, ...]) -> bytes:
        plain = self._codec.plain(tuple(None if value is pd.NaT else value for value in values))
        return pack([_canonical(value) for value in plain])

    def to_row(self, key: bytes) -> Row:
        """A key as Spark hands it to ``handleExpiredTimer``."""
        return self._codec.row(unpack(key))


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)


def _canonical(value: Any) -> Any:
    """One zero and one NaN, at every depth."""
    if isinstance(value, float):
        return math.nan if math.isnan(value) else value + 0.0
    return [_canonical(inner) for inner in value] if isinstance(value, list) else value


def group_frames(
    frames: Sequence[pd.DataFrame], keys: Keys, key: Sequence[str], values: Sequence[str]
) -> Iterator[Group]:
    """The groups of frames with the columns ``key`` and ``values``. The processor gets the latter.

    Keys come in the order of their first row, the rows of a key in the order of arrival.
    """
    if not frames:
        return
    frame = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
    codes, count = _codes(frame, keys, key)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=count)).tolist()
    firsts = order[[0, *ends[:-1]]]
    of_keys = [frame[name].take(firsts) for name in key]
    ordered = frame[list(values)].take(order)
    begin = 0
    for end, *parts in zip(ends, *of_keys, strict=True):
        found = keys.values(parts)
        # Nobody else reads these rows, so the user may change them.
        part = ordered.iloc[begin:end].copy(deep=False)
        part.index = pd.RangeIndex(end - begin)
        yield Group(keys.to_bytes(found), found, iter((part,)), end - begin)
        begin = end


def _codes(frame: pd.DataFrame, keys: Keys, key: Sequence[str]) -> tuple[npt.NDArray[np.int64], int]:
    """The number of the key of each row, and how many keys there are. Keys are numbered by their first row."""
    try:
        if len(key) == 1:
            codes, uniques = pd.factorize(frame[key[0]], use_na_sentinel=False)
            return codes.astype(np.int64, copy=False), len(uniques)
        found = frame.groupby(list(key), sort=False, dropna=False).ngroup().to_numpy()
        return found.astype(np.int64, copy=False), int(found.max()) + 1
    except TypeError:  # lists and dicts have no hash
        numbers: dict[bytes, int] = {}
        rows = zip(*(frame[name] for name in key), strict=True)
        listed = [numbers.setdefault(keys.to_bytes(keys.values(map(_listed, row))), len(numbers)) for row in rows]
        return np.array(listed, np.int64), len(numbers)


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else normalized(value)


def group_table(table: pa.Table, keys: Keys, key: Sequence[str], width: int) -> Iterator[Group]:
    """The groups of the rows of a table. ``key``: the columns of the key. ``width``: how many the processor gets."""
    if not table.num_rows:
        return
    names = table.column_names
    columns = [table.column(names.index(name)) for name in key]
    codes, firsts = _table_codes(columns, keys)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes)).tolist()
    taken = pa.array(order)
    lists = [table.column(i).take(taken).to_pylist() for i in range(width)]
    template, new = Row(*names[:width]), tuple.__new__

    def make(*values: Any) -> Row:
        row = new(Row, values)
        row.__fields__ = template
        return row

    begin = 0
    for end, *values in zip(ends, *(column.take(firsts).to_pylist() for column in columns), strict=True):
        rows = map(make, *(values_of[begin:end] for values_of in lists))
        yield Group(keys.to_bytes(tuple(values)), tuple(values), rows, end - begin)
        begin = end


def _table_codes(columns: Sequence[pa.ChunkedArray], keys: Keys) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """The number of the key of each row, and the first row of each key."""
    numbers: dict[bytes, int] = {}
    try:
        combined = np.zeros(len(columns[0]), np.int64)
        for column in columns:
            encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
            part = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
            _, combined = np.unique(combined * (len(encoded.dictionary) + 1) + part, return_inverse=True)
        _, firsts = np.unique(combined, return_index=True)
    except pa.ArrowNotImplementedError:  # lists and structs
        combined, firsts = (np.arange(len(columns[0])),) * 2
    # Different values of Arrow may be one key: 0.0 and -0.0.
    values = zip(*(column.take(pa.array(firsts)).to_pylist() for column in columns), strict=True)
    merged = np.array([numbers.setdefault(keys.to_bytes(value), len(numbers)) for value in values], np.int64)
    codes = merged[combined]
    if len(numbers) < len(merged):
        _, at = np.unique(merged, return_index=True)
        firsts = firsts[at]
        return codes, pa.array(firsts)
    return codes, pa.array(firsts[np.argsort(merged)])
