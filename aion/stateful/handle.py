"""The handle that a stateful processor gets, and its state variables and timers: local, over the record of a key.

These classes take the place of pyspark's, which make a round trip to the JVM for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming.stateful_processor import ListState, MapState, StatefulProcessorHandle, ValueState
from pyspark.sql.types import StructType

from aion.stateful.contents import ListContent, MapContent, Plain, ValueContent
from aion.stateful.encoding import Codec
from aion.stateful.layout import MAX_MS
from aion.stateful.order import timer_order
from aion.stateful.packing import pack, unpack
from aion.stateful.record import KeyRecord
from aion.stateful.variables import Kind, Variable, Variables

Schema: TypeAlias = StructType | str
L = TypeVar("L", bound="_Local")


class _Definition(NamedTuple):
    """What the processor asked for in ``init``."""

    state: _Local
    name: str
    kind: Kind
    schema: StructType
    key_schema: StructType | None
    ttl_ms: int | None


class Handle(StatefulProcessorHandle):
    """A processor's handle in one task. Between :meth:`enter` and :meth:`leave` it works on a key.

    A task may work on several shards, one after the other. The processor defines its variables once, in ``init``, and
    each shard has its own numbers for them (:mod:`aion.stateful.variables`): see :meth:`begin_shard`.

    ``time_mode``: as Spark spells it. ``now_ms``: the timestamp of the batch. ``parse``: makes a schema of DDL text.
    ``deleted``: the variables that ``init`` deletes. It may define them again afterwards.
    """

    def __init__(self, time_mode: str, now_ms: int, parse: Callable[[str], StructType]) -> None:
        self._time_mode = time_mode.lower()
        self._parse = parse
        self._defined: dict[str, _Definition] = {}  # by name
        self._names: set[str] = set()  # of all variables that were defined, with those that were then deleted
        self.deleted: frozenset[str] = frozenset()
        self._initialized = False
        self.entered: KeyRecord | None = None
        self.variables: list[Variable] = []
        self.now_ms = now_ms

    # -- for the task -------------------------------------------------------------------------------------

    def initialized(self) -> None:
        """The processor's ``init`` is over."""
        self._initialized = True

    @property
    def undone(self) -> frozenset[str]:
        """The variables that ``init`` defined and then deleted."""
        return frozenset(self._names - self._defined.keys())

    def begin_shard(self, variables: Variables) -> None:
        """From now on, the processor's variables are those of this shard."""
        for name in self.deleted:
            variables.delete(name)
        self.variables = []
        for state, name, kind, schema, key_schema, ttl_ms in self._defined.values():
            state.variable = variables.define(name, kind, schema, key_schema, ttl_ms)
            self.variables.append(state.variable)

    def enter(self, record: KeyRecord) -> None:
        """From now on, state and timers are those of this key."""
        self.entered = record

    def leave(self) -> None:
        self.entered = None

    @property
    def record(self) -> KeyRecord:
        if self.entered is None:
            raise PySparkRuntimeError(
                "Implicit key not found in state store: state variables and timers can only be used while the "
                "processor handles rows or timers of a key"
            )
        return self.entered

    # -- for the processor --------------------------------------------------------------------------------

    def getValueState(self, stateName: str, schema: Schema, ttlDurationMs: int | None = None) -> ValueState:
        return self._define(LocalValueState, stateName, Kind.VALUE, schema, None, ttlDurationMs)

    def getListState(self, stateName: str, schema: Schema, ttlDurationMs: int | None = None) -> ListState:
        return self._define(LocalListState, stateName, Kind.LIST, schema, None, ttlDurationMs)

    def getMapState(
        self, stateName: str, userKeySchema: Schema, valueSchema: Schema, ttlDurationMs: int | None = None
    ) -> MapState:
        return self._define(LocalMapState, stateName, Kind.MAP, valueSchema, userKeySchema, ttlDurationMs)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._check_timers("Error register timer", "register_timer")
        self.record.add_timer(_timestamp(expiryTimestampMs))

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._check_timers("Error deleting timer", "delete_timer")
        self.record.remove_timer(_timestamp(expiryTimestampMs))

    def listTimers(self) -> Iterator[int]:
        if self._time_mode == "none":
            return iter(())
        self._check_timers("Error listing timers", "list_timers")
        return _from_first_next(lambda: sorted(self.record.timers, key=timer_order))

    def deleteIfExists(self, stateName: str) -> None:
        if self._initialized:
            _refuse("Error deleting state", _LATE.format("delete_if_exists"))
        self._defined.pop(stateName, None)
        self.deleted |= {stateName}

    def _define(
        self, make: type[L], name: str, kind: Kind, schema: Schema, key_schema: Schema | None, ttl_ms: int | None
    ) -> L:
        what = f"Error initializing {kind.value} state"
        if self._initialized:
            _refuse(what, _LATE.format(f"get_{kind.value}_state"))
        if name in self._names:
            _refuse(what, f"{kind.value.capitalize()} state {name} already exists")
        if name.startswith("$"):
            _refuse(
                what,
                f"[STATE_STORE_CANNOT_CREATE_COLUMN_FAMILY_WITH_RESERVED_CHARS] Failed to create column family with "
                f"unsupported starting character and name={name}.",
            )
        if not name.strip() or name != name.strip() or name == "default":
            _refuse(
                what,
                f"[STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME] Failed to perform column family "
                f"operation=create with invalid name={name}.",
            )
        if ttl_ms is not None and self._time_mode != "processingtime":
            _refuse(
                what,
                f"[STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL] Cannot use TTL for state={name} in "
                f"timeMode={self._time_mode}, use TimeMode.ProcessingTime() instead.",
            )
        if ttl_ms is not None and ttl_ms < 0:
            _refuse(
                what,
                f"[STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE] TTL duration must be greater than zero for State "
                f"store operation=update on state={name}.",
            )
        key = None if key_schema is None else self._schema(key_schema)
        ttl = None if ttl_ms is None else index(ttl_ms) or None  # numpy's integers cannot be stored
        state = make(self, f"{kind.value.capitalize()} state {name}")
        self._names.add(name)
        self._defined[name] = _Definition(state, name, kind, self._schema(schema), key, ttl)
        return state

    def _schema(self, schema: Schema) -> StructType:
        return self._parse(schema) if isinstance(schema, str) else schema

    def _check_timers(self, what: str, operation: str) -> None:
        if self._time_mode == "none":
            _refuse(
                what,
                f"[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE] Failed to perform stateful "
                f"processor operation={operation} with invalid timeMode=NoTime.",
            )
        if not self._initialized:
            _refuse(
                what,
                f"[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE] Failed to perform stateful "
                f"processor operation={operation} with invalid handle state=CREATED.",
            )


