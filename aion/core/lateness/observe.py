"""What is known of lateness: which windows got how many events, and how late (paper section 3.4). Pure.

Lateness is the watermark at arrival minus the end of the event's window, never negative. An event that comes later than
its window's bound is observed like any other: what is learnt does not depend on what was kept.

Observations are kept by *when the window ended*, in at most 64 epochs of equal length, and not by when the event came.
A window that ended an hour ago cannot have shown an event that is two hours late; to tell "none is so late" from "none
can have come yet", one has to know for how long each window has been watched (:mod:`aion.core.lateness.estimate`).
Epochs also show how much the lateness varies from one stretch of time to the next, which single events that are delayed
together do not.

Epochs are as long as a power of two of microseconds and begin at its multiples: two shards' epochs fit into each other.
When there would be more than 64, neighbours are joined, up to an eighth of the half-life; from then on the oldest is
forgotten. So memory reaches 4 to 8 half-lives back, and a young history is as finely divided as an old one. Fading is a
weight of ``2 ** (-age / half-life)`` on each epoch when it is asked for: counts stay integers, and the shards of a
query merge to the same in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aion.core.lateness.sketch import EDGES_US, Ints, LatenessSketch
from aion.core.numbers import plus, sum_of
from aion.core.packing import pack, unpack
from aion.errors import FormatError

MOST_EPOCHS = 64
HALF_LIFE_US = 7 * 86_400_000_000
SNAPSHOT_VERSION = 1

Floats = npt.NDArray[np.float64]


class Epoch:
    """The windows that ended in one stretch of event time: their events in time, and the late ones by lateness."""

    __slots__ = ("late", "on_time", "size_bytes", "windows")

    def __init__(self, on_time: int = 0, windows: int = 0, size_bytes: int = 0) -> None:
        self.on_time = on_time
        self.windows = windows
        self.size_bytes = size_bytes
        self.late = LatenessSketch()

    def merge(self, other: Epoch) -> None:
        self.on_time = plus(self.on_time, other.on_time)
        self.windows = plus(self.windows, other.windows)
        self.size_bytes = plus(self.size_bytes, other.size_bytes)
        self.late.merge(other.late)


class Cohorts(NamedTuple):
    """What is known at one instant, a row per epoch that is over, the oldest first.

    ``ages_us``: how long *all* of its windows have been watched, shape (C,). ``weights``: what is left after fading,
    1 for the youngest. ``on_time``, ``windows``, ``sizes_bytes``: (C,). ``edges_us``: upper edges of the bins that have
    events, (K,), ascending. ``late``: events by epoch and bin, (C, K); those later than their epoch's age are there but
    not yet all of them.
    """

    width_us: int
    ages_us: Ints
    weights: Floats
    on_time: Floats
    windows: Floats
    sizes_bytes: Floats
    edges_us: Ints
    late: Floats


def room_us(cohorts: Cohorts, max_state_bytes: int, ahead_us: int) -> int | None:
    """The bound with which the windows that are kept have at most so many bytes of state; None if none is known.

    What is kept at any time are the windows of one stretch of event time: their bound, and ``ahead_us`` of those that
    have not ended. It is the longest stretch such that even the fullest one of the past, whole epochs, fits.
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


