"""Makes the objects that a policy describes: operator, executor, and the settings of the store."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aion.base.hashing import ShardOfKeys
from aion.config import Policy, Share, load_policy
from aion.config.sections import TriggerPolicy
from aion.core.compaction import BlockCompaction
from aion.core.ingest.builder import BlockBuilder
from aion.core.ingest.encoding import BlockSettings
from aion.core.keyed.cut_sessions import assigner_of
from aion.core.keyed.in_memory import WindowsInMemory
from aion.core.keyed.windows import KeyedWindows
from aion.core.lateness.bound import AdaptiveBound, Expected
from aion.core.lateness.completeness import Completeness
from aion.core.life.late_work import LateWork
from aion.core.life.rules import Overrides, PolicyRules, Rules
from aion.core.operator.operator import SNAPSHOT_VERSION, GridWindows, Operator
from aion.core.operator.overview import trigger_from_json
from aion.core.periodic import Periodic
from aion.core.query.plan import Plan
from aion.core.slicing.grid import slices_from_json
from aion.core.trigger.staleness import Forecast, StalenessTrigger
from aion.core.trigger.triggers import CountTrigger, EveryBatchTrigger, IntervalTrigger, Trigger
from aion.core.windows import EMIT, Aligned, Definition, Definitions, PerRecord, named
from aion.errors import FormatError, PolicyError, WindowError
from aion.execute.panes.block_compactor import BlockCompactor, compaction_bytes
from aion.execute.panes.contents import RowContents
from aion.execute.spill.spilling import Room
from policies.cleanup import Cleanup
from state_backends.backends import StoreConfig
from state_backends.format.block import Codec, Compression
from state_backends.store.codec_pool import CodecPool

PANES_KEPT = "panes_kept_us"
"""The field of a snapshot with the longest bound that windows of panes have had."""
_LATE_BATCHES = 10
"""Late work waits for at most this number of batches."""


def make_operator(
    plan: Plan, policy: Policy, snapshot: Mapping[str, Any] | None, bound: AdaptiveBound | None = None
) -> Operator:
    """The operator of one shard, new or as it was at ``snapshot``. Raises FormatError for another Aion's snapshot.

    ``bound``: made by :func:`make_bound`, if the caller also hands it what other shards observed.
    """
    if snapshot is not None:
        _check_version(snapshot["version"])
    bound = make_bound(plan, policy, snapshot) if bound is None else bound
    own = _own_rules(plan, policy, Expected(bound), snapshot)
    shared = PolicyRules(
        bound,
        make_trigger(policy, Expected(bound)),
        _staleness_bound(policy.trigger),
        policy.trigger.patience if predicts(policy) else 0,
        # Late events announce an execution. If due executions are predicted, only an execution in the same batch is
        # announced: blocks for a later one would take the room of what is due before.
        stages_late=prestages(policy),
        stages_due=predicts(policy),
    )
    rules = Rules(
        shared,
        own,
        len(plan.windows),
        final_only=plan.final_only,
        early={} if snapshot is None else {int(n): us for n, us in snapshot["early"].items()},
        # A restart may have given the windows before a longer bound. Then their panes come later.
        lengthens=plan.of_panes,
    )
    numbers = sorted(number for each in plan.plans for number in each.keyed)
    known = snapshot["keyed"] if snapshot is not None else []
    before = dict(zip(numbers, known, strict=True)) if known else {}
    types = [plan.schema.field(name).type for name in plan.key]

    def keyed(number: int, window: Definition, each: Plan) -> KeyedWindows:
        of = rules.of(number)
        on_arrival = isinstance(window, PerRecord) and window.on_arrival == EMIT
        assigner = assigner_of(window, shows_open=of.early is not None)
        memory = WindowsInMemory(number, assigner, types, of, each.grid.bins, before.get(number))
        return KeyedWindows(memory, before.get(number), on_arrival=on_arrival)

    return Operator(
        [GridWindows(each.grid, [keyed(n, window, each) for n, window in each.keyed.items()]) for each in plan.plans],
        rules,
        late_work=LateWork(
            math.inf if policy.execution.late_share is None else policy.execution.late_share,
            _LATE_BATCHES,
            # Windows of kept events are computed one by one, so each reads all its events.
            {
                n: w.slide_us / w.size_us
                for n, w in enumerate(plan.windows.values())
                if isinstance(w, Periodic) and plan.layout is not None
            },
        ),
        compaction=make_compaction(plan, policy, snapshot),
        completeness=make_completeness(plan, policy, snapshot),
        snapshot=snapshot,
    )


def _check_version(version: int) -> None:
    if version != SNAPSHOT_VERSION:
        age = "newer" if version > SNAPSHOT_VERSION else "older"
        text = (
            f"written in format {version}; this Aion reads format {SNAPSHOT_VERSION}: use the {age} Aion that wrote it"
        )
        raise FormatError(f"the operator's snapshot was {text}")


def make_completeness(plan: Plan, policy: Policy, snapshot: Mapping[str, Any] | None) -> Completeness | None:
    """Learns how complete rows are. None if the result does not say it."""
    known = snapshot.get("completeness") if snapshot is not None else None
    return Completeness(policy.lateness.confidence, known) if plan.completeness else None


def make_compaction(plan: Plan, policy: Policy, snapshot: Mapping[str, Any] | None) -> BlockCompaction | None:
    """Decides when blocks are compacted. None if they never are.

    Kept events without a key are not compacted, because everything is read anyway. Neither are blocks of windows that
    tell single events apart by their blocks.
    """
    if (plan.layout is None and not plan.key) or plan.by_event:
        return None
    runs = snapshot.get("runs") if snapshot is not None else None
    compaction = BlockCompaction(
        open_too=plan.layout is not None,
        limit_bytes=compaction_bytes(policy.apply.memory_bytes, Compression[policy.state.compression.upper()]),
        snapshot=runs,
    )
    if snapshot is not None and runs is None:
        compaction.leave(filter(plan.holds, slices_from_json(snapshot["slices"])), snapshot["next_seq"])
    return compaction


def make_bound(plan: Plan, policy: Policy, snapshot: Mapping[str, Any] | None, *, shards: int = 1) -> AdaptiveBound:
    """Learns how late events come, and says how long new windows are kept. ``shards``: how many the query has."""
    lateness = policy.lateness
    longest_us = max(w.reach_us for w in plan.windows.values())
    known = snapshot["lateness"] if snapshot is not None else None
    return AdaptiveBound(
        asked_bound(policy, panes_kept_us(plan, snapshot)),
        model=lateness.model,
        ahead_us=longest_us,
        together=lateness.per == "query" and shards > 1,
        snapshot=known,
    )


def asked_bound(policy: Policy, at_least_us: int = 0) -> Cleanup:
    """Returns what the policy asks of bounds. ``at_least_us``: no first bound is shorter."""
    lateness = policy.lateness
    initial_us = max(lateness.initial_bound_us, at_least_us)
    return Cleanup(
        initial_us,
        coverage=lateness.coverage,
        confidence=lateness.confidence,
        max_bound_us=max(lateness.max_bound_us, initial_us),
        max_state_bytes=lateness.max_state_bytes,
    )


def panes_kept_us(plan: Plan, snapshot: Mapping[str, Any] | None) -> int:
    """Returns how long windows are kept at least, because panes of the windows before may still come for so long.

    Each of these has the bound that held when it began. So if theirs becomes shorter at a restart, ours does not.
    """
    return 0 if snapshot is None or not plan.of_panes else int(snapshot.get(PANES_KEPT, 0))


def longest_bound_us(plan: Plan, policy: Policy) -> int:
    """How long a window is kept after its end at most, whatever is learnt."""
    lateness = policy.lateness
    learnt_us = 0 if lateness.coverage is None else lateness.max_bound_us
    own = [window.timing.bound_us for window in plan.windows.values()]
    return max(max(lateness.initial_bound_us, learnt_us) if bound is None else bound for bound in own)


def _own_rules(
    plan: Plan, policy: Policy, forecast: Forecast, snapshot: Mapping[str, Any] | None
) -> dict[int, Overrides]:
    """What definitions decide for themselves. One that finishes keeps what it decided, as the snapshot has it."""
    evolution = None if plan.history is None or snapshot is None else plan.history.evolution
    finishing = set() if evolution is None else evolution.finishing
    triggers = own_triggers(plan.windows)
    own = {}
    for number, (name, window) in enumerate(plan.windows.items()):
        if number in finishing:
            assert snapshot is not None and evolution is not None
            if evolution.windows[number].over:
                own[number] = Overrides()
                continue
            own[number] = _kept_rules(snapshot, str(number), forecast)
            continue
        timing = window.timing
        early_us = policy.trigger.early_us if timing.early_us is None else timing.early_us
        own[number] = Overrides(
            None if isinstance(window, PerRecord) else early_us,
            None if timing.bound_us is None else max(timing.bound_us, panes_kept_us(plan, snapshot)),
            trigger_of(triggers[name], forecast) if name in triggers else None,
            _staleness_bound(triggers[name]) if name in triggers else None,
            triggers[name].patience if predicts(policy) and "patience" in dict(timing.trigger or ()) else None,
        )
    return own


def _kept_rules(snapshot: Mapping[str, Any], number: str, forecast: Forecast) -> Overrides:
    trigger = snapshot["triggers"].get(number)
    made = None if trigger is None else trigger_from_json(trigger, forecast)
    bound = trigger["bound"] if trigger is not None and trigger["kind"] == "staleness" else None
    return Overrides(snapshot["early_every_us"].get(number), snapshot["own_bounds_us"].get(number), made, bound)


_KEYS_OF_KIND = {
    "staleness": ("bound", "executions"),
    "interval": ("interval",),
    "count": ("count",),
    "every_batch": (),
}
"""What each kind of trigger uses, of the keys of a policy's ``trigger``."""


