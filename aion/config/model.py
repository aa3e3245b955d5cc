"""The policy: what is kept where, for how long, and what runs when. A frozen model without side effects.

A policy file has the shape of :class:`Policy`, with the aliases of its fields as keys. If a value has a unit, the name
of the Python attribute ends in it: ``bucket_limit: 64MiB`` is ``policy.memory.bucket_limit_bytes``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from aion.config.plugin import Arguments, ArgumentsValue, ClassPath
from aion.config.values import (
    BlockSize,
    BoundDuration,
    Budget,
    Children,
    CodecThreads,
    Coverage,
    EventCount,
    Executions,
    FanIn,
    Fraction,
    Idle,
    Interval,
    IoThreads,
    LateBatches,
    LateShare,
    Location,
    MergeLevels,
    Multiple,
    OpenFraction,
    OptionalInterval,
    OptionalSize,
    Port,
    PositiveFraction,
    Rate,
    Shards,
    Share,
    Size,
    Switch,
    Timeout,
    format_bytes,
)
from aion.errors import ConfigError

KeyPath = tuple[str, ...]


class Contradiction(NamedTuple):
    """A mistake in several keys of one section. ``text`` is about the first of them."""

    text: str
    keys: tuple[str, ...]


class _Section(BaseModel):
    """A section of the policy. Fields that the user did not set adapt to those that he set: see ``_adapted``.

    A value counts as set if the user wrote it, not if a preset or a default has it. ``model_fields_set`` holds these
    fields. :mod:`aion.config.layers` passes them as the validation context: by section, the names of the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _all_commented_out(cls, value: object) -> object:
        return {} if value is None else value

    @model_validator(mode="after")
    def _adapt_what_is_not_set(self, info: ValidationInfo) -> Self:
        if info.context is not None:
            object.__setattr__(self, "__pydantic_fields_set__", set(info.context.get(type(self), ())))
        adapted = self._adapted()
        assert not adapted.keys() & self.model_fields_set, "a value that the user set was changed"
        self.__dict__.update(adapted)
        if found := list(self._contradictions()):
            raise PydanticCustomError("across", "{text}", {"text": "; ".join(c.text for c in found), "found": found})
        return self

    @classmethod
    def written(cls) -> dict[str, str]:
        """The key in a policy file, by field name."""
        return {name: field.alias or name for name, field in cls.model_fields.items()}

    def _adapted(self) -> dict[str, Any]:
        """New values for fields that the user did not set, so that they agree with those that he set."""
        return {}

    def _contradictions(self) -> Iterator[Contradiction]:
        """Values that the user set and that contradict each other."""
        return iter(())


class StatePolicy(_Section):
    """Where the state of windows is stored, and in what form."""

    backend: Literal["tiered", "memory", "rocksdb"] = Field(
        default="tiered",
        description="The store. tiered: a part of each window in memory and the rest in RocksDB. memory: everything in "
        "memory. rocksdb: everything on disk.",
    )
    codec: Literal["arrow", "json"] = Field(
        default="arrow",
        description="How the rows of a block are encoded. arrow: columnar. json: one object per line.",
    )
    compression: Literal["none", "lz4", "zstd"] = Field(
        default="none", description="How the bytes of a block are compressed: not at all, fast (lz4) or small (zstd)."
    )
    shards: Shards = Field(
        default="auto",
        description="The number of shards: hash ranges of keys, processed in parallel. auto: one per Spark partition.",
    )
    dir: Location = Field(
        default=None,
        description="The folder for the versions of the state, on any filesystem that pyarrow.fs can open. "
        "null: chosen when the query starts.",
    )


