"""A join from what is stored of its definition: to look into state, and to go on with other columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from aion.base.arrow_types import arrow_type
from aion.core.join.plan import JoinPlan, Side
from aion.core.query.history import EVOLUTION
from state_backends.format.definitions import FOLLOWS


def stored_join(definition: Mapping[str, Any]) -> JoinPlan:
    """Returns the join of a stored definition. Its condition and its bounds are not stored."""
    sides = [
        Side(
            stored_schema(side),
            side["time"],
            tuple(side["identity"]),
            side["unique"],
            None,
            side.get("before"),
        )
        for side in definition["sides"]
    ]
    first_us, last_us = definition["within_us"]
    plan = JoinPlan(
        sides[0],
        sides[1],
        tuple(definition["key"]),
        first_us,
        last_us,
        definition["how"],
        None,
        definition["emit"],
    )
    return evolved_join(plan, past_of(definition))


def stored_schema(side: Mapping[str, Any]) -> pa.Schema:
    """Returns the columns of a stored side. Raises ValueError for the name of a type that cannot be read."""
    return pa.schema([pa.field(name, arrow_type(type_)) for name, type_ in side["schema"]])


def past_of(definition: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the part of a stored definition that says what it has been before, or None if it has never changed."""
    return {name: definition[name] for name in (EVOLUTION, FOLLOWS)} if EVOLUTION in definition else None


def evolved_join(plan: JoinPlan, past: Mapping[str, Any] | None) -> JoinPlan:
    """Returns the plan with the columns that each side had before. ``past``: see :func:`past_of`."""
    if past is None:
        return plan
    left, right = (
        side._replace(earlier=tuple(stored_schema(was[n]) for _, was in past[EVOLUTION] if was[n] is not None))
        for n, side in enumerate(plan.sides)
    )
    return replace(plan, left=left, right=right, past=dict(past))
