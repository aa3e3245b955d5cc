"""The contents of an SST file of blocks, and how it is written.

Keys are ``file number | slice | seq``, big endian. So files never overlap, and RocksDB puts each on its lowest level
and never compacts it with another. In each file the blocks of one slice are adjacent. The value of the 8-byte key, the
file number alone, is the file's index of blocks.
"""

from __future__ import annotations

import resource
import struct
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import orjson
from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, SstFileWriter

from state_backends.files.names import SstFile
from state_backends.files.storage import sync
from state_backends.format.checksum import crc32
from state_backends.format.errors import CorruptState
from state_backends.format.plain_names import is_plain
from state_backends.store.file_index import Indexed
from state_backends.store.io import Steps
from state_backends.thresholds import threshold

_KEY = struct.Struct(">QQQ")
_INDEX_KEY = struct.Struct(">Q")
_SIGN = 1 << 63
_LAST = ((1 << 64) - 1, (1 << 64) - 1)
TABLE_FORMAT = 6  # of RocksDB's files: docs/reference/formats.md. Set, because another RocksDB may have another default
BLOCK_BYTES = 4096
_CHUNK_BYTES = threshold(1 << 18, 512)
SYNC_BYTES = threshold(8 << 20, 512)
_OWN_FILE_BYTES = 1 << 20
_RESERVE = 10  # RocksDB subtracts these from max_open_files for its own files
_LEAST_OPEN, _MOST_OPEN = 10, 512  # SST files that a shard keeps open; RocksDB accepts no fewer than 10
FILES_OF_A_SHARD = 6 + _LEAST_OPEN
"""Files that RocksDB keeps open for each shard: its log, its list of files, a lock, and some of its SST files."""
_SHARDS = 256  # the limit on open files is enough for this many shards


class SstOut:
    """An SST file that is being written. ``size_bytes``, ``crc``: of what RocksDB's writer has written so far."""

    def __init__(self, part: Path, options: Options) -> None:
        self._part = part
        self._unsynced = 0
        self.size_bytes = self.crc = 0
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._reader: FileIO | None = None  # reads back what RocksDB's writer wrote
        self._writer = SstFileWriter(options)
        try:
            self._writer.open(str(part))
            self._reader = part.open("rb", buffering=0)
        except BaseException:
            self.close()
            raise

    def put(self, key: bytes, value: bytes) -> None:
        """Adds an entry. Keys must come in their order."""
        self._writer[key] = value
        self._unsynced += len(value)

    def close(self) -> None:
        """Closes a file that will not be completed, so that a full disk gets its bytes back.

        RocksDB's writer closes the file when nothing refers to the writer. An exception's traceback refers to this
        object, and may live long.
        """
        del self._writer
        if self._reader is not None:
            self._reader.close()

    def sync_due(self) -> bool:
        """Returns whether it is time to sync. Syncing everything at the end would block the I/O thread for long."""
        return self._unsynced >= SYNC_BYTES

    def sync(self) -> None:
        sync(self._part)
        self._unsynced = 0

    def finish(self) -> None:
        """Completes and syncs the file. Then its size and the CRC-32 of its bytes are known."""
        assert self._reader is not None
        self._writer.finish()  # syncs the file
        self.update_checksum()
        self._reader.close()

    def update_checksum(self) -> None:
        """Adds what RocksDB has written since the last call to size and checksum. RocksDB only ever appends.

        This must run before the sync. With the sync RocksDB asks the kernel to drop the pages, and reading them again
        costs as much as writing them (`aion experiment store --legs disk`).
        """
        assert self._reader is not None
        while count := self._reader.readinto(self._chunk):
            self.size_bytes += count
            self.crc = crc32(self._chunk[:count], self.crc)


class NewFile:
    """A file of blocks that is being written. ``file`` is known when it is complete, just before it is ingested."""

    file: SstFile

    def __init__(self, file_no: int, name: str, part: Path, index: Sequence[Indexed], options: Options) -> None:
        self.file_no = file_no
        # RocksDB reads the first and the last data block of a file when it ingests it. So both are small: the index
        # fills the first, and the last key has an empty value.
        # The index has the name under which the file was first written, so the index of each file has another checksum.
        lines = orjson.dumps({"file": name, "blocks": [line.to_json() for line in index]}).ljust(BLOCK_BYTES)
        self.index_crc = crc32(lines)
        self._out = SstOut(part, options)
        try:
            self._out.put(index_key(file_no), lines)
        except BaseException:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        return self._out.size_bytes

    @property
    def crc(self) -> int:
        return self._out.crc

    def put(self, slice_us: int, seq: int, value: bytes) -> None:
        self._out.put(block_key(self.file_no, slice_us, seq), value)
        self._out.update_checksum()

    def close(self) -> None:
        """See :meth:`SstOut.close`."""
        self._out.close()

    def sync_due(self) -> bool:
        return self._out.sync_due()

    def sync(self) -> None:
        self._out.sync()

    def seal(self) -> Steps[None]:
        """Steps that complete the file. Then its size and the CRC-32 of its bytes are known."""
        self._out.put(_KEY.pack(self.file_no, *_LAST), b"")
        self._out.finish()
        yield 0


def checksum(path: Path) -> int:
    """Returns the CRC-32 of all bytes of a file."""
    crc = 0
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            crc = crc32(chunk[:count], crc)
    return crc


def read_index(index: bytes) -> list[Indexed]:
    """Returns the blocks that an index lists. Raises CorruptState if a body is in a file without a plain name."""
    blocks = [Indexed.from_json(line) for line in orjson.loads(index)["blocks"]]
    for block in blocks:
        if block.handed is not None and not is_plain(block.handed.file):
            raise CorruptState(
                f"block {block.seq} has its body in {block.handed.file!r:.200}, which is not a plain name"
            )
    return blocks


def index_key(file_no: int) -> bytes:
    """Returns the key of a file's index of blocks. All keys of the file begin with it."""
    return _INDEX_KEY.pack(file_no)


def block_key(file_no: int, slice_us: int, seq: int) -> bytes:
    return _KEY.pack(file_no, slice_us + _SIGN, seq)


def open_sst_files() -> int:
    """Returns how many SST files a shard's RocksDB may keep open, so that all shards stay within the process's limit.

    RocksDB opens other files when it reads them, which takes about 0.1 ms.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < 0:
        return _MOST_OPEN
    return min(max(limit // _SHARDS - FILES_OF_A_SHARD + _LEAST_OPEN, _LEAST_OPEN), _MOST_OPEN)


def rocksdb_options(cache: Cache) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    # RocksDB does not compress: the codec may have compressed the blocks. It never merges files: Merger does that.
    options.set_compression_type(DBCompressionType.none())
    options.set_disable_auto_compactions(True)
    options.set_write_buffer_size(1 << 20)
    options.set_max_open_files(_RESERVE + open_sst_files())
    options.set_table_cache_num_shard_bits(0)  # otherwise each part of the cache keeps at least one file open
    # RocksDB's log and its list of files grow with every commit. With these limits it begins new ones.
    options.set_max_log_file_size(_OWN_FILE_BYTES)
    options.set_keep_log_file_num(2)
    options.set_max_manifest_file_size(_OWN_FILE_BYTES)
    # Blocks of one window are read one after another, so the kernel may read ahead.
    options.set_advise_random_on_open(False)
    table = BlockBasedOptions()
    table.set_format_version(TABLE_FORMAT)
    table.set_block_size(BLOCK_BYTES)
    table.set_block_cache(cache)
    options.set_block_based_table_factory(table)
    return options
