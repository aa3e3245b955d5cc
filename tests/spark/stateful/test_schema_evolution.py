"""Schemas of state variables that change between two starts of a query: what Spark allows goes on, and gives the same.

Spark allows changes only if its state store has the Avro encoding. It checks them itself, on Aion as on its own state.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.spark.stateful import processors as p
from tests.spark.stateful.conftest import ENCODING
from tests.spark.stateful.rig import Case, both, compare, error, grouped_by_spark, ours

Release = tuple[str, tuple[Any, ...]] | tuple[str, tuple[Any, ...], str]
"""The schema of the state variables, a value, and the schema of the map's keys."""
KEYS = ([("a",), ("b",), ("c",)], [("a",), ("b",), ("b",)], [("a",), ("c",), ("d",)], [("a",), ("b",), ("c",)])


def releases(*releases: Release) -> Case:
    """A query that is started again with each release. Some keys miss some of them."""
    remaining = iter(releases)
    return Case(
        lambda: p.Evolving(*next(remaining)),
        [("k", pa.string())],
        "k string, what string",
        KEYS[: len(releases)],
        pandas=False,
        restart_after=range(len(releases) - 1),
    )


FIRST = (
    "n int, l bigint, f float, gone string, s string, b binary, d date, inner struct<a:int>, "
    "items array<struct<x:int>>, counts map<string,int>",
    (1, 2**40 + 1, 1.1, "old", "ü", b"ab", datetime.date(2024, 5, 1), (1,), [(1,)], {"a": 1}),
)
SECOND = (  # fields are added, removed and moved, and get wider types, at every depth
    "added string, s binary, b string, n bigint, l float, f double, d int, inner struct<b:string,a:bigint>, "
    "items array<struct<x:bigint,y:string>>, counts map<string,bigint>",
    ("new", b"cd", "ü", 2**40, 2.5, 2.25, 7, ("x", 2**40), [(2**40, "y")], {"c": 2**40}),
)
THIRD = (  # a key may still have values of the first release
    "l double, n double, added string, inner struct<a:double>, again int",
    (3.5, 4.5, "newer", (5.5,), 3),
)
FOURTH = ("l double, again bigint, gone string", (6.5, 2**41, "back"))


@pytest.mark.proof
@pytest.mark.timeout(900)  # on a loaded machine
def test_what_spark_allows_goes_on_and_gives_the_same(spark: SparkSession, tmp_path: Path, avro: None) -> None:
    aions, sparks = both(spark, tmp_path, lambda: releases(FIRST, SECOND, THIRD, FOURTH))
    compare(aions, sparks)
    assert len(sparks) == 4, "each release has a batch"


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("encoding", ["unsaferow", "avro"])
def test_fields_get_other_names(spark: SparkSession, tmp_path: Path, avro: None, encoding: str) -> None:
    """Without Avro, Spark finds fields by their places."""
    spark.conf.set(ENCODING, encoding)
    before = "n int, s string, inner struct<a:int>", (1, "x", (5,)), "at int"
    after = "m int, t string, inner struct<b:int>", (2, "y", (6,)), "place int"
    aions, sparks = both(spark, tmp_path, lambda: releases(before, after, after, before))
    compare(aions, sparks)
    assert len(sparks) == 4, "each release has a batch"


N = "n int", (1,)
REFUSED: dict[str, tuple[str, str, Release, Release]] = {
    "narrower": ("avro", "INVALID_VALUE_SCHEMA_EVOLUTION", ("n bigint", (1,)), N),
    "text": ("avro", "INVALID_VALUE_SCHEMA_EVOLUTION", N, ("n string", ("a",))),
    "never null": ("avro", "TRANSFORM_WITH_STATE_SCHEMA_MUST_BE_NULLABLE", N, ("n int, m int not null", (1, 2))),
    "without Avro": ("unsaferow", "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE", N, ("n int, m int", (1, 2))),
}


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", REFUSED)
def test_what_spark_refuses_is_refused_in_the_same_words(
    spark: SparkSession, tmp_path: Path, avro: None, what: str
) -> None:
    encoding, condition, old, new = REFUSED[what]
    spark.conf.set(ENCODING, encoding)
    said = {
        name: error(spark, tmp_path / name, releases(old, new), group)
        for name, group in (("aion", ours()), ("spark", grouped_by_spark))
    }
    words = [re.search(rf"\[?[A-Z_]*{condition}.*", text) for text in said.values()]
    assert all(words), said
    # Of several variables with the same fault, Spark names any.
    one, other = (re.sub(r"family \w+", "family", found[0]) for found in words if found is not None)
    assert one == other
