"""A join whose columns change between two starts of a query (docs/operate/restarts.md). Pure.

The stored definition lists its changes, the oldest first: for each the last batch before it, and each side as it was,
or None if the change did not touch that side. A page of rows says with which columns of its side it was written
(:class:`aion.core.paged_rows.ArrowPages`). What identifies a row is kept with the row, so it may have been other
columns then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from aion.core.join.plan import SIDES, JoinPlan, identity_of, words_of
from aion.core.join.stored import past_of, stored_schema
from aion.core.query.evolution import check_same_case, widens_or_is
from aion.core.query.history import EVOLUTION
from aion.errors import ForeignState
from state_backends.format.definitions import FOLLOWS, NOT_COMPARED, WORDS, digest
from state_backends.thresholds import threshold

MOST_CHANGES = threshold(1000, 6)
_BESIDE = "start it as another query with a checkpoint of its own, and let this one run until it is not needed"


class JoinChange(NamedTuple):
    """What a start changes. ``past``: what the definition has been before, as it is stored from now on.

    ``added``, ``removed``, ``wider``: for each side, the columns that come, that go, and that get a wider type.
    """

    past: dict[str, Any]
    added: Sequence[list[str]]
    removed: Sequence[list[str]]
    wider: Sequence[list[str]]


def settled_join(found: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Returns a stored definition without the changes that came after a batch. ``batch``: the last one that has ended.

    The state is older than such a change if its first batch failed, or if the checkpoint was set back.
    """
    steps = found.get(EVOLUTION, [])
    kept = [step for step in steps if step[0] < batch]
    if len(kept) == len(steps):
        return dict(found)
    sides = list(found["sides"])
    for _, before in reversed(steps[len(kept) :]):
        sides = [now if was is None else was for was, now in zip(before, sides, strict=True)]
    past = {EVOLUTION: kept, FOLLOWS: found[FOLLOWS][: len(kept)]} if kept else {}
    rest = {name: value for name, value in found.items() if name not in (EVOLUTION, FOLLOWS)}
    return {**rest, "sides": sides, WORDS: {**found.get(WORDS, {}), **words_of(sides)}, **past}


def change_of(found: Mapping[str, Any], plan: JoinPlan, batch: int) -> JoinChange | None:
    """Returns how a stored definition becomes what the plan asks for, or None if it is that already.

    ``found``: of :func:`settled_join`. ``batch``: the last batch that has ended. Raises ForeignState if the state
    cannot go on.
    """
    now = plan.definition
    if _fixed(found) != _fixed(now):
        raise ForeignState(f"only columns of its sides may come, go, or get a wider type; {_BESIDE}")
    if found["sides"] == now["sides"]:
        return None
    olds = [_columns(side) for side in found["sides"]]
    for name, old, was, side in zip(SIDES, olds, found["sides"], plan.sides, strict=True):
        by_default = not side.unique and all(
            tuple(identity) == identity_of(schema, None)
            for identity, schema in ((was["identity"], old), (side.identity, side.schema))
        )
        if not by_default and tuple(was["identity"]) != side.identity:
            raise ForeignState(f"the columns that identify a row of the {name} side stay; {_BESIDE}")
        check_same_case(old.names, side.schema.names)
        for column in old:
            type_ = side.schema.field(column.name).type if column.name in side.schema.names else column.type
            if not widens_or_is(column.type, type_):
                raise ForeignState(
                    f"column {column.name} of the {name} side was {column.type} and is {type_}, which does not hold "
                    f"all that is kept; cast it to {column.type}, or {_BESIDE}"
                )
    if plan.on is not None:
        for other, old in enumerate(olds):
            if moved := [n for n in old.names if n not in plan.key and n in plan.sides[1 - other].schema.names]:
                raise ForeignState(
                    f"column {moved[0]} was of the {SIDES[other]} side and is of the other one, and on= may need it in "
                    f"rows that came before; {_BESIDE}"
                )
    before = past_of(found) or {EVOLUTION: [], FOLLOWS: []}
    if len(before[EVOLUTION]) >= MOST_CHANGES:
        raise ForeignState(f"its columns have changed {len(before[EVOLUTION])} times, which is the most; {_BESIDE}")
    step = [None if was == side else was for was, side in zip(found["sides"], now["sides"], strict=True)]
    past = {EVOLUTION: [*before[EVOLUTION], [batch, step]], FOLLOWS: [*before[FOLLOWS], digest(found)]}
    both = list(zip(olds, [side.schema for side in plan.sides], strict=True))
    return JoinChange(
        past,
        [[name for name in new.names if name not in old.names] for old, new in both],
        [[name for name in old.names if name not in new.names] for old, new in both],
        [[f.name for f in old if f.name in new.names and new.field(f.name).type != f.type] for old, new in both],
    )


def _fixed(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of a definition that stay as they are."""
    parts = {name: value for name, value in definition.items() if name not in (*NOT_COMPARED, EVOLUTION, FOLLOWS)}
    parts["sides"] = [
        {name: value for name, value in side.items() if name not in ("schema", "identity")}
        for side in definition["sides"]
    ]
    return parts


def _columns(side: Mapping[str, Any]) -> pa.Schema:
    try:
        return stored_schema(side)
    except ValueError as error:
        raise ForeignState(f"{error}, so what is kept cannot be read any more; {_BESIDE}") from None
