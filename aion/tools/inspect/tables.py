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


def table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """Returns an empty table. ``names``: its columns. ``numbers``: those of them that are aligned to the right."""
    made = Table(title=title, title_justify="left")
    for name in names:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made
