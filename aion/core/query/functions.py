"""Functions of the user's that compute the results of windows from their events. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import pyarrow as pa

from aion.core.query.columns import Columns, column_names
from aion.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class Window(NamedTuple):
    """The interval that an ``apply`` function is called for: µs since the epoch, end exclusive."""

    start: int
    end: int
    name: str


Key = tuple[Any, ...]
# A mapping, an iterable of mappings, or a RecordBatch or Table.
ApplyResult: TypeAlias = Any
ApplyFunction = Callable[[Key, Window, Iterator[pa.RecordBatch]], ApplyResult]


@dataclass(frozen=True)
class Apply:
    """A function that computes the result of a window of a key from its events. For example::

        aion.Apply(lambda key, window, events: {"n": sum(e.num_rows for e in events)}, "n bigint")

    ``function`` is called with ``(key, window, events)``. ``key``: a tuple, empty without a key. ``window``: a
    :class:`aion.Window`. ``events``: an iterator of ``pyarrow.RecordBatch`` with the key, the time, and the ``columns``
    of the input, in the input's order; also those that windows and ``unique`` need. It returns a mapping, an iterable
    of mappings, a RecordBatch or a Table; without any row if the window has no result. ``schema``: the columns of the
    result, in Spark's DDL or as a schema of Arrow or Spark.

    ``columns``: one column or several that the function reads. Default: all columns, but on Spark not one that has the
    watermark and is not the time. ``blocking=False``: the function reads event by event, so a window may be larger
    than memory, and the function starts before the whole window is staged (Aion, section 3.3).

    Raises ConfigError and SchemaError.
    """

    function: ApplyFunction
    schema: str | pa.Schema | StructType
    columns: Columns | None = None
    blocking: bool = True

    def __str__(self) -> str:
        return f"{getattr(self.function, '__name__', self.function)} -> {self.schema}"

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"Apply: {self.function!r} cannot be called; give a function of (key, window, events)")
        if self.columns is not None:
            names = column_names(self.columns, "Apply: columns", "'speed'")
            object.__setattr__(self, "columns", tuple(map(str, names)))
        if not isinstance(self.blocking, bool):
            raise ConfigError(f"Apply: blocking of {self.blocking!r} is neither True nor False")
