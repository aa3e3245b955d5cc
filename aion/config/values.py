"""The types of policy values: how each is written, what it is parsed to, and the error message if it is wrong.

The string at the end of an annotation describes the type for users; the reference page shows it.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, PlainValidator, WithJsonSchema, WrapValidator

from aion.base.time import duration_us, format_duration
from aion.errors import ConfigError

_MAX_BOUND_US = 3_652_500 * 86_400_000_000  # 10,000 years: a window's end plus the bound fits in 64 bits
_MAX_BLOCK_BYTES = 1 << 30  # a value in a Spark row is at most 2 GiB, and a block may exceed its target
_MAX_SHARDS = 1 << 15  # as many key groups as Flink allows; every row looks its shard up among all of them
_MAX_THREADS = 1024
_MAX_LEVELS = 64
_MAX_NODES = 1_000_000
_MAX_PORT = 65_535
_MAX_COUNT = 1 << 53  # the largest integer that a JSON number holds exactly
_SIZE = re.compile(r"\s*([+-]?\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", re.ASCII)
_PLAIN = re.compile(r"\s*([+-]?\d{0,20}\.?\d{1,20}(?:[eE][+-]?\d{1,3})?)\s*()", re.ASCII)
_MARKED = re.compile(r"\s*([+-]?\d{0,20}\.?\d{1,20})\s*([%x])\s*", re.ASCII)
_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{tail}": base**power
    for base, tail in ((1024, "ib"), (1000, "b"))
    for power, letter in enumerate("kmgt", start=1)
}
_SCHEMES = ("file", "s3", "s3a", "gs", "hdfs", "viewfs")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # at least two letters: one would be a drive
_SECRET = re.compile(r"secret|token|password|key|sig", re.IGNORECASE)
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


class FileNumber(int):
    """An integer from YAML or JSON. There, a number without a unit is not a duration."""


def show(value: object) -> str:
    """The value as YAML writes it, shortened to fit on a line."""
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value)) or _repr.repr(value)


# -- sizes and durations ------------------------------------------------------------------------------


def size_bytes(value: object, *, what: str = "size") -> int:
    """Bytes of ``"512MiB"``, ``"1.5 GB"``, ``"4096"`` or an int; a fraction of a byte is cut off.

    Raises ConfigError naming ``what`` for anything else, and for less than 1 byte.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    part = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if part is None or ("." in part[1] and not part[2]):
        raise ConfigError(f"{what}: {show(value)} is not a size; write e.g. '64MiB', or a number of bytes")
    number, unit = part.groups()
    if unit.lower() not in _SIZE_UNITS:
        # Spark's own sizes ('512m') are binary, so the message says how to write such a size here.
        spark = f"'{text}' of Spark is '{number}{unit.upper()}iB' here; " if unit.lower() in "kmgt" else ""
        raise ConfigError(
            f"{what}: {show(value)} has the unknown unit {unit!r}; "
            f"{spark}units are B, KiB MiB GiB TiB (1024) and KB MB GB TB (1000)"
        )
    size = int(Decimal(number) * _SIZE_UNITS[unit.lower()])
    if not 1 <= size < 1 << 63:
        raise ConfigError(f"{what}: {show(value)} is out of range; a size is at least 1 byte, e.g. '64MiB'")
    return size


