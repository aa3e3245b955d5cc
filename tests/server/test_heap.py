"""The holes in the heap of a state server go back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from state_backends.server import heap

MIB = 1 << 20
SCRIPT = """
import psutil
from state_backends.server.heap import Holes, free_bytes

def resident():
    return psutil.Process().memory_info().rss

holes = Holes()
holes.tick(64 << 20)
values = [bytes([n % 250]) * 3000 for n in range(40_000)]
full = resident()
values[::2] = [None] * 20_000  # every other one: no large piece is free
holed, free = resident(), free_bytes()
kept = [values[at] for at in range(1, 40_000, 2000)]
del values
holes.tick(64 << 20)
print(full >> 20, holed >> 20, free >> 20, resident() >> 20, *(len(value) for value in kept))
"""


@pytest.mark.skipif(heap._library() is None, reason="only glibc says how much of its heap is free")
def test_what_values_leave_behind_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    full, holed, free, left, *sizes = map(int, done.stdout.split())
    assert free > 40 and holed > full - 20, "the heap keeps it"
    assert left < full - 80
    assert sizes == [3000] * 20, "what is used stays as it is"
