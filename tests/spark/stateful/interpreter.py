"""A processor that does what its input says: each row is a call of the state API, and gives what the call returned.

So one query makes thousands of random calls, and two state stores can be compared call by call. A call is a line of
Python: ``("numbers", "update", (1, 2.5))``. What it returned, with the exact types, or its error, comes out as text.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

NAMES = {"datetime": datetime, "Decimal": Decimal, "nan": math.nan, "inf": math.inf, "Row": Row}
IN_ANY_ORDER = ("listTimers", "iterator", "keys", "values")
"""What these yield has the order of the bytes in Spark's store."""
OUTPUT = "k string, seq long, what string"

SCALARS = {
    "flag": "boolean",
    "tiny": "tinyint",
    "small": "smallint",
    "number": "int",
    "long": "bigint",
    "real": "float",
    "double": "double",
    "text": "string",
    "bytes": "binary",
    "day": "date",
    "at": "timestamp",
    "local": "timestamp_ntz",
    "price": "decimal(10,2)",
    "huge": "decimal(38,18)",
}
NESTED = {
    "items": "array<string>",
    "prices": "map<string,decimal(10,2)>",
    "point": "struct<x:double,label:string>",
    "deep": "array<struct<a:int,b:map<string,array<double>>>>",
}
SCALAR_ROW = ", ".join(f"{name} {kind}" for name, kind in SCALARS.items())
NESTED_ROW = ", ".join(f"{name} {kind}" for name, kind in NESTED.items())

VALUES = {"count": "n bigint", "scalars": SCALAR_ROW, "nested": NESTED_ROW}
LISTS = {"log": "n bigint, s string", "scalar_log": SCALAR_ROW, "nested_log": NESTED_ROW}
MAPS = {
    "by_text": ("s string", "n bigint"),
    "by_scalars": ("n bigint, s string, b binary, d date", SCALAR_ROW),
    "to_nested": ("s string", NESTED_ROW),
}


def told(value: Any) -> str:
    """What a call gave: the value and its exact types, in one order for maps."""
    match value:
        case dict():
            pairs = sorted((told(k), told(v)) for k, v in value.items())
            return f"{type(value).__name__}{{{', '.join(f'{k}: {v}' for k, v in pairs)}}}"
        case Row():
            fields = getattr(value, "__fields__", None)
            return f"Row{fields}[{', '.join(map(told, value))}]"
        case list() | tuple():
            return f"{type(value).__name__}[{', '.join(map(told, value))}]"
        case _:
            return f"{type(value).__name__} {value!r}"


class Interpreter(StatefulProcessor):
    """Calls as its rows say. ``ttl_ms``: of all its variables."""

    def __init__(self, pandas: bool, ttl_ms: int | None = None) -> None:
        self._pandas = pandas
        self._ttl_ms = ttl_ms

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._states = {name: handle.getValueState(name, kind, self._ttl_ms) for name, kind in VALUES.items()}
        self._states |= {name: handle.getListState(name, kind, self._ttl_ms) for name, kind in LISTS.items()}
        self._states |= {name: handle.getMapState(name, *kinds, self._ttl_ms) for name, kinds in MAPS.items()}

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        calls = (
            [pair for frame in rows for pair in zip(frame["seq"], frame["call"], strict=True)]
            if self._pandas
            else [(row.seq, row.call) for row in rows]
        )
        yield from self._give(key, [(int(seq), self._do(call)) for seq, call in sorted(calls)])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        done = [("fires", told(key), at), ("timers", self._do('("handle", "listTimers")'))]
        step = at // 2_500
        if step % 3 == 0:
            done.append(self._do('("count", "get")'))
        if step % 5 == 0:
            done.append(self._do(f'("log", "appendValue", ({at}, None))'))
        if step % 11 == 0:  # Spark looks for expired timers before the first one fires, so the other one still does
            done.append(self._do(f'("handle", "deleteTimer", {at + 2_500})'))
        if step % 7 == 0:
            done.append(self._do(f'("handle", "registerTimer", {at + 20_000})'))
        yield from self._give(key, [(-1, repr(done))])

    def _do(self, call: str) -> str:
        name, method, *arguments = eval(call, NAMES)
        try:
            given = getattr(self._handle if name == "handle" else self._states[name], method)(*arguments)
            if method in IN_ANY_ORDER:
                return str(sorted(told(one) for one in given))
            return told(list(given)) if isinstance(given, Iterator) else told(given)
        except Exception as error:
            return f"raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    def _give(self, key: Any, results: list[tuple[int, str]]) -> Iterator[Any]:
        if self._pandas:
            frame = {"k": [key[0]] * len(results), "seq": [r[0] for r in results], "what": [r[1] for r in results]}
            yield pd.DataFrame(frame)
        else:
            for seq, what in results:
                yield Row(k=key[0], seq=seq, what=what)
