"""One specification for ``windowed``, ``explain`` and ``LocalOperator``."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

import aion
from aion import aggregates as A
from aion.core.query.spec import Keywords
from aion.errors import AionError, ConfigError, SchemaError, WindowError
from tests.durations import us
from tests.local.seconds import at

ROOT = Path(__file__).parent.parent
SPEC = aion.Spec(windows=aion.Tumbling("10 s"), time="ts", key="k", aggregates={"n": A.count()}, name="tolls")
EVENTS = pa.table({"ts": at(1, 2), "k": ["a", "b"]})


def panes(operator: aion.LocalOperator) -> list[dict[str, Any]]:
    with operator:
        operator.process(EVENTS)
        rows = operator.advance(10_000_000).to_pylist()
    return sorted(rows, key=lambda row: row.get("k", ""))


def test_keywords_are_the_fields_of_the_specification() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(aion.Spec)}
    assert {name: type_.__forward_arg__ for name, type_ in Keywords.__annotations__.items()} == fields


@pytest.mark.parametrize("call", [aion.windowed, aion.explain, aion.LocalOperator.__init__])
def test_all_three_take_the_same(call: Callable[..., Any]) -> None:
    assert call.__annotations__["definition"] == "Unpack[Keywords]"
    assert call.__annotations__["spec"] == "Spec | None"


def test_a_specification_and_its_keywords_mean_the_same() -> None:
    told = {field.name: getattr(SPEC, field.name) for field in dataclasses.fields(SPEC)}
    assert panes(aion.LocalOperator(SPEC)) == panes(aion.LocalOperator(**told))
    assert [row["n"] for row in panes(aion.LocalOperator(SPEC))] == [1, 1]


def test_keywords_outrank_the_specification_which_stays_as_it_is() -> None:
    (row,) = panes(aion.LocalOperator(SPEC, key=None, policy="memory_only"))
    assert row["n"] == 2
    assert SPEC.key == "k" and SPEC.policy is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.key = None  # type: ignore[misc]


def test_the_schema_of_a_function_may_be_sparks_own() -> None:
    schema = StructType([StructField("n", LongType())])
    counted = {"aggregates": None, "apply": lambda key, window, events: {"n": 7}, "schema": schema}
    assert [row["n"] for row in panes(aion.LocalOperator(SPEC, **counted))] == [7, 7]


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"windows": []}, WindowError, "none"),
        ({"windows": [aion.Tumbling(us(5)), aion.Tumbling(us(5))]}, WindowError, "twice"),
        ({"windows": None}, WindowError, "None is not a window definition; give e.g."),
        ({"windows": [None]}, WindowError, "None is not a window definition"),
        ({"windows": {"a": 5}}, WindowError, "'a' is 5, which is not a window definition"),
        ({"windows": iter([aion.Tumbling(us(5))])}, WindowError, "is not a window definition"),
        ({"windows": {1: aion.Tumbling(us(5))}}, WindowError, "1 is not a name"),
        ({"windows": {"": aion.Tumbling(us(5))}}, WindowError, "'' is not a name"),
        ({"key": 1}, SchemaError, "key: 1 is neither the name of a column nor a list of names"),
        ({"key": b"k"}, SchemaError, "key: b'k' is neither"),
        ({"key": ["k", 1]}, SchemaError, r"key: \['k', 1\] is neither"),
        ({"key": {"k"}}, SchemaError, "key: {'k'} is neither"),
        ({"key": ["k", "k"]}, SchemaError, "twice"),
        ({"aggregates": "n"}, ConfigError, "aggregates: 'n' is not a mapping"),
        ({"aggregates": [("n", A.count())]}, ConfigError, "is not a mapping"),
        ({"aggregates": {1: A.count()}}, ConfigError, "aggregates: 1 is not the name of a column"),
        ({"aggregates": {"": A.count()}}, ConfigError, "aggregates: '' is not the name of a column"),
        ({"blocking": "no"}, ConfigError, "blocking: 'no' is neither True nor False"),
        ({"keys_disjoint": 1}, ConfigError, "keys_disjoint: 1 is neither True nor False"),
        ({"record": 1}, ConfigError, "record: 1 is not the path of a folder"),
        ({"aggregates": None}, ConfigError, "aggregates=.*apply="),
        ({"aggregates": {}}, ConfigError, "none given"),
        ({"apply": len}, ConfigError, "not both"),
        ({"aggregates": None, "apply": len}, ConfigError, "schema"),
        ({"aggregates": None, "apply": len, "schema": "n dubble"}, SchemaError, "dubble"),
        ({"schema": "n int"}, ConfigError, "apply="),
    ],
)
def test_what_no_input_could_make_right_is_refused_at_once(
    wrong: dict[str, Any], error: type[AionError], said: str
) -> None:
    with pytest.raises(error, match=said):
        dataclasses.replace(SPEC, **wrong)


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        ({"windos": 1}, r"LocalOperator\(\) got an unexpected keyword argument 'windos'; did you mean 'windows'\?"),
        ({"time": "ts"}, r"LocalOperator\(\) needs the keyword argument 'windows'"),
        ({"windows": aion.Tumbling(us(5))}, r"LocalOperator\(\) needs the keyword argument 'time'"),
    ],
)
def test_a_keyword_that_is_not_there_and_one_that_is_missing(definition: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        aion.LocalOperator(**definition)


def test_what_is_no_specification() -> None:
    with pytest.raises(TypeError, match=r"takes an aion\.Spec or keywords"):
        aion.LocalOperator({"windows": aion.Tumbling(us(5)), "time": "ts"})  # type: ignore[arg-type]


USER = """
from typing import Any
import aion
from aion import aggregates as A

spec = aion.Spec(windows=aion.Tumbling("1 minute"), time="ts", aggregates={{"n": A.count()}})

def query(events: Any) -> object:
    aion.windowed(events, spec, policy="demo")
    return aion.{call}({events}windows=aion.Tumbling("1 minute"), time="ts", {keyword})
"""


@pytest.mark.proof
@pytest.mark.parametrize("call", ["windowed", "explain", "LocalOperator"])
def test_a_type_checker_knows_the_keywords(call: str, tmp_path: Path) -> None:
    said = []
    for n, keyword in enumerate(('key=["a"]', "key=5", 'kei="a"')):
        file = tmp_path / f"user{n}.py"
        file.write_text(USER.format(call=call, events="" if call == "LocalOperator" else "events, ", keyword=keyword))
        check = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", file]
        said.append(subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False).stdout)
    right, wrong_type, wrong_name = said
    assert right.startswith("Success"), right
    assert "[arg-type]" in wrong_type and f'"{call}"' in wrong_type, wrong_type
    assert 'Unexpected keyword argument "kei"' in wrong_name, wrong_name
