"""How much of a window must be in memory when its execution starts: against a disk and a function that take turns."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policies.sizing import Execution, m_bucket_bytes, processing_bytes_per_s


def waits(blocks: Sequence[int], memory_bytes: int, staging: Fraction, processing: Fraction) -> Fraction:
    """Seconds that a non-blocking function waits: the first blocks are in memory, the rest is staged from time 0."""
    held, time_s, waited_s, staged = 0, Fraction(0), Fraction(0), 0
    for block in blocks:
        if held < memory_bytes:
            held += block
        else:
            staged += block
            there_s = staged / staging
            waited_s += max(Fraction(0), there_s - time_s)
            time_s = max(time_s, there_s)
        time_s += block / processing
    return waited_s


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    largest = draw(st.integers(1, 50))
    blocks = draw(st.lists(st.integers(1, largest), min_size=1, max_size=40))
    return blocks, largest, draw(st.integers(1, 1000)), draw(st.integers(1, 1000))


@given(workloads())
def test_a_non_blocking_function_never_waits(workload: tuple[list[int], int, int, int]) -> None:
    blocks, largest, staging, processing = workload
    total = sum(blocks)
    size = m_bucket_bytes(total, staging, processing, blocking=False, block_bytes=largest)
    assert waits(blocks, size, Fraction(staging), Fraction(processing)) == 0
    bound = total * (1 - Fraction(staging, processing)) if processing > staging else min(largest, total)
    assert bound <= size <= total
    assert size <= max(bound, 0) + 2 * largest, "no more than is needed, but for whole blocks"


@given(workloads())
def test_with_less_than_the_formula_of_the_paper_it_does_wait(workload: tuple[list[int], int, int, int]) -> None:
    blocks, _, staging, processing = workload
    assume(processing > staging)
    bound = sum(blocks) * (1 - Fraction(staging, processing))
    for prefix in range(len(blocks)):
        held = sum(blocks[:prefix])
        if held < bound:
            assert waits(blocks, held, Fraction(staging), Fraction(processing)) > 0


@pytest.mark.parametrize("speeds", [(None, 5.0), (5.0, None), (None, None), (0.0, 5.0), (5.0, 0.0), (-1.0, 5.0)])
def test_without_speeds_it_is_the_whole_window(speeds: tuple[float | None, float | None]) -> None:
    assert m_bucket_bytes(12_345, *speeds, blocking=False, block_bytes=10) == 12_345


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.integers(1, 1 << 20), st.integers(0, 1 << 20)), min_size=1))
def test_a_function_that_waits_for_its_blocks_is_not_taken_for_a_slow_one(
    executed: list[tuple[int, int, int]],
) -> None:
    told = processing_bytes_per_s(Execution(size, worked + waited, waited) for size, worked, waited in executed)
    sizes, worked, _ = zip(*executed, strict=True)
    assert told == pytest.approx(sum(sizes) / sum(worked))


def test_a_function_that_only_waits_gets_the_whole_window() -> None:
    """The disk keeps up with it, so it seems; but it keeps up with the disk."""
    told = processing_bytes_per_s([Execution(1000, 2.0, 2.0)])
    assert told is None
    assert m_bucket_bytes(1000, 500.0, told, blocking=False, block_bytes=10) == 1000


@given(st.integers(0, 1 << 50), st.floats(0.1, 1e12), st.floats(0.1, 1e12), st.integers(1, 1 << 30))
def test_a_blocking_function_gets_the_whole_window_and_the_other_never_more(
    window_bytes: int, staging: float, processing: float, block: int
) -> None:
    assert m_bucket_bytes(window_bytes, staging, processing, blocking=True, block_bytes=block) == window_bytes
    assert 0 <= m_bucket_bytes(window_bytes, staging, processing, blocking=False, block_bytes=block) <= window_bytes


def test_the_example_of_the_formula() -> None:
    """100 blocks of 10, processed twice as fast as staged: half of them, and the last block's half."""
    assert m_bucket_bytes(1000, 50.0, 100.0, blocking=False, block_bytes=10) == 510
    assert m_bucket_bytes(1000, 100.0, 50.0, blocking=False, block_bytes=10) == 10
    assert m_bucket_bytes(4, 100.0, 50.0, blocking=False, block_bytes=10) == 4


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        m_bucket_bytes(100, 1.0, 1.0, blocking=False, block_bytes=0)
