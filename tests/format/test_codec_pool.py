"""The codec threads: order, laziness, errors in their place, nothing left behind. Races by events, not by time."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion.core.ingest.builder import BlockBuilder
from aion.core.ingest.encoding import About, BlockSettings, encode, is_quick
from aion.core.query.plan import Plan, make_plan
from aion.errors import CorruptBlock
from aion.execute.panes.applying import decode_all
from state_backends.format.block import Block, BlockKind, Codec, Compression, parse
from state_backends.store.codec_pool import CodecPool
from state_backends.store.protocol import StoredBlock

SECONDS = 30  # until a test that would hang fails


def names() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("aion-codec")]


@pytest.fixture(params=[0, 1, 2], ids="{} threads".format)
def pool(request: pytest.FixtureRequest) -> Iterator[CodecPool]:
    with CodecPool(request.param) as pool:
        yield pool
    assert names() == []


# -- order and laziness -----------------------------------------------------------------------------------


@given(
    st.integers(0, 3),
    st.lists(st.integers()),
    st.integers(1, 5),
    st.sets(st.integers(0, 9)),
    st.none() | st.integers(0, 9),
    st.none() | st.integers(0, 9),
)
def test_it_is_map(
    threads: int, items: list[int], ahead: int, inline: set[int], wrong: int | None, ends: int | None
) -> None:
    """As ``map`` does: results in order, then the exception of the item or of the source, in its place."""

    def function(item: tuple[int, int]) -> int:
        if item[0] == wrong:
            raise KeyError(wrong)
        return item[1] + 1

    def source() -> Iterator[tuple[int, int]]:
        for i, item in enumerate(items):
            if i == ends:
                raise OSError("the disk")
            yield i, item

    def one_by_one(results: Iterator[int]) -> Iterator[object]:
        try:
            yield from results
        except (KeyError, OSError) as error:
            yield repr(error)

    with CodecPool(threads) as pool:
        results = pool.map_ordered(function, source(), ahead=ahead, inline=lambda item: item[0] in inline)
        assert list(one_by_one(results)) == list(one_by_one(map(function, source())))


def test_nothing_is_taken_before_it_is_asked_for_and_no_more_than_ahead(pool: CodecPool) -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for i in range(100):
            taken.append(i)
            yield i

    results = pool.map_ordered(str, source(), ahead=3)
    assert taken == []
    for i in range(100):
        assert next(results) == str(i)
        # Of those not yet handed over, ``ahead`` at most; this one was among them.
        assert len(taken) <= i + (3 if pool.threads else 1)
    assert next(results, None) is None


def test_items_are_taken_in_the_readers_thread_only(pool: CodecPool) -> None:
    """The source may be a generator over a store, which is nobody else's to advance."""
    takers, workers = set(), set()

    def source() -> Iterator[int]:
        for i in range(20):
            takers.add(threading.current_thread())
            yield i

    def work(_: int) -> None:
        workers.add(threading.current_thread())

    for _ in pool.map_ordered(work, source()):
        pass
    assert takers == {threading.main_thread()}
    assert (threading.main_thread() in workers) == (pool.threads == 0)


def test_two_items_are_worked_on_at_once() -> None:
    meet = threading.Barrier(2, timeout=SECONDS)
    with CodecPool(2) as pool:
        # Each waits until the other has begun: in line, or with one thread, this would never end.
        assert sorted(pool.map_ordered(lambda _: meet.wait(), range(2))) == [0, 1]


def test_results_come_in_order_even_if_the_last_is_ready_first() -> None:
    last = threading.Event()

    def work(i: int) -> int:
        if i == 0:
            assert last.wait(SECONDS)
        else:
            last.set()
        return i

    with CodecPool(2) as pool:
        assert list(pool.map_ordered(work, range(2))) == [0, 1]


def test_neither_item_nor_result_is_kept_while_the_reader_works(pool: CodecPool) -> None:
    class Large:
        pass

    alive: weakref.WeakSet[Large] = weakref.WeakSet()

    def make(_: object) -> Large:
        alive.add(large := Large())
        return large

    results = pool.map_ordered(make, map(make, range(4)), ahead=1)
    for _ in range(4):
        next(results)
        # The thread that set the result lets go of it a moment later: nothing but looking tells when.
        deadline = time.monotonic() + SECONDS
        while alive:
            assert time.monotonic() < deadline
            gc.collect()


