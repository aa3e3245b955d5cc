"""Rows for the windows of a key in which no event lies: what a definition asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from aion.base.time import format_duration
from aion.core.timing import Duration, positive_us
from aion.errors import WindowError

Value: TypeAlias = Literal["zero", "null"]


@dataclass(frozen=True, slots=True)
class Fill:
    """A key has a row for each of its windows, also for those without events.

    ``value``: what such a row says: with ``"zero"``, counts and sums are 0 and other results null; with ``"null"``, all
    are null. ``for_us``: how long a key without events goes on having rows, in µs from the end of the last window with
    an event.
    """

    value: Value
    for_us: int

    @classmethod
    def of(cls, what: str, value: Value | None, for_: Duration | None) -> Fill | None:
        """Checks the arguments of a definition. ``what``: its name, for errors. Raises WindowError."""
        if value is None and for_ is None:
            return None
        if value is None or for_ is None:
            raise WindowError(
                f"{what}: fill={value!r} and fill_for={for_!r}; give both, e.g. fill='zero', fill_for='1 day': a key "
                "that does not come again has rows for that time, and not for ever"
            )
        if value not in get_args(Value):
            raise WindowError(f"{what}: fill of {value!r} is not known; give 'zero' or 'null'")
        return cls(value, positive_us(for_, f"{what}: fill_for"))

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Fill | None:
        """Returns it from what is stored of a definition."""
        return cls(spec["fill"], spec["fill_for_us"]) if "fill" in spec else None

    def spec(self) -> dict[str, int | str]:
        """Returns what identifies it after a restart."""
        return {"fill": self.value, "fill_for_us": self.for_us}

    def __str__(self) -> str:
        return f"{self.value} for {format_duration(self.for_us)}"
