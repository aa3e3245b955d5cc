"""The types of policy values: how each is written, what it is parsed to, and the error message if it is wrong.

The words of :class:`Written` describe a type for users; the reference page shows them.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import TypeAdapter
from pydantic_core import core_schema

from aion.base.time import EACH_BATCH_US, duration_us, format_duration, format_early
from aion.errors import ConfigError

_MAX_BOUND_US = 3_652_500 * 86_400_000_000  # 10,000 years: a window's end plus the bound fits in 64 bits
_MAX_BLOCK_BYTES = 1 << 30  # a value in a Spark row is at most 2 GiB, and a block may exceed its target
_MAX_SHARDS = 1 << 15  # as many key groups as Flink allows; every row looks its shard up among all of them
_MAX_THREADS = 1024
_MAX_LEVELS = 64
_MAX_NODES = 1_000_000
_MAX_PORT = 65_535
_MAX_COUNT = 1 << 53  # the largest integer that a JSON number holds exactly
_SIZE_PARTS = re.compile(r"\s*([+-]?\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", re.ASCII)
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
_BOOL = TypeAdapter(bool)
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def show(value: object) -> str:
    """Returns the value as YAML writes it, shortened to fit on a line."""
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value)) or _repr.repr(value)


# -- sizes and durations ------------------------------------------------------------------------------


def size_bytes(value: object, *, what: str = "size") -> int:
    """Returns bytes of ``"512MiB"``, ``"1.5 GB"``, ``"4096"`` or an int; a fraction of a byte is cut off.

    Raises ConfigError naming ``what`` for anything else, and for less than 1 byte.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    part = _SIZE_PARTS.fullmatch(text) if isinstance(text, str) else None
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
    """Returns the shortest exact text that :func:`size_bytes` reads back: ``67108864`` -> ``"64MiB"``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return f"{size}B"


def _block_size(value: object) -> int:
    size = size_bytes(value)
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
    """Returns the number in ``"25%"`` if the mark is "%". None if the value does not have that form."""
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


def _idle(value: Any) -> int | Multiple:
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


# -- counts and places ----------------------------------------------------------------------------------


def _whole(value: object) -> int | None:
    """Returns the integer, which may be written as a string: values in Spark's configuration are strings."""
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value
    return int(number) if isinstance(number, int) and not isinstance(number, bool) else None


def _count_or_auto(most: int, what: str) -> Callable[[object], object]:
    def count(value: object) -> object:
        number = _whole(value)
        if value != "auto" and (number is None or not 1 <= number <= most):
            raise ConfigError(f"{show(value)} is not a number of {what}; write 'auto' or an integer from 1 to {most:,}")
        return value if number is None else number

    return count


def _whole_number(least: int, most: int, what: str, or_else: str = "") -> Callable[[object], int]:
    to = f" to {most:,}" if most < _MAX_COUNT else ""

    def number_of(value: object) -> int:
        number = _whole(value)
        if number is None or not least <= number <= most:
            raise ConfigError(f"{show(value)} is not a number of {what}; write an integer from {least}{to}{or_else}")
        return number

    return number_of


def _switch(value: object) -> bool:
    try:
        return _BOOL.validate_python(value)
    except ValueError:
        raise ConfigError(f"{show(value)} is not a switch; write true or false") from None


def _port(value: object) -> int:
    number = _whole(value)
    if number is None or not 0 <= number <= _MAX_PORT:
        raise ConfigError(f"{show(value)} is not a port; write an integer from 0 to {_MAX_PORT}, or null")
    return number


def _late_share(value: object) -> float:
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


def _early(value: Any) -> int:
    if value == "batch":
        return EACH_BATCH_US
    try:
        return _interval(value)
    except ConfigError as error:
        raise ConfigError(f"{error}; or 'batch'; or null") from None


