"""Describes a plan in words: what runs where, and what crosses the network (Disco section 3)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from aion.aggregates.layout import Layout
from aion.aggregates.lists import Distinct
from aion.aggregates.partial import Partial
from aion.base.numbers import counted
from aion.base.time import EACH_BATCH_US, format_duration
from aion.config import Policy
from aion.config.sections import TriggerPolicy
from aion.config.values import format_bytes
from aion.core.calendars import Steps
from aion.core.periodic import Periodic
from aion.core.query.plan import Plan
from aion.core.query.updates import visible
from aion.core.slicing.grid import SliceGrid
from aion.core.topology import MergingDecision, Strategy, Tree
from aion.core.windows import Aligned, Definition, PerRecord, Session
from aion.execute.assembly import own_triggers

_WIDTH = 110
_LABEL = 12
_DEMAND = "Spark's state requires it"

Line = tuple[str, str]


def explain_plan(
    plan: Plan,
    policy: Policy,
    tree: Tree,
    decisions: Mapping[str, MergingDecision],
    *,
    asked_levels: int,
    reading: str | None = None,
    before: Sequence[str] = (),
    clock: Sequence[str] = (),
    hand_over_bytes: int | None = None,
    why_in_python: str | None = None,
) -> str:
    """Says the text of :func:`aion.explain`. ``asked_levels``: the policy's number of levels; ``tree`` may have fewer.

    ``reading``: how the children read events themselves, or None if Spark reads them. ``before``: what comes before, in
    words. ``clock``: what moves the watermark besides events, and which events do not. ``hand_over_bytes``: from how
    many bytes on they hand events over in files (docs/inside/hand-over.md), or None if they never do.
    ``why_in_python``: why children group events in Python; it is None if Spark's own functions group them.
    """
    by = f"by key {', '.join(plan.key)}" if plan.key else "without key"
    sections = {
        f"Windows over {plan.time}, {by}": [
            *_windows(plan.windows, decisions),
            *_timing(plan, policy),
            *_slices(plan.windows),
        ],
        "Aggregates" if plan.apply is None else "Function": [*_aggregates(plan)],
        "What runs where": [
            *([("files", reading)] if reading else []),
            *(("before", words) for words in before),
            *(("clock", sentence) for sentence in clock),
            *_places(plan, policy, tree, asked_levels, why_in_python),
        ],
        "What crosses the network": [*_crossing(plan, tree, decisions, hand_over_bytes)],
        "State": [("", _state(policy, final_only=plan.final_only)), *_completeness(plan, policy)],
    }
    return "\n\n".join("\n".join((title, *map(_line, lines))) for title, lines in sections.items()) + "\n"


def _line(line: Line) -> str:
    label, text = line
    indent = " " * 2 + " " * (_LABEL + 1) * bool(label)
    first = f"  {label:<{_LABEL}} " if label else "  "
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,  # a path stays whole
        break_on_hyphens=False,
    )


# -- windows and slices ---------------------------------------------------------------------------------


def _windows(windows: Mapping[str, Definition], decisions: Mapping[str, MergingDecision]) -> Iterator[Line]:
    for name, window in windows.items():
        strategy, why = decisions[name]
        words = name if name == str(window) else f"{name} ({window})"
        merged = "computed centrally, at the root" if strategy is Strategy.CENTRAL else f"merged as {strategy}"
        yield "", " ".join([f"{words}: {merged}; {why}.", *_rules(window)])


def _rules(window: Definition) -> Iterator[str]:
    """Yields what else decides where the windows end, and when they come out."""
    match window:
        case Session(gap_column=column, max_duration_us=most_us):
            if column is not None:
                yield f"An event is dropped if its {column} is null, zero or negative."
            if most_us is not None:
                yield f"No session is longer than {format_duration(most_us)}."
        case PerRecord(on_arrival="emit"):
            yield "Its panes come in the batch in which an event of theirs arrives."


def _timing(plan: Plan, policy: Policy) -> Iterator[Line]:
    """Yields what single definitions decide for themselves, and when panes come besides the usual ones."""
    triggers = own_triggers(plan.windows)
    for name, window in plan.windows.items():
        timing, says = window.timing, []
        early_us = policy.trigger.early_us if timing.early_us is None else timing.early_us
        if early_us is not None and not isinstance(window, PerRecord) and not plan.final_only:
            each = "in each batch with news"
            if early_us != EACH_BATCH_US:
                each = f"each time the watermark has moved by {format_duration(early_us)}"
            says.append(f"yields early panes {each}")
        if name in triggers and not plan.final_only:
            says.append(f"runs again {_again(triggers[name])}")
        if timing.bound_us is not None:
            says.append(f"is kept for {format_duration(timing.bound_us)} after its end")
        if isinstance(window, Aligned) and window.fill is not None:
            value, lasts = window.fill.value, format_duration(window.fill.for_us)
            says.append(
                f"has a row ({value}) for a key without events, up to {lasts} after the key's last window with any"
            )
        if says:
            yield "", f"{name}: a window {', '.join(says)}."


def _slices(windows: Mapping[str, Definition]) -> Iterator[Line]:
    """Yields the edges of the slices, and how many windows share a slice."""
    aligned = [window for window in windows.values() if isinstance(window, Aligned)]
    gaps = [window.gap_us for window in windows.values() if isinstance(window, Session) and not window.by_event]
    edges = SliceGrid(tuple(windows.values()), segmented=False).edges
    ends = [
        f"every {format_duration(f.period_us)}" + (f" from {format_duration(f.phase_us)} on" if f.phase_us else "")
        for f in edges.families
    ]
    ends += [f"at {_at(c.steps)} in {c.rules.name} ({_each(c.steps)})" for c in edges.calendars]
    if ends:
        most = sum(w.overlap if isinstance(w, Periodic) else 1 for w in aligned)
        shared = f"for all windows that contain it (up to {most})" if most > 1 else "for its window"
        shared = shared if len(aligned) == len(windows) else "for all windows"
        yield (
            "",
            f"Slices end {' and '.join(ends)}. An event is in one slice, which is stored and sent once {shared}.",
        )
    if gaps:
        gap = format_duration(min(gaps))
        yield "", f"For sessions, a slice has one row per key for each {gap}, which is the smallest gap."


def _at(steps: Steps) -> str:
    return steps.start or ("full hours" if steps.hours else "midnight")


def _each(steps: Steps) -> str:
    return f"every {steps.unit if steps.count == 1 else steps.every}"


# -- aggregates -----------------------------------------------------------------------------------------


def _aggregates(plan: Plan) -> Iterator[Line]:
    if plan.updates is not None and plan.updates.layout is not None:
        yield from (("", f"{bound.name} = {bound.aggregate}.") for bound in plan.updates.layout.bound)
        yield "", "They are computed from the newest events of a key and window, so they have no partials."
        return
    assert plan.layout is not None or plan.apply is not None
    if plan.layout is None:
        returns = ", ".join(plan.outputs.names)
        yield "", f"apply returns {returns}. It is a function of all events of a key and window, so it has no partials."
        return
    for bound in plan.layout.bound:
        kind = (
            "decomposable: partials of a bounded size"
            if bound.decomposable
            else f"holistic: keeps the {_values(bound.partials)}"
        )
        yield "", f"{bound.name} = {bound.aggregate}: {kind}."


# -- places ---------------------------------------------------------------------------------------------


def _places(plan: Plan, policy: Policy, tree: Tree, asked_levels: int, why_in_python: str | None) -> Iterator[Line]:
    target = format_bytes(policy.blocks.target_bytes)
    lifted = (
        f"kept as they are, in blocks of about {target}"
        if plan.sent.layout is None
        else f"lifted to partials, combined over the whole task: one row for each {'key and ' * bool(plan.key)}slice"
    )
    sent = plan.sent.layout
    grouped = ""
    if sent is not None:
        grouped = "" if why_in_python is None else f" Python groups the events, because {why_in_python}."
        without = "; if few groups come out, they go to the root without Python here" * (not tree.levels)
        grouped = grouped or f" Spark's own functions group the events, before they reach Python{without}."
    yield "child", f"on every source partition: events are assigned to slices and {lifted}.{grouped}"
    merged = "put together" if sent is None else "combined" if not sent.holistic else "combined or joined"
    for level in range(1, tree.levels + 1):
        nodes, tasks = counted(tree.nodes(level), "node"), counted(tree.tasks(level), "task")
        below = f"of {tree.children:,} source partitions" if level == 1 else f"nodes of level {level - 1}"
        yield (
            f"level {level}",
            f"{nodes} in {tasks}, each of up to {tree.fan_in} {below}: blocks of a slice are {merged}.",
        )
    if asked_levels > tree.levels:
        yield "levels", f"{asked_levels} in the policy, none used: no two partitions have parts of the same window."
    work = (
        f"keeps the blocks of its keys and {'calls the function' if plan.apply else 'computes'} for each key and window"
        if plan.layout is None
        else "keeps the blocks of its keys, merges them by window and lowers them to results"
    )
    if plan.unique:
        identity = _columns([*plan.unique, *(() if plan.time in plan.unique else (plan.time,))])
        yield (
            "unique",
            f"an event that came before, by {identity}, counts once: a shard knows each event by a hash, 16 bytes, as "
            "long as its slice. So children send events, and the root makes blocks of them.",
        )
    yield "root", f"{counted(len(tree.shards), 'shard')} in {counted(tree.root_tasks, 'task')}; each {work}."
    if plan.layout is not None and any(isinstance(w, Periodic) and w.overlap > 1 for w in plan.windows.values()):
        yield "overlap", _combining(plan.layout, policy)


def _combining(layout: Layout, policy: Policy) -> str:
    """Says how overlapping windows are combined."""
    lazy = "each window is combined from all its slices"
    eager = "runs of slices are combined first, once for many windows, and each window from a few runs"
    rounding = [b.name for b in layout.bound if not all(p.exact and not p.holistic for p in b.partials)]
    apart = f" Lazy for {', '.join(rounding)}, whose results may depend on how slices are grouped." if rounding else ""
    match policy.execution.aggregation:
        case "lazy":
            return f"lazy, as the policy says: {lazy}."
        case _ if len(rounding) == len(layout.bound):
            return f"lazy, because the result of {', '.join(rounding)} may depend on how slices are grouped: {lazy}."
        case "eager":
            return f"eager, as the policy says: {eager}.{apart}"
    return f"eager if that reads fewer rows: {eager}. Otherwise lazy: {lazy}.{apart}"


def _crossing(
    plan: Plan, tree: Tree, decisions: Mapping[str, MergingDecision], hand_over_bytes: int | None
) -> Iterator[Line]:
    central = [name for name, decision in decisions.items() if decision.strategy is Strategy.CENTRAL]
    if plan.sent.layout is None or central:
        whose = "the root" if plan.sent.layout is None else ", ".join(central)
        whose = whose if plan.apply is None else "the function"
        yield "events", f"the columns {_columns(visible(plan))} of every event, once each, for {whose}."
    if hand_over_bytes is not None:
        least = format_bytes(hand_over_bytes)
        yield (
            "files",
            f"a task with {least} of them for a shard writes a file in state.dir, and sends references to it.",
        )
    if (layout := plan.sent.layout) is not None:
        fixed = [p for p in layout.partials if not p.holistic]
        read = dict.fromkeys(column for p in fixed for column in p.columns)
        source = f" of {_columns(list(read))}" if read else ""
        keys = f"key and slice: the key {_columns(plan.key)} and" if plan.key else "slice:"
        numbers = sum(len(layout.partials[p]) for p in fixed)
        yield "partials", f"one row for each {keys} {counted(numbers, 'column')} of partials{source}."
        if layout.holistic:
            yield "values", f"the {_values(layout.partials)}, without their times, once for each slice."
    way = " -> ".join(["child", *(f"level {level}" for level in range(1, tree.levels + 1)), "root"])
    if tree.levels and tree.tasks(tree.levels) == tree.root_tasks == 1:
        hops, why = tree.levels, "the last level and the root are one task, so there is no shuffle between them"
    else:
        hops = tree.levels + 1
        why = f"{'it is' if not tree.levels else 'the last is'} by shard, because {_DEMAND}"
    yield "way", f"{way}: {counted(hops, 'shuffle')}; {why}."


def _state(policy: Policy, *, final_only: bool) -> str:
    lateness = policy.lateness
    learned = (
        ""
        if lateness.coverage is None
        else f" (until enough is known for a bound that covers {lateness.coverage:g} of late events)"
    )
    runs = "run once, when they are final: emit='final'" if final_only else f"run again {_again(policy.trigger)}"
    return (
        f"store {policy.state.backend}, {policy.state.codec} blocks, compression {policy.state.compression}. Windows "
        f"{runs}. They are kept for {format_duration(lateness.initial_bound_us)} after their end{learned}."
    )


def _again(trigger: TriggerPolicy) -> str:
    return {
        "staleness": f"at a staleness of {trigger.bound:g}",
        "interval": f"every {format_duration(trigger.interval_us)} if late events came",
        "count": f"after every {trigger.count:,} late events",
        "every_batch": "in every batch with late events",
    }[trigger.kind]


def _completeness(plan: Plan, policy: Policy) -> Iterator[Line]:
    """Yields how rows say how complete they are."""
    if not plan.completeness:
        return
    of = [name for name, window in plan.windows.items() if isinstance(window, Periodic)]
    if not of:
        yield (
            "",
            "Rows do not say how complete they are: only windows of a fixed size do. The columns are null.",
        )
        return
    yield (
        "",
        f"Rows of {', '.join(of)} say how complete they are, as learned from windows that have closed. They hold at "
        f"least completeness_low of their events with confidence {policy.lateness.confidence:g}.",
    )


def _values(partials: Iterable[Partial]) -> str:
    """Says the columns whose values holistic partials keep."""
    kept = [partial for partial in partials if partial.holistic]
    every = [column for p in kept if not isinstance(p, Distinct) for column in p.columns]
    distinct = [column for p in kept if isinstance(p, Distinct) for column in p.columns]
    parts = [("values of ", every), ("distinct values of ", distinct)]
    return " and the ".join(words + _columns(list(dict.fromkeys(columns))) for words, columns in parts if columns)


def _columns(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names)
