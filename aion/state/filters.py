"""What is asked of the state: some keys, and a stretch of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.base.hashing import ShardOfKeys
from aion.base.numbers import NEVER
from aion.base.time import instant_us
from aion.core.keyed.table import coded
from aion.errors import ConfigError, SchemaError

Key: TypeAlias = Mapping[str, Any]
Instant: TypeAlias = datetime | int
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Asked:
    """The keys and the stretch of time that are wanted.

    ``keys``: the columns of the keys, with the types that the state has, or None if all keys are wanted. ``start_us``,
    ``end_us``: windows that overlap ``[start_us, end_us)`` are wanted.
    """

    keys: pa.Table | None
    start_us: int = -NEVER
    end_us: int = NEVER

    @classmethod
    def of(
        cls, fields: Sequence[pa.Field], key: Key | Sequence[Key] | None, window: tuple[Instant, Instant] | None
    ) -> Asked:
        """``fields``: the columns of the key. Raises ConfigError or SchemaError for keys that the state cannot have."""
        keys = None if key is None else _keys(fields, [key] if isinstance(key, Mapping) else list(key))
        if window is None:
            return cls(keys)
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ConfigError(f"window: {window!r} is not a pair; give (start, end), each a datetime or microseconds")
        start_us, end_us = map(instant_us, window)
        if start_us >= end_us:
            raise ConfigError(f"window: it ends at {window[1]!r}, which is not after its start {window[0]!r}")
        return cls(keys, start_us, end_us)

    def shards(self, ids: Sequence[int], types: Sequence[pa.DataType]) -> set[int] | None:
        """Returns the shards in which the keys may be, or None for any. ``types``: what keys are hashed as."""
        if self.keys is None or not types:
            return None
        columns = [column.combine_chunks() for column in self.keys.columns]
        if not ShardOfKeys.covers([column.type for column in columns]):
            return None
        return set(ShardOfKeys(ids)(columns, self.keys.num_rows).tolist())

    def overlap(self, starts_us: Any, ends_us: Any) -> Flags:
        """Returns a mask of the windows that overlap the stretch."""
        return np.asarray((starts_us < self.end_us) & (ends_us > self.start_us))

    def among(self, columns: Sequence[pa.Array], rows: int) -> Flags:
        """Returns a mask of the rows with one of the keys. ``columns``: the columns of their keys."""
        if self.keys is None or not rows:
            return np.ones(rows, np.bool_)
        wanted = [column.combine_chunks() for column in self.keys.columns]
        found, asked = coded((columns, rows), (wanted, self.keys.num_rows))
        return np.isin(found, asked)


def _keys(fields: Sequence[pa.Field], asked: Sequence[Key]) -> pa.Table:
    names = [field.name for field in fields]
    if not names:
        raise ConfigError("key: this operator has no key; leave it out")
    for key in asked:
        if not isinstance(key, Mapping) or set(key) != set(names):
            example = dict.fromkeys(names, "...")
            raise ConfigError(f"key: {key!r} is not a key of this operator; give all of its columns, like {example}")
    try:
        return pa.table({f.name: pa.array([key[f.name] for key in asked], f.type) for f in fields})
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        types = ", ".join(f"{field.name} {field.type}" for field in fields)
        raise SchemaError(f"key: {asked!r} does not have the types of the key, {types}: {error}") from error