class MemoryPolicy(_Section):
    """How much memory the state of windows may use, and what happens when it runs short."""

    budget: Budget = Field(
        default=512 << 20,
        description="The most memory that all m-buckets of a host may use together: bytes, or a share of the "
        "container's memory limit (of the machine's memory if there is no container).",
    )
    bucket_limit_bytes: Size = Field(
        default=64 << 20,
        alias="bucket_limit",
        description="The most memory that one window may use in a shard, with all its slices. The rest goes to its "
        "p-bucket. If it is not set, it is at most the budget.",
    )
    moderate: PositiveFraction = Field(
        default=0.75,
        description="When this share of the budget, or of the machine's memory, is in use, windows move to disk one "
        "by one.",
    )
    resume: Fraction = Field(
        default=0.60, description="They stop when the share in use is down to this one. It must be below moderate."
    )
    scarce: PositiveFraction = Field(
        default=0.90, description="When this share is in use, all windows move to disk. At least moderate."
    )
    victim: Literal["largest", "slowest"] = Field(
        default="largest",
        description="Which window moves first: the largest, or the one that gets the fewest bytes per second.",
    )

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes; raises ConfigError if it is a share: see :func:`budget_bytes`."""
        if isinstance(self.budget, Share):
            raise ConfigError(f"memory.budget: {self.budget} is a share; its bytes are known on the host only")
        return self.budget

    def _adapted(self) -> dict[str, Any]:
        adapted: dict[str, Any] = self._adapted_thresholds()
        # The budget never adapts to the bucket limit: a limit for one window must not raise the memory of all.
        if isinstance(self.budget, int) and "bucket_limit_bytes" not in self.model_fields_set:
            adapted["bucket_limit_bytes"] = min(self.bucket_limit_bytes, self.budget)
        return adapted

    def _adapted_thresholds(self) -> dict[str, float]:
        """Adapts ``moderate`` first, and only if it must change; then ``scarce`` and ``resume`` to that."""
        resume, moderate, scarce = self.resume, self.moderate, self.scarce
        free = {"resume", "moderate", "scarce"} - self.model_fields_set
        if "moderate" in free:
            if "scarce" not in free:
                moderate = min(moderate, scarce)
            if "resume" not in free and resume >= moderate:
                moderate = _between(resume, 1.0 if "scarce" in free else scarce)
        if "scarce" in free:
            scarce = max(scarce, moderate)
        if "resume" in free and resume >= moderate:
            resume = _between(0.0, moderate)
        values = {"resume": resume, "moderate": moderate, "scarce": scarce}
        return {name: values[name] for name in free}

    def _contradictions(self) -> Iterator[Contradiction]:
        if isinstance(self.budget, int) and self.bucket_limit_bytes > self.budget:
            limit, budget = format_bytes(self.bucket_limit_bytes), format_bytes(self.budget)
            text = f"{limit} is larger than memory.budget, {budget}; set bucket_limit to at most '{budget}'"
            yield Contradiction(text, ("bucket_limit", "budget"))
        if self.resume >= self.moderate:
            text = f"{self.resume} is not below memory.moderate, {self.moderate}; set resume lower than moderate"
            yield Contradiction(text, ("resume", "moderate"))
        if self.moderate > self.scarce:
            text = f"{self.scarce} is below memory.moderate, {self.moderate}; set it to at least that"
            yield Contradiction(text, ("scarce", "moderate"))


def _between(low: float, high: float) -> float:
    return round((low + high) / 2, 6)


def _plugin_contradictions(class_path: str | None, arguments: Arguments) -> Iterator[Contradiction]:
    if arguments and class_path is None:
        yield Contradiction("given without a class; set class too, or remove arguments", ("arguments", "class"))


class DestagingPolicy(_Section):
    """What moves from memory to disk, and when, in addition to the rules in `memory`."""

    keep_fraction: Fraction = Field(
        default=0.0,
        description="How much of each window stays in memory when the rest moves to disk: its first part, as a share "
        "of the window. The next execution can then start at once.",
    )
    idle_after: Idle = Field(
        default=None,
        description="Move a window to disk after it has been idle for this long: no events, no watermark, nothing "
        "read for it. A multiple is of the median time of an execution on the host. null: never.",
    )
    class_path: ClassPath = Field(
        default=None,
        alias="class",
        description="Your own policy, a class like policies.destage.DestagePolicy. It replaces idle_after, and "
        "moderate, resume, scarce and victim of memory.",
    )
    arguments: ArgumentsValue = Field(default_factory=Arguments, description="The keyword arguments of that class.")

    @property
    def idle_after_us(self) -> int | None:
        """Microseconds, or None if ``idle_after`` is a multiple or null."""
        return self.idle_after if isinstance(self.idle_after, int) else None

    @property
    def idle_multiple(self) -> float | None:
        """The factor of the median time of an execution, or None if ``idle_after`` is a duration or null."""
        return self.idle_after.times if isinstance(self.idle_after, Multiple) else None

    def _contradictions(self) -> Iterator[Contradiction]:
        yield from _plugin_contradictions(self.class_path, self.arguments)


class PrestagingPolicy(_Section):
    """What is read from disk before it is needed, and when."""

    mode: Literal["predictive", "on_late_event", "none"] = Field(
        default="predictive",
        description="When a late window is read back from disk. predictive: early enough to be in memory when the "
        "window runs. on_late_event: when a late event comes. none: when the window runs.",
    )
    class_path: ClassPath = Field(
        default=None,
        alias="class",
        description="Your own plan for predictive: a class like policies.prestage.PrestagePolicy.",
    )
    arguments: ArgumentsValue = Field(default_factory=Arguments, description="The keyword arguments of that class.")

    def _adapted(self) -> dict[str, Any]:
        must_predict = self.class_path is not None and "mode" not in self.model_fields_set
        return {"mode": "predictive"} if must_predict else {}

    def _contradictions(self) -> Iterator[Contradiction]:
        yield from _plugin_contradictions(self.class_path, self.arguments)
        if self.class_path is not None and self.mode != "predictive":
            yield Contradiction(f"{self.mode} does not use class; set mode to predictive", ("mode", "class"))


class IoPolicy(_Section):
    """How the disk is used."""

    codec_threads: CodecThreads = Field(
        default=2,
        description="Threads that encode, decode and compress blocks, besides the I/O thread. 0: the thread that needs "
        "the block does it.",
    )
    threads: IoThreads = Field(
        default=1, description="Threads that read and write. One is best; more are only for comparison."
    )
    rate_limit_bytes_per_s: Rate = Field(
        default=None,
        alias="rate_limit",
        description="The most bytes per second that destaging, late writes and maintenance may move. null: no limit. "
        "Reads and commits, for which a task waits, are never slowed down.",
    )
    request_timeout_us: Timeout = Field(
        default=30_000_000,
        alias="request_timeout",
        description="If a request takes longer than this, the client checks whether the state server is alive. If the "
        "server does not respond for the same time again, it is killed and another one is started.",
    )


class BlocksPolicy(_Section):
    """How events are packed before Spark's shuffle."""

    target_bytes: BlockSize = Field(
        default=1 << 20,
        alias="target",
        description="The approximate size to which blocks are filled before the shuffle.",
    )


