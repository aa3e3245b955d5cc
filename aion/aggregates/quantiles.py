"""Quantiles: exact ones of all values, and a t-digest for many of them. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.groups import Groups, stable_order
from aion.aggregates.lists import each_list, joined, lengths_of, lists_of, offsets_of
from aion.aggregates.partial import Done, Partial, Rows, States
from aion.aggregates.values import (
    Doubles,
    Ints,
    Mask,
    as_integers,
    combined,
    from_integers,
    orderable,
    to_doubles,
)
from aion.errors import needs_extra

# A group of so many values is sorted by itself: numpy sorts values faster than it orders rows.
_LARGE_GROUP = 512


def sorted_lists(lists: pa.ListArray) -> tuple[Doubles, Ints]:
    """The values of all lists as doubles, each list sorted with NaN last; and where each begins and ends."""
    values, offsets = to_doubles(combined(lists.flatten())), offsets_of(lists)
    if len(values) >= _LARGE_GROUP * len(lists):
        values = values.copy()
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            values[begin:end].sort()
        return values, offsets
    order = np.argsort(values)
    ids = each_list(lists).ids
    return values[order[stable_order(ids[order], len(lists))]], offsets


def lower_percentiles(values: States, ranks: Sequence[float], *, array: bool) -> pa.Array:
    """Spark's ``percentile``: between the two values next to the rank, in proportion; null for no values."""
    ordered, offsets = sorted_lists(values[0])
    n = np.diff(offsets)
    there = n > 0
    begins = offsets[:-1][there]
    found = np.zeros((len(n), len(ranks)))
    for i, rank in enumerate(ranks):
        at = (n[there] - 1) * rank
        low = np.floor(at)
        lower, upper = ordered[begins + low.astype(np.int64)], ordered[begins + np.ceil(at).astype(np.int64)]
        with np.errstate(invalid="ignore", over="ignore"):
            between = (low + 1 - at) * lower + (at - low) * upper
        # Where both are one value it is the result, infinite or not.
        found[there, i] = np.where((lower == upper) | (at == low), lower, between)
    return _answer(pa.array(found.ravel(), from_pandas=False), there, array=array)


def _answer(values: pa.Array, there: Mask, *, array: bool) -> pa.Array:
    """One value for each group, or an array of as many as ranks were asked; null where there is none."""
    if not array:
        return pc.if_else(pa.array(there), values, None)
    each = len(values) // max(len(there), 1)
    offsets = pa.array(np.arange(len(there) + 1) * each, pa.int32())
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array(~there))


# -- approximate ------------------------------------------------------------------------------------------

MAX_ACCURACY = 10_000
# A digest of parameter k was off by 4 / k to 6 / k of the ranks, whatever the order and the split; this keeps it below
# 1 / accuracy.
_K_PER_ACCURACY = 8
_LARGEST_K = 65_535
_TAILS = struct.Struct("<qqq")


@dataclass(frozen=True)
class Digest(Partial):
    """What approximate quantiles are read from: a group's values, or beyond 2 k of them a t-digest.

    The digest is that of Apache DataSketches (T. Dunning, O. Ertl 2019), the one of its quantile sketches that is
    deterministic. It takes over when it is the smaller of both, so the many groups of few values stay exact and are
    worked on all at once. In front of its own bytes stand the numbers of -infinities, infinities and NaN, which it
    cannot hold.
    """

    column: str
    type: pa.DataType
    accuracy: int
    commutative = False
    exact = False  # which values share a centroid depends on what was merged before

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.list_(self.type), pa.binary())

    @property
    def k(self) -> int:
        return max(min(_K_PER_ACCURACY * self.accuracy, _LARGEST_K), 10)

    def lift(self, rows: Rows, done: Done) -> States:
        there = rows.present(self.column)
        return self._settled(lists_of(there.groups, there.values[0]), {})

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        values, digests = old[self]
        held: dict[int, list[bytes]] = {}
        for row in np.flatnonzero(digests.is_valid().to_numpy(zero_copy_only=False)).tolist():
            held.setdefault(int(groups.ids[row]), []).append(digests[row].as_py())
        return self._settled(joined(groups, values), held)

    def _settled(self, values: pa.ListArray, held: Mapping[int, list[bytes]]) -> States:
        """Makes digests of the groups that have one already, or too many values."""
        large = set(np.flatnonzero(lengths_of(values) > 2 * self.k).tolist()) | held.keys()
        if not large:
            return [values, pa.nulls(len(values), pa.binary())]
        digests: list[bytes | None] = [None] * len(values)
        for group in sorted(large):
            digests[group] = self._digested(held.get(group, []), _to_doubles(values[group].values))
        keep = np.ones(len(values), bool)
        keep[list(large)] = False
        lengths = np.where(keep, lengths_of(values), 0)
        offsets = pa.array(np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))), pa.int32())
        rest = values.filter(pa.array(keep))
        return [
            pa.ListArray.from_arrays(offsets, combined(rest.flatten())),
            pa.array(digests, pa.binary()),
        ]

    def _digested(self, held: Sequence[bytes], values: Doubles) -> bytes:
        with needs_extra("sketches", "approx_percentile"):
            from datasketches import tdigest_double  # slow to load, and few ask for it

        digest = tdigest_double(self.k)
        tails = [int((values == -np.inf).sum()), int((values == np.inf).sum()), int(np.isnan(values).sum())]
        for state in held:
            tails = [a + b for a, b in zip(tails, _TAILS.unpack_from(state), strict=True)]
            digest.merge(tdigest_double.deserialize(state[_TAILS.size :]))
        digest.update(values[np.isfinite(values)])
        digest.compress()
        return _TAILS.pack(*tails) + bytes(digest.serialize())

    def spec(self) -> list[Any]:
        return [*super().spec(), self.accuracy]


