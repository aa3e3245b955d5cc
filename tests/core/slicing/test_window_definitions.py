"""Session, count, per-record and punctuated windows as definitions; the periodic ones are in ``test_windows``."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.core.slicing.edges import assign
from aion.core.windows import Count, Definition, PerRecord, Punctuated, Session
from aion.errors import WindowError
from tests.durations import us


def is_marker(batch: Any) -> Any:
    return batch["marker"]


SOME: list[Definition] = [
    Session("30 minutes"),
    Count(100),
    Count(100, 10),
    PerRecord(timedelta(minutes=5)),
    Punctuated("marker"),
    Punctuated(is_marker),
    Session("30 minutes", max_duration="8 hours"),
    Session(gap_column="timeout"),
    Session(gap_column="timeout", max_duration="8 hours"),
]


@pytest.mark.parametrize("window", SOME, ids=str)
def test_definitions_travel_to_workers(window: Definition) -> None:
    assert pickle.loads(pickle.dumps(window)) == window
    assert copy.deepcopy(window) == window
    assert hash(copy.copy(window)) == hash(window)


def test_definitions_are_told_apart_by_their_words_and_specs() -> None:
    assert [str(window) for window in SOME] == [
        "session 30 minutes",
        "count 100",
        "count 100 by 10",
        "per record 5 minutes",
        "punctuated by marker",
        "punctuated by is_marker",
        "session 30 minutes up to 8 hours",
        "session by timeout",
        "session by timeout up to 8 hours",
    ]
    specs = [tuple(sorted(window.spec().items())) for window in SOME]
    assert len(set(specs)) == len(SOME)
    assert Session(us(1_800_000_000)).spec() == SOME[0].spec()
    assert Count(100, 100) == Count(100) != Count(100, 10)


def test_when_windows_come_out_is_no_part_of_what_is_stored() -> None:
    assert PerRecord("5 s", on_arrival="emit").spec() == PerRecord("5 s").spec()
    assert PerRecord("5 s", on_arrival="emit") != PerRecord("5 s")


def test_a_session_ends_the_gap_after_its_last_event() -> None:
    assert Session("5 s").end(-7_000_000) == -2_000_000


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: Session(0), "0"),
        (lambda: Session("-1 s"), "'-1 s'"),
        (lambda: Session("1 month"), "month"),
        (
            lambda: Session("timeout"),
            "'timeout' is not a duration; write e.g. '20 seconds' or '5m'; for a gap in a column",
        ),
        (lambda: Session(), "gap=None and gap_column=None"),
        (lambda: Session("5 s", gap_column="timeout"), "gap='5 s' and gap_column='timeout'"),
        (lambda: Session(gap_column=""), "''"),
        (lambda: Session(gap_column=5), "5"),  # type: ignore[arg-type]
        (lambda: Session("5 s", max_duration=0), "max_duration of 0"),
        (lambda: Session("5 s", max_duration="later"), "'later'"),
        (
            lambda: Session("5 s", max_duration="5 s"),
            "max_duration of 5 seconds is not longer than the gap of 5 seconds",
        ),
        (lambda: PerRecord("5 s", on_arrival="now"), "'now'"),  # type: ignore[arg-type]
        (lambda: Count(0), "0"),
        (lambda: Count(-3), "-3"),
        (lambda: Count(2**63), str(2**63)),
        (lambda: Count(True), "True"),
        (lambda: Count(2.0), "2.0"),  # type: ignore[arg-type]
        (lambda: Count(3, 0), "0"),
        (lambda: Count(3, 4), "slide of 4"),
        (lambda: PerRecord(0), "0"),
        (lambda: PerRecord("soon"), "'soon'"),
        (lambda: Punctuated(""), "''"),
        (lambda: Punctuated(None), "None"),  # type: ignore[arg-type]
    ],
)
def test_a_window_that_cannot_be_is_refused_and_shown(make: Any, shown: str) -> None:
    with pytest.raises(WindowError) as caught:
        make()
    assert shown in str(caught.value)


def test_punctuations_are_edges_to_which_events_are_assigned() -> None:
    """Each window begins at a punctuation; what comes before the first one has a window of its own."""
    punctuations = np.array([-5, 10, 11])
    assert assign(np.array([-6, -5, 9, 10, 11, 500]), punctuations).tolist() == [-1, 0, 0, 1, 2, 2]


@pytest.mark.parametrize("before", [63, 64])
def test_a_punctuated_has_its_windows_wherever_it_may_stand(before: int) -> None:
    windows: dict[str, Definition] = {f"t{i}": aion.Tumbling(f"{i + 1} seconds") for i in range(before)}
    windows["p"] = Punctuated("marker")
    policy = {"lateness": {"coverage": None, "initial_bound": "1 hour"}}
    with aion.LocalOperator(
        key="k", time="ts", windows=windows, aggregates={"n": aion.aggregates.count()}, policy=policy
    ) as operator:
        events = pa.table(
            {
                "k": ["a"] * 5,
                "ts": pa.array(range(1, 6), pa.int64()).cast(pa.timestamp("s")).cast(pa.timestamp("us", "UTC")),
                "marker": [True, False, True, False, True],
            }
        )
        if before >= 64:
            with pytest.raises(WindowError, match="'p' is definition 65, and a Punctuated must be among the first 64"):
                operator.process(events)
            return
        operator.process(events)
        panes = operator.advance(10_000_000).to_pylist()
    assert [pane["n"] for pane in panes if pane["window"] == "p"] == [2, 2]


def test_a_slide_that_is_far_too_short_is_refused_by_the_name_of_its_limit() -> None:
    """It used to be a MemoryError, after a while."""
    fine = {"time": "ts", "aggregates": {"n": A.count()}}
    with pytest.raises(WindowError, match=r"in 86,400,000 windows, and execution\.windows_per_event allows 1,000,000"):
        aion.LocalOperator(windows=aion.Sliding("1 day", "1 ms"), **fine)
    three = {"execution": {"windows_per_event": 3}}
    for policy in (three, {"execution": {"windows_per_event": None}}):
        aion.LocalOperator(windows=[aion.Sliding("3 s", "1 s"), aion.Count(9, 1)], policy=policy, **fine).close()
    with pytest.raises(WindowError, match="'sliding 3001 milliseconds by 1 second': each event would be in 4 windows"):
        aion.LocalOperator(windows=aion.Sliding("3001 ms", "1 s"), policy=three, **fine)
