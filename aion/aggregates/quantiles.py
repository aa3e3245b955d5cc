"""Quantiles: exact from all values, or approximate from a t-digest. Pure."""

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
from state_backends.thresholds import threshold

# Groups of at least this many values are sorted one by one: numpy's sort is faster than its argsort.
_LARGE_GROUP = threshold(512, 2)


def sorted_lists(lists: pa.ListArray) -> tuple[Doubles, Ints]:
    """Returns the values of all lists as doubles, each list sorted with NaN last, and the offsets of the lists."""
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
    """Spark's ``percentile``: interpolates linearly between the two values next to the rank; null without values."""
    ordered, offsets = sorted_lists(values[0])
    n = np.diff(offsets)
    nonempty = n > 0
    begins = offsets[:-1][nonempty]
    found = np.zeros((len(n), len(ranks)))
    for i, rank in enumerate(ranks):
        at = (n[nonempty] - 1) * rank
        low = np.floor(at)
        lower, upper = ordered[begins + low.astype(np.int64)], ordered[begins + np.ceil(at).astype(np.int64)]
        with np.errstate(invalid="ignore", over="ignore"):
            between = (low + 1 - at) * lower + (at - low) * upper
        # If both values are equal, they are the result, even if they are infinite.
        found[nonempty, i] = np.where((lower == upper) | (at == low), lower, between)
    return _answer(pa.array(found.ravel(), from_pandas=False), nonempty, array=array)


def _answer(values: pa.Array, nonempty: Mask, *, array: bool) -> pa.Array:
    """Returns one value for each group, or an array with a value per rank; null for an empty group."""
    if not array:
        return pc.if_else(pa.array(nonempty), values, None)
    each = len(values) // max(len(nonempty), 1)
    offsets = pa.array(np.arange(len(nonempty) + 1) * each, pa.int32())
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array(~nonempty))


# -- approximate ------------------------------------------------------------------------------------------

MAX_ACCURACY = 10_000
# In measurements, the rank of a digest with parameter k was off by 4 / k to 6 / k, for every order and split of the
# values. This factor keeps it below 1 / accuracy.
_K_PER_ACCURACY = 8
_LARGEST_K = 65_535
_TAILS = struct.Struct("<qqq")


@dataclass(frozen=True)
class Digest(Partial):
    """The state of approximate quantiles: the values of a group, or a t-digest if there are more than 2 k values.

    The digest is that of Apache DataSketches (T. Dunning, O. Ertl 2019), its only deterministic quantile sketch. It is
    used once it is smaller than the values. Most groups are small. They stay exact, and are computed all at once. The
    digest cannot hold infinities and NaN: their numbers (-infinity, infinity, NaN) are stored before its
    bytes.
    """

    column: str
    type: pa.DataType
    accuracy: int
    commutative = False
    exact = False  # which values share a centroid depends on the earlier merges

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.list_(self.type), pa.binary())

    @property
    def k(self) -> int:
        return max(min(_K_PER_ACCURACY * self.accuracy, _LARGEST_K), 10)

    def entered(self, states: Mapping[Partial, States]) -> pa.Array:
        values, digests = states[self]
        counts = lengths_of(values).astype(np.int64)
        for group in np.flatnonzero(digests.is_valid().to_numpy(zero_copy_only=False)).tolist():
            low, inside, high, nan = _sizes(*_opened(digests[group].as_py()))
            counts[group] += low + inside + high + nan
        return pa.array(counts)

    def lift(self, rows: Rows, done: Done) -> States:
        kept = rows.present(self.column)
        return self._settled(lists_of(kept.groups, kept.values[0]), {})

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        values, digests = old[self]
        held: dict[int, list[bytes]] = {}
        for row in np.flatnonzero(digests.is_valid().to_numpy(zero_copy_only=False)).tolist():
            held.setdefault(int(groups.ids[row]), []).append(digests[row].as_py())
        return self._settled(joined(groups, values), held)

    def _settled(self, values: pa.ListArray, held: Mapping[int, list[bytes]]) -> States:
        """Returns the state, with digests for the groups that already have one or that have too many values."""
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
            from datasketches import tdigest_double  # slow to load, and rarely needed

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
    """Spark's ``approx_percentile``: for each rank, the smallest value that this share of values does not exceed."""
    lists, digests = state
    values, offsets, n = combined(lists.flatten()), offsets_of(lists), lengths_of(lists)
    order = np.argsort(orderable(values))
    ids = each_list(lists).ids
    order = order[stable_order(ids[order], len(lists))]
    raw = np.flatnonzero(n)
    # Row numbers: first those of the values, then those of the estimates from digests.
    at = np.zeros((len(n), len(ranks)), np.int64)
    for i, rank in enumerate(ranks):
        at[raw, i] = order[offsets[raw] + _nth(rank, n[raw]) - 1]
    digested = np.flatnonzero(digests.is_valid().to_numpy(zero_copy_only=False))
    estimates = [_quantiles(digests[group].as_py(), ranks) for group in digested.tolist()]
    at[digested] = len(values) + np.arange(len(digested) * len(ranks)).reshape(-1, len(ranks))
    if estimates:
        values = pa.concat_arrays([values, _from_doubles(np.concatenate(estimates), values.type)])
    nonempty = n > 0
    nonempty[digested] = True
    at[~nonempty] = 0
    found = values.take(pa.array(at.ravel())) if len(values) else pa.nulls(at.size, values.type)
    return _answer(found, nonempty, array=array)


