"""The keyed values of one shard on disk: runs, and a RocksDB that has ingested them.

A run is an SST file with the changes of one batch, sorted by key. The key of each value is preceded by the byte 01. A
deleted key has an empty value, because RocksDB's writer cannot write a deletion. One more entry comes first, whose key
is 00 and the file's number: it has the name under which the file was first written. So a run that was replaced by
another one is noticed when it is opened.

Only the I/O thread calls it, except where a docstring says otherwise. Errors of the disk are raised as DiskError,
damaged runs as CorruptState.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import orjson
from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, Rdict

from state_backends.files.faults import disk_error, disk_errors, from_rocksdb, is_rocksdb_io
from state_backends.files.names import SstFile
from state_backends.files.partial import PartialCopy
from state_backends.format.checksum import crc32
from state_backends.format.errors import AionError, CorruptState, StateError
from state_backends.format.sst_table import Span, TableIndex
from state_backends.store.io import Steps
from state_backends.store.p_bucket import PBucket, close_db, ingest, link_of, linked
from state_backends.store.sst_file import BLOCK_BYTES, TABLE_FORMAT, SstOut, checksum, rocksdb_options
from state_backends.store.waiting import waiting_for
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


_FIRST_KEYS, _MOST_KEYS = threshold(64, 1), threshold(1024, 2)  # of one step of a get
_ENTRIES = threshold(4096, 2)  # of one step of a scan
SCANNED_BLOCKS = threshold(32, 2)
"""How many blocks of data of each run a step of a scan reads, if parts of the run are not here."""
_END = b"\x02"  # above all keys of values
_db_numbers = itertools.count()  # a RocksDB that failed may keep its folder locked
log = logging.getLogger(__name__)
Spans = list[tuple[PartialCopy, Span]]


class RunFiles:
    """Writes and reads the runs of one shard.

    ``p_bucket`` numbers new files and says where they go. ``live``: the folder for RocksDB's own files. It is made when
    first needed and removed by :meth:`close`.

    ``runs``: what is read, oldest first; the newest value of a key counts. Any thread may set it. RocksDB follows with
    the next step: it ingests runs that were added at the end. After other changes, and after an error, a new RocksDB is
    made of all runs.
    """

    def __init__(self, p_bucket: PBucket, live: Path) -> None:
        self.runs: tuple[SstFile, ...] = ()
        self._p_bucket = p_bucket
        self._live = live
        self._db: Rdict | None = None
        self._db_path = live
        self._ingested: tuple[SstFile, ...] = ()
        self._closed = False
        self._looked_at: tuple[tuple[SstFile, ...], int] | None = None
        self._copies: list[PartialCopy] = []  # of those runs, if a part of them was missing

    def write(self, changes: Iterable[tuple[bytes, bytes | None]], mark: str = "") -> Steps[SstFile]:
        """Steps that write a run. ``changes``: as NewRun takes them. ``mark``: see PBucket."""
        with self._p_bucket.making(mark) as (file_no, path, part):
            out = NewRun(file_no, path.name, part, run_options(self._p_bucket.cache))
            try:
                yield from out.write(changes)
            except BaseException:
                out.close()
                raise
            self._p_bucket.place(part, path)
        return SstFile(file_no, str(path), out.size_bytes, out.crc, out.index_crc, out.keys)

    def get(self, keys: Sequence[bytes], most_bytes: int) -> Steps[list[bytes | None]]:
        """Steps that look up keys. Ends early, with fewer values than keys, after ``most_bytes``."""
        values: list[bytes | None] = []
        count, total = _FIRST_KEYS, 0
        while len(values) < len(keys) and total < most_bytes:
            part = keys[len(values) : len(values) + count]
            yield from self._ready_for(partial(self._spans_of, part))
            with self._reading() as db:
                found = db.get([VALUES + key for key in part])
            size = sum(map(len, filter(None, found)))
            values += [value or None for value in found]
            total += size
            yield size
            # The sizes of values are unknown, so each step looks up as many keys as the one before lets expect.
            count = max(1, min(2 * count, _MOST_KEYS, count * STEP_BYTES // max(size, 1)))
        return values

    def page(self, begin: bytes, end: bytes | None) -> Steps[tuple[list[tuple[bytes, bytes]], bytes | None]]:
        """Steps that read some entries from ``begin`` on, deleted keys excluded.

        Returns the entries, and the key at which to go on; None if that was the end.
        """
        entries: list[tuple[bytes, bytes]] = []
        upto = _END if end is None else VALUES + end
        at: bytes | None = VALUES + begin
        while at is not None:
            yield from self._ready_for(lambda at=at: self._spans_between(at, upto)[0])  # type: ignore[misc]
            _, upto_here = self._spans_between(at, upto)
            with self._reading() as db:
                size, at = _read(db, at, upto_here, entries)
            if at is None and upto_here < upto:
                at = upto_here
            yield size
            if entries:
                break
        return entries, None if at is None else at[len(VALUES) :]

    def adopt(self) -> Steps[None]:
        """Steps that open the runs, and check that each is the run of its name. Raises CorruptState, DiskError."""
        for run in self.runs:
            try:
                size = Path(run.path).stat().st_size
            except FileNotFoundError as error:
                raise CorruptState(f"file {run.name} cannot be read: {error}") from error
            except OSError as error:
                raise disk_error(f"opening file {run.name}", self._p_bucket.files, error) from error
            if size != run.size_bytes:
                raise CorruptState(f"file {run.name}: it does not have the {run.size_bytes} bytes of its manifest")
        yield 0
        yield from self._ready()
        runs = self.runs
        with self._reading() as db:
            names = db.get([name_key(run.file_no) for run in runs]) if runs else []
        for run, name in zip(runs, names, strict=True):
            if name is None or crc32(name) != run.index_crc:
                # Another file may have hidden this entry. The checksums of the files show which one is bad.
                bad = self._damaged() or run
                raise CorruptState(f"file {bad.name}: it is not the file that the manifest names")

    def complete(self) -> Steps[None]:
        """Steps that fetch what the local copies of the runs lack."""
        return self._p_bucket.complete(self.runs)

    def refresh(self) -> Steps[None]:
        """Steps that bring RocksDB up to date. Then the next read need not do it."""
        if not self._closed:
            yield from self._ready()
        if not self._closed:
            with self._reading():
                pass
        yield 0

    def merge(self, runs: Sequence[SstFile], mark: str, *, oldest: bool) -> Steps[SstFile]:
        """Steps that write one run with what these runs say together. ``oldest``: no run is older than these.

        A RocksDB of its own merges them, and checks their bytes.
        """
        path = self._new_path()
        db: Rdict | None = None
        try:
            with self._p_bucket.trimmer.reading(*(run.file_no for run in runs)):
                yield from self._p_bucket.whole(runs)
                with self._errors():
                    db = self._make_db(path)
                    for run in runs:
                        yield from linked(path, run)
                    ingest(db, path, runs)
                yield 0
                return (yield from self.write(self._merged(db, oldest), mark))
        finally:
            if db is not None:
                close_db(db)
            shutil.rmtree(path, ignore_errors=True)

    def _merged(self, db: Rdict, oldest: bool) -> Iterator[tuple[bytes, bytes]]:
        with self._errors():
            at = db.iter()
            at.seek(VALUES)
            skip = len(VALUES)
            while at.valid():
                value = at.value()
                # If no older run has the key, nothing needs to be deleted.
                if value or not oldest:
                    yield at.key()[skip:], value
                at.next()
            at.status()  # raises what ended the loop too early

    def delete(self, run: SstFile) -> None:
        """Deletes a run that was written here and that no version names. Any thread may call it."""
        self._p_bucket.delete(run)

    def close(self) -> None:
        """Closes RocksDB and removes its folder. Call it when no request is under way."""
        self._closed = True
        self._drop_db()
        shutil.rmtree(self._live, ignore_errors=True)

    # -- RocksDB ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Rdict]:
        """A context with a RocksDB that has exactly the runs of :attr:`runs`."""
        with self._errors():
            try:
                db = self._open()
            except Exception:
                self._drop_db()  # it may have failed for good, so the next step makes another
                raise
            yield db

    def _ready_for(self, spans: Callable[[], Spans]) -> Steps[None]:
        """Like :meth:`_ready`. Also fetches the ranges ``spans()`` of local copies, which the next read needs.

        They are asked for again after each step, because the runs may have changed.
        """
        while True:
            yield from self._ready()
            futures = [future for copy, span in spans() for future in copy.bring(span)]
            if not futures:
                return
            yield from waiting_for(futures)

    def _ready(self) -> Steps[None]:
        """Steps that copy the runs that RocksDB has not ingested yet, if the file system has no links.

        Between two steps, other requests may do the same, or change :attr:`runs`.
        """
        missing = self._missing()
        if self._closed or not missing:
            return  # who reads what is closed gets an error
        with self._errors():
            for run in missing:
                if run in self._missing():
                    self._live.mkdir(parents=True, exist_ok=True, mode=0o700)
                    yield from linked(self._live, run)
                    if run not in self._missing():
                        link_of(self._live, run).unlink(missing_ok=True)

    def _partial(self) -> list[tuple[PartialCopy, TableIndex]]:
        """The local copies that may lack a part, with their indexes."""
        runs, trimmer = self.runs, self._p_bucket.trimmer
        if self._looked_at is None or runs is not self._looked_at[0] or trimmer.shrunk != self._looked_at[1]:
            copies = (trimmer.copies.partial(run.name) for run in runs)
            self._looked_at, self._copies = (runs, trimmer.shrunk), [copy for copy in copies if copy is not None]
        if not self._copies:
            return []
        return [(copy, index) for copy in self._copies if (index := copy.index) is not None]

    def _spans_of(self, keys: Sequence[bytes]) -> Spans:
        """The ranges in which these keys may be."""
        found = []
        for copy, index in self._partial():
            places = {index.find(VALUES + key) for key in keys}
            found += [(copy, index.span(at)) for at in sorted(places) if at < len(index)]
        return found

    def _spans_between(self, begin: bytes, end: bytes) -> tuple[Spans, bytes]:
        """The ranges that a scan from ``begin`` on reads, and where it has to end, because it would read others."""
        copies, upto = self._partial(), end
        for _, index in copies:
            last = index.find(begin) + SCANNED_BLOCKS
            if last < len(index):
                upto = min(upto, index.last_key(last))
        found = []
        for copy, index in copies:
            # One more than has such keys: RocksDB looks at the next key, and then sees that it is beyond the end.
            first, last = index.find(begin), min(index.find(upto) + 1, len(index) - 1)
            if first <= last:
                found.append((copy, Span(index.span(first).begin, index.span(last).end)))
        return found, upto

    def _missing(self) -> tuple[SstFile, ...]:
        """The runs that RocksDB has not ingested yet."""
        return self.runs[len(self._ingested) :] if self._goes_on() else self.runs

    def _goes_on(self) -> bool:
        """Whether RocksDB has the first of the runs, and nothing else."""
        old = self._ingested
        return self._db is not None and [r.file_no for r in old] == [r.file_no for r in self.runs[: len(old)]]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns errors into DiskError, or into CorruptState naming the damaged run."""
        try:
            yield
        except AionError:
            raise
        except FileNotFoundError as error:
            raise CorruptState(f"a run cannot be read: {error}") from error
        except Exception as error:  # rocksdict raises plain Exceptions
            if isinstance(error, OSError) or is_rocksdb_io(error):
                raise disk_error("reading keyed values", self._p_bucket.files, error) from error
            if not from_rocksdb(error):
                raise
            bad = self._damaged()
            name = f"file {bad.name}" if bad is not None else f"one of {len(self.runs)} runs"
            raise CorruptState(f"{name}: RocksDB cannot read it: {error}") from error

    def _damaged(self) -> SstFile | None:
        """The first run whose bytes are not those that were written. Reads all runs."""
        with contextlib.suppress(OSError):
            here = (run for run in self.runs if self._p_bucket.trimmer.copies.partial(run.name) is None)
            return next((run for run in here if checksum(Path(run.path)) != run.crc), None)
        return None

    def _open(self) -> Rdict:
        if self._closed:
            raise StateError(f"the keyed values in {self._live} are closed")
        runs = self.runs
        if self._db is None or not self._goes_on():
            self._drop_db()
            self._db_path = self._new_path()
            self._db = self._make_db(self._db_path)
        ingest(self._db, self._live, runs[len(self._ingested) :])
        self._ingested = runs
        return self._db

    def _make_db(self, path: Path) -> Rdict:
        """An empty RocksDB. Raises DiskError."""
        with disk_errors("opening RocksDB", self._live):
            self._live.mkdir(parents=True, exist_ok=True, mode=0o700)
            return Rdict(str(path), run_options(self._p_bucket.cache))

    def _drop_db(self) -> None:
        db, self._db, self._ingested = self._db, None, ()
        if db is not None:
            close_db(db)
            shutil.rmtree(self._db_path, ignore_errors=True)

    def _new_path(self) -> Path:
        return self._live / f"db-{next(_db_numbers)}"


def _read(db: Rdict, begin: bytes, end: bytes, entries: list[tuple[bytes, bytes]]) -> tuple[int, bytes | None]:
    """Adds entries to the list, in one step. Returns their bytes, and the next key, or None if that was all."""
    at = db.iter()
    at.seek(begin)
    skip, size = len(VALUES), 0
    for _ in range(_ENTRIES):
        if not at.valid():
            at.status()  # RocksDB ends a scan at a damaged block, as if it were the last one
            return size, None
        key = at.key()
        if key >= end:
            return size, None
        if size >= STEP_BYTES:
            return size, key
        if value := at.value():
            entries.append((key[skip:], value))
        size += len(key) + len(value)
        at.next()
    if not at.valid():
        at.status()
        return size, None
    return size, at.key() if at.key() < end else None
