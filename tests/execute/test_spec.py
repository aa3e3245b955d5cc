"""One specification for ``windowed``, ``explain`` and ``LocalOperator``."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import pydoc
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
from aion.errors import AionError, ConfigError, PolicyError, SchemaError, WindowError
from aion.spec import Changes, Keywords
from tests.durations import us
from tests.local.seconds import at

ROOT = Path(__file__).parents[2]
SPEC = aion.Spec(windows=aion.Tumbling("10 s"), time="ts", key="k", aggregates={"n": A.count()}, name="tolls")
EVENTS = pa.table({"ts": at(1, 2), "k": ["a", "b"]})


def panes(operator: aion.LocalOperator) -> list[dict[str, Any]]:
    with operator:
        operator.process(EVENTS)
        rows = operator.advance(10_000_000).to_pylist()
    return sorted(rows, key=lambda row: row.get("k", ""))


def test_keywords_are_the_fields_of_the_specification() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(aion.Spec)}
    for keywords in (Keywords, Changes):
        assert {name: type_.__forward_arg__ for name, type_ in keywords.__annotations__.items()} == fields
    assert Keywords.__required_keys__ == {
        field.name for field in dataclasses.fields(aion.Spec) if field.default is dataclasses.MISSING
    }
    assert not Changes.__required_keys__


@pytest.mark.parametrize("call", [aion.windowed, aion.explain, aion.LocalOperator])
def test_help_shows_what_all_three_take(call: Callable[..., Any]) -> None:
    shown = inspect.signature(call).parameters
    assert "spec" in shown
    for field in dataclasses.fields(aion.Spec):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        parameter = shown[field.name]
        assert (parameter.default, parameter.annotation) == (default, field.type)
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    text = pydoc.render_doc(call, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    assert (
        "windows: 'Definitions', time: 'str | Column | None' = None, key: " in text and "**" not in text.splitlines()[2]
    )


def test_windowed_is_a_function_with_an_example() -> None:
    assert inspect.isfunction(aion.windowed) and "aion.windowed(\n" in str(aion.windowed.__doc__)
    assert pickle.loads(pickle.dumps(aion.windowed)) is aion.windowed


@pytest.mark.proof
def test_a_type_checker_knows_what_is_required(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(
        "import aion\n"
        "from aion import aggregates as A\n"
        "from typing import Any\n"
        "def calls(df: Any, spec: aion.Spec) -> None:\n"
        "    aion.windowed(df, windows=aion.Tumbling('1 m'), time='ts', aggregates={'n': A.count()}, bound='1 h')\n"
        "    aion.windowed(df, spec, key='k')\n"
        "    aion.LocalOperator(spec, input_schema='ts timestamp')\n"
        "    aion.LocalOperator(windows=aion.Tumbling('1 m'), time='ts')\n"
        "    aion.windowed(df, windows=aion.Tumbling('1 m'))\n"
        "    aion.explain(df, time='ts')\n"
        "    aion.LocalOperator(time='ts')\n"
        "    aion.windowed(df, spec, kee='k')\n"
        "    aion.windowed(df, spec, key=5)\n"
        "    aion.Tumbling(60)\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "calls.py"]
    told = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True
    )
    wrong = {int(line.split(":")[1]) for line in told.stdout.splitlines() if ": error:" in line}
    assert wrong == {9, 10, 11, 12, 13, 14}, told.stdout + told.stderr


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
    counted = {"aggregates": None, "apply": aion.Apply(lambda key, window, events: {"n": 7}, schema)}
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
        ({"completeness": "no"}, ConfigError, "completeness: 'no' is neither True nor False"),
        ({"policy": {"distribution": {"keys_disjoint": 2}}}, PolicyError, "keys_disjoint: 2 is not possible"),
        ({"policy": {"trace": {"folder": 1}}}, PolicyError, "trace.folder: 1 is not possible; write the path"),
        ({"policy": {"trace": {"folder": " "}}}, PolicyError, "trace.folder: ' ' is not possible"),
        ({"on_lossy_upstream": True}, ConfigError, "on_lossy_upstream: True is not known; give 'error' or 'accept'"),
        ({"on_removed": "go"}, ConfigError, "on_removed: 'go' is not known; give 'finish' or 'drop'"),
        ({"aggregates": None}, ConfigError, "aggregates=.*apply="),
        ({"aggregates": {}}, ConfigError, "none given"),
        ({"apply": aion.Apply(len, "n int")}, ConfigError, "not both"),
        ({"aggregates": None, "apply": len}, ConfigError, r"is no aion.Apply; write apply=aion.Apply\(function"),
        ({"aggregates": None, "apply": aion.Apply(len, "n dubble")}, SchemaError, "dubble"),
        ({"aggregates": {"n": 1}}, ConfigError, "'n' is 1, which is not an aggregate"),
        ({"aggregates": {"window": A.count()}}, SchemaError, "'window' is a column that every result has"),
        ({"aggregates": {"k": A.count()}}, SchemaError, "'k' is a key column already"),
        (
            {"trigger": "everybatch"},
            PolicyError,
            "keyword trigger: trigger.kind: 'everybatch' .*or 'every_batch'",
        ),
        ({"trigger": {"kidn": "count"}}, PolicyError, "keyword trigger: trigger.kidn: unknown key"),
        ({"trigger": {"kind": "count", "bound": 0.1}}, PolicyError, "says nothing about kind 'count'"),
        ({"windows": aion.Tumbling("1 s", trigger="never")}, PolicyError, "windows: .*trigger.kind: 'never'"),
        ({"bound": "2 hoursx"}, WindowError, "bound of '2 hoursx' has the unknown unit"),
        ({"bound": "-2 hours"}, WindowError, "bound of '-2 hours' is negative"),
        ({"policy": {"distribution": {"fan_in": 1}}}, PolicyError, "distribution.fan_in: 1 is not"),
        ({"policy": "standrad"}, PolicyError, "did you mean standard"),
        ({"policy": {"memory": {"budgte": 1}}}, PolicyError, "did you mean memory.budget"),
        ({"name": "a/b"}, ConfigError, "name: 'a/b' becomes a folder name"),
        ({"unique": []}, SchemaError, "unique: no column is named"),
        (
            {"windows": aion.Session("1 s"), "policy": {"trace": {"folder": "traces"}}},
            ConfigError,
            "trace.folder: .* depends on the events",
        ),
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
        ({"windows": aion.Tumbling(us(5)), "aggregates": {"n": A.count()}}, "needs the keyword argument 'time'"),
        ({"lateness": "1 hour"}, r"LocalOperator\(\) has no keyword 'lateness' any more; write bound="),
        ({"schema": "n long"}, r"no keyword 'schema' any more; write apply=aion.Apply\(function, schema\)"),
        ({"columns": ["v"]}, r"no keyword 'columns' any more; write apply=aion.Apply\(function, schema, columns="),
        ({"blocking": False}, r"no keyword 'blocking' any more; write apply=aion.Apply\(function, schema, blocking="),
        ({"merge_levels": 1}, r"no keyword 'merge_levels' any more; .*policy={'distribution': {'merge_levels'"),
        ({"fan_in": 2}, r"no keyword 'fan_in' any more; .* set spark.aion.distribution.fan_in"),
        ({"keys_disjoint": True}, r"no keyword 'keys_disjoint' any more; .*spark.aion.distribution.keys_disjoint"),
        ({"record": "t"}, r"no keyword 'record' any more; .* policy={'trace': {'folder'"),
        ({"lossy_upstream": True}, r"no keyword 'lossy_upstream' any more; write on_lossy_upstream='accept'"),
    ],
)
def test_a_keyword_that_is_not_there_and_one_that_is_missing(definition: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        aion.LocalOperator(**definition)


def test_what_is_no_specification() -> None:
    with pytest.raises(TypeError, match=r"takes an aion\.Spec or keywords"):
        aion.LocalOperator({"windows": aion.Tumbling(us(5)), "time": "ts"})  # type: ignore[arg-type]


def test_dir_shows_what_users_write_and_nothing_else() -> None:
    assert {"windowed", "configure", "LocalOperator", "Tumbling"} <= set(dir(aion)) == {*aion.__all__, "__version__"}
    for name in dir(aion):
        assert getattr(aion, name) is not None
    assert {"count", "sum", "approx_percentile", "Aggregate"} <= set(dir(A))
    assert not {"Layout", "bind", "moments", "EVENTS", "partial"} & set(dir(A))
    for module in (A, aion.sinks, aion.errors, aion.metrics):
        assert dir(module) == sorted(module.__all__)
