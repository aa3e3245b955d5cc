"""The local copies of the files of a shard on a remote file system: whole, in part, or kept from an earlier opening."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from uuid import uuid4

from state_backends.files.faults import disk_errors
from state_backends.files.kept_copies import KeptCopies
from state_backends.files.names import PART, SstFile
from state_backends.files.parallel import in_parallel, wait_for
from state_backends.files.partial import PartialCopy, is_large, mark_of
from state_backends.files.remote import Remote, chunks_of, keep
from state_backends.files.remote_file import RemoteFile
from state_backends.files.requests import CountedFiles
from state_backends.files.storage import make_folder
from state_backends.format.checksum import crc32
from state_backends.format.errors import CorruptState


class LocalCopies:
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
    ) -> None:
        self._remote, self._folder, self._local, self._kept = remote, folder, local, kept
        self._in_background = in_background
        self._partial: dict[str, PartialCopy] = {}  # by name: copies that may lack a part

    def fetch(self, files: Sequence[SstFile], *, partly: bool) -> None:
        """See :meth:`state_backends.files.storage.Storage.fetch`."""
        make_folder(self._local)
        self.close()
        self._kept.opens(self._place)
        wanted = {f.name for f in files}
        for path in sorted(self._local.iterdir()):  # a copy before its mark
            if path.name not in wanted or mark_of(path).exists():
                path.unlink(missing_ok=True)
        missing = [f for f in files if not Path(f.path).exists()]
        if partly and _has_links(self._local):
            self._fetch_partly([f for f in missing if is_large(f)])
            missing = [f for f in missing if not is_large(f) and not self._take_small(f)]
        else:
            self._kept.remove(self._place, [f.name for f in missing])
        in_parallel(self._remote.pool, self._download, missing)
        self.keep([f.name for f in missing])

    def partial(self, name: str) -> PartialCopy | None:
        """Returns the copy of a file, if a part of it may be missing. Any thread may call it."""
        copy = self._partial.get(name)
        return None if copy is None or copy.is_whole else copy

    def keep(self, names: Sequence[str]) -> None:
        """Keeps copies for later openings, behind the caller."""

        def keep() -> None:
            for name in names:
                self._kept.put(self._place, self._local / name)

        if names and self._kept.limit_bytes:
            self._in_background(keep)

    def forget(self, names: Iterable[str]) -> None:
        """The shard does not need these files any more. Removes their copies, if the disk lets it."""
        names = list(names)
        self._close(names)
        self._kept.remove(self._place, names)
        for name in names:
            path = self._local / name
            with contextlib.suppress(OSError):  # fetch() tries again
                path.unlink(missing_ok=True)
                mark_of(path).unlink(missing_ok=True)

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
        wanted = {copy.file.name: copy.first_spans() for copy in begun}
        while wanted:
            futures = {name: [f for s in spans for f in self._partial[name].bring(s)] for name, spans in wanted.items()}
            wait_for([future for of_file in futures.values() for future in of_file])
            for name, of_file in futures.items():
                for future in of_file:
                    future.result()
                try:
                    wanted[name] = self._partial[name].open_index()
                except CorruptState as error:
                    raise CorruptState(f"file {name} at {self._uri(name)} is damaged: {error}") from error.__cause__
            wanted = {name: spans for name, spans in wanted.items() if spans}

    def _begin_copy(self, file: SstFile) -> PartialCopy:
        source = self._source(file)
        source.open()
        copy = self._partial[file.name] = self._copy_of(file, source)
        copy.create()
        return copy

    def _kept_copy(self, file: SstFile) -> PartialCopy | None:
        """Takes a copy that this host has kept. None: there is none that can be used."""
        if not self._kept.take(self._place, file):
            return None
        copy = self._copy_of(file, self._source(file))
        copy.take_kept()
        try:
            copy.open_index()
        except CorruptState:
            Path(file.path).unlink()
            self._kept.remove(self._place, [file.name])
            return None
        self._partial[file.name] = copy
        copy.check_kept()
        return copy

    def _copy_of(self, file: SstFile, source: RemoteFile) -> PartialCopy:
        def checked(right: bool) -> None:
            if right:
                self.keep([file.name])
            else:
                self._kept.remove(self._place, [file.name])

        return PartialCopy(file, source.read_at, self._remote.ranges, self._remote.ahead, source.close, checked)

    def _take_small(self, file: SstFile) -> bool:
        """Takes a copy that this host has kept, if it has the right checksum."""
        if not self._kept.take(self._place, file):
            return False
        path = Path(file.path)
        with disk_errors("reading a copy of remote state", path.parent):
            if crc32(path.read_bytes()) == file.crc:
                return True
            path.unlink()
        self._kept.remove(self._place, [file.name])
        return False

    def _close(self, names: Iterable[str]) -> None:
        for name in names:
            if (copy := self._partial.pop(name, None)) is not None:
                copy.close()

    def _download(self, file: SstFile) -> None:
        """Downloads a file and checks it. An incomplete copy never has the file's name."""
        path = Path(file.path)
        part = path.with_suffix(PART)
        fs, source = self._at(file.name)
        try:
            size, crc = keep(chunks_of(fs, source, self._uri(file.name)), part)
        except FileNotFoundError:
            raise CorruptState(f"file {file.name} is missing: {self._uri(file.name)} does not exist") from None
        if (size, crc) != (file.size_bytes, file.crc):
            part.unlink()
            raise CorruptState(
                f"file {file.name} at {self._uri(file.name)} is damaged: it has {size} bytes with CRC-32 "
                f"{crc:08x}, but its manifest says {file.size_bytes} bytes with {file.crc:08x}"
            )
        part.rename(path)

    def _source(self, file: SstFile) -> RemoteFile:
        return RemoteFile(file, self._at(file.name), self._uri(file.name))

    def _at(self, name: str) -> tuple[CountedFiles, str]:
        fs, base = self._remote.connect()
        return fs, f"{base}/{self._folder}/{name}"

    def _uri(self, name: str) -> str:
        return f"{self._place}/{name}"

    @property
    def _place(self) -> str:
        """Names the folder of the files to all processes of this host."""
        return f"{self._remote.shown}/{self._folder}"


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
