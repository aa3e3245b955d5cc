"""The policy: what is kept where, for how long, and what runs when. A frozen model; no effect.

A file has the shape of :class:`Policy` by alias; a Python attribute carries its unit where the value has one
(``bucket_limit: 64MiB`` is ``policy.memory.bucket_limit_bytes``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, Self

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
    Location,
    MaxState,
    MergeLevels,
    Multiple,
    OpenFraction,
    Port,
    Rate,
    Shards,
    Share,
    Size,
    Timeout,
    format_bytes,
)
from aion.errors import ConfigError

KeyPath = tuple[str, ...]


class _Section(BaseModel):
    """Keys of which some depend on each other. What the user did not set follows what he did: see ``_followed``.

    He set what he wrote himself, not what a preset or a default says: ``model_fields_set`` is that. The layers, which
    know it, tell it as the context of a validation: by section, the names of the fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _all_commented_out(cls, value: object) -> object:
        return {} if value is None else value

    @model_validator(mode="after")
    def _follow_what_was_set(self, info: ValidationInfo) -> Self:
        if info.context is not None:
            object.__setattr__(self, "__pydantic_fields_set__", set(info.context.get(type(self), ())))
        followed = self._followed()
        assert not followed.keys() & self.model_fields_set, "what the user set stays as it is"
        self.__dict__.update(followed)
        self._check()
        return self

    @classmethod
    def written(cls) -> dict[str, str]:
        """How each field is written in a file."""
        return {name: field.alias or name for name, field in cls.model_fields.items()}

    def _followed(self) -> dict[str, Any]:
        """New values for fields that the user did not set, so that they agree with those that he did."""
        return {}

    def _check(self) -> None:
        """Raises what :func:`_across` makes if values that the user set contradict each other."""


def _across(text: str, *keys: str) -> PydanticCustomError:
    """An error between keys of one section; the first is the one that the text is about."""
    return PydanticCustomError("across", "{text}", {"text": text, "keys": keys})


class StatePolicy(_Section):
    """In which store the state of windows lives, and in what form."""

    backend: Literal["tiered", "memory", "rocksdb"] = Field(
        default="tiered",
        description="The store: tiered keeps a part of each window in memory and the rest in RocksDB, "
        "memory keeps all in memory, rocksdb keeps all on disk.",
    )
    codec: Literal["arrow", "json"] = Field(
        default="arrow",
        description="How the rows of a block become bytes: arrow is columnar, json is one object a line.",
    )
    compression: Literal["none", "lz4", "zstd"] = Field(
        default="none", description="How the bytes of a block are compressed: not, fast, or small."
    )
    shards: Shards = Field(
        default="auto",
        description="Hash ranges of keys, worked on in parallel; auto: one per Spark partition.",
    )
    dir: Location = Field(
        default=None,
        description="The folder of the state's versions, on any filesystem that pyarrow.fs reaches; "
        "null: chosen when the query starts.",
    )


