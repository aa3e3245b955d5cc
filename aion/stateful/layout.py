"""Where the state of a key lies in the key-value space of a shard. Pure.

``r | key``: the record of a key: its timers, and its state variables.
``p | length of key | key | variable | page``: a page of a list or map that is too large for the record.
``t | time | key``: the key has something to do at this time: a timer expires, or state does. One entry for each key.

Integers are big endian, so keys are in the order of their numbers.
"""

from __future__ import annotations

import struct

_LENGTH = struct.Struct(">I")
_PAGE = struct.Struct(">HI")
_TIME = struct.Struct(">Q")
_SIGN = 1 << 63
_RECORD, _PAGES, _WAKE = b"r", b"p", b"t"
PRESENT = b"\x01"
"""The value of an entry that only has a key."""
RECORDS = (_RECORD, b"s")
"""The range of all records."""
WAKES = (_WAKE, b"u")
"""The range of all times."""


def record_key(key: bytes) -> bytes:
    return _RECORD + key


def key_of_record(entry: bytes) -> bytes:
    return entry[1:]


def page_key(key: bytes, variable: int, page: int) -> bytes:
    return _PAGES + _LENGTH.pack(len(key)) + key + _PAGE.pack(variable, page)


def wake_key(time_ms: int, key: bytes) -> bytes:
    return _WAKE + _TIME.pack(time_ms + _SIGN) + key


def wakes_until(time_ms: int) -> tuple[bytes, bytes]:
    """The range of the entries for times up to and including this one."""
    return _WAKE, _WAKE + _TIME.pack(min(time_ms + _SIGN + 1, 2 * _SIGN - 1))


def wake_of(entry: bytes) -> tuple[int, bytes]:
    """The time, and the key, of an entry."""
    return _TIME.unpack_from(entry, 1)[0] - _SIGN, entry[1 + _TIME.size :]
