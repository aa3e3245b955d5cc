"""The CRC-32 of everything that is stored: zlib's, computed by Intel's ISA-L (five times as fast, the same numbers)."""

from __future__ import annotations

from pathlib import Path

from isal.isal_zlib import crc32

__all__ = ["crc32", "of_file"]

_CHUNK_BYTES = 1 << 20


def of_file(path: Path) -> int:
    """The CRC-32 of a file's bytes, all at once."""
    crc = 0
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            crc = crc32(chunk[:count], crc)
    return crc
