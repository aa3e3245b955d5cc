"""A join from what is stored of its definition, and its kept rows: to look into state. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from aion.base.arrow_types import arrow_type
from aion.core.join.plan import JoinPlan, Side


def stored_join(definition: Mapping[str, Any]) -> JoinPlan:
    """Returns the join of a stored definition. Its condition and its bounds are not stored."""
    sides = [
        Side(
            pa.schema([pa.field(name, arrow_type(type_)) for name, type_ in side["schema"]]),
            side["time"],
            tuple(side["identity"]),
            side["unique"],
            None,
            side.get("before"),
        )
        for side in definition["sides"]
    ]
    first_us, last_us = definition["within_us"]
    return JoinPlan(
        sides[0],
        sides[1],
        tuple(definition["key"]),
        first_us,
        last_us,
        definition["how"],
        None,
        definition["emit"],
    )