def own_triggers(windows: Mapping[str, Definition]) -> dict[str, TriggerPolicy]:
    """The triggers of the definitions that have one for themselves. Raises PolicyError for one that is wrong.

    Also for a key that its kind does not use. In a policy such a key may stand: it has all keys.
    """
    asked = {name: dict(window.timing.trigger) for name, window in windows.items() if window.timing.trigger is not None}
    return {name: _trigger_alone(trigger, f"windows: {name!r}") for name, trigger in asked.items()}


def check_triggers(windows: Definitions, trigger: object) -> None:
    """Raises PolicyError if the trigger of a call, or of one of its definitions, is wrong."""
    if isinstance(trigger, Mapping):
        _trigger_alone(trigger, "keyword trigger")
    own_triggers(named(windows))


def check_overlap(windows: Definitions, policy: Policy) -> None:
    """Raises WindowError if an event would be in more windows of a definition than the policy allows, or its key would
    have rows in more.
    """
    most = policy.execution.windows_per_event
    for name, window in named(windows).items():
        if most is None or not isinstance(window, Periodic):
            continue
        if window.overlap > most:
            raise WindowError(
                f"windows: {name!r}: each event would be in {window.overlap:,} windows, and "
                f"execution.windows_per_event allows {most:,}; each of them is computed and comes out by itself. "
                "Give a longer slide or step, or raise execution.windows_per_event"
            )
        filled = 0 if window.fill is None else window.fill.for_us // window.slide_us
        if filled > most:
            raise WindowError(
                f"windows: {name!r}: a key would have rows in {filled:,} windows after its last event, and "
                f"execution.windows_per_event allows {most:,}. Give a shorter fill_for, or raise "
                "execution.windows_per_event"
            )


