"""The files of a checkpoint, on any file system that Spark reaches."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from aion.errors import ConfigError
from aion.spark.session.sessions import is_session, not_found, qualified, refuse

Entry = list[str]
"""The lines of an entry of the logs ``offsets`` and ``commits``. The first one is a version."""


class ReadableFiles(ABC):
    """The folder of a checkpoint, to be read. Names are relative to it, with ``/`` between their parts."""

    location: str
    """As Spark writes it: with its scheme."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Returns what is in a folder, without checksums and other hidden files. Empty if there is no such folder."""

    @abstractmethod
    def read(self, name: str) -> str:
        """Returns the text of a file."""

    @property
    def query(self) -> str:
        """The id of the query."""
        return str(json.loads(self.read("metadata"))["id"])

    def batches(self, log: str) -> list[int]:
        """Returns the batches that a log has entries of, in their order."""
        return sorted(int(name) for name in self.names(log) if name.isdecimal())

    def first_batch(self, commits: list[int]) -> int | None:
        """Returns the batch with which the next run begins, behind ``commits``, or None if the checkpoint is new."""
        if commits:
            return commits[-1] + 1
        return min(self.batches("offsets"), default=None)

    def entry(self, log: str, batch: int) -> Entry:
        return self.read(f"{log}/{batch}").split("\n")

    def metadata(self, log: str, batch: int) -> dict[str, Any]:
        """Returns the second line of an entry, which says when the batch was, and under which settings."""
        found: dict[str, Any] = json.loads(self.entry(log, batch)[1])
        return found


class RemoteFiles(ReadableFiles):
    """The same for Spark Connect: Spark's readers of files read them."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        self._spark = spark
        self.location = qualified(spark, location)

    def names(self, folder: str = "") -> list[str]:
        try:
            found = self._files(folder).select("path").collect()
        except PySparkException as error:
            if not_found(error) is None:
                raise
            return []
        return sorted(str(path).rpartition("/")[2] for (path,) in found)

    def read(self, name: str) -> str:
        (row,) = self._files(name).select("content").collect()
        return bytes(row[0]).decode()

    def _files(self, name: str) -> DataFrame:
        return self._spark.read.format("binaryFile").load(f"{self.location}/{name}")


class CheckpointFiles(ReadableFiles):
    """The same for a session with a JVM, which can also change them."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        if not is_session(spark):
            raise TypeError(f"a SparkSession is needed, not {spark!r}")
        if not isinstance(location, str) or not location.strip():
            raise ConfigError(f"checkpoint: {location!r} is not the location of a checkpoint; give a path or a URI")
        refuse(spark, f"checkpoint: {location!r}", "use a session without .remote(...), on a host that reaches it")
        jvm: Any = spark._jvm
        self._hadoop = jvm.org.apache.hadoop.fs
        self._conf = spark._jsparkSession.sessionState().newHadoopConf()
        try:
            path = self._hadoop.Path(location)
            self._files = path.getFileSystem(self._conf)
            self._root = self._files.makeQualified(path)
        except (Py4JJavaError, PySparkException) as error:
            first, *_ = str(getattr(error, "java_exception", error)).splitlines()
            raise ConfigError(
                f"checkpoint: Spark cannot reach {location!r}; give a path, or a URI that Spark knows: {first}"
            ) from error
        self.location = str(self._root.toString())

    def check_path(self) -> None:
        """Raises ConfigError if Spark's reader of state does not find the checkpoint: it escapes its path, twice."""
        uri = self._root.toUri()
        if uri.getRawPath() != uri.getPath():
            raise ConfigError(
                f"{self.location}: Spark cannot read the state of a checkpoint whose path has a space or a character "
                "like % or #; copy the checkpoint to a path without one, leave the original, and go on with the copy"
            )

    def exists(self, name: str = "") -> bool:
        return bool(self._files.exists(self._path(name)))

    def is_folder(self, name: str) -> bool:
        return bool(self._files.getFileStatus(self._path(name)).isDirectory())

    def names(self, folder: str = "") -> list[str]:
        if not self.exists(folder):
            return []
        found = [status.getPath().getName() for status in self._files.listStatus(self._path(folder))]
        return sorted(name for name in found if not name.startswith("."))

    def read(self, name: str) -> str:
        stream = self._files.open(self._path(name))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        stream = self._files.create(self._path(name), True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()

    def copy_from(self, other: CheckpointFiles, name: str) -> None:
        """Copies a file, or a folder with all that is in it."""
        target = self._path(name)
        self._files.mkdirs(target.getParent())
        self._hadoop.FileUtil.copy(
            other._files, other._path(name), self._files, target, False, True, self._conf
        )  # not moving, overwriting

    def move(self, name: str, to: str) -> None:
        target = self._path(to)
        self._files.mkdirs(target.getParent())
        if not self._files.rename(self._path(name), target):
            raise OSError(f"{self._path(name)} could not be moved to {target}")

    def take_the_place_of(self, other: CheckpointFiles) -> None:
        """Gives the folder of another checkpoint this one's name, under which there is nothing."""
        self._files.mkdirs(self._root.getParent())
        if not self._files.rename(other._root, self._root):
            raise OSError(f"{other._root} could not be moved to {self._root}")

    def delete(self, name: str) -> None:
        """Deletes a file, or a folder with all that is in it. Does nothing if it does not exist."""
        self._files.delete(self._path(name), True)

    def _path(self, name: str) -> Any:
        return self._hadoop.Path(self._root, name) if name else self._root
