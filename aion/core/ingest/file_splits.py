"""What a file's path says, and which part of a large file a task reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote

_NULL = "__HIVE_DEFAULT_PARTITION__"


class Split(NamedTuple):
    """One of ``of`` equal stretches of a file of ``length`` bytes, counted from 0.

    ``version``: that of the table which names the file, and ``values``: those of its partition, as a JSON object of
    texts. None if the file is not of a lake.
    """

    path: str
    length: int
    number: int = 0
    of: int = 1
    version: int | None = None
    values: str | None = None

    def units(self, middles: Sequence[int]) -> list[int]:
        """The units that this part has, by number: those whose middle byte it holds.

        A unit, such as a row group, is in exactly one part. ``middles``: the middle byte of each unit.
        """
        return [
            i
            for i, middle in enumerate(middles)
            if min(middle * self.of // max(self.length, 1), self.of - 1) == self.number
        ]


def folder_values(path: str, base: str | None) -> dict[str, str | None]:
    """The values in the names of the folders between ``base`` and a file, as Hive writes them: ``day=2024-01-31``.

    Without a base, folders have no values.
    """
    inside = path[len(base) :] if base is not None and path.startswith(base) else ""
    values: dict[str, str | None] = {}
    for folder in inside.split("/")[:-1]:
        name, equals, value = folder.partition("=")
        if equals and name:
            values[unquote(name)] = None if value == _NULL else unquote(value)
    return values
