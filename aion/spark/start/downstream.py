"""What Spark does with panes behind windows, by the plan of the query.

A later pane of a window replaces an earlier one. So what lets only one of the two through, or counts both, gives
results that stay wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from aion.config import policy_from_text
from aion.core.query.pane_columns import END, KIND, MEANING, NAME, SEQ, START, is_key
from aion.core.query.plan import ALL, Plan
from aion.core.windows import Aligned
from aion.errors import ConfigError
from aion.execute.assembly import longest_bound_us
from aion.spark.session import upstream
from aion.spark.session.plans import ROOT, Node
from aion.spark.session.query_settings import CHAINED
from aion.spark.tasks.join_child import JoinConfig
from aion.spark.tasks.root_config import RootConfig

_COUNTING = {
    "Aggregate": "groupBy",
    "Distinct": "distinct",
    "Deduplicate": "dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "Sample": "sample",
}
_SAME = (START, END, NAME, KIND, SEQ)
"""Parts that say which pane it is. Those but ``KIND`` and ``SEQ`` are the same for all panes of a window."""

_VALUES = ("pane", "events", "late_events", "closes_at", "completeness", "completeness_low")
"""Columns of each result that differ between the panes of a window."""


def check(plan: Node, config_of: Callable[[tuple[str, int]], Any]) -> None:
    """Raises ConfigError if panes that replace each other come through an operator that does not let all through.

    ``config_of``: the configuration of the operator that a root of the plan is; None if it is none of Aion.
    """
    for root, between in _paths(plan, []):
        config = None if root.function is None else config_of(root.function)
        if isinstance(config, RootConfig) and takes_back(config.plan, config.policy):
            for node in between:
                if (what := _loses(node, between, config.plan)) is not None:
                    raise ConfigError(_refused(what, config.name))
        if isinstance(config, JoinConfig) and config.plan.takes_back:
            for node in between:
                if (what := _counts(node)) is not None:
                    raise ConfigError(_refused_join(what, config.name))


def settings(plan: Node) -> dict[str, str]:
    """Returns the settings that a query needs because of what is behind its windows."""
    roots = [node for node in plan if node.name == ROOT]
    return {CHAINED: "true"} if any(below in roots for root in roots for way in root.below for below in way) else {}


def takes_back(plan: Plan, policy: str) -> bool:
    """Returns whether a window may have several panes. ``policy``: as text."""
    if plan.emit != ALL:
        return False
    windows = plan.windows.values()
    once = all(isinstance(window, Aligned) and window.timing.early_us is None for window in windows)
    known = policy_from_text(policy)
    return not once or known.trigger.early_us is not None or longest_bound_us(plan, known) > 0


def _refused(what: str, name: str) -> str:
    return (
        f"this query has {what} behind the windows {name!r}. A later pane of a window replaces an earlier one, and "
        f"{what} does not take back what the earlier one has led to. Give aion.windowed emit='final', so that each "
        "window has one pane; or emit='changes', so that each row has the values before in old_ columns; or write all "
        "panes with aion.sinks.upsert, which takes where='...' for the rows that a table is to have, and count in the "
        "table (docs/reference/output.md)"
    )


def _refused_join(what: str, name: str) -> str:
    return (
        f"this query has {what} behind the join {name!r}. A late row takes back that another had no partner, and "
        f"{what} does not take back what that has led to. Give aion.join emit='final' or how='inner'; or give the "
        "result to aion.windowed; or write it with aion.sinks.upsert, and count in the table (docs/how-to/joins.md)"
    )


def _paths(node: Node, between: Sequence[Node]) -> Iterator[tuple[Node, Sequence[Node]]]:
    """Yields each root of windows, with the operators behind it, as far as the next root."""
    if node.name == ROOT:
        yield node, between
        between = []
    else:
        between = [*between, node]
    for before in node.below:
        yield from _paths(before, between)


def _loses(node: Node, between: Sequence[Node], plan: Plan) -> str | None:
    """Returns what an operator is called that does not let all panes of a window through, or None if it does."""
    if node.name == "Filter" and not upstream.keeps_each_row(node):
        if node.jvm is None:
            return "where" if {*plan.outputs.names, *_VALUES} & {*node.columns} else None
        return None if _is_of_windows(node.jvm.condition(), _made(between)) else "where"
    return _counts(node)


def _counts(node: Node) -> str | None:
    """Returns what an operator is called that puts several rows together, or None for another operator."""
    if node.name == "Join" and all(side.streaming for side in node.below):
        return "a join of two streams"
    return _COUNTING.get(node.name) if node.streaming else None


def _made(between: Sequence[Node]) -> dict[int, Any]:
    """Returns the expressions of all columns that a select has made, by the numbers of the columns."""
    selects = [node.jvm.projectList() for node in between if node.name == "Project" and node.jvm is not None]
    columns = [column for select in selects for column in _items(select)]
    return {column.exprId().id(): column.child() for column in columns if column.getClass().getSimpleName() == "Alias"}


def _is_of_windows(expression: Any, made: Mapping[int, Any]) -> bool:
    """Returns whether the value of an expression is the same for all panes of a window, or of one kind of panes."""
    for column in _items(expression.references().toSeq()):
        metadata = json.loads(column.metadata().json())
        if MEANING in metadata:
            part = json.loads(metadata[MEANING])[0]
            is_same = part in _SAME or is_key(part)
        else:
            is_same = (number := column.exprId().id()) in made and _is_of_windows(made[number], made)
        if not is_same:
            return False
    return True


def _items(found: Any) -> list[Any]:
    return [found.apply(number) for number in range(found.size())]