def format_bytes(size: int) -> str:
    """The shortest exact text that :func:`size_bytes` reads back: ``67108864`` -> ``"64MiB"``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return f"{size}B"


def _block_size(size: int) -> int:
    if size > _MAX_BLOCK_BYTES:
        raise ConfigError(f"{format_bytes(size)} is too large for a Spark row; write at most '1GiB'")
    return size


def _bound(value: Any) -> int:
    # From Spark's configuration everything comes as text.
    bound_us = 0 if isinstance(value, str) and value.strip() == "0" else duration_us(value)
    if bound_us < 0:
        raise ConfigError(f"{show(value)} is negative; write 0 or more, e.g. '10m'")
    if bound_us > _MAX_BOUND_US:
        raise ConfigError(f"{show(value)} is too long; write at most '3652500 days'")
    if bound_us and isinstance(value, FileNumber):
        raise ConfigError(f"{value} has no unit; write e.g. '{value}s' or '{value}m'")
    return bound_us


def _timeout(value: Any) -> int:
    timeout_us = _bound(value)
    if not 100_000 <= timeout_us <= 86_400_000_000:
        raise ConfigError(f"{show(value)} is out of range; write a duration from '100ms' to '1 day', e.g. '60s'")
    return timeout_us


# -- shares and multiples -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """A percentage, above 0 and at most 100, of a number that is known only where the policy is used."""

    percent: float

    def of(self, whole: int) -> int:
        """This share of ``whole``, but at least 1."""
        return max(1, int(whole * self.percent / 100))

    def __str__(self) -> str:
        return f"{_positional(self.percent)}%"


@dataclass(frozen=True, slots=True)
class Multiple:
    """A multiple, above 0, of the median time of an execution."""

    times: float

    def __str__(self) -> str:
        return f"{_positional(self.times)}x"


def _positional(number: float) -> str:
    """25.0 as "25", 1e-07 as "0.0000001": the shortest text that reads back to the same number, without an exponent."""
    text = format(Decimal(repr(float(number))), "f")  # float: numpy's numbers have another repr
    return text.removesuffix(".0")


def _number(value: object, mark: str) -> float | None:
    """The number in ``"25%"`` if the mark is "%". None if the value does not have that form."""
    part = (_MARKED if mark else _PLAIN).fullmatch(value) if isinstance(value, str) else None
    return float(part[1]) if part is not None and part[2] == mark else None


def _budget(value: Any) -> int | Share:
    if isinstance(value, Share):
        value = str(value)
    percent = _number(value, "%")
    if percent is None:
        if isinstance(value, float) and 0 < value < 1:
            raise ConfigError(f"{show(value)} is not a size; write it as a share, '{Share(round(value * 100, 9))}'")
        return size_bytes(value)
    if not 0 < percent <= 100:
        raise ConfigError(f"{show(value)} is out of range; a share is above 0% and at most 100%, e.g. '25%'")
    return Share(percent)


def _fraction(value: Any) -> float:
    percent, number = _number(value, "%"), _number(value, "")
    if percent is not None:
        number = float(Decimal(repr(percent)) / 100)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e300 else math.inf
    if number is None or not 0 <= number <= 1:
        raise ConfigError(f"{show(value)} is not a share; write a number from 0 to 1, e.g. 0.75, or '75%'")
    return number + 0.0  # turns -0.0 into 0.0


def _positive_fraction(value: Any) -> float:
    share = _fraction(value)
    if not share:
        raise ConfigError(f"{show(value)} is out of range; write a share above 0, e.g. 0.75, or '75%'")
    return share


def _idle(value: Any) -> int | Multiple | None:
    if value is None:
        return None
    if isinstance(value, Multiple):
        value = str(value)
    times = _number(value, "x")
    if times is not None:
        if not 0 < times <= 1e9:
            raise ConfigError(f"{show(value)} is out of range; write a multiple above 0, e.g. '3x'")
        return Multiple(times)
    try:
        idle_us = _bound(value)
    except ConfigError as error:
        raise ConfigError(f"{error}; or a multiple of the median time of an execution, e.g. '3x'; or null") from None
    if idle_us == 0:
        raise ConfigError(
            f"{show(value)} is not an idle time; write a duration above 0, a multiple, e.g. '3x', or null"
        )
    return idle_us


def _format_idle(value: int | Multiple | None) -> str | None:
    return None if value is None else format_duration(value) if isinstance(value, int) else str(value)


# -- counts and places ----------------------------------------------------------------------------------


def _whole(value: object) -> int | None:
    """The integer, which may be written as a string: values in Spark's configuration are strings."""
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value
    return int(number) if isinstance(number, int) and not isinstance(number, bool) else None


def _count_or_auto(most: int, what: str) -> Callable[[object], object]:
    def count(value: object) -> object:
        number = _whole(value)
        if value != "auto" and (number is None or not 1 <= number <= most):
            raise ConfigError(f"{show(value)} is not a number of {what}; write 'auto' or an integer from 1 to {most:,}")
        return value if number is None else number

    return count


def _between(least: int, most: int, what: str) -> Callable[[object], int]:
    def number_of(value: object) -> int:
        number = _whole(value)
        if number is None or not least <= number <= most:
            raise ConfigError(f"{show(value)} is not a number of {what}; write an integer from {least} to {most:,}")
        return number

    return number_of


def _switch(value: object, parse: Callable[[object], bool]) -> bool:
    try:
        return parse(value)
    except ValueError:
        raise ConfigError(f"{show(value)} is not a switch; write true or false") from None


def _port(value: object) -> int | None:
    number = _whole(value)
    if value is not None and (number is None or not 0 <= number <= _MAX_PORT):
        raise ConfigError(f"{show(value)} is not a port; write an integer from 0 to {_MAX_PORT}, or null")
    return number


def _at_least_one(what: str, or_else: str) -> Callable[[object], int]:
    def count(value: object) -> int:
        number = _whole(value)
        if number is None or not 1 <= number <= _MAX_COUNT:
            raise ConfigError(f"{show(value)} is not a number of {what}; write an integer from 1{or_else}")
        return number

    return count


