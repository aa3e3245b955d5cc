"""What Spark does with rows before they reach an operator of Aion, by Spark's plan of the query.

An operator with state drops a row that comes later than the watermark, without a word, if the watermark is set before
it. So late events would be gone before Aion sees them.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql import DataFrame

from aion.errors import WatermarkError
from aion.spark.session.counting import COUNTED
from aion.spark.session.plans import ROOT, Node, plan_of

_CHILDREN = ("Child", "FileChild", "JoinChild")
_WATERMARK = "EventTimeWatermark"


def has_windows(df: DataFrame) -> bool:
    """Returns whether rows of a DataFrame come from :func:`aion.windowed` or :func:`aion.join`."""
    return any(map(_is_root, plan_of(df)))


def waits_for_itself(plan: Node) -> bool:
    """Returns whether a plan of Spark has a watermark behind :func:`aion.windowed`.

    Spark uses the smallest watermark of a query. So the windows wait for the watermark behind them, which waits for
    their panes.
    """
    return any(_is_root(before) for node in plan if node.name == _WATERMARK for before in node)


WAITS = (
    "this query has a second withWatermark behind aion.windowed. Spark uses the smallest watermark of a query, so the "
    "windows wait for a watermark that waits for their panes, and nothing would come out. Give the panes to another "
    "aion.windowed, without a watermark (docs/how-to/chaining.md); or write them to a table with "
    "aion.sinks.upsert and read them in another query; or use emit='final' and an aggregation without a watermark in "
    "update mode (docs/start/comparison.md)"
)


def lossy(df: DataFrame) -> list[str]:
    """Returns what drops late rows before they are in a DataFrame, as its users call it."""
    found = (_lossy(node) for node in plan_of(df) if node.streaming and _has_watermark(node))
    return sorted({name for name in found if name is not None})


def _has_watermark(node: Node) -> bool:
    return any(before.name == _WATERMARK for before in node if before is not node)


def check(caller: str, df: DataFrame) -> None:
    """Raises WatermarkError if something drops late rows before they are in a DataFrame."""
    found = lossy(df)
    if found:
        names = " and ".join(found)
        raise WatermarkError(
            f"{caller}: {names} comes first in this query, behind withWatermark, and there Spark drops each row that "
            "is later than the watermark, so late events would never reach Aion. If it needs no watermark, set the "
            "watermark behind it; or give on_lossy_upstream='accept' if these events may be lost "
            "(docs/how-to/watermark.md#what-may-stand-before-aion)"
        )


_OWN = (("kind", "dropped"), ("kind", COUNTED))
_KEEPING = ("Project", "SubqueryAlias", "CollectMetrics")


def before_windows(df: DataFrame) -> list[Node] | None:
    """Returns the operators between a DataFrame and the windows whose panes it has, or None if other rows come in
    there.
    """
    between: list[Node] = []
    node = plan_of(df)
    while not _is_root(node):
        if len(node.below) != 1:
            return None
        between.append(node)
        (node,) = node.below
    return between


def leaves_out_dropped(node: Node) -> bool:
    """Returns whether an operator leaves out the dropped rows of a result, as :func:`aion.panes` does."""
    return node.without == _OWN[0]


def keeps_each_row(node: Node) -> bool:
    """Returns whether each pane comes through an operator, in its order."""
    return node.without in _OWN or node.name in _KEEPING


def _lossy(node: Node) -> str | None:
    """Returns what an operator is called that drops late rows, or None if it does not."""
    match node.name:
        case "Deduplicate":
            return "dropDuplicates"
        case "DeduplicateWithinWatermark":
            return "dropDuplicatesWithinWatermark"
        case "Aggregate":
            return "an aggregation"
        case "Distinct":
            return "distinct"
        case "Join":
            return "a join of two streams" if all(side.streaming for side in node.below) else None
        case "TransformWithStateInPySpark" | "TransformWithState":
            # The root of windows takes late rows: its child hides the event time from Spark.
            return "transformWithState" if node.by_event_time and not _is_root(node) else None
        case "FlatMapGroupsInPandasWithState" | "FlatMapGroupsWithState":
            return "applyInPandasWithState" if node.by_event_time else None
    return None


def _is_root(node: Node) -> bool:
    """Whether it is the root of windows or of a join: behind their child, perhaps with the watermark and merging in
    between. A join has two.
    """
    return node.name == ROOT and any(
        before.function is not None and before.function[0] in _CHILDREN for before in _nearest(node)
    )


def _nearest(node: Node) -> Iterator[Node]:
    """The operators before a root of windows, as far as there is only one way."""
    at = node
    while at.below:
        at = at.below[0]
        yield at
        if len(at.below) > 1:
            yield from at.below
            break
