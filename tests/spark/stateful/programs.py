"""Random programs for the interpreter: calls of every method, on every kind of state, with values of every type."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa

from tests.spark.stateful.interpreter import LISTS, MAPS, NESTED, SCALARS, VALUES

COLUMNS = [("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("seq", pa.int64()), ("call", pa.string())]
KEYS = ["a", "b", "", "ß", "日本", "a b", None, "\x00"]
SECONDS_OF_A_BATCH = 10
BATCHES = 5
TEXTS = ["", "a", "b", "ÿ", "日本", "🙂", "a\x00b", "x" * 300]

# Timestamps begin at the third day of the year 1: Spark writes earlier ones and fails to read them. The days from
# October 5th to 14th, 1582 are left out: Spark reads all of them as the 15th.
FIRST_US = -62_135_424_000_000_000
LAST_US = 253_402_300_799_999_999
EPOCH = datetime.datetime(1970, 1, 1)


def _at(rng: Random) -> datetime.datetime:
    us = rng.choice([0, -1, FIRST_US, LAST_US, rng.randrange(1_500_000_000_000_000, 1_800_000_000_000_000)])
    return EPOCH + datetime.timedelta(microseconds=us)


def _day(rng: Random) -> datetime.date:
    days = [(1, 1, 1), (1582, 10, 4), (1582, 10, 15), (1969, 12, 31), (9999, 12, 31), (2024, 2, rng.randrange(1, 29))]
    return datetime.date(*rng.choice(days))


def _integer(bits: int) -> Callable[[Random], int]:
    edge = 2 ** (bits - 1)
    return lambda rng: rng.choice([0, 1, -1, edge - 1, -edge, rng.randrange(-edge, edge)])


def _double(rng: Random) -> float:
    edges = [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308]
    return rng.choice([*edges, rng.uniform(-1e6, 1e6)])


def _price(rng: Random) -> Decimal:
    """The last digit has to be rounded."""
    return rng.choice([Decimal("99999999.99"), Decimal("0.005"), Decimal("1E+3"), Decimal(rng.randrange(10**9)) / 1000])


def _huge(rng: Random) -> Decimal:
    return rng.choice([Decimal("1e-18"), Decimal(f"{'9' * 20}.{'9' * 18}"), Decimal(-rng.randrange(10**18)) / 7])


SIMPLE: dict[str, Callable[[Random], Any]] = {
    "boolean": lambda rng: rng.random() < 0.5,
    "tinyint": _integer(8),
    "smallint": _integer(16),
    "int": _integer(32),
    "bigint": _integer(64),
    "float": _double,
    "double": _double,
    "string": lambda rng: rng.choice(TEXTS),
    "binary": lambda rng: rng.choice([b"", b"\x00", b"\xff\xfe", rng.randbytes(rng.randrange(40))]),
    "date": _day,
    "timestamp": _at,
    "timestamp_ntz": _at,
    "decimal(10,2)": _price,
    "decimal(38,18)": _huge,
}


def _some(rng: Random, of: Callable[[Random], Any], nulls: float = 0.15) -> Any:
    return None if rng.random() < nulls else of(rng)


def _array(rng: Random, of: Callable[[Random], Any]) -> list[Any]:
    return [_some(rng, of) for _ in range(rng.choice([0, 1, 3]))]


def _map(rng: Random, of: Callable[[Random], Any]) -> dict[str, Any]:
    return {rng.choice(TEXTS): _some(rng, of) for _ in range(rng.choice([0, 1, 3]))}


def _inner(rng: Random) -> tuple[Any, Any]:
    return (_some(rng, SIMPLE["int"]), _some(rng, lambda r: _map(r, lambda q: _array(q, _double))))


DEEP: dict[str, Callable[[Random], Any]] = {
    "items": lambda rng: _array(rng, SIMPLE["string"]),
    "prices": lambda rng: _map(rng, _price),
    "point": lambda rng: (_some(rng, _double), _some(rng, SIMPLE["string"])),
    "deep": lambda rng: _array(rng, _inner),
}
assert DEEP.keys() == NESTED.keys()


def a_row(rng: Random, schema: str, nulls: float = 0.15) -> tuple[Any, ...]:
    """A value for a schema of the interpreter."""
    kinds = [field.split(" ")[1] for field in schema.split(", ")]
    if all(kind in SIMPLE for kind in kinds):
        return tuple(_some(rng, SIMPLE[kind], nulls) for kind in kinds)
    return tuple(_some(rng, of, nulls) for of in DEEP.values())


def a_map_key(rng: Random, schema: str) -> tuple[Any, ...]:
    """Few different ones, so that calls meet."""
    return a_row(Random(rng.randrange(6)), schema)


def a_call(rng: Random, now_ms: int, timers: bool) -> tuple[Any, ...]:
    """A call, at a time at which the watermark is about ``now_ms``."""
    kind = rng.choice(["value", "list", "map", "timer"] if timers else ["value", "list", "map"])
    match kind:
        case "value":
            name = rng.choice(list(VALUES))
            method = rng.choice(["get", "get", "exists", "update", "update", "clear"])
            return (name, method, a_row(rng, VALUES[name])) if method == "update" else (name, method)
        case "list":
            name = rng.choice(list(LISTS))
            method = rng.choice(["get", "get", "exists", "put", "appendValue", "appendValue", "appendList", "clear"])
            if method == "appendValue":
                return (name, method, a_row(rng, LISTS[name]))
            if method in ("put", "appendList"):  # Spark refuses an empty list, and the task fails
                return (name, method, [a_row(rng, LISTS[name]) for _ in range(rng.randrange(1, 4))])
            return (name, method)
        case "map":
            name = rng.choice(list(MAPS))
            one_key = ["getValue", "containsKey", "removeKey", "updateValue", "updateValue", "updateValue"]
            method = rng.choice([*one_key, "iterator", "keys", "values", "exists", "clear"])
            arguments = (a_map_key(rng, MAPS[name][0]),) if method in one_key else ()
            return (name, method, *arguments, *((a_row(rng, MAPS[name][1]),) if method == "updateValue" else ()))
        case _:
            method = rng.choice(["registerTimer", "registerTimer", "deleteTimer", "listTimers"])
            at = now_ms + rng.randrange(-4, 12) * 2_500
            return ("handle", method) if method == "listTimers" else ("handle", method, at)


@dataclass(frozen=True)
class Program:
    """Rows by batch, and after which batches the query starts again."""

    batches: list[list[tuple[Any, ...]]]
    restart_after: list[int]

    def before(self, key: Any, seq: int) -> list[str]:
        """What was called for a key until ``seq``, on the same state or on timers."""
        rows = [row for batch in self.batches for row in batch if row[0] == key and row[2] <= seq]
        state = eval_name(rows[-1][3]) if rows else None
        return [row[3] for row in rows if eval_name(row[3]) == state]


def eval_name(call: str) -> str:
    return call.split("'")[1]


def a_program(seed: int, calls: int, timers: bool) -> Program:
    """Programs for all keys: ``calls`` in all, in batches of random sizes."""
    rng = Random(seed)
    cuts = sorted(rng.randrange(calls) for _ in range(BATCHES - 1))
    batches: list[list[tuple[Any, ...]]] = []
    for index, (start, end) in enumerate(zip([0, *cuts], [*cuts, calls], strict=True)):
        at = 100.0 + index * SECONDS_OF_A_BATCH
        rows = [
            (rng.choice(KEYS), at + rng.random() * SECONDS_OF_A_BATCH, seq, _text(a_call(rng, int(at * 1000), timers)))
            for seq in range(start, end)
        ]
        # The watermark advances in each batch, also in one without calls.
        batches.append([*rows, ("clock", at + SECONDS_OF_A_BATCH, calls + index, "('count', 'get')")])
    restarts = sorted(rng.sample(range(BATCHES - 1), rng.randrange(1, 3)))
    return Program(batches, restarts)


def _text(call: Sequence[Any]) -> str:
    return repr(tuple(call))


assert set(SCALARS.values()) == set(SIMPLE)
