"""The life of a window under a policy, in words with the numbers (docs/concepts.md)."""

from __future__ import annotations

from typing import NamedTuple

from aion.config.model import Policy, bucket_limit_bytes, budget_bytes
from aion.config.values import Multiple, Share, about_bytes, format_bytes
from aion.core.time import format_duration, format_instant

# The window that is told of: one minute of an arbitrary day.
_START_US = 1_735_732_800_000_000
_END_US = _START_US + 60_000_000

Story = list[tuple[str, str]]


def life_of_a_window(policy: Policy, limit_bytes: int) -> Story:
    """When, and what then. ``limit_bytes``: what a process may use here, of which ``memory.budget`` may be a share."""
    return [*_until_its_end(policy, limit_bytes), *_after_its_end(policy), *_meanwhile(policy, limit_bytes)]


def _until_its_end(policy: Policy, limit_bytes: int) -> Story:
    state = policy.state
    shards = "one shard per Spark partition" if state.shards == "auto" else f"{state.shards} shards"
    packing = "not compressed" if state.compression == "none" else f"compressed with {state.compression}"
    merging = policy.distribution
    told = "1 level" if merging.merge_levels == 1 else f"{merging.merge_levels} levels"
    levels = f", over {told} that merge those of up to {merging.fan_in} senders," if merging.merge_levels else ""
    folder = state.dir or "a folder that is chosen when the query starts"
    target = format_bytes(policy.blocks.target_bytes)
    words = _backend_words(policy, limit_bytes)
    start, end = format_instant(_START_US), format_instant(_END_US)
    return [
        (
            f"its events come, those from {start} on and before {end}",
            f"They are packed into {state.codec} blocks of about {target}, {packing}, and shuffled{levels} to "
            f"{shards}. {words.keep}",
        ),
        ("each Spark batch ends", f"What is new of it is committed to {folder}."),
        (
            f"the watermark reaches {end}, its end",
            f"On-time execution: {words.read} {_combining_words(policy)} One pane of kind on_time comes out. "
            f"{words.expire}",
        ),
    ]


def _combining_words(policy: Policy) -> str:
    match policy.execution.aggregation:
        case "lazy":
            return "It is combined of the partials of all its slices, however many windows share them."
        case "eager":
            return "Windows that overlap are combined of a tree of partials over the slices that they share."
    return (
        "Windows that overlap are combined of a tree of partials over the slices that they share, where that takes "
        "fewer rows than combining each of all its slices."
    )


def _after_its_end(policy: Policy) -> Story:
    bound_us = policy.lateness.initial_bound_us
    if bound_us == 0:
        return [
            (
                "at once, because the bound is 0",
                "Its state is purged. Every event that comes later is dropped: it comes out as a row of kind dropped.",
            )
        ]
    bound = format_duration(bound_us)
    return [
        *_bound_words(policy),
        (
            f"events come after that: late, but within the bound of {bound}",
            f"{_late_words(policy)} The window is executed again {_trigger_words(policy)}; its pane of kind late "
            "replaces the earlier ones.",
        ),
        (
            f"the watermark reaches {format_instant(_END_US + bound_us)}, its end plus the bound",
            "If events came since its last execution it is executed a last time, with a pane of kind final. "
            "Then its state is purged.",
        ),
        (f"events come later than {bound} after its end", "They come out as rows of kind dropped."),
    ]


def _bound_words(policy: Policy) -> Story:
    """How long windows will be kept that are made once the data has shown how late events come."""
    told = policy.lateness
    if told.coverage is None:
        return []
    longest = format_duration(max(told.max_bound_us, told.initial_bound_us))
    room = (
        f", and shorter where a shard's state would take more than {about_bytes(told.max_state_bytes)}"
        if (told.max_state_bytes is not None)
        else ""
    )
    alone = ", each shard as its own keys' events come" if told.per == "shard" else ""
    return [
        (
            "the data has shown how late events come",
            f"New windows get another bound than {format_duration(told.initial_bound_us)}: the shortest that covers "
            f"{told.coverage:.6g} of the late events with confidence {told.confidence:.6g}, at most {longest}{room}"
            f"{alone}.",
        )
    ]


def _trigger_words(policy: Policy) -> str:
    trigger = policy.trigger
    match trigger.kind:
        case "every_batch":
            return "once in each batch that brought it late events"
        case "interval":
            return f"once in each {format_duration(trigger.interval_us)} after its end that has news"
        case "count":
            return "at each late event" if trigger.count == 1 else f"after every {trigger.count:,} late events of it"
    if trigger.executions is not None:
        times = "once" if trigger.executions == 1 else f"{trigger.executions} times"
        return f"{times} at most, the final execution included, at the instants that keep it freshest"
    return (
        f"as seldom as keeps its staleness within {trigger.bound:g}: the time since its last execution as a share of "
        "the bound, times the share of its late events that came since"
    )


class _Words(NamedTuple):
    """How the backend keeps blocks, reads them, and lets them go when the window expires."""

    keep: str
    read: str
    expire: str


