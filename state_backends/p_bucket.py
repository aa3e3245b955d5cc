"""The persistent side of a shard: immutable SST files, and the RocksDB that has ingested them.

A file is written once with RocksDB's own writer and then ingested by hard link, so the durable copy and the
one that reads are the same bytes on disk. Keys are ``file number | slice | seq``, big endian: files never
overlap, so each lands on the lowest level, nothing is ever compacted into something else, and the blocks of
one slice stand together in each file. An 8-byte key (the file number alone) holds the file's index of blocks.

Used by the I/O thread only, except where said. Sources of the layout: FACTS ("rocksdict"), DESIGN section 2.
"""

from __future__ import annotations

import os
import shutil
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import orjson
from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    SstFileWriter,
    WriteOptions,
)

from aion.errors import CorruptBlock, CorruptState, StateError
from state_backends.block import Block, parse
from state_backends.io_thread import Steps
from state_backends.store import SstFile

_KEY = struct.Struct(">QQQ")
_INDEX_KEY = struct.Struct(">Q")
_SIGN = 1 << 63
_LAST = ((1 << 64) - 1, (1 << 64) - 1)
_BLOCK_BYTES = 4096
CACHE_BYTES = 4 << 20


def cache_bytes(budget_bytes: int) -> int:
    """The part of a memory budget for RocksDB's block cache: it only serves indexes and small blocks."""
    return min(CACHE_BYTES, budget_bytes // 16)


class Indexed(NamedTuple):
    """A line of a file's index of blocks."""

    slice_us: int
    seq: int
    size_bytes: int


class PBucket:
    """Writes, ingests, reads and drops the files of one shard.

    ``files``: where files are kept for good. ``live``: RocksDB's own folder, made when first needed and removed by
    :meth:`close`; both should be on one file system, otherwise ingesting copies. ``durable``: files are synced to the
    device, and deleted by the versions that name them; otherwise as soon as they are dropped. ``cache``: RocksDB's
    block cache, shared by a host's shards.
    """

    def __init__(self, files: Path, live: Path, *, durable: bool, cache: Cache | None = None) -> None:
        self._cache = cache or Cache(CACHE_BYTES)
        self._numbers = threading.Lock()  # several I/O threads are possible, for comparison
        self.files = files
        self.live = live
        self.durable = durable
        self.tag = "0"
        self.next_file_no = 0
        self._db: Rdict | None = None
        self._closed = False

    # -- steps for the I/O thread -------------------------------------------------------------------------

    def write(self, blocks: Sequence[tuple[int, Block]]) -> Steps[SstFile]:
        """Steps that write (seq, block) pairs as one file and ingest it."""
        with self._numbers:
            file_no = self.next_file_no
            self.next_file_no += 1
        self.files.mkdir(parents=True, exist_ok=True)
        path = self.files / f"{file_no:010d}-{self.tag}.sst"
        part = path.with_suffix(".part")
        ordered = sorted(blocks, key=lambda b: (b[1].header.slice_us, b[0]))
        index = orjson.dumps([[b.header.slice_us, seq, b.size_bytes] for seq, b in ordered])
        # RocksDB reads the first and the last data block of a file that it ingests: both are kept small.
        index = index.ljust(_BLOCK_BYTES)
        try:
            writer = SstFileWriter(_options(self._cache))
            writer.open(str(part))
            writer[_INDEX_KEY.pack(file_no)] = index
            for seq, block in ordered:
                writer[_key(file_no, block.header.slice_us, seq)] = bytes(block.data)
                yield block.size_bytes
            writer[_KEY.pack(file_no, *_LAST)] = b""
            writer.finish()  # syncs the file
            part.rename(path)
            if self.durable:
                sync(self.files)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        file = SstFile(file_no, str(path), path.stat().st_size, zlib.crc32(index), len(ordered))
        try:
            self._ingest(file)
        except BaseException:
            path.unlink(missing_ok=True)  # nobody will ever name it
            raise
        return file

    def fetch(self, file_no: int, slice_us: int, seq: int) -> Steps[Block]:
        """Steps that read one block; raises CorruptBlock if it is not there."""
        name = f"block {seq} of slice {slice_us} in file {file_no}"
        try:
            value = self._open().get(_key(file_no, slice_us, seq))
        except Exception as error:  # rocksdict raises plain Exceptions
            raise CorruptBlock(f"{name}: RocksDB cannot read it: {error}") from error
        if value is None:
            raise CorruptBlock(f"{name}: the file does not hold it")
        yield len(value)
        return parse(value, name)

    def adopt(self, file: SstFile) -> Steps[list[Indexed]]:
        """Steps that take over an existing file; returns its index. Raises CorruptState naming the file."""
        name = Path(file.path).name
        yield 0
        try:
            if Path(file.path).stat().st_size != file.size_bytes:
                raise CorruptState(f"{name}: not of the {file.size_bytes} bytes that its manifest says")
            self._ingest(file)
            index = self._open().get(_INDEX_KEY.pack(file.file_no))
        except (OSError, CorruptState) as error:
            raise CorruptState(f"file {name} cannot be read: {error}") from error
        except Exception as error:  # rocksdict raises plain Exceptions for what RocksDB refuses
            raise CorruptState(f"file {name} is no whole SST file: {error}") from error
        if index is None or zlib.crc32(index) != file.index_crc:
            raise CorruptState(f"file {name}: its index of blocks is not the one its manifest names")
        self.next_file_no = max(self.next_file_no, file.file_no + 1)
        return [Indexed(*line) for line in orjson.loads(index)]

    def drop(self, file_no: int) -> Steps[None]:
        """Steps that make RocksDB forget a file; if it is durable, the other link is retention's to delete."""
        if self._db is not None:
            begin, end = _INDEX_KEY.pack(file_no), _INDEX_KEY.pack(file_no + 1)
            self._db.delete_range(begin, end, write_opt=_no_wal())
            yield 0
        if self._db is not None:  # closed meanwhile: its folder goes with all that is in it
            # A compaction over exactly this range unlinks the file, and rewrites nothing.
            self._db.compact_range(begin, end)
        if not self.durable:
            for path in self.files.glob(f"{file_no:010d}-*.sst"):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes RocksDB and removes its folder, for good; call it when no request is under way."""
        self._closed = True
        if self._db is not None:
            self._db.close()
            self._db = None
        shutil.rmtree(self.live, ignore_errors=True)

    def disk_bytes(self) -> int:
        """Bytes of RocksDB's files, dead blocks included."""
        return sum(f["size"] for f in self._db.live_files()) if self._db is not None else 0

    # -- RocksDB ------------------------------------------------------------------------------------------

    def _open(self) -> Rdict:
        if self._closed:
            # The folder may be another p-bucket's by now.
            raise StateError(f"the p-bucket in {self.live} is closed")
        if self._db is None:
            shutil.rmtree(self.live, ignore_errors=True)
            self.live.mkdir(parents=True, mode=0o700)
            self._db = Rdict(str(self.live / "db"), _options(self._cache))
        return self._db

    def _ingest(self, file: SstFile) -> None:
        db = self._open()
        link = self.live / f"{file.file_no}.ingest"
        try:
            try:
                os.link(file.path, link)
            except OSError:
                shutil.copyfile(file.path, link)  # another file system
            how = IngestExternalFileOptions()
            how.set_move_files(True)
            db.ingest_external_file([str(link)], how)
        except BaseException:
            if link.is_file():
                link.unlink()
            raise


def _key(file_no: int, slice_us: int, seq: int) -> bytes:
    return _KEY.pack(file_no, slice_us + _SIGN, seq)


def _options(cache: Cache) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    # Blocks are compressed, or not, by their codec; and files are never merged: they are born sorted.
    options.set_compression_type(DBCompressionType.none())
    options.set_disable_auto_compactions(True)
    options.set_write_buffer_size(1 << 20)
    # Blocks of one window are read one after the other: the kernel may read ahead.
    options.set_advise_random_on_open(False)
    table = BlockBasedOptions()
    table.set_block_size(_BLOCK_BYTES)
    table.set_block_cache(cache)
    options.set_block_based_table_factory(table)
    return options


def _no_wal() -> WriteOptions:
    write = WriteOptions()
    write.disable_wal = True
    return write


def sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's names, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
