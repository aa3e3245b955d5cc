"""What ``aion inspect --lineages`` and ``--forget`` show and do."""

from __future__ import annotations

from contextlib import closing

from rich.console import Console

from aion.config.values import about_bytes
from aion.errors import ConfigError, StorageError
from state_backends.versions.audit import Lineage, StateFolder


def show_lineages(state_dir: str) -> None:
    """Prints the lineages in a state folder, and whether their checkpoints are there."""
    console = Console(highlight=False)
    with closing(StateFolder(state_dir)) as folder:
        found = folder.lineages()
    if not found:
        console.print(f"{state_dir}: no state of any query")
        return
    for lineage in found:
        where = lineage.checkpoint or "a place that nobody wrote down"
        line = (
            f"{lineage.query}/{lineage.name}: up to batch {lineage.newest:,}, {about_bytes(lineage.bytes)}, for the "
            f"checkpoint {where} ({_state(lineage)})"
        )
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        "What a lineage still holds whose checkpoint is gone is freed with --forget LINEAGE. In a folder, files that "
        "lineages have in common take room once.",
        soft_wrap=True,
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
