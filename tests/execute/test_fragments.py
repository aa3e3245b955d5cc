"""Blocks as rows of a shuffle: whatever order and company the rows come in, the blocks are those that were sent."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.ingest.encoding import About, encode
from aion.core.ingest.fragments import BATCH_BYTES, LEAST_BYTES, Defragmenter, Fragmenter, fragment_bytes
from aion.errors import CorruptBlock
from state_backends.format.block import Block, BlockKind


def block_of(size: int, slice_us: int = 0) -> Block:
    batch = pa.record_batch({"v": pa.array([bytes([slice_us % 256]) * size])})
    return encode(batch, About(BlockKind.EVENTS, slice_us, 1, 0, 0))


@given(data=st.data(), limit=st.integers(25, 3000))
def test_blocks_come_out_as_they_went_in_however_their_rows_are_mixed(data: st.DataObject, limit: int) -> None:
    senders = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3, unique=True))
    sent: list[bytes] = []
    rows: list[bytes] = []
    for sender in senders:
        fragmenter = Fragmenter(sender, limit)
        for size in data.draw(st.lists(st.integers(0, 2000), max_size=5)):
            block = block_of(size, slice_us=len(sent))
            sent.append(bytes(block.stored))
            rows += fragmenter.rows(block)
    assert all(len(row) <= limit for row in rows)
    parts = Defragmenter()
    mixed = data.draw(st.permutations(rows))
    cut = data.draw(st.integers(0, len(mixed)))
    came = [bytes(b.stored) for half in (mixed[:cut], mixed[cut:]) for b in parts.blocks(half)]
    parts.end()
    assert Counter(came) == Counter(sent)


def test_a_sender_may_send_any_number_of_blocks() -> None:
    fragmenter, parts = Fragmenter(1, 100, serial=2**32 - 2), Defragmenter()
    sent = [block_of(500, slice_us=number) for number in range(4)]
    assert [next(parts.blocks(fragmenter.rows(block))).data for block in sent] == [block.stored for block in sent]
    parts.end()


def test_a_block_that_fits_is_one_row_and_its_own_bytes() -> None:
    block = block_of(100)
    assert list(Fragmenter(1, block.size_bytes).rows(block)) == [block.stored]
    assert len(list(Fragmenter(1, block.size_bytes - 1).rows(block))) == 2


@pytest.mark.usual_sizes
def test_rows_are_so_large_that_a_batch_of_them_is_bounded() -> None:
    assert fragment_bytes(4096) * 4096 == BATCH_BYTES
    assert fragment_bytes(10**9) == LEAST_BYTES
    assert fragment_bytes(0) == fragment_bytes(-1) == fragment_bytes(10_000)


def test_a_fragment_that_never_came_is_told() -> None:
    rows = list(Fragmenter(7, 1000).rows(block_of(5000)))
    parts = Defragmenter()
    assert not list(parts.blocks(rows[:2] + rows[3:]))
    with pytest.raises(CorruptBlock, match=rf"block 0 of sender 7: only {len(rows) - 1} of its {len(rows)} fragments"):
        parts.end()


def test_a_fragment_that_came_twice_is_told() -> None:
    rows = list(Fragmenter(7, 1000).rows(block_of(5000)))
    with pytest.raises(CorruptBlock, match="block 0 of sender 7: fragment 1 of 6 came twice"):
        list(Defragmenter().blocks([rows[0], rows[1], rows[1]]))


@pytest.mark.parametrize("row", [b"AIOF", b"AIOF" + bytes(10), b"AIOF" + b"\xff" * 20])
def test_a_damaged_fragment_is_told(row: bytes) -> None:
    with pytest.raises(CorruptBlock, match="fragment"):
        list(Defragmenter().blocks([row]))


def test_fragments_that_do_not_agree_how_many_there_are_make_no_block() -> None:
    rows = [bytearray(row) for row in Fragmenter(7, 1000).rows(block_of(5000))]
    rows[1][8] += 1
    parts = Defragmenter()
    assert not list(parts.blocks(rows))
    with pytest.raises(CorruptBlock, match="block 0 of sender 7: only"):
        parts.end()


def test_a_limit_below_a_header_is_refused() -> None:
    with pytest.raises(ValueError, match="header"):
        Fragmenter(1, 24)
