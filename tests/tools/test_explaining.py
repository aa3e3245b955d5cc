"""What `aion.explain` tells: each fact of a plan in its text. On Spark: tests/spark/windows/test_merging_levels.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.config import load_policy
from aion.core.query.plan import make_plan
from aion.core.topology import Tree, levels_for, merging_strategies
from aion.core.windows import Count, PerRecord, Session
from aion.spark.api.explain import explain_plan

SCHEMA = pa.schema(
    [("segment", pa.int32()), ("ts", pa.timestamp("us", "UTC")), ("speed", pa.float64()), ("lane", pa.int32())]
)


def told(
    *,
    windows: Any = None,
    levels: int = 0,
    keys_disjoint: bool = False,
    children: int = 16,
    root_tasks: int = 2,
    policy: Any = "standard",
    key: Any = "segment",
    schema: pa.Schema = SCHEMA,
    **what: Any,
) -> str:
    """The text, in one line for each paragraph of it."""
    windows = windows or [aion.Tumbling("1 minute"), aion.Sliding("5 minutes", "1 minute")]
    what = {"aggregates": None, "apply": None, "outputs": None} | what
    plan = make_plan(schema, key=key, time="ts", windows=windows, **what)
    decisions = merging_strategies(plan.windows, keys_disjoint=keys_disjoint, splittable=plan.layout is not None)
    tree = Tree(
        levels=levels_for(levels, list(decisions.values())),
        fan_in=4,
        children=children,
        shards=tuple(range(root_tasks)),
        root_tasks=root_tasks,
    )
    text = explain_plan(plan, load_policy(policy), tree, decisions, asked_levels=levels)
    assert max(map(len, text.splitlines())) <= 120
    return " ".join(text.split())


MEAN = {"cars": A.count(), "speed": A.mean("speed")}


def test_which_strategy_each_window_gets_and_why() -> None:
    assert "tumbling 1 minute: merged as context-free; its bounds do not depend on events" in told(aggregates=MEAN)
    assert "sliding 5 minutes by 1 minute: merged as unique" in told(aggregates=MEAN, keys_disjoint=True)
    named = told(aggregates=MEAN, windows={"mine": aion.Tumbling("1 minute")})
    assert "mine (tumbling 1 minute): merged as context-free" in named


def test_what_cannot_be_split_is_said_to_be_central() -> None:
    text = told(apply=lambda key, window, events: {}, outputs="jam double")
    assert text.count("computed centrally, at the root") == 2
    assert "apply returns jam" in text
    assert "events the columns segment, ts, speed, lane of every event, once each, for the function." in text
    assert "partials one row for each key" not in text


@pytest.mark.parametrize(
    ("windows", "edges", "most"),
    [
        ([aion.Tumbling("1 minute"), aion.Sliding("5 minutes", "1 minute")], "every 1 minute", 6),
        ([aion.Sliding("25 seconds", "10 seconds")], "every 10 seconds and every 10 seconds from 5 seconds on", 3),
        ([aion.Cumulative("10 minutes", "1 hour"), aion.Tumbling("1 hour")], "every 10 minutes", 7),
        ([aion.Tumbling("1 hour", offset="1 minute")], "every 1 hour from 1 minute on", 1),
    ],
)
def test_the_edges_that_windows_share(windows: Any, edges: str, most: int) -> None:
    text = told(aggregates=MEAN, windows=windows)
    assert f"Slices end {edges}. An event is in one slice" in text
    shared = max(sum(len([*window.covering(t * 1_000_000)]) for window in windows) for t in range(0, 3600, 5))
    assert shared == most
    assert (f"for all windows that contain it (up to {most})" in text) is (most > 1)


def test_what_is_kept_of_which_aggregate() -> None:
    text = told(
        aggregates={**MEAN, "middle": A.median("speed"), "lanes": A.count_distinct("lane")},
    )
    assert "speed = mean(speed): decomposable" in text
    assert "middle = median(speed): holistic: keeps the values of speed" in text
    assert "lanes = count_distinct(lane): holistic: keeps the distinct values of lane" in text
    assert "partials one row for each key and slice: the key segment and 4 columns of partials of speed." in text
    assert (
        "values the values of speed and the distinct values of lane, without their times, once for each slice." in text
    )


def test_decomposable_aggregates_send_no_values() -> None:
    text = told(aggregates=MEAN)
    assert "values" not in text
    assert "events the columns" not in text


def test_levels_and_the_way_through_them() -> None:
    text = told(aggregates=MEAN, levels=2)
    assert (
        "level 1 4 nodes in 4 tasks, each of up to 4 of 16 source partitions: blocks of a slice are combined." in text
    )
    assert "level 2 1 node in 2 tasks, each of up to 4 nodes of level 1" in text
    assert "root 2 shards in 2 tasks" in text
    assert "child -> level 1 -> level 2 -> root: 3 shuffles" in text
    assert "child -> root: 1 shuffle; it is by shard, because Spark's state requires it." in told(aggregates=MEAN)


def test_a_last_level_of_one_task_needs_no_shuffle_to_the_root() -> None:
    text = told(aggregates=MEAN, levels=2, root_tasks=1)
    assert "child -> level 1 -> level 2 -> root: 2 shuffles; the last level and the root are one task" in text


def test_levels_that_would_merge_nothing_are_left_out() -> None:
    text = told(aggregates=MEAN, levels=2, keys_disjoint=True)
    assert "levels 2 in the policy, none used: no two partitions have parts of the same window." in text
    assert "child -> root: 1 shuffle" in text


def test_the_store_and_the_policy_in_a_line() -> None:
    policy = {"state": {"backend": "rocksdb", "codec": "json"}, "trigger": {"kind": "count", "count": 7}}
    text = told(aggregates=MEAN, policy=policy)
    assert "store rocksdb, json blocks" in text
    assert "run again after every 7 late events" in text
    assert "kept for 10 minutes after their end" in text


def test_without_key() -> None:
    text = told(aggregates=MEAN, key=None)
    assert "Windows over ts, without key" in text
    assert "for each slice" in text


def test_sessions_and_counts_are_told_as_well() -> None:
    windows = {"activity": Session("30 seconds"), "visits": Session("5 seconds"), "hundreds": Count(100)}
    plan = make_plan(
        SCHEMA, key=None, time="ts", windows=aion.Tumbling("1 minute"), aggregates=MEAN, apply=None, outputs=None
    )
    tree = Tree(levels=0, fan_in=2, children=1, shards=(0,), root_tasks=1)
    text = explain_plan(
        replace(plan, windows=windows), load_policy("standard"), tree, merging_strategies(windows), asked_levels=0
    )
    text = " ".join(text.split())
    assert "activity (session 30 seconds): merged as context-aware; events decide its bounds" in text
    assert "hundreds (count 100): computed centrally, at the root; its bounds depend on the number" in text
    assert "For sessions, a slice has one row per key for each 5 seconds, which is the smallest gap." in text
    assert "events the columns ts, speed of every event, once each, for hundreds." in text


def test_what_decides_where_sessions_end_and_when_windows_come_out() -> None:
    windows = {
        "visit": Session("30 minutes", max_duration="8 hours"),
        "lease": Session(gap_column="timeout"),
        "recent": PerRecord("5 minutes", on_arrival="emit"),
        "plain": PerRecord("5 minutes"),
    }
    schema = SCHEMA.append(pa.field("timeout", pa.duration("us")))
    text = told(windows=windows, aggregates=MEAN, schema=schema)
    assert "visit (session 30 minutes up to 8 hours): computed centrally, at the root; where it is cut depends" in text
    assert "No session is longer than 8 hours." in text
    assert "lease (session by timeout): computed centrally, at the root; every event brings its own gap" in text
    assert "An event is dropped if its timeout is null, zero or negative." in text
    assert text.count("Its panes come in the batch in which an event of theirs arrives.") == 1
    assert "For sessions, a slice has one row" not in text
    assert "events the columns segment, ts, speed, timeout of every event, once each, for visit, lease, recent" in text


@pytest.mark.parametrize(
    ("policy", "aggregates", "words"),
    [
        (
            "standard",
            MEAN,
            "eager if that reads fewer rows: runs of slices are combined first, once for many windows, and each window "
            "from a few runs. Otherwise lazy: each window",
        ),
        (
            {"execution": {"aggregation": "eager"}},
            MEAN,
            "overlap eager, as the policy says: runs of slices are combined first",
        ),
        (
            {"execution": {"aggregation": "lazy"}},
            MEAN,
            "overlap lazy, as the policy says: each window is combined from all its slices.",
        ),
        (
            {"execution": {"aggregation": "eager"}},
            {**MEAN, "sd": A.stddev("speed"), "middle": A.median("speed")},
            "each window from a few runs. Lazy for sd, middle, whose results may depend on how slices are grouped.",
        ),
        (
            {"execution": {"aggregation": "eager"}},
            {"sd": A.stddev("speed"), "middle": A.median("speed")},
            "overlap lazy, because the result of sd, middle may depend on how slices are grouped: each window is",
        ),
    ],
)
def test_how_overlapping_windows_are_combined(policy: Any, aggregates: Any, words: str) -> None:
    assert words in told(aggregates=aggregates, policy=policy)
    assert "overlap" not in told(aggregates=aggregates, policy=policy, windows=aion.Tumbling("1 minute"))
