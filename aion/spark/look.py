"""The operators of a query that starts, and a look at the state that they have already."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from aion.errors import ConfigError
from aion.spark.root_config import TaskConfig
from state_backends.files.location import Location, RemoteLocation, locate
from state_backends.server.attempts import named_twice, used_twice
from state_backends.versions.lineage import operator_of
from state_backends.versions.manifest import Identity, check_operator


class Operator(NamedTuple):
    """An operator that a query may have. ``definition``: what its versions have in common.

    ``follows``: whether it takes the number of shards that its state has. Otherwise that must be the session's.
    """

    config: TaskConfig
    definition: dict[str, Any]
    follows: bool


def check_names(operators: Sequence[Operator]) -> None:
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

    ``query``: the id of the query; None: it has ended no batch. ``is_here``: whether this is
    the host of the executors.
    """

    operator: Operator
    query: str | None
    checkpoint: str
    is_here: bool

    def __call__(self) -> int | None:
        """Returns the number of shards of the state, if it is not the one that was planned. Raises AionError."""
        location = locate(self.operator.config.state_dir)
        try:
            # Executors may mount a folder that the driver has not.
            if self.is_here or isinstance(location, RemoteLocation):
                location.check_writable()
            return None if self.query is None else self._compared(location, self.query)
        finally:
            with contextlib.suppress(Exception):
                location.close()

    def _compared(self, location: Location, query: str) -> int | None:
        config, operator = self.operator.config, self.operator
        found = operator_of(location, query, config.name, self.checkpoint)
        if found is None:
            return None  # the tasks say which version they miss
        stored = list(found.get("ids") or config.ids)
        identity = Identity(
            query=query,
            operator=config.name,
            shard=0,
            shards=len(stored) if operator.follows else len(config.ids),
            definition=operator.definition,
            ids=tuple(stored) if operator.follows else config.ids,
            key_types=config.key_types,
            checkpoint=self.checkpoint,
        )
        check_operator(found, identity, f"the state of operator {config.name!r}")
        return len(stored) if len(stored) != len(config.ids) else None
