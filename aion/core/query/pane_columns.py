"""What the columns of a result mean: which part of a pane each of them is. Pure.

Spark carries this in the metadata of columns, through selects and aliases, to the windows and sinks behind. So nobody
guesses a meaning from the place or the name of a column.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from aion.core.query.columns import DROPPED_COLUMNS, OLD, PANE_SEQ
from aion.core.query.plan import Plan
from aion.core.windows import Aligned, Session

MEANING = "aion.pane"
"""In the metadata of a column: which part of a pane it is, and what holds for all panes of the result, as JSON."""
START, END, KIND, NAME, SEQ = "window_start", "window_end", "kind", "window", PANE_SEQ
_KEY, _DROPPED, _OLD = "key ", "dropped ", "old "


class PanesSaid(NamedTuple):
    """What holds for all panes of an operator. ``identity``: the parts that identify a key and window.

    ``longest_us``: how long its windows are at most; None if that is not known. ``kept_us``: how long they are kept.
    ``emit``: what comes out of a window. ``single``: whether a pane has one row.
    """

    name: str
    identity: list[str]
    longest_us: int | None
    kept_us: int
    emit: str
    single: bool


def metadata_of(plan: Plan, name: str, kept_us: int) -> dict[str, dict[str, str]]:
    """Returns the metadata of the columns of a plan's result that have a part, by the column's name."""
    parts = {column: f"{_KEY}{number}" for number, column in enumerate(plan.key)}
    parts |= {column: column for column in (START, END, *((NAME,) if len(plan.windows) > 1 else ()))}
    said = PanesSaid(name, list(parts.values()), _longest_us(plan), kept_us, plan.emit, plan.apply is None)
    parts |= {NAME: NAME, KIND: KIND, SEQ: SEQ}
    parts |= {column: f"{_DROPPED}{column}" for column in DROPPED_COLUMNS}
    if plan.changes:
        parts |= {OLD + column: f"{_OLD}{column}" for column in plan.outputs.names}
    return {column: {MEANING: json.dumps([part, said])} for column, part in parts.items()}


class PaneColumns(NamedTuple):
    """The parts of panes that some columns are. ``columns``: the name of a column, by its part."""

    said: PanesSaid
    columns: Mapping[str, str]

    @classmethod
    def of(cls, fields: Iterable[tuple[str, Mapping[str, Any]]]) -> PaneColumns | None:
        """Finds them in names of columns with their metadata. Returns None if no column is a part of a pane."""
        said: PanesSaid | None = None
        columns: dict[str, str] = {}
        for name, metadata in fields:
            if MEANING in metadata:
                part, values = json.loads(metadata[MEANING])
                columns.setdefault(part, name)
                said = PanesSaid(*values)
        return None if said is None else cls(said, columns)

    def missing(self, *more: str) -> list[str]:
        """Returns what is missing, in words, of the parts that identify a pane and of ``more``."""
        return [described(part) for part in (*self.said.identity, *more) if part not in self.columns]

    @property
    def keys(self) -> list[str]:
        """The key columns, in the order of the operator's key."""
        return [self.columns[part] for part in self.said.identity if is_key(part) and part in self.columns]

    @property
    def dropped(self) -> list[str]:
        """The columns that only dropped events have."""
        return [name for part, name in self.columns.items() if part.startswith(_DROPPED)]

    @property
    def besides(self) -> set[str]:
        """The columns that do not belong to the newest pane: those for dropped events, old values, and the number."""
        return {name for part, name in self.columns.items() if part.startswith((_DROPPED, _OLD)) or part == SEQ}


def with_metadata(schema: pa.Schema, metadata: Mapping[str, Mapping[str, str]]) -> pa.Schema:
    """Returns a schema whose fields have the metadata of :func:`metadata_of`."""
    return pa.schema([field.with_metadata(metadata.get(field.name, {})) for field in schema])


def metadata_of_field(field: pa.Field) -> dict[str, str]:
    """Returns the metadata of a field as texts."""
    return {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}


def is_key(part: str) -> bool:
    """Returns whether a part is a column of the key."""
    return part.startswith(_KEY)


def described(part: str) -> str:
    """Returns a part in words."""
    return f"column {part.removeprefix(_KEY)} of the key" if is_key(part) else part


def _longest_us(plan: Plan) -> int | None:
    longest = 0
    for window in plan.windows.values():
        if isinstance(window, Session):
            length_us = window.max_duration_us
        else:
            length_us = window.reach_us if isinstance(window, Aligned) else None
        if length_us is None:
            return None
        longest = max(longest, length_us)
    return longest
