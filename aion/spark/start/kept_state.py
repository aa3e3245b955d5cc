"""The operators of a query that starts, and a look at the state that they have already."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import orjson

from aion.core.query.sink_notes import Note, lacking
from aion.errors import ConfigError
from aion.execute.evolving import GoesOn, State
from aion.spark.session.query_settings import PAST, STORED
from aion.spark.tasks.root_config import RootConfig, TaskConfig
from state_backends.files.location import Location, RemoteLocation, locate
from state_backends.format.definitions import digest
from state_backends.server.attempts import named_twice, used_twice
from state_backends.versions.lineage import newest_versions, operator_of, operators_of, shards_of, storage_of
from state_backends.versions.manifest import Identity, check_kept, check_operator, dump_operator

log = logging.getLogger(__name__)


class StartedOperator(NamedTuple):
    """An operator that a query may have. ``definition``: what its versions have in common.

    ``follows``: whether it takes the number of shards that its state has. Otherwise that must be the session's.
    ``goes_on``: says how its state and the last batch that has ended go on with another definition, or None if they do
    not.
    """

    config: TaskConfig
    definition: dict[str, Any]
    follows: bool
    goes_on: Callable[[State, int | None], GoesOn] | None = None


class Seen(NamedTuple):
    """What the tasks of a query need to know of an operator's state.

    ``shards``: their number, if it is not the one that was planned. ``past``: what its definition has been before, as
    JSON, or None if it has never been another one.
    """

    shards: int | None = None
    past: str | None = None


def settings_of(name: str, seen: Seen) -> dict[str, str]:
    """Returns the settings of a query's session that tell its tasks what was seen. ``name``: of the operator."""
    found = {STORED: None if seen.shards is None else str(seen.shards), PAST: seen.past}
    return {key + name: value for key, value in found.items() if value is not None}


def check_names(operators: Sequence[StartedOperator]) -> None:
    """Raises ConfigError if two operators of a query have the same name, or one is used twice."""
    for operator in operators:
        name = operator.config.name
        alike = [id(other) for other in operators if other.config.name == name]
        if len(alike) > 1:
            twice = used_twice if len(set(alike)) == 1 else named_twice
            raise ConfigError(twice(name, stateful=operator.definition.get("kind") == "stateful"))


@dataclass(frozen=True)
class Look:
    """Looks at an operator's state, where its place can be reached.

    ``query``: the id of the query, or None if it has ended no batch. ``batch``: the last one that has ended.
    ``is_here``: whether this is the host of the executors. ``names``: of all operators of the query. ``notes``: of the
    tables that it writes to.
    """

    operator: StartedOperator
    query: str | None
    checkpoint: str
    is_here: bool
    batch: int | None = None
    names: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    def __call__(self) -> Seen:
        """Returns what tasks need to know. Notes a changed definition with the state. Raises AionError."""
        location = locate(self.operator.config.state_dir)
        try:
            # Executors may mount a folder that the driver has not.
            if self.is_here or isinstance(location, RemoteLocation):
                location.check_writable()
            return Seen() if self.query is None else self._compared(location, self.query)
        finally:
            with contextlib.suppress(Exception):
                location.close()

    def _compared(self, location: Location, query: str) -> Seen:
        name, batch = self.operator.config.name, -1 if self.batch is None else self.batch
        if isinstance(self.operator.config, RootConfig):
            self._check_not_inside(location, query)
        found = operator_of(location, query, name, self.checkpoint)
        if found is None:
            return Seen()  # the tasks say which version they miss
        versions = partial(newest_versions, shards_of(location, query, name), batch + 1)
        return check_kept(found, versions, lambda kept: self._seen(location, query, kept)) or Seen()

    def _seen(self, location: Location, query: str, found: dict[str, Any]) -> Seen:
        config, operator = self.operator.config, self.operator
        definition, past, compared = operator.definition, None, found
        if operator.goes_on is not None:
            definition, past = self._definition(operator.goes_on, query, found)
            compared = {**found, "definition": definition}
        stored = list(found.get("ids") or config.ids)
        identity = Identity(
            query=query,
            operator=config.name,
            shard=0,
            shards=len(stored) if operator.follows else len(config.ids),
            definition=definition,
            ids=tuple(stored) if operator.follows else config.ids,
            key_types=config.key_types,
            checkpoint=self.checkpoint,
        )
        check_operator(compared, identity, f"the state of operator {config.name!r}")
        is_other = compared is not found and digest(definition) != digest(found["definition"])
        if is_other and found["checkpoint"] == self.checkpoint:
            owner = storage_of(location, query, config.name, self.checkpoint)
            owner.claim(dump_operator(replace(identity, ids=tuple(stored))), first=False)
        return Seen(len(stored) if len(stored) != len(config.ids) else None, past)

    def _check_not_inside(self, location: Location, query: str) -> None:
        """Raises ConfigError if the windows ran as a processor of the user, as they did on an older Aion.

        The processor's keys were the shards of the windows, so the tokens of the windows are values in its state.
        """
        for name in operators_of(location, query, self.checkpoint):
            if name in self.names:
                continue
            found = operator_of(location, query, name, self.checkpoint)
            key = [] if found is None else found["definition"].get("key", [])
            is_stateful = found is not None and found["definition"].get("kind") == "stateful"
            if is_stateful and [(field["name"], field["type"]) for field in key] == [("shard", "integer")]:
                raise ConfigError(
                    f"the windows of {self.operator.config.name!r} ran on an older Aion in a session with "
                    f"spark.aion.stateful.enabled=true, and their state is inside that of {name!r}, where this "
                    "Aion does not look. Start the query with a new checkpoint, or go on with the older Aion"
                )

    def _definition(
        self, goes_on: Callable[[State, int | None], GoesOn], query: str, found: dict[str, Any]
    ) -> tuple[dict[str, Any], str | None]:
        """Returns the definition of the state from now on, and what it was before, for tasks."""
        config = self.operator.config
        now = goes_on(State(config.state_dir, query, config.name, self.checkpoint, found), self.batch)
        if now.said:
            log.info("%s goes on with another definition: %s", config.name, "; ".join(now.said))
            for line in lacking(self.notes, config.name, now.columns):
                log.warning("%s: when the query last wrote to it, %s", config.name, line)
        return now.definition, None if now.past is None else orjson.dumps(now.past).decode()
