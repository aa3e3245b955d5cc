"""How the definitions of an operator's state are compared. A later definition names those that it follows. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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


_NOTHING = "none"


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Says what differs between two definitions, in the user's words if both have them."""
    if follows(now, was):
        return []
    compared = [what for what in dict.fromkeys([*was, *now]) if what not in NOT_COMPARED]
    changed = [what for what in compared if was.get(what) != now.get(what)]
    if not changed:
        return []
    words = was.get(WORDS, {}), now.get(WORDS, {})
    if all(words):
        lists = [
            (what, *([tuple(pair) for pair in side.get(what, ())] for side in words))
            for what in dict.fromkeys([*words[0], *words[1]])
        ]
        if said := [f"{what}: was {_named(a, b)}; is {_named(b, a)}" for what, a, b in lists if a != b]:
            return said
    return [f"{what}: was {was.get(what, _NOTHING)}; is {now.get(what, _NOTHING)}" for what in changed]


def _named(pairs: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]) -> str:
    """Lists names. Says what a name stands for if it stands for something else among the others."""
    meant = dict(others)
    shown = [f"{name} ({what})" if what and meant.get(name, what) != what else name for name, what in pairs]
    return ", ".join(shown) or _NOTHING
