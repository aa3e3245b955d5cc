"""Times in tests are small numbers of microseconds, and a duration without a unit is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import overload


@overload
def us(microseconds: int) -> timedelta: ...
@overload
def us(microseconds: None) -> None: ...
def us(microseconds: int | None) -> timedelta | None:
    """Returns the number of microseconds as a duration. None stays None."""
    return None if microseconds is None else timedelta(microseconds=microseconds)