class DistributionPolicy(_Section):
    """How blocks get from the source partitions to the place where windows are computed."""

    merge_levels: MergeLevels = Field(
        default=0,
        description="The number of levels between child and root on which blocks of the same slices are merged. Each "
        "level is a shuffle.",
    )
    fan_in: FanIn = Field(default=4, description="How many nodes of a level share one node of the next level.")
    children: Children = Field(
        default="auto",
        description="The number of source partitions that the levels are planned for. auto: the number of tasks that "
        "Spark runs at once, or the number of shuffle partitions, whichever is larger.",
    )
    hand_over_bytes: OptionalSize = Field(
        default=1 << 20,
        alias="hand_over",
        description="If a task has at least this many bytes of kept events for a shard, it writes them to a file in "
        "state.dir, and only references go through the shuffle and into the state. null: it never does. "
        "Backends other than tiered get no such files.",
    )


class ExecutionPolicy(_Section):
    """How windows are computed."""

    aggregation: Literal["auto", "lazy", "eager"] = Field(
        default="auto",
        description="How overlapping windows are combined from the partials of their slices. lazy: each window from "
        "all its slices. eager: from a tree over the slices, built once for many windows. auto: whichever reads fewer "
        "rows.",
    )
    late_share: LateShare = Field(
        default=2.0,
        description="How much late work a batch does: the events in windows that run early or late are at most this "
        "many times those in windows that run on time, plus a million. The rest waits. null: nothing waits.",
    )
    late_batches: LateBatches = Field(
        default=10, description="For how many batches an execution waits at most, if late_share makes it wait."
    )


class ApplyPolicy(_Section):
    """What a function given as ``apply=`` may use on the worker that runs it."""

    memory_bytes: Size = Field(
        default=256 << 20,
        alias="memory",
        description="The most memory in a worker for grouping the events of one window by key. Larger windows are "
        "grouped with temporary files.",
    )
    spill_dir: Location = Field(
        default=None,
        description="The local folder for these files. null: Spark's local folder, otherwise the platform's temporary "
        "folder.",
    )