class Lateness:
    """The epochs of one shard, or of several that were merged.

    ``half_life_us``: after how much event time an observation counts half.
    """

    __slots__ = ("epochs", "forgotten", "half_life_us", "since_us", "width_us")

    def __init__(self, half_life_us: int = HALF_LIFE_US) -> None:
        if half_life_us < 1:
            raise ValueError(f"half_life_us {half_life_us}: must be 1 or more")
        self.half_life_us = half_life_us
        self.width_us = 1
        self.epochs: dict[int, Epoch] = {}
        # Windows that ended before are not counted; None: all are.
        self.since_us: int | None = None
        # Late events of windows that were not counted any more when they came.
        self.forgotten = 0

    # -- what is observed ---------------------------------------------------------------------------------

    def observe(self, end_us: int, at_us: int, events: int) -> None:
        """``events`` of a window that ended at ``end_us`` came when the watermark was at ``at_us``: kept or dropped."""
        epoch = self._epoch(end_us)
        if epoch is None:
            self.forgotten = plus(self.forgotten, events)
        else:
            epoch.late.observe(at_us - end_us, events)

    def observe_on_time(self, end_us: int, events: int) -> None:
        """The watermark reached the end of a window that had ``events`` by then. Once for each window."""
        epoch = self._epoch(end_us)
        if epoch is not None:
            epoch.on_time = plus(epoch.on_time, events)
            epoch.windows += 1

    def observe_all_on_time(self, ends_us: Ints, events: Ints) -> None:
        """The same for many windows at once; their ends ascend."""
        begin = 0
        while begin < len(ends_us):
            if self.since_us is not None:  # windows of epochs that began before it are not counted
                counted_us = -(-self.since_us // self.width_us) * self.width_us
                begin += int(np.searchsorted(ends_us[begin:], counted_us))
                if begin == len(ends_us):
                    break
            epoch, width_us = self._epoch(int(ends_us[begin])), self.width_us
            over_us = (int(ends_us[begin]) // width_us + 1) * width_us
            end = begin + int(np.searchsorted(ends_us[begin:], over_us))
            if epoch is not None:
                epoch.on_time = plus(epoch.on_time, sum_of(events[begin:end]))
                epoch.windows += end - begin
            begin = end

    def observe_state(self, slice_us: int, at_us: int, size_bytes: int) -> None:
        """A block of a slice that begins at ``slice_us`` came, with the watermark at ``at_us``, and is kept.

        Each block once, however many windows share it. What is ahead of the watermark counts for where that is.
        """
        epoch = self._epoch(min(slice_us, at_us))
        if epoch is not None:
            epoch.size_bytes = plus(epoch.size_bytes, size_bytes)

    def forget_before(self, us: int) -> None:
        """Windows that ended before ``us`` do not count, now and from now on: epochs that began before it go."""
        self.since_us = us if self.since_us is None else max(self.since_us, us)
        self._fit()

    def restart(self, us: int) -> None:
        """Nothing that was learnt holds any more: count from windows that end at ``us`` on, in fine epochs again."""
        self.epochs = {}
        self.width_us = 1
        self.forget_before(us)

    def merge(self, other: Lateness) -> None:
        """Take in what another shard observed; the half-life stays this one's.

        A shard counts each window wholly or not at all, so one that began later, and lacks windows, is no harm. The
        same in any order for shards that begin at the same watermark, as those of a query do; where they do not, within
        one epoch at the earliest beginning.
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

    # -- what is known ------------------------------------------------------------------------------------

    @property
    def late_events(self) -> int:
        """Late events remembered, unfaded."""
        return sum(epoch.late.total for epoch in self.epochs.values())

    @property
    def counts(self) -> dict[int, int]:
        """Late events remembered by bin of :data:`aion.core.lateness.sketch.EDGES_US`, unfaded."""
        whole = LatenessSketch()
        for epoch in self.epochs.values():
            whole.merge(epoch.late)
        return whole.counts

    def span_us(self, at_us: int) -> int:
        """How far back the oldest epoch begins; 0 without any."""
        return max(0, at_us - min(self.epochs) * self.width_us) if self.epochs else 0

    def cohorts(self, at_us: int) -> Cohorts:
        """The epochs that were over at ``at_us``: a watermark up to which everything that came has been observed."""
        # An epoch's windows end before its own end: the youngest one has been watched for one microsecond longer.
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
            np.array([epoch.windows for epoch in epochs], np.float64),
            np.array([epoch.size_bytes for epoch in epochs], np.float64),
            EDGES_US[used],
            late,
        )

    # -- epochs -------------------------------------------------------------------------------------------

    def _epoch(self, end_us: int) -> Epoch | None:
        """The epoch of a window; None if it is not counted."""
        epoch = self.epochs.get(end_us // self.width_us)
        if epoch is not None:
            return epoch
        self.epochs[end_us // self.width_us] = Epoch()
        self._fit()
        return self.epochs.get(end_us // self.width_us)

    def _fit(self) -> None:
        """Forget what is before the beginning; then join neighbours, or forget the oldest, until there are few."""
        self._keep_from(None if self.since_us is None else -(-self.since_us // self.width_us))
        while self.epochs and max(self.epochs) - min(self.epochs) >= MOST_EPOCHS:
            if 16 * self.width_us <= self.half_life_us:
                self._double()
                # An epoch that began before the beginning would not have seen all of its windows.
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
        """JSON values; the half-life is a setting and not among them."""
        order = sorted(self.epochs)
        epochs = [self.epochs[i] for i in order]
        bins_and_counts = [epoch.late.columns() for epoch in epochs]
        nothing = np.empty(0, np.int64)
        columns = [
            np.array(order, np.int64),
            np.array([epoch.on_time for epoch in epochs], np.int64),
            np.array([epoch.windows for epoch in epochs], np.int64),
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
        """What :meth:`to_json` gave. Raises FormatError for what a newer Aion wrote."""
        lateness = cls(half_life_us)
        if "version" not in value:
            # Counts without their windows' ends, from before there were epochs: nothing can be learnt from them.
            return lateness
        if value["version"] != SNAPSHOT_VERSION:
            raise FormatError(f"lateness of format {value['version']}: this Aion reads {SNAPSHOT_VERSION}")
        width_us, since_us, forgotten = value["width_us"], value["since_us"], value["forgotten"]
        if not isinstance(width_us, int) or width_us < 1 or width_us & (width_us - 1):
            raise FormatError(f"epochs of {width_us!r} us: their length is a power of two")
        if not isinstance(0 if since_us is None else since_us, int) or not isinstance(forgotten, int):
            raise FormatError("lateness counts from no instant, and forgot no number of events")
        lateness.width_us, lateness.since_us, lateness.forgotten = width_us, since_us, forgotten
        order, on_time, windows, size_bytes, lengths, bins, counts = unpack(value["epochs"])
        at = 0
        for row, index in enumerate(order.tolist()):
            epoch = Epoch(int(on_time[row]), int(windows[row]), int(size_bytes[row]))
            stop = at + int(lengths[row])
            epoch.late = LatenessSketch(zip(bins[at:stop].tolist(), counts[at:stop].tolist(), strict=True))
            lateness.epochs[index] = epoch
            at = stop
        lateness._fit()
        return lateness


class NewBounds(Protocol):
    """Who says how late events of a new window may be; it is told what comes, and when the watermark moves."""

    lateness: Lateness

    def bound_for_new_window(self) -> int:
        """Microseconds."""

    def reason_for_new_window(self) -> int:
        """What decided it: the code of a :class:`policies.cleanup.Reason`."""

    def observe(self, end_us: int, at_us: int, events: int) -> None:
        """See :meth:`Lateness.observe`."""

    def observe_on_time(self, end_us: int, events: int) -> None:
        """See :meth:`Lateness.observe_on_time`."""

    def observe_all_on_time(self, ends_us: Ints, events: Ints) -> None:
        """See :meth:`Lateness.observe_all_on_time`."""

    def observe_state(self, slice_us: int, at_us: int, size_bytes: int) -> None:
        """See :meth:`Lateness.observe_state`."""

    def advance(self, from_us: int | None, to_us: int) -> None:
        """The watermark moves; all that came while it was at ``from_us`` has been told."""

    def to_json(self) -> dict[str, Any]:
        """For the snapshot."""
