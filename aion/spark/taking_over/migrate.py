"""``migrate``: takes a query with stateful processors from Spark's own state store to Aion's, without starting again.

Spark makes everything that it will read later. For each processor it runs a query of one batch
(:mod:`aion.spark.taking_over.first_batch`) in the new checkpoint, which brings the state into Aion's store and leaves
the tokens of its versions in Spark's. Then Spark's own tool for stores without a query writes these stores again, as
the version that the next batch will ask for. The offsets are those of the old checkpoint, so the sources go on where
they stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aion.config.layers import Source as PolicySource
from aion.config.values import location
from aion.errors import ConfigError
from aion.spark.api.alone import session_of
from aion.spark.api.group_by import keyed, stateful_config, stock_method
from aion.spark.session.checkpoint_files import CheckpointFiles
from aion.spark.session.settings import place_of_state, resolved_policy, shard_count
from aion.spark.session.workers import in_arrow
from aion.spark.start import listener
from aion.spark.taking_over.first_batch import EachShard, Seed, SeedDefinition
from aion.spark.taking_over.stock_checkpoint import StockCheckpoint, StockOperator
from aion.spark.tasks.root import Root
from aion.spark.tasks.shards import shard_ids
from aion.spark.tasks.stateful_child import SCHEMA as CHILD
from aion.spark.tasks.stateful_child import SHARD, StatefulChild
from aion.spec import check_name
from aion.stateful.restore import key_column
from state_backends.files.storage import local_path

_ASIDE = "aion-operators"
Ids = dict[int, list[list[str]]]
"""For each operator, its partitions' stores: the ids of their versions."""


class Migrated(NamedTuple):
    """What :func:`migrate` has done. ``batch``: the query goes on after this batch. ``names``: the operators' names.

    ``state_dir``: where the state is. ``unfinished``: whether a batch had begun that will run again.
    """

    batch: int
    names: dict[int, str]
    state_dir: str
    unfinished: bool


def migrate(
    spark: SparkSession,
    checkpoint: str,
    new: str,
    *,
    policy: PolicySource | None = None,
    names: Mapping[int, str] | None = None,
) -> Migrated:
    """Takes the state of a stopped query of stock Spark over to Aion: makes a checkpoint with which its job goes on.

    For example::

        aion.migrate(spark, "old-checkpoint/", "new-checkpoint/")

    ``checkpoint``: the query's checkpoint. It is not changed. ``new``: the new one; nothing may be there yet.
    ``policy``: as the job will have it. ``names``: the name of each operator, by its number in the checkpoint; by
    default they are named as :func:`aion.configure` names them, from the source on. Raises ConfigError with the reason
    if something cannot be taken over exactly.
    """
    stock = StockCheckpoint(spark, checkpoint)
    target = CheckpointFiles(spark, new)
    if target.names():
        raise ConfigError(f"{new}: there is something already; give a folder that does not exist yet")
    if (stock.batch or stock.others) and _rewriter(spark) is None:
        raise ConfigError("this pyspark cannot write its state store without a query; migrate with pyspark 4.3")
    session = _session(spark, stock)
    resolved = resolved_policy(session, policy, {})
    named = _named(stock, names or {})
    try:
        target.copy_from(stock.files, "metadata")
        ids: Ids = {}
        for number, operator in stock.operators.items():
            ids[number] = _seed(session, stock, operator, target, resolved, named[number])
        _assemble(session, stock, target, ids)
    except BaseException:
        target.delete("")
        raise
    unfinished = stock.files.batches("offsets")[-1] > stock.batch
    return Migrated(stock.batch, named, place_of_state(session, resolved), unfinished)


def migrate_alone(
    checkpoint: str,
    new: str,
    settings: Mapping[str, str],
    *,
    policy: str | None = None,
    state_dir: str | None = None,
    names: Mapping[int, str] | None = None,
) -> Migrated:
    """Returns the same as :func:`migrate`, in a session with these settings, which it makes and stops."""
    _check_folders(checkpoint, new)
    for name in (names or {}).values():
        check_name(name)
    with session_of("migrate", settings, policy, **({} if state_dir is None else {"state_dir": state_dir})) as spark:
        return migrate(spark, checkpoint, new, names=names)


