"""The types of policy values, each declared once by its kind: how it is written, and what it is parsed to.

The words of :class:`Written` say what a user may write. The reference page shows them, and so does the sentence with
which every wrong value is refused (:func:`refusal`).
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
_MAX_SIZE = (1 << 63) - 1
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


class Refused(Exception):
    """A value is not of a kind. Its text is a hint, if the words of the kind do not say enough."""


def refusal(value: object, words: str, hint: str = "") -> str:
    """Returns the sentence for a value that a key cannot have. ``words``: what it can have."""
    return f"{show(value)} is not possible{hint and f': {hint}'}; write {words}"


def show(value: object) -> str:
    """Returns the value as YAML writes it, shortened to fit on a line."""
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value)) or _repr.repr(value)


# -- kinds of values ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """How a value is written in a file: what reads it, in words, as JSON schemas, and what writes it.

    ``parse`` raises Refused for a value that is not of this kind, or ConfigError with a sentence of its own.
    """

    parse: Callable[[Any], Any]
    words: str
    schemas: tuple[dict[str, Any], ...]
    write: Callable[[Any], object] | None = None

    def read(self, value: object) -> Any:
        """Returns what a value means. Raises ConfigError."""
        try:
            return self.parse(value)
        except Refused as refused:
            raise ConfigError(refusal(value, self.words, str(refused))) from None

    def __or__(self, other: Written) -> Written:
        """A value of either kind."""

        def parse(value: Any) -> Any:
            try:
                return self.parse(value)
            except Refused as first:
                try:
                    return other.parse(value)
                except Refused as second:
                    raise Refused(str(first) or str(second)) from None

        words, schemas = f"{self.words}, or {other.words}", (*self.schemas, *other.schemas)
        return Written(parse, words, schemas, self.write or other.write)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        serialization = None
        if (write := self.write) is not None:
            serialization = core_schema.plain_serializer_function_ser_schema(lambda v: None if v is None else write(v))
        return core_schema.no_info_plain_validator_function(self.read, serialization=serialization)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return self.schemas[0] if len(self.schemas) == 1 else {"anyOf": list(self.schemas)}


def text_of(pattern: str, words: str) -> Written:
    """Returns the kind of texts with a pattern."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise Refused
        return value

    return Written(parse, words, (_text(f"^{pattern}$"),))


def _text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


_DURATION = r"(\s*[0-9]+(\.[0-9]+)?\s*[A-Za-z]+\s*)+$"
_BOUND_TEXT = _text("^" + _DURATION)
_IDLE_TEXT = _text(r"^(?!.*x\s*$)" + _DURATION)
_MULTIPLE_TEXT = _text(r"^\s*(?![0.]+\s*x)([0-9]{1,9}(\.[0-9]+)?|\.[0-9]+)\s*x\s*$")
_SIZES = {"type": "integer", "minimum": 1}, _text(r"^\s*[0-9]+(\s*|(\.[0-9]+)?\s*([KkMmGgTt][Ii]?)?[Bb]\s*)$")


def _percent_text(*, zero: bool = False, one: bool = True) -> dict[str, Any]:
    but = ("" if zero else r"(?![0.]+\s*%)") + ("" if one else "(?!100)")
    return _text(rf"^\s*{but}(100(\.0+)?|[0-9]{{1,2}}(\.[0-9]+)?|\.[0-9]+)\s*%\s*$")


def _word(word: str | None, meaning: object) -> Written:
    def parse(value: object) -> object:
        if value != word:
            raise Refused
        return meaning

    return Written(parse, word or "null", ({"type": "null"} if word is None else {"const": word},))


NULL = _word(None, None)


def _switch(value: object) -> bool:
    try:
        return _BOOL.validate_python(value)
    except ValueError:
        raise Refused from None


