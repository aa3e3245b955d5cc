"""A batch that needs more pages of windows of keys than are in memory at once: it is the same, some pages at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion.base.numbers import NEVER
from aion.core.keyed import page_store
from aion.core.keyed.page_store import PageStore
from aion.core.keyed.table import Table
from tests.core.keyed.test_keyed_index import DEFINITIONS, Shard, told
from tests.durations import us

EVERYTHING = 1 << 30
keys = st.sampled_from(["a", "b", "c", "d", "e", "f", "g", None])
arrivals = st.lists(st.tuples(keys, st.integers(-30, 60), st.integers(0, 1)), max_size=8)
steps = st.lists(arrivals | st.integers(-20, 120), max_size=6)


@contextmanager
def sizes(*, rows: int, at_once: int) -> Iterator[None]:
    """Sets how many rows a page has, and how many pages are in memory at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_store, "ROWS", rows)
        patch.setattr(page_store, "_SPARSE", max(rows // 4, 1))
        patch.setattr(page_store, "PAGES_AT_ONCE", at_once)
        patch.setattr(page_store, "_SHRINKS", 1)
        yield


@contextmanager
def most_held() -> Iterator[list[int]]:
    """How many pages were in memory after each read."""
    found: list[int] = []
    read = PageStore.read

    def noted(self: PageStore, numbers: Any) -> tuple[Table, Table]:
        tables = read(self, numbers)
        found.append(self.held)
        return tables

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageStore, "read", noted)
        yield found


def state(shard: Shard) -> Any:
    """What a version has of the windows: the snapshot, and the rows of the pages in an order of their own.

    But for the first entries of the due index. Entries may be too early, and pages that are written more often have
    more such entries.
    """
    shard.windows.write()
    index, yielded = shard.windows.memory.kept.peek(np.arange(shard.windows.memory.kept.pages))
    snapshot = json.loads(json.dumps(shard.windows.snapshot()))
    del snapshot["kept"]["first"]
    return snapshot, *map(rows_of, (index, yielded))


def rows_of(table: Table) -> list[str]:
    columns = [*(key.to_pylist() for key in table.keys), *(table[name].tolist() for name in sorted(table.columns))]
    return sorted(map(repr, zip(*columns, strict=True)))


@pytest.mark.parametrize("definition", DEFINITIONS, ids=str)
@given(
    script=steps,
    bound_us=st.sampled_from([0, 10, 1000]),
    rows=st.sampled_from([1, 3]),
    at_once=st.sampled_from([1, 2, 5]),
    written=st.booleans(),
)
def test_some_pages_at_a_time_order_and_keep_the_same(
    definition: Any, script: list[Any], bound_us: int, rows: int, at_once: int, written: bool
) -> None:
    few, all_ = Shard(definition, bound_us), Shard(definition, bound_us)
    for step in script:
        with sizes(rows=rows, at_once=at_once):
            some = told(few.do(step))
            kept_now = state(few) if written else None
            few_due = few.windows.next_due_us(few.turn()._replace(step_us=1))
        with sizes(rows=rows, at_once=EVERYTHING):
            assert some == told(all_.do(step))
            assert kept_now == (state(all_) if written else None)
            due = all_.windows.next_due_us(all_.turn()._replace(step_us=1))
        assert (few_due < NEVER) == (due < NEVER) and few_due <= due


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("definition", DEFINITIONS, ids=str)
def test_a_batch_of_most_keys_holds_no_more_pages_than_are_taken_at_once(definition: Any) -> None:
    """When they come, when they come again, when some come too late, and when all end."""
    names = [f"k{i}" for i in range(400)]
    with sizes(rows=4, at_once=8), most_held() as held:
        shard = Shard(definition, 5)
        for at in (0, 3, 6):
            shard.do([(name, at, 1) for name in names])
            shard.windows.write()
        assert shard.windows.memory.kept.pages > 8 * 8
        shard.do(20)
        shard.do([(name, at, 0) for name in names for at in (10, 17, 22)])
        shard.windows.write()
        shard.do(1000)
        shard.windows.write()
    assert max(held) <= 8


def test_new_keys_make_their_pages_before_they_are_in_them() -> None:
    """Otherwise one page would have to take them all."""
    lengths = []
    with sizes(rows=4, at_once=8), most_held() as held:
        shard = Shard(aion.Session(us(5)), 0)
        put = shard.values.put

        def noted(changes: Sequence[Any]) -> None:
            lengths.extend(len(value or b"") for _, value, _ in changes)
            put(changes)

        shard.values.put = noted  # type: ignore[method-assign]
        shard.do([(f"k{i}", 0, 0) for i in range(2000)])
        shard.windows.write()
        assert shard.windows.memory.kept.pages == 2000 // 4
    assert max(held) <= 8
    assert max(lengths) < 60 * np.mean(lengths) / 2, "no page was ever much longer than the others"


def test_rows_of_a_batch_are_judged_alone_whatever_is_in_memory() -> None:
    """Whether an event of an old session is too late is looked up in pages that do not stay."""
    with sizes(rows=1, at_once=2), most_held() as held:
        shard = Shard(aion.Session(us(5)), 0)
        shard.do([(f"k{i}", at, 0) for i in range(50) for at in range(0, 100, 4)])
        shard.do(95)
        shard.windows.write()
        rows = shard._rows([*((f"k{i}", 50, 0) for i in range(50)), *((f"new{i}", 50, 0) for i in range(50))])
        held.clear()
        accepted = shard.windows.arriving.accepted(rows)
        assert accepted.tolist() == [True] * 50 + [False] * 50
        assert not held and not shard.windows.memory.kept.held
        owners = shard.windows.arriving.owners(Table(rows.keys, {"first": rows["first"]}))
        assert (owners[:50] >= 0).all() and (owners[50:] == -1).all()
        assert not held and not shard.windows.memory.kept.held
