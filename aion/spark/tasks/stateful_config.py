"""What the root of a stateful processor needs to know. Spark sends it to the tasks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyspark.sql.types import StructType

from aion.spark.tasks.root_config import TaskConfig


class Columns(NamedTuple):
    """The columns of rows. The first ones are those that the processor gets, by their ``names``. Others are ours.

    ``key``: where those of the key are. ``own``: how many are first that the DataFrame does not have, such as a field
    of a struct as key. As in Spark, rows have them, and frames do not.
    """

    key: tuple[int, ...]
    names: tuple[str, ...]
    own: int


@dataclass(frozen=True, kw_only=True)
class StatefulConfig(TaskConfig):
    """For :class:`aion.spark.tasks.processor.ProcessorDefinition`."""

    key: StructType
    """The type of keys, with the names that the user knows."""
    columns: Columns
    initial: Columns | None
    """The columns of the initial state, or None if there is none."""
    pandas: bool
    """Whether rows are frames of pandas."""
    time_mode: str
    """As Spark spells it, in lower case."""
    event_time: str | None
    """The column by whose times rows are dropped as late, or None if no row is, or Spark drops them itself."""

    @property
    def definition(self) -> dict[str, Any]:
        """What versions of the operator have in common. ``words``: see :attr:`aion.core.query.plan.Plan.definition`."""
        return {
            "kind": "stateful",
            "key": json.loads(self.key.json())["fields"],
            "words": {
                "operator": [("a stateful processor", "")],
                "key": [(field.name, field.dataType.simpleString()) for field in self.key],
            },
        }
