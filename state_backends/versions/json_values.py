"""JSON of snapshots, requests and answers. Pure."""

from __future__ import annotations

from typing import Any

import orjson


def dumps(value: Any) -> bytes:
    """Encodes plain values. An integer that does not fit into 64 bits becomes a double.

    Aion's own counts never become that large. But a commit that fails because of a number
    would fail again with each attempt. So no number in a snapshot may make the encoder fail.
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


_FURTHEST = 2**1000  # the largest double is a little larger
