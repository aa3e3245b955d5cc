"""State variables against dicts and lists: every call on every key, over batches, with pages and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import LongType, StringType, StructField, StructType

from aion.stateful import contents, run
from aion.stateful.handle import Handle
from aion.stateful.keys import Group, Keys
from aion.stateful.layout import MIN_MS, wake_of, wakes
from aion.stateful.packing import pack
from aion.stateful.record import KeyRecord
from aion.stateful.run import ShardRun
from aion.stateful.variables import Variables
from state_backends.format.ordered_map import MemoryMap

NUMBER = StructType([StructField("n", LongType())])
PAIR = StructType([StructField("n", LongType()), StructField("s", StringType())])
TTL_MS = 10
KEYS = Keys(StructType([StructField("k", LongType())]))
Call = tuple[Any, ...]


class Model:
    """What the state of one key must be. Elements are (expires, value); 0: they do not expire."""

    def __init__(self) -> None:
        self.value: tuple[int, Any] | None = None
        self.list: list[tuple[int, Any]] = []
        self.map: dict[int, tuple[int, Any]] = {}
        self.timers: set[int] = set()

    def call(self, call: Call, now: int, expires: int) -> Any:
        def alive(element: tuple[int, Any] | None) -> bool:
            return element is not None and not 0 < element[0] <= now

        match call:
            case ("value.update", n):
                self.value = expires, (n,)
            case ("value.get",):
                return self.value[1] if self.value is not None and alive(self.value) else None
            case ("value.exists",):
                return alive(self.value)
            case ("value.clear",):
                self.value = None
            case ("list.append", n):
                self.list.append((expires, (n, "x" * (n % 40))))
            case ("list.put", ns):
                self.list = [(expires, (n, "p")) for n in ns]
            case ("list.get",):
                return [e[1] for e in self.list if alive(e)]
            case ("list.exists",):
                return any(map(alive, self.list))
            case ("list.clear",):
                self.list = []
            case ("map.update", k, n):
                self.map[k] = expires, (n, "m" * (n % 40))
            case ("map.get", k):
                found = self.map.get(k)
                return found[1] if found is not None and alive(found) else None
            case ("map.has", k):
                return alive(self.map.get(k))
            case ("map.remove", k):
                self.map.pop(k, None)
            case ("map.items",):
                return sorted(((k,), e[1]) for k, e in self.map.items() if alive(e))
            case ("map.exists",):
                return any(map(alive, self.map.values()))
            case ("map.clear",):
                self.map = {}
            case ("timer.add", t):
                self.timers.add(t)
            case ("timer.remove", t):
                self.timers.discard(t)
            case ("timer.list",):
                return sorted(self.timers)
        return None


class Calls(StatefulProcessor):
    """Rows are calls. Yields (key, call, result)."""

    def __init__(self, ttl_ms: int | None) -> None:
        self._ttl_ms = ttl_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._value = handle.getValueState("v", NUMBER, self._ttl_ms)
        self._list = handle.getListState("l", PAIR, self._ttl_ms)
        self._map = handle.getMapState("m", NUMBER, PAIR, self._ttl_ms)

    def handleInputRows(self, key: Any, rows: Iterator[Call], timerValues: TimerValues) -> Iterator[Any]:
        for call in rows:
            yield key[0], call, self._result(call)

    def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: Any) -> Iterator[Any]:
        yield key[0], "expired", expiredTimerInfo.getExpiryTimeInMs()

    def close(self) -> None:
        pass

    def _result(self, call: Call) -> Any:
        name, arguments = call[0], call[1:]
        methods: dict[str, Callable[..., Any]] = {
            "value.update": lambda n: self._value.update((n,)),
            "value.get": self._value.get,
            "value.exists": self._value.exists,
            "value.clear": self._value.clear,
            "list.append": lambda n: self._list.appendValue((n, "x" * (n % 40))),
            "list.put": lambda ns: self._list.put([(n, "p") for n in ns]),
            "list.get": lambda: list(self._list.get()),
            "list.exists": self._list.exists,
            "list.clear": self._list.clear,
            "map.update": lambda k, n: self._map.updateValue((k,), (n, "m" * (n % 40))),
            "map.get": lambda k: self._map.getValue((k,)),
            "map.has": lambda k: self._map.containsKey((k,)),
            "map.remove": lambda k: self._map.removeKey((k,)),
            "map.items": self._items,
            "map.exists": self._map.exists,
            "map.clear": self._map.clear,
            "timer.add": self._handle.registerTimer,
            "timer.remove": self._handle.deleteTimer,
            "timer.list": lambda: sorted(self._handle.listTimers()),
        }
        return methods[name](*arguments)

    def _items(self) -> list[Any]:
        items = sorted(self._map.iterator())
        assert sorted(self._map.keys()) == [k for k, _ in items]
        assert sorted(self._map.values()) == sorted(v for _, v in items)
        return items


class Shard:
    """A shard over several batches, with its model."""

    def __init__(self, ttl_ms: int | None) -> None:
        self.store = MemoryMap()
        self.models: dict[int, Model] = {}
        self._ttl_ms = ttl_ms
        self.snapshot: dict[str, Any] | None = None

    def batch(self, now: int, calls: dict[int, list[Call]], on_disk: tuple[bool, bool] | None = None) -> None:
        """A batch. ``on_disk``: whether it reads ahead, and backwards; None: all records are in memory."""
        handle = Handle("processingtime", now, lambda text: pytest.fail("schemas are not text here"))
        processor = Calls(self._ttl_ms)
        processor.init(handle)
        handle.initialized()
        variables = Variables(None if self.snapshot is None else self.snapshot["stateful"])
        handle.begin_shard(variables)
        self.store.on_disk, how = on_disk is not None, on_disk or (True, False)
        times = TimerValues(now, -1)
        of_shard = ShardRun(processor, handle, variables, self.store, KEYS, times, now, self.snapshot, *how)
        groups = [Group(KEYS.to_bytes((key,)), (key,), iter(listed), len(listed)) for key, listed in calls.items()]
        if on_disk is not None:
            calls = dict(sorted(calls.items(), key=lambda of: KEYS.to_bytes((of[0],)), reverse=how[1]))
        expires = 0 if self._ttl_ms is None else now + self._ttl_ms
        expected = [
            (key, call, self.models.setdefault(key, Model()).call(call, now, expires))
            for key, listed in calls.items()
            for call in listed
        ]
        assert list(of_shard.arrive(groups)) == expected
        due = sorted((t, key) for key, model in self.models.items() for t in model.timers if t <= now)
        fired = [(t, key) for key, _, t in of_shard.end_batch()]
        assert sorted(fired) == due
        for t, key in due:
            self.models[key].timers.discard(t)
        pending = [t for model in self.models.values() for t in model.timers]
        wake = of_shard.due_ms
        assert wake is not None and wake <= min(pending) if pending else wake is None or self._ttl_ms is not None
        self.snapshot = of_shard.save().snapshot
        assert self.snapshot["counters"]["timers"] == len(pending)

    def is_empty(self) -> bool:
        return not self.store.values


numbers = st.integers(0, 12)
calls = st.one_of(
    st.tuples(st.sampled_from(["value.update", "list.append"]), numbers),
    st.tuples(st.just("list.put"), st.lists(numbers, min_size=1, max_size=30).map(tuple)),
    st.tuples(st.just("map.update"), st.integers(0, 60), numbers),
    st.tuples(st.sampled_from(["map.get", "map.has", "map.remove"]), st.integers(0, 60)),
    st.tuples(st.sampled_from(["timer.add", "timer.remove"]), st.integers(-5, 60)),
    st.sampled_from(
        [
            (name,)
            for name in (
                "value.get",
                "value.exists",
                "value.clear",
                "list.get",
                "list.exists",
                "list.clear",
                "map.items",
                "map.exists",
                "map.clear",
                "timer.list",
            )
        ]
    ),
)
batches = st.lists(
    st.tuples(
        st.integers(0, 8),
        st.dictionaries(st.integers(0, 3), st.lists(calls, max_size=12), max_size=4),
        st.none() | st.tuples(st.booleans(), st.booleans()),
    ),
    max_size=8,
)


@pytest.mark.parametrize("ttl_ms", [None, TTL_MS])
@pytest.mark.parametrize("page_bytes", [64, 64 << 10])
@given(batches=batches)
@settings(deadline=None)
def test_every_call_gives_what_a_dict_would(ttl_ms: int | None, page_bytes: int, batches: list[Any]) -> None:
    shard, now = Shard(ttl_ms), 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(contents, "PAGE_BYTES", page_bytes)
        patched.setattr(run, "CHUNK_KEYS", 2)
        for step, of_keys, on_disk in batches:
            now += step
            shard.batch(now, of_keys, on_disk)
        # What nobody needs leaves nothing behind, neither pages nor times.
        everything = ("value.clear",), ("list.clear",), ("map.clear",)
        shard.batch(now, {key: list(everything) for key in shard.models})
        shard.batch(now + 1000, {})
        shard.batch(now + 2000, {})
        assert shard.is_empty()


def index_of(shard: Shard) -> list[int]:
    """The times in the index."""
    return [wake_of(entry)[0] for entry, _ in shard.store.scan(*wakes(MIN_MS))]


def test_a_timer_that_moves_leaves_its_entry_until_it_is_scanned() -> None:
    shard = Shard(None)
    shard.batch(1, {1: [("timer.add", 10)], 2: [("timer.add", 50)]})
    assert index_of(shard) == [10, 50]
    shard.batch(2, {1: [("timer.remove", 10), ("timer.add", 20)]})
    assert index_of(shard) == [10, 50], "nothing is due before 20, but the entry is cheap"
    shard.batch(10, {})
    assert index_of(shard) == [20, 50], "it was found, and it moves"
    shard.batch(11, {1: [("timer.add", 12)]})
    assert index_of(shard) == [12, 50], "an earlier timer moves it at once"
    shard.batch(12, {1: [("timer.remove", 12), ("timer.add", 30)]})
    assert index_of(shard) == [20, 50], "this batch scans up to 12"
    shard.batch(13, {1: [("timer.remove", 20), ("timer.remove", 30)]})
    assert index_of(shard) == [50], "a key without timers has no entry"
    shard.batch(60, {})
    assert index_of(shard) == []


def test_state_that_expired_is_removed_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "PAGE_BYTES", 64)
    shard = Shard(TTL_MS)
    shard.batch(1, {1: [("value.update", 1), *(("list.append", n) for n in range(30)), ("map.update", 1, 1)]})
    shard.batch(5, {1: [("map.update", 2, 2)]})
    shard.batch(11, {})
    assert not shard.is_empty(), "the second entry of the map lives until 15"
    shard.batch(15, {})
    assert shard.is_empty()


@pytest.mark.parametrize("page_bytes", [64, 64 << 10])
def test_a_variable_may_get_a_ttl_when_it_has_elements(page_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "PAGE_BYTES", page_bytes)
    shard, calls = Shard(None), [("list.append", 1), *(("map.update", n, n) for n in range(9))]
    shard.batch(1, {1: calls})
    before = dict(shard.store.values)
    shard._ttl_ms = TTL_MS
    shard.batch(2, {1: [("list.append", 2), ("map.update", 60, 2)]})
    shard.batch(5, {1: [("list.append", 3), ("map.update", 61, 3)]})
    shard.batch(12, {})  # removes the elements of 2
    shard.batch(15, {1: [("list.get",), ("map.items",)]})
    assert shard.store.values == before, "elements that had expired were not removed"


def test_a_ttl_may_be_as_long_as_there_is_time() -> None:
    shard = Shard(2**63 - 1)
    shard.batch(1, {1: [("value.update", 1), ("list.append", 1), ("map.update", 1, 1)]})
    shard.batch(2, {1: [("value.get",), ("list.get",), ("map.items",)]})


@pytest.mark.parametrize("values", [1, 2, 40])
def test_values_that_are_larger_than_a_page_take_few_pages(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often pages are split, such a value does not become smaller."""
    monkeypatch.setattr(contents, "PAGE_BYTES", 256)
    large = {pack([n]): ["x" * 2000, n] for n in range(values)}
    content, written = contents.MapContent(), dict[int, Any]()

    class Pages:
        def read(self, numbers: Sequence[int]) -> list[Any]:
            return [written.get(number) for number in numbers]

        def write(self, number: int, page: Any) -> None:
            written[number] = page

    for key, value in large.items():
        content.set(key, value, 0, Pages())
    stored = content.encode(Pages())
    assert len(written) <= 8 * values
    again = contents.MapContent(stored)
    assert dict(again.items(0, Pages())) == large


