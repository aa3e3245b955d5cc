"""Traces of the paper's workloads: their events go through the real block builder, and the blocks are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from aion.execute.record.trace import Trace
    from experiments.workloads.model import Shape


class Operator(NamedTuple):
    """The operator that holds most of a workload's state, as the workload's ``with_aion`` defines it.

    ``definition``: keywords for :class:`aion.LocalOperator`. Its function only counts events, unlike the workload's.
    """

    stream: str
    definition: Mapping[str, Any]


def operator_of(workload: str, shape: Shape) -> Operator:
    """The main operator of a workload. Raises ConfigError for an unknown name."""
    import aion
    from aion.errors import ConfigError

    window = {"window": aion.Tumbling(shape.window)}
    kept = {"apply": aion.Apply(how_many, "n long"), "time": "ts"}
    by_event = {**kept, "apply": aion.Apply(how_many, "n long", blocking=False)}
    match workload:
        case "average":
            return Operator("numbers", {**by_event, "windows": window})
        case "bigrams":
            return Operator("texts", {**by_event, "windows": window})
        case "stock":
            return Operator("quotes", {**kept, "windows": window, "key": "symbol"})
        case "linear-road":
            from experiments.workloads.linear_road import SEGMENT

            windows = {**window, "standing": aion.Sliding(shape.part(2), shape.window)}
            return Operator("reports", {**kept, "windows": windows, "key": SEGMENT})
    raise ConfigError(f"unknown workload {workload!r}; use average, bigrams, stock or linear-road")


def how_many(key: Any, window: Any, events: Any) -> dict[str, int]:
    return {"n": sum(batch.num_rows for batch in events)}


def trace_of(workload: str, *, scale: float, batches: int, past_windows: int, seed: int) -> Trace:
    """The trace of a stream with one shard, whose batches are one window's time apart."""
    from pathlib import Path

    import pyarrow as pa

    import aion
    from aion.base.hashing import ShardOfKeys
    from aion.config import load_policy
    from aion.core.ingest.builder import BlockBuilder
    from aion.execute.assembly import make_builder
    from aion.execute.record.recorder import Recorder
    from aion.execute.record.trace import Definition, Trace
    from aion.local import normal_schema
    from experiments.workloads import load
    from experiments.workloads.model import Shape
    from state_backends.store.codec_pool import CodecPool

    operator_of(workload, Shape(1, 2_000, 1, 1))  # raises for an unknown name
    shape = Shape.of(load(workload).spec, past_windows=past_windows, scale=scale, seed=seed)
    operator = operator_of(workload, shape)
    made = load(workload).streams[operator.stream]
    schema = normal_schema(made(shape, 0)[0].schema, "ts")
    plan = aion.Spec(**operator.definition).plan(schema)
    definition = Definition.of(plan, commits=False)
    recorder = Recorder(Path(), definition)
    tables: list[Any] = []
    pool = CodecPool(0)
    try:
        for batch in range(batches):
            recorder.begin(batch, shape.start_us(batch), shape.start_us(batch), timed=False)
            builder: BlockBuilder = make_builder(plan, load_policy("standard"), pool, ShardOfKeys([0]))
            for events in made(shape, batch)[0].select(schema.names).cast(schema).to_batches():
                recorder.arrived([b.block for b in builder.add(events)])
            recorder.arrived([b.block for b in builder.finish()])
            tables.append(recorder.table())
    finally:
        pool.close()
    end_us = shape.start_us(batches + past_windows + 3)
    recorder.begin(batches, end_us, end_us, timed=False)
    recorder.ended()
    tables.append(recorder.table())
    return Trace(definition, pa.concat_tables(tables))
