"""The local copies of the files of a shard on a remote file system: whole, in part, or kept from an earlier opening."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from uuid import uuid4

from state_backends.files.disk_budget import DiskBudget
from state_backends.files.faults import disk_errors
from state_backends.files.kept_copies import KeptCopies
from state_backends.files.names import PART, SstFile
from state_backends.files.parallel import in_parallel, wait_for
from state_backends.files.partial import Copies, PartialCopy, is_large, mark_of, remove
from state_backends.files.punching import can_punch
from state_backends.files.remote import At, Remote, storage_errors
from state_backends.files.requests import CountedInput
from state_backends.files.storage import make_folder
from state_backends.format.checksum import crc32
from state_backends.format.errors import CorruptState
from state_backends.format.sst_table import Span, TableIndex

log = logging.getLogger(__name__)
_able: dict[int, bool] = {}  # by the number of a file system: whether holes can be made there


class LocalCopies(Copies):
    """``folder``: of the files, below the path of the connection. ``local``: of their copies.

    ``in_background`` calls a function later, one at a time. The caller makes one call at a time, except for
    :meth:`partial`.
    """

    def __init__(
        self,
        remote: Remote,
        folder: str,
        local: Path,
        kept: KeptCopies,
        in_background: Callable[[Callable[[], None]], None],
        budget: DiskBudget,
    ) -> None:
        self._remote, self._folder, self._local, self._kept = remote, folder, local, kept
        self._in_background = in_background
        self._budget = budget
        self._partial: dict[str, PartialCopy] = {}  # by name: copies that may lack a part
        self._keeping = threading.Lock()

    def fetch(self, files: Sequence[SstFile], *, partly: bool) -> None:
        """See :meth:`state_backends.files.storage.Storage.fetch`."""
        make_folder(self._local)
        self.close()
        self._budget.forget_folder(self._local)
        self._kept.opens(self._place)
        wanted = {f.name for f in files}
        for path in sorted(self._local.iterdir()):  # a copy before its mark
            if path.name not in wanted or mark_of(path).exists():
                path.unlink(missing_ok=True)
        missing = [f for f in files if not Path(f.path).exists()]
        for file in set(files).difference(missing):
            self._budget.has(Path(file.path), file.size_bytes)
        if partly and _has_links(self._local):
            room = self._budget.room()
            fits = room is None or sum(file.size_bytes for file in missing) <= room
            self._fetch_partly([f for f in missing if is_large(f, fits=fits)])
            missing = [f for f in missing if not is_large(f, fits=fits) and not self._take_small(f)]
        else:
            self._kept.remove(self._place, [f.name for f in missing])
        in_parallel(self._remote.pool, self._download, missing)
        self.keep([f.name for f in missing])

    def partial(self, name: str) -> PartialCopy | None:
        copy = self._partial.get(name)
        return None if copy is None or copy.is_whole else copy

    def keep(self, names: Sequence[str]) -> None:
        """Keeps copies for later openings, behind the caller."""

        def keep() -> None:
            for name in names:
                path = self._local / name
                with self._keeping:  # a file that is kept gets no holes meanwhile
                    if not mark_of(path).exists():
                        self._kept.put(self._place, path)

        if names and self._kept.limit_bytes:
            self._in_background(keep)

    def published(self, names: Sequence[str]) -> None:
        """These files of the shard are on the remote file system now. The copies are whole."""
        for name in names:
            with contextlib.suppress(OSError):
                self._budget.has(self._local / name, (self._local / name).stat().st_size)
        self.keep(names)

    def room(self) -> int | None:
        return self._budget.room()

    def excess(self) -> int:
        return self._budget.excess(self._local)

    def shrink(self, file: SstFile, spared: Callable[[TableIndex], Iterable[Span]], most_bytes: int, links: int) -> int:
        copy = self.partial(file.name)
        if copy is None and self._can_punch():
            copy = self._punchable(file, links)
        if copy is None or copy.index is None:
            return 0
        return copy.shrink(spared(copy.index), most_bytes)

    def _punchable(self, file: SstFile, links: int) -> PartialCopy | None:
        """Makes a whole copy one that may get holes. Returns None if another process takes it for whole."""
        copy = self._copy_of(file)
        with self._keeping:
            self._kept.remove(self._place, [file.name])
            # Nobody can take it any more. Other names than this one and those of RocksDB are of those who took it.
            if Path(file.path).stat().st_nlink != links + 1:
                return None
            copy.begin(is_here=True)
        copy.open_index()
        self._partial[file.name] = copy
        return copy

    def _can_punch(self) -> bool:
        """Whether holes give disk back here. Says once if they do not."""
        device = self._local.stat().st_dev
        if device not in _able:
            _able[device] = _has_links(self._local) and can_punch(self._local)
            if not _able[device]:
                log.info(
                    "state.local_copies does not hold for the files of RocksDB: the file system of %s makes no holes "
                    "in files, or has no hard links",
                    self._local,
                )
        return _able[device]

    def forget(self, names: Iterable[str]) -> None:
        """The shard does not need these files any more. Removes their copies, if the disk lets it."""
        names = list(names)
        self._close(names)
        self._budget.forget(self._local / name for name in names)
        self._kept.remove(self._place, names)
        for name in names:
            remove(self._local / name)  # or else fetch() does it

    def close(self) -> None:
        """Nothing more is fetched. What is in the folder, and what is kept, stays."""
        self._close(list(self._partial))

    def _fetch_partly(self, files: Sequence[SstFile]) -> None:
        """Makes local copies with the parts that RocksDB needs to ingest them.

        The files take their turns, so that each request is for all of them at the same time.
        """
        copies = [self._kept_copy(file) for file in files]
        others = [file for file, copy in zip(files, copies, strict=True) if copy is None]
        begun = in_parallel(self._remote.pool, self._begin_copy, others)
        wanted = {copy: copy.first_spans() for copy in begun}
        while wanted:
            coming = [future for copy, spans in wanted.items() for span in spans for future in copy.bring(span)]
            wait_for(coming)
            for future in coming:
                future.result()
            wanted = {copy: spans for copy in wanted if (spans := self._open_index(copy))}

    def _open_index(self, copy: PartialCopy) -> list[Span]:
        try:
            return copy.open_index()
        except CorruptState as error:
            name = copy.file.name
            raise CorruptState(f"file {name} at {self._uri(name)} is damaged: {error}") from error.__cause__

    def _begin_copy(self, file: SstFile) -> PartialCopy:
        copy = self._partial[file.name] = self._copy_of(file, opens=True)
        self._budget.has(Path(file.path), 0)
        copy.begin()
        return copy

    def _kept_copy(self, file: SstFile) -> PartialCopy | None:
        """Takes a copy that this host has kept. Returns None if there is none that can be used."""
        if not self._kept.take(self._place, file):
            return None
        copy = self._copy_of(file)
        copy.begin(is_here=True)
        try:
            copy.open_index()
        except CorruptState:
            remove(Path(file.path))
            self._kept.remove(self._place, [file.name])
            return None
        self._partial[file.name] = copy
        self._budget.has(Path(file.path), file.size_bytes)
        copy.check_kept()
        return copy

    def _copy_of(self, file: SstFile, *, opens: bool = False) -> PartialCopy:
        """``opens``: looks for the remote file at once, and not when it is first read."""
        source = RemoteFile(file, self._remote, self._remote.at(self._folder, file.name))
        if opens:
            source.open()

        def checked(right: bool) -> None:
            if right:
                self.keep([file.name])
            else:
                self._kept.remove(self._place, [file.name])

        def grew(size_bytes: int) -> None:
            self._budget.grew(Path(file.path), size_bytes)

        remote = self._remote
        return PartialCopy(file, source.read_at, remote.ranges, remote.ahead, source.close, checked, grew)

    def _take_small(self, file: SstFile) -> bool:
        """Takes a copy that this host has kept, if it has the right checksum."""
        if not self._kept.take(self._place, file):
            return False
        path = Path(file.path)
        with disk_errors("reading a copy of remote state", path.parent):
            if crc32(path.read_bytes()) == file.crc:
                self._budget.has(path, file.size_bytes)
                return True
            path.unlink()
        self._kept.remove(self._place, [file.name])
        return False

    def _close(self, names: Iterable[str]) -> None:
        for name in names:
            if (copy := self._partial.pop(name, None)) is not None:
                copy.close()

    def _download(self, file: SstFile) -> None:
        if (crc := self._copy_of(file).fetch_whole()) != file.crc:
            raise CorruptState(
                f"file {file.name} at {self._uri(file.name)} is damaged: its CRC-32 is {crc:08x}, but its manifest "
                f"says {file.crc:08x}"
            )
        self._budget.has(Path(file.path), file.size_bytes)

    def _uri(self, name: str) -> str:
        return f"{self._place}/{name}"

    @property
    def _place(self) -> str:
        """Names the folder of the files to all processes of this host."""
        return f"{self._remote.shown}/{self._folder}"


class RemoteFile:
    """Reads ranges of a file on a remote file system. Threads may use it together.

    It is opened when it is first read.
    """

    def __init__(self, file: SstFile, remote: Remote, at: At) -> None:
        self._file, self._remote = file, remote
        self._path, self._where = at
        self._lock = threading.Lock()
        self._opened: CountedInput | None = None

    def open(self) -> CountedInput:
        """Raises CorruptState if the file is missing or has another size, or StorageError."""
        name, size = self._file.name, self._file.size_bytes
        with self._lock:
            if self._opened is None:
                try:
                    with storage_errors(self._where, may_be_missing=True):
                        opened = self._remote.fs.open_input_file(self._path)
                except FileNotFoundError:
                    raise CorruptState(f"file {name} is missing: {self._where} does not exist") from None
                if (found := opened.size_bytes) != size:
                    opened.close()
                    raise CorruptState(
                        f"file {name} at {self._where} is damaged: it has {found} bytes, but its manifest says {size}"
                    )
                self._opened = opened
            return self._opened

    def read_at(self, size_bytes: int, offset: int) -> bytes:
        """Reads a range. Raises what :meth:`open` raises."""
        source = self.open()
        with storage_errors(self._where):
            return source.read_at(size_bytes, offset)

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()


def _has_links(folder: Path) -> bool:
    """Whether RocksDB can take a file by a hard link. A copy of it would not get what is fetched later."""
    probe = folder / f"{uuid4().hex}{PART}"
    link = probe.with_name(f"{uuid4().hex}{PART}")
    try:
        with disk_errors("keeping copies of remote state", folder):
            probe.touch(0o600)
        os.link(probe, link)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
        link.unlink(missing_ok=True)
    return True
