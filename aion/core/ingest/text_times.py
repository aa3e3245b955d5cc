"""Times that are written as text, as in CSV and JSON. Pure."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

_ZONE = r"(?:[Zz]|[+-]\d\d(?::?\d\d)?)$"


def instants_of(texts: pa.Array, type_: pa.DataType, zone: str) -> pa.Array:
    """Times of ``type_`` from ISO 8601 text. A text without a zone is in ``zone``, as in Spark.

    Raises ArrowInvalid for a text that is not such a time, or one with a zone if ``type_`` has none.
    """
    plain = pa.timestamp("us")
    if type_.tz is None:
        return texts.cast(plain)
    # The date's own hyphen looks like the sign of a zone.
    zoned = pc.match_substring_regex(texts, r"\d\d:?\d\d.*" + _ZONE)
    if not pc.any(zoned).as_py():
        return pc.assume_timezone(texts.cast(plain), zone).cast(type_)
    with_zone = pc.if_else(zoned, texts, None).cast(type_)
    without = pc.assume_timezone(pc.if_else(zoned, None, texts).cast(plain), zone).cast(type_)
    return pc.coalesce(with_zone, without)
