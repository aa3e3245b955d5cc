"""Marks say which query wrote a table, and up to which batch. Pure.

Each batch is one transaction, and the mark is in it. So a batch that Spark runs again is recognised. A mark also shows
when a table and a query do not belong together: after a copy of the checkpoint, a new query, or a backup.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

from aion.errors import SinkError

UNMARKED = "unmarked"


class History(NamedTuple):
    """What the batches of one query have in common: the query's id, and the location of its checkpoint.

    A copied checkpoint has the same id at another location.
    """

    query: str
    checkpoint: str

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"query {self.query}" + (f" (checkpoint {self.checkpoint})" if self.checkpoint else "")


@dataclass(frozen=True)
class Mark:
    """The last batch that a table has. ``idle``: how many batches before it no sink has seen."""

    history: History
    batch: int
    idle: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        """What ``adopt=`` takes."""
        return f"{self.history.digest}:{self.batch}"


def is_new(table: str, found: Mark | None, empty: bool, now: Mark, adopt: str | None) -> bool:
    """Returns whether a batch must be written. False: the table has it.

    ``found``: the mark of the table. ``empty``: whether the table has no rows. ``adopt``: the mark with which a table
    is taken over. Raises SinkError if the batch does not follow the one that the table has.
    """
    if empty:
        return True  # Nothing is there that could be wrong.
    if found == now:
        return False
    if (
        found is not None
        and found.history == now.history
        and now.batch in (found.batch + 1, found.batch + 1 + now.idle)
    ):
        return True
    if adopt == (UNMARKED if found is None else found.name):
        return True
    raise SinkError(_refusal(table, found, now))


def _refusal(table: str, found: Mark | None, now: Mark) -> str:
    name = UNMARKED if found is None else found.name
    return (
        f"{_reason(table, found, now)}; pass adopt={name!r} to go on with the rows that are there, or empty the table\n"
        "Rows that come again replace the old ones. Old rows of other windows stay as they are."
    )


def _reason(table: str, found: Mark | None, now: Mark) -> str:
    if found is None:
        return f"table {table!r} has rows, and no record of what wrote them; this is batch {now.batch} of {now.history}"
    has = f"table {table!r} has batch {found.batch}"
    if found.history.query != now.history.query:
        return f"{has} of another query, {found.history}; this is batch {now.batch} of {now.history}"
    if found.history != now.history:
        return (
            f"{has} of the same query from another checkpoint location, {found.history.checkpoint}; this is batch "
            f"{now.batch} from {now.history.checkpoint}"
        )
    if now.batch < found.batch:
        return f"{has} of this query already, and this is batch {now.batch}: the checkpoint went back"
    return f"{has} of this query, and this is batch {now.batch}: it lacks those between"
