"""What is in an SST file of blocks, and how one is written.

Keys are ``file number | slice | seq``, big endian: files never overlap, so RocksDB puts each on its lowest level and
never compacts it into something else, and the blocks of one slice stand together in each file. An 8-byte key (the
file number alone) holds the file's index of blocks.
"""

from __future__ import annotations

import resource
import struct
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import orjson
from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, SstFileWriter

from aion.core.checksum import crc32
from aion.core.ingest.block import Compacted
from state_backends.files.names import SstFile
from state_backends.files.storage import sync
from state_backends.store.io import Steps

_KEY = struct.Struct(">QQQ")
_INDEX_KEY = struct.Struct(">Q")
_SIGN = 1 << 63
_LAST = ((1 << 64) - 1, (1 << 64) - 1)
_TABLE_FORMAT = 6  # of RocksDB's files: docs/state-format.md. It stays, whatever a later RocksDB prefers
_BLOCK_BYTES = 4096
_CHUNK_BYTES = 1 << 18
SYNC_BYTES = 8 << 20
_OWN_FILE_BYTES = 1 << 20
_RESERVE = 10  # of max_open_files; RocksDB counts them for its own files
_LEAST_OPEN, _MOST_OPEN = 10, 512  # SST files at a time; RocksDB takes no less
FILES_OF_A_SHARD = 6 + _LEAST_OPEN
"""Files that RocksDB keeps open for each shard: its log, its list of files, a lock, and some of its SST files."""
_SHARDS = 256  # they share the limit on open files


class Indexed(NamedTuple):
    """A line of a file's index of blocks."""

    slice_us: int
    seq: int
    size_bytes: int
    compacted: Compacted | None = None

    def to_json(self) -> list[int]:
        return [self.slice_us, self.seq, self.size_bytes, *(self.compacted or ())]


class NewFile:
    """A file that is being written. ``file`` is known once it is whole and ingested."""

    file: SstFile

    def __init__(self, file_no: int, name: str, part: Path, index: Sequence[Indexed], options: Options) -> None:
        self.file_no = file_no
        self._part = part
        # RocksDB reads the first and the last data block of a file when it ingests it. Both are kept small.
        # The index has the name under which the file was first written, so no other file's index has its checksum.
        lines = orjson.dumps({"file": name, "blocks": [line.to_json() for line in index]}).ljust(_BLOCK_BYTES)
        self.index_crc = crc32(lines)
        self._unsynced = 0
        self.size_bytes = self.crc = 0  # of the whole file, when it is sealed
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._written: FileIO | None = None
        self._writer = SstFileWriter(options)
        try:
            self._writer.open(str(part))
            self._written = part.open("rb", buffering=0)
            self._writer[index_key(file_no)] = lines
        except BaseException:
            self.let_go()
            raise

    def put(self, slice_us: int, seq: int, value: bytes) -> None:
        self._writer[block_key(self.file_no, slice_us, seq)] = value
        self._unsynced += len(value)
        self._sum_up()

    def let_go(self) -> None:
        """Closes a file that will not become whole, so that a full disk gets its bytes back.

        RocksDB's writer closes when nothing refers to it. An exception refers to this object, and may be kept for long.
        """
        del self._writer
        if self._written is not None:
            self._written.close()

    def sync_due(self) -> bool:
        """Whether it is time to sync: syncing everything at the end would keep the I/O thread for long."""
        return self._unsynced >= SYNC_BYTES

    def sync(self) -> None:
        sync(self._part)
        self._unsynced = 0

    def seal(self) -> Steps[None]:
        """Steps that end the file. After them its size and the CRC-32 of its bytes are known."""
        assert self._written is not None
        self._writer[_KEY.pack(self.file_no, *_LAST)] = b""
        self._writer.finish()  # syncs the file
        self._sum_up()
        self._written.close()
        yield 0

    def _sum_up(self) -> None:
        """Adds what RocksDB has written since the last call to size and checksum. RocksDB only ever appends.

        It must not wait for the sync: then RocksDB asks the kernel to forget the pages, and reading them again costs as
        much as writing them (`aion experiment store --legs disk`).
        """
        assert self._written is not None
        while count := self._written.readinto(self._chunk):
            self.size_bytes += count
            self.crc = crc32(self._chunk[:count], self.crc)


def checksum(path: Path) -> int:
    """The CRC-32 of a file's bytes, all at once."""
    crc = 0
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            crc = crc32(chunk[:count], crc)
    return crc


def read_index(index: bytes) -> list[Indexed]:
    """The blocks of an index."""
    blocks = orjson.loads(index)["blocks"]
    return [Indexed(s, seq, size, Compacted(*rest) if rest else None) for s, seq, size, *rest in blocks]


def index_key(file_no: int) -> bytes:
    """The key of a file's index of blocks. All keys of the file begin with it."""
    return _INDEX_KEY.pack(file_no)


def block_key(file_no: int, slice_us: int, seq: int) -> bytes:
    return _KEY.pack(file_no, slice_us + _SIGN, seq)


def open_sst_files() -> int:
    """How many SST files a shard's RocksDB may keep open, so that all shards stay within the process's limit.

    Other files are opened when they are read, which takes about 0.1 ms.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < 0:
        return _MOST_OPEN
    return min(max(limit // _SHARDS - FILES_OF_A_SHARD + _LEAST_OPEN, _LEAST_OPEN), _MOST_OPEN)


def rocksdb_options(cache: Cache) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    # The codec compresses blocks, or does not. RocksDB never merges files: they are written sorted.
    options.set_compression_type(DBCompressionType.none())
    options.set_disable_auto_compactions(True)
    options.set_write_buffer_size(1 << 20)
    options.set_max_open_files(_RESERVE + open_sst_files())
    options.set_table_cache_num_shard_bits(0)  # each part of a divided cache would keep at least one file open
    # Its log and its list of files grow with every commit, so new ones are begun now and then.
    options.set_max_log_file_size(_OWN_FILE_BYTES)
    options.set_keep_log_file_num(2)
    options.set_max_manifest_file_size(_OWN_FILE_BYTES)
    # Blocks of one window are read one after the other: the kernel may read ahead.
    options.set_advise_random_on_open(False)
    table = BlockBasedOptions()
    table.set_format_version(_TABLE_FORMAT)
    table.set_block_size(_BLOCK_BYTES)
    table.set_block_cache(cache)
    options.set_block_based_table_factory(table)
    return options