def _backend_words(policy: Policy, limit_bytes: int) -> _Words:
    total_bytes, bucket_bytes = budget_bytes(policy, limit_bytes), bucket_limit_bytes(policy, limit_bytes)
    bucket = format_bytes(bucket_bytes)
    match policy.state.backend:
        case "memory":
            return _Words(
                f"All of them stay in memory, however many: neither the budget of {_budget(policy, limit_bytes)} nor "
                f"the limit of {bucket} for a bucket binds the backend memory.",
                "it is read from memory.",
                "It stays in memory.",
            )
        case "rocksdb":
            return _Words(
                "All of them go to RocksDB; only those on their way there are in memory, within "
                f"{_budget(policy, limit_bytes)} for all windows of a host.",
                "it is read from RocksDB.",
                "It stays on disk.",
            )
    full = total_bytes // bucket_bytes
    windows = "one such window fits" if full == 1 else f"{full:,} such windows fit"
    return _Words(
        f"They stay in memory until its m-bucket has {bucket}, or all m-buckets of the host "
        f"{_budget(policy, limit_bytes)} ({windows} at a time); what is beyond goes to its p-bucket in RocksDB.",
        "it is read in the order in which its events came; what only RocksDB has is fetched behind what memory has.",
        f"Then it leaves memory for RocksDB{_but_for_its_start(policy)}.",
    )


def _late_words(policy: Policy) -> str:
    match policy.state.backend:
        case "memory":
            return "They are kept in memory too."
        case "rocksdb":
            return "They go to RocksDB too."
    match policy.prestage.mode:
        case "none":
            fetch = "Nothing is prestaged: an execution reads from disk, and waits for it."
        case "on_late_event":
            fetch = "The first of them starts prestaging: the window is back in memory when it is executed."
        case _ if policy.prestage.class_path is not None:
            fetch = f"When its state is prestaged says {_plugin(policy.prestage.class_path, policy.prestage.arguments)}"
        case _:
            fetch = (
                "The first of them starts prestaging: the window is back in memory when it is executed. What the next "
                "batch will execute by the watermark alone is prestaged in the gap before that batch: just as early "
                "as fetching was measured to take, and at once as long as nothing was measured."
            )
    return (
        f"They go straight to its p-bucket in RocksDB. {fetch} After the execution it leaves memory again"
        f"{_but_for_its_start(policy)}."
    )


def _meanwhile(policy: Policy, limit_bytes: int) -> Story:
    """What can happen at any time, to a window of the tiered backend."""
    io, story = policy.io, Story()
    coding = f"beside it by {_threads(io.codec_threads)}" if io.codec_threads else "in line, by whoever waits for it"
    disk = "One thread does" if io.threads == 1 else f"{_threads(io.threads)} do"
    rate = io.rate_limit_bytes_per_s
    slow = f"; destaging, late writes and maintenance move at most {format_bytes(rate)} a second" if rate else ""
    if policy.state.backend == "tiered":
        story += _pressure(policy, limit_bytes)
    story.append(("all the time", f"{disk} what is to be read and written; blocks are encoded {coding}{slow}."))
    return story


def _pressure(policy: Policy, limit_bytes: int) -> Story:
    memory, destage = policy.memory, policy.destage
    total_bytes = budget_bytes(policy, limit_bytes)
    start = _but_for_its_start(policy)
    if destage.class_path is not None:
        return [
            (
                "memory is looked at, every now and then",
                f"What is destaged before its end says {_plugin(destage.class_path, destage.arguments)}",
            )
        ]
    story = Story()
    if destage.idle_after is not None:
        told = destage.idle_after
        after = f"{told.times:g} times the median time of an execution" if isinstance(told, Multiple) else ""
        after = after or format_duration(destage.idle_after_us or 0)
        story.append(
            (f"neither events nor a watermark come to it for {after}", f"It is destaged: it leaves memory{start}.")
        )

    def used(share: float) -> str:
        return f"{share * 100:.4g}% of the budget ({about_bytes(share * total_bytes)})"

    first = "the largest first" if memory.victim == "largest" else "the one to which events come slowest first"
    return [
        *story,
        (
            f"{used(memory.moderate)}, or of the machine's memory, is in use: moderate pressure",
            f"Windows are destaged one by one{start}: {first}, until {used(memory.resume)} is in use.",
        ),
        (
            f"{used(memory.scarce)}, or of the machine's memory, is in use: memory is scarce",
            f"All windows are destaged{start}. Past the budget whoever brings events waits for the disk.",
        ),
    ]


def _budget(policy: Policy, limit_bytes: int) -> str:
    size_bytes, budget = budget_bytes(policy, limit_bytes), policy.memory.budget
    if isinstance(budget, Share):
        return f"{about_bytes(size_bytes)}, {budget} of the {about_bytes(limit_bytes)} that it has here"
    return format_bytes(size_bytes)


def _but_for_its_start(policy: Policy) -> str:
    kept = policy.destage.keep_fraction
    return f", but for its first {kept * 100:.4g}%" if kept else ""


def _plugin(class_path: str, arguments: object) -> str:
    assert hasattr(arguments, "items")
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"your class {class_path}({given}), which is imported when the state server starts."


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"
