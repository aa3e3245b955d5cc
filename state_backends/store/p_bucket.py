"""The persistent side of a shard: immutable SST files, and a RocksDB that has ingested them.

A file is written once with RocksDB's own writer, and then ingested by hard link. So the durable copy and the copy that
RocksDB reads are the same bytes on disk. :mod:`state_backends.store.sst_file` describes the contents of a file.

Only the I/O thread calls it, except where a docstring says otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import threading
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rocksdict import Cache, IngestExternalFileOptions, Rdict, ReadOptions, WriteOptions

from state_backends.files.faults import disk_error, disk_errors, from_rocksdb, is_rocksdb_io
from state_backends.files.names import MERGED, PART, SST, SstFile, is_merged
from state_backends.files.storage import link_or_copy, linking, make_folder, sync
from state_backends.format.block import Block, parse
from state_backends.format.checksum import crc32
from state_backends.format.errors import CorruptBlock, CorruptState, StateError
from state_backends.format.sst_table import Span
from state_backends.store.body_files import BodyFiles, NoBodies
from state_backends.store.file_index import Indexed
from state_backends.store.io import Steps
from state_backends.store.sst_file import NewFile, block_key, checksum, index_key, read_index, rocksdb_options
from state_backends.store.trimming import Trimmer
from state_backends.store.waiting import waiting_for
from state_backends.thresholds import threshold

_MOST_LEFT = threshold(16, 2)
_FILES_AT_ONCE = threshold(64, 2)  # takes about 0.1 s; an urgent read of another shard waits for that
CACHE_BYTES = 4 << 20
# A RocksDB that failed may refuse to close, and then it keeps its folder locked. So each gets its own folder.
_db_numbers = itertools.count()
log = logging.getLogger(__name__)


def cache_bytes(budget_bytes: int) -> int:
    """Returns the part of a memory budget that RocksDB's block cache gets. The cache only serves indexes and small
    blocks.
    """
    return min(CACHE_BYTES, budget_bytes // 16)


class PBucket:
    """Writes, ingests, reads and drops the files of one shard.

    ``files``: the folder for new files. ``live``: RocksDB's own folder, made when first needed and removed by
    :meth:`close`. Both should be on one file system, because otherwise ingesting copies. ``durable``: new files are
    synced with their folder, and stay there when they are dropped. Otherwise they are temporary, and :meth:`publish`
    links those that are to stay into another folder. ``cache``: RocksDB's block cache, shared by a host's shards.

    Errors of the disk are raised as DiskError. A RocksDB that failed to write once refuses all later writes. So a new
    one is made from the same files when it is next needed.
    """

    def __init__(self, files: Path, live: Path, *, durable: bool, cache: Cache | None = None) -> None:
        self.cache = cache or Cache(CACHE_BYTES)
        self._numbers_lock = threading.Lock()  # experiments may use several I/O threads
        self.files = files
        self.live = live
        self.durable = durable
        self.tag = "0"
        self.bodies: BodyFiles | NoBodies = NoBodies()
        """Of the references among the blocks."""
        self.trimmer = Trimmer(live)
        """Knows the local copies that may lack a part."""
        self.made: Callable[[int, Path], None] = lambda file_no, path: None
        """Called with the number and the path of each new file, when it is complete."""
        self.next_file_no = 0
        self._db: Rdict | None = None
        self._db_path = live
        self._closed = False
        self._failed = False
        self._ingested: dict[int, SstFile] = {}
        self._left: set[int] = set()  # files that nobody needs, and that RocksDB cannot drop
        self._writing: set[int] = set()

    def publish(self, files: Sequence[SstFile], attempt: str, into: Path) -> list[str]:
        """Links new files into another folder, under names with the attempt. They are durable when this returns.

        Those that an earlier call has linked stay. Returns their names, in the same order. Any thread may call it.
        Raises DiskError; then no file is published.
        """
        names: list[str] = []
        made: list[Path] = []
        try:
            with disk_errors("writing state", into):
                make_folder(into)
                for file in files:
                    path = into / published_name(file.file_no, file.name, attempt)
                    names.append(path.name)
                    if not path.exists():
                        made.append(path)
                        link_or_copy(Path(file.path), path)
                if files:
                    sync(into)
        except BaseException:
            for path in made:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise
        return names

    @property
    def is_there(self) -> bool:
        """Whether RocksDB's folder is where it was made, if it was made. Any thread may ask."""
        return self._db is None or os.path.exists(self._db_path)  # noqa: PTH110 - no error if the disk fails

    def is_near(self, file_no: int, slice_us: int, seq: int) -> bool:
        """Whether this host has a block, so that nothing must be fetched to read it. Any thread may ask."""
        copy = self.trimmer.partial(file_no)
        return copy is None or not copy.missing(copy.around(block_key(file_no, slice_us, seq)))

    # -- steps for the I/O thread -------------------------------------------------------------------------

    def write(self, blocks: Sequence[tuple[int, Block]]) -> Steps[SstFile]:
        """Steps that write (seq, block) pairs as one file and ingest it."""
        ordered = sorted(blocks, key=lambda b: (b[1].header.slice_us, b[0]))
        index = [Indexed.of(seq, block) for seq, block in ordered]
        with self.writing(index) as out:
            for seq, block in ordered:
                out.put(block.header.slice_us, seq, bytes(block.stored))
                yield block.size_bytes
            yield from out.seal()
        return out.file

    @contextlib.contextmanager
    def writing(self, index: Sequence[Indexed], mark: str = "") -> Iterator[NewFile]:
        """Returns a context with a new file. Put the blocks of its index into it, in that order, and seal it.

        The file is ingested at the end of the context. If anything is raised, it is deleted. ``mark``: the end of its
        name. Raises DiskError.
        """
        with self.making(mark) as (file_no, path, part):
            out = NewFile(file_no, path.name, part, index, rocksdb_options(self.cache))
            try:
                yield out
            except BaseException:
                out.close()
                raise
            self.place(part, path)
            out.file = SstFile(file_no, str(path), out.size_bytes, out.crc, out.index_crc, len(index))
            self._ingest([out.file])
            self.trimmer.add(file_no, (line.slice_us for line in index))

    @contextlib.contextmanager
    def making(self, mark: str = "") -> Iterator[tuple[int, Path, Path]]:
        """Returns a context for a new file: its number, its path, and the path that it has until it is complete.

        If anything is raised, the file is deleted. Raises DiskError.
        """
        with self._numbers_lock:
            file_no = self.next_file_no
            self.next_file_no += 1
            stem = f"{file_no:010d}-{self.tag}{mark}"
            self._writing.add(file_no)
        path = self.files / f"{stem}{SST}"
        part = path.with_suffix(PART)
        try:
            with disk_errors("writing state", self.files):
                self.files.mkdir(parents=True, exist_ok=True)
                yield file_no, path, part
        except BaseException:
            for leftover in (part, path):  # no version will ever name it
                with contextlib.suppress(OSError):
                    leftover.unlink()
            raise
        finally:
            self._writing.discard(file_no)
        self.made(file_no, path)

    def place(self, part: Path, path: Path) -> None:
        """Gives a complete file its name."""
        part.rename(path)
        if self.durable:
            sync(self.files)

    def fetch(self, file_no: int, blocks: Sequence[tuple[int, int]], size_bytes: int = 0) -> Steps[list[Block]]:
        """Steps that read a block, given as (slice, seq), and with it those behind it in the file.

        ``size_bytes``: of all of them. Returns the first, and as many of the others as came with it. Raises
        CorruptBlock if the first is missing or damaged, DiskError if unreadable.
        """
        names = self._names(file_no, blocks)
        keys = [block_key(file_no, *block) for block in blocks]
        yield from self.trimmer.make_room()
        with self.trimmer.reading(file_no):
            if (copy := self.trimmer.partial(file_no)) is not None:
                yield from waiting_for(copy.bring(Span(copy.around(keys[0]).begin, copy.around(keys[-1]).end)))
            found = (yield from self._neighbours(keys, size_bytes)) if len(keys) > 1 else []
            if not found:
                found = [self._value(keys[0], names[0])]
                yield len(found[0])
        parsed = [parse(found[0], names[0])]
        with contextlib.suppress(CorruptBlock):  # who reads that one reports it
            parsed += [parse(value, name) for value, name in zip(found[1:], names[1:], strict=False)]
        return parsed

    def _names(self, file_no: int, blocks: Sequence[tuple[int, int]]) -> list[str]:
        file = self._ingested.get(file_no)
        where = file.name if file else file_no
        return [f"block {seq} of slice {slice_us} in file {where}" for slice_us, seq in blocks]

    def _neighbours(self, keys: Sequence[bytes], size_bytes: int) -> Steps[list[bytes]]:
        """Steps that read the values of the first keys that have no other between them. [] if that failed."""
        options = ReadOptions()
        options.set_readahead_size(size_bytes)
        found: list[bytes] = []
        try:
            values = self._open().iter(options)
            values.seek(keys[0])
            for key in keys:
                if found:
                    values.next()
                if not values.valid() or values.key() != key:
                    break
                found.append(values.value())
                yield len(found[-1])
        except Exception as error:  # reading the first alone says what is wrong
            log.debug("neighbours cannot be read together: %s", error)
            return []
        return found

    def _value(self, key: bytes, name: str) -> bytes:
        try:
            value: bytes | None = self._open().get(key)
        except Exception as error:  # rocksdict raises plain Exceptions
            if isinstance(error, OSError) or is_rocksdb_io(error):
                raise disk_error(f"reading {name}", self.files, error) from error
            raise CorruptBlock(f"{name}: RocksDB cannot read it: {error}") from error
        if value is None:
            raise CorruptBlock(f"{name}: it is not in the file")
        return value

    def complete(self, files: Sequence[SstFile]) -> Steps[None]:
        """Steps that fetch what the local copies lack, of the newest file first, as far as the host has room.

        Errors are left to who reads.
        """
        copies = self.trimmer.copies
        for file in sorted(files, key=lambda file: file.file_no, reverse=True):
            copy = copies.partial(file.name)
            if copy is None or copy.is_whole:
                continue
            for span in copy.spans():
                if (room := copies.room()) is not None and room < span.end - span.begin:
                    return
                try:
                    while futures := copy.bring(span, ahead=True):
                        yield from waiting_for(futures)
                except StateError as error:
                    log.warning("file %s is fetched when it is read, and not before: %s", file.name, error)
                    break
                yield span.end - span.begin
        yield 0

    def trim(self) -> Steps[None]:
        """Steps that keep the local copies within the host's budget for them."""
        return self.trimmer.trim()

    def whole(self, files: Sequence[SstFile]) -> Steps[None]:
        """Steps that fetch all that the local copies lack. Raises StorageError."""
        copies = [copy for file in files if (copy := self.trimmer.copies.partial(file.name)) is not None]
        yield from waiting_for([future for copy in copies for future in copy.bring(Span(0, copy.file.size_bytes))])

    def adopt(self, files: Sequence[SstFile]) -> Steps[list[list[Indexed]]]:
        """Steps that ingest existing files; returns the index of each.

        The time depends on the number of files, not on their size: only the index and a few small parts of each are
        read. Raises CorruptState or DiskError, naming the file.
        """
        indexes: list[list[Indexed]] = []
        for begin in range(0, len(files), _FILES_AT_ONCE):
            yield 0
            batch = files[begin : begin + _FILES_AT_ONCE]
            try:
                found = yield from self._ingest_existing(batch)
            except CorruptState:
                if len(batch) == 1:
                    raise
                for file in batch:  # finds the bad one; ingesting a good one twice does no harm
                    yield 0
                    yield from self._ingest_existing([file])
                raise
            for file, index in zip(batch, found, strict=True):
                if index is None or crc32(index) != file.index_crc:
                    # If a file was replaced by a copy of another one, their keys collide, and this index may be
                    # missing because of a third file. The checksums of the files show which one is bad.
                    here = (f for f in files if self.trimmer.copies.partial(f.name) is None)
                    bad = next((f for f in here if checksum(Path(f.path)) != f.crc), file)
                    raise CorruptState(f"file {bad.name}: its index of blocks is not the one in the manifest")
                try:
                    indexes.append(read_index(index))
                except CorruptState as error:
                    raise CorruptState(f"file {file.name}: {error}") from None
                self.trimmer.add(file.file_no, (line.slice_us for line in indexes[-1]))
                self.next_file_no = max(self.next_file_no, file.file_no + 1)
        return indexes

    def _ingest_existing(self, files: Sequence[SstFile]) -> Steps[list[bytes | None]]:
        """Steps that ingest files. Returns the bytes of their indexes. Raises CorruptState, DiskError."""
        names = f"file {files[0].name}" if len(files) == 1 else f"{len(files)} files"
        try:
            for file in files:
                if Path(file.path).stat().st_size != file.size_bytes:
                    raise CorruptState(
                        f"file {file.name}: it does not have the {file.size_bytes} bytes of its manifest"
                    )
            self._open()  # which makes the folder
            for file in files:
                yield from linked(self.live, file)
                self.trimmer.add_partial(file)
            self._ingest(files)
            found: list[bytes | None] = self._open().get([index_key(file.file_no) for file in files])
            return found
        except FileNotFoundError as error:
            raise CorruptState(f"{names} cannot be read: {error}") from error
        except CorruptState:
            raise
        except Exception as error:  # rocksdict raises plain Exceptions for what RocksDB refuses
            if isinstance(error, OSError) or is_rocksdb_io(error):
                raise disk_error(f"opening {names}", self.files, error) from error
            raise CorruptState(f"{names}: not a complete SST file: {error}") from error

    def drop(self, *file_nos: int) -> Steps[None]:
        """Steps that make RocksDB forget files. Retention deletes the published ones."""
        dropped = [self._ingested.pop(no) for no in sorted(file_nos) if no in self._ingested]
        # RocksDB would read such a file while it drops it, and fail at a hole. It goes with the folder.
        self._left.update(no for no in file_nos if self.trimmer.drop(no))
        with self.trimmer.reading(*file_nos):
            yield from self._drop([file.file_no for file in dropped if file.file_no not in self._left])
        if self._db is not None and len(self._left) > max(_MOST_LEFT, len(self._ingested)) and not self.trimmer.is_read:
            self._failed = True  # so that the next write makes a new RocksDB, without them
        if not self.durable:
            for file in dropped:
                self.delete(file)

    def _drop(self, file_nos: Sequence[int]) -> Steps[None]:
        for first, last in self._runs(file_nos):
            if self._db is None or self._failed:
                break  # the next RocksDB is made without these files
            begin, end = index_key(first), index_key(last + 1)
            try:
                self._db.delete_range(begin, end, write_opt=_no_wal())
                yield 0
                if self._db is None:
                    break  # closed meanwhile, and its folder was removed
                # Compacting exactly this range deletes the files, and rewrites nothing.
                self._db.compact_range(begin, end)
            except Exception as error:
                if not from_rocksdb(error):
                    raise
                self._failed = True
                log.warning("RocksDB in %s could not drop files; a new one will be made: %s", self.live, error)

    def delete(self, file: SstFile) -> None:
        """Deletes a file that was written here and that no version names. Any thread may call it."""
        path = Path(file.path)
        if path.parent == self.files:
            with contextlib.suppress(OSError):  # it will be deleted with the folder
                path.unlink()

    def close(self) -> None:
        """Closes RocksDB and removes its folder. Call it when no request is under way."""
        self._closed = True
        if self._db is not None:
            close_db(self._db)
            self._db = None
        self._ingested.clear()
        self.trimmer.clear()
        self.bodies.close()
        shutil.rmtree(self.live, ignore_errors=True)

    # -- RocksDB ------------------------------------------------------------------------------------------

    def _open(self) -> Rdict:
        if self._closed:
            # The folder may be another p-bucket's by now.
            raise StateError(f"the p-bucket in {self.live} is closed")
        if self._db is None:
            shutil.rmtree(self.live, ignore_errors=True)
            self.live.mkdir(parents=True, mode=0o700)
            self._db_path, self._failed = self._new_path(), False
            self._db = Rdict(str(self._db_path), rocksdb_options(self.cache))
        return self._db

    def _new_path(self) -> Path:
        return self.live / f"db-{next(_db_numbers)}"

    def _ingest(self, files: Sequence[SstFile]) -> None:
        """Ingests all files or none. One call for many files is several times faster than many calls."""
        db = self._open()
        if not self._failed:
            try:
                ingest(db, self.live, files)
            except Exception as error:
                if not is_rocksdb_io(error):
                    raise
                # The disk failed, now or earlier. RocksDB does not recover by itself.
                self._failed = True
        if self._failed:
            ingest(self._renew(db), self.live, files)
        self._ingested.update((file.file_no, file) for file in files)

    def _renew(self, old: Rdict) -> Rdict:
        """Makes a new RocksDB beside the old one. Reads use the old one until the new one has all files."""
        path = self._new_path()
        db: Rdict | None = None
        try:
            db = Rdict(str(path), rocksdb_options(self.cache))
            ingest(db, self.live, list(self._ingested.values()))
        except BaseException:
            if db is not None:
                close_db(db)
            shutil.rmtree(path, ignore_errors=True)
            raise
        self._left.clear()
        path, self._db_path = self._db_path, path
        self._db, self._failed = db, False
        close_db(old)
        shutil.rmtree(path, ignore_errors=True)
        return db

    def _runs(self, file_nos: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the numbers as ranges (first, last). No file that stays lies within a range."""
        staying = sorted(self._ingested.keys() | self._writing | self._left)
        runs: list[tuple[int, int]] = []
        for no in file_nos:
            if runs and bisect(staying, runs[-1][1]) == bisect(staying, no):
                runs[-1] = (runs[-1][0], no)
            else:
                runs.append((no, no))
        return runs


def published_name(file_no: int, name: str, attempt: str) -> str:
    """Returns the name of a file in a version that an attempt makes. ``name``: the one under which it was written."""
    return f"{file_no:010d}-{attempt}{MERGED if is_merged(name) else ''}{SST}"


def linked(folder: Path, file: SstFile) -> Steps[None]:
    """Steps that bring a file to a folder for :func:`ingest`: by a link, which takes no step, or by a copy."""
    with contextlib.suppress(FileExistsError):
        yield from linking(Path(file.path), link_of(folder, file))


def link_of(folder: Path, file: SstFile) -> Path:
    return folder / f"{file.file_no}.ingest"


def ingest(db: Rdict, folder: Path, files: Sequence[SstFile]) -> None:
    """Ingests all files or none, by links in ``folder``. Where two files have the same key, the later one counts.

    A file that :func:`linked` has brought there already is taken.
    """
    if not files:
        return
    links = [link_of(folder, file) for file in files]
    try:
        for link, file in zip(links, files, strict=True):
            with contextlib.suppress(FileExistsError):
                link_or_copy(Path(file.path), link)
        how = IngestExternalFileOptions()
        how.set_move_files(True)
        db.ingest_external_file([str(link) for link in links], how)
    except BaseException:
        for link in links:
            with contextlib.suppress(OSError):
                link.unlink()
        raise


def close_db(db: Rdict) -> None:
    """Closes RocksDB. If it has failed, it complains that it cannot flush, but nobody needs what it would flush."""
    try:
        db.close()
    except Exception as error:
        if not from_rocksdb(error):
            raise
        log.debug("RocksDB was closed after it had failed: %s", str(error))


def _no_wal() -> WriteOptions:
    write = WriteOptions()
    write.disable_wal = True
    return write
