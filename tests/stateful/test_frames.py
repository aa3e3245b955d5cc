"""Frames that a processor yields: they are joined, and are as they were when they were yielded."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pandas as pd
import pytest

from aion.spark.tasks.processor_task import joined


def rows(frames: Iterator[pd.DataFrame]) -> list[Any]:
    """All rows. A frame's values are taken as pyspark takes them: before the next frame is asked for."""
    return [row for frame in joined(frames) for row in repr(frame.to_dict("records")).strip("[]").split("}, ")]


def as_yielded(frames: Iterator[pd.DataFrame]) -> list[Any]:
    return [row for frame in frames for row in repr(frame.to_dict("records")).strip("[]").split("}, ")]


def reused() -> Iterator[pd.DataFrame]:
    frame = pd.DataFrame({"k": ["a"], "n": [0], "at": [pd.Timestamp(0)]})
    for n in range(5):
        frame.loc[0, "n"] = n
        yield frame


def with_a_list() -> Iterator[pd.DataFrame]:
    items: list[int] = []
    for n in range(5):
        items.append(n)
        yield pd.DataFrame({"k": ["a"], "items": [items]})


def of_many_types() -> Iterator[pd.DataFrame]:
    yield pd.DataFrame({"x": [1]})
    yield pd.DataFrame({"x": ["a"]})
    yield pd.DataFrame({"x": pd.Series([Decimal(1)], dtype=object)})
    yield pd.DataFrame({"x": pd.Series([1], dtype="Int64")})
    yield pd.DataFrame({"x": pd.Series(["a"], dtype="category")})
    for _ in range(2):
        yield pd.DataFrame({"x": pd.Series(["a", None], dtype="string")})
    yield pd.DataFrame({"x": [None]})
    yield pd.DataFrame({"x": []})
    yield pd.DataFrame({0: [1]})
    yield pd.DataFrame([[1, 2]], columns=["x", "x"])


def test_a_frame_is_as_it_was_when_it_was_yielded() -> None:
    for frames in (reused, with_a_list):
        assert [r.strip("{}") for r in rows(frames())] == [r.strip("{}") for r in as_yielded(frames())]


def test_only_frames_with_the_same_columns_and_types_are_joined() -> None:
    found = [(list(f.columns), list(map(str, f.dtypes)), repr(f.values.tolist())) for f in joined(of_many_types())]
    given = [(list(f.columns), list(map(str, f.dtypes)), repr(f.values.tolist())) for f in of_many_types()]
    twice = given.index((["x"], ["string"], "[['a'], [<NA>]]"))
    given[twice : twice + 2] = [(["x"], ["string"], "[['a'], [<NA>], ['a'], [<NA>]]")]
    assert found == given


@pytest.mark.slow
@pytest.mark.usual_sizes
def test_small_frames_are_joined_in_their_order() -> None:
    frames = (pd.DataFrame({"k": [str(n)], "n": [n], "at": [pd.Timestamp(n)]}, index=[n]) for n in range(10_500))
    first, second = joined(frames)
    assert first["n"].tolist() == list(range(10_000))
    assert second["k"].tolist() == [str(n) for n in range(10_000, 10_500)]
    assert list(first.dtypes) == list(pd.DataFrame({"k": ["0"], "n": [0], "at": [pd.Timestamp(0)]}).dtypes)
    wrong: Any = iter([pd.DataFrame({"n": [1]}), "no frame"])
    assert list(joined(wrong))[1] == "no frame"


def test_wide_rows_do_not_wait_for_many_others() -> None:
    taken = 0

    def frames() -> Iterator[pd.DataFrame]:
        nonlocal taken
        while taken < 1_000:
            taken += 1
            yield pd.DataFrame({"k": ["a"], "payload": [bytes(100_000)]})

    assert len(next(joined(frames()))) == taken < 100