class LatenessPolicy(_Section):
    """How long a window is kept for late events."""

    initial_bound_us: BoundDuration = Field(
        default=600_000_000,
        alias="initial_bound",
        description="How long a window is kept after its end until Aion has seen enough late events to choose a bound.",
    )
    coverage: Coverage = Field(
        default=0.99,
        description="The share of late events that must come within a window's bound, when Aion has seen enough late "
        "events. null: every window is kept for initial_bound.",
    )
    confidence: OpenFraction = Field(
        default=0.95,
        description="How certain it must be that a bound covers this share, given the events seen so far. Also the "
        "share of rows that are at least as complete as their completeness_low says.",
    )
    model: Literal["auto", "empirical", "lognormal", "gamma", "weibull", "pareto", "mixture"] = Field(
        default="auto",
        description="The statistical model of lateness. empirical: only the observed values. auto: the model that fits "
        "best, or empirical if none fits.",
    )
    max_bound_us: BoundDuration = Field(
        default=7 * 86_400_000_000,
        alias="max_bound",
        description="The longest time that a window is kept after its end. If initial_bound is longer, that is the "
        "limit.",
    )
    max_state_bytes: OptionalSize = Field(
        default=None,
        alias="max_state",
        description="The most bytes that the state of one shard may take: for windows that have ended, for the longest "
        "window, and for what usually lies ahead of the watermark. If coverage needs more, windows are kept for a "
        "shorter time. null: no limit.",
    )
    half_life_us: Interval = Field(
        default=7 * 86_400_000_000,
        alias="half_life",
        description="After this much event time, an observed lateness counts half as much as a new one.",
    )
    per: Literal["query", "shard"] = Field(
        default="query",
        description="Which keys share what is learned about lateness. query: all keys of an operator that one host "
        "holds, so that their windows get the same bound while lateness does not drift. shard: the keys of one shard "
        "(a key group).",
    )


class TriggerPolicy(_Section):
    """When a window with late events runs again."""

    kind: Literal["staleness", "interval", "count", "every_batch"] = Field(
        default="staleness",
        description="staleness: as rarely as possible while results stay fresh enough. interval: once per interval "
        "after the window's end, if late events came. count: after this number of late events. every_batch: in each "
        "batch that brings late events.",
    )
    bound: OpenFraction = Field(
        default=0.05,
        description="For staleness: the largest staleness between two executions of a window. Staleness is (t * n) / "
        "(T * N): t is the time since the last execution and T the window's bound; n of its N late events came in that "
        "time.",
    )
    executions: Executions = Field(
        default=None,
        description="For staleness: the most late executions of a window, including the final one, at the best "
        "instants. If set, it replaces bound. More than 1,000 count as 1,000. null: as many as bound requires.",
    )
    interval_us: Interval = Field(
        default=60_000_000, alias="interval", description="For interval: the length of an interval."
    )
    count: EventCount = Field(default=1000, description="For count: the window runs after this number of late events.")
    early_us: OptionalInterval = Field(
        default=None,
        alias="early",
        description="How far the watermark moves between two early panes of an open window. They show what came so "
        "far, and come only with news. Windows per record have none. null: a window says nothing before its end.",
    )


class StatefulPolicy(_Section):
    """Stateful processors (`transformWithState`): see `docs/stateful.md`."""

    enabled: Switch = Field(
        default=False,
        description="true: `groupBy(...).transformWithState*` of pyspark runs on Aion, in jobs that are started with "
        "`python -m aion.run`, or whose session is built with `aion.configure(builder, stateful=True)`. "
        "`aion.group_by(...)` runs on Aion in any case.",
    )


class MetricsPolicy(_Section):
    """How to watch a running query from outside: see `docs/metrics.md`."""

    port: Port = Field(
        default=None,
        description="The port of 127.0.0.1 on which the state server of each host serves metrics to Prometheus. 0: any "
        "free port. null: no port.",
    )


class Policy(_Section):
    """What Aion keeps where, for how long, and when windows run."""

    state: StatePolicy = StatePolicy()
    memory: MemoryPolicy = MemoryPolicy()
    destage: DestagingPolicy = DestagingPolicy()
    prestage: PrestagingPolicy = PrestagingPolicy()
    io: IoPolicy = IoPolicy()
    blocks: BlocksPolicy = BlocksPolicy()
    distribution: DistributionPolicy = DistributionPolicy()
    execution: ExecutionPolicy = ExecutionPolicy()
    apply: ApplyPolicy = ApplyPolicy()
    lateness: LatenessPolicy = LatenessPolicy()
    trigger: TriggerPolicy = TriggerPolicy()
    stateful: StatefulPolicy = StatefulPolicy()
    metrics: MetricsPolicy = MetricsPolicy()


def policy_to_json(policy: Policy) -> dict[str, Any]:
    """A plain dict in the shape of the YAML file. ``policy_from_json`` reads it back to an equal policy."""
    return policy.model_dump(mode="json", by_alias=True)


def setting_text(value: object) -> str:
    """A value of :func:`policy_to_json` as text for a Spark setting. ``resolve`` reads it back."""
    return json.dumps(value) if value is None or isinstance(value, dict | bool) else str(value)


def leaves(model: type[BaseModel] = Policy, path: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Every key as it is written in a file, with its field, in the order of the model."""
    for name, field in model.model_fields.items():
        inner = (*path, field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, inner)
        else:
            yield inner, field
