"""The persistent side of a shard: immutable SST files, and the RocksDB that has ingested them.

A file is written once with RocksDB's own writer and then ingested by hard link, so the durable copy and the
one that reads are the same bytes on disk. Keys are ``file number | slice | seq``, big endian: files never
overlap, so each lands on the lowest level, nothing is ever compacted into something else, and the blocks of
one slice stand together in each file. An 8-byte key (the file number alone) holds the file's index of blocks.

Used by the I/O thread only, except where said. Sources of the layout: FACTS ("rocksdict"), DESIGN section 2.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import struct
import threading
import zlib
from bisect import bisect
from collections.abc import Iterator, Sequence
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

from aion.errors import CorruptBlock, CorruptState
from state_backends.block import Block, parse
from state_backends.faults import disk_error, disk_errors, from_rocksdb, is_rocksdb_io
from state_backends.io_thread import Steps
from state_backends.store import SstFile

_KEY = struct.Struct(">QQQ")
_INDEX_KEY = struct.Struct(">Q")
_SIGN = 1 << 63
_LAST = ((1 << 64) - 1, (1 << 64) - 1)
_BLOCK_BYTES = 4096
_SYNC_BYTES = 8 << 20
_OWN_FILE_BYTES = 1 << 20
CACHE_BYTES = 4 << 20
log = logging.getLogger(__name__)


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

    What the disk refuses is raised as DiskError. RocksDB that once could not write never writes again, so it is made
    anew, from the same files, when it is next needed.
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
        self._db_path = live / "db"
        self._failed = False
        self._held: dict[int, SstFile] = {}  # by RocksDB
        self._writing: set[int] = set()

    def has(self, file_no: int) -> bool:
        """Whether a file is being written, or can be read. From any thread."""
        return file_no in self._writing or file_no in self._held

    # -- steps for the I/O thread -------------------------------------------------------------------------

    def write(self, blocks: Sequence[tuple[int, Block]]) -> Steps[SstFile]:
        """Steps that write (seq, block) pairs as one file and ingest it."""
        ordered = sorted(blocks, key=lambda b: (b[1].header.slice_us, b[0]))
        with self.writing([Indexed(b.header.slice_us, seq, b.size_bytes) for seq, b in ordered]) as out:
            for seq, block in ordered:
                out.put(block.header.slice_us, seq, bytes(block.data))
                yield block.size_bytes
        return out.file

    @contextlib.contextmanager
    def writing(self, index: Sequence[Indexed], mark: str = "") -> Iterator[NewFile]:
        """A new file, to be given the blocks of its index in this order; afterwards it is ingested, or nothing is left.

        ``mark``: what its name ends with. Raises DiskError.
        """
        with self._numbers:
            file_no = self.next_file_no
            self.next_file_no += 1
            self._writing.add(file_no)
        path = self.files / f"{file_no:010d}-{self.tag}{mark}.sst"
        part = path.with_suffix(".part")
        try:
            with disk_errors("writing state", self.files):
                self.files.mkdir(parents=True, exist_ok=True)
                out = NewFile(file_no, part, index, _options(self._cache))
                yield out
                out.finish()
                part.rename(path)
                if self.durable:
                    sync(self.files)
                out.file = SstFile(file_no, str(path), path.stat().st_size, out.index_crc, len(index))
                self._ingest(out.file)
        except BaseException:
            for left in (part, path):  # nobody will ever name it
                with contextlib.suppress(OSError):
                    left.unlink()
            raise
        finally:
            self._writing.discard(file_no)

    def fetch(self, file_no: int, slice_us: int, seq: int) -> Steps[Block]:
        """Steps that read one block; raises CorruptBlock if it is not there or damaged, DiskError if unreadable."""
        name = f"block {seq} of slice {slice_us} in file {file_no}"
        try:
            value = self._open().get(_key(file_no, slice_us, seq))
        except Exception as error:  # rocksdict raises plain Exceptions
            if isinstance(error, OSError) or is_rocksdb_io(error):
                raise disk_error(f"reading {name}", self.files, error) from error
            raise CorruptBlock(f"{name}: RocksDB cannot read it: {error}") from error
        if value is None:
            raise CorruptBlock(f"{name}: the file does not hold it")
        yield len(value)
        return parse(value, name)

    def adopt(self, file: SstFile) -> Steps[list[Indexed]]:
        """Steps that take over an existing file; returns its index.

        Raises CorruptState, or DiskError, naming the file.
        """
        name = Path(file.path).name
        yield 0
        try:
            if Path(file.path).stat().st_size != file.size_bytes:
                raise CorruptState(f"{name}: not of the {file.size_bytes} bytes that its manifest says")
            self._ingest(file)
            index = self._open().get(_INDEX_KEY.pack(file.file_no))
        except (FileNotFoundError, CorruptState) as error:
            raise CorruptState(f"file {name} cannot be read: {error}") from error
        except Exception as error:  # rocksdict raises plain Exceptions for what RocksDB refuses
            if isinstance(error, OSError) or is_rocksdb_io(error):
                raise disk_error(f"opening file {name}", self.files, error) from error
            raise CorruptState(f"file {name} is no whole SST file: {error}") from error
        if index is None or zlib.crc32(index) != file.index_crc:
            raise CorruptState(f"file {name}: its index of blocks is not the one its manifest names")
        self.next_file_no = max(self.next_file_no, file.file_no + 1)
        return [Indexed(*line) for line in orjson.loads(index)]

    def drop(self, *file_nos: int) -> Steps[None]:
        """Steps that make RocksDB forget files; if they are durable, the other links are retention's to delete."""
        dropped = [self._held.pop(no) for no in sorted(file_nos) if no in self._held]
        for first, last in self._runs([file.file_no for file in dropped]):
            if self._db is None or self._failed:
                break  # one that is made anew knows nothing of them
            begin, end = _INDEX_KEY.pack(first), _INDEX_KEY.pack(last + 1)
            try:
                self._db.delete_range(begin, end, write_opt=_no_wal())
                yield 0
                # A compaction over exactly this range unlinks the files, and rewrites nothing.
                self._db.compact_range(begin, end)
            except Exception as error:
                if not from_rocksdb(error):
                    raise
                self._failed = True
                log.warning("RocksDB in %s could not drop files and will be made anew: %s", self.live, error)
        if not self.durable:
            for file in dropped:
                Path(file.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes RocksDB and removes its folder; call it when no request is under way."""
        if self._db is not None:
            _close(self._db)
            self._db = None
        self._held.clear()
        shutil.rmtree(self.live, ignore_errors=True)

    def disk_bytes(self) -> int:
        """Bytes of RocksDB's files, dead blocks included."""
        return sum(f["size"] for f in self._db.live_files()) if self._db is not None else 0

    # -- RocksDB ------------------------------------------------------------------------------------------

    def _open(self) -> Rdict:
        if self._db is None:
            shutil.rmtree(self.live, ignore_errors=True)
            self.live.mkdir(parents=True, mode=0o700)
            self._db, self._failed = Rdict(str(self._db_path), _options(self._cache)), False
        return self._db

    def _ingest(self, file: SstFile) -> None:
        db = self._open()
        if not self._failed:
            try:
                self._ingest_into(db, file)
            except Exception as error:
                if not is_rocksdb_io(error):
                    raise
                # It may be the disk's fault now, or that of something earlier that RocksDB does not get over.
                self._failed = True
        if self._failed:
            self._ingest_into(self._renew(db), file)
        self._held[file.file_no] = file

    def _renew(self, old: Rdict) -> Rdict:
        """Makes RocksDB anew beside the old one, which is read from until the new one has everything."""
        path = self.live / f"db-{self.next_file_no}"
        shutil.rmtree(path, ignore_errors=True)
        db = Rdict(str(path), _options(self._cache))
        try:
            for file in list(self._held.values()):
                self._ingest_into(db, file)
        except BaseException:
            _close(db)
            shutil.rmtree(path, ignore_errors=True)
            raise
        path, self._db_path = self._db_path, path
        self._db, self._failed = db, False
        _close(old)
        shutil.rmtree(path, ignore_errors=True)
        return db

    def _ingest_into(self, db: Rdict, file: SstFile) -> None:
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
            with contextlib.suppress(OSError):
                link.unlink()
            raise

    def _runs(self, file_nos: Sequence[int]) -> list[tuple[int, int]]:
        """First and last of stretches of numbers between which nothing is that stays."""
        stays = sorted(self._held.keys() | self._writing)
        runs: list[tuple[int, int]] = []
        for no in file_nos:
            if runs and bisect(stays, runs[-1][1]) == bisect(stays, no):
                runs[-1] = (runs[-1][0], no)
            else:
                runs.append((no, no))
        return runs


class NewFile:
    """A file that is being written; ``file`` is known when it is whole and has been ingested."""

    file: SstFile

    def __init__(self, file_no: int, part: Path, index: Sequence[Indexed], options: Options) -> None:
        self.file_no = file_no
        self._part = part
        # RocksDB reads the first and the last data block of a file that it ingests: both are kept small.
        lines = orjson.dumps([tuple(line) for line in index]).ljust(_BLOCK_BYTES)
        self.index_crc = zlib.crc32(lines)
        self._writer = SstFileWriter(options)
        self._writer.open(str(part))
        self._writer[_INDEX_KEY.pack(file_no)] = lines
        self._unsynced = 0

    def put(self, slice_us: int, seq: int, value: bytes) -> None:
        self._writer[_key(self.file_no, slice_us, seq)] = value
        self._unsynced += len(value)

    def sync_due(self) -> bool:
        """Whether so much was written that syncing all at the end would keep the I/O thread for long."""
        return self._unsynced >= _SYNC_BYTES

    def sync(self) -> None:
        sync(self._part)
        self._unsynced = 0

    def finish(self) -> None:
        self._writer[_KEY.pack(self.file_no, *_LAST)] = b""
        self._writer.finish()  # syncs the file


def _close(db: Rdict) -> None:
    """Closes RocksDB, whatever it says: one that has failed says that it cannot flush what nobody needs."""
    try:
        db.close()
    except Exception as error:
        if not from_rocksdb(error):
            raise
        log.info("RocksDB was closed after it had failed: %s", error)


def _key(file_no: int, slice_us: int, seq: int) -> bytes:
    return _KEY.pack(file_no, slice_us + _SIGN, seq)


def _options(cache: Cache) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    # Blocks are compressed, or not, by their codec; and files are never merged: they are born sorted.
    options.set_compression_type(DBCompressionType.none())
    options.set_disable_auto_compactions(True)
    options.set_write_buffer_size(1 << 20)
    # Its log and its list of files grow with every commit: they are started anew now and then.
    options.set_max_log_file_size(_OWN_FILE_BYTES)
    options.set_keep_log_file_num(2)
    options.set_max_manifest_file_size(_OWN_FILE_BYTES)
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