def test_inline_items_are_worked_on_in_their_turn_and_by_the_reader() -> None:
    done: list[tuple[int, bool]] = []

    def work(i: int) -> int:
        done.append((i, threading.current_thread() is threading.main_thread()))
        return i

    with CodecPool(1) as pool:
        results = pool.map_ordered(work, range(4), ahead=4, inline=lambda i: i % 2 == 0)
        assert next(results) == 0
        assert (2, True) not in done
        assert list(results) == [1, 2, 3]
    assert sorted(done) == [(0, True), (1, False), (2, True), (3, False)]


# -- errors and ends --------------------------------------------------------------------------------------


def test_what_has_not_begun_is_cancelled_when_the_reader_stops() -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def work(i: int) -> int:
        if i == 1:
            begun.set()
            assert go_on.wait(SECONDS)
        done.append(i)
        return i

    with CodecPool(1) as pool:
        results = pool.map_ordered(work, range(10), ahead=5)
        assert next(results) == 0
        assert begun.wait(SECONDS)
        # The reader is let go only when the item under way is done: its bytes may not outlive the reader.
        threading.Timer(0.05, go_on.set).start()
        results.close()
        assert done == [0, 1]
        assert list(pool.map_ordered(str, range(3))) == ["0", "1", "2"]  # the pool is as good as before
    assert done == [0, 1]


@pytest.mark.slow(but_first=True)
def test_an_exception_ends_the_results_and_lets_go_of_the_source(pool: CodecPool) -> None:
    closed = []

    def source() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            closed.append(True)

    results = pool.map_ordered(lambda i: 1 // (2 - i), source())
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(results) == []
    del results
    gc.collect()
    assert closed == [True]


@pytest.mark.slow(but_first=True)
def test_a_forgotten_reader_is_a_closed_one(pool: CodecPool) -> None:
    closed = []

    def source() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            closed.append(True)

    for result in pool.map_ordered(str, source()):
        assert result == "0"
        break
    gc.collect()
    assert closed == [True]


def test_threads_start_when_needed_and_end_with_the_pool() -> None:
    pool = CodecPool(2)
    results = pool.map_ordered(str, range(10))
    assert names() == []
    assert next(results) == "0"
    assert 1 <= len(names()) <= 2
    pool.close()
    pool.close()
    assert names() == []


@pytest.mark.parametrize("items", [2, 5], ids=["all handed over", "some left"])
def test_a_reader_of_a_closed_pool_gets_an_exception(items: int) -> None:
    pool = CodecPool(1)
    begun, handed_over, go_on = threading.Event(), threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        yield from range(2)
        handed_over.set()
        yield from range(2, items)

    def work(i: int) -> int:
        begun.set()
        assert go_on.wait(SECONDS)
        return i

    failed: list[BaseException] = []

    def read() -> None:
        try:
            list(pool.map_ordered(work, source(), ahead=3))
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(SECONDS)
    assert handed_over.wait(SECONDS)
    closing = threading.Thread(target=pool.close)
    closing.start()
    assert pool._executor is not None
    while not pool._executor._shutdown:
        time.sleep(0)
    with pool._executor._shutdown_lock:  # what has not begun is cancelled now
        go_on.set()
    closing.join(SECONDS)
    reader.join(SECONDS)
    assert [type(e) for e in failed] == [CancelledError if items == 2 else RuntimeError]
    with pytest.raises(RuntimeError, match="closed"):
        pool.map_ordered(str, [])


def test_a_closed_pool_without_threads_is_closed_as_well() -> None:
    with CodecPool() as pool:
        assert list(pool.map_ordered(str, [1])) == ["1"]
    with pytest.raises(RuntimeError, match="closed"):
        pool.map_ordered(str, [])


def test_several_readers_share_a_pool() -> None:
    with CodecPool(2) as pool:
        a, b = pool.map_ordered(str, range(50)), pool.map_ordered(int, map(str, range(50)))
        assert list(zip(a, b, strict=True)) == [(str(i), i) for i in range(50)]


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="threads: -1"):
        CodecPool(-1)
    with CodecPool(1) as pool, pytest.raises(ValueError, match="ahead: 0"):
        pool.map_ordered(str, [1], ahead=0)


# -- blocks -----------------------------------------------------------------------------------------------

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us")), ("value", pa.float64())])


