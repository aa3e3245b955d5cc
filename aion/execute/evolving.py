"""What the driver finds out when a query starts with another definition than its state (docs/operate/restarts.md)."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from aion.base.time import format_instant
from aion.config import Policy
from aion.core.join.evolution import JoinChange, change_of, settled_join
from aion.core.join.plan import SIDES, JoinPlan
from aion.core.join.stored import evolved_join, past_of
from aion.core.query.evolution import Change, Version, change, finished, reached_us, same, settled
from aion.core.query.evolved import evolved
from aion.core.query.history import EVOLUTION, Evolution
from aion.core.query.plan import Plan
from aion.errors import ForeignState
from aion.execute.assembly import longest_bound_us
from state_backends.format.definitions import FOLLOWS, WORDS, changes, digest
from state_backends.versions.audit import StateFolder
from state_backends.versions.lineage import folder_of
from state_backends.versions.retention import batch_of

log = logging.getLogger(__name__)


class GoesOn(NamedTuple):
    """How the state of an operator goes on. ``definition``: that of the state from now on.

    ``past``: the part of it that says what it has been before, which tasks need, or None if it has never been another
    one. ``said``: what changes now, as sentences; empty: nothing does. ``columns``: those that the result gets now.
    """

    definition: dict[str, Any]
    past: dict[str, Any] | None
    said: list[str]
    columns: list[str]


@dataclass(frozen=True)
class State:
    """The state of an operator of a query. ``found``: what ``operator.json`` says of it."""

    place: str
    query: str
    operator: str
    checkpoint: str
    found: Mapping[str, Any]

    def newest(self, batch: int | None, definitions: Container[str]) -> list[Version]:
        """Returns the newest version of each shard up to a batch, those of the last batch first. What is later failed,
        or was undone when the query went back. What was undone may also have an earlier batch, but another definition
        than those with these digests. Raises StateError, StorageError.
        """
        with closing(StateFolder(self.place)) as folder:
            there = [shard for shard in folder.shards() if shard[0] == self.query]
            names = [f"{self.operator}/{folder_of(self.checkpoint)}", self.operator]
            own = next((some for name in names if (some := [s for s in there if s[1] == name])), [])
            found = [version for shard in own if (version := folder.newest(shard, batch, definitions)) is not None]
        found.sort(key=lambda version: -batch_of(version.token))
        return [Version(version.identity.definition, version.snapshot) for version in found]

    def oldest(self) -> list[Version] | None:
        """Returns the oldest versions that are kept of each shard, in all lineages, or None if one cannot be read.

        A copy of the checkpoint may not have taken the versions of the original yet.
        """
        with closing(StateFolder(self.place)) as folder:
            found = []
            for query, operator, shard in folder.shards():
                if query == self.query and operator.partition("/")[0] == self.operator:
                    versions = folder.oldest((query, operator, shard))
                    if versions is None:
                        return None
                    found += [Version(manifest.identity.definition, manifest.snapshot) for manifest in versions]
        return found


def windows_go_on(plan: Plan, policy: Policy, on_removed: str, kept: State, batch: int | None) -> GoesOn:
    """Returns how windows go on with their state. ``batch``: the last one that has ended.

    Raises ForeignState if they cannot, StateError, StorageError.
    """
    found = settled(kept.found["definition"], batch, partial(kept.newest, batch))
    now: Change | None = None
    evolution = Evolution.of(found) if EVOLUTION in found else None
    is_same = same(found, plan)
    finishes = evolution is not None and any(w.until_us is not None and not w.over for w in evolution.windows)
    if not is_same or finishes:
        versions = kept.newest(batch, {digest(found), *found.get(FOLLOWS, ())})
        snapshots = [version.snapshot for version in versions]
        over = finished(snapshots, found, longest_bound_us(plan, policy))
        if not is_same or over:
            at_us = max((us for s in snapshots if (us := reached_us(s)) is not None), default=None)
            try:
                now = change(
                    found, plan, at_us=at_us, batch=batch, finished=over, on_removed=on_removed, oldest=kept.oldest()
                )
            except ForeignState as error:
                raise _refused(kept, found, plan.definition, error) from None
            evolution = now.evolution
    had = {name for name, _ in found.get(WORDS, {}).get("aggregates", [])}
    return GoesOn(
        plan.definition if evolution is None else evolved(plan, evolution).definition,
        None if evolution is None else evolution.definition,
        [] if now is None else sentences(now),
        [name for name in plan.outputs.names if name not in had],
    )


def join_goes_on(plan: JoinPlan, kept: State, batch: int | None) -> GoesOn:
    """The same for a join."""
    last = -1 if batch is None else batch
    found = settled_join(kept.found["definition"], last)
    try:
        now = change_of(found, plan, last)
    except ForeignState as error:
        raise _refused(kept, found, plan.definition, error) from None
    past = past_of(found) if now is None else now.past
    definition = evolved_join(plan, past).definition
    if now is None:
        return GoesOn(definition, past, [], [])
    return GoesOn(definition, past, _said_of_join(now), [name for names in now.added for name in names])


def _refused(kept: State, found: Mapping[str, Any], now: Mapping[str, Any], error: ForeignState) -> ForeignState:
    return ForeignState(
        f"operator {kept.operator!r} was started with another definition: {'; '.join(changes(found, now))}. It cannot "
        f"go on with this one: {error}"
    )


def sentences(found: Change) -> list[str]:
    """Says what a change does."""
    said = []
    at = "at once" if found.at_us is None else f"with windows from {format_instant(found.at_us)} on"
    for name in found.added:
        (since_us,) = (kept.since_us for kept in found.evolution.windows if kept.is_current and kept.name == name)
        begin = at if since_us is None else f"with the one at {format_instant(since_us)}"
        said.append(f"windows {name!r} begin {begin}")
    if found.columns:
        said.append(f"columns {_listed(found.columns)} begin {at}, and are null in earlier ones")
    if changed := [name for name in found.removed if name in found.added and not found.drops]:
        said.append(f"windows {_listed(changed)} of before begin until then, and finish")
    if gone := [name for name in found.removed if name not in changed]:
        ends = "and what they have goes now" if found.drops else "and those that have begun finish"
        said.append(f"no windows of {_listed(gone)} begin any more, {ends}")
    if found.removed_columns:
        said.append(f"columns {_listed(found.removed_columns)} are gone")
    return said or ["what is kept is read as it is asked for now"]


def _said_of_join(found: JoinChange) -> list[str]:
    said = []
    for side, added, removed, wider in zip(SIDES, found.added, found.removed, found.wider, strict=True):
        if added:
            said.append(f"columns {_listed(added)} of the {side} side begin, and are null in rows that came before")
        if removed:
            said.append(f"columns {_listed(removed)} of the {side} side are gone")
        if wider:
            said.append(f"columns {_listed(wider)} of the {side} side have a wider type")
    return said or ["what is kept is read as it is asked for now"]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
