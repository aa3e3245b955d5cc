"""The slice of each event. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.groups import Coded
from aion.base.numbers import EARLIEST_US, LATEST_US
from aion.core.slicing.edges import EdgeSet
from aion.core.slicing.grid import BEYOND_SLICE, NO_SLICE

Flags = npt.NDArray[np.bool_]


class Flagged(NamedTuple):
    """A mask of events that no window takes, and the slice that says why."""

    which: Flags
    slice_us: int


def coded(edges: EdgeSet, times: pa.Array, *flagged: Flagged) -> Coded:
    """The slice of each event, as codes: it starts at the last edge at or before the event.

    Events without a time get NO_SLICE, those with a time out of range get BEYOND_SLICE, and flagged ones their own.
    """
    values = times.cast(pa.int64())
    is_null = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    micros = (values.fill_null(0) if is_null is not None else values).to_numpy(zero_copy_only=False)
    is_beyond = None
    extent = (int(micros.min()), int(micros.max())) if len(micros) else (0, 0)
    if extent[0] < EARLIEST_US or extent[1] > LATEST_US:
        is_beyond = (micros < EARLIEST_US) | (micros > LATEST_US)
    named = (is_beyond, BEYOND_SLICE), (is_null, NO_SLICE), *flagged
    outside = [(flags, name) for flags, name in named if flags is not None]
    if outside:
        inside = ~np.logical_or.reduce([flags for flags, _ in outside])
        # Times outside the range must not widen the extent that the edges are computed for.
        micros = np.where(inside, micros, micros[inside][0] if inside.any() else 0)
        extent = int(micros.min()), int(micros.max())
    codes, starts = edges.slots(micros, extent)
    for flags, name in outside:
        codes = np.where(flags, len(starts), codes)
        starts = np.append(starts, name)
    return Coded(codes, pa.array(starts))


def within(times: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Two masks: whether each time is not before the allowed range, and not after it. Null if there is no time."""
    micros = times.cast(pa.int64())
    return pc.greater_equal(micros, EARLIEST_US), pc.less_equal(micros, LATEST_US)
