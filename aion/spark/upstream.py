"""What Spark does with rows before they reach an operator of Aion, by Spark's plan of the query.

An operator with state drops a row that comes later than the watermark, without a word, if the watermark is set before
it. So late events would be gone before Aion sees them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from pyspark.sql import DataFrame

from aion.errors import WatermarkError
from aion.spark.counting import COUNTED
from aion.spark.sessions import analyzed

_LINE = re.compile(r"^((?:[:| ]  )*(?:[+:]- )?)(~?)(.*)$")
_EVENT_TIME = re.compile(r", EventTime(?:Timeout)?\b")
_WINDOWED = re.compile(r"MapInArrow (?:Child|FileChild)\(")
_WATERMARK = "EventTimeWatermark "


class _Node(NamedTuple):
    """An operator of a plan. ``streaming``: whether its rows come from a stream. ``below``: what is before it."""

    depth: int
    text: str
    streaming: bool
    below: list[_Node]

    def has(self, what: str) -> bool:
        return any(node.text.startswith(what) or node.has(what) for node in self.below)


def has_windows(df: DataFrame) -> bool:
    """Returns whether rows of a DataFrame come from :func:`aion.windowed`."""
    return any(map(_is_root, _nodes(analyzed(df))))


def waits_for_itself(plan: str) -> bool:
    """Returns whether a plan of Spark has a watermark behind :func:`aion.windowed`.

    Spark uses the smallest watermark of a query. So the windows wait for the watermark behind them, which waits for
    their panes.
    """
    behind = (node for node in _nodes(plan) if node.text.startswith(_WATERMARK))
    return any(any(map(_is_root, _all_below(node))) for node in behind)


WAITS = (
    "this query has a second withWatermark behind aion.windowed. Spark uses the smallest watermark of a query, so the "
    "windows wait for a watermark that waits for their panes, and nothing would come out. Give the panes to another "
    "aion.windowed, without a watermark (docs/chaining.md); or write them to a table with "
    "aion.sinks.upsert and read them in another query; or use emit='final' and an aggregation without a watermark in "
    "update mode (docs/comparison.md)"
)


def lossy(df: DataFrame) -> list[str]:
    """Returns what drops late rows before they are in a DataFrame, as its users call it."""
    found = (_lossy(node) for node in _nodes(analyzed(df)) if node.streaming and node.has(_WATERMARK))
    return sorted({name for name in found if name is not None})


def check(caller: str, df: DataFrame) -> None:
    """Raises WatermarkError if something drops late rows before they are in a DataFrame."""
    found = lossy(df)
    if found:
        names = " and ".join(found)
        raise WatermarkError(
            f"{caller}: {names} comes first in this query, behind withWatermark, and there Spark drops each row that "
            "is later than the watermark, so late events would never reach Aion. If it needs no watermark, set the "
            "watermark behind it; or give lossy_upstream=True if these events may be lost (docs/upstream.md)"
        )


_DROPPED, _OWN = (re.compile(rf"Filter NOT \(kind#\d+ = {kind}\)") for kind in ("dropped", COUNTED))
_KEEPING = re.compile(r"(?:Project|SubqueryAlias|CollectMetrics)\b")


def before_windows(df: DataFrame) -> list[str] | None:
    """Returns the operators between a DataFrame and the windows whose panes it has. None: other rows come in there."""
    between: list[str] = []
    for node in (all_ := _nodes(analyzed(df))):
        if _is_root(node):
            return between
        if len(node.below) != 1:
            return None
        between.append(node.text)
    raise AssertionError(f"there are no windows in {all_}")


def operators(df: DataFrame) -> list[str]:
    """Returns the operators of the plan of a DataFrame, each as a line of text, the last one first."""
    return [node.text for node in _nodes(analyzed(df))]


def leaves_out_dropped(operator: str) -> bool:
    """Returns whether an operator of a plan leaves out the dropped rows of a result, as :func:`aion.panes` does."""
    return _DROPPED.match(operator) is not None


def keeps_each_row(operator: str) -> bool:
    """Returns whether each pane comes through an operator of a plan, in its order."""
    return any(known.match(operator) for known in (_DROPPED, _OWN, _KEEPING))


def _nodes(plan: str) -> list[_Node]:
    """Returns all operators of a plan as Spark prints it, the last one first."""
    nodes: list[_Node] = []
    above: list[_Node] = []
    for line in plan.splitlines():
        found = _LINE.match(line)
        assert found is not None, "the expression matches any line"
        indent, streaming, text = found.groups()
        depth = len(indent) // 3
        if not text or (nodes and not indent):
            continue  # a line of an operator that has a text with line breaks in it
        node = _Node(depth, text, bool(streaming), [])
        del above[depth:]
        if above:
            above[-1].below.append(node)
        above.append(node)
        nodes.append(node)
    return nodes


def _lossy(node: _Node) -> str | None:
    """Returns what an operator is called that drops late rows. None: it does not."""
    name = node.text.partition(" ")[0]
    match name:
        case "Deduplicate":
            return "dropDuplicates"
        case "DeduplicateWithinWatermark":
            return "dropDuplicatesWithinWatermark"
        case "Aggregate":
            return "an aggregation"
        case "Join":
            return "a join of two streams" if all(side.streaming for side in node.below) else None
        case "TransformWithStateInPySpark" | "TransformWithState":
            # The root of windows takes late rows: its child hides the event time from Spark.
            return "transformWithState" if not _is_root(node) and _EVENT_TIME.search(node.text) else None
        case "FlatMapGroupsInPandasWithState" | "FlatMapGroupsWithState":
            return "applyInPandasWithState" if _EVENT_TIME.search(node.text) else None
    return None


def _is_root(node: _Node) -> bool:
    """Whether it is the root of windows: behind their child, perhaps with the watermark and merging in between."""
    is_root = node.text.startswith("TransformWithStateInPySpark ")
    return is_root and any(_WINDOWED.match(below.text) for below in _nearest(node))


def _all_below(node: _Node) -> Iterator[_Node]:
    for below in node.below:
        yield below
        yield from _all_below(below)


def _nearest(node: _Node) -> list[_Node]:
    """The operators before a root of windows, as far as there is only one way."""
    found: list[_Node] = []
    at = node
    while at.below:
        at = at.below[0]
        found.append(at)
        if len(at.below) > 1:
            break
    return found
