"""The observed lateness: how many events each window got, and how late they were (paper section 3.4). Pure.

Lateness is the watermark at arrival minus the end of the event's window. It is never negative. An event that comes
after its window's bound is observed like any other, so what is learnt does not depend on what was kept.

Observations are grouped by *when the window ended*, not by when the event came, into at most 64 epochs of equal length.
A window that ended an hour ago cannot have shown an event that is two hours late yet. So the estimate has to know for
how long each window has been watched (:mod:`aion.core.lateness.estimate`). Epochs also show how much lateness varies
over time; counts of single events cannot show that where many events are delayed together.

The length of an epoch is a power of two of microseconds, and epochs begin at multiples of it, so the epochs of two
shards fit into each other. When there would be more than 64, neighbours are joined and the length doubles, up to an
eighth of the half-life. After that, the oldest epoch is forgotten. So memory reaches 4 to 8 half-lives back, and a
short history has as many epochs as a long one. Each epoch fades by a weight of ``2 ** (-age / half-life)``, which is
applied when it is read. Counts stay integers, so the order in which shards are merged does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aion.base.numbers import plus, sum_of, sums_by
from aion.core.lateness.sketch import EDGES_US, Ints, LatenessSketch
from aion.core.packing import pack, unpack
from aion.errors import FormatError

MOST_EPOCHS = 64
HALF_LIFE_US = 7 * 86_400_000_000
SNAPSHOT_VERSION = 2
_WITH_WINDOWS = 1  # also has a column that nothing reads: how many windows each epoch has

Floats = npt.NDArray[np.float64]


class Epoch:
    """The windows that ended in one stretch of event time: their events in time, and their late events by lateness."""

    __slots__ = ("late", "on_time", "size_bytes")

    def __init__(self, on_time: int = 0, size_bytes: int = 0) -> None:
        self.on_time = on_time
        self.size_bytes = size_bytes
        self.late = LatenessSketch()

    def merge(self, other: Epoch) -> None:
        self.on_time = plus(self.on_time, other.on_time)
        self.size_bytes = plus(self.size_bytes, other.size_bytes)
        self.late.merge(other.late)


class Cohorts(NamedTuple):
    """The observations at one instant: one row for each of C complete epochs, the oldest first.

    ``ages_us``: how long *all* windows of the epoch have been watched, (C,). ``weights``: after fading, 1 for the
    youngest, (C,). ``on_time``, ``sizes_bytes``: (C,). ``edges_us``: upper edges of the bins that have
    events, (K,), ascending. ``late``: events by epoch and bin, (C, K). Beyond its epoch's age a bin is incomplete: more
    events may still come.
    """

    width_us: int
    ages_us: Ints
    weights: Floats
    on_time: Floats
    sizes_bytes: Floats
    edges_us: Ints
    late: Floats


def room_us(cohorts: Cohorts, max_state_bytes: int, ahead_us: int) -> int | None:
    """Returns the longest bound for which the state takes at most ``max_state_bytes``; None if no sizes are known.

    State covers one stretch of event time: the bound, plus ``ahead_us`` for windows that have not ended and for what
    lies ahead of the watermark. The bound is so long that the fullest such stretch of the past, in whole epochs, would
    have fitted.
    """
    if not len(cohorts.ages_us) or not cohorts.sizes_bytes.any():
        return None
    at = (cohorts.ages_us[0] - cohorts.ages_us) // cohorts.width_us
    sizes = np.zeros(int(at[-1]) + 1)
    sizes[at] = cohorts.sizes_bytes
    upto = np.concatenate([[0.0], np.cumsum(sizes)])
    fullest = np.array([(upto[k:] - upto[: len(upto) - k]).max() for k in range(len(upto))])
    fit = int(np.searchsorted(fullest, max_state_bytes, side="right"))
    if fit < len(fullest):
        epochs = fit - 1 + (max_state_bytes - fullest[fit - 1]) / (fullest[fit] - fullest[fit - 1])
    else:
        epochs = len(sizes) * max_state_bytes / fullest[-1]
    return max(0, int(min(epochs * cohorts.width_us, 2.0**62)) - ahead_us)


class Ahead:
    """How far ahead of the watermark the events of new blocks lie, on average over their bytes. Older blocks fade.

    In a steady stream, the state ahead of the watermark has the size of what arrives in that much event time. No block
    counts as further ahead than ``most_us``, so a few events of a wrong clock change little.
    """

    __slots__ = ("_bytes", "_products", "half_life_us", "most_us")

    def __init__(self, half_life_us: int, most_us: int, snapshot: Sequence[float] | None = None) -> None:
        self.half_life_us = half_life_us
        self.most_us = most_us
        self._bytes, self._products = (0.0, 0.0) if snapshot is None else snapshot

    def observe(self, slice_us: int, at_us: int, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._products += min(max(0, slice_us - at_us), self.most_us) * float(size_bytes)

    def fade(self, by_us: int) -> None:
        """The watermark moves on by ``by_us``."""
        weight = 2.0 ** -(by_us / self.half_life_us)
        self._bytes *= weight
        self._products *= weight

    @property
    def mean_us(self) -> int:
        return int(self._products / self._bytes) if self._bytes else 0

    def to_json(self) -> list[float]:
        return [self._bytes, self._products]


class Lateness:
    """The epochs of one shard, or of several merged shards.

    ``half_life_us``: the event time after which an observation counts half. Raises ValueError if it is below 1.
    """

    __slots__ = ("epochs", "forgotten", "half_life_us", "since_us", "width_us")

    def __init__(self, half_life_us: int = HALF_LIFE_US) -> None:
        if half_life_us < 1:
            raise ValueError(f"half_life_us {half_life_us}: must be 1 or more")
        self.half_life_us = half_life_us
        self.width_us = 1
        self.epochs: dict[int, Epoch] = {}
        # Windows that ended before this are not counted.
        self.since_us: int | None = None
        # Late events of windows that were no longer counted when the events came.
        self.forgotten = 0

    # -- observing ----------------------------------------------------------------------------------------

    def observe(self, end_us: int, at_us: int, events: int) -> None:
        """``events`` late events of a window that ended at ``end_us`` came with the watermark at ``at_us``.

        Call it for kept and for dropped events.
        """
        epoch = self._epoch(end_us)
        if epoch is None:
            self.forgotten = plus(self.forgotten, events)
        else:
            epoch.late.observe(at_us - end_us, events)

    def observe_on_time(self, end_us: int, events: int) -> None:
        """The watermark reached the end of a window, which had ``events`` events by then. Call it once per window."""
        epoch = self._epoch(end_us)
        if epoch is not None:
            epoch.on_time = plus(epoch.on_time, events)

    def observe_all_on_time(self, ends_us: Ints, events: Ints) -> None:
        """:meth:`observe_on_time` for many windows at once. Their ends ascend."""
        begin = 0
        while begin < len(ends_us):
            if self.since_us is not None:  # epochs that began before it are not counted
                counted_us = -(-self.since_us // self.width_us) * self.width_us
                begin += int(np.searchsorted(ends_us[begin:], counted_us))
                if begin == len(ends_us):
                    break
            epoch, width_us = self._epoch(int(ends_us[begin])), self.width_us
            over_us = (int(ends_us[begin]) // width_us + 1) * width_us
            end = begin + int(np.searchsorted(ends_us[begin:], over_us))
            if epoch is not None:
                epoch.on_time = plus(epoch.on_time, sum_of(events[begin:end]))
            begin = end

    def observe_state(self, slice_us: int, at_us: int, size_bytes: int) -> None:
        """A block of the slice that begins at ``slice_us`` came with the watermark at ``at_us``, and is kept.

        Call it once for each block, however many windows share it. A slice ahead of the watermark counts at the
        watermark.
        """
        epoch = self._epoch(min(slice_us, at_us))
        if epoch is not None:
            epoch.size_bytes = plus(epoch.size_bytes, size_bytes)

    def forget_before(self, us: int) -> None:
        """From now on, do not count windows that ended before ``us``. Epochs that began before it are forgotten."""
        self.since_us = us if self.since_us is None else max(self.since_us, us)
        self._fit()

    def restart(self, us: int) -> None:
        """Forget everything. Count only windows that end at ``us`` or later, in short epochs again."""
        self.epochs = {}
        self.width_us = 1
        self.forget_before(us)

    def merge(self, other: Lateness) -> None:
        """Add the observations of another shard. The half-life stays the same.

        A shard counts a window wholly or not at all, so a shard that began later, and lacks windows, does no harm. For
        shards that began at the same watermark, as those of a query do, the order of merging does not matter. For
        others it matters for at most one epoch, the one at the earliest beginning.
        """
        self.forgotten = plus(self.forgotten, other.forgotten)
        begins = [shard.since_us for shard in (self, other) if shard.epochs or shard.since_us is not None]
        self.since_us = None if None in begins else min((us for us in begins if us is not None), default=None)
        while self.width_us < other.width_us:
            self._double()
        shift = (self.width_us // other.width_us).bit_length() - 1
        for index, epoch in other.epochs.items():
            self.epochs.setdefault(index >> shift, Epoch()).merge(epoch)
        self._fit()

    def copy(self) -> Lateness:
        other = Lateness(self.half_life_us)
        other.merge(self)
        return other

    # -- reading ------------------------------------------------------------------------------------------

    @property
    def counts(self) -> dict[int, int]:
        """The late events by bin of :data:`aion.core.lateness.sketch.EDGES_US`, unfaded."""
        whole = LatenessSketch()
        for epoch in self.epochs.values():
            whole.merge(epoch.late)
        return whole.counts

    def span_us(self, at_us: int) -> int:
        """Returns how long before ``at_us`` the oldest epoch begins; 0 without epochs."""
        return max(0, at_us - min(self.epochs) * self.width_us) if self.epochs else 0

    def cohorts(self, at_us: int) -> Cohorts:
        """Returns the epochs that were complete at ``at_us``, a watermark up to which all arrivals have been
        observed.
        """
        # The last window of an epoch ends at least 1 µs before the epoch does, so it has been watched 1 µs longer.
        over = sorted(i for i in self.epochs if (i + 1) * self.width_us - 1 <= at_us)
        epochs = [self.epochs[i] for i in over]
        ages = np.array([at_us - (i + 1) * self.width_us + 1 for i in over], np.int64)
        columns = [epoch.late.columns() for epoch in epochs]
        sizes = [len(bins) for bins, _ in columns]
        nothing = np.empty(0, np.int64)
        used, column = np.unique(np.concatenate([nothing, *(bins for bins, _ in columns)]), return_inverse=True)
        late = np.zeros((len(over), len(used)))
        late[np.repeat(np.arange(len(over)), sizes), column] = np.concatenate([nothing, *(n for _, n in columns)])
        return Cohorts(
            self.width_us,
            ages,
            np.exp2((ages.min(initial=2**62) - ages) / self.half_life_us),
            np.array([epoch.on_time for epoch in epochs], np.float64),
            np.array([epoch.size_bytes for epoch in epochs], np.float64),
            EDGES_US[used],
            late,
        )

    # -- epochs -------------------------------------------------------------------------------------------

    def _epoch(self, end_us: int) -> Epoch | None:
        """Returns the epoch of a window, made if it is new; None if the window is not counted."""
        epoch = self.epochs.get(end_us // self.width_us)
        if epoch is not None:
            return epoch
        self.epochs[end_us // self.width_us] = Epoch()
        self._fit()
        return self.epochs.get(end_us // self.width_us)

    def _fit(self) -> None:
        """Forget epochs that began before ``since_us``. Then join neighbours, or forget the oldest, down to 64."""
        self._keep_from(None if self.since_us is None else -(-self.since_us // self.width_us))
        while self.epochs and max(self.epochs) - min(self.epochs) >= MOST_EPOCHS:
            if 16 * self.width_us <= self.half_life_us:
                self._double()
                # A joined epoch may begin before since_us, and then lacks windows.
                self._keep_from(None if self.since_us is None else -(-self.since_us // self.width_us))
            else:
                self._keep_from(max(self.epochs) - MOST_EPOCHS + 1)

    def _keep_from(self, index: int | None) -> None:
        if index is not None and any(i < index for i in self.epochs):
            self.epochs = {i: epoch for i, epoch in self.epochs.items() if i >= index}

    def _double(self) -> None:
        self.width_us *= 2
        joined: dict[int, Epoch] = {}
        for index in sorted(self.epochs):
            epoch = self.epochs[index]
            if index >> 1 in joined:
                joined[index >> 1].merge(epoch)
            else:
                joined[index >> 1] = epoch
        self.epochs = joined

    # -- snapshot -----------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """JSON values. The half-life is a setting, so it is not among them."""
        order = sorted(self.epochs)
        epochs = [self.epochs[i] for i in order]
        bins_and_counts = [epoch.late.columns() for epoch in epochs]
        nothing = np.empty(0, np.int64)
        columns = [
            np.array(order, np.int64),
            np.array([epoch.on_time for epoch in epochs], np.int64),
            np.array([epoch.size_bytes for epoch in epochs], np.int64),
            np.array([len(bins) for bins, _ in bins_and_counts], np.int64),
            np.concatenate([nothing, *(bins for bins, _ in bins_and_counts)]),
            np.concatenate([nothing, *(counts for _, counts in bins_and_counts)]),
        ]
        return {
            "version": SNAPSHOT_VERSION,
            "width_us": self.width_us,
            "since_us": self.since_us,
            "forgotten": self.forgotten,
            "epochs": pack(columns),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], half_life_us: int = HALF_LIFE_US) -> Lateness:
        """Read what :meth:`to_json` wrote. Raises FormatError for a value that a newer Aion wrote."""
        lateness = cls(half_life_us)
        if "version" not in value:
            # Counts by lateness alone, from before there were epochs. Without the windows' ends they are of no use.
            return lateness
        if value["version"] not in (SNAPSHOT_VERSION, _WITH_WINDOWS):
            raise FormatError(f"lateness of format {value['version']}: this Aion reads {SNAPSHOT_VERSION}")
        width_us, since_us, forgotten = value["width_us"], value["since_us"], value["forgotten"]
        if not isinstance(width_us, int) or width_us < 1 or width_us & (width_us - 1):
            raise FormatError(f"epochs of {width_us!r} us: the length of an epoch must be a power of two")
        if not isinstance(0 if since_us is None else since_us, int) or not isinstance(forgotten, int):
            raise FormatError("lateness: since_us must be an integer or null, and forgotten must be an integer")
        lateness.width_us, lateness.since_us, lateness.forgotten = width_us, since_us, forgotten
        columns = unpack(value["epochs"])
        if value["version"] == _WITH_WINDOWS:
            del columns[2]
        order, on_time, size_bytes, lengths, bins, counts = columns
        at = 0
        for row, index in enumerate(order.tolist()):
            epoch = Epoch(int(on_time[row]), int(size_bytes[row]))
            stop = at + int(lengths[row])
            epoch.late = LatenessSketch(zip(bins[at:stop].tolist(), counts[at:stop].tolist(), strict=True))
            lateness.epochs[index] = epoch
            at = stop
        lateness._fit()
        return lateness


class NewBounds(Protocol):
    """Decides the bound of new windows. It observes arrivals and watermark advances."""

    @property
    def lateness(self) -> Lateness:
        """What has been learnt about how late events come."""

    def bound_for_new_window(self) -> int:
        """Returns microseconds."""

    def reason_for_new_window(self) -> int:
        """Why it is that bound: the code of a :class:`policies.cleanup.Reason`."""

    def observe(self, end_us: int, at_us: int, events: int) -> None:
        """See :meth:`Lateness.observe`."""

    def observe_on_time(self, end_us: int, events: int) -> None:
        """See :meth:`Lateness.observe_on_time`."""

    def observe_all_on_time(self, ends_us: Ints, events: Ints) -> None:
        """See :meth:`Lateness.observe_all_on_time`."""

    def observe_state(self, slice_us: int, at_us: int, size_bytes: int) -> None:
        """See :meth:`Lateness.observe_state`."""

    def advance(self, from_us: int | None, to_us: int) -> None:
        """The watermark is about to move. Everything that arrived while it was at ``from_us`` has been observed."""

    def to_json(self) -> dict[str, Any]:
        """Returns the state for the snapshot."""


def observe_late(bound: NewBounds, ends_us: Ints, events: Ints, at_us: int) -> None:
    """Events arrived with the watermark at ``at_us``, after the ends of their windows. (N,) each."""
    ends, end_of = np.unique(ends_us, return_inverse=True)
    for end_us, count in zip(ends.tolist(), sums_by(end_of, events, len(ends)).tolist(), strict=True):
        bound.observe(end_us, at_us, count)
