"""Times that are written as text, in the names of folders. Pure."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

# A zone follows a time of day: the end of a date alone looks like a zone.
_ZONED = r"[T ]\d\d.*(?:Z|[+-]\d\d(?::?\d\d)?)$"
_FINER_THAN_MICROS = r"(\.\d{6})\d+"
_MICROS = pa.timestamp("us")


def instants_of(texts: pa.Array, type_: pa.DataType, zone: str) -> pa.Array:
    """Times of ``type_`` from ISO 8601 text. What is finer than microseconds is cut.

    A text without a zone is in ``zone``, as in Spark: where clocks are set back, it is the first of two instants; where
    they skip an hour, it is counted from before. Raises ArrowInvalid for a text that is not such a time, or one with a
    zone if ``type_`` has none.
    """
    if type_.tz is None:
        return _parsed(texts, _MICROS)
    zoned = pc.match_substring_regex(texts, _ZONED)
    if not pc.any(zoned).as_py():
        return _in_zone(_parsed(texts, _MICROS), zone).cast(type_)
    with_zone = _parsed(pc.if_else(zoned, texts, None), type_)
    without = _in_zone(_parsed(pc.if_else(zoned, None, texts), _MICROS), zone).cast(type_)
    return pc.coalesce(with_zone, without)


def _parsed(texts: pa.Array, type_: pa.DataType) -> pa.Array:
    try:
        return texts.cast(type_)
    except pa.ArrowInvalid:
        # Only then: to look for such texts takes as long as to parse them.
        return pc.replace_substring_regex(texts, _FINER_THAN_MICROS, r"\1").cast(type_)


def _in_zone(local: pa.Array, zone: str) -> pa.Array:
    instants = pc.assume_timezone(local, zone, ambiguous="earliest", nonexistent="earliest")
    # A time that clocks skip becomes the last instant before. Its offset from UTC is the one to count with.
    offset = pc.subtract(pc.local_timestamp(instants), instants.cast(pa.timestamp("us", "UTC")).cast(_MICROS))
    return pc.subtract(local, offset).cast(pa.timestamp("us", "UTC"))