def plan_of(*, partials: bool) -> Plan:
    return make_plan(
        SCHEMA,
        key="key",
        time="ts",
        windows=aion.Tumbling("1 second"),
        aggregates={"m": aion.aggregates.mean("value")} if partials else None,
        apply=None if partials else lambda key, window, events: {},
        outputs=None if partials else "n bigint",
    )


def events(n: int) -> pa.RecordBatch:
    rng = np.random.default_rng(n)
    times = pa.array(rng.integers(0, 3_000_000, n)).cast(pa.timestamp("us"))
    return pa.record_batch([rng.integers(0, n // 2, n), times, rng.random(n).round(2)], schema=SCHEMA)


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("compression", Compression)
@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("partials", [False, True])
def test_a_builder_makes_the_same_blocks_in_threads(
    pool: CodecPool, partials: bool, codec: Codec, compression: Compression
) -> None:
    plan, batch = plan_of(partials=partials), events(60_000)
    shards = pa.array(np.arange(60_000) % 2, pa.int32())

    def blocks(pool: CodecPool | None) -> list[tuple[int, Block]]:
        builder = BlockBuilder(plan, BlockSettings(250_000, compression, codec), pool, buffer_bytes=1_000_000)
        added = [b for _ in range(2) for b in builder.add(batch, shards)]
        made = [(made.shard, made.block) for made in [*added, *builder.finish()]]
        # As bytes, since two blocks with the same bytes open them in different places.
        return [(shard, parse(bytes(block.stored))) for shard, block in made]

    made = blocks(pool)
    assert made == blocks(None)
    assert {b.header.codec for _, b in made} == {codec}
    assert {b.header.compression for _, b in made} == {compression}
    stored = [StoredBlock(i, b) for i, (_, b) in enumerate(made)]
    assert any(not is_quick(Codec.ARROW, compression, b.block.header.raw_bytes) for b in stored)
    decoded = list(decode_all(plan, stored, pool))
    assert [(d.seq, d.slice_us) for d in decoded] == [(b.seq, b.block.header.slice_us) for b in stored]
    assert sum(d.batch.num_rows for d in decoded) == sum(b.block.header.rows for b in stored)
    assert {d.batch.schema for d in decoded} == {plan.block_schema}


def test_a_damaged_block_is_named_in_its_place(pool: CodecPool) -> None:
    plan = plan_of(partials=False)

    def stored(seq: int) -> StoredBlock:
        batch = events(20_000)
        return StoredBlock(seq, encode(batch, About(BlockKind.EVENTS, 0, 20_000, 0, 0)))

    blocks = [stored(seq) for seq in range(7, 11)]
    good = bytes(blocks[2].block.stored)
    blocks[2] = StoredBlock(9, Block(blocks[2].block.header, good[:-1] + bytes([good[-1] ^ 1])))
    decoded = decode_all(plan, blocks, pool)
    assert [next(decoded).seq, next(decoded).seq] == [7, 8]
    with pytest.raises(CorruptBlock, match=r"^block 9: "):
        next(decoded)


# -- the GIL ----------------------------------------------------------------------------------------------

WIDE = pa.record_batch({"x": np.random.default_rng(0).random(1 << 20).round(3)})
RAW = WIDE.serialize()
PACKED = {name: pa.Codec(name).compress(RAW) for name in ("lz4", "zstd")}


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda: zlib.crc32(RAW), id="checksum"),
        pytest.param(lambda: WIDE.serialize(), id="serialise"),
        *(
            pytest.param(lambda name=name: pa.Codec(name).compress(RAW), id=f"compress {name}")
            for name in PACKED
        ),
        *(
            pytest.param(
                lambda name=name: pa.Codec(name).decompress(PACKED[name], decompressed_size=RAW.size),
                id=f"decompress {name}",
            )
            for name in PACKED
        ),
    ],
)  # fmt: skip
def test_what_codecs_are_made_of_runs_without_the_gil(work: Callable[[], object]) -> None:
    """A thread is never made to give the GIL away here; if another runs meanwhile, it was given away freely."""
    inside = seen = False
    deadline = time.monotonic() + SECONDS

    def run() -> None:
        nonlocal inside
        while not seen and time.monotonic() < deadline:
            inside = True
            work()
            inside = False
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=run)
    try:
        sys.setswitchinterval(1000)
        thread.start()
        while not seen and thread.is_alive():
            seen = inside
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen


def test_that_test_would_tell() -> None:
    with pytest.raises(AssertionError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "SECONDS", 1)
        test_what_codecs_are_made_of_runs_without_the_gil(lambda: sum(range(100_000)))