def _late_share(value: object) -> float | None:
    if value is None:
        return None
    share = _number(value, "") if isinstance(value, str) else value
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1e9:
        raise ConfigError(f"{show(value)} is not a share of late work; write a number from 0, e.g. 2, or null")
    return float(share)


def _open_fraction(value: Any) -> float:
    share = _fraction(value)
    if not 0 < share < 1:
        raise ConfigError(f"{show(value)} is out of range; write a share above 0 and below 1, e.g. 0.05")
    return share


def _interval(value: Any) -> int:
    interval_us = _bound(value)
    if interval_us == 0:
        raise ConfigError(f"{show(value)} is not an interval; write a duration above 0, e.g. '1m'")
    return interval_us


def _location(value: object) -> object:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is not None and (not isinstance(text, str) or not text.strip()):
        raise ConfigError(f"{show(value)} is not a location; write a path, a URI ('s3://...') or null")
    return text if text is None else location(text)


def location(text: str) -> str:
    """Returns a path, or a URI of a file system that pyarrow can open, unchanged.

    Raises ConfigError for other URIs, and for a URI that contains a secret; the message does not repeat it.
    """
    uri = _URI.match(text)
    if uri is None:
        return text
    parts = urlsplit(text)
    if parts.password is not None or any(_SECRET.search(name) for name, _ in parse_qsl(parts.query)):
        raise ConfigError(
            f"this {parts.scheme!r} location contains a secret, which others could read; put the secret into the "
            "environment or the instance's credentials, where pyarrow looks for it (AWS_ACCESS_KEY_ID, ...)"
        )
    scheme = parts.scheme
    if scheme in ("abfs", "abfss"):
        raise ConfigError(
            f"{show(text)}: state cannot be kept on Azure, because pyarrow shows an empty object before the bytes are "
            f"written; use one of {', '.join(_SCHEMES)}"
        )
    if scheme not in _SCHEMES and not scheme.startswith("fsspec+"):
        raise ConfigError(f"{show(text)}: pyarrow cannot open such a file system; use one of {', '.join(_SCHEMES)}")
    if scheme != "file" and not text[uri.end() :].startswith("/"):
        raise ConfigError(f"{show(text)} is not a URI; write {scheme}://...")
    return text


