"""Names that a store can hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from aion.errors import SchemaError


def check_names(names: Iterable[str], *, case: bool, longest: int | None = None, what: str = "column") -> None:
    """Raises SchemaError for names that a store would cut, or take for each other.

    ``case``: whether two names may differ only in case. ``longest``: how many bytes a name has at most.
    """
    seen = dict[str, str]()
    for name in names:
        size = len(name.encode())
        if not name or (longest is not None and size > longest):
            raise SchemaError(f"{what} {name!r} has {size} bytes; rename it: a name has 1 to {longest or 'any number'}")
        other = seen.setdefault(name if case else name.lower(), name)
        if other is not name:
            raise SchemaError(f"{what}s {other!r} and {name!r} are one name in this database or lake; rename one")
