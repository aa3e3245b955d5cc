"""``aion inspect --lineages`` and ``--forget``."""

from __future__ import annotations

from contextlib import closing

from aion.config.values import about_bytes
from aion.errors import ConfigError, StorageError
from aion.tools.inspect import tables
from aion.tools.inspect.state import nothing_in
from state_backends.versions.audit import Lineage, StateFolder


def show_lineages(state_dir: str) -> None:
    """Prints the lineages in a state folder, and whether their checkpoints exist."""
    console = tables.console()
    with closing(StateFolder(state_dir)) as folder:
        found = folder.lineages()
        if not found:
            raise nothing_in(folder)
    for lineage in found:
        where = lineage.checkpoint or "at an unknown place"
        line = (
            f"{lineage.query}/{lineage.name}: up to batch {lineage.newest:,}, {about_bytes(lineage.bytes)}, for the "
            f"checkpoint {where} ({_state(lineage)})"
        )
        console.print(line, soft_wrap=True)
    console.print(
        "If the checkpoint of a lineage is gone, free its state with --forget LINEAGE, or that of all such lineages "
        "with --forget --gone. Files that several lineages of a folder share take space only once.",
        soft_wrap=True,
    )


ALL_GONE = "--gone"
"""Instead of a name: all lineages whose checkpoints are gone."""


def _state(lineage: Lineage) -> str:
    try:
        return "exists" if lineage.has_checkpoint() else "gone"
    except StorageError:
        return "unknown"


def forget_lineage(state_dir: str, name: str) -> None:
    """Deletes the versions of a lineage: ``name``, or ``query/name`` if several queries have a lineage of that name.

    Raises ConfigError if there is no such lineage or if its checkpoint exists. Raises StorageError if it is not
    possible to find out.
    """
    with closing(StateFolder(state_dir)) as folder:
        found = [lineage for lineage in folder.lineages() if name in (lineage.name, f"{lineage.query}/{lineage.name}")]
        if not found:
            raise ConfigError(f"--forget: there is no lineage {name!r}; see --lineages")
        if len(found) > 1:
            names = ", ".join(f"{lineage.query}/{lineage.name}" for lineage in found)
            raise ConfigError(f"--forget: several lineages have the name {name!r}; write one of {names}")
        (lineage,) = found
        if lineage.has_checkpoint():
            raise ConfigError(
                f"--forget: the checkpoint of {name}, {lineage.checkpoint}, exists, and a query that starts from it "
                "needs these versions; delete the checkpoint first"
            )
        _forget(folder, lineage)


def forget_gone(state_dir: str) -> None:
    """Deletes the versions of all lineages whose checkpoints are gone. Those that cannot be looked for stay."""
    console = tables.console()
    with closing(StateFolder(state_dir)) as folder:
        states = [(lineage, _state(lineage)) for lineage in folder.lineages()]
        if not states:
            raise nothing_in(folder)
        for lineage, state in states:
            if state == "gone":
                _forget(folder, lineage)
            elif state == "unknown":
                console.print(f"kept: {lineage.query}/{lineage.name}: its checkpoint cannot be looked for from here")
        if not any(state == "gone" for _, state in states):
            console.print("no checkpoint is gone, so nothing was deleted")


def _forget(folder: StateFolder, lineage: Lineage) -> None:
    folder.forget(lineage)
    tables.console().print(f"deleted: {lineage.query}/{lineage.name}, {about_bytes(lineage.bytes)}")