def lower_approximate(state: States, ranks: Sequence[float], *, array: bool) -> pa.Array:
    """Spark's ``approx_percentile``: the smallest value that so large a share of the values does not exceed."""
    lists, digests = state
    values, offsets, n = combined(lists.flatten()), offsets_of(lists), lengths_of(lists)
    order = np.argsort(orderable(values))
    ids = each_list(lists).ids
    order = order[stable_order(ids[order], len(lists))]
    raw = np.flatnonzero(n)
    # Rows of the values, and behind them of what comes from digests.
    at = np.zeros((len(n), len(ranks)), np.int64)
    for i, rank in enumerate(ranks):
        at[raw, i] = order[offsets[raw] + _nth(rank, n[raw]) - 1]
    digested = np.flatnonzero(digests.is_valid().to_numpy(zero_copy_only=False))
    estimates = [_quantiles(digests[group].as_py(), ranks) for group in digested.tolist()]
    at[digested] = len(values) + np.arange(len(digested) * len(ranks)).reshape(-1, len(ranks))
    if estimates:
        values = pa.concat_arrays([values, _from_doubles(np.concatenate(estimates), values.type)])
    there = n > 0
    there[digested] = True
    at[~there] = 0
    found = values.take(pa.array(at.ravel())) if len(values) else pa.nulls(at.size, values.type)
    return _answer(found, there, array=array)


def _nth(rank: float, n: Ints) -> Ints:
    nth: Ints = np.maximum(np.ceil(rank * n).astype(np.int64), 1)
    return nth


def _quantiles(state: bytes, ranks: Sequence[float]) -> Doubles:
    from datasketches import tdigest_double

    low, high, nan = _TAILS.unpack_from(state)
    digest = tdigest_double.deserialize(state[_TAILS.size :])
    inside = 0 if digest.is_empty() else round(digest.get_total_weight())
    found = []
    for nth in (int(_nth(rank, np.array([low + inside + high + nan]))[0]) for rank in ranks):
        if nth <= low:
            found.append(-np.inf)
        elif nth <= low + inside:
            found.append(digest.get_quantile((nth - low - 0.5) / inside))
        else:
            found.append(np.inf if nth <= low + inside + high else np.nan)
    return np.array(found)


def is_quantifiable(type_: pa.DataType) -> bool:
    """Whether values of a type can be put on a line of doubles and taken back."""
    t = pa.types
    return bool(
        t.is_integer(type_) or t.is_floating(type_) or t.is_decimal(type_) or t.is_date(type_) or t.is_timestamp(type_)
    )


def _to_doubles(values: pa.Array) -> Doubles:
    integers = as_integers(values) if pa.types.is_temporal(values.type) else None
    return to_doubles(values) if integers is None else integers.astype(np.float64)


def _from_doubles(values: Doubles, type_: pa.DataType) -> pa.Array:
    if pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        return pa.array(values, from_pandas=False).cast(type_, safe=False)
    if pa.types.is_uint64(type_):
        return pa.array(np.rint(values).clip(0, 2.0**64 - 2**11).astype(np.uint64))
    return from_integers(pa.array(np.rint(values).clip(-(2.0**63), 2.0**63 - 2**10).astype(np.int64)), type_)