def _whole(least: int, most: int = _MAX_COUNT) -> Written:
    """Returns the kind of integers. They may be texts: values in Spark's configuration are."""

    def parse(value: object) -> int:
        number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value
        if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
            raise Refused
        return int(number)

    words = f"an integer from {least}" + (f" to {most:,}" if most < _MAX_COUNT else "")
    return Written(parse, words, ({"type": "integer", "minimum": least, "maximum": most},))


# -- sizes --------------------------------------------------------------------------------------------


def _size(most: int = _MAX_SIZE) -> Written:
    def parse(value: object) -> int:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        part = _SIZE_PARTS.fullmatch(text) if isinstance(text, str) else None
        if part is None or ("." in part[1] and not part[2]):
            raise Refused
        number, unit = part.groups()
        if unit.lower() not in _SIZE_UNITS:
            # Spark's own sizes ('512m') are binary, so the message says how to write such a size here.
            spark = f"'{text}' of Spark is '{number}{unit.upper()}iB' here; " if unit.lower() in "kmgt" else ""
            units = "units are B, KiB MiB GiB TiB (1024) and KB MB GB TB (1000)"
            raise Refused(f"the unit {unit!r} is unknown; {spark}{units}")
        size = int(Decimal(number) * _SIZE_UNITS[unit.lower()])
        if not 1 <= size <= most:
            raise Refused
        return size

    limit = f", at most {format_bytes(most)}" if most < _MAX_SIZE else ""
    return Written(
        parse, f"a size above 0, such as 64MiB, 1GiB or 10MB, or a number of bytes{limit}", _SIZES, _write_size
    )


def _write_size(size: object) -> str:
    return format_bytes(size) if isinstance(size, int) else str(size)


def size_bytes(value: object, *, what: str = "size") -> int:
    """Returns bytes of ``"512MiB"``, ``"1.5 GB"``, ``"4096"`` or an int; a fraction of a byte is cut off.

    Raises ConfigError naming ``what`` for anything else, and for less than 1 byte.
    """
    try:
        return int(_SIZE.read(value))
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None


