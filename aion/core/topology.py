"""How windows are distributed: Disco's merging strategies and its tree of merging nodes (Disco section 3). Pure.

A window's definition decides its strategy. The aggregates decide what crosses the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from aion.core.periodic import Periodic
from aion.core.windows import Calendar, Count, Definition, PerRecord, Punctuated, Session
from aion.errors import ConfigError


class Strategy(StrEnum):
    """How the parts of a window from different source partitions become one window (Disco section 3.2)."""

    UNIQUE = "unique"
    CONTEXT_FREE = "context-free"
    CONTEXT_AWARE = "context-aware"
    CENTRAL = "central"


class MergingDecision(NamedTuple):
    """A window's strategy, and the reason for it."""

    strategy: Strategy
    why: str


def merging_strategy(window: Definition, *, keys_disjoint: bool = False, splittable: bool = True) -> MergingDecision:
    """Returns the strategy for one window.

    ``keys_disjoint``: all events of a key are in one source partition. ``splittable``: the result can be combined of
    partials. A user's function of all events of a window cannot.
    """
    if not splittable:
        return MergingDecision(Strategy.CENTRAL, "a function of all events of a window cannot be split into parts")
    match window:
        case Count():
            return MergingDecision(
                Strategy.CENTRAL, "its bounds depend on the number of earlier events in all partitions"
            )
        case PerRecord():
            return MergingDecision(Strategy.CENTRAL, "every event has a window, which holds events of all partitions")
        case Punctuated():
            return MergingDecision(
                Strategy.CENTRAL, "a punctuation in one partition splits the windows of the events of all others"
            )
        case Session() if window.gap_column is not None:
            return MergingDecision(
                Strategy.CENTRAL, "every event brings its own gap, which may join events of all parts"
            )
        case Session() if window.max_duration_us is not None:
            return MergingDecision(Strategy.CENTRAL, "where it is cut depends on its earlier events in all partitions")
    if keys_disjoint:
        return MergingDecision(
            Strategy.UNIQUE, "all events of a key are in one partition, so there is nothing to merge"
        )
    match window:
        case Periodic() | Calendar():
            return MergingDecision(
                Strategy.CONTEXT_FREE, "its bounds do not depend on events, so all partitions have the same"
            )
        case Session():
            return MergingDecision(
                Strategy.CONTEXT_AWARE, "events decide its bounds: parts at most the gap apart are one session"
            )
    raise AssertionError(f"{window!r} is not a window definition")


def merging_strategies(
    windows: Mapping[str, Definition], *, keys_disjoint: bool = False, splittable: bool = True
) -> dict[str, MergingDecision]:
    """Returns the strategy of each window, by its name."""
    return {
        name: merging_strategy(window, keys_disjoint=keys_disjoint, splittable=splittable)
        for name, window in windows.items()
    }


@dataclass(frozen=True, slots=True)
class Tree:
    """Merging levels between child and root: level 1 is next to the children, level ``levels`` next to the root.

    The ``children`` source partitions are the leaves. ``fan_in`` nodes of a level share a parent on the next level, so
    level l has ``children / fan_in ** l`` nodes, rounded up. The root works on ``shards`` in ``root_tasks`` tasks. The
    work of a node is split by shard into enough tasks that no level has fewer tasks than the root. Source partitions
    beyond ``children`` share the nodes of the others. Raises ConfigError for numbers that do not make a tree.
    """

    levels: int
    fan_in: int
    children: int
    shards: tuple[int, ...]
    root_tasks: int

    def __post_init__(self) -> None:
        if self.levels < 0:
            raise ConfigError(f"merge_levels: {self.levels} is negative; 0 means none between child and root")
        if self.fan_in < 2:
            raise ConfigError(f"fan_in: {self.fan_in} merges nothing; give 2 or more")
        if self.children < 1 or self.root_tasks < 1 or not self.shards:
            raise ConfigError(f"{self}: a tree needs at least one child, one task at the root, and one shard")

    def nodes(self, level: int) -> int:
        """Returns how many nodes a level has. Level 0 is the children."""
        nodes = self.children
        for _ in range(level):
            nodes = -(-nodes // self.fan_in)
        return nodes

    def tasks_per_node(self, level: int) -> int:
        """Returns how many tasks the shards of one node of a level are spread over."""
        wanted = min(self.root_tasks, len(self.shards))
        return -(-wanted // self.nodes(level))

    def tasks(self, level: int) -> int:
        """Returns how many tasks, and so Spark partitions, a level has."""
        return self.nodes(level) * self.tasks_per_node(level)

    def node(self, level: int, task: int) -> int:
        """Returns the node that a task of a level belongs to. A child is its own node."""
        return task % self.children if level == 0 else task // self.tasks_per_node(level)

    def parents(self, level: int, task: int, shards: Sequence[int] | None = None) -> dict[int, int]:
        """Returns, for each shard, the task of the next level to which a task of ``level`` sends the shard's blocks.

        ``shards``: if there are others than those with which the levels were planned.
        """
        above = level + 1
        per_node = self.tasks_per_node(above)
        parent = self.node(level, task) // self.fan_in
        return {shard: parent * per_node + i % per_node for i, shard in enumerate(shards or self.shards)}


def levels_for(asked: int, decisions: Sequence[MergingDecision]) -> int:
    """Returns the number of levels to use: ``asked``, but none if every window is unique, since then nothing is
    merged.
    """
    return 0 if all(d.strategy is Strategy.UNIQUE for d in decisions) else asked