def about_bytes(size_bytes: float) -> str:
    """The size rounded to three digits, with a suitable unit: 307 MiB, 1.5 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes >= 1024**power:
            size = size_bytes / 1024**power
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
    return f"{size_bytes:.0f} B"


# -- the types ----------------------------------------------------------------------------------------

_SIZE_TEXT = {"type": "string", "pattern": r"^\s*[0-9]+(\s*|(\.[0-9]+)?\s*([KkMmGgTt][Ii]?)?[Bb]\s*)$"}
_DURATION = r"(\s*[0-9]+(\.[0-9]+)?\s*[A-Za-z]+\s*)+$"
_BOUND_TEXT = {"type": "string", "pattern": "^" + _DURATION}
_IDLE_TEXT = {"type": "string", "pattern": r"^(?!.*x\s*$)" + _DURATION}
_PERCENT = r"(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?|\.[0-9]+)\s*%\s*$"
_POSITIVE_PERCENT_TEXT = {"type": "string", "pattern": r"^\s*(?![0.]+\s*%)" + _PERCENT}
_PERCENT_TEXT = {"type": "string", "pattern": r"^\s*" + _PERCENT}
_OPEN_PERCENT_TEXT = {"type": "string", "pattern": r"^\s*(?![0.]+\s*%)(?!100)" + _PERCENT}
_MULTIPLE_TEXT = {"type": "string", "pattern": r"^\s*(?![0.]+\s*x)([0-9]{1,9}(\.[0-9]+)?|\.[0-9]+)\s*x\s*$"}
_NULL = {"type": "null"}

Size = Annotated[
    int,
    BeforeValidator(lambda value: size_bytes(value)),
    PlainSerializer(format_bytes, return_type=str),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _SIZE_TEXT]}),
    "size such as 64MiB, 1GiB or 10MB, or a number of bytes",
]
BlockSize = Annotated[Size, AfterValidator(_block_size)]
Rate = Annotated[
    int | None,
    PlainValidator(lambda value: None if value is None else size_bytes(value)),
    PlainSerializer(lambda value: None if value is None else format_bytes(value), return_type=str | None),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _SIZE_TEXT, _NULL]}),
    "size per second, such as 100MiB, or null",
]
Budget = Annotated[
    int | Share,
    PlainValidator(_budget),
    PlainSerializer(lambda value: format_bytes(value) if isinstance(value, int) else str(value), return_type=str),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _SIZE_TEXT, _POSITIVE_PERCENT_TEXT]}),
    "size such as 512MiB, or a share of the host's memory, such as 25%",
]
Fraction = Annotated[
    float,
    PlainValidator(_fraction),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, _PERCENT_TEXT]}),
    "share from 0 to 1, such as 0.75, or 75%",
]
PositiveFraction = Annotated[
    float,
    PlainValidator(_positive_fraction),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, _POSITIVE_PERCENT_TEXT]}),
    "share above 0 and up to 1, such as 0.75, or 75%",
]
BoundDuration = Annotated[
    int,
    BeforeValidator(_bound),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"anyOf": [{"const": 0}, _BOUND_TEXT]}),
    "duration with a unit, such as 90s, 10m or 3 days, or 0",
]
Timeout = Annotated[
    int,
    BeforeValidator(_timeout),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema(_BOUND_TEXT),
    "duration with a unit, such as 60s, from 100ms to 1 day",
]
Idle = Annotated[
    int | Multiple | None,
    PlainValidator(_idle),
    PlainSerializer(_format_idle, return_type=str | None),
    WithJsonSchema({"anyOf": [_IDLE_TEXT, _MULTIPLE_TEXT, _NULL]}),
    "duration such as 90s, or a multiple of the median execution time such as 3x, or null",
]
Shards = Annotated[
    Literal["auto"] | int,
    BeforeValidator(_count_or_auto(_MAX_SHARDS, "shards")),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": _MAX_SHARDS}]}),
    "auto, or an integer from 1",
]
CodecThreads = Annotated[
    int,
    PlainValidator(_between(0, _MAX_THREADS, "threads")),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": _MAX_THREADS}),
    "integer from 0",
]
IoThreads = Annotated[
    int,
    PlainValidator(_between(1, _MAX_THREADS, "threads")),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": _MAX_THREADS}),
    "integer from 1",
]
MergeLevels = Annotated[
    int,
    PlainValidator(_between(0, _MAX_LEVELS, "levels")),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": _MAX_LEVELS}),
    "integer from 0",
]
FanIn = Annotated[
    int,
    PlainValidator(_between(2, _MAX_NODES, "nodes that share a parent")),
    WithJsonSchema({"type": "integer", "minimum": 2, "maximum": _MAX_NODES}),
    "integer from 2",
]
Switch = Annotated[bool, WrapValidator(_switch), "true | false"]
Port = Annotated[
    int | None,
    PlainValidator(_port),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0, "maximum": _MAX_PORT}, _NULL]}),
    "integer from 0 to 65535, or null",
]
Children = Annotated[
    Literal["auto"] | int,
    BeforeValidator(_count_or_auto(_MAX_NODES, "source partitions")),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": _MAX_NODES}]}),
    "auto, or an integer from 1",
]
Location = Annotated[str | None, BeforeValidator(_location), "path, URI, or null"]
OpenFraction = Annotated[
    float,
    PlainValidator(_open_fraction),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, _OPEN_PERCENT_TEXT]}),
    "share above 0 and below 1, such as 0.05, or 5%",
]
Interval = Annotated[
    int,
    PlainValidator(_interval),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema(_BOUND_TEXT),
    "duration above 0 with a unit, such as 90s or 10m",
]
LateShare = Annotated[
    float | None,
    PlainValidator(_late_share),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0, "maximum": 1e9}, _NULL]}),
    "number from 0, such as 2, or null",
]
LateBatches = Annotated[
    int,
    PlainValidator(_at_least_one("batches", "")),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": _MAX_COUNT}),
    "integer from 1",
]
OptionalInterval = Annotated[
    int | None,
    PlainValidator(lambda value: None if value is None else _interval(value)),
    PlainSerializer(lambda value: None if value is None else format_duration(value), return_type=str | None),
    WithJsonSchema({"anyOf": [_BOUND_TEXT, _NULL]}),
    "duration above 0 with a unit, such as 90s or 10m, or null",
]
EventCount = Annotated[
    int,
    PlainValidator(_at_least_one("events", "")),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": _MAX_COUNT}),
    "integer from 1",
]
Executions = Annotated[
    int | None,
    PlainValidator(lambda value: None if value is None else _at_least_one("executions", ", or null")(value)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": _MAX_COUNT}, _NULL]}),
    "integer from 1, or null",
]
OptionalSize = Annotated[
    int | None,
    PlainValidator(lambda value: None if value is None else size_bytes(value)),
    PlainSerializer(lambda value: None if value is None else format_bytes(value), return_type=str | None),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, _SIZE_TEXT, _NULL]}),
    "size such as 1GiB, or null",
]
Coverage = Annotated[
    float | None,
    PlainValidator(lambda value: None if value is None else _open_fraction(value)),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, _OPEN_PERCENT_TEXT, _NULL]}
    ),
    "share above 0 and below 1, such as 0.99, or null",
]