def _check_folders(checkpoint: str, new: str) -> None:
    """Looks at the folders that are on this machine, before a JVM is started. Raises ConfigError."""
    if (old := local_path(location(checkpoint))) is not None and not (old / "metadata").is_file():
        what = "it has no file 'metadata'" if old.is_dir() else "there is no such folder"
        raise ConfigError(f"{checkpoint}: not the checkpoint of a streaming query; {what}")
    made = local_path(location(new))
    if made is not None and made.exists() and (not made.is_dir() or any(made.iterdir())):
        raise ConfigError(f"{new}: there is something already; give a folder that does not exist yet")


def _session(spark: SparkSession, stock: StockCheckpoint) -> SparkSession:
    """Returns a session with the settings that Spark has recorded for the query, as it will have them when it goes
    on.
    """
    session = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())
    for key, value in stock.settings.items():
        session.conf.set(key, value)
    return session


def _named(stock: StockCheckpoint, names: Mapping[int, str]) -> dict[int, str]:
    # Spark numbers the operators of a query from its sink.
    from_source = sorted(stock.operators, reverse=True)
    named = {number: f"stateful-{at}" if at else "stateful" for at, number in enumerate(from_source)}
    for number, name in names.items():
        check_name(name)
        if number not in named:
            raise ConfigError(f"names: there is no processor with the number {number}; there are {sorted(named)}")
        named[number] = name
    if len(set(named.values())) < len(named):
        raise ConfigError(f"names: each operator needs a name of its own; these are {named}")
    return named


