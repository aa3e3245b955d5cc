"""Describes the life of a window under a policy, in words and numbers (docs/start/concepts.md)."""

from __future__ import annotations

from typing import NamedTuple

from aion.base.time import EACH_BATCH_US, format_duration, format_instant
from aion.config.model import Policy, bucket_limit_bytes, budget_bytes
from aion.config.values import Multiple, Share, about_bytes, format_bytes

# The window in the description: one minute of an arbitrary day.
_START_US = 1_735_732_800_000_000
_END_US = _START_US + 60_000_000

Story = list[tuple[str, str]]


def life_of_a_window(policy: Policy, limit_bytes: int) -> Story:
    """Returns pairs of a condition and what happens then. ``limit_bytes``: how much memory a process may use on this
    host.
    """
    return [*_until_its_end(policy, limit_bytes), *_after_its_end(policy), *_meanwhile(policy, limit_bytes)]


def _until_its_end(policy: Policy, limit_bytes: int) -> Story:
    state = policy.state
    shards = "one shard per Spark partition" if state.shards == "auto" else f"{state.shards} shards"
    packing = "not compressed" if state.compression == "none" else f"compressed with {state.compression}"
    merging = policy.distribution
    count = "1 level" if merging.merge_levels == 1 else f"{merging.merge_levels} levels"
    levels = (
        f" through {count}, which merge the blocks of up to {merging.fan_in} senders," if merging.merge_levels else ""
    )
    folder = state.dir or "a folder that is chosen when the query starts"
    kept = ""
    if state.dir is not None and "://" in state.dir and state.kept_copies_bytes:
        kept = f" Each host keeps copies of files from there, up to {format_bytes(state.kept_copies_bytes)}."
    if state.dir is not None and "://" in state.dir and state.local_copies_bytes:
        kept += f" Copies of open shards take up to {format_bytes(state.local_copies_bytes)} of a host's disk."
    target = format_bytes(policy.blocks.target_bytes)
    words = _backend_words(policy, limit_bytes)
    start, end = format_instant(_START_US), format_instant(_END_US)
    return [
        (
            f"events of the window come: from {start} and before {end}",
            f"They are packed into {state.codec} blocks of about {target}, {packing}, and shuffled{levels} to "
            f"{shards}. {words.keep}",
        ),
        *_early_words(policy),
        ("a Spark batch ends", f"The changes of the window are committed to {folder}.{kept}"),
        (
            f"the watermark reaches {end}, the window's end",
            f"On-time execution: {words.read} {_combining_words(policy)} One pane of kind on_time comes out. "
            f"{words.expire}",
        ),
    ]


def _early_words(policy: Policy) -> Story:
    if policy.trigger.early_us is None:
        return []
    return [
        (
            (
                "a batch ends, and the window is open"
                if policy.trigger.early_us == EACH_BATCH_US
                else f"the watermark has moved by {format_duration(policy.trigger.early_us)}, and the window is open"
            ),
            "If events came since, the window runs early. A pane of kind early comes out for each key with news.",
        )
    ]


def _combining_words(policy: Policy) -> str:
    match policy.execution.aggregation:
        case "lazy":
            return (
                "The window is combined from the partials of all its slices, even if it shares them with other windows."
            )
        case "eager":
            return "Overlapping windows are combined from a tree of partials over the slices that they share."
    return (
        "Overlapping windows are combined from a tree of partials over the slices that they share, if that reads "
        "fewer rows than combining each window from all its slices."
    )


def _after_its_end(policy: Policy) -> Story:
    bound_us = policy.lateness.initial_bound_us
    if bound_us == 0:
        return [
            (
                "at once, because the bound is 0",
                "Its state is deleted. Every later event is dropped: it comes out as a row of kind dropped.",
            )
        ]
    bound = format_duration(bound_us)
    return [
        *_bound_words(policy),
        *_completeness_words(policy),
        (
            f"late events come, within the bound of {bound}",
            f"{_late_words(policy)} The window runs again {_trigger_words(policy)}. Its pane of kind late "
            "replaces the earlier ones.",
        ),
        (
            f"the watermark reaches {format_instant(_END_US + bound_us)}, the window's end plus the bound",
            "If events came after its last execution, the window runs a last time, with a pane of kind final. "
            "Then its state is deleted.",
        ),
        (f"events come later than {bound} after the window's end", "They come out as rows of kind dropped."),
    ]


def _bound_words(policy: Policy) -> Story:
    """Says how long new windows are kept when Aion has seen enough late events to choose a bound."""
    lateness = policy.lateness
    if lateness.coverage is None:
        return []
    longest = format_duration(max(lateness.max_bound_us, lateness.initial_bound_us))
    smaller = (
        f", and shorter if the state of a shard would take more than {about_bytes(lateness.max_state_bytes)}"
        if lateness.max_state_bytes is not None
        else ""
    )
    alone = ". Each shard decides by the events of its own keys" if lateness.per == "shard" else ""
    return [
        (
            "enough late events have been seen",
            f"New windows get a bound other than {format_duration(lateness.initial_bound_us)}: the shortest that "
            f"covers {lateness.coverage:.6g} of the late events with confidence {lateness.confidence:.6g}, at most "
            f"{longest}{smaller}{alone}.",
        )
    ]


def _completeness_words(policy: Policy) -> Story:
    return [
        (
            "a pane comes out, and the query has completeness=True",
            f"completeness_low says how complete it is at least, with confidence {policy.lateness.confidence:.6g}.",
        )
    ]


