"""Conditions of a join that are written as SQL: an expression over the columns of pairs, made once. Pure.

An expression of Arrow is not yet what Spark means: a number in the text takes the narrowest type that holds it, so
``n * 1.5`` would be computed with 24 bits, and a NaN equals nothing. So each operand knows its type here, and numbers
of two types are cast to one before they meet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from aion.base.time import duration_us
from aion.errors import ConfigError, SchemaError, needs_extra

with needs_extra("sql", "on= of a join as text"):
    import sqlglot
    from sqlglot import exp

_ARITHMETIC: Mapping[type[exp.Expr], Callable[..., Any]] = {
    exp.Add: pc.add_checked,
    exp.Sub: pc.subtract_checked,
    exp.Mul: pc.multiply_checked,
}
_LOGIC: Mapping[type[exp.Expr], Callable[..., Any]] = {exp.And: pc.and_kleene, exp.Or: pc.or_kleene}
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
"""How many digits a decimal needs for the integers of a width."""
_ELSE = "give a function that takes a pyarrow.RecordBatch, or an expression of pyarrow.compute"
_UNDERSTOOD = {
    *("this", "expression", "expressions", "low", "high", "unit", "table", "is_string", "negate", "is_nvl", "is_null")
}
"""The parts of a node that are read here. A node with another one means something else."""


class _Operand(NamedTuple):
    """An operand of the condition. ``number``: its value, if it is a number in the text."""

    made: pc.Expression
    type: pa.DataType
    number: int | Decimal | None = None

    @property
    def is_number(self) -> bool:
        return self.is_float or pa.types.is_integer(self.type) or pa.types.is_decimal(self.type)

    @property
    def is_float(self) -> bool:
        return bool(pa.types.is_floating(self.type))

    def cast(self, type_: pa.DataType) -> _Operand:
        if self.number is not None:
            value = float(self.number) if pa.types.is_floating(type_) else self.number
            return _Operand(pc.scalar(value).cast(type_), type_)
        # As in Spark, a large integer becomes the double that is nearest to it.
        return self if self.type == type_ else _Operand(self.made.cast(type_, safe=False), type_)


def expression_of(
    text: str, columns: Sequence[pa.Schema], both: Sequence[str], *, case_sensitive: bool = False
) -> pc.Expression:
    """Returns the expression that a text in Spark's SQL means.

    It may have columns, numbers, texts, ``+ - *``, comparisons, ``<=>``, ``and``, ``or``, ``not``, ``between``, ``in``,
    ``like``, ``is null``, ``coalesce``, ``abs``, and ``interval 5 minutes``. ``columns``: those of the left and of the
    right side. ``both``: those that both have. A name before a column's, as in ``a.price``, stands for one side.
    ``case_sensitive``: whether names that differ in case are two. Raises ConfigError for what is not understood, and
    SchemaError for columns that are not there or do not fit together.
    """
    try:
        parsed = sqlglot.parse_one(text, dialect="spark")
    except sqlglot.errors.ParseError as error:
        raise ConfigError(f"on: {text!r} is no condition in SQL: {str(error).splitlines()[0]}") from None
    try:
        found = _Condition(text, columns, both, str if case_sensitive else str.lower).made(parsed)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        reason = str(error).splitlines()[0]
        raise SchemaError(f"on: {text!r} does not fit its columns: {reason}; cast a column, or {_ELSE}") from None
    if not pa.types.is_boolean(found.type):
        raise SchemaError(f"on: {text!r} does not fit its columns: it is a {found.type}, and not true or false")
    return found.made


def _call(function: Callable[..., Any], *operands: _Operand, **options: Any) -> _Operand:
    """Returns the part that a function makes of others. Raises what Arrow raises if their types do not fit."""
    nulls = function(*(pa.nulls(1, operand.type) for operand in operands), **options)
    return _Operand(function(*(operand.made for operand in operands), **options), nulls.type)


def _alike(left: _Operand, right: _Operand) -> tuple[_Operand, _Operand]:
    """Returns two parts as they meet: numbers have one type, as in Spark."""
    if not (left.is_number and right.is_number):
        return left, right
    if left.is_float or right.is_float:
        type_ = left.type if left.type == right.type else pa.float64()
    elif pa.types.is_integer(left.type) and pa.types.is_integer(right.type):
        type_ = max(left.type, right.type, key=lambda type_: type_.bit_width)
    else:
        return _as_decimal(left), _as_decimal(right)
    return left.cast(type_), right.cast(type_)


def _as_decimal(operand: _Operand) -> _Operand:
    if operand.number is not None:
        return _Operand(pc.scalar(Decimal(operand.number)), pa.scalar(Decimal(operand.number)).type)
    integer = pa.types.is_integer(operand.type)
    return operand.cast(pa.decimal128(_DIGITS[operand.type.bit_width], 0)) if integer else operand


def _equal(left: _Operand, right: _Operand) -> _Operand:
    left, right = _alike(left, right)
    found = _call(pc.equal, left, right)
    if not (left.is_float and right.is_float):
        return found
    return _call(pc.or_kleene, found, _call(pc.and_kleene, *(_call(pc.is_nan, operand) for operand in (left, right))))


def _less(left: _Operand, right: _Operand) -> _Operand:
    """A NaN is more than all other numbers."""
    left, right = _alike(left, right)
    found = _call(pc.less, left, right)
    if not (left.is_float and right.is_float):
        return found
    more = _call(pc.and_kleene, _call(pc.is_nan, right), _not(_call(pc.is_nan, left)))
    return _call(pc.or_kleene, found, more)


def _not(operand: _Operand) -> _Operand:
    return _call(pc.invert, operand)


def _same(left: _Operand, right: _Operand) -> _Operand:
    false = _Operand(pc.scalar(False), pa.bool_())
    nulls = _call(pc.and_kleene, _call(pc.is_null, left), _call(pc.is_null, right))
    return _call(pc.or_kleene, _call(pc.coalesce, _equal(left, right), false), nulls)


_COMPARED: Mapping[type[exp.Expr], Callable[[_Operand, _Operand], _Operand]] = {
    exp.EQ: _equal,
    exp.NEQ: lambda left, right: _not(_equal(left, right)),
    exp.LT: _less,
    exp.LTE: lambda left, right: _not(_less(right, left)),
    exp.GT: lambda left, right: _less(right, left),
    exp.GTE: lambda left, right: _not(_less(left, right)),
    exp.NullSafeEQ: _same,
}


class _Condition:
    def __init__(self, text: str, columns: Sequence[pa.Schema], both: Sequence[str], plain: Callable[..., str]) -> None:
        self._text, self._columns, self._both, self._plain = text, columns, both, plain
        self._names = {plain(name): name for schema in columns for name in schema.names}
        self._side_of: dict[str, int] = {}

    def made(self, node: exp.Expr) -> _Operand:
        is_known = {name for name, value in node.args.items() if value} <= _UNDERSTOOD
        if (found := self._positive(node) if is_known else None) is None:
            raise ConfigError(f"on: {node.sql('spark')!r} in {self._text!r} is not understood here; {_ELSE}")
        return _not(found) if node.args.get("negate") else found

    def _positive(self, node: exp.Expr) -> _Operand | None:
        """Returns what a node means, apart from a NOT that is a part of it, as in NOT LIKE."""
        if (compared := _COMPARED.get(type(node))) is not None:
            return compared(self.made(node.this), self.made(node.expression))
        if (logic := _LOGIC.get(type(node))) is not None:
            return _call(logic, self.made(node.this), self.made(node.expression))
        if (arithmetic := _ARITHMETIC.get(type(node))) is not None:
            return _call(arithmetic, *_alike(self.made(node.this), self.made(node.expression)))
        match node:
            case exp.Paren():
                return self.made(node.this)
            case exp.Column():
                return self._column(node)
            case exp.Literal():
                return _literal(node)
            case exp.Boolean():
                return _Operand(pc.scalar(bool(node.this)), pa.bool_())
            case exp.Neg():
                value = self.made(node.this)
                return _call(pc.negate_checked, value) if value.number is None else _number(-value.number)
            case exp.Not():
                return _not(self.made(node.this))
            case exp.Is() if isinstance(node.expression, exp.Null):
                return _call(pc.is_null, self.made(node.this))
            case exp.Between():
                value, low, high = (self.made(node.args[name]) for name in ("this", "low", "high"))
                return _call(pc.and_kleene, _not(_less(value, low)), _not(_less(high, value)))
            case exp.In() if node.expressions:
                value = self.made(node.this)
                return functools.reduce(
                    lambda found, more: _call(pc.or_kleene, found, more),
                    [_equal(value, self.made(some)) for some in node.expressions],
                )
            case exp.Like() if isinstance(node.expression, exp.Literal) and node.expression.is_string:
                return _call(pc.match_like, self.made(node.this), pattern=str(node.expression.this))
            case exp.Coalesce():
                return functools.reduce(
                    lambda first, other: _call(pc.coalesce, *_alike(first, other)),
                    map(self.made, (node.this, *node.expressions)),
                )
            case exp.Abs():
                return _call(pc.abs_checked, self.made(node.this))
            case exp.Interval() if node.unit is not None and isinstance(node.this, exp.Literal):
                micros = duration_us(f"{node.this.this} {node.unit.name.lower()}", what="on: interval")
                type_ = pa.duration("us")
                return _Operand(pc.scalar(pa.scalar(timedelta(microseconds=micros), type_)), type_)
        return None

    def _column(self, node: exp.Column) -> _Operand:
        name, qualifier = self._names.get(self._plain(node.name), node.name), self._plain(node.table)
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
        return _Operand(pc.field(name), self._columns[sides[0]].field(name).type)


def _literal(node: exp.Literal) -> _Operand:
    text = str(node.this)
    if node.is_string:
        return _Operand(pc.scalar(text), pa.string())
    if "e" in text.lower():
        return _Operand(pc.scalar(float(text)), pa.float64())
    return _number(int(text) if text.isdigit() else Decimal(text))


def _number(value: int | Decimal) -> _Operand:
    """A number of the text, with the type that it has in Spark."""
    for type_, limit in ((pa.int32(), 1 << 31), (pa.int64(), 1 << 63)):
        if isinstance(value, int) and -limit <= value < limit:
            return _Operand(pc.scalar(value).cast(type_), type_, value)
    return _Operand(pc.scalar(Decimal(value)), pa.scalar(Decimal(value)).type, value)
