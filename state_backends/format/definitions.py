"""How the definitions of an operator's state are compared. A later definition names those that it follows. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

WORDS = "words"
"""What the user wrote, as names with what they stand for."""
BEFORE = "before"
"""The definition before this one, and the last batch that had it."""
COMPUTED = "computed"
"""How the result is computed from what is stored, for those who look into the state without the user's program."""
NOT_COMPARED = (WORDS, BEFORE, COMPUTED)
"""The parts of a definition that are not compared."""
FOLLOWS = "follows"
"""The part that names the earlier definitions whose state this one goes on with, by their digests."""


def digest(definition: Mapping[str, Any]) -> str:
    """Returns what a definition is named by. Equal ones have equal names."""
    compared = {name: value for name, value in definition.items() if name not in NOT_COMPARED}
    return hashlib.sha256(orjson.dumps(compared, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]


def follows(definition: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """Returns whether a definition goes on with the state of an earlier one."""
    return bool(definition.get(FOLLOWS)) and digest(earlier) in definition[FOLLOWS]