class MemoryPolicy(_Section):
    """How much memory the state of windows may take, and what happens when it runs short."""

    budget: Budget = Field(
        default=512 << 20,
        description="What all m-buckets of a host may take together: bytes, or a share of the memory limit of the "
        "container, or else of the machine.",
    )
    bucket_limit_bytes: Size = Field(
        default=64 << 20,
        alias="bucket_limit",
        description="The most memory that the m-bucket of one window may take in a shard: all slices that the window "
        "spans. What is beyond goes to its p-bucket. If it is not set, it is at most the budget.",
    )
    moderate: Fraction = Field(
        default=0.75,
        description="From this share on, of the budget or of the machine's memory in use, windows are destaged one "
        "by one.",
    )
    resume: Fraction = Field(
        default=0.60, description="They are destaged until the share in use is down to this one; below moderate."
    )
    scarce: Fraction = Field(
        default=0.90, description="From this share on all windows are destaged; at least moderate."
    )
    victim: Literal["largest", "slowest"] = Field(
        default="largest",
        description="Which window is destaged first: the largest, or the one to which events come slowest.",
    )

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes; raises ConfigError if it is a share: see :func:`budget_bytes`."""
        if isinstance(self.budget, Share):
            raise ConfigError(f"memory.budget: {self.budget} is a share; its bytes are known on the host only")
        return self.budget

    def _followed(self) -> dict[str, Any]:
        followed: dict[str, Any] = self._followed_thresholds()
        # The other way round it is an error: memory never grows because of a limit within it.
        if isinstance(self.budget, int) and "bucket_limit_bytes" not in self.model_fields_set:
            followed["bucket_limit_bytes"] = min(self.bucket_limit_bytes, self.budget)
        return followed

    def _followed_thresholds(self) -> dict[str, float]:
        """From ``moderate`` outwards, and that is as it was where it can be."""
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

    def _check(self) -> None:
        if isinstance(self.budget, int) and self.bucket_limit_bytes > self.budget:
            limit, budget = format_bytes(self.bucket_limit_bytes), format_bytes(self.budget)
            text = f"{limit} is larger than memory.budget, {budget}; set bucket_limit to at most '{budget}'"
            raise _across(text, "bucket_limit", "budget")
        if self.resume >= self.moderate:
            text = f"{self.resume} is not below memory.moderate, {self.moderate}; set resume lower than moderate"
            raise _across(text, "resume", "moderate")
        if self.moderate > self.scarce:
            text = f"{self.scarce} is below memory.moderate, {self.moderate}; set it to at least that"
            raise _across(text, "scarce", "moderate")


def _between(low: float, high: float) -> float:
    return round((low + high) / 2, 6)


def _check_plugin(class_path: str | None, arguments: Arguments) -> None:
    if arguments and class_path is None:
        raise _across("given without a class to call with them; name it as class, too", "arguments", "class")


class DestagingPolicy(_Section):
    """What leaves memory for the disk, and when, beside what memory says."""

    keep_fraction: Fraction = Field(
        default=0.0,
        description="The first part of each window, as a share of it, that stays in memory when it is destaged, so "
        "that its next execution can start at once.",
    )
    idle_after: Idle = Field(
        default=None,
        description="Move a window to disk after it has been idle for this long: no events, no watermark, nothing "
        "fetched for it. A multiple is of the median time of an execution on the host. null: never.",
    )
    class_path: ClassPath = Field(
        default=None,
        alias="class",
        description="A policy of your own in the place of idle_after and of moderate, resume, scarce and victim of "
        "memory: a class like policies.destage.DestagePolicy.",
    )
    arguments: ArgumentsValue = Field(default_factory=Arguments, description="What that class is called with.")

    @property
    def idle_after_us(self) -> int | None:
        """Microseconds, unless it is a multiple or off."""
        return self.idle_after if isinstance(self.idle_after, int) else None

    @property
    def idle_multiple(self) -> float | None:
        """Times the median time of an execution, unless it is a duration or off."""
        return self.idle_after.times if isinstance(self.idle_after, Multiple) else None

    def _check(self) -> None:
        _check_plugin(self.class_path, self.arguments)


class PrestagingPolicy(_Section):
    """What is fetched from the disk before it is needed, and when."""

    mode: Literal["predictive", "on_late_event", "none"] = Field(
        default="predictive",
        description="predictive: so early that it is there when the window is executed; on_late_event: as soon as a "
        "late event comes; none: when it is read.",
    )
    class_path: ClassPath = Field(
        default=None,
        alias="class",
        description="A plan of your own for predictive: a class like policies.prestage.PrestagePolicy.",
    )
    arguments: ArgumentsValue = Field(default_factory=Arguments, description="What that class is called with.")

    def _followed(self) -> dict[str, Any]:
        follows = self.class_path is not None and "mode" not in self.model_fields_set
        return {"mode": "predictive"} if follows else {}

    def _check(self) -> None:
        _check_plugin(self.class_path, self.arguments)
        if self.class_path is not None and self.mode != "predictive":
            raise _across(f"{self.mode} plans nothing, so class is of no use; set mode to predictive", "mode", "class")


class IoPolicy(_Section):
    """How the disk is used."""

    codec_threads: CodecThreads = Field(
        default=2,
        description="Threads that encode, decode and compress blocks beside the I/O thread; 0: it is done in line.",
    )
    threads: IoThreads = Field(
        default=1, description="Threads that read and write; one is best, more are for comparison only."
    )
    rate_limit_bytes_per_s: Rate = Field(
        default=None,
        alias="rate_limit",
        description="What destaging, late writes and maintenance may move each second; null: what the disk can. "
        "What a task waits for, reads and the writes of commits, is never slowed down.",
    )
    request_timeout_us: Timeout = Field(
        default=30_000_000,
        alias="request_timeout",
        description="After so long without an answer the state server is asked for a sign of life; if it gives none "
        "for as long again, it is killed and another one started.",
    )


class BlocksPolicy(_Section):
    """How events are packed before Spark's shuffle."""

    target_bytes: BlockSize = Field(
        default=1 << 20,
        alias="target",
        description="Bytes to which blocks are filled, about, before the shuffle.",
    )


class DistributionPolicy(_Section):
    """By what way blocks get from the source partitions to where windows are computed."""

    merge_levels: MergeLevels = Field(
        default=0,
        description="Levels between child and root on which blocks of the same slices are merged; each is a shuffle.",
    )
    fan_in: FanIn = Field(default=4, description="So many nodes of a level share one node of the next level.")
    children: Children = Field(
        default="auto",
        description="Source partitions that the levels are laid out for; auto: as many as Spark has tasks at once, or "
        "shuffle partitions, whichever is more.",
    )


class ExecutionPolicy(_Section):
    """How windows are computed."""

    aggregation: Literal["auto", "lazy", "eager"] = Field(
        default="auto",
        description="How windows that overlap are combined of the partials of their slices. lazy: each of all of "
        "them; eager: of a tree over them, made for many windows together; auto: whichever takes fewer rows.",
    )


