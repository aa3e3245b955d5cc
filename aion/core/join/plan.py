"""What a join is: its sides, which rows match, and the columns of its result. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.base.identity import can_identify
from aion.base.time import format_duration
from aion.core.query.columns import DROPPED_COLUMNS, OLD, PANE_SEQ
from aion.errors import ConfigError, SchemaError

LEFT, RIGHT = 0, 1
SIDES = ("left", "right")
INNER, OUTER_LEFT, OUTER_RIGHT, FULL, ASOF = "inner", "left", "right", "full", "asof"
HOW = (INNER, OUTER_LEFT, OUTER_RIGHT, FULL, ASOF)
ALL, FINAL, CHANGES = "all", "final", "changes"
PAIR, PAIR_TIME, SIDE = "pair", "pair_time", "side"
OWN = (PAIR, PAIR_TIME, "kind", PANE_SEQ, SIDE, *DROPPED_COLUMNS)
"""The columns that every result has besides those of the rows."""

Condition = Callable[[pa.RecordBatch], Any]


KIND_BEFORE, SEQ_BEFORE, DROPPED_BEFORE, PAIR_BEFORE = "__aion_kind", "__aion_seq", "__aion_said", "__aion_pair"
"""Columns that results of another operator bring with them, and that the result does not have: their kind and number,
what they say about a dropped event, and the pair that a row of another join is.
"""


class Side(NamedTuple):
    """One side of a join. ``schema``: of its rows. ``time``: the column with the event time. ``identity``: the columns
    that identify a row, together with the key and the time. ``unique``: whether a row that has come before counts once.
    ``bound_us``: how late its rows may be, or None if it is learnt. ``before``: the ``emit`` of the operator whose
    results the rows are, or None if they are events. ``delay_us``: how long after its time a row comes that is on time.
    ``earlier``: the columns that its rows had before, the oldest first, if a start of the query has changed them.
    """

    schema: pa.Schema
    time: str
    identity: tuple[str, ...]
    unique: bool
    bound_us: int | None
    before: str | None = None
    delay_us: int = 0
    earlier: tuple[pa.Schema, ...] = ()

    @property
    def is_result(self) -> bool:
        """Whether the rows are results of another operator."""
        return self.before is not None

    @property
    def changes(self) -> bool:
        """Whether a later row may replace an earlier one."""
        return self.before not in (None, FINAL)

    @property
    def arriving(self) -> pa.Schema:
        """The columns of rows that come."""
        if not self.is_result:
            return self.schema
        texts = [KIND_BEFORE, DROPPED_BEFORE, *(name for name in self.identity if name not in self.schema.names)]
        return pa.schema([*self.schema, *(pa.field(name, pa.string()) for name in texts), (SEQ_BEFORE, pa.int64())])


@dataclass(frozen=True)
class JoinPlan:
    """Rows of both sides match if their keys are equal, and ``first_us <= right time - left time <= last_us``.

    ``how``: one of ``HOW``. ``condition``: what else must hold for a pair, or None if nothing else must. ``emit``:
    ``ALL``, ``FINAL`` or ``CHANGES``. ``early``: whether rows without a partner come out in the batch in which they
    come. ``on``: the condition as text, if it was one. ``past``: the part of the stored definition that says what it
    has been before (:mod:`aion.core.join.evolution`), or None if it has never been another one. Raises SchemaError or
    ConfigError for what does not fit together.
    """

    left: Side
    right: Side
    key: tuple[str, ...]
    first_us: int
    last_us: int
    how: str = INNER
    condition: Condition | None = None
    emit: str = ALL
    early: bool = False
    on: str | None = None
    past: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise ConfigError(f"how: {self.how!r} is none of {', '.join(HOW)}")
        if self.emit not in (ALL, FINAL, CHANGES):
            raise ConfigError(f"emit: {self.emit!r} is none of {ALL}, {FINAL}, {CHANGES}")
        if self.first_us > self.last_us:
            raise ConfigError(
                f"within: {format_duration(self.first_us)} is more than {format_duration(self.last_us)}; give the "
                "smaller difference first"
            )
        if self.early and self.emit == FINAL:
            raise ConfigError(
                "early: with emit='final' nothing comes out that may be taken back; leave one of them out"
            )
        if self.early and not any(self.outer):
            raise ConfigError(f"early: with how={self.how!r} no row without a partner comes out; leave it out")
        if self.emit == FINAL and any(side.changes for side in self.sides):
            raise ConfigError(
                "emit='final': later results of the operator before replace earlier ones, so a pair may be taken back; "
                "give that operator emit='final', too"
            )
        if self.how == ASOF and self.condition is not None:
            raise ConfigError("on: how='asof' takes the newest row of the right side, whatever is in it; leave on out")
        for name, side in zip(SIDES, self.sides, strict=True):
            self._check(name, side)
        for name in self.key:
            types = [side.schema.field(name).type for side in self.sides]
            if types[0] != types[1]:
                raise SchemaError(
                    f"key: column {name!r} is of type {types[0]} on the left and {types[1]} on the right; cast one of "
                    "them"
                )
        names = self.result_schema.names
        for name in names:
            if names.count(name) > 1:
                own = name in OWN or name.startswith(OLD)
                what = "a column that every result has" if own else "a column of both sides"
                raise SchemaError(f"{name!r} is {what}; rename it before the join")

    def _check(self, name: str, side: Side) -> None:
        schema, asked = side.schema, "unique" if side.unique else "id"
        keys, identity = (("key", column) for column in self.key), ((asked, column) for column in side.identity)
        for what, column in (("time", side.time), *keys, *identity):
            if what == asked and column == PAIR_BEFORE and side.is_result:
                continue
            if column not in schema.names:
                raise SchemaError(
                    f"{what}: the {name} side has no column {column!r}; its columns are {', '.join(schema.names)}"
                )
            if what != "time" and not can_identify(schema.field(column).type):
                raise SchemaError(
                    f"{what}: column {column!r} of the {name} side is of type {schema.field(column).type}; rows are "
                    f"recognised by numbers, texts, bytes, dates and times; give {asked}= other columns, or make a "
                    "text of it"
                )
        if not self.key:
            raise ConfigError("key: a join needs at least one column that is equal on both sides; give e.g. key='id'")
        if not pa.types.is_timestamp(schema.field(side.time).type):
            raise SchemaError(
                f"time: column {side.time!r} of the {name} side is of type {schema.field(side.time).type}; a timestamp "
                "is needed"
            )

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.left, self.right

    @property
    def outer(self) -> tuple[bool, bool]:
        """Of which sides a row without a partner comes out."""
        return self.how in (OUTER_LEFT, FULL, ASOF), self.how in (OUTER_RIGHT, FULL)

    @property
    def takes_back(self) -> bool:
        """Whether a row of the result may be retracted."""
        return (any(self.outer) and self.emit != FINAL) or any(side.changes for side in self.sides)

    def interval(self, side: int) -> tuple[int, int]:
        """Where the partners of a row are: the times of the other side, counted from its own."""
        return (self.first_us, self.last_us) if side == LEFT else (-self.last_us, -self.first_us)

    def due_after(self, side: int) -> int:
        """Returns how long after the time of a row it is known that no partner comes on time."""
        delay_us = 0 if self.emit == FINAL else self.sides[1 - side].delay_us
        return self.interval(side)[1] + delay_us

    def needed_from(self, lines: Sequence[int]) -> tuple[int, int]:
        """Returns from which times on the rows of each side are needed. ``lines``: before these, rows come too late.

        Earlier rows can neither be matched nor repeated by one that may still come.
        """
        left_us = min(lines[RIGHT] - self.last_us, lines[LEFT])
        right_us = min(lines[LEFT] + self.first_us, lines[RIGHT])
        # If a row is replaced, its partners are asked for others.
        span_us = self.last_us - self.first_us
        if self.left.changes and self.outer[RIGHT]:
            left_us = min(left_us, lines[LEFT] - span_us)
        if self.right.changes and self.outer[LEFT]:
            right_us = min(right_us, lines[RIGHT] - span_us)
        return left_us, min(right_us, left_us + self.first_us) if self.how == ASOF else right_us

    @property
    def timestamp(self) -> pa.DataType:
        return self.left.schema.field(self.left.time).type

    @property
    def result_schema(self) -> pa.Schema:
        """The columns of a result: the key, those of the left and of the right side, ``OWN``, and with ``CHANGES`` the
        values before.
        """
        return pa.schema(
            [
                *(pa.field(name, self.left.schema.field(name).type) for name in self.key),
                *self.values,
                pa.field(PAIR, pa.string()),
                pa.field(PAIR_TIME, self.timestamp),
                pa.field("kind", pa.string()),
                pa.field(PANE_SEQ, pa.int64()),
                pa.field(SIDE, pa.string()),
                pa.field("event_time", self.timestamp),
                pa.field("lateness_us", pa.int64()),
                pa.field("reason", pa.string()),
                pa.field("event", pa.string()),
                *(field.with_name(OLD + field.name) for field in self.values if self.emit == CHANGES),
            ]
        )

    @property
    def values(self) -> list[pa.Field]:
        """The columns of both sides but those of the key."""
        return [pa.field(f.name, f.type) for side in self.sides for f in side.schema if f.name not in self.key]

    @property
    def definition(self) -> dict[str, Any]:
        """What versions of the operator have in common."""
        within = f"{format_duration(self.first_us)} to {format_duration(self.last_us)}"
        sides = [
            {
                "schema": [[field.name, str(field.type)] for field in side.schema],
                "time": side.time,
                "identity": list(side.identity),
                "unique": side.unique,
                **({"before": side.before} if side.is_result else {}),
            }
            for side in self.sides
        ]
        return {
            "kind": "join",
            "how": self.how,
            "emit": self.emit,
            **({"early": True} if self.early else {}),
            **({} if self.on is None else {"on": self.on}),
            "within_us": [self.first_us, self.last_us],
            "sides": sides,
            "key": list(self.key),
            "words": {
                "operator": [("a join", "")],
                "how": [(self.how, "")],
                "emit": [(self.emit, "")],
                "within": [(within, "")],
                **({"early": [("rows without a partner", "")]} if self.early else {}),
                **({} if self.on is None else {"on": [(self.on, "")]}),
                "key": [(name, str(self.left.schema.field(name).type)) for name in self.key],
                **words_of(sides),
                **{
                    f"{name} side: repeated rows": [("count once" if side.unique else "all count", "")]
                    for name, side in zip(SIDES, self.sides, strict=True)
                },
                **{
                    f"{name} side: rows": [(f"results with emit={side.before!r}", "")]
                    for name, side in zip(SIDES, self.sides, strict=True)
                    if side.is_result
                },
            },
            **(self.past or {}),
        }


def words_of(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """Says in words what columns both sides have, and which identify their rows. ``sides``: of a definition."""
    named = list(zip(SIDES, sides, strict=True))
    return {
        **{f"{name} side": [(column, type_) for column, type_ in side["schema"]] for name, side in named},
        **{
            f"{name} side: what identifies a row": [(column, "") for column in (*side["identity"], side["time"])]
            for name, side in named
        },
    }


def identity_of(schema: pa.Schema, asked: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the columns that identify a row. Without ``asked`` they are all that can, which keeps rows apart as far
    as these columns differ.
    """
    return tuple(asked) if asked is not None else tuple(f.name for f in schema if can_identify(f.type))


def holds(condition: Condition | pc.Expression, pairs: pa.RecordBatch) -> Any:
    """A mask of the pairs for which a condition is true, as numpy's bools. A null is not true.

    Raises ConfigError if the condition is not one value for each pair.
    """
    if isinstance(condition, pc.Expression):
        numbered = pa.table({**dict(zip(pairs.schema.names, pairs.columns, strict=True)), _AT: range(pairs.num_rows)})
        kept = numbered.filter(condition).column(_AT).to_numpy()
        mask = np.zeros(pairs.num_rows, np.bool_)
        mask[kept] = True
        return mask
    found = condition(pairs)
    found = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    found = found if isinstance(found, pa.Array) else pa.array(found)
    if not pa.types.is_boolean(found.type) or len(found) != pairs.num_rows:
        raise ConfigError(
            f"on: the function returned {len(found)} values of type {found.type} for {pairs.num_rows} pairs; return "
            "one bool for each"
        )
    return found.fill_null(False).to_numpy(zero_copy_only=False)


_AT = "\0at"
