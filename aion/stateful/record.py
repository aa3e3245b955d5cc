"""The record of a key: everything that a shard keeps about it, while a task works with it.

A record is stored as MessagePack: ``[timers, wake, expires, [[variable, version, content], ...]]``. ``timers``: when
the key's timers expire, in ascending order, in ms. ``wake``: the time under which the key is in the shard's index of
times (:mod:`aion.stateful.layout`), which is not later than its first timer. ``expires``: when to look for state whose
TTL has passed, or nothing. ``variable`` is the number of a state variable and ``version`` that of its schema.
``content`` stays packed until it is used.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

from aion.stateful.contents import Content, ListContent, MapContent, ValueContent, has_pages
from aion.stateful.layout import PRESENT, page_key, record_key, wake_key
from aion.stateful.packing import pack, unpack
from aion.stateful.variables import Kind, Variable
from state_backends.format.ordered_map import NEVER_MS, MapValue, Readable

CONTENTS: Mapping[Kind, type[Any]] = {Kind.VALUE: ValueContent, Kind.LIST: ListContent, Kind.MAP: MapContent}


class KeyRecord:
    """The record of one key. ``data``: as it was stored, or None if the key is new."""

    __slots__ = (
        "_changed",
        "_contents",
        "_existed",
        "_packed",
        "_store",
        "expires",
        "forgotten",
        "key",
        "timers",
        "wake",
    )

    def __init__(self, key: bytes, data: bytes | None, store: Readable) -> None:
        self.key = key
        self.timers: list[int]
        self.wake: int | None
        self.expires: int | None
        self._packed: dict[int, Sequence[Any]] = {}  # number, version and content, as they are stored
        self._contents: dict[int, tuple[Variable, Content]] = {}
        self._changed = False
        self._existed = data is not None
        self._store = store
        self.forgotten: list[int] = []  # by the last changes(): variables that no longer exist, but have pages
        if data is None:
            self.timers, self.wake, self.expires = [], None, None
        else:
            self.timers, self.wake, self.expires, entries = unpack(data)
            for entry in entries:
                self._packed[entry[0]] = entry

    def content(self, variable: Variable) -> Any:
        """Returns what a variable holds for this key."""
        found = self._contents.get(variable.number)
        if found is not None:
            return found[1]
        packed = self._packed.get(variable.number)
        stored = None if packed is None else variable.current(packed[1], packed[2])
        content = CONTENTS[variable.kind](stored)
        self._contents[variable.number] = variable, content
        return content

    def pages(self, variable: Variable) -> KeyPages:
        return KeyPages(self._store, self.key, variable)

    def add_timer(self, time_ms: int) -> None:
        at = bisect_left(self.timers, time_ms)
        if at == len(self.timers) or self.timers[at] != time_ms:
            insort(self.timers, time_ms)
            self._changed = True

    def remove_timer(self, time_ms: int) -> None:
        at = bisect_left(self.timers, time_ms)
        if at < len(self.timers) and self.timers[at] == time_ms:
            del self.timers[at]
            self._changed = True

    def expires_at(self, time_ms: int) -> None:
        """State of this key expires at this time."""
        if self.expires is None or time_ms < self.expires:
            self.expires = time_ms
            self._changed = True

    def expire(self, now_ms: int, variables: Sequence[Variable]) -> None:
        """Removes the state that has expired."""
        times = []
        for variable in variables:
            if variable.ttl_ms is not None and (variable.number in self._packed or variable.number in self._contents):
                earliest = self.content(variable).expire(now_ms, self.pages(variable))
                if earliest:
                    times.append(earliest)
        self.expires = min(times, default=None)
        self._changed = True

    def changes(self, known: frozenset[int], scanned_ms: int) -> tuple[list[MapValue], int]:
        """Returns what must be written, and by how much the number of keys grows: -1, 0 or 1.

        ``known``: the numbers of the variables that exist. What others hold is forgotten. ``scanned_ms``: the batch
        scans the index of times up to this time.
        """
        values: list[MapValue] = []
        for number, (variable, content) in self._contents.items():
            if content.changed:
                pages = self.pages(variable)
                encoded = content.encode(pages)
                values += pages.written
                self._changed = True
                if encoded is None:
                    self._packed.pop(number, None)
                else:
                    self._packed[number] = number, variable.version, encoded
                content.changed = False
        self.forgotten = []
        if not self._changed and (self.wake is None or self.wake > scanned_ms):
            return [], 0
        gone = [self._packed.pop(number) for number in [*self._packed] if number not in known]
        self.forgotten = [number for number, _, content in gone if has_pages(content)]
        entries = [*self._packed.values()]
        if not entries:
            self.expires = None
        needed_ms = self.expires
        if self.timers and (needed_ms is None or self.timers[0] < needed_ms):
            needed_ms = self.timers[0]
        wake = self.wake
        if needed_ms is None or wake is None or needed_ms < wake or wake <= scanned_ms:
            wake = needed_ms
        # Else the entry stays where it is, too early, until it is scanned. The timer of a session moves with every
        # batch, and to move the entry, too, would cost more than all else that is written.
        if wake != self.wake:
            if self.wake is not None:
                values.append(MapValue(wake_key(self.wake, self.key), None))
            if wake is not None:
                values.append(MapValue(wake_key(wake, self.key), PRESENT, NEVER_MS))
            self.wake = wake
        elif not self._changed:
            return [], 0
        self._changed = False
        exists = bool(self.timers or entries)
        data = pack((self.timers, wake, self.expires, entries)) if exists else None
        if exists or self._existed:
            # A timer of the last possible time is one that never expires, and not what NEVER_MS stands for.
            needed_ms = None if needed_ms == NEVER_MS else needed_ms
            values.append(MapValue(record_key(self.key), data, needed_ms))
        grown = exists - self._existed
        self._existed = exists
        return values, grown


class KeyPages:
    """See :class:`aion.stateful.contents.ValuePages`. ``written``: what is to be put."""

    __slots__ = ("_key", "_store", "_variable", "written")

    def __init__(self, store: Readable, key: bytes, variable: Variable) -> None:
        self._store, self._key, self._variable = store, key, variable
        self.written: list[MapValue] = []

    def read(self, numbers: Sequence[int]) -> list[Any]:
        found = self._store.get([page_key(self._key, self._variable.number, n) for n in numbers])
        return [None if data is None else self._variable.current_page(*unpack(data)) for data in found]

    def write(self, number: int, content: Any) -> None:
        data = None if content is None else pack((self._variable.version, content))
        self.written.append(MapValue(page_key(self._key, self._variable.number, number), data))
