"""What a host reports of its operators: what their commits here added, and their state now. Pure.

An operator's counters are in its snapshots. They go on over restarts, and from host to host. If a host reported them as
they are, it would report events that another host took in, and its figures would jump whenever a shard moves. So it
counts what the commits on this server added to the versions that they started from. That only grows, and the counts of
several hosts add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from state_backends.store.protocol import StoreStats

Operator = tuple[str, str]
Snapshot = Mapping[str, Any]


class Committed:
    """By query and operator: ``commits``, ``restores`` of shards from a version, and ``counters`` of what was added."""

    def __init__(self) -> None:
        self._operators: dict[Operator, dict[str, Any]] = {}

    def committed(self, operator: Operator, before: Snapshot | None, after: Snapshot) -> None:
        """``before``: the snapshot that the attempt started from; None: there was none."""
        known = self._of(operator)
        known["commits"] += 1
        _add_growth(known["counters"], {} if before is None else counters(before), counters(after))

    def restored(self, operator: Operator) -> None:
        self._of(operator)["restores"] += 1

    def to_json(self, shards: Iterable[tuple[Operator, Snapshot | None]]) -> dict[str, Any]:
        """By query, then operator. ``shards``: the shards here, and the snapshots of their current versions."""
        held: dict[Operator, list[Snapshot | None]] = {}
        for operator, snapshot in shards:
            held.setdefault(operator, []).append(snapshot)
        queries: dict[str, Any] = {}
        for operator in {**held, **self._operators}:
            query, name = operator
            shards_here = held.get(operator, [])
            now = current([snapshot for snapshot in shards_here if snapshot is not None])
            known = {**_nothing(), **self._operators.get(operator, {}), **now, "shards": len(shards_here)}
            queries.setdefault(query, {})[name] = {**known, "counters": _copy(known["counters"])}
        return queries

    def _of(self, operator: Operator) -> dict[str, Any]:
        return self._operators.setdefault(operator, _nothing())


def _nothing() -> dict[str, Any]:
    return {"commits": 0, "restores": 0, "counters": {}}


def counters(snapshot: Snapshot) -> dict[str, Any]:
    """What an operator counts, and the ``lateness`` of its late events as a histogram."""
    return {**snapshot["counters"], "lateness": snapshot.get("lateness", {}).get("histogram", {})}


def current(snapshots: Iterable[Snapshot]) -> dict[str, Any]:
    """The state of an operator, over its shards: windows, shortest and longest bound of new ones, worst staleness."""
    windows, bounds_us, largest = 0.0, [], 0.0
    for snapshot in snapshots:
        counted = snapshot["counters"]
        windows += number(counted, "windows") - number(counted, "purged_windows")
        largest = max(largest, number(counted, "staleness", "largest"))
        bound_us = number(snapshot, "lateness", "learnt_bound", "decision", "bound_us", default=-1)
        if bound_us >= 0:
            bounds_us.append(bound_us)
    found: dict[str, Any] = {"windows": int(windows), "largest_staleness": largest}
    if bounds_us:
        found["bounds_us"] = {"shortest": min(bounds_us), "longest": max(bounds_us)}
    return found


def number(tree: Any, *path: str, default: float = 0) -> float:
    """The number at the end of a path. ``default`` if there is none: clients of any version write snapshots."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, int | float) and not isinstance(tree, bool) else default


def only_counts(stats: StoreStats) -> StoreStats:
    """What a store counted, without what it holds. The counts stay when the store is closed."""
    return StoreStats(
        failed_writes=stats.failed_writes,
        merges=stats.merges,
        merged_bytes=stats.merged_bytes,
        failed_merges=stats.failed_merges,
        staging=stats.staging,
    )


def _add_growth(total: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, value in after.items():
        if isinstance(value, Mapping):
            below, earlier = total.setdefault(name, {}), before.get(name)
            if isinstance(below, dict):
                _add_growth(below, earlier if isinstance(earlier, Mapping) else {}, value)
        elif not isinstance(total.get(name), dict):
            total[name] = total.get(name, 0) + max(0, value - number(before, name))


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
