"""The gaps that events bring for their sessions: a column of intervals, or of strings like ``"30 minutes"``. Pure.

A gap is int64 microseconds. A number that is not positive stands for a gap that cannot be used, and says why. The event
then belongs to no session.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.base.numbers import LONGEST_US, NEVER
from aion.base.time import duration_us
from aion.errors import ConfigError
from policies.durations import short_duration

Micros = npt.NDArray[np.int64]

_NULL, _NO_DURATION, _TOO_LONG = -NEVER, -NEVER + 1, -NEVER + 2
_REASONS = {
    _NULL: "the gap is null",
    _NO_DURATION: "the gap is not a duration like '30 minutes'",
    _TOO_LONG: f"the gap is longer than {short_duration(LONGEST_US)}",
}
_NOT_POSITIVE = "the gap is not positive"
_UNITS_US = {"s": 1_000_000, "ms": 1_000, "us": 1}


def is_gap(type_: pa.DataType) -> bool:
    """Returns whether a column of this type can say the gap of each event."""
    return bool(pa.types.is_duration(type_) or pa.types.is_string(type_) or pa.types.is_large_string(type_))


def gaps_us(column: pa.Array) -> Micros:
    """Returns the gap of each event, in microseconds. At most 0 if it cannot be used. ``column``: of a type of
    :func:`is_gap`.

    A part of a microsecond does not count. Strings are read once for each distinct one.
    """
    gaps = _of_durations(column) if pa.types.is_duration(column.type) else _of_strings(column)
    if column.null_count:
        gaps = np.where(column.is_null().to_numpy(zero_copy_only=False), _NULL, gaps)
    return gaps


def unusable(gaps: Micros) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Why some gaps cannot be used: each reason with a mask of its events. Yields nothing if all can be used."""
    bad = gaps <= 0
    for code in np.unique(np.where(gaps[bad] > _TOO_LONG, 0, gaps[bad])).tolist():
        yield (_REASONS[code], gaps == code) if code else (_NOT_POSITIVE, bad & (gaps > _TOO_LONG))


def _of_durations(column: pa.Array) -> Micros:
    values = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    if column.type.unit == "ns":
        return np.asarray(values // 1_000)
    unit_us = _UNITS_US[column.type.unit]
    most = LONGEST_US // unit_us
    gaps = np.clip(values, -most, most) * unit_us
    return np.where(values > most, _TOO_LONG, gaps)


def _of_strings(column: pa.Array) -> Micros:
    distinct = column.dictionary_encode()
    gaps = np.array([_of_string(text) for text in distinct.dictionary.to_pylist()] or [_NULL], np.int64)
    return np.asarray(gaps[distinct.indices.fill_null(0).to_numpy(zero_copy_only=False)])


def _of_string(text: Any) -> int:
    try:
        gap_us = duration_us(text)
    except ConfigError:
        return _NO_DURATION
    return max(gap_us, -LONGEST_US) if gap_us <= LONGEST_US else _TOO_LONG