_LATE = (
    "[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE] Failed to perform stateful processor "
    "operation={} with invalid handle state=INITIALIZED."
)


class _Local:
    """What the state variables have in common. ``variable``: as the shard at work has it."""

    variable: Variable

    def __init__(self, handle: Handle, what: str) -> None:
        self._handle, self._what = handle, what
        self._record: KeyRecord | None = None
        self._found: Any = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "variable":  # no shard has set it
                _refuse("Error using state", f"{self._what} is not initialized: init deletes it with deleteIfExists")
            raise AttributeError(name)

    @property
    def _content(self) -> Any:
        """What the variable holds for the key at work. Most calls are for the same key as the call before."""
        record = self._handle.entered
        if record is None or record is not self._record:
            self._enter(self._handle.record)
        return self._found

    def _enter(self, record: KeyRecord) -> None:
        self._record, self._found = record, record.content(self.variable)

    def _expires(self) -> int:
        """Returns when a value that is set now expires. 0: never."""
        ttl_ms = self.variable.ttl_ms
        if ttl_ms is None:
            return 0
        expires = min(self._handle.now_ms + ttl_ms, MAX_MS)
        self._handle.record.expires_at(expires)
        return expires


class _Paged(_Local):
    """A list or a map. ``_pages``: those of the key at work; ask for ``_content`` first."""

    def _enter(self, record: KeyRecord) -> None:
        super()._enter(record)
        self._pages = record.pages(self.variable)


