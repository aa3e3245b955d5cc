"""What the driver finds out when a query starts with another definition than its state (docs/operate/restarts.md)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from aion.base.time import format_instant
from aion.config import policy_from_text
from aion.core.query.evolution import Change, Version, change, finished, reached_us, same, settled
from aion.core.query.evolved import evolved
from aion.core.query.history import EVOLUTION, Evolution
from aion.core.query.plan import Plan
from aion.errors import ForeignState, StateError
from aion.execute.assembly import longest_bound_us
from state_backends.versions.audit import StateFolder
from state_backends.versions.lineage import folder_of
from state_backends.versions.manifest import changes

log = logging.getLogger(__name__)


class GoesOn:
    """How the state of an operator goes on. ``found``: what ``operator.json`` says. ``batch``: the last one that ended.

    ``definition``: that of the state from now on. ``evolution``: None if the definition has never changed. ``change``:
    None if it does not change now. Raises ForeignState, StateError, StorageError.
    """

    def __init__(self, kept: State, plan: Plan, bound_us: int, batch: int | None, on_removed: str) -> None:
        self.found = settled(kept.found["definition"], batch)
        self.change: Change | None = None
        self.evolution = Evolution.of(self.found) if EVOLUTION in self.found else None
        is_same = same(self.found, plan)
        finishes = self.evolution is not None and any(
            w.until_us is not None and not w.over for w in self.evolution.windows
        )
        if not is_same or finishes:
            snapshots = kept.snapshots()
            over = finished(snapshots, self.found, bound_us)
            if not is_same or over:
                reached = [us for s in snapshots if (us := reached_us(s)) is not None]
                self.change = self._changed(kept, plan, max(reached, default=None), batch, over, on_removed)
                self.evolution = self.change.evolution
        self.definition = plan.definition if self.evolution is None else evolved(plan, self.evolution).definition

    def _changed(
        self, kept: State, plan: Plan, at_us: int | None, batch: int | None, over: set[int], on_removed: str
    ) -> Change:
        try:
            return change(
                self.found,
                plan,
                at_us=at_us,
                batch=batch,
                finished=over,
                on_removed=on_removed,
                oldest=kept.oldest(),
            )
        except ForeignState as error:
            differ = "; ".join(changes(self.found, plan.definition))
            raise ForeignState(
                f"operator {kept.operator!r} was started with another definition: {differ}. It cannot go on with this "
                f"one: {error}"
            ) from None


@dataclass(frozen=True)
class State:
    """The state of an operator of a query. ``found``: what ``operator.json`` says of it."""

    place: str
    query: str
    operator: str
    checkpoint: str
    found: Mapping[str, Any]

    def snapshots(self) -> list[Mapping[str, Any]]:
        """Returns the newest snapshot of each shard. Raises StateError, StorageError."""
        with closing(StateFolder(self.place)) as folder:
            there = [shard for shard in folder.shards() if shard[0] == self.query]
            names = [f"{self.operator}/{folder_of(self.checkpoint)}", self.operator]
            own = next((some for name in names if (some := [s for s in there if s[1] == name])), [])
            snapshots: list[Mapping[str, Any]] = []
            for shard in own:
                newest = folder.newest(shard)
                if newest is not None:
                    snapshots.append(newest.snapshot)
        if not snapshots:
            raise StateError(f"{self.place}: operator {self.operator!r} has no version that can be read")
        return snapshots

    def oldest(self) -> list[Version] | None:
        """Returns the oldest versions that are kept of each shard, in all lineages. None: one cannot be read.

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


def bound_of(plan: Plan, policy: str) -> int:
    """Returns how long a window is kept at most. ``policy``: as text."""
    return longest_bound_us(plan, policy_from_text(policy))


def sentences(found: Change) -> list[str]:
    """Says what a change does."""
    said = []
    at = "at once" if found.at_us is None else f"with windows from {format_instant(found.at_us)} on"
    if found.added:
        said.append(f"windows {_listed(found.added)} begin {at}")
    if found.columns:
        said.append(f"columns {_listed(found.columns)} begin {at}, and are null in earlier ones")
    if found.removed:
        ends = "and what they have goes now" if found.drops else "and those that have begun finish"
        said.append(f"no windows of {_listed(found.removed)} begin any more, {ends}")
    if found.gone_columns:
        said.append(f"columns {_listed(found.gone_columns)} are gone")
    return said or ["what is kept is read as it is asked for now"]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
