"""Tables whose cells are shown whole, however narrow the terminal is."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

WIDTH = 220
"""In this many characters, the widest table need not break its cells."""


def console() -> Console:
    """Returns a console for tables. What goes to a file or a pipe is as wide as it needs to be, unless COLUMNS is
    set.
    """
    found = Console(highlight=False, markup=False)  # the names and keys of users may look like markup
    if found.is_terminal or "COLUMNS" in os.environ:
        return found
    return Console(highlight=False, markup=False, width=WIDTH)


def called(folder: str, ids: Sequence[int]) -> str:
    """Returns what a shard is called: its number among the shards, which is that of its partition if the query has as
    many partitions. ``folder``: its name in the state folder, which has its id. ``ids``: those of all shards.
    """
    own = int(folder.removeprefix("shard-"))
    if own not in ids:
        return str(own)
    number = ids.index(own)
    return str(number) if number == own else f"{number} ({folder})"


def table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """Returns an empty table. ``names``: its columns. ``numbers``: those of them that are aligned to the right."""
    made = Table(title=title, title_justify="left")
    for name in names:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made
