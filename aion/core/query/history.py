"""What is stored of the definitions that a query has had (:mod:`aion.core.query.evolution`). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from aion.base.numbers import NEVER
from aion.core.slicing.grid import start_of
from aion.errors import ForeignState
from state_backends.format.definitions import BEFORE, FOLLOWS

EVOLUTION = "evolution"


class Kept(NamedTuple):
    """The definition of windows with one number. Its windows begin from ``since_us`` on and before ``until_us``.

    Either is None where there is no such limit. ``over``: it has no windows, and never will.
    """

    name: str
    spec: dict[str, Any]
    since_us: int | None = None
    until_us: int | None = None
    over: bool = False

    @property
    def is_current(self) -> bool:
        return self.until_us is None and not self.over


OVER = Kept("", {}, 0, 0, True)
"""In the place of a definition that is over, when no version needs to know what it was."""


class StoredColumns(NamedTuple):
    """What the blocks of one of the plans held: columns with the names of their types, and partials."""

    block: list[list[str]]
    partials: list[Any]

    def widths(self) -> list[int]:
        """Returns how many columns of blocks each partial has. Raises ForeignState if the names do not tell.

        A partial is stored as the name of its class, its columns, their types, and more. So a column of events that is
        called like a type, ``double`` for example, can be taken for one.
        """
        types = [type_ for _, type_ in self.block]
        own = types[len(types) - sum(name.startswith("p") for name, _ in self.block) :] if self.partials else []
        found = list(islice(_widths(self.partials, own), 2))
        if len(found) != 1:
            raise ForeignState(
                "aggregates: which columns of the state belong to which of them cannot be told, because a column of "
                "events is called like a type; start the query with a checkpoint of its own, and let this one run "
                "until it is not needed"
            )
        return found[0]


def _widths(partials: Sequence[list[Any]], types: Sequence[str]) -> Iterator[list[int]]:
    """Yields each way to share the columns among the partials, so that each one's types are in its description."""
    if not partials:
        if not types:
            yield []
        return
    first, *rest = partials
    for width in range(1, len(types) - len(rest) + 1):
        own = list(types[:width])
        if any(first[i : i + width] == own for i in range(1, len(first))):
            yield from ([width, *others] for others in _widths(rest, types[width:]))


class Step(NamedTuple):
    """What a definition made of blocks before it changed. ``windows``: those that had edges, by number."""

    windows: list[tuple[int, dict[str, Any]]]
    columns: list[StoredColumns]


class Layout(NamedTuple):
    """Blocks with numbers below ``below`` are as they were before a step. ``last_us``: the start of the last segment
    that had any. When all segments begin later, there is none left.
    """

    below: int
    step: int
    last_us: int


