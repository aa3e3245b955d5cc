"""Columns of numbers packed into text, for the parts of a snapshot that have a row for each window. Pure.

As plain JSON, the rows of a week's windows are larger than everything else in a version, and every version writes them
again. Packed, neighbouring rows that look alike cost next to nothing (docs/reference/formats.md).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.errors import FormatError

Ints = npt.NDArray[np.int64]

_VERSION = 1


def pack(columns: Iterable[npt.NDArray[np.integer]]) -> str:
    """Returns columns of integers as text: differences, then all lowest bytes, all second bytes, and so on, then
    deflated.
    """
    parts = [np.array([_VERSION], "<i8").tobytes()]
    for column in columns:
        values: Ints = np.diff(np.concatenate([np.zeros(1, np.int64), column.astype(np.int64)]))
        zigzag: Ints = ((values << 1) ^ (values >> 63)).astype("<i8")
        planes = zigzag.view(np.uint8).reshape(-1, 8).T
        parts += [np.array([len(values)], "<i8").tobytes(), planes.tobytes()]
    return base64.b64encode(zlib.compress(b"".join(parts), 1)).decode("ascii")


def unpack(text: str) -> list[Ints]:
    """Returns the columns of :func:`pack`. Raises FormatError if the text is damaged or a newer Aion wrote it."""
    try:
        raw = zlib.decompress(base64.b64decode(text))
    except (ValueError, zlib.error) as error:
        raise FormatError(f"packed columns that cannot be read: {error}") from error
    version = int(np.frombuffer(raw, "<i8", 1)[0])
    if version != _VERSION:
        raise FormatError(f"packed columns of format {version}: this Aion reads {_VERSION}")
    columns, at = [], 8
    while at < len(raw):
        length = int(np.frombuffer(raw, "<i8", 1, at)[0])
        planes = np.frombuffer(raw, np.uint8, 8 * length, at + 8).reshape(8, length)
        zigzag = np.ascontiguousarray(planes.T).view("<u8").reshape(-1).astype(np.uint64)
        values = (zigzag >> np.uint64(1)).view(np.int64) ^ -(zigzag & np.uint64(1)).view(np.int64)
        columns.append(np.cumsum(values))
        at += 8 + 8 * length
    return columns


def table(columns: Mapping[str, Sequence[float]], doubles: Container[str] = ()) -> dict[str, Any]:
    """Returns columns of equal length as a JSON value: ``columns`` (coding and step of each) and ``packed``.

    Columns named in ``doubles`` are stored as the integers with the same bits. The integers of a column are stored
    divided by their common divisor, its step.
    """
    coded: dict[str, list[Any]] = {}
    packed: list[Ints] = []
    for name, values in columns.items():
        integers = np.array(values, np.float64).view(np.int64) if name in doubles else np.array(values, np.int64)
        step = max(int(np.gcd.reduce(integers)) if len(integers) else 1, 1)
        integers = integers // step
        runs_on = _width(np.diff(integers)) < _width(integers)
        coding = "double" if name in doubles else "differences" if runs_on else "plain"
        coded[name] = [coding, step]
        packed.append(integers if coding == "differences" else np.cumsum(integers))
    return {"columns": coded, "packed": pack(packed)}


def untable(value: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the columns of :func:`table`."""
    found: dict[str, list[Any]] = {}
    for (name, (coding, step)), column in zip(value["columns"].items(), unpack(value["packed"]), strict=True):
        integers = (column if coding == "differences" else np.diff(column, prepend=0)) * step
        found[name] = (integers.view(np.float64) if coding == "double" else integers).tolist()
    return found


def _width(integers: Ints) -> float:
    """About how many bits the integers take."""
    return float(np.log2(np.abs(integers.astype(np.float64)) + 1.0).sum())
