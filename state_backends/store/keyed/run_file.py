"""The contents of a run: an SST file with the changes of one batch, sorted by key.

The key of each value is preceded by the byte 01. A deleted key has an empty value, because RocksDB's writer cannot
write a deletion. One more entry comes first, whose key is 00 and the file's number: it has the name under which the
file was first written. So a run that was replaced by another one is noticed when it is opened.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import orjson
from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options

from state_backends.format.checksum import crc32
from state_backends.store.io import Steps
from state_backends.store.sst_file import BLOCK_BYTES, TABLE_FORMAT, SstOut, rocksdb_options
from state_backends.thresholds import threshold

VALUES = b"\x01"
"""Keys of values begin with it."""
STEP_BYTES = threshold(256 << 10, 64)
"""About what one step of I/O moves."""
_ENTRY_BYTES = 32
"""What an entry costs a step besides its bytes, so that a step with many small values does not take long."""
_NAME_KEY = struct.Struct(">cQ")
_NEVER = 1 << 30
_FILTER_BITS = 10  # for each key: one lookup in a hundred reads a run in vain


class NewRun:
    """A run that is being written. ``size_bytes``, ``crc``, ``keys``: known when it is complete."""

    def __init__(self, file_no: int, name: str, part: Path, options: Options) -> None:
        meta = orjson.dumps({"file": name})
        self.index_crc = crc32(meta)
        self.keys = 0
        self._out = SstOut(part, options)
        try:
            self._out.put(name_key(file_no), meta)
        except BaseException:
            self.close()
            raise

    def write(self, changes: Iterable[tuple[bytes, bytes | None]]) -> Steps[None]:
        """Steps that write all changes, sorted by key, and complete the file. None deletes a key, as b"" does."""
        moved, put = 0, self._out.put
        for key, change in changes:
            value = change or b""
            put(VALUES + key, value)
            self.keys += 1
            moved += len(key) + len(value) + _ENTRY_BYTES
            if moved >= STEP_BYTES:
                self._out.update_checksum()
                yield moved
                moved = 0
                if self._out.sync_due():
                    self._out.sync()
                    yield 0
        yield moved
        self._out.finish()
        yield 0

    @property
    def size_bytes(self) -> int:
        return self._out.size_bytes

    @property
    def crc(self) -> int:
        return self._out.crc

    def close(self) -> None:
        """Closes a file that will not be completed."""
        self._out.close()


def name_key(file_no: int) -> bytes:
    """The key of the entry with the name of a run."""
    return _NAME_KEY.pack(b"\0", file_no)


def run_options(cache: Cache) -> Options:
    """Options for a RocksDB of runs. It never merges files: RunMerger does that."""
    options = rocksdb_options(cache)
    options.set_compression_type(DBCompressionType.lz4())
    for set_trigger in (
        options.set_level_zero_file_num_compaction_trigger,
        options.set_level_zero_slowdown_writes_trigger,
        options.set_level_zero_stop_writes_trigger,
    ):
        set_trigger(_NEVER)
    options.set_advise_random_on_open(True)
    table = BlockBasedOptions()
    table.set_format_version(TABLE_FORMAT)
    table.set_block_size(BLOCK_BYTES)
    table.set_block_cache(cache)
    table.set_bloom_filter(_FILTER_BITS, False)
    options.set_block_based_table_factory(table)
    return options