@dataclass(frozen=True)
class Evolution:
    """What a definition has become over all starts. JSON values.

    ``windows``: by number. ``since``: for partials that blocks have not had from the beginning, from when on windows
    have them; a pair each. ``steps``: the oldest first, without the first ``forgotten`` ones, which no version that is
    kept needs. ``keys``: the types that the key has had at first, by which its hashes in blocks are made. ``follows``:
    the digests of the definitions before that kept versions have. ``batch``: the last batch before the newest change,
    and ``before``: the definition of then, without what was before it.
    """

    windows: tuple[Kept, ...]
    since: tuple[tuple[Any, int], ...] = ()
    steps: tuple[Step, ...] = ()
    keys: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    batch: int | None = None
    before: dict[str, Any] | None = None
    forgotten: int = 0

    @property
    def changes(self) -> int:
        """How often the definition has changed. The steps have the numbers below."""
        return self.forgotten + len(self.steps)

    def step(self, number: int) -> Step:
        """Returns a step. Raises ForeignState if it is gone: no version that was kept needed it."""
        if number < self.forgotten:
            raise ForeignState(
                f"a version is from before change {number + 1} of the definition, and only changes from "
                f"{self.forgotten + 1} on are known: it is older than all that were kept when the query was changed "
                "last. Start the query with a new checkpoint, or from a version that is not as old"
            )
        return self.steps[number - self.forgotten]

    @property
    def finishing(self) -> set[int]:
        """The numbers of definitions whose windows finish, and of those that are over."""
        return {number for number, kept in enumerate(self.windows) if not kept.is_current}

    def to_json(self) -> dict[str, Any]:
        return {
            "windows": [list(kept) for kept in self.windows],
            "since": [list(pair) for pair in self.since],
            "keys": list(self.keys),
            "steps": [[step.windows, [list(each) for each in step.columns]] for step in self.steps],
            **({"gone": self.forgotten} if self.forgotten else {}),
        }

    @property
    def definition(self) -> dict[str, Any]:
        """Its part of the stored definition."""
        before = {"batch": self.batch, "definition": self.before}
        return {EVOLUTION: self.to_json(), FOLLOWS: list(self.follows), BEFORE: before}

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> Evolution:
        """Returns that of a stored definition. One that has never changed has windows only."""
        if EVOLUTION not in definition:
            return cls(tuple(Kept(name, spec) for name, spec in definition["windows"]))
        value, before = definition[EVOLUTION], definition[BEFORE]
        steps = [
            Step([(number, spec) for number, spec in windows], [StoredColumns(*each) for each in columns])
            for windows, columns in value["steps"]
        ]
        return cls(
            tuple(Kept(*kept) for kept in value["windows"]),
            tuple((spec, us) for spec, us in value["since"]),
            tuple(steps),
            tuple(value["keys"]),
            tuple(definition[FOLLOWS]),
            before["batch"],
            before["definition"],
            value.get("gone", 0),
        )

    def since_us(self, partials: Iterable[Any]) -> int | None:
        """Returns the beginning of the first windows that have all these partials, which are given by their specs.

        Returns None if all windows have them.
        """
        wanted = list(partials)
        found = [us for spec, us in self.since if spec in wanted]
        return max(found, default=None)


@dataclass(frozen=True)
class History:
    """What a plan knows of the definitions before it. ``plan``: which of the two plans it is for.

    ``limits``: by number, where windows of a definition begin (from, before). ``columns``: by result column, the first
    window that has it. ``keys``: the types of the key at first, if they are wider now. Of one shard: ``layouts``; and
    ``ends``, of segments that other windows made.
    """

    evolution: Evolution
    plan: int = 0
    limits: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    columns: Mapping[str, int] = field(default_factory=dict)
    keys: tuple[pa.DataType, ...] = ()
    layouts: tuple[Layout, ...] = ()
    ends: Mapping[int, int] = field(default_factory=dict)

    @property
    def definition(self) -> dict[str, Any]:
        """Its part of the stored definition."""
        return self.evolution.definition

    @property
    def is_cut_anew(self) -> bool:
        """Whether slices may be others than before, so that a segment may hold several that are not of one window."""
        return any(kept.since_us is not None or not kept.is_current for kept in self.evolution.windows)

    def step_of(self, seq: int) -> int | None:
        """Returns the first step after a block was made, or None if the block has the columns that blocks have now."""
        return next((layout.step for layout in self.layouts if seq < layout.below), None)

    def to_json(self, live: Collection[int]) -> dict[str, Any]:
        """Its part of a snapshot. ``live``: the segments with blocks."""
        ends = sorted((start, end) for start, end in self.ends.items() if start in live)
        first_us = min(map(start_of, live), default=NEVER + 1)
        layouts = [layout for layout in self.layouts if first_us <= layout.last_us]
        return {
            "steps": self.evolution.changes,
            "layouts": [[layout.below, layout.step] for layout in layouts],
            "lasts": [layout.last_us for layout in layouts],
            "ends": ends,
        }


def layouts_of(kept: Mapping[str, Any]) -> list[Layout]:
    """Returns the layouts of a snapshot. ``kept``: its part about the history. Older ones have no ``lasts``."""
    pairs = kept["layouts"]
    lasts = kept.get("lasts", [NEVER] * len(pairs))
    return [Layout(below, step, last_us) for (below, step), last_us in zip(pairs, lasts, strict=True)]