def _trigger_words(policy: Policy) -> str:
    trigger = policy.trigger
    match trigger.kind:
        case "every_batch":
            return "in each batch that brings it late events"
        case "interval":
            return f"once per {format_duration(trigger.interval_us)} after its end, if late events came"
        case "count":
            return "at each late event" if trigger.count == 1 else f"after every {trigger.count:,} of its late events"
    if trigger.executions is not None:
        times = "once" if trigger.executions == 1 else f"{trigger.executions} times"
        return f"{times} at most, including the final execution, at the instants that keep it freshest"
    return (
        f"as rarely as possible while its staleness stays within {trigger.bound:g}. Staleness is the time since its "
        "last execution as a share of the bound, times the share of its late events that came in that time"
    )


class _Words(NamedTuple):
    """How the backend keeps blocks, how it reads them, and what it does with them when the window expires."""

    keep: str
    read: str
    expire: str


def _backend_words(policy: Policy, limit_bytes: int) -> _Words:
    total_bytes, bucket_bytes = budget_bytes(policy, limit_bytes), bucket_limit_bytes(policy, limit_bytes)
    bucket = format_bytes(bucket_bytes)
    match policy.state.backend:
        case "memory":
            return _Words(
                f"All of them stay in memory. The backend memory ignores the budget of "
                f"{_budget(policy, limit_bytes)} and the limit of {bucket} for a bucket.",
                "the window is read from memory.",
                "It stays in memory.",
            )
        case "rocksdb":
            return _Words(
                "All of them go to RocksDB. Only blocks that are being written are in memory: at most "
                f"{_budget(policy, limit_bytes)} for all windows of a host.",
                "the window is read from RocksDB.",
                "It stays on disk.",
            )
    full = total_bytes // bucket_bytes
    windows = "one such window fits" if full == 1 else f"{full:,} such windows fit"
    return _Words(
        f"They stay in memory until the window's m-bucket has {bucket}, or all m-buckets of the host together have "
        f"{_budget(policy, limit_bytes)} ({windows} at a time). The rest goes to the window's p-bucket in RocksDB.",
        "the window is read in the order in which its events came; blocks that only RocksDB has are fetched while "
        "those in memory are processed.",
        f"Then it moves from memory to RocksDB{_except_its_start(policy)}.",
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
            fetch = "The first of them starts prestaging, so that the window is back in memory when it runs."
        case _ if policy.prestage.class_path is not None:
            plugin = _plugin(policy.prestage.class_path, policy.prestage.arguments)
            fetch = f"When its state is prestaged is decided by {plugin}"
        case _:
            fetch = (
                "The first of them starts prestaging, so that the window is back in memory when it runs. Windows that "
                "the watermark makes run in the next batch are prestaged in the gap before that batch: at once if "
                "memory has room for them, and otherwise as early as needed according to the measured speed."
            )
    return (
        f"They go straight to the window's p-bucket in RocksDB. {fetch} After the execution it leaves memory again"
        f"{_except_its_start(policy)}."
    )


def _meanwhile(policy: Policy, limit_bytes: int) -> Story:
    """Says what can happen at any time to a window."""
    io, story = policy.io, Story()
    others = "another thread" if io.codec_threads == 1 else f"{io.codec_threads} other threads"
    coding = f"by {others}" if io.codec_threads else "by the thread that needs them"
    rate = io.rate_limit_bytes_per_s
    slow = f" Destaging, late writes and maintenance move at most {format_bytes(rate)} per second." if rate else ""
    if policy.state.backend == "tiered":
        story += _pressure(policy, limit_bytes)
    story.append(("all the time", f"One thread does all reads and writes. Blocks are encoded {coding}.{slow}"))
    return story


def _pressure(policy: Policy, limit_bytes: int) -> Story:
    memory, destage = policy.memory, policy.destage
    total_bytes = budget_bytes(policy, limit_bytes)
    start = _except_its_start(policy)
    if destage.class_path is not None:
        return [
            (
                "memory is checked, from time to time",
                f"What moves to disk early is decided by {_plugin(destage.class_path, destage.arguments)}",
            )
        ]
    story = Story()
    if destage.idle_after is not None:
        idle = destage.idle_after
        after = f"{idle.times:g} times the median time of an execution" if isinstance(idle, Multiple) else ""
        after = after or format_duration(destage.idle_after_us or 0)
        story.append(
            (f"the window gets no events and no watermark for {after}", f"It moves from memory to disk{start}.")
        )

    def used(share: float) -> str:
        return f"{share * 100:.4g}% of the budget ({about_bytes(share * total_bytes)})"

    first = "the largest first" if memory.victim == "largest" else "the one that gets the fewest bytes per second first"
    return [
        *story,
        (
            f"{used(memory.moderate)}, or of the machine's memory, is in use: moderate pressure",
            f"Windows move to disk one by one{start}: {first}, until {used(memory.resume)} is in use.",
        ),
        (
            f"{used(memory.scarce)}, or of the machine's memory, is in use: memory is scarce",
            f"All windows move to disk{start}. If the budget is used up, new events wait for the disk.",
        ),
    ]


def _budget(policy: Policy, limit_bytes: int) -> str:
    size_bytes, budget = budget_bytes(policy, limit_bytes), policy.memory.budget
    if isinstance(budget, Share):
        return f"{about_bytes(size_bytes)}, {budget} of the {about_bytes(limit_bytes)} of this host"
    return format_bytes(size_bytes)


def _except_its_start(policy: Policy) -> str:
    kept = policy.destage.keep_fraction
    return f", except its first {kept * 100:.4g}%" if kept else ""


def _plugin(class_path: str, arguments: object) -> str:
    assert hasattr(arguments, "items")
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"your class {class_path}({written}), which is imported when the state server starts."
