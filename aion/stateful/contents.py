"""What a state variable holds for one key: a value, a list or a map. Pure: pages are read and written by others.

Small contents are part of the key's record. A list or map that takes more than ``PAGE_BYTES`` there moves to pages of
about this size, which are read when they are needed and written when they change. So a key may have more state than
fits in memory.

Times are in ms. ``expires`` of an element is 0 if the variable has no TTL. An element has expired at ``now_ms`` if
``0 < expires <= now_ms``, as in Spark.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from aion.stateful.packing import pack, unpack
from state_backends.thresholds import threshold

Plain = Sequence[Any]
Element = Sequence[Any]
"""When it expires, its value, and more if it was written by an older schema: see :mod:`aion.stateful.variables`."""
Entry = Sequence[Any]
"""The key of an entry of a map as bytes, and its element."""
PAGE_BYTES = threshold(64 << 10, 64)
_AT_ONCE = threshold(8, 2)  # pages that are read together
_MOST_BITS = 24
_MOST_PAGES = 1 << 32


class ValuePages(Protocol):
    """The pages of one variable of one key."""

    def read(self, numbers: Sequence[int]) -> list[Any]:
        """Returns the contents of pages, or None if there is no such page."""

    def write(self, number: int, content: Any) -> None:
        """Writes a page. None deletes it."""


class Content(Protocol):
    """What a record needs of each kind of content."""

    changed: bool

    def encode(self, pages: ValuePages) -> bytes | None:
        """Returns what the record keeps, or None if it keeps nothing. Writes the pages that changed."""

    def expire(self, now_ms: int, pages: ValuePages) -> int:
        """Removes what has expired. Returns when the next element expires; 0: none does."""


def has_pages(stored: bytes) -> bool:
    """Returns whether content has pages, if nobody knows its kind any more."""
    first, *others = unpack(stored)
    if len(others) == 2:  # a map begins with its bits
        return bool(first >= 0)
    # A list begins with the number of its pages, and a value with the time at which it expires, in ms.
    return bool(0 < first < _MOST_PAGES)


class ValueContent:
    """A value, or none."""

    __slots__ = ("changed", "expires", "value")

    def __init__(self, stored: bytes | None = None) -> None:
        self.value: Plain | None = None
        self.expires = 0
        self.changed = False
        if stored is not None:
            self.expires, self.value = unpack(stored)

    def get(self, now_ms: int) -> Plain | None:
        return None if 0 < self.expires <= now_ms else self.value

    def set(self, value: Plain | None, expires: int) -> None:
        self.value, self.expires = value, expires
        self.changed = True

    def encode(self, pages: ValuePages) -> bytes | None:
        return None if self.value is None else pack([self.expires, self.value])

    def expire(self, now_ms: int, pages: ValuePages) -> int:
        if 0 < self.expires <= now_ms:
            self.set(None, 0)
        return self.expires


class ListContent:
    """A list: pages, which are full, and a tail in the record. An append does not read the pages."""

    def __init__(self, stored: bytes | None = None) -> None:
        self._pages = 0  # in the list
        self._written = 0  # in the store, from this number down
        self._tail: list[Element] = []
        self.changed = False
        if stored is not None:
            self._pages, self._tail = unpack(stored)
            self._written = self._pages

    def exists(self, now_ms: int, pages: ValuePages) -> bool:
        return next(self.get(now_ms, pages), None) is not None

    def get(self, now_ms: int, pages: ValuePages) -> Iterator[Plain]:
        """Returns the values that have not expired, lazily, as they are when the first is taken."""
        if not self._pages:
            return iter([element[1] for element in self._tail if not 0 < element[0] <= now_ms])
        return (element[1] for element in self.elements(pages) if not 0 < element[0] <= now_ms)

    def elements(self, pages: ValuePages) -> Iterator[Element]:
        """Yields all elements, lazily, as they are when the first is taken."""
        tail, count = list(self._tail), self._pages
        for begin in range(0, count, _AT_ONCE):
            for page in pages.read(range(begin, min(begin + _AT_ONCE, count))):
                yield from page
        yield from tail

    def count(self, pages: ValuePages) -> tuple[int, bool]:
        """Returns how many elements there are, and whether that is exact. Else each page counts as the first one
        does.
        """
        if not self._pages:
            return len(self._tail), True
        (first,) = pages.read([0])
        return self._pages * len(first) + len(self._tail), self._pages == 1

    def append(self, value: Plain, expires: int) -> None:
        self._tail.append((expires, value))
        self.changed = True

    def extend(self, values: Sequence[Plain], expires: int) -> None:
        self._tail += [(expires, value) for value in values]
        self.changed = True

    def put(self, values: Sequence[Plain], expires: int) -> None:
        self.clear()
        self.extend(values, expires)

    def clear(self) -> None:
        self._pages, self._tail = 0, []
        self.changed = True

    def encode(self, pages: ValuePages) -> bytes | None:
        data = pack([self._pages, self._tail])
        if len(data) > PAGE_BYTES:
            self._fill_pages(pages, max(1, len(self._tail) * PAGE_BYTES // len(data)))
            data = pack([self._pages, self._tail])
        for number in range(self._pages, self._written):
            pages.write(number, None)
        self._written = self._pages
        return data if self._pages or self._tail else None

    def _fill_pages(self, pages: ValuePages, many: int) -> None:
        """Moves as many elements as fill pages of ``many`` elements from the tail to pages."""
        full = len(self._tail) // many * many
        for begin in range(0, full, many):
            pages.write(self._pages, self._tail[begin : begin + many])
            self._pages += 1
        self._written = max(self._written, self._pages)
        self._tail = self._tail[full:]

    def expire(self, now_ms: int, pages: ValuePages) -> int:
        # Elements expire in the order in which they were appended, but the clock of Spark's driver may go back.
        alive: list[Any] = []
        for begin in range(0, self._pages, _AT_ONCE):
            for page in pages.read(range(begin, min(begin + _AT_ONCE, self._pages))):
                alive += [element for element in page if not 0 < element[0] <= now_ms]
        alive += [element for element in self._tail if not 0 < element[0] <= now_ms]
        self._pages, self._tail = 0, alive
        self.changed = True
        return min((element[0] for element in alive if element[0]), default=0)


class MapContent:
    """A map from bytes: in the record, or in ``2**bits`` pages by the hash of the key."""

    def __init__(self, stored: bytes | None = None) -> None:
        self._bits = -1  # all entries are in the record
        self._count = 0
        self._loaded: dict[int, dict[bytes, Entry]] = {0: {}}
        self._dirty: set[int] = set()
        self._written = 0  # in the store, from this number down
        self.changed = False
        if stored is not None:
            self._bits, self._count, entries = unpack(stored)
            self._written = self._stored_pages()
            self._loaded = {} if self._bits >= 0 else {0: _parsed(entries)}

    @property
    def paged(self) -> bool:
        """Whether the entries are in pages."""
        return self._bits >= 0

    def exists(self, now_ms: int, pages: ValuePages) -> bool:
        found = (entry for page in self._all(self._loaded, pages) for entry in page.values())
        return any(not 0 < entry[1] <= now_ms for entry in found)

    def get(self, key: bytes, now_ms: int, pages: ValuePages) -> Plain | None:
        found = self._page(self._number(key), pages).get(key)
        if found is None or 0 < found[1] <= now_ms:
            return None
        value: Plain = found[2]
        return value

    def set(self, key: bytes, value: Plain, expires: int, pages: ValuePages) -> None:
        number = self._number(key)
        page = self._page(number, pages)
        self._count += key not in page
        page[key] = (key, expires, value)
        self._touch(number)

    def remove(self, key: bytes, pages: ValuePages) -> None:
        number = self._number(key)
        if self._page(number, pages).pop(key, None) is not None:
            self._count -= 1
            self._touch(number)

    def items(self, now_ms: int, pages: ValuePages) -> Iterator[tuple[bytes, Plain]]:
        """Returns the entries that have not expired, lazily, as they are when the first is taken."""
        return ((entry[0], entry[2]) for entry in self.entries(pages) if not 0 < entry[1] <= now_ms)

    def entries(self, pages: ValuePages) -> Iterator[Entry]:
        """Yields all entries, lazily, as they are when the first is taken. Pages that were not in memory do not stay
        there.
        """
        loaded = {number: dict(page) for number, page in self._loaded.items()}
        for page in self._all(loaded, pages):
            yield from page.values()

    @property
    def count(self) -> int:
        """How many entries there are."""
        return self._count

    def clear(self) -> None:
        self._bits, self._count, self._loaded, self._dirty = -1, 0, {0: {}}, set()
        self.changed = True

    def encode(self, pages: ValuePages) -> bytes | None:
        if not self._count:
            self.clear()
        elif self._bits < 0:
            data = pack([-1, self._count, list(self._loaded[0].values())])
            if len(data) <= PAGE_BYTES:
                self._delete_from(0, pages)
                return data
            self._spread(pages, len(data))
        while self._dirty:
            contents = {number: list(self._loaded[number].values()) for number in self._dirty}
            largest = max(len(pack(content)) for content in contents.values())
            if largest > 2 * PAGE_BYTES and self._bits < self._most_bits():
                self._spread(pages, largest)
                continue
            for number, content in contents.items():
                pages.write(number, content or None)
            self._dirty.clear()
        self._delete_from(self._stored_pages(), pages)
        return pack([self._bits, self._count, None]) if self._count else None

    def _delete_from(self, first: int, pages: ValuePages) -> None:
        for number in range(first, self._written):
            pages.write(number, None)
        self._written = first

    def expire(self, now_ms: int, pages: ValuePages) -> int:
        earliest = 0
        for number in range(max(1, self._stored_pages())):
            page = self._page(number, pages)
            dead = [key for key, entry in page.items() if 0 < entry[1] <= now_ms]
            for key in dead:
                del page[key]
            self._count -= len(dead)
            if dead:
                self._touch(number)
            earliest = min((e for _, e, *_ in page.values() if 0 < e < (earliest or e + 1)), default=earliest)
        return earliest

    def _stored_pages(self) -> int:
        return 0 if self._bits < 0 else 1 << self._bits

    def _number(self, key: bytes) -> int:
        return 0 if self._bits <= 0 else zlib.crc32(key) & ((1 << self._bits) - 1)

    def _page(self, number: int, pages: ValuePages) -> dict[bytes, Entry]:
        found = self._loaded.get(number)
        if found is None:
            found = self._loaded[number] = _parsed(pages.read([number])[0])
        return found

    def _all(self, loaded: Mapping[int, dict[bytes, Entry]], pages: ValuePages) -> Iterator[dict[bytes, Entry]]:
        """Yields all pages, lazily: those in memory are ``loaded``, and others as the last batch left them."""
        count = max(1, self._stored_pages())
        for begin in range(0, count, _AT_ONCE):
            numbers = range(begin, min(begin + _AT_ONCE, count))
            missing = [n for n in numbers if n not in loaded]
            found = dict(zip(missing, map(_parsed, pages.read(missing)), strict=True)) if missing else {}
            for number in numbers:
                yield loaded[number] if number in loaded else found[number]

    def _touch(self, number: int) -> None:
        self._dirty.add(number)
        self.changed = True

    def _most_bits(self) -> int:
        """More pages are of no use: an entry that is larger than a page stays as it is, however many there are."""
        return min(_MOST_BITS, self._count.bit_length() + 2)

    def _spread(self, pages: ValuePages, largest: int) -> None:
        """Spreads the entries over more pages, so that the largest takes about half a page."""
        everything = {key: entry for page in self._all(self._loaded, pages) for key, entry in page.items()}
        self._bits = min(self._most_bits(), max(self._bits, 0) + max(1, (largest // PAGE_BYTES).bit_length()))
        self._loaded = {number: {} for number in range(1 << self._bits)}
        for key, entry in everything.items():
            self._loaded[self._number(key)][key] = entry
        self._dirty = set(self._loaded)


def _parsed(entries: Any) -> dict[bytes, Entry]:
    return {} if entries is None else {entry[0]: entry for entry in entries}
