"""Where files are: finds pyarrow's file system for a path as Spark writes it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pyarrow.fs as pafs

from state_backends.files.remote import pyarrow_uri, storage_errors

_LOCAL = pafs.LocalFileSystem()


def place_of(path: str) -> tuple[Any, str]:
    """pyarrow's file system of a path as Spark writes it, and the path there. Raises StorageError.

    Spark does not escape special characters in a path, so it is not a URI.
    """
    scheme, colon, rest = path.partition(":")
    if not colon or "/" in scheme:
        return _LOCAL, path
    if scheme == "file":
        return _LOCAL, "/" + rest.lstrip("/")
    authority, _, inside = rest.removeprefix("//").partition("/")
    filesystem, root = _connected(scheme, authority)
    return filesystem, f"{root}/{inside}"


@lru_cache(maxsize=16)
def _connected(scheme: str, authority: str) -> tuple[Any, str]:
    uri = f"{scheme}://{authority}"
    with storage_errors(uri):
        filesystem, root = pafs.FileSystem.from_uri(pyarrow_uri(f"{uri}/"))
    return filesystem, root.rstrip("/")
