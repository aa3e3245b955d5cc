"""JSON of snapshots, requests and answers: one encoder, which no number can stop. Pure."""

from __future__ import annotations

from typing import Any

import orjson


def dumps(value: Any) -> bytes:
    """JSON of plain values. An integer that 64 bits cannot hold is written as the double nearest to it.

    What Aion's own operator counts never gets there (``aion/core/numbers.py``). But a commit that fails for a number
    fails again with each attempt, so nothing that anybody puts into a snapshot may be able to make it.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_narrowed(value))


def _narrowed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _narrowed(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_narrowed(inner) for inner in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(min(max(value, -_FURTHEST), _FURTHEST))
    return value


_FURTHEST = 2**1000  # a double reaches a little further
