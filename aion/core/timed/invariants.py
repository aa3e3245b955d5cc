"""What is true of the kept windows after each fact. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from aion.base.numbers import NEVER
from aion.core.life.window_table import WindowTable

Ints = npt.NDArray[np.int64]


def check(
    windows: WindowTable, at_us: int | None, next_seq: int, segments_of: Callable[[Ints], tuple[int, ...]]
) -> None:
    """Raises AssertionError that says which window breaks what.

    ``at_us``: the watermark. ``next_seq``: the number of the next block. ``segments_of``: the kept segments of windows.
    """
    order = np.lexsort((windows["definition"], windows["end_us"]))
    assert (order == np.arange(len(windows))).all(), "windows are in the order of their ends"
    for row, ref in enumerate(windows.refs()):
        state = {name: column[row] for name, column in windows.columns.items()}
        assert not windows.over(np.array([row]), at_us)[0] or state["owed"] > 0, f"{ref} outlived its bound"
        assert state["executed_seq"] <= state["last_seq"] < next_seq, f"{ref}: {state}"
        assert (state["pending"] > 0) == (state["last_seq"] > state["executed_seq"]), f"{ref}: {state}"
        late = at_us is not None and ref.end_us <= at_us
        assert late == (state["late_from_seq"] < NEVER), f"{ref}: {state}"
        assert segments_of(np.array([row])), f"{ref} has no segment"