class ApplyPolicy(_Section):
    """What a function given as ``apply=`` may take on the worker that runs it."""

    memory_bytes: Size = Field(
        default=256 << 20,
        alias="memory",
        description="Bytes of a window's events that are grouped by key in the worker's memory; larger windows are "
        "grouped by way of temporary files.",
    )
    spill_dir: Location = Field(
        default=None,
        description="The local folder of those files; null: Spark's local folder, else the platform's temporary one.",
    )


class LatenessPolicy(_Section):
    """How late an event may be before its window is gone."""

    initial_bound_us: BoundDuration = Field(
        default=600_000_000,
        alias="initial_bound",
        description="Time that a window is kept after its end, as long as too little is known of how late events come.",
    )
    coverage: Coverage = Field(
        default=0.99,
        description="The share of late events that a window is kept for, once the data has shown how late they come; "
        "null: every window is kept for initial_bound.",
    )
    confidence: OpenFraction = Field(
        default=0.95, description="How sure it has to be that a bound covers so much, given what was seen."
    )
    model: Literal["auto", "empirical", "lognormal", "gamma", "weibull", "pareto", "mixture"] = Field(
        default="auto",
        description="What lateness is taken to be distributed like: auto is the best model that fits, and empirical, "
        "just what was seen, where none does.",
    )
    max_bound_us: BoundDuration = Field(
        default=7 * 86_400_000_000,
        alias="max_bound",
        description="No window is kept longer than this after its end, or than initial_bound if that is longer.",
    )
    max_state_bytes: MaxState = Field(
        default=None,
        alias="max_state",
        description="Windows are kept shorter than coverage asks for where a shard's state would take more than this; "
        "null: whatever it takes.",
    )
    half_life_us: Interval = Field(
        default=7 * 86_400_000_000,
        alias="half_life",
        description="After so much event time, what was seen counts half as much as what is seen now.",
    )
    per: Literal["query", "shard"] = Field(
        default="query",
        description="Who learns together. query: all keys of an operator, as far as one host holds them, so that all "
        "windows get one bound; shard: the keys of each state partition of Spark's (a key group) for themselves.",
    )


class TriggerPolicy(_Section):
    """When a window that has late events is executed again."""

    kind: Literal["staleness", "interval", "count", "every_batch"] = Field(
        default="staleness",
        description="staleness: as seldom as keeps results fresh; interval: once in each interval after the window's "
        "end that has news; count: after so many late events; every_batch: once for each batch that brought late "
        "events.",
    )
    bound: OpenFraction = Field(
        default=0.05,
        description="For staleness: the largest (t * n) / (T * N) between two executions of a window; t of the bound "
        "T on lateness went by, and n of its N late events came.",
    )
    executions: Executions = Field(
        default=None,
        description="For staleness: at most so many late executions of a window, the final one among them, at the "
        "best instants, in the place of bound; null: as many as bound asks for.",
    )
    solver: Literal["exact", "descent"] = Field(
        default="exact",
        description="For staleness: how the instants are planned; descent is the paper's heuristic, for comparison.",
    )
    interval_us: Interval = Field(default=60_000_000, alias="interval", description="For interval: how long one is.")
    count: EventCount = Field(default=1000, description="For count: so many late events of a window make an execution.")


class MetricsPolicy(_Section):
    """How a running query is watched from outside; `docs/metrics.md`."""

    port: Port = Field(
        default=None,
        description="The port of 127.0.0.1 at which the state server of each host tells its metrics to Prometheus; 0: "
        "any that is free; null: it listens on no port.",
    )


class Policy(_Section):
    """What Aion keeps where, for how long, and what it executes when."""

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
    metrics: MetricsPolicy = MetricsPolicy()


def budget_bytes(policy: Policy, limit_bytes: int) -> int:
    """The memory budget on a host whose processes may use ``limit_bytes`` (state_backends.server.machine)."""
    budget = policy.memory.budget
    return budget.of(limit_bytes) if isinstance(budget, Share) else budget


def bucket_limit_bytes(policy: Policy, limit_bytes: int) -> int:
    """The limit of one m-bucket on such a host: as the policy says, but at most the budget."""
    return min(policy.memory.bucket_limit_bytes, budget_bytes(policy, limit_bytes))


def policy_to_json(policy: Policy) -> dict[str, Any]:
    """A plain dict of the YAML's shape that ``policy_from_json`` reads back to an equal policy."""
    return policy.model_dump(mode="json", by_alias=True)


def setting_text(value: object) -> str:
    """A value of :func:`policy_to_json` in the spelling of Spark's settings, which ``resolve`` reads back."""
    return "null" if value is None else json.dumps(value) if isinstance(value, dict) else str(value)


def leaves(model: type[BaseModel] = Policy, path: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Every key as it is written, with its field, in the order of the model."""
    for name, field in model.model_fields.items():
        inner = (*path, field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, inner)
        else:
            yield inner, field
