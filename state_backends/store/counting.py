"""What a host reports about its operators: what their commits on this host added, and their state now. Pure.

An operator's counters are in its snapshots. They survive restarts, and move from host to host with their shard. If a
host reported them as they are, it would report events that another host received, and its figures would jump whenever a
shard moves. So it counts what each commit on this host added to the version that it started from. These counts only
grow, and the counts of several hosts add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from state_backends.store.protocol import StoreStats

Operator = tuple[str, str]
Snapshot = Mapping[str, Any]


class Committed:
    """For each query and operator: ``commits``, ``restores`` of shards from a version, and growth of ``counters``."""

    def __init__(self) -> None:
        self._operators: dict[Operator, dict[str, Any]] = {}

    def committed(self, operator: Operator, before: Snapshot | None, after: Snapshot) -> None:
        """Counts a commit. ``before``: the snapshot that the attempt started from, or None if there was none."""
        counted = self._of(operator)
        counted["commits"] += 1
        _add_growth(counted["counters"], {} if before is None else counters(before), counters(after))

    def restored(self, operator: Operator) -> None:
        self._of(operator)["restores"] += 1

    def forget(self, operator: Operator) -> None:
        self._operators.pop(operator, None)

    def to_json(self, shards: Iterable[tuple[Operator, Snapshot | None]]) -> dict[str, Any]:
        """Everything by query, then by operator. ``shards``: the host's shards, with the snapshot of each."""
        by_operator: dict[Operator, list[Snapshot | None]] = {}
        for operator, snapshot in shards:
            by_operator.setdefault(operator, []).append(snapshot)
        queries: dict[str, Any] = {}
        for operator in {**by_operator, **self._operators}:
            query, name = operator
            snapshots = by_operator.get(operator, [])
            now = current([snapshot for snapshot in snapshots if snapshot is not None])
            counted = {**_zero(), **self._operators.get(operator, {}), **now, "shards": len(snapshots)}
            places = {"memory_bytes": 0, "disk_bytes": 0}  # for the host to add up
            queries.setdefault(query, {})[name] = {**counted, **places, "counters": _copy(counted["counters"])}
        return queries

    def _of(self, operator: Operator) -> dict[str, Any]:
        return self._operators.setdefault(operator, _zero())


def _zero() -> dict[str, Any]:
    return {"commits": 0, "restores": 0, "counters": {}}


def counters(snapshot: Snapshot) -> dict[str, Any]:
    """Returns the operator's counters, and two more.

    ``lateness``: the histogram of how late its late events were. ``judged``: see :func:`judged`.
    """
    late, missed = judged(snapshot)
    histogram = snapshot.get("lateness", {}).get("histogram", {})
    return {**snapshot["counters"], "lateness": histogram, "judged": {"in_time": late - missed, "missed": missed}}


def judged(snapshot: Snapshot) -> tuple[float, float]:
    """Returns the late events by which learned bounds were judged, and those of them that came after their bound.

    Both are 0 if bounds are not learned (docs/inside/lateness.md).
    """
    late, missed = (number(snapshot, "lateness", "conformal", name) for name in ("late", "missed"))
    return late, missed


def current(snapshots: Iterable[Snapshot]) -> dict[str, Any]:
    """Returns the state of an operator over its shards.

    Windows, shortest and longest bound of new windows, worst staleness, and the coverage of bounds: ``asked``, and
    ``realised`` if bounds have been judged.
    """
    windows, bounds_us, largest = 0.0, [], 0.0
    allowed, late, missed = [], 0.0, 0.0
    for snapshot in snapshots:
        counted = snapshot["counters"]
        windows += number(counted, "windows") - number(counted, "purged_windows")
        largest = max(largest, number(counted, "staleness", "largest"))
        bound_us = number(snapshot, "lateness", "learnt_bound", "decision", "bound_us", default=-1)
        if bound_us >= 0:
            bounds_us.append(bound_us)
        allowed.append(number(snapshot, "lateness", "conformal", "allowed"))
        late, missed = late + judged(snapshot)[0], missed + judged(snapshot)[1]
    state: dict[str, Any] = {"windows": int(windows), "largest_staleness": largest}
    if bounds_us:
        state["bounds_us"] = {"shortest": min(bounds_us), "longest": max(bounds_us)}
    if any(allowed):
        state["coverage"] = {"asked": 1 - max(allowed)}
        if late:
            state["coverage"]["realised"] = 1 - missed / late
    return state


def number(tree: Any, *path: str, default: float = 0) -> float:
    """Returns the number at the end of a path. ``default`` if there is none: another version may have written the
    snapshot.
    """
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, int | float) and not isinstance(tree, bool) else default


def only_counts(stats: StoreStats) -> StoreStats:
    """Returns the counts of a store, without the bytes of its blocks. These still matter after the store is closed."""
    return StoreStats(
        failed_writes=stats.failed_writes,
        merges=stats.merges,
        merged_bytes=stats.merged_bytes,
        failed_merges=stats.failed_merges,
        value_hits=stats.value_hits,
        value_misses=stats.value_misses,
        staging=stats.staging,
    )


def _add_growth(total: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Adds to each number of ``total`` how much it grew from ``before`` to ``after``."""
    for name, value in after.items():
        if isinstance(value, Mapping):
            inner, earlier = total.setdefault(name, {}), before.get(name)
            if isinstance(inner, dict):
                _add_growth(inner, earlier if isinstance(earlier, Mapping) else {}, value)
        elif not isinstance(total.get(name), dict):
            total[name] = total.get(name, 0) + max(0, value - number(before, name))


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