def _trigger_alone(asked: Mapping[str, Any], what: str) -> TriggerPolicy:
    found = load_policy({"trigger": asked}, what=what).trigger
    for key, value in asked.items():
        if key not in ("kind", "patience", *_KEYS_OF_KIND[found.kind]):
            kind = next((kind for kind, keys in _KEYS_OF_KIND.items() if key in keys), None)
            if kind is None:  # early: it is beside the kinds
                raise PolicyError(
                    f"{what}: trigger.{key}: {value!r} is not part of a trigger; give each definition {key}="
                )
            raise PolicyError(
                f"{what}: trigger.{key}: {value!r} says nothing about kind {found.kind!r}; "
                f"write {{'kind': {kind!r}, {key!r}: {value!r}}}, or leave {key} out"
            )
    return found


def _staleness_bound(trigger: TriggerPolicy) -> float | None:
    """What the staleness of windows is compared with. It is None if there is a number of executions instead."""
    return trigger.bound if trigger.kind == "staleness" and trigger.executions is None else None


def make_trigger(policy: Policy, forecast: Forecast | None = None) -> Trigger:
    """Decides when a late window runs again. ``forecast``: the late events that this shard has to expect."""
    return trigger_of(policy.trigger, forecast)


def trigger_of(trigger: TriggerPolicy, forecast: Forecast | None = None) -> Trigger:
    """The same, from one section of a policy."""
    match trigger.kind:
        case "every_batch":
            return EveryBatchTrigger()
        case "interval":
            return IntervalTrigger(trigger.interval_us)
        case "count":
            return CountTrigger(trigger.count)
        case "staleness":
            bound = trigger.bound if trigger.executions is None else None
            return StalenessTrigger(bound, executions=trigger.executions, forecast=forecast)


