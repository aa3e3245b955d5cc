"""Conditions of a join that are written as SQL: an expression over the columns of pairs, made once. Pure."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from aion.base.time import duration_us
from aion.errors import ConfigError, SchemaError, needs_extra

with needs_extra("sql", "on= of a join as text"):
    import sqlglot
    from sqlglot import exp

_TWO: Mapping[type[exp.Expr], Callable[[Any, Any], Any]] = {
    exp.EQ: operator.eq,
    exp.NEQ: operator.ne,
    exp.LT: operator.lt,
    exp.LTE: operator.le,
    exp.GT: operator.gt,
    exp.GTE: operator.ge,
    exp.And: operator.and_,
    exp.Or: operator.or_,
    exp.Add: operator.add,
    exp.Sub: operator.sub,
    exp.Mul: operator.mul,
}
_ELSE = "give a function that takes a pyarrow.RecordBatch, or an expression of pyarrow.compute"


def expression_of(text: str, columns: Sequence[pa.Schema], both: Sequence[str]) -> pc.Expression:
    """Returns the expression that a text in Spark's SQL means.

    It may have columns, numbers, texts, ``+ - *``, comparisons, ``<=>``, ``and``, ``or``, ``not``, ``between``, ``in``,
    ``like``, ``is null``, ``coalesce``, ``abs``, and ``interval 5 minutes``. ``columns``: those of the left and of the
    right side. ``both``: those that both have. A name before a column's, as in ``a.price``, stands for one side. Raises
    ConfigError for what is not understood, and SchemaError for columns that are not there or do not fit together.
    """
    try:
        parsed = sqlglot.parse_one(text, dialect="spark")
    except sqlglot.errors.ParseError as error:
        raise ConfigError(f"on: {text!r} is no condition in SQL: {str(error).splitlines()[0]}") from None
    found = _Condition(text, columns, both).made(parsed)
    pairs = pa.table({name: pa.array([], type_) for schema in columns for name, type_ in _types(schema)})
    try:
        pairs.filter(found)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        reason = str(error).splitlines()[0]
        raise SchemaError(f"on: {text!r} does not fit its columns: {reason}; cast a column, or {_ELSE}") from None
    return found


def _types(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in schema]


class _Condition:
    def __init__(self, text: str, columns: Sequence[pa.Schema], both: Sequence[str]) -> None:
        self._text, self._columns, self._both = text, columns, both
        self._side_of: dict[str, int] = {}

    def made(self, node: exp.Expr) -> Any:
        if (two := _TWO.get(type(node))) is not None:
            return two(self.made(node.this), self.made(node.expression))
        match node:
            case exp.Paren():
                return self.made(node.this)
            case exp.Column():
                return self._column(node)
            case exp.Literal():
                return _literal(node)
            case exp.Boolean():
                return pc.scalar(bool(node.this))
            case exp.Neg():
                return pc.negate_checked(self.made(node.this))
            case exp.Not():
                return ~self.made(node.this)
            case exp.Is() if isinstance(node.expression, exp.Null):
                return self.made(node.this).is_null()
            case exp.NullSafeEQ():
                return self._same(self.made(node.this), self.made(node.expression))
            case exp.Between():
                value = self.made(node.this)
                return (value >= self.made(node.args["low"])) & (value <= self.made(node.args["high"]))
            case exp.In() if node.expressions:
                value = self.made(node.this)
                return functools.reduce(operator.or_, (value == self.made(some) for some in node.expressions))
            case exp.Like() if isinstance(node.expression, exp.Literal) and node.expression.is_string:
                return pc.match_like(self.made(node.this), pattern=str(node.expression.this))
            case exp.Coalesce():
                return pc.coalesce(self.made(node.this), *map(self.made, node.expressions))
            case exp.Abs():
                return pc.abs_checked(self.made(node.this))
            case exp.Interval() if node.unit is not None and isinstance(node.this, exp.Literal):
                micros = duration_us(f"{node.this.this} {node.unit.name.lower()}", what="on")
                return pc.scalar(pa.scalar(timedelta(microseconds=micros), pa.duration("us")))
        raise ConfigError(f"on: {node.sql('spark')!r} in {self._text!r} is not understood here; {_ELSE}")

    @staticmethod
    def _same(left: Any, right: Any) -> Any:
        nulls = left.is_null(), right.is_null()
        return pc.coalesce(left == right, pc.scalar(False)) | (nulls[0] & nulls[1])

    def _column(self, node: exp.Column) -> Any:
        name, qualifier = node.name, node.table
        sides = [side for side, schema in enumerate(self._columns) if name in schema.names]
        if not sides:
            known = ", ".join(dict.fromkeys(name for schema in self._columns for name in schema.names))
            raise SchemaError(f"on: there is no column {name!r}; there are {known}")
        if qualifier and name not in self._both:
            said = {"left": 0, "right": 1}.get(qualifier, self._side_of.setdefault(qualifier, sides[0]))
            if said != sides[0]:
                other = ("left", "right")[sides[0]]
                raise SchemaError(
                    f"on: {qualifier}.{name} in {self._text!r}: column {name!r} is of the {other} side, and "
                    f"{qualifier!r} stands for the other one"
                )
        return pc.field(name)


def _literal(node: exp.Literal) -> Any:
    if node.is_string:
        return pc.scalar(str(node.this))
    text = str(node.this)
    return pc.scalar(int(text) if text.isdigit() else float(text))