def _location(value: object) -> str | None:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is None:
        return None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{show(value)} is not a location; write a path, a URI ('s3://...') or null")
    return location(text)


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
    """Returns the size rounded to three digits, with a suitable unit: 307 MiB, 1.5 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes >= 1024**power:
            size = size_bytes / 1024**power
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
    return f"{size_bytes:.0f} B"


# -- the types ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """How a value is written in a file: what reads it, in words, as JSON schemas, and what writes it."""

    parse: Callable[[Any], Any]
    words: str
    schemas: tuple[dict[str, Any], ...]
    write: Callable[[Any], object] | None = None

    @property
    def or_null(self) -> Written:
        """The same, or null."""

        def parse(value: Any) -> Any:
            return None if value is None else self.parse(value)

        def write(value: Any) -> object:
            return value if value is None or self.write is None else self.write(value)

        return Written(parse, f"{self.words}, or null", (*self.schemas, {"type": "null"}), write)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        write = core_schema.plain_serializer_function_ser_schema(self.write) if self.write else None
        return core_schema.no_info_plain_validator_function(self.parse, serialization=write)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return self.schemas[0] if len(self.schemas) == 1 else {"anyOf": list(self.schemas)}


def _text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def _integer(least: int, most: int, what: str, or_else: str = "") -> Written:
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return Written(_whole_number(least, most, what, or_else), f"integer from {least}", (schema,))


def _auto_or_integer(most: int, what: str) -> Written:
    schemas = {"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": most}
    return Written(_count_or_auto(most, what), "auto, or an integer from 1", schemas)


_DURATION = r"(\s*[0-9]+(\.[0-9]+)?\s*[A-Za-z]+\s*)+$"
_BOUND_TEXT = _text("^" + _DURATION)
_IDLE_TEXT = _text(r"^(?!.*x\s*$)" + _DURATION)
_PERCENT = r"(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?|\.[0-9]+)\s*%\s*$"
_POSITIVE_PERCENT_TEXT = _text(r"^\s*(?![0.]+\s*%)" + _PERCENT)
_OPEN_PERCENT_TEXT = _text(r"^\s*(?![0.]+\s*%)(?!100)" + _PERCENT)
_MULTIPLE_TEXT = _text(r"^\s*(?![0.]+\s*x)([0-9]{1,9}(\.[0-9]+)?|\.[0-9]+)\s*x\s*$")
_SIZES = {"type": "integer", "minimum": 1}, _text(r"^\s*[0-9]+(\s*|(\.[0-9]+)?\s*([KkMmGgTt][Ii]?)?[Bb]\s*)$")

_SIZE = Written(size_bytes, "size such as 64MiB, 1GiB or 10MB, or a number of bytes", _SIZES, format_bytes)
_INTERVAL = Written(_interval, "duration above 0 with a unit, such as 90s or 10m", (_BOUND_TEXT,), format_duration)
_OPEN_FRACTION = Written(
    _open_fraction,
    "share above 0 and below 1, such as 0.05, or 5%",
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, _OPEN_PERCENT_TEXT),
)

Size = Annotated[int, _SIZE]
OptionalSize = Annotated[int | None, _SIZE.or_null]
BlockSize = Annotated[int, replace(_SIZE, parse=_block_size)]
Budget = Annotated[
    int | Share,
    Written(
        _budget,
        "size such as 512MiB, or a share of the host's memory, such as 25%",
        (*_SIZES, _POSITIVE_PERCENT_TEXT),
        lambda value: format_bytes(value) if isinstance(value, int) else str(value),
    ),
]
Fraction = Annotated[
    float,
    Written(
        _fraction,
        "share from 0 to 1, such as 0.75, or 75%",
        ({"type": "number", "minimum": 0, "maximum": 1}, _text(r"^\s*" + _PERCENT)),
    ),
]
PositiveFraction = Annotated[
    float,
    Written(
        _positive_fraction,
        "share above 0 and up to 1, such as 0.75, or 75%",
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, _POSITIVE_PERCENT_TEXT),
    ),
]
OpenFraction = Annotated[float, _OPEN_FRACTION]
Coverage = Annotated[float | None, _OPEN_FRACTION.or_null]
BoundDuration = Annotated[
    int,
    Written(
        _bound,
        "duration with a unit, such as 90s, 10m or 3 days, or 0",
        ({"const": 0}, _BOUND_TEXT),
        format_duration,
    ),
]
Timeout = Annotated[
    int,
    Written(_timeout, "duration with a unit, such as 60s, from 100ms to 1 day", (_BOUND_TEXT,), format_duration),
]
Interval = Annotated[int, _INTERVAL]
Early = Annotated[
    int | None,
    Written(
        _early,
        "duration above 0 with a unit, such as 90s or 10m, or batch",
        ({"const": "batch"}, _BOUND_TEXT),
        format_early,
    ).or_null,
]
Idle = Annotated[
    int | Multiple | None,
    Written(
        _idle,
        "duration such as 90s, or a multiple of the median execution time such as 3x",
        (_IDLE_TEXT, _MULTIPLE_TEXT),
        lambda value: format_duration(value) if isinstance(value, int) else str(value),
    ).or_null,
]
Shards = Annotated[Literal["auto"] | int, _auto_or_integer(_MAX_SHARDS, "shards")]
Children = Annotated[Literal["auto"] | int, _auto_or_integer(_MAX_NODES, "source partitions")]
CodecThreads = Annotated[int, _integer(0, _MAX_THREADS, "threads")]
IoThreads = Annotated[int, _integer(1, _MAX_THREADS, "threads")]
MergeLevels = Annotated[int, _integer(0, _MAX_LEVELS, "levels")]
FanIn = Annotated[int, _integer(2, _MAX_NODES, "nodes that share a parent")]
EventCount = Annotated[int, _integer(1, _MAX_COUNT, "events")]
Patience = Annotated[int, _integer(0, _MAX_COUNT, "batches")]
Overlap = Annotated[int | None, _integer(1, _MAX_COUNT, "windows", ", or null").or_null]
Executions = Annotated[int | None, _integer(1, _MAX_COUNT, "executions", ", or null").or_null]
Port = Annotated[
    int | None,
    Written(_port, "integer from 0 to 65535", ({"type": "integer", "minimum": 0, "maximum": _MAX_PORT},)).or_null,
]
LateShare = Annotated[
    float | None,
    Written(_late_share, "number from 0, such as 2", ({"type": "number", "minimum": 0, "maximum": 1e9},)).or_null,
]
Switch = Annotated[bool, Written(_switch, "true | false", ({"type": "boolean"},))]
Location = Annotated[str | None, Written(_location, "path, URI, or null", ({"type": "string"}, {"type": "null"}))]