class Changing(StatefulProcessor):
    """Rows are what to do. ``change``: iterates over its list and its map, and changes them meanwhile."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._list = handle.getListState("l", NUMBER)
        self._map = handle.getMapState("m", NUMBER, NUMBER)

    def handleInputRows(self, key: Any, rows: Iterator[str], timerValues: TimerValues) -> Iterator[Any]:
        for row in rows:
            if row == "fill":
                self._list.put([(n,) for n in range(100)])
                for n in range(100):
                    self._map.updateValue((n,), (n,))
            else:
                listed = []
                for at, (n,) in enumerate(self._list.get()):
                    listed.append(n)
                    if at == 1:
                        self._list.clear()
                        self._list.appendValue((-1,))
                found = {}
                for (k,), (n,) in self._map.iterator():
                    found[k] = n
                    self._map.removeKey((k,))
                    self._map.updateValue((99 - k,), (-1,))
                    self._map.updateValue((1000 + k,), (-1,))
                yield listed, found

    def close(self) -> None:
        pass


@pytest.mark.parametrize("page_bytes", [64, 64 << 10])
def test_an_iterator_gives_what_was_there_when_it_began(page_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "PAGE_BYTES", page_bytes)
    store, handle = MemoryMap(), Handle("none", 1, lambda text: pytest.fail("schemas are not text here"))
    processor, variables = Changing(), Variables(None)
    processor.init(handle)
    handle.initialized()
    handle.begin_shard(variables)
    for rows in (["fill"], ["change"]):
        of_shard = ShardRun(processor, handle, variables, store, KEYS, TimerValues(1, -1), None, None)
        given = list(of_shard.arrive([Group(KEYS.to_bytes((1,)), (1,), iter(rows), 1)]))
    assert given == [(list(range(100)), {n: n for n in range(100)})]


class SeesLater(MemoryMap):
    """Its scans see what is put meanwhile, as those of a real store may if memory is short."""

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        while key := min((k for k in self.values if k >= begin and (end is None or k < end)), default=None):
            begin = key + b"\0"
            yield key, self.values[key]


class Ticking(StatefulProcessor):
    """Sets the next timer when one expires."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self._handle.registerTimer(1)
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        at_ms = expiredTimerInfo.getExpiryTimeInMs()
        self._handle.registerTimer(at_ms + 1)
        yield key[0], at_ms

    def close(self) -> None:
        pass


