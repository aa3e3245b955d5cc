"""The sections of a policy, and the only place where its keys are declared. Frozen models without side effects.

A key is a field: its name, its type, its default, and below it what it does and when to change it. The reference page,
the schema and ``policies/standard.yaml`` are made from that (:mod:`aion.config.reference`). If a value has a unit, the
name of the field ends in it, and the key in a file does not: ``bucket_limit: 64MiB`` is ``bucket_limit_bytes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from aion.config.plugin import Arguments, ArgumentsValue, ClassPath
from aion.config.section import Contradiction, Section
from aion.config.values import (
    BlockSize,
    BoundDuration,
    Budget,
    Children,
    CodecThreads,
    Coverage,
    Early,
    EventCount,
    Executions,
    FanIn,
    Folder,
    Fraction,
    Idle,
    Interval,
    LateShare,
    Location,
    MergeLevels,
    Multiple,
    OpenFraction,
    OptionalSize,
    Overlap,
    Patience,
    Port,
    PositiveFraction,
    Shards,
    Share,
    Size,
    Switch,
    Timeout,
    format_bytes,
)
from aion.errors import ConfigError

RESUME = 0.8
"""When memory is short, windows move to disk until this share of ``memory.moderate`` is in use."""


class StatePolicy(Section):
    """Where the state of windows is stored, and in what form."""

    backend: Literal["tiered", "memory", "rocksdb"] = "tiered"
    """The store. tiered: a part of each window in memory, the rest in RocksDB. memory: everything in memory. rocksdb:
    everything on disk. The panes are the same.

    Change it to compare, or if the state is certainly small.
    """
    codec: Literal["arrow", "json"] = "arrow"
    """How the rows of a block are encoded. arrow: columnar and fast. json: one object per line, which people and other
    tools can read; several times larger and slower.
    """
    compression: Literal["none", "lz4", "zstd"] = "none"
    """How the bytes of a block are compressed: none, lz4 (fast) or zstd (smaller, but more CPU).

    Change it if the disk or the network is the bottleneck.
    """
    shards: Shards = "auto"
    """The number of shards, which are hash ranges of keys and are processed in parallel. auto: one per Spark partition.

    Fewer shards make larger blocks; more shards use more cores. The first start of a query fixes it.
    """
    dir: Location = None
    """The folder for the versions of the state: a path, or a URI that pyarrow.fs can open (s3://..., hdfs://...). null:
    chosen when the query starts.

    On a cluster, name a folder that all executors can reach.
    """
    kept_copies_bytes: OptionalSize = None
    """If dir is a URI: how much disk of a host copies of its files may take after their shards were closed there. The
    least recently used go first. null: they are deleted with the shard.

    Set it where queries restart often, or where the network to dir is slow.
    """
    local_copies_bytes: OptionalSize = None
    """If dir is a URI: how much disk of a host copies of its files may take while their shards are open there. What is
    due last goes first, and is read from dir again when it is needed. null: all that was written or read here stays.

    Set it if a host has less disk than its shards take.
    """


class MemoryPolicy(Section):
    """How much memory the state of windows may use, and what happens when it runs short."""

    budget: Budget = 512 << 20
    """The most memory that all m-buckets (blocks of windows in memory) of a host may use together: a size, or a share
    (25%) of the container's memory limit, or of the machine's memory if there is no container.

    Raise it if the host has spare memory: there are fewer reads from disk. Lower it if workers are killed.
    """
    bucket_limit_bytes: Size = 64 << 20
    """The most memory that one window may use in a shard. All slices of the window count, also those that it shares
    with other windows. The rest goes to its p-bucket on disk. If you do not set it, it is at most the budget. For
    windows that belong to a single key, such as sessions, it is the most memory for each slice.

    Raise it if single windows are large and read often. Lower it to share memory among many windows.
    """
    moderate: PositiveFraction = 0.75
    """When this share of the budget, or of the machine's memory, is in use, windows move to disk one by one, until four
    fifths of this share are in use.

    Lower moderate and scarce if events come in bursts that are too fast for the disk.
    """
    scarce: PositiveFraction = 0.90
    """When this share is in use, all windows move to disk. At least moderate."""
    victim: Literal["largest", "slowest"] = "largest"
    """Which window moves first. largest: the one with the most bytes in memory. slowest: the one that gets the fewest
    bytes per second.

    largest frees the most memory with one write. Change it if small results must come fast.
    """

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes. Raises ConfigError if it is a share: see :func:`aion.config.model.budget_bytes`."""
        if isinstance(self.budget, Share):
            raise ConfigError(f"memory.budget: {self.budget} is a share; its bytes are known on the host only")
        return self.budget

    @property
    def resume(self) -> float:
        """The share in use at which windows stop moving. The distance keeps them from starting again at once."""
        return round(RESUME * self.moderate, 6)

    def _adapted(self) -> dict[str, Any]:
        adapted: dict[str, Any] = {}
        if "scarce" not in self.model_fields_set:
            adapted["scarce"] = max(self.scarce, self.moderate)
        elif "moderate" not in self.model_fields_set:
            adapted["moderate"] = min(self.moderate, self.scarce)
        # The budget never adapts to the bucket limit: a limit for one window must not raise the memory of all.
        if isinstance(self.budget, int) and "bucket_limit_bytes" not in self.model_fields_set:
            adapted["bucket_limit_bytes"] = min(self.bucket_limit_bytes, self.budget)
        return adapted

    def _contradictions(self) -> Iterator[Contradiction]:
        if isinstance(self.budget, int) and self.bucket_limit_bytes > self.budget:
            limit, budget = format_bytes(self.bucket_limit_bytes), format_bytes(self.budget)
            text = f"{limit} is larger than memory.budget, {budget}; set bucket_limit to at most '{budget}'"
            yield Contradiction(text, ("bucket_limit", "budget"))
        if self.moderate > self.scarce:
            text = f"{self.scarce} is below memory.moderate, {self.moderate}; set it to at least that"
            yield Contradiction(text, ("scarce", "moderate"))


def _plugin_contradictions(class_path: str | None, arguments: Arguments) -> Iterator[Contradiction]:
    if arguments and class_path is None:
        yield Contradiction("given without a class; set class too, or remove arguments", ("arguments", "class"))


class DestagingPolicy(Section):
    """What moves from memory to disk, and when, in addition to the rules in `memory`."""

    keep_fraction: Fraction = 0.0
    """How much of each window stays in memory when the rest moves to disk: its first part, as a share of the window.
    The next execution starts with this part while the rest is read.

    Raise it (to 0.1, say) if executions wait for their first bytes. It costs that share of all windows in memory.
    """
    idle_after: Idle = None
    """Move a window to disk after it has been idle for this long: no events, no watermark, nothing read for it. A
    duration (30s), a multiple (3x) of the median time of all executions on the host, or null: never.

    It should be well above the time between two batches. Set it if many windows are open at once and only a few of them
    get events.
    """
    class_path: ClassPath = Field(default=None, alias="class")
    """Your own policy, as package.module:Class, like policies.destage.DestagePolicy. It replaces idle_after, and
    moderate, scarce and victim of memory. null: the built-in policy. See docs/reference/policies.md.
    """
    arguments: ArgumentsValue = Field(default_factory=Arguments)
    """The keyword arguments of that class."""

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


class PrestagingPolicy(Section):
    """What is read from disk before it is needed, and when."""

    mode: Literal["predictive", "on_late_event", "none"] = "predictive"
    """When a late window is read back from disk. predictive: early enough to be in memory when the window runs,
    according to the measured speed. on_late_event: when the first late event comes. none: when the window runs, which
    then waits.

    Change it to on_late_event if your watermarks are punctuated. Change it to none to see what prestaging is worth.
    """
    class_path: ClassPath = Field(default=None, alias="class")
    """Your own plan for predictive, as package.module:Class, like policies.prestage.PrestagePolicy. null: the built-in
    plan. See docs/reference/policies.md.
    """
    arguments: ArgumentsValue = Field(default_factory=Arguments)
    """The keyword arguments of that class."""

    def _adapted(self) -> dict[str, Any]:
        must_predict = self.class_path is not None and "mode" not in self.model_fields_set
        return {"mode": "predictive"} if must_predict else {}

    def _contradictions(self) -> Iterator[Contradiction]:
        yield from _plugin_contradictions(self.class_path, self.arguments)
        if self.class_path is not None and self.mode != "predictive":
            yield Contradiction(f"{self.mode} does not use class; set mode to predictive", ("mode", "class"))


class IoPolicy(Section):
    """How the disk is used."""

    codec_threads: CodecThreads = 2
    """Threads that encode, decode and compress blocks, besides the one that reads and writes. 0: no extra thread; the
    thread that needs the block does it.

    Raise it if compression or json is the bottleneck and there are spare cores.
    """
    rate_limit_bytes_per_s: OptionalSize = None
    """The most bytes per second that destaging, late writes and maintenance may move (100MiB). null: no limit. Reads
    and commits, for which a task waits, are never slowed down.

    Set it if the disk is shared with something that must not wait.
    """
    request_timeout_us: Timeout = 30_000_000
    """How long a request to the state server may take before the client checks whether the server is alive. If the
    server does not respond for the same time again, it is killed and another one takes over. A slow disk alone does not
    cause this: see docs/operate/faults.md.

    Raise it if hosts are so overloaded that processes stand still for that long.
    """


class BlocksPolicy(Section):
    """How events are packed before Spark's shuffle."""

    target_bytes: BlockSize = 1 << 20
    """The approximate size to which blocks are filled before the shuffle. At most 1GiB.

    Larger blocks cost less per event; smaller blocks need less memory in each task.
    """
    bad_text: Literal["replace", "drop"] = "replace"
    """What becomes of an event with a text that is not UTF-8, as a cast of bytes may be. replace: U+FFFD stands for the
    bytes that are none. drop: it becomes a dropped row.

    Drop such events where a text is a key, or is compared.
    """


class DistributionPolicy(Section):
    """How blocks get from the source partitions to the place where windows are computed."""

    merge_levels: MergeLevels = 0
    """The number of levels between the source partitions and the shards. On each level, blocks of the same slices are
    merged. 0: none. Each level is one more shuffle.

    Raise it if there are so many source partitions that one shard cannot handle all their blocks. See
    docs/inside/distribution.md.
    """
    fan_in: FanIn = 4
    """How many nodes of a level share one node of the next level. 2 or more.

    Lower it for a deeper tree, raise it for a wider one.
    """
    children: Children = "auto"
    """The number of source partitions that the levels are planned for. auto: the number of tasks that Spark runs at
    once, or the number of shuffle partitions, whichever is larger. If there are more source partitions than that, nodes
    of the first level serve more than fan_in of them.

    If you use levels, set it to the number of partitions of the topic.
    """
    keys_disjoint: Switch = False
    """Whether all events of a key come from one source partition, so nothing has to be merged before the shards. If
    that is wrong, the panes are still right.

    Set it to true if the source is partitioned by the key, such as a topic with the key as its message key.
    """
    hand_over_bytes: OptionalSize = 1 << 20
    """If a task has at least this many bytes of kept events for a shard, it writes them to a file in state.dir, and
    only references go through the shuffle and into the state. null: it never does. See docs/inside/hand-over.md.

    Lower it if executors are far apart and state.dir is fast. Backends other than tiered get no such files.
    """


class ExecutionPolicy(Section):
    """How windows are computed."""

    aggregation: Literal["auto", "lazy", "eager"] = "auto"
    """How overlapping windows are combined from the partials of their slices. lazy: each window from all its slices.
    eager: runs of 2, 4, 8, ... slices are combined first, once for all windows of a batch; each window is then combined
    from a few runs. auto: whichever reads fewer rows. The results are the same. Variances, digests and your own
    functions are always combined lazily.

    Change it to compare.
    """
    windows_per_event: Overlap = 1_000_000
    """In how many windows of a definition an event may be: the size of a sliding window, divided by its slide. Also in
    how many windows a key may have rows after its last event: fill_for, divided by the slide. A definition with more is
    refused, because each of these windows is computed, and comes out, by itself. null: any number.

    Raise it if so many windows are meant, and memory suffices: a million windows that end at once take half a gigabyte.
    """
    late_share: LateShare = 2.0
    """How much late work a batch does, so that it does not delay on-time results: the events in windows that run early,
    late or for the last time are at most this many times those in windows that run on time, plus a million. The rest
    waits, for at most 10 batches: final executions go first, then the oldest windows. A batch without data does all
    that waits, and so does each batch of a query with windows of windows or a join of panes. null: nothing waits.

    Raise it if late results matter as much as those on time.
    """


class ApplyPolicy(Section):
    """What a function given as ``apply=`` may use on the worker that runs it."""

    memory_bytes: Size = 256 << 20
    """The most memory in a worker for grouping the events of one window by key, before they go to the function given as
    apply=. Larger windows are grouped with temporary files, on Spark's local disk. Windows without a key need no
    grouping.

    Raise it if windows with keys are large and workers have spare memory. Temporary files are written and read once.
    """


class LatenessPolicy(Section):
    """How long a window is kept for late events."""

    initial_bound_us: BoundDuration = 600_000_000
    """How long a window is kept after its end until Aion has seen enough late events to choose a bound itself. 0 or
    more. Events that come later come out as dropped.

    Raise it if events come later than that. Kept windows cost disk space, so do not set it higher than needed.
    """
    coverage: Coverage = 0.99
    """The share of late events that must come within a window's bound. When Aion has seen enough late events, new
    windows get the shortest bound that covers this share. null: every window is kept for initial_bound.

    Lower it if late events matter little and state is expensive.
    """
    confidence: OpenFraction = 0.95
    """How certain it must be that a bound covers this share, given the events seen so far. Above 0, below 1. With
    completeness=True, it is also the share of rows that are at least as complete as their completeness_low says.

    Raise it if a dropped event is expensive: bounds get longer, it takes longer until they follow the data, and
    completeness_low gets lower.
    """
    model: Literal["auto", "empirical", "lognormal", "gamma", "weibull", "pareto", "mixture"] = "auto"
    """The statistical model of lateness. auto: the model that fits the data best, or empirical if none fits. empirical:
    only the observed values. lognormal, gamma, weibull, pareto, mixture: this model, if it can be fitted.

    Change it to empirical if bounds must not depend on a model.
    """
    max_bound_us: BoundDuration = 7 * 86_400_000_000
    """The longest time that a window is kept after its end. If initial_bound is longer, that is the limit.

    Raise it if events may come later.
    """
    max_state_bytes: OptionalSize = None
    """The most bytes that the state of one shard may take: for windows that have ended, for the longest window, and for
    what usually lies ahead of the watermark. If coverage needs more, windows are kept for a shorter time. null: no
    limit.

    If the disk is small, set it to a shard's share of it.
    """
    per: Literal["query", "shard"] = "query"
    """Which keys share what is learned about lateness. query: all keys of an operator, so that their windows get the
    same bound while lateness does not drift. Each host learns on its own. shard: the keys of one shard (a key group).

    Change it to shard if the events of some keys come much later than others, and such keys are in the same shard.
    """


class TriggerPolicy(Section):
    """When a window with late events runs again."""

    kind: Literal["staleness", "interval", "count", "every_batch"] = "staleness"
    """When a window with late events runs again. staleness: as rarely as possible while results stay fresh enough,
    planned from the observed lateness. interval: once per interval after its end, if late events came. count: after
    this number of late events. every_batch: in each batch that brings late events; this is the freshest, and the most
    work.

    If events came after the last execution, a window always runs once more before it is purged.
    """
    bound: OpenFraction = 0.05
    """For staleness: the largest staleness between two executions of a window. Staleness is t * n / (T * N): t is the
    time since the last execution and T the window's bound; n of its N late events came in that time. Above 0, below 1.

    Lower it for fresher results. Half of it takes about a third more executions.
    """
    executions: Executions = None
    """For staleness: the most late executions of a window, including the final one. They run at the best instants. If
    set, it replaces bound. More than 1,000 count as 1,000. null: as many as bound requires.

    Set it if each execution costs you something, such as a message to somebody.
    """
    interval_us: Interval = 60_000_000
    """For interval: the length of an interval."""
    count: EventCount = 1000
    """For count: the window runs after this number of late events (of all its keys in a shard)."""
    patience: Patience = 1
    """For how many batches at most a late window of more than 1 MiB waits until its state is in memory. A window that
    runs in the very batch of its late event has to read it from disk, and on-time results wait for that. 0: it never
    waits.

    Set it to 0 if late results must come with their batch. Raise it if state.dir is slow and batches follow each other
    at once.
    """
    early_us: Early = None
    """How far the watermark moves between two early panes of an open window. They show what came so far, and come only
    with news. batch: they come at the end of each batch. A definition may have its own early=. Windows per record have
    none. null: a window says nothing before its end.

    Set it if windows are long and you want to see them grow.
    """


class StatefulPolicy(Section):
    """Stateful processors (`transformWithState`): see `docs/how-to/stateful.md`."""

    enabled: Switch = False
    """true: groupBy(...).transformWithState* of pyspark runs on Aion, in jobs that are started with `python -m
    aion.run`, or whose session is built with aion.configure(builder, stateful=True). aion.group_by(...) runs on Aion in
    any case.

    Set it to true to move stateful code to Aion without changing it: see docs/how-to/stateful.md.
    """


class TracePolicy(Section):
    """What a query records of its events for `aion tune`: see `docs/operate/tuning.md`."""

    folder: Folder = None
    """The folder for traces, on the host of each executor. Each operator has a folder with its name there. A trace has
    the times and the sizes of what arrives, and no payload. null: nothing is recorded.

    Set it for an hour of usual load, then run `aion tune` on it.
    """


class MetricsPolicy(Section):
    """How to watch a running query from outside: see `docs/operate/metrics.md`."""

    port: Port = None
    """The port of 127.0.0.1 on which the state server of each host serves metrics to Prometheus. 0: any free port,
    which `aion top` shows. null: no port. Every user of the host can read the metrics: see docs/operate/metrics.md.

    Set it to watch queries over time. Only one application per host can use a port; the others log that and go on.
    """
