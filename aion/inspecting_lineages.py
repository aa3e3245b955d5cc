"""What ``aion inspect --lineages`` and ``--forget`` show and do."""

from __future__ import annotations

from contextlib import closing

from rich.console import Console
from rich.table import Table

from aion.config.values import about_bytes
from aion.errors import ConfigError, StorageError
from state_backends.audit import Lineage, StateFolder


def show_lineages(state_dir: str) -> None:
    """Prints the lineages in a state folder, and whether their checkpoints are there."""
    console = Console(highlight=False)
    with closing(StateFolder(state_dir)) as folder:
        found = folder.lineages()
    if not found:
        console.print(f"{state_dir}: no state of any query")
        return
    table = Table("query", "lineage", "newest batch", "bytes", "checkpoint", "")
    for lineage in found:
        where = lineage.checkpoint or "not written down"
        table.add_row(
            lineage.query, lineage.name, f"{lineage.newest:,}", about_bytes(lineage.bytes), where, _state(lineage)
        )
    console.print(table)
    console.print(
        "What a lineage whose checkpoint is gone still holds is freed with --forget LINEAGE. "
        "Files that several lineages have in common are counted for each, and take room once (not in an object store)."
    )


def _state(lineage: Lineage) -> str:
    try:
        return "is there" if lineage.has_checkpoint() else "gone"
    except StorageError:
        return "unknown"


def forget_lineage(state_dir: str, name: str) -> None:
    """Deletes the versions of a lineage: ``name``, or ``query/name`` where several queries have one of that name.

    Raises ConfigError if there is no such lineage, or if its checkpoint is there; StorageError where nobody can tell.
    """
    with closing(StateFolder(state_dir)) as folder:
        found = [one for one in folder.lineages() if name in (one.name, f"{one.query}/{one.name}")]
        if len(found) != 1:
            several = ", ".join(f"{one.query}/{one.name}" for one in found) or "there is none of that name"
            raise ConfigError(f"--forget: {name!r} is not one lineage: {several}; see --lineages")
        (lineage,) = found
        if lineage.has_checkpoint():
            raise ConfigError(
                f"--forget: the checkpoint of {name}, {lineage.checkpoint}, is there, and a query that is started from "
                "it needs these versions; delete it first"
            )
        folder.forget(lineage)
    Console(highlight=False).print(f"forgotten: {lineage.query}/{lineage.name}, {about_bytes(lineage.bytes)}")
