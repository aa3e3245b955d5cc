"""The names of the files of state, and what a version records about each. Pure."""

from __future__ import annotations

from typing import NamedTuple

MANIFEST = ".json"
SST = ".sst"
HANDED = ".bodies"
"""The suffix of a file in which a child handed over the bodies of blocks."""
HANDED_FOLDER = "handed"
PART = ".part"
"""The suffix of a file that is being written."""
HOLES = ".holes"
"""The suffix of a mark beside a local copy: the copy may lack a part, or has not been compared with its checksum."""
OPERATOR = "operator.json"
MERGED = "-merged"
"""The end of the name of a merged file, before its suffix."""


def is_merged(name: str) -> bool:
    return name.rpartition(".")[0].endswith(MERGED)


class SstFile(NamedTuple):
    """An immutable file of blocks: its number, local path, size, and the CRC-32 of all its bytes and of its index."""

    file_no: int
    path: str
    size_bytes: int
    crc: int
    index_crc: int
    blocks: int

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class ToDelete(NamedTuple):
    """Names of manifests and of files that are to be deleted."""

    manifests: list[str]
    files: list[str]