@pytest.mark.parametrize("store", [MemoryMap, SeesLater])
def test_a_timer_that_is_set_when_it_is_due_expires_in_the_next_batch(
    store: type[MemoryMap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CHUNK_KEYS", 2)
    values, handle = store(), Handle("eventtime", 1, lambda text: pytest.fail("schemas are not text here"))
    processor, variables, snapshot = Ticking(), Variables(None), None
    processor.init(handle)
    handle.initialized()
    handle.begin_shard(variables)
    rows = [Group(KEYS.to_bytes((key,)), (key,), iter([key]), 1) for key in range(7)]
    for batch, groups in enumerate([rows, [], []]):
        of_shard = ShardRun(processor, handle, variables, values, KEYS, TimerValues(1, 50), 50, snapshot)
        assert list(of_shard.arrive(groups)) == []
        assert sorted(of_shard.end_batch()) == [(key, batch + 1) for key in range(7)]
        snapshot = of_shard.save().snapshot


@pytest.mark.parametrize("wrong", [1.5, 1000.0, True, "1", 2**63])
def test_a_timer_is_an_integer(wrong: Any) -> None:
    handle = Handle("eventtime", 1, lambda text: pytest.fail("schemas are not text here"))
    handle.initialized()
    handle.enter(KeyRecord(b"k", None, MemoryMap()))
    for call in (handle.registerTimer, handle.deleteTimer):
        with pytest.raises((TypeError, ValueError)):
            call(wrong)
    assert list(handle.listTimers()) == []
