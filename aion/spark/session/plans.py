"""Spark's plan of a query, as a tree of nodes.

In a session of this process, the nodes are the JVM's own. Spark Connect has no way to them, so there they are read from
the plan as the server prints it, whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame

from aion.spark.session.sessions import analyzed_text, is_remote

_LINE = re.compile(r"^((?:[:| ]  )*(?:[+:]- )?)(~?)(\w*)(.*)$")
_EVENT_TIME = re.compile(r", EventTime(?:Timeout)?\b")
_FUNCTION = re.compile(r" (\w+)\(.*?\)#(\d+)")
_COLUMN = re.compile(r"(\w+)#\d+")
_WITHOUT = re.compile(r" NOT \((\w+)#\d+ = (.*)\)")
ROOT = "TransformWithStateInPySpark"
_CALLS, _FILTER, _SOURCE = "MapInArrow", "Filter", "StreamingRelationV2"
_TIMES = {
    ROOT: "timeMode", "TransformWithState": "timeMode",
    "FlatMapGroupsInPandasWithState": "timeout", "FlatMapGroupsWithState": "timeout",
}  # fmt: skip
"""Which method of an operator says what a processor with state knows of the time."""


@dataclass(frozen=True, eq=False)
class Node:
    """An operator of a plan. ``name``: its class in Spark. ``below``: the operators before it. ``streaming``: whether
    its rows come from a stream.

    ``function``: the name of the function of Python that it calls, and the number of this call, which no other has.
    ``by_event_time``: it is a processor with state that knows the event time. ``without``: a filter that only leaves
    out rows with a value in a column; both. ``source``: what a stream is read with. ``jvm``: the JVM's own node. None:
    there is no way to it; then ``columns`` are those of a filter's condition.
    """

    name: str
    below: tuple[Node, ...]
    streaming: bool
    function: tuple[str, int] | None = None
    by_event_time: bool = False
    without: tuple[str, str] | None = None
    source: str | None = None
    jvm: Any = field(default=None, repr=False)
    columns: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Node]:
        """Yields this operator and all before it, the last one first."""
        yield self
        for node in self.below:
            yield from node


def plan_of(df: DataFrame) -> Node:
    """Returns the analyzed plan of a DataFrame."""
    if is_remote(df.sparkSession):
        return _printed(analyzed_text(df))
    return node_of(df._jdf.queryExecution().analyzed())


def node_of(plan: Any, shared: Mapping[int, Any] | None = None) -> Node:
    """Returns a plan of the JVM. ``shared``: common table expressions that it refers to, by their numbers."""
    name = plan.getClass().getSimpleName()
    found = _children(plan)
    if name == "WithCTE":
        definitions = {each.id(): each for each in found if _is(each, "CTERelationDef")}
        (query,) = (each for each in found if not _is(each, "CTERelationDef"))
        return node_of(query, {**(shared or {}), **definitions})
    if name == "CTERelationRef" and shared:
        found = [shared[plan.cteId()]]
    return Node(
        name,
        tuple(node_of(each, shared) for each in found),
        plan.isStreaming(),
        _function(plan.functionExpr()) if name in (ROOT, _CALLS) else None,
        name in _TIMES and getattr(plan, _TIMES[name])().toString().startswith("EventTime"),
        _without(plan.condition()) if name == _FILTER else None,
        plan.sourceName() if name == _SOURCE else None,
        plan,
    )


def _children(node: Any) -> list[Any]:
    found = node.children()
    return [found.apply(number) for number in range(found.size())]


def _is(node: Any, name: str) -> bool:
    return bool(node.getClass().getSimpleName() == name)


def _function(call: Any) -> tuple[str, int]:
    return call.name(), call.resultId().id()


def _without(condition: Any) -> tuple[str, str] | None:
    if not _is(condition, "Not") or not _is(equal := condition.child(), "EqualTo"):
        return None
    column, value = equal.left(), equal.right()
    if not _is(column, "AttributeReference") or not _is(value, "Literal"):
        return None
    return column.name(), value.toString()


def _printed(plan: str) -> Node:
    """Returns a plan that Spark has printed."""
    lines: list[tuple[int, str, str, bool]] = []
    for line in plan.splitlines():
        found = _LINE.match(line)
        assert found is not None, "the expression matches any line"
        indent, streaming, name, rest = found.groups()
        if name and (indent or not lines):  # else a line of an operator that has a text with line breaks in it
            lines.append((len(indent) // 3, name, rest, bool(streaming)))
    return _node(lines, 0)


def _node(lines: list[tuple[int, str, str, bool]], at: int) -> Node:
    depth, name, rest, streaming = lines[at]
    below = []
    for number in range(at + 1, len(lines)):
        if lines[number][0] <= depth:
            break
        if lines[number][0] == depth + 1:
            below.append(_node(lines, number))
    function = _FUNCTION.match(rest) if name in (ROOT, _CALLS) else None
    without = _WITHOUT.match(rest) if name == _FILTER else None
    return Node(
        name,
        tuple(below),
        streaming,
        None if function is None else (function[1], int(function[2])),
        name in _TIMES and _EVENT_TIME.search(rest) is not None,
        None if without is None else (without[1], without[2]),
        columns=tuple(_COLUMN.findall(rest)) if name == _FILTER else (),
    )
