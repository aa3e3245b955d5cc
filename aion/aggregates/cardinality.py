"""Approximate counts of distinct values: HyperLogLog over whole columns. Pure.

The sketch is the HLL of Apache DataSketches: its coupons (26 bits of address, and the number of leading zeros in the
rest of the hash), its registers, and its estimator. That library takes values one by one. So coupons and registers are
made and merged here with numpy, and passed to the library in its serialised form, which is the same in all languages.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.aggregates.groups import Groups
from aion.aggregates.partial import Done, Partial, Rows, States
from aion.aggregates.values import Ints, one_zero
from aion.base.hashing import hash_rows
from aion.errors import needs_extra
from state_backends.thresholds import threshold

_Bytes = npt.NDArray[np.uint8]

_ADDRESS_BITS = 26
_ADDRESS = (1 << _ADDRESS_BITS) - 1
LG_REGISTERS = range(7, 22)
# Preamble of a dense sketch with 8 bits per register. Bytes: its length in words, version, family, lg of the number of
# registers, one that is not used, flags (compact; merged, so that the estimate must come from the registers), the
# lowest register, the mode. Doubles: the estimate by order of arrival, which a merged sketch does not have; the sum of
# 2**-register over the registers below 32, and over the others. Integers: the number of registers that are 0, and one
# that is not used.
_PREAMBLE = struct.Struct("<8BdddII")
_FIXED = (10, 1, 7)
_FLAGS_AND_MODE = (0, 8 | 16, 0, 2 | 2 << 2)
_REGISTERS_AT_ONCE = threshold(1 << 18)
_BELOW = np.where(np.arange(64) < 32, np.ldexp(1.0, -np.arange(64)), 0.0)
_ABOVE = np.ldexp(1.0, -np.arange(64)) - _BELOW


@dataclass(frozen=True)
class Registers(Partial):
    """An HLL sketch of 2**lg registers: 4 bytes for each coupon while that is smaller, then a byte for each register.

    Its content depends only on the values and on their type, by which they are hashed.
    """

    column: str
    lg: int
    type_: pa.DataType

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.binary(),)

    def lift(self, rows: Rows, done: Done) -> States:
        groups, (values,), _ = rows.present(self.column)
        nothing = np.zeros((0, 1 << self.lg), np.uint8)
        return [self._settled(groups.count, _tagged(groups.ids, _coupons(values)), nothing, np.zeros(0, np.int64))]

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        parts = self._taken_apart(old[self][0])
        ids = groups.ids
        coupons = _tagged(np.repeat(ids[parts.sparse], parts.coupons_each), parts.coupons)
        return [self._settled(groups.count, coupons, parts.registers, ids[parts.dense])]

    def _settled(self, count: int, tagged: Ints, registers: _Bytes, owners: Ints) -> pa.Array:
        """Returns a state for each group, from coupons tagged with their groups, and registers of the groups
        ``owners``.
        """
        size = 1 << self.lg
        tagged = np.sort(tagged)  # not np.unique: it hashes, which takes 50 times as long for millions
        tagged = tagged[np.diff(tagged, prepend=-1) != 0]
        groups = Groups(tagged >> 32, count)
        coupons = (tagged & 0xFFFFFFFF).astype(np.uint32)
        dense = 4 * groups.counts >= size
        dense[owners] = True
        place = np.cumsum(dense) - 1
        merged = np.zeros((int(dense.sum()), size), np.uint8)
        if len(owners):
            order = np.argsort(owners, kind="stable")
            begins = np.flatnonzero(np.diff(owners[order], prepend=-1))
            merged[place[owners[order][begins]]] = np.maximum.reduceat(registers[order], begins, axis=0)
        absorbed = dense[groups.ids]
        slots = place[groups.ids[absorbed]] * size + (coupons[absorbed] & (size - 1))
        np.maximum.at(merged.reshape(-1), slots, (coupons[absorbed] >> _ADDRESS_BITS).astype(np.uint8))
        lengths = np.where(dense, size, 4 * groups.counts)
        data = np.empty(int(lengths.sum()), np.uint8)
        is_dense = np.repeat(dense, lengths)
        data[is_dense] = merged.reshape(-1)
        data[~is_dense] = coupons[~absorbed].astype("<u4").view(np.uint8)
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        buffers = [None, pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(data)]
        return pa.BinaryArray.from_buffers(pa.binary(), count, buffers)

    def _taken_apart(self, states: pa.Array) -> _ByForm:
        size = 1 << self.lg
        _, offsets, data = states.buffers()
        ends = np.frombuffer(offsets, np.int32)[states.offset : states.offset + len(states) + 1].astype(np.int64)
        lengths = np.diff(ends)
        octets = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]] if len(states) else np.zeros(0, np.uint8)
        dense = np.flatnonzero(lengths == size)
        sparse = np.flatnonzero(lengths != size)
        is_dense = np.repeat(lengths == size, lengths)
        coupons = octets[~is_dense].view("<u4").astype(np.uint32)
        return _ByForm(dense, octets[is_dense].reshape(-1, size), sparse, lengths[sparse] // 4, coupons)

    def estimates(self, states: States) -> pa.Array:
        """Returns the numbers of distinct values. Coupons are simply counted: few values share one of the 2**26
        addresses.
        """
        with needs_extra("sketches", "approx_count_distinct"):
            from datasketches import hll_sketch  # slow to load, and rarely needed

        parts = self._taken_apart(states[0])
        found = np.zeros(len(states[0]), np.int64)
        found[parts.sparse] = parts.coupons_each
        step = max(_REGISTERS_AT_ONCE >> self.lg, 1)
        for start in range(0, len(parts.dense), step):
            registers = parts.registers[start : start + step]
            facts = zip(
                parts.dense[start : start + step].tolist(),
                _BELOW[registers].sum(axis=1).tolist(),
                _ABOVE[registers].sum(axis=1).tolist(),
                (registers == 0).sum(axis=1).tolist(),
                registers,
                strict=True,
            )
            for group, below, above, zeros, own in facts:
                head = _PREAMBLE.pack(*_FIXED, self.lg, *_FLAGS_AND_MODE, 0.0, below, above, zeros, 0)
                found[group] = round(hll_sketch.deserialize(head + own.tobytes()).get_estimate())
        return pa.array(found)

    def spec(self) -> list[Any]:
        return [*super().spec(), self.lg, str(self.type_)]


class _ByForm(NamedTuple):
    """States by their form: the rows that are dense, with their registers, and the others, with their coupons."""

    dense: Ints
    registers: _Bytes
    sparse: Ints
    coupons_each: Ints
    coupons: npt.NDArray[np.uint32]


def _coupons(values: pa.Array) -> npt.NDArray[np.uint32]:
    if not len(values):
        return np.zeros(0, np.uint32)
    hashes = hash_rows([one_zero(values)], seed=0)
    rest = (hashes >> np.uint64(_ADDRESS_BITS)).astype(np.float64)  # 38 bits, so exact
    zeros = 64 - _ADDRESS_BITS - np.frexp(rest)[1]
    return (hashes & np.uint64(_ADDRESS)).astype(np.uint32) | (zeros + 1).astype(np.uint32) << np.uint32(_ADDRESS_BITS)


def _tagged(ids: Ints, coupons: npt.NDArray[np.uint32]) -> Ints:
    return ids << 32 | coupons.astype(np.int64)
