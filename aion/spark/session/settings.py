"""What the operators need to know of a session: its policy, where state is kept, and Spark's own settings."""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyspark.sql import SparkSession

from aion.base.hashing import hashed_as
from aion.base.numbers import counted
from aion.config import SPARK_PREFIX, Policy, policy_to_text, resolve
from aion.config.layers import Source as PolicySource
from aion.config.values import location
from aion.errors import ConfigError
from aion.spark.session.sessions import application, is_remote, master, of_application

# Settings without which Aion does not work. The README explains each of them.
REQUIRED = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
}
_ROWS, _BYTES = "spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.arrow.maxBytesPerBatch"
_USUAL_ROWS, _MOST_ROWS, _NO_LIMIT = 4096, 10_000, 2**31 - 1
"""Rows of a batch for Python; Spark's own number; and a limit in bytes that is none."""
_OF_LOCAL = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
"""On a local disk, Spark's default starts processes (chmod, readlink) whenever it writes a file of a checkpoint, which
takes a quarter of the time of a small batch. This writer starts fewer. On a cluster the default stays: there it uses
the file system's atomic rename where there is one."""
JVM_PARTIALS = "spark.aion.jvm_partials"
"""Whether Spark's own functions may group events (:mod:`aion.spark.session.partials`). It is of a session, and of no
policy, because it changes nothing of what comes out.
"""
CHECKPOINTS = "spark.sql.streaming.checkpointLocation"
FOLDER = "aion-state"
"""The folder for state if none is set: in CHECKPOINTS if that is set, otherwise in the driver's working folder."""
_WORKER_LIMIT = "spark.executor.pyspark.memory"


def of_queries(spark: SparkSession) -> dict[str, str]:
    """Returns the settings that each query with operators of Aion gets in a session of its own, which Spark makes for
    it. Those that the user has set are not among them.
    """
    existing = spark.conf.getAll
    local = _OF_LOCAL if master(spark).startswith("local") else {}
    return {key: value for key, value in {**local, **_batches(existing)}.items() if key not in existing}


def rows_at_once(spark: SparkSession) -> int:
    """Returns how many rows a batch for Python has at most. Zero or less: there is no limit."""
    return int(of_queries(spark).get(_ROWS) or conf(spark, _ROWS))


def _batches(existing: Mapping[str, str]) -> dict[str, str]:
    """Returns the size of batches for Python: limited by rows. The limit in bytes stays only if the user allows many
    rows.

    With a limit in bytes, Spark adds up the sizes of all columns after each row, which is most of the cost of a row.
    """
    rows = existing.get(_ROWS, str(_USUAL_ROWS))
    few = rows.isdecimal() and 0 < int(rows) <= _MOST_ROWS
    return {_ROWS: rows, _BYTES: str(_NO_LIMIT)} if few else {}


def shard_count(spark: SparkSession, policy: Policy) -> int:
    """Returns the number of shards of an operator."""
    partitions = int(conf(spark, "spark.sql.shuffle.partitions"))
    return partitions if policy.state.shards == "auto" else int(policy.state.shards)


def shards_in_words(spark: SparkSession, policy: Policy, shards: int) -> str:
    """Says how many shards an operator has, and where one would be quicker: each needs a task of its own in a batch."""
    words = counted(shards, "shard")
    if shards == 1 or policy.state.shards != "auto" or not master(spark).startswith("local"):
        return words
    return f"{words}, as spark.sql.shuffle.partitions says (if batches are small, 1 is quicker)"


def of_tasks(
    spark: SparkSession, policy: Policy, name: str, ids: Sequence[int], key: Iterable[pa.DataType]
) -> dict[str, Any]:
    """Returns the fields of a TaskConfig (:mod:`aion.spark.tasks.root_config`), which every task of an operator gets.

    ``ids`` are those of its shards, and ``key`` has the types of its key columns.
    """
    return {
        "policy": policy_to_text(policy),
        "name": name,
        "uid": uuid.uuid4().hex,
        "application": application(spark),
        "state_dir": place_of_state(spark, policy),
        "ids": tuple(ids),
        "key_types": tuple(str(hashed_as(type_)) for type_ in key),
        "retain_versions": int(conf(spark, "spark.sql.streaming.minBatchesToRetain")),
        "task_failures": task_failures(spark),
    }


def task_failures(spark: SparkSession) -> int:
    """Returns how often a task may fail. Local mode ignores the setting: the master's URL has the number, by default
    1.
    """
    local = re.fullmatch(r"local(\[[^,\]]*(?:,\s*(\d+)\s*)?\])?", master(spark))
    if local is not None:
        return int(local[2] or 1)
    return int(spark.conf.get("spark.task.maxFailures", "4") or 4)


def resolved_policy(spark: SparkSession, policy: PolicySource | None, keyword: Mapping[str, object]) -> Policy:
    for key, value in REQUIRED.items():
        if conf(spark, key) != value:
            raise ConfigError(
                f"{key} is {conf(spark, key)!r} and must be {value!r}; "
                "build the session with aion.configure(SparkSession.builder...)"
            )
    if of_application(spark, _WORKER_LIMIT) is not None:
        warnings.warn(
            f"{_WORKER_LIMIT} is set: Spark turns it into a limit on the address space of every Python worker. The "
            "state server is started by one of them and inherits the limit. Leave it unset "
            "(docs/operate/operating.md#memory-disk-and-open-files)",
            stacklevel=4,
        )
    # Read the session, not the context: getOrCreate sets its options on a session that already runs.
    return resolve(policy, keyword=keyword, spark_conf=of_policy(spark))


def of_policy(spark: SparkSession) -> dict[str, str]:
    """Returns the settings of a session that are keys of a policy."""
    settings = spark.conf.getAll.items()
    return {key: value for key, value in settings if key.startswith(SPARK_PREFIX) and key != JVM_PARTIALS}


def conf(spark: SparkSession, key: str) -> str:
    value: str = spark.conf.get(key)
    return value


def place_of_state(spark: SparkSession, policy: Policy) -> str:
    """Returns the place of the versions: the policy's folder, or a folder beside the checkpoints, or in the working
    folder.

    A path or a URI. The state servers connect to it with the credentials that they find on their hosts. Raises
    ConfigError if the executors run on other hosts and no place is set that all of them can reach.
    """
    place = policy.state.dir
    if place is None:
        checkpoints = spark.conf.get(CHECKPOINTS, None)
        url = master(spark)
        if not url.startswith("local") and ":/" not in (checkpoints or ""):
            raise ConfigError(
                f"state.dir: it is not set, and on the cluster {url} each executor would keep its own state, "
                "which the others could not find; set spark.aion.state.dir to a folder that all executors mount, or "
                "to a URI such as s3://bucket/folder"
            )
        try:
            place = location(f"{checkpoints.rstrip('/')}/{FOLDER}") if checkpoints else FOLDER
        except ConfigError as error:
            raise ConfigError(
                f"state.dir: it is not set, and the state cannot be stored beside the checkpoints: {error}; "
                "set spark.aion.state.dir"
            ) from None
    if place.startswith("file:"):
        place = unquote(urlsplit(place).path)
    if is_remote(spark) and "://" not in place:
        if not Path(place).is_absolute():
            raise ConfigError(
                f"state.dir: {place!r} is in the working folder of this client, which Spark Connect's server does not "
                "know; set spark.aion.state.dir to an absolute path on the hosts of the executors, or to a URI"
            )
        return place
    return place if "://" in place else str(Path(place).resolve())
