"""To which version a table of a lake goes back. Pure.

A lake keeps the earlier versions of a table. Each commit of a sink says which batch it has written, and which one the
table had before. So the commits lead from batch to batch, as the records of ``undo=`` do in a database. The table goes
back to the version before the first commit that must be undone. What others changed up to then stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from aion.sinks.marks import Content, Goal, History, Mark, follows, must_go_back

QUERY, CHECKPOINT, BATCH, LAST = "aion.query", "aion.checkpoint", "aion.batch", "aion.last"
"""What a commit says of the batch that it writes. LAST: the batch that the table had before, or NOTHING. It is missing
if the batch does not follow what the table had."""
NOTHING = "nothing"


class Commit(NamedTuple):
    """A commit to a table, seen by a query.

    ``before``: the version that the table had before it. ``what``: its kind, for errors. ``batch``: the batch of the
    query that it wrote, or None if somebody else made it. ``last``: what it says of the batch before. ``changes``:
    whether the table has other rows or other columns afterwards; maintenance only writes the same rows anew.
    """

    before: int | None
    what: str
    batch: int | None = None
    last: str | None = None
    changes: bool = True


class Base(NamedTuple):
    """What a table goes back to: a version, or no rows at all. Without either, it has the right rows already."""

    version: int | None = None
    empty: bool = False


def said(mark: Mark, last: str | None) -> dict[str, str]:
    """Returns what a commit says of its batch. ``last``: see :func:`last_of`."""
    found = {QUERY: mark.history.query, CHECKPOINT: mark.history.checkpoint, BATCH: str(mark.batch)}
    return found if last is None else found | {LAST: last}


def batch_of(said: Mapping[str, str], history: History) -> int | None:
    """Returns the batch of a query that a commit wrote. It is None if another program or an older Aion did."""
    ours = (said.get(QUERY), said.get(CHECKPOINT)) == history
    return int(said[BATCH]) if ours and BATCH in said else None


def last_of(before: Mark | None, content: Content, now: Mark) -> str | None:
    """Returns what a commit says of the batch before. ``before`` and ``content``: what the table has. The result
    is None if the table was taken over, because then it does not have what the query wrote before this batch.
    """
    if content is not Content.ROWS and (before is None or before.history != now.history):
        return NOTHING
    if before is not None and not must_go_back(before, now) and (before == now or follows(before, now)):
        return str(before.batch)
    return None


def base_of(table: str, commits: Iterable[Commit], found: Mark, goal: Goal) -> Base | str:
    """Returns what a table must go back to, or as a sentence why it cannot.

    ``commits``: the newest first. ``found``: the mark of the table, which has batches after ``goal``.
    """
    first: Commit | None = None
    oldest, others = found.batch, list[Commit]()
    for commit in commits:
        if commit.batch is None:
            others += [commit] if commit.changes else []
            continue
        if commit.batch <= goal.batch:
            break
        if others:
            return (
                f"{_cannot(table, found, goal)}, because another program has changed it since ({others[0].what}); "
                "restore the version of then with the tools of the lake, or write into an empty table"
            )
        if commit.last is None:
            return _too_far(table, found, goal, commit.batch)
        first = commit
        if commit.last == NOTHING:
            return Base(empty=True)
        # After an earlier rewind, the batch before is a later one.
        oldest = min(oldest, commit.batch, int(commit.last))
        if oldest <= goal.batch:
            break
    else:
        if first is not None or others:
            return _too_far(table, found, goal, oldest)
    if first is None:
        return Base()
    return Base(first.before) if first.before is not None else _too_far(table, found, goal, oldest=first.batch or 0)


def gone(table: str, found: Mark, goal: Goal, what: str) -> str:
    """Returns that the version of then is not complete any more, as a sentence. ``what``: what is missing."""
    return (
        f"{_cannot(table, found, goal)}, because {what}; go back by fewer batches, or write into an empty table (files "
        "must be kept for longer than the query may go back)"
    )


def _cannot(table: str, found: Mark, goal: Goal) -> str:
    return f"Table {table!r} has batch {found.batch} and cannot go back to batch {goal.batch}"


def _too_far(table: str, found: Mark, goal: Goal, oldest: int) -> str:
    whither = "" if oldest == found.batch else f"; batch {oldest} is the oldest to which it can go"
    return f"{_cannot(table, found, goal)}, because the lake has no record of what it was before{whither}"
