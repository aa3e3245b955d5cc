"""Schemas as users write them: every type there and back, and one clear error for everything else."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.base.schema import parse_schema
from aion.errors import SchemaError

SIMPLE = {
    "boolean": pa.bool_(), "tinyint": pa.int8(), "byte": pa.int8(), "smallint": pa.int16(), "short": pa.int16(),
    "int": pa.int32(), "integer": pa.int32(), "bigint": pa.int64(), "long": pa.int64(), "float": pa.float32(),
    "real": pa.float32(), "double": pa.float64(), "string": pa.string(), "binary": pa.binary(), "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"), "decimal": pa.decimal128(10, 0), "dec(5)": pa.decimal128(5, 0),
    "numeric(38, 18)": pa.decimal128(38, 18),
}  # fmt: skip

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)


Type = tuple[str, pa.DataType]  # as it is written, and what it is


def array(element: Type) -> Type:
    return f"array<{element[0]}>", pa.list_(element[1])


def map_(key: Type, value: Type) -> Type:
    return f"map<{key[0]}, {value[0]}>", pa.map_(key[1], value[1])


def struct(fields: list[tuple[str, Type]], colon: str) -> Type:
    text = ", ".join(f"{name}{colon} {type_}" for name, (type_, _) in fields)
    return f"struct<{text}>", pa.struct([(name, type_) for name, (_, type_) in fields])


def columns(type_: st.SearchStrategy[Type]) -> st.SearchStrategy[list[tuple[str, Type]]]:
    return st.lists(st.tuples(names, type_), min_size=1, max_size=4, unique_by=lambda c: c[0])


def nested(inner: st.SearchStrategy[Type]) -> st.SearchStrategy[Type]:
    return (
        st.builds(array, inner)
        | st.builds(map_, inner, inner)
        | st.builds(struct, columns(inner), st.sampled_from(["", ":", " :"]))
    )


types = st.recursive(st.sampled_from(list(SIMPLE.items())), nested, max_leaves=6)


@given(columns(types))
def test_a_ddl_string_is_the_schema_that_it_says(wanted: list[tuple[str, Type]]) -> None:
    ddl = ", ".join(f"{name} {text}" for name, (text, _) in wanted)
    assert parse_schema(ddl) == pa.schema([(name, type_) for name, (_, type_) in wanted])


@pytest.mark.parametrize("text", SIMPLE)
def test_types_are_read_in_capitals_too(text: str) -> None:
    assert parse_schema(f" A {text.upper()} ") == pa.schema([("A", SIMPLE[text])])


def test_a_schema_is_itself() -> None:
    schema = pa.schema([("x", pa.int8())])
    assert parse_schema(schema) is schema


def test_names_in_backticks_colons_and_not_null() -> None:
    assert parse_schema("`a b` int, n: bigint NOT NULL, Größe double") == pa.schema(
        [pa.field("a b", pa.int32()), pa.field("n", pa.int64(), nullable=False), pa.field("Größe", pa.float64())]
    )


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("median", "type"),
        ("median dubble", "'dubble'"),
        ("median double bigint", "'bigint'"),
        ("a int,", "column name"),
        ("a int, a double", "twice"),
        ("a array<int", "'>'"),
        ("a map<int>", "','"),
        ("a decimal(5", "')'"),
        ("a decimal(x)", "x"),
        ("a decimal()", "decimal"),
        ("a decimal(39, 0)", "39"),
        ("a decimal(0)", "0"),
        ("a decimal(5, 6)", "6"),
        ("a int not", "NULL"),
        ("a int not nil", "NOT"),
        ("a int)", "')'"),
        ("a int; drop", "';"),
        ("`` int", "``"),
    ],
)
def test_what_cannot_be_read_is_shown(text: str, hint: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse_schema(text)
    assert repr(text) in str(caught.value), "the whole schema is shown"
    assert hint in str(caught.value)


@pytest.mark.parametrize("value", ["", "  ", None, 5, ["a int"]])
def test_what_is_no_schema_is_refused(value: Any) -> None:
    with pytest.raises(SchemaError, match="not a schema"):
        parse_schema(value)


pieces = st.sampled_from(
    ["a", "int", "decimal", "array", "map", "struct", "<", ">", "(", ")", ",", ":", "9", "not", "`"]
)


@given(st.lists(pieces, max_size=8).map(" ".join) | st.text(max_size=20))
def test_any_text_is_a_schema_or_a_schema_error(text: str) -> None:
    with contextlib.suppress(SchemaError):
        assert isinstance(parse_schema(text), pa.Schema)
