"""Times that are written as text, as in CSV and JSON. Pure."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

# A zone follows a time of day: the end of a date alone looks like a zone.
_ZONED = r"[T ]\d\d.*(?:Z|[+-]\d\d(?::?\d\d)?)$"


def instants_of(texts: pa.Array, type_: pa.DataType, zone: str) -> pa.Array:
    """Times of ``type_`` from ISO 8601 text. A text without a zone is in ``zone``, as in Spark.

    Raises ArrowInvalid for a text that is not such a time, or one with a zone if ``type_`` has none.
    """
    plain = pa.timestamp("us")
    if type_.tz is None:
        return texts.cast(plain)
    zoned = pc.match_substring_regex(texts, _ZONED)
    if not pc.any(zoned).as_py():
        return pc.assume_timezone(texts.cast(plain), zone).cast(type_)
    with_zone = pc.if_else(zoned, texts, None).cast(type_)
    without = pc.assume_timezone(pc.if_else(zoned, None, texts).cast(plain), zone).cast(type_)
    return pc.coalesce(with_zone, without)
