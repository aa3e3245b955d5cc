"""Marks say which query wrote a table, up to which batch, and what this batch wrote. Pure.

Each batch is one transaction, and the mark is in it. So a batch that Spark runs again is recognised: with the same rows
it is not written again, and with others (the program was corrected) it is. A mark also shows when a table and a query
do not belong together: after a copy of the checkpoint, a new query, or a backup; and when a table has lost its rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from aion.errors import SinkError

UNMARKED = "unmarked"
EMPTY = "empty"
"""For ``adopt=``: somebody takes rows away on purpose, so a table may have lost all of them at any time."""
NOTHING = "0" * 12
"""The digest of a batch that writes nothing."""


def digest_of(*texts: str | bytes) -> str:
    """Returns 48 bits that tell texts apart, as twelve hexadecimal digits. They are never NOTHING."""
    found = hashlib.sha256(b"\n".join(t.encode() if isinstance(t, str) else t for t in texts)).hexdigest()[:12]
    return found if found != NOTHING else "1" * 12


class History(NamedTuple):
    """What the batches of one query have in common: the query's id, and the location of its checkpoint.

    A copied checkpoint has the same id at another location.
    """

    query: str
    checkpoint: str

    @property
    def digest(self) -> str:
        return digest_of(*self)

    def __str__(self) -> str:
        return f"query {self.query}" + (f" (checkpoint {self.checkpoint})" if self.checkpoint else "")


class Goal(NamedTuple):
    """Where a query was set back to: the end of ``batch``. ``rewind``: twelve hexadecimal digits that name the order,
    and that no other has.
    """

    batch: int
    rewind: str


@dataclass(frozen=True)
class Mark:
    """The last batch that a table has.

    ``idle``: how many batches before it no sink has seen. ``run``: a digest of the run of the query that wrote or saw
    it last. ``digest``: that of what it wrote. ``filled``: whether the table had rows after it. These three are None
    where they are not known, as in the marks of earlier versions. ``rewound``: the name of the last rewind that the
    table has followed. ``goal``: where the query of a batch that comes was set back to, if it was; no table keeps it.
    """

    history: History
    batch: int
    idle: int = field(default=0, compare=False)
    run: str | None = field(default=None, compare=False)
    digest: str | None = field(default=None, compare=False)
    filled: bool | None = field(default=None, compare=False)
    rewound: str | None = field(default=None, compare=False)
    goal: Goal | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """What ``adopt=`` takes."""
        return f"{self.history.digest}:{self.batch}"


def is_beyond(found: Mark | None, history: History, goal: Goal) -> bool:
    """Returns whether a table has batches of a query that were undone when the query was set back."""
    if found is None or found.history != history:
        return False
    return found.batch > goal.batch and found.rewound != goal.rewind


def must_go_back(found: Mark | None, now: Mark) -> bool:
    """Returns whether a table must go back before a batch is written. ``found``: its mark. ``now``: the batch's."""
    return now.goal is not None and now.batch > now.goal.batch and is_beyond(found, now.history, now.goal)


def follows(found: Mark | None, now: Mark) -> bool:
    """Returns whether a batch is the next one after that of a mark."""
    return (
        found is not None
        and found.history == now.history
        and now.batch in (found.batch + 1, found.batch + 1 + now.idle)
    )


class Content(Enum):
    """What a table has before a batch."""

    MISSING = "does not exist any more"
    EMPTY = "has no rows any more"
    ROWS = "has rows"


def is_new(
    table: str, found: Mark | None, content: Content, now: Mark, adopt: str | None, stays: str | None = None
) -> bool:
    """Returns whether a batch must be written. False: the table has it.

    ``found``: the mark of the table. ``now``: that of the batch. ``adopt``: the mark with which a table is taken over.
    ``stays``: why the table could not go back with the query.
    Raises SinkError if the batch does not follow the one that the table has, if the table lost its rows, or if this run
    has written the batch already, with other rows.
    """
    if found is None and content is not Content.ROWS:
        return True  # Nothing is there that could be wrong.
    adopted = adopt == (UNMARKED if found is None else found.name)
    if found is not None and (content is Content.MISSING or (content is Content.EMPTY and found.filled)):
        if adopted or now.batch == 0:  # With the first batch, all rows come again.
            return True
        if content is Content.MISSING or adopt != EMPTY:
            raise SinkError(_loss(table, found, content, now))
    if not must_go_back(found, now):
        if found == now:
            return _is_corrected(table, found, now)
        if follows(found, now):
            return True
    if adopted or (content is Content.EMPTY and now.batch == 0):
        return True
    raise SinkError(_refusal(table, found, now, stays))


def begins_late(table: str, found: Mark | None, content: Content, now: Mark) -> str | None:
    """Returns a warning if a table begins with a batch that is not the first one of its query."""
    if found is not None or content is Content.ROWS or now.batch == 0:
        return None
    return (
        f"table {table!r} has no rows and no mark, and begins with batch {now.batch} of {now.history}: what earlier "
        "batches said about windows is not in it. A query with a new checkpoint writes all of it"
    )


def seen_again(found: Mark, now: Mark) -> Mark | None:
    """Returns the mark for a batch that the table has and another run has brought again, or None if it needs none."""
    if found.run == now.run:
        return None
    digest = found.digest if found.digest is not None else now.digest
    return replace(now, digest=digest, filled=found.filled, rewound=found.rewound)


def written(now: Mark, before: Mark | None, filled: bool) -> Mark:
    """Returns the mark that a table gets with a batch. It names the last rewind of the query, even if the table had
    nothing to take back: what it gets from now on is after it.
    """
    last = None if before is None or before.history != now.history else before.rewound
    after = now.goal is not None and now.batch > now.goal.batch
    return replace(now, filled=filled, rewound=now.goal.rewind if now.goal is not None and after else last)


def _is_corrected(table: str, found: Mark, now: Mark) -> bool:
    """Returns whether a batch comes again with other rows than those that were written."""
    if found.digest in (None, now.digest) or now.digest == NOTHING:
        return False
    if now.run is None or found.run != now.run or found.digest == NOTHING:
        return True
    raise SinkError(
        f"table {table!r} got batch {now.batch} twice in one run, with other rows: those of the first call are there, "
        "and these are not; call the sink once for a batch, with all rows (batch.where(a | b)), or write to two tables"
    )


def _loss(table: str, found: Mark, content: Content, now: Mark) -> str:
    meant = "" if content is Content.MISSING else f", or adopt={EMPTY!r} if rows are taken away on purpose"
    return (
        f"table {table!r} {content.value}, and had batch {found.batch} of {found.history}; restore it, or start a "
        f"query with a new checkpoint that reads everything again, or pass adopt={found.name!r} to go on without them"
        f"{meant}\n"
        f"This is batch {now.batch} of {now.history}. What earlier batches said about windows does not come again."
    )


def _refusal(table: str, found: Mark | None, now: Mark, stays: str | None) -> str:
    name = UNMARKED if found is None else found.name
    why = f". {stays}" if stays is not None else ""
    return (
        f"{_reason(table, found, now)}{why}; pass adopt={name!r} to go on with the rows that are there, or empty the "
        "table and start a query with a new checkpoint\n"
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
    if now.batch < found.batch or must_go_back(found, now):
        return f"{has} of this query already, and this is batch {now.batch}: the checkpoint went back"
    return f"{has} of this query, and this is batch {now.batch}: it lacks those between"
