"""Which files a version of a table of Delta Lake or Iceberg adds, and how far a stream has come in a table. Pure.

Only versions that add rows can be a stream. One that rewrites files without changing rows is passed over, and one that
deletes or changes rows is refused with a ConfigError, unless the user wants to pass over it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from aion.errors import ConfigError

ALL = -1
"""The number of files of a place after the last file of a version."""

STARTING_VERSION, START_AFTER, START_TIME = "startingVersion", "start-snapshot-id", "stream-from-timestamp"
IGNORE_DELETES, SKIP_CHANGES = "ignoreDeletes", "skipChangeCommits"
SKIP_DELETED, SKIP_OVERWRITTEN = "streaming-skip-delete-snapshots", "streaming-skip-overwrite-snapshots"
DELTA_OPTIONS = (STARTING_VERSION, IGNORE_DELETES, SKIP_CHANGES)
ICEBERG_OPTIONS = (START_AFTER, START_TIME, SKIP_DELETED, SKIP_OVERWRITTEN)
"""What is read, by the names in Spark's sources of both. All other options are of the storage or the catalog."""

_READ = {"appendOnly", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
"""Delta's features for readers that need nothing more, as long as no file has a deletion vector."""


class Added(NamedTuple):
    """A file that a version adds. ``values``: those of its partition, as a JSON object of texts."""

    path: str
    length: int
    values: str


class Place(NamedTuple):
    """How far a stream has come: ``files`` of ``version`` were read, and all that was to be read before it.

    It begins with version ``begin``: if ``first`` is ``all``, with all files that the table has then; if it is
    ``added``, with those that this version adds; if it is ``after``, with those of the next one. ``table``: its id.
    """

    table: str
    first: str
    begin: int
    version: int
    files: int

    @classmethod
    def at(cls, table: str, first: str, version: int) -> Place:
        """Returns where a stream begins."""
        return cls(table, first, version, version, ALL if first == "after" else 0)

    @property
    def start(self) -> Place:
        """Returns where the stream began."""
        return Place.at(self.table, self.first, self.begin)

    def is_whole(self, version: int) -> bool:
        """Whether the stream reads all files that the table has in a version, and not only those that are new."""
        return self.first == "all" and version == self.begin

    def after(self, version: int, taken: int, there: int) -> Place:
        """Returns the place when ``taken`` of the files of a version were read."""
        return self._replace(version=version, files=ALL if taken == there else taken)


def delta_files(actions: Iterable[Mapping[str, Any]], base: str, what: str, passed: Collection[str]) -> Iterator[Added]:
    """Yields the files that a commit of Delta Lake adds. Raises ConfigError if it does more than that.

    ``base``: the table's folder. ``what`` names the commit in an error. ``passed``: the options that are true.
    """
    changes = [(kind, action[kind]) for action in actions for kind in action]
    for kind, action in changes:
        if kind == "protocol":
            check_delta(action.get("readerFeatures") or (), {}, what)
        if kind == "metaData":
            check_delta((), action.get("configuration") or {}, what)
    added = [action for kind, action in changes if kind == "add" and action.get("dataChange", True)]
    if any(kind == "remove" and action.get("dataChange", True) for kind, action in changes):
        if SKIP_CHANGES in passed or (IGNORE_DELETES in passed and not added):
            return
        does, option, rest = "deletes rows", IGNORE_DELETES, ""
        if added:
            does, option, rest = "deletes or changes rows", SKIP_CHANGES, ", with all that it adds"
        raise ConfigError(_refused(what, does, option, rest))
    for action in added:
        if action.get("deletionVector"):
            raise ConfigError(deletion_vectors(what))
        values = {name: value or None for name, value in action.get("partitionValues", {}).items()}
        yield Added(delta_path(base, action["path"]), int(action["size"]), json.dumps(values))


def delta_path(base: str, path: str) -> str:
    """Returns the path of a file as Spark writes it. In the log it is a URL, and mostly relative."""
    scheme, colon, _ = path.partition(":")
    plain = unquote(path)
    return plain if colon and "/" not in scheme else f"{base.rstrip('/')}/{plain}"


def check_delta(features: Iterable[str], configuration: Mapping[str, str], what: str) -> None:
    """Raises ConfigError if a plain reader of Parquet would read the files of such a table wrongly."""
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        raise ConfigError(
            f"{what} maps columns to other names (delta.columnMapping.mode), and read_files would not find them in the "
            "files; copy the table into one without, or read it with Spark"
        )
    for feature in sorted({*features} - _READ - {"columnMapping"}):
        raise ConfigError(
            f"{what} has the Delta feature {feature!r}, which read_files does not know; drop the feature, or read the "
            "table with Spark"
        )


def deletion_vectors(what: str) -> str:
    """Returns why files with deletion vectors are refused."""
    return (
        f"{what} has files with deletion vectors, and read_files would read deleted rows; run REORG TABLE ... APPLY "
        "(PURGE), and begin after it with a new checkpoint"
    )


def is_passed_over(operation: str | None, what: str, passed: Collection[str]) -> bool:
    """Returns whether a snapshot of Iceberg adds nothing to a stream. Raises ConfigError if it deletes or changes rows.

    ``operation``: what its summary says that it does. ``passed``: the options that are true.
    """
    if operation == "append":
        return False
    option = {"delete": SKIP_DELETED, "overwrite": SKIP_OVERWRITTEN}.get(operation or "")
    if operation == "replace" or option in passed:
        return True
    if option is None:
        raise ConfigError(f"{what} does not say what it does to rows, so read_files cannot read the table on")
    if option == SKIP_DELETED:
        raise ConfigError(_refused(what, "deletes rows", option, ""))
    raise ConfigError(_refused(what, "deletes or changes rows", option, ", with all that it adds"))


def _refused(what: str, does: str, option: str, rest: str) -> str:
    return (
        f"{what} {does}, and a stream cannot take back what it has read; begin after it with a new checkpoint, or pass "
        f"over it{rest}, with options={{{option!r}: 'true'}}"
    )


def renamed_column(schemas: Iterable[Mapping[int, str]]) -> str | None:
    """Returns a column that had another name in an older schema of a table of Iceberg, or whose name another column
    had. None if there is none.

    ``schemas``: the names of the columns by their ids. Files of Parquet are read by names, so its old files would
    give nulls, or the values of another column.
    """
    names: dict[int, str] = {}
    ids: dict[str, int] = {}
    for schema in schemas:
        for number, name in schema.items():
            if names.setdefault(number, name) != name or ids.setdefault(name, number) != number:
                return name
    return None


class Reading(NamedTuple):
    """The options that say what is read. ``passed``: those of versions to pass over that are true."""

    numbers: Mapping[str, int]
    passed: Collection[str]
    latest: bool

    @classmethod
    def of(cls, options: Mapping[str, str], names: Collection[str]) -> tuple[Reading, dict[str, str]]:
        """Returns the options with these names, and the others. As in Spark, case does not matter for the first.

        Raises ConfigError.
        """
        spelled = {name.lower(): name for name in names}
        known = {spelled[name.lower()]: text.strip() for name, text in options.items() if name.lower() in spelled}
        others = {name: text for name, text in options.items() if name.lower() not in spelled}
        numbers, passed = {}, set()
        latest = known.get(STARTING_VERSION, "").lower() == "latest"
        for name, text in known.items():
            if name in (STARTING_VERSION, START_AFTER, START_TIME):
                if text.isdecimal():
                    numbers[name] = int(text)
                elif name != STARTING_VERSION or not latest:
                    more = ", nor latest" if name == STARTING_VERSION else ""
                    raise ConfigError(f"options: {name} is {text!r}, and not a whole number{more}")
            elif text.lower() == "true":
                passed.add(name)
            elif text.lower() != "false":
                raise ConfigError(f"options: {name} is {text!r}, and neither true nor false")
        return cls(numbers, passed, latest), others