class LocalValueState(_Local, ValueState):
    def exists(self) -> bool:
        return self._content.get(self._handle.now_ms) is not None

    def get(self) -> tuple[Any, ...] | None:
        plain = self._content.get(self._handle.now_ms)
        return None if plain is None else self.variable.codec.value(plain)

    def update(self, newValue: tuple[Any, ...]) -> None:
        self._content.set(self.variable.codec.plain(newValue), self._expires())

    def clear(self) -> None:
        self._content.set(None, 0)

    _content: ValueContent


class LocalListState(_Paged, ListState):
    def exists(self) -> bool:
        return self._content.exists(self._handle.now_ms, self._pages)

    def get(self) -> Iterator[tuple[Any, ...]]:
        return self.variable.codec.values(_from_first_next(lambda: self._content.get(self._handle.now_ms, self._pages)))

    def put(self, newState: list[tuple[Any, ...]]) -> None:
        self._content.put(self._plains(newState), self._expires())

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        self._content.append(self.variable.codec.plain(newState), self._expires())

    def appendList(self, newState: list[tuple[Any, ...]]) -> None:
        self._content.extend(self._plains(newState), self._expires())

    def clear(self) -> None:
        self._content.clear()

    def _plains(self, values: list[tuple[Any, ...]]) -> list[Plain]:
        plains = [self.variable.codec.plain(value) for value in values]
        if not plains:
            _refuse(
                "Error updating value state",
                f"[ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE] Illegal value provided to the State Store Cannot write "
                f"empty list values to State Store for StateName {self.variable.name}.",
            )
        return plains

    _content: ListContent


class LocalMapState(_Paged, MapState):
    def exists(self) -> bool:
        return self._content.exists(self._handle.now_ms, self._pages)

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        plain = self._content.get(self._key(key), self._handle.now_ms, self._pages)
        return None if plain is None else self.variable.codec.row(plain)

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        return self._content.get(self._key(key), self._handle.now_ms, self._pages) is not None

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        self._content.set(self._key(key), self.variable.codec.plain(value), self._expires(), self._pages)

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        return ((self._keys().value(unpack(key)), self.variable.codec.value(value)) for key, value in self._items())

    def keys(self) -> Iterator[tuple[Any, ...]]:
        return (self._keys().value(unpack(key)) for key, _ in self._items())

    def values(self) -> Iterator[tuple[Any, ...]]:
        return (self.variable.codec.value(value) for _, value in self._items())

    def removeKey(self, key: tuple[Any, ...]) -> None:
        self._content.remove(self._key(key), self._pages)

    def clear(self) -> None:
        self._content.clear()

    def _keys(self) -> Codec:
        codec = self.variable.key_codec
        assert codec is not None
        return codec

    def _key(self, key: tuple[Any, ...]) -> bytes:
        return pack(self._keys().plain(key))

    def _items(self) -> Iterator[tuple[bytes, Plain]]:
        return _from_first_next(self._ordered)

    def _ordered(self) -> Iterator[tuple[bytes, Plain]]:
        """Returns the entries in Spark's order, if they are in memory. Pages are read one after the other, as they
        lie.
        """
        content = self._content
        items = content.items(self._handle.now_ms, self._pages)
        if content.paged:
            return items
        order = self.variable.map_order
        return iter(sorted(items, key=lambda item: order(unpack(item[0]))))

    _content: MapContent


def _from_first_next(make: Callable[[], Any]) -> Iterator[Any]:
    """Iterates over what was there when the first element was taken."""
    yield from make()


def _timestamp(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("expiryTimestampMs: Expected an int, got a boolean.")
    time_ms = index(value)  # not int(), which would cut off a part
    if not -(1 << 63) <= time_ms < 1 << 63:
        raise ValueError(f"Value out of range: {value}")
    return time_ms


def _refuse(what: str, why: str) -> NoReturn:
    raise PySparkRuntimeError(f"{what}: {why}")