def format_bytes(size: int) -> str:
    """Returns the shortest exact text that :func:`size_bytes` reads back: ``67108864`` -> ``"64MiB"``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return f"{size}B"


# -- durations ----------------------------------------------------------------------------------------


def _duration(least_us: int, most_us: int = _MAX_BOUND_US) -> Written:
    def parse(value: Any) -> int:
        try:
            # From Spark's configuration everything comes as text.
            found_us = 0 if isinstance(value, str) and value.strip() == "0" else duration_us(value)
        except ConfigError:
            raise Refused from None
        if not least_us <= found_us <= most_us:
            raise Refused
        return found_us

    bounds = "above 0 and up" if least_us == 1 else f"from {format_duration(least_us) if least_us else 0}"
    words = f"a duration in us, ms, s, m, h, d or w, such as 90s or 10m, {bounds} to {format_duration(most_us)}"
    schemas = (_BOUND_TEXT,) if least_us else ({"const": 0}, _BOUND_TEXT)
    return Written(parse, words, schemas, _write_duration)


def _write_duration(duration: object) -> str:
    return format_duration(duration) if isinstance(duration, int) else str(duration)


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


def _percent(value: object) -> Share:
    percent = _number(str(value) if isinstance(value, Share) else value, "%")
    if percent is not None and 0 < percent <= 100:
        return Share(percent)
    if percent is None and isinstance(value, float) and 0 < value < 1:
        raise Refused(f"as a share it is '{Share(round(value * 100, 9))}'")
    raise Refused


def _multiple(value: object) -> Multiple:
    times = _number(str(value) if isinstance(value, Multiple) else value, "x")
    if times is None or not 0 < times <= 1e9:
        raise Refused
    return Multiple(times)


def _share(*, zero: bool = False, one: bool = True, example: str = "0.75, or 75%") -> Written:
    """Returns the kind of shares from 0 to 1. ``zero``, ``one``: whether it may be 0, or 1."""

    def parse(value: object) -> float:
        percent, number = _number(value, "%"), _number(value, "")
        if percent is not None:
            number = float(Decimal(repr(percent)) / 100)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value) if abs(value) < 1e300 else math.inf
        if number is None or not 0 <= number <= 1 or (number == 0 and not zero) or (number == 1 and not one):
            raise Refused
        return number + 0.0  # turns -0.0 into 0.0

    bounds = "from 0 to 1" if zero else f"above 0 and {'up to' if one else 'below'} 1"
    numbers = {"minimum" if zero else "exclusiveMinimum": 0, "maximum" if one else "exclusiveMaximum": 1}
    schemas = {"type": "number", **numbers}, _percent_text(zero=zero, one=one)
    return Written(parse, f"a share {bounds}, such as {example}", schemas)


def _late_share(value: object) -> float:
    share = _number(value, "") if isinstance(value, str) else value
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1e9:
        raise Refused
    return float(share)


# -- places -------------------------------------------------------------------------------------------


def _location(value: object) -> str | None:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is None:
        return None
    if not isinstance(text, str) or not text.strip():
        raise Refused
    return location(text)


def _folder(value: object) -> str | None:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is not None and (not isinstance(text, str) or not text.strip() or "\0" in text or _URI.match(text)):
        raise Refused
    return text


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


_SIZE = _size()
_ABOVE_0 = _duration(1)

Size = Annotated[int, _SIZE]
OptionalSize = Annotated[int | None, _SIZE | NULL]
BlockSize = Annotated[int, _size(_MAX_BLOCK_BYTES)]
Budget = Annotated[
    int | Share,
    _SIZE | Written(_percent, "a share of the host's memory, above 0% and up to 100%, such as 25%", (_percent_text(),)),
]
Fraction = Annotated[float, _share(zero=True)]
PositiveFraction = Annotated[float, _share()]
OpenFraction = Annotated[float, _share(one=False, example="0.05, or 5%")]
Coverage = Annotated[float | None, _share(one=False, example="0.05, or 5%") | NULL]
BoundDuration = Annotated[int, _duration(0)]
Timeout = Annotated[int, _duration(100_000, 86_400_000_000)]
Interval = Annotated[int, _ABOVE_0]
Early = Annotated[int | None, replace(_ABOVE_0 | _word("batch", EACH_BATCH_US), write=format_early) | NULL]
Idle = Annotated[
    int | Multiple | None,
    replace(_ABOVE_0, schemas=(_IDLE_TEXT,))
    | Written(_multiple, "a multiple above 0 of the median execution time, such as 3x", (_MULTIPLE_TEXT,))
    | NULL,
]
Shards = Annotated[Literal["auto"] | int, _word("auto", "auto") | _whole(1, _MAX_SHARDS)]
Children = Annotated[Literal["auto"] | int, _word("auto", "auto") | _whole(1, _MAX_NODES)]
CodecThreads = Annotated[int, _whole(0, _MAX_THREADS)]
MergeLevels = Annotated[int, _whole(0, _MAX_LEVELS)]
FanIn = Annotated[int, _whole(2, _MAX_NODES)]
EventCount = Annotated[int, _whole(1)]
Patience = Annotated[int, _whole(0)]
Overlap = Annotated[int | None, _whole(1) | NULL]
Executions = Annotated[int | None, _whole(1) | NULL]
Port = Annotated[int | None, _whole(0, _MAX_PORT) | NULL]
LateShare = Annotated[
    float | None,
    Written(_late_share, "a number from 0, such as 2", ({"type": "number", "minimum": 0, "maximum": 1e9},)) | NULL,
]
Switch = Annotated[bool, Written(_switch, "true or false", ({"type": "boolean"},))]
Folder = Annotated[
    str | None, Written(_folder, "the path of a folder, or null", ({"type": "string"}, {"type": "null"}))
]
Location = Annotated[str | None, Written(_location, "a path, a URI, or null", ({"type": "string"}, {"type": "null"}))]
