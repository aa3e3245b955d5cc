"""Where the state of a key lies in the key-value space of a shard. Pure.

``r | key``: the record of a key: its timers, and its state variables.
``p | length of key | key | variable | page``: a page of a list or map that is too large for the record.
``t | time | key``: the key may have something to do from this time on: a timer expires, or state does. One entry for
each key that has timers or state that expires. Nobody gets these entries: they are scanned.

Integers are big endian, so keys are in the order of their numbers. A variable takes two bytes, and one with a number
from 65,535 on ten: the two bytes 255, and eight. A variable that ``init`` deletes and defines again gets another number
in each batch.
"""

from __future__ import annotations

import struct

from state_backends.thresholds import threshold

_LENGTH = struct.Struct(">I")
_VARIABLE = struct.Struct(">H")
_LONG_VARIABLE = struct.Struct(">HQ")
_PAGE = struct.Struct(">I")
_IS_LONG = 0xFFFF
_FIRST_LONG = threshold(_IS_LONG, 2)
_TIME = struct.Struct(">Q")
_SIGN = 1 << 63
MIN_MS, MAX_MS = -_SIGN, _SIGN - 1
_RECORD, _PAGES, _WAKE, _AFTER_WAKES = b"r", b"p", b"t", b"u"
PRESENT = b"\x01"
"""The value of an entry that only has a key."""
RECORDS = (_RECORD, b"s")
"""The range of all records."""


def record_key(key: bytes) -> bytes:
    return _RECORD + key


def key_of_record(entry: bytes) -> bytes:
    return entry[1:]


def page_key(key: bytes, variable: int, page: int) -> bytes:
    return _pages(key, variable) + _PAGE.pack(page)


def pages_of(key: bytes, variable: int) -> tuple[bytes, bytes]:
    """Returns the range of the pages of a variable of a key."""
    pages = _pages(key, variable)
    return pages, pages + b"\xff" * (_PAGE.size + 1)


def _pages(key: bytes, variable: int) -> bytes:
    number = _VARIABLE.pack(variable) if variable < _FIRST_LONG else _LONG_VARIABLE.pack(_IS_LONG, variable)
    return _PAGES + _LENGTH.pack(len(key)) + key + number


def wake_key(time_ms: int, key: bytes) -> bytes:
    return _WAKE + _TIME.pack(time_ms + _SIGN) + key


def wakes(first_ms: int, last_ms: int = MAX_MS) -> tuple[bytes, bytes]:
    """Returns the range of the entries for times from ``first_ms`` up to and including ``last_ms``."""
    return wake_key(first_ms, b""), wake_key(last_ms + 1, b"") if last_ms < MAX_MS else _AFTER_WAKES


def wake_of(entry: bytes) -> tuple[int, bytes]:
    """Returns the time, and the key, of an entry."""
    return _TIME.unpack_from(entry, 1)[0] - _SIGN, entry[1 + _TIME.size :]