def block_settings(policy: Policy) -> BlockSettings:
    """How the policy wants blocks to be made."""
    return BlockSettings(
        target_bytes=policy.blocks.target_bytes,
        compression=Compression[policy.state.compression.upper()],
        codec=Codec[policy.state.codec.upper()],
        threads=policy.io.codec_threads,
        drops_bad_texts=policy.blocks.bad_text == "drop",
    )


def make_builder(plan: Plan, policy: Policy, pool: CodecPool, shard_of: ShardOfKeys | None) -> BlockBuilder:
    """Makes blocks from the events of one table."""
    return BlockBuilder(plan, block_settings(policy), pool, shard_of)


def make_contents(plan: Plan, codec: CodecPool, policy: Policy) -> RowContents:
    """The rows in the blocks, within the limits of the policy."""
    compactor = BlockCompactor(
        plan,
        target_bytes=policy.blocks.target_bytes,
        compression=Compression[policy.state.compression.upper()],
        codec=Codec[policy.state.codec.upper()],
    )
    return RowContents(plan, codec, compactor, room_of(policy), aggregation=policy.execution.aggregation)


def room_of(policy: Policy) -> Room:
    """Returns the room for rows. Spark's workers find the folder for its temporary files in their environment."""
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return Room(policy.apply.memory_bytes, folder if folder and Path(folder).is_dir() else None)


def hand_over_bytes(plan: Plan, policy: Policy) -> int | None:
    """From how many bytes of kept events on a child hands them over in a file (docs/inside/hand-over.md), or None if it
    never does.

    The baselines, in memory or all on disk, keep blocks as a batch brought them.
    """
    is_possible = plan.layout is None and not plan.unique and policy.state.backend == "tiered"
    return policy.distribution.hand_over_bytes if is_possible else None


def prestages(policy: Policy) -> bool:
    """Whether blocks are brought into memory before they are read."""
    return policy.state.backend == "tiered" and policy.prestage.mode != "none"


def predicts(policy: Policy) -> bool:
    """Whether the blocks for the next batch's executions are staged in the gap before it."""
    return prestages(policy) and policy.prestage.mode == "predictive"


def store_config(
    policy: Policy, *, windows: Iterable[Definition] = (), blocking: bool = True, retain_versions: int = 100
) -> StoreConfig:
    """The part of a policy, and of an operator's definition, that stores need. Plain values."""
    memory, destage = policy.memory, policy.destage
    share = memory.budget.percent / 100 if isinstance(memory.budget, Share) else 0.0
    arguments: dict[str, Any] = dict(destage.arguments)
    if destage.class_path is None:
        arguments = {
            "keep_fraction": destage.keep_fraction,
            "idle_after_s": destage.idle_after_us / 1e6 if destage.idle_after_us is not None else None,
            "idle_multiple": destage.idle_multiple,
            "moderate": memory.moderate,
            "resume": memory.resume,
            "scarce": memory.scarce,
            "victim": memory.victim,
        }
    return StoreConfig(
        backend=policy.state.backend,
        budget_bytes=None if isinstance(memory.budget, Share) else memory.budget,
        budget_share=share,
        bucket_limit_bytes=memory.bucket_limit_bytes,
        windows=tuple(w.stretches() for w in windows if isinstance(w, Aligned)),
        keep_fraction=destage.keep_fraction,
        prestages=prestages(policy),
        blocking=blocking,
        rate_limit_bytes_per_s=policy.io.rate_limit_bytes_per_s,
        retain_versions=retain_versions,
        kept_copies_bytes=policy.state.kept_copies_bytes or 0,
        local_copies_bytes=policy.state.local_copies_bytes,
        destage=arguments,
        destage_class=destage.class_path,
        prestage=dict(policy.prestage.arguments),
        prestage_class=policy.prestage.class_path,
        metrics_port=policy.metrics.port,
    )
