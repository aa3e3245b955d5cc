"""What will happen to each window that is kept, as its operator's snapshot tells it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aion.core.lateness.bound import AdaptiveBound, Expected
from aion.core.operator.lifecycle import Status
from aion.core.operator.window_table import WindowTable, status_of
from aion.core.trigger.triggers import Trigger, trigger_from_json
from policies.cleanup import Reason

REASONS = {
    Reason.FIXED: "initial_bound: no coverage is asked for",
    Reason.NO_HISTORY: "initial_bound: nothing was known",
    Reason.UNSUPPORTED: "conservative: history did not support coverage yet",
    Reason.LEARNT: "learnt: the shortest for coverage",
    Reason.MAX_BOUND: "max_bound: coverage asked for more",
    Reason.MAX_STATE: "max_state: no room for more",
    Reason.CHANGED: "conservative: lateness had changed",
}


@dataclass(frozen=True, slots=True)
class WindowOutlook:
    """A window that is kept. Instants are watermarks, in microseconds.

    ``definition``: the number of its definition. ``status``: active or late. ``reason``: what decided its bound when it
    was made. ``to_come``: the share of all its events that is expected later than now (of an active one: than its end)
    and in time for its bound; None as long as nothing is known. ``staleness``: the largest between two executions so
    far, of the late events that have come. ``executions_us``: when it will run, as far as that is planned: at its end,
    and late, the latter if something came. ``purged_us``: its end and bound; if something came since its last
    execution, it runs before.
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


def windows(snapshot: Mapping[str, Any], definitions: Sequence[tuple[str, Mapping[str, Any]]]) -> list[WindowOutlook]:
    """Those of one shard, the first to end first. ``definitions``: names and specs, as in the manifest's definition."""
    bound = AdaptiveBound.of_snapshot(snapshot["lateness"])
    trigger = trigger_from_json(snapshot["trigger"], Expected(bound))
    at_us, step_us = snapshot["watermark_us"], snapshot["watermark_step_us"]
    table = WindowTable.from_json(snapshot["windows"], len(definitions))
    found = [_outlook(bound, trigger, table, row, at_us, step_us) for row in range(len(table))]
    return sorted(found, key=lambda window: (window.end_us, window.start_us, window.definition))


def by_status(snapshot: Mapping[str, Any]) -> Counter[str]:
    """How many windows of one shard are active, and how many late."""
    ends = WindowTable.from_json(snapshot["windows"], 1)["end_us"].tolist()
    return Counter(str(status_of(end_us, snapshot["watermark_us"])) for end_us in ends)


@dataclass(frozen=True, slots=True)
class KeyedWindow:
    """A window of a single key. ``end_us``: None while it is not complete. ``executed``: it was yielded before."""

    key: tuple[str, ...]
    start_us: int
    end_us: int | None
    events: int
    late_events: int
    executed: bool


@dataclass(frozen=True, slots=True)
class KeyedOutlook:
    """The windows that live of a definition of which every key has its own, in one shard.

    ``events``: all that are kept for them, also those that are in no window yet. The first and the last end are None
    where no window is complete. ``listed``: the first ones to end.
    """

    definition: int
    windows: int
    executed: int
    events: int
    first_end_us: int | None
    last_end_us: int | None
    listed: tuple[KeyedWindow, ...]


def keyed_windows(
    snapshot: Mapping[str, Any], definitions: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[KeyedOutlook]:
    """Those of one shard, by definition; of versions of before this was told, nothing."""
    numbers = [number for number, (_, spec) in enumerate(definitions) if spec["type"] != "periodic"]
    found = []
    for number, kept in zip(numbers, snapshot["keyed"], strict=True):
        if (told := kept.get("live")) is None:
            continue
        columns = ("key", "start_us", "end_us", "events", "late_events", "executed")
        rows = zip(*(told["listed"][name] for name in columns), strict=True)
        listed = tuple(KeyedWindow(tuple(key), *values) for key, *values in rows)
        numbers_of = {name: told[name] for name in ("windows", "executed", "events", "first_end_us", "last_end_us")}
        found.append(KeyedOutlook(number, listed=listed, **numbers_of))
    return found


def _outlook(
    bound: AdaptiveBound, trigger: Trigger, table: WindowTable, row: int, at_us: int | None, step_us: int
) -> WindowOutlook:
    rows = np.array([row])
    state = {name: column[row].item() for name, column in table.columns.items()}
    end_us, status = state["end_us"], status_of(state["end_us"], at_us)
    if status is Status.LATE and at_us is not None:
        (view,) = table.views(rows, at_us, step_us)
        executions = [end_us + us for us in trigger.planned(view)]
        to_come = bound.still_to_come(state["bound_us"], at_us - end_us)
        stale_now = float(table.stale(rows, at_us)[0])
    else:
        # As it will be when it has run on time.
        (view,) = table.views(rows, end_us, step_us)
        executions = [end_us, *(end_us + us for us in trigger.planned(view._replace(pending=0, executions=0)))]
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
