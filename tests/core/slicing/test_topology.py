"""Which strategy a window gets, and what a tree of merging levels looks like (Disco section 3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion.core.topology import Strategy, Tree, levels_for, merging_strategies, merging_strategy
from aion.core.windows import Count, Definition, PerRecord, Punctuated, Session
from aion.errors import ConfigError

FIXED = [aion.Tumbling("1s"), aion.Sliding("3s", "2s"), aion.Cumulative("1s", "3s")]
ORDERED: list[Definition] = [Count(5), Count(5, 2), PerRecord("1s"), Punctuated("flag")]


def test_windows_of_known_bounds_are_merged_by_their_bounds() -> None:
    assert {merging_strategy(w).strategy for w in FIXED} == {Strategy.CONTEXT_FREE}


def test_sessions_are_merged_by_overlap() -> None:
    decision = merging_strategy(Session("5s"))
    assert decision.strategy is Strategy.CONTEXT_AWARE
    assert "at most the gap apart" in decision.why


@pytest.mark.parametrize("window", ORDERED, ids=str)
@pytest.mark.parametrize("keys_disjoint", [False, True])
def test_windows_that_need_all_events_are_central_even_of_disjoint_keys(
    window: Definition, keys_disjoint: bool
) -> None:
    assert merging_strategy(window, keys_disjoint=keys_disjoint).strategy is Strategy.CENTRAL


def test_windows_of_disjoint_keys_are_unique() -> None:
    for window in (*FIXED, Session("5s")):
        assert merging_strategy(window, keys_disjoint=True).strategy is Strategy.UNIQUE


def test_a_function_that_cannot_be_split_makes_every_window_central() -> None:
    for window in (*FIXED, Session("5s"), *ORDERED):
        assert merging_strategy(window, keys_disjoint=True, splittable=False).strategy is Strategy.CENTRAL


def test_levels_are_left_out_only_where_every_window_is_unique() -> None:
    windows: dict[str, Definition] = {"fixed": FIXED[0], "counted": Count(3)}
    assert levels_for(3, list(merging_strategies(windows, keys_disjoint=True).values())) == 3
    assert levels_for(3, list(merging_strategies({"fixed": FIXED[0]}, keys_disjoint=True).values())) == 0
    assert levels_for(3, list(merging_strategies({"fixed": FIXED[0]}).values())) == 3


TREES = st.builds(
    Tree,
    levels=st.integers(0, 5),
    fan_in=st.integers(2, 5),
    children=st.integers(1, 40),
    shards=st.lists(st.integers(0, 1000), min_size=1, max_size=12, unique=True).map(tuple),
    root_tasks=st.integers(1, 12),
)


@given(TREES)
def test_every_block_of_a_subtree_meets_at_one_task(tree: Tree) -> None:
    """From each node and shard there is one way up, and no node has more than fan_in children."""
    for level in range(tree.levels):
        tasks = range(tree.children if level == 0 else tree.tasks(level))
        below: dict[int, set[int]] = {}
        meets: dict[tuple[int, int], set[int]] = {}
        for task in tasks:
            parents = tree.parents(level, task)
            assert list(parents) == list(tree.shards)
            for shard, parent in parents.items():
                assert 0 <= parent < tree.tasks(level + 1)
                node = tree.node(level, task)
                below.setdefault(tree.node(level + 1, parent), set()).add(node)
                meets.setdefault((node, shard), set()).add(parent)
        assert all(len(nodes) <= tree.fan_in for nodes in below.values())
        assert all(len(parents) == 1 for parents in meets.values())
        assert set(below) == set(range(tree.nodes(level + 1)))


@given(TREES)
def test_no_level_has_fewer_tasks_than_it_can_use(tree: Tree) -> None:
    for level in range(1, tree.levels + 1):
        assert tree.tasks(level) >= tree.nodes(level)
        assert tree.tasks(level) >= min(tree.root_tasks, len(tree.shards))


def test_source_partitions_beyond_the_layout_share_its_nodes() -> None:
    tree = Tree(levels=1, fan_in=2, children=4, shards=(0, 1), root_tasks=2)
    assert tree.parents(0, 4) == tree.parents(0, 0)
    assert tree.parents(0, 3) == {0: 1, 1: 1}


def test_a_tree_narrows_to_one_node() -> None:
    tree = Tree(levels=5, fan_in=2, children=16, shards=(7,), root_tasks=1)
    assert [tree.nodes(level) for level in range(6)] == [16, 8, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"levels": -1}, "merge_levels: -1"), ({"fan_in": 1}, "fan_in: 1"), ({"children": 0}, "at least one child")],
)
def test_what_makes_no_tree_is_refused(wrong: dict[str, int], says: str) -> None:
    good = {"levels": 1, "fan_in": 2, "children": 4, "shards": (0,), "root_tasks": 1}
    with pytest.raises(ConfigError, match=says):
        Tree(**(good | wrong))  # type: ignore[arg-type]
