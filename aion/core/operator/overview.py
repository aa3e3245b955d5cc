"""Predicts what will happen to each kept window, from the operator's snapshot. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from aion.core.lateness.bound import AdaptiveBound, Expected
from aion.core.life.lifecycle import Status
from aion.core.life.window_table import WindowTable, status_of
from aion.core.query.plan import FINAL
from aion.core.trigger.staleness import Forecast, StalenessTrigger
from aion.core.trigger.triggers import CountTrigger, EveryBatchTrigger, IntervalTrigger, Trigger
from aion.core.windows import ALIGNED
from policies.cleanup import Reason

REASONS = {
    Reason.FIXED: "lateness: as it was asked for",
    Reason.NO_HISTORY: "initial_bound: nothing was known",
    Reason.UNSUPPORTED: "conservative: history did not support coverage yet",
    Reason.LEARNT: "learnt: the shortest for coverage",
    Reason.MAX_BOUND: "max_bound: coverage asked for more",
    Reason.MAX_STATE: "max_state: no room for more",
    Reason.CHANGED: "conservative: lateness had changed",
    Reason.OWN: "lateness: of the definition itself",
}


@dataclass(frozen=True, slots=True)
class WindowOutlook:
    """A window that is kept. Instants are watermarks, in microseconds.

    ``definition``: the number of its definition. ``status``: active or late. ``reason``: what decided its bound when
    the window was created. ``to_come``: the share of all its events that is expected from now on within its bound. For
    an active window it is counted from the window's end. None while nothing is known. ``staleness``: the largest
    between two executions so far, relative to the late events that have come. ``executions_us``: the planned
    executions: the one at its end, and late ones. A late one happens only if events came. With ``emit="final"`` there
    are none, and no staleness. ``purged_us``: its end plus its bound. If events came since its last execution, it runs
    before it is purged.
    """

    definition: int
    start_us: int
    end_us: int
    status: str
    bound_us: int
    reason: Reason
    events: int
    late_events: int
    pending: int
    to_come: float | None
    staleness: float
    executions_us: tuple[int, ...]

    @property
    def purged_us(self) -> int:
        return self.end_us + self.bound_us


def windows(snapshot: Mapping[str, Any], definition: Mapping[str, Any]) -> list[WindowOutlook]:
    """The kept windows of one shard, by their ends. ``definition``: that of the manifest."""
    bound = AdaptiveBound.of_snapshot(snapshot["lateness"])
    trigger = trigger_from_json(snapshot["trigger"], Expected(bound))
    own = {int(n): trigger_from_json(t, Expected(bound)) for n, t in snapshot["triggers"].items()}
    at_us, step_us = snapshot["watermark_us"], snapshot["watermark_step_us"]
    table = WindowTable.from_json(snapshot["windows"], len(definition.get("windows", [])))
    triggers = [own.get(number, trigger) for number in table["definition"].tolist()]
    outlooks = [_outlook(bound, triggers[row], table, row, at_us, step_us) for row in range(len(table))]
    if definition.get("emit") == FINAL:
        outlooks = [replace(window, executions_us=(), staleness=0.0) for window in outlooks]
    return sorted(outlooks, key=lambda window: (window.end_us, window.start_us, window.definition))


def by_status(snapshot: Mapping[str, Any]) -> Counter[str]:
    """How many windows of one shard are active, and how many are late."""
    ends = WindowTable.from_json(snapshot["windows"], 1)["end_us"].tolist()
    return Counter(str(status_of(end_us, snapshot["watermark_us"])) for end_us in ends)


@dataclass(frozen=True, slots=True)
class KeyedWindow:
    """A window of a single key. ``end_us``: None while it is not complete. ``executed``: whether it has run before."""

    key: tuple[str, ...]
    start_us: int
    end_us: int | None
    events: int
    late_events: int
    executed: bool


@dataclass(frozen=True, slots=True)
class KeyedOutlook:
    """The live windows of one definition in one shard. Each key has its own windows.

    ``bound_us``: how long new ones are kept after their ends.
    ``events``: all events that are kept for them, also those that are in no window yet. ``first_end_us`` and
    ``last_end_us``: None if no window is complete. ``listed``: the windows that end first.
    """

    definition: int
    bound_us: int
    windows: int
    executed: int
    events: int
    first_end_us: int | None
    last_end_us: int | None
    listed: tuple[KeyedWindow, ...]


def keyed_windows(snapshot: Mapping[str, Any], definition: Mapping[str, Any]) -> list[KeyedOutlook]:
    """The windows of single keys in one shard, one entry for each definition. Old versions do not have this entry."""
    numbers = [number for number, (_, spec) in enumerate(definition.get("windows", [])) if spec["type"] not in ALIGNED]
    own_us = snapshot.get("own_bounds_us", {})  # versions of before have none
    outlooks = []
    for number, kept in zip(numbers, snapshot["keyed"], strict=True):
        if (live := kept.get("live")) is None:
            continue
        columns = ("key", "start_us", "end_us", "events", "late_events", "executed")
        rows = zip(*(live["listed"][name] for name in columns), strict=True)
        listed = tuple(KeyedWindow(tuple(key), *values) for key, *values in rows)
        totals = {name: live[name] for name in ("windows", "executed", "events", "first_end_us", "last_end_us")}
        bound_us = own_us.get(str(number))
        if bound_us is None:
            bound_us = AdaptiveBound.of_snapshot(snapshot["lateness"]).decision.bound_us
        outlooks.append(KeyedOutlook(number, bound_us, listed=listed, **totals))
    return outlooks


def trigger_from_json(value: Mapping[str, Any], forecast: Forecast | None = None) -> Trigger:
    """The trigger that wrote ``value``. Raises ValueError for an unknown kind."""
    match value["kind"]:
        case "every_batch":
            return EveryBatchTrigger()
        case "interval":
            return IntervalTrigger(value["every_us"])
        case "count":
            return CountTrigger(value["every"])
        case "staleness":
            return StalenessTrigger(value["bound"], executions=value["executions"], forecast=forecast)
    raise ValueError(f"unknown trigger {value['kind']!r}")


def _outlook(
    bound: AdaptiveBound, trigger: Trigger, table: WindowTable, row: int, at_us: int | None, step_us: int
) -> WindowOutlook:
    rows = np.array([row])
    state = {name: column[row].item() for name, column in table.columns.items()}
    end_us, status = state["end_us"], status_of(state["end_us"], at_us)
    if status is Status.LATE and at_us is not None:
        (planned,) = trigger.planned(table.late(rows, at_us, step_us))
        executions = [end_us + us for us in planned]
        to_come = bound.still_to_come(state["bound_us"], at_us - end_us)
        stale_now = float(table.stale(rows, at_us)[0])
    else:
        # Its state right after its on-time execution.
        none = np.zeros(1, np.int64)
        (planned,) = trigger.planned(
            replace(table.late(rows, end_us, step_us), pending=none, executed_us=none, executions=none)
        )
        executions = [end_us, *(end_us + us for us in planned)]
        to_come = bound.still_to_come(state["bound_us"])
        stale_now = 0.0
    all_staleness = float(table.all_staleness(rows)[0])
    return WindowOutlook(
        state["definition"],
        state["start_us"],
        end_us,
        str(status),
        state["bound_us"],
        Reason.of_code(state["reason"]),
        state["events"],
        state["late_events"],
        state["pending"],
        to_come,
        max(state["stalest"], stale_now) / all_staleness if all_staleness else 0.0,
        tuple(executions),
    )