def _seed(
    session: SparkSession,
    stock: StockCheckpoint,
    operator: StockOperator,
    target: CheckpointFiles,
    policy: Any,
    name: str,
) -> list[list[str]]:
    """Brings the state of an operator into Aion's store. Returns the ids of the versions of Spark's stores.

    Puts the folder of the operator's state aside.
    """
    listener.watch(session)
    ids = tuple(shard_ids(shard_count(session, policy)))
    rows = keyed(stock.state(operator), [key_column(n) for n in range(len(operator.key))], None, timed=False)
    rows = rows._replace(key=operator.key)
    config = stateful_config(session, policy, name, ids, rows, None, operator.pandas, operator.time_mode)
    # In event time, rows reach Aion's root packed, if the processor gets rows; then the root looks for late ones.
    if config.time_mode == "eventtime" and not operator.pandas:
        config = replace(config, event_time="")
    seed = Seed(variables=operator.variables, batch=stock.batch, watermark_ms=stock.watermark_ms)
    once = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    seeds = in_arrow(once.withWatermark("timestamp", "0 seconds"), EachShard(ids), CHILD).groupBy(SHARD)
    result = stock_method(seeds, "transformWithStateInPandas" if operator.pandas else "transformWithState")(
        Root(SeedDefinition(config, seed)),
        "nothing int",
        operator.output_mode,
        operator.time_mode,
        in_arrow(rows.df, StatefulChild(name, ids), CHILD).groupBy(SHARD),
    )
    query = (
        result.writeStream.format("noop")
        .outputMode(operator.output_mode)
        .option("checkpointLocation", target.location)
        .trigger(once=True)
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()
    commit = target.metadata("commits", 0)
    target.move("state/0", f"{_ASIDE}/{operator.number}")
    for log in ("offsets", "commits", "sources", "state"):
        target.delete(log)
    stores: list[list[str]] = commit["stateUniqueIds"]["0"]
    return stores


def _assemble(session: SparkSession, stock: StockCheckpoint, target: CheckpointFiles, ids: Ids) -> None:
    """Makes the checkpoint of the folders that were put aside, and of the old checkpoint."""
    for batch in {0, stock.batch}:
        # Spark's tool reads the settings of a batch from its offsets.
        target.write(f"offsets/{batch}", stock.files.read(f"offsets/{stock.batch}"))
    others: Ids = {}
    if stock.others:
        # Spark's tool only reads a checkpoint in the format that it writes. The format differs in the log of commits.
        copy = CheckpointFiles(session, f"{target.location}/{_ASIDE}/stock")
        copy.copy_from(stock.files, f"offsets/{stock.batch}")
        _write_commit(copy, stock.batch, stock.next_watermark_ms, stock.ids)
        for number in stock.others:
            copy.copy_from(stock.files, f"state/{number}")
            _copy_definition(stock, target, number)
        others = _rewrite(session, target, stock.batch, copy.location, stock.batch)
        for number in stock.others:
            target.move(f"state/{number}", f"{_ASIDE}/{number}")
        target.delete("state")
    for number in ids:
        _take_back(target, number)
        if number:  # Spark made it as number 0 of its query
            place = f"{target.location}/state/0", f"{target.location}/state/{number}"
            _set_place(target, f"state/{number}/_metadata/v2/0", number, *place)
    if stock.batch:
        _write_commit(target, 0, 0, ids)
        ids = _rewrite(session, target, 0, None, stock.batch)
        _delete_first_versions(target, ids)
    for number in stock.others:
        _take_back(target, number)
    for name in ("offsets", "commits", _ASIDE):
        target.delete(name)
    for batch in stock.files.batches("offsets"):
        if batch >= stock.batch - 1:
            target.copy_from(stock.files, f"offsets/{batch}")
    if stock.files.exists("sources"):
        target.copy_from(stock.files, "sources")
    _write_commit(target, stock.batch, stock.next_watermark_ms, {**ids, **others})


def _take_back(target: CheckpointFiles, number: int) -> None:
    target.move(f"{_ASIDE}/{number}", f"state/{number}")


def _copy_definition(stock: StockCheckpoint, target: CheckpointFiles, number: int) -> None:
    """Copies what the checkpoint says about an operator that stays Spark's, but not its state."""
    folders = [f"state/{number}"]
    while folders:
        folder = folders.pop()
        for name in stock.files.names(folder):
            if name in ("_metadata", "_stateSchema"):
                target.copy_from(stock.files, f"{folder}/{name}")
            elif name != "SSTs" and stock.files.is_folder(f"{folder}/{name}"):
                folders.append(f"{folder}/{name}")
    for batch in target.batches(f"state/{number}/_metadata/v2"):
        place = stock.files.location, target.location
        _set_place(target, f"state/{number}/_metadata/v2/{batch}", number, *place)


def _set_place(target: CheckpointFiles, name: str, number: int, before: str, after: str) -> None:
    """Changes the metadata of an operator, which say its number and where its schemas are."""
    version, text = target.read(name).split("\n", 1)
    metadata = json.loads(text)
    metadata["operatorInfo"]["operatorId"] = number
    for store in metadata["stateStoreInfo"]:
        paths = store["stateSchemaFilePaths"]
        store["stateSchemaFilePaths"] = [after + path.removeprefix(before) for path in paths]
    target.write(name, f"{version}\n{json.dumps(metadata)}")


def _rewriter(spark: SparkSession) -> Any:
    """Spark's tool that writes the stores of a checkpoint without a query, or None if this Spark does not have it."""
    jvm: Any = spark._jvm
    try:
        jvm.java.lang.Class.forName("org.apache.spark.sql.execution.streaming.state.StateRewriter")
    except PySparkException:
        return None
    return jvm.org.apache.spark.sql.execution.streaming.state.StateRewriter


def _rewrite(session: SparkSession, target: CheckpointFiles, begin: int, source: str | None, batch: int) -> Ids:
    """Writes Spark's stores, as they are after the batch ``begin``, as those after ``batch``.

    ``source``: the checkpoint where they are, or None if they are here. Returns the ids of the versions that it made.
    """
    jvm: Any = session._jvm
    nothing, some = jvm.scala.Option.empty(), jvm.scala.Option.apply(source)
    jsession = session._jsparkSession
    conf = jsession.sessionState().newHadoopConf()
    rewriter = _rewriter(session)(jsession, begin, batch, target.location, conf, some, nothing, nothing)
    ids: Ids = {}
    operators = rewriter.run().get().iterator()
    while operators.hasNext():
        entry = operators.next()
        ids[int(entry._1())] = [[str(store) for store in partition] for partition in entry._2()]
    return ids


def _delete_first_versions(target: CheckpointFiles, ids: Ids) -> None:
    """Deletes what the batches left in Spark's stores that brought the state. Nobody will ask for it."""
    for number, partitions in ids.items():
        for partition in range(len(partitions)):
            folder = f"state/{number}/{partition}"
            for name in target.names(folder):
                if name.startswith("1_"):
                    target.delete(f"{folder}/{name}")


def _write_commit(target: CheckpointFiles, batch: int, watermark_ms: int, ids: Ids | None) -> None:
    """``ids``: None if the stores have none."""
    commit: dict[str, Any] = {"nextBatchWatermarkMs": watermark_ms}
    if ids is not None:
        commit["stateUniqueIds"] = {str(number): ids[number] for number in ids}
    target.write(f"commits/{batch}", f"v2\n{json.dumps(commit)}")