def _nth(rank: float, n: Ints) -> Ints:
    nth: Ints = np.maximum(np.ceil(rank * n).astype(np.int64), 1)
    return nth


def _quantiles(state: bytes, ranks: Sequence[float]) -> Doubles:
    digest, tails = _opened(state)
    low, inside, high, nan = _sizes(digest, tails)
    found = []
    for nth in (int(_nth(rank, np.array([low + inside + high + nan]))[0]) for rank in ranks):
        if nth <= low:
            found.append(-np.inf)
        elif nth <= low + inside:
            found.append(digest.get_quantile((nth - low - 0.5) / inside))
        else:
            found.append(np.inf if nth <= low + inside + high else np.nan)
    return np.array(found)


def _opened(state: bytes) -> tuple[Any, tuple[int, int, int]]:
    """Returns the digest of a state, and the numbers of -infinity, infinity and NaN beside it."""
    from datasketches import tdigest_double

    return tdigest_double.deserialize(state[_TAILS.size :]), _TAILS.unpack_from(state)


def _sizes(digest: Any, tails: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Returns how many values there are: -infinity, finite, infinity, NaN."""
    low, high, nan = tails
    return low, 0 if digest.is_empty() else round(digest.get_total_weight()), high, nan


def is_quantifiable(type_: pa.DataType) -> bool:
    """Returns whether values of a type can be converted to doubles and back."""
    t = pa.types
    return bool(
        t.is_integer(type_) or t.is_floating(type_) or t.is_decimal(type_) or t.is_date(type_) or t.is_timestamp(type_)
    )


def _to_doubles(values: pa.Array) -> Doubles:
    integers = as_integers(values) if pa.types.is_temporal(values.type) else None
    return to_doubles(values) if integers is None else integers.astype(np.float64)


def _from_doubles(values: Doubles, type_: pa.DataType) -> pa.Array:
    if pa.types.is_decimal(type_):
        # A value of many digits may have been rounded up to the first one that does not fit.
        most = np.nextafter(10.0 ** (type_.precision - type_.scale), 0.0)
        values = values.clip(-most, most)
    if pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        return pa.array(values, from_pandas=False).cast(type_, safe=False)
    if pa.types.is_uint64(type_):
        return pa.array(np.rint(values).clip(0, 2.0**64 - 2**11).astype(np.uint64))
    return from_integers(pa.array(np.rint(values).clip(-(2.0**63), 2.0**63 - 2**10).astype(np.int64)), type_)
