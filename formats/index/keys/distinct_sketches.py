"""HyperLogLog sketches: the approximate number of distinct values, in at most 4096 bytes.

A sketch has 4096 registers. The first 12 bits of a value's hash select a register, which contains the largest rank of
its values: the position of the first bit that is 1 in the other 52 bits of the hash. The relative standard error of the
estimate is 1.04 / sqrt(4096) = 1.63 % (Flajolet et al., 2007). The estimator is that of Ertl, "New cardinality
estimation algorithms for HyperLogLog sketches" (2017), algorithm 6, which needs no tables.

The registers depend only on the set of values. So sketches have the same bytes after merges in any order, and a sketch
of some values that is merged again changes nothing. Two layouts, which differ in their length:

    4 n bytes      n < 1024 registers that are not 0, in ascending order, as 32-bit integers: 64 * register + rank
    4096 bytes     all registers

Values are hashed by the first half of MurmurHash3: numbers, dates (days) and times (microseconds) as 64-bit integers,
and texts as UTF-8. The functions have no side effects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.formats.index.kernels import _murmur

SKETCH = pa.large_binary()
"""The Arrow type of sketches. No other column of a cube has this type."""
REGISTERS = 4096
STANDARD_ERROR = 1.04 / REGISTERS**0.5
"""The relative standard error of an estimate."""
SKETCHED_TYPES = frozenset({"int", "long", "date", "timestamp", "timestamptz", "string"})
"""The Iceberg types whose values can be counted."""
RANK_MAX = 53
_RANK_BITS = 6
"""The number of bits of a rank in a coupon."""
_COUPON_BITS = 18
"""The number of bits of a coupon: 12 bits of the register, and 6 bits of the rank."""
_COUPON_BYTES = 4
"""The size of a stored coupon."""
_RANK_MASK = np.uint32((1 << _RANK_BITS) - 1)
_HASH_BITS = 52
"""The number of bits of a hash that determine the rank."""
_ESTIMATE_MAX = float(2**63 - 1024)
"""The largest double that fits into int64. Only sketches that no values have give a larger estimate."""
_SEED = 9001
_SPARSE_MAX = REGISTERS // 4 - 1
"""The maximum number of registers of a sketch that lists its registers."""
_GROUPS_PER_STEP = 1024
"""The number of groups whose registers are decoded at the same time."""
_SKETCHES_PER_STEP = 1024
"""The number of sketches with all registers that are read at the same time."""

Coupons = npt.NDArray[np.uint32]
"""Registers with ranks: 64 * register + rank."""
Groups = npt.NDArray[np.int64]


class _Sketches(NamedTuple):
    """The bytes of sketches (`distinct_sketches.py`), and the start of each sketch.

    A sketch has 4096 registers. The value of a register is a small number, the rank. A dense sketch stores the rank of
    each register as a byte. A sparse sketch lists the registers whose rank is not 0, as coupons of 4 bytes: the
    number of the register and its rank.
    """

    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.starts)

    @property
    def is_dense(self) -> npt.NDArray[np.bool_]:
        """bool[sketches]: whether a sketch has the bytes of all registers."""
        dense: npt.NDArray[np.bool_] = self.lengths == REGISTERS
        return dense

    def read_registers(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Return the registers of some dense sketches, as uint8[sketches, 4096].

        `numbers` has the indexes of the sketches.
        """
        registers: npt.NDArray[np.uint8] = self.data[self.starts[numbers][:, None] + np.arange(REGISTERS)]
        return registers

    def list_coupons(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Coupons]:
        """Return the coupons of sketches that list their registers.

        A coupon has 4 bytes: the number of a register that is not 0, and the rank in the register.

        Args:
            numbers: The indexes of the sketches.

        Returns:
            int64[coupons], the position in `numbers` of each coupon's sketch, and the coupons.
        """
        counts = self.lengths[numbers] // _COUPON_BYTES
        sketch_positions = np.repeat(np.arange(len(numbers)), counts)
        ends = np.cumsum(counts)
        indexes_in_sketch = np.arange(len(sketch_positions)) - np.repeat(ends - counts, counts)
        positions = indexes_in_sketch + np.repeat(self.starts[numbers] // _COUPON_BYTES, counts)
        return sketch_positions, self.data.view("<u4")[positions]


def make_coupons(values: pa.Array) -> Coupons:
    """Return the coupon of each value: the register that its hash selects, and the rank for this register.

    The high 12 bits of the hash are the register. The rank is the position of the first 1 in the other 52 bits.

    Args:
        values: Integers, dates, times in microseconds or texts, without nulls.

    Raises:
        ValueError: Values of this type cannot be counted.
    """
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        texts = values.cast(pa.large_string())
        starts = np.frombuffer(texts.buffers()[1], np.int64, len(texts) + 1, 8 * texts.offset)
        heap = texts.buffers()[2]
        data = np.frombuffer(heap, np.uint8) if heap is not None and heap.size else np.zeros(1, np.uint8)
        hashes = _murmur.hash_spans(data, starts, _SEED, 64)
    else:
        longs = np.ascontiguousarray(_to_longs(values).to_numpy(zero_copy_only=False))
        hashes = _murmur.hash_fixed(longs.view(np.uint8), 8, _SEED, 64)
    low = hashes & np.uint64((1 << _HASH_BITS) - 1)  # The bits below the register.
    _, bit_lengths = np.frexp(low.astype(np.float64))  # 52 bits are exact in a double.
    ranks = (_HASH_BITS + 1 - bit_lengths).astype(np.uint32)
    registers = (hashes >> np.uint64(_HASH_BITS)).astype(np.uint32)
    return (registers << np.uint32(_RANK_BITS)) | ranks


def _to_longs(values: pa.Array) -> pa.Array:
    """Return integers, dates or times as integers of 64 bits.

    Raises:
        ValueError: Values of this type cannot be counted.
    """
    kind = values.type
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return values.view(pa.int64())
    if pa.types.is_date32(kind):
        return values.view(pa.int32()).cast(pa.int64())
    if pa.types.is_signed_integer(kind):
        return values.cast(pa.int64())
    raise ValueError(f"values of the type {kind} cannot be counted in sketches")


def make_value_sketches(values: pa.Array) -> pa.Array:
    """Return the sketch of each value, which has one coupon, a 32-bit number for its hash. Nulls stay null."""
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    coupons = make_coupons(values.drop_null())
    starts = np.zeros(len(values) + 1, np.int64)
    np.cumsum(4 * valid, out=starts[1:])
    bits = pa.array(valid).buffers()[1]
    return pa.Array.from_buffers(SKETCH, len(values), [bits, pa.py_buffer(starts), pa.py_buffer(coupons.astype("<u4"))])


def build_sketches(values: pa.ChunkedArray, groups: Groups, count: int) -> pa.Array:
    """Return the HyperLogLog sketches of the values of `count` groups. Nulls are not counted.

    A value becomes a coupon: the number of a register, and the rank of the value's hash. A sketch keeps the largest
    rank of each register.

    Args:
        values: The values, of a type in `SKETCHED_TYPES`.
        groups: int64[values]: the group of each value.
        count: The number of groups.

    Raises:
        ValueError: Values of this type cannot be counted.
    """
    column = _to_array(values)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return _encode(groups[valid], make_coupons(column.drop_null()), count)


def merge_sketches(sketches: pa.ChunkedArray, groups: Groups, count: int) -> pa.Array:
    """Return the merged sketches of `count` groups.

    Sketches that list their registers are merged as one list of registers. Sketches with all registers are merged by
    the maximum of each register, for some groups at a time, which limits the memory. A coupon is the number of a
    register and its rank, in 32 bits.

    Args:
        sketches: The sketches. A null has no values.
        groups: int64[sketches]: the group of each sketch.
        count: The number of groups.

    Raises:
        ValueError: A sketch is damaged.
    """
    parts = _check_and_split(_to_array(sketches))
    order = np.argsort(groups, kind="stable")
    is_dense = parts.is_dense[order]
    step = _GROUPS_PER_STEP if is_dense.any() else max(1, count)
    first_groups = list(range(0, count, step))
    edges = np.searchsorted(groups[order], [*first_groups, count])
    merged = []
    for first_group, begin, end in zip(first_groups, edges[:-1], edges[1:], strict=True):
        members, is_member_dense = order[begin:end], is_dense[begin:end]
        sketch_positions, coupons = parts.list_coupons(members[~is_member_dense])
        coupon_groups, all_coupons = [groups[members[~is_member_dense]][sketch_positions]], [coupons]
        for group, registers in _merge_dense(parts, members[is_member_dense], groups):
            nonzero = np.flatnonzero(registers)
            coupon_groups.append(np.full(len(nonzero), group))
            all_coupons.append((nonzero.astype(np.uint32) << np.uint32(_RANK_BITS)) | registers[nonzero])
        merged.append(
            _encode(
                np.concatenate(coupon_groups) - first_group, np.concatenate(all_coupons), min(step, count - first_group)
            )
        )
    return pa.concat_arrays(merged) if merged else pa.array([], SKETCH)


def _merge_dense(
    parts: _Sketches, members: npt.NDArray[np.int64], groups: Groups
) -> list[tuple[int, npt.NDArray[np.uint8]]]:
    """Merge sketches that store all registers, and return the registers of each group. A group may have no such sketch.

    Args:
        parts: The sketches.
        members: The indexes of the sketches to merge, sorted by group.
        groups: The group of each sketch in `parts`.
    """
    ids, begins = np.unique(groups[members], return_index=True)
    ends = np.append(begins[1:], len(members)) if len(begins) else begins
    merged = []
    for group, begin, end in zip(ids.tolist(), begins.tolist(), ends.tolist(), strict=True):
        registers = np.zeros(REGISTERS, np.uint8)
        for start in range(begin, end, _SKETCHES_PER_STEP):
            step_registers = parts.read_registers(members[start : min(end, start + _SKETCHES_PER_STEP)])
            np.maximum(registers, step_registers.max(axis=0), out=registers)
        merged.append((group, registers))
    return merged


def estimate_sketches(sketches: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the estimated number of distinct values of each sketch, as int64. The estimate of a null is 0.

    The estimate depends on how many registers have each rank, so these numbers are counted first. A sparse sketch lists
    only registers that are not 0, as coupons of 4 bytes (register and rank), so its other registers have the rank 0.

    Raises:
        ValueError: A sketch is damaged.
    """
    parts = _check_and_split(_to_array(sketches))
    counts = np.zeros((len(parts.lengths), RANK_MAX + 1), np.int64)
    dense_indexes = np.flatnonzero(parts.is_dense)
    for start in range(0, len(dense_indexes), _SKETCHES_PER_STEP):
        step_indexes = dense_indexes[start : start + _SKETCHES_PER_STEP]
        for index, registers in zip(step_indexes, parts.read_registers(step_indexes), strict=True):
            counts[index] = np.bincount(registers, minlength=RANK_MAX + 1)
    sparse_indexes = np.flatnonzero(~parts.is_dense)
    sketch_positions, coupons = parts.list_coupons(sparse_indexes)
    np.add.at(counts, (sparse_indexes[sketch_positions], coupons & _RANK_MASK), 1)
    counts[sparse_indexes, 0] = REGISTERS - parts.lengths[sparse_indexes] // _COUPON_BYTES
    return pa.array(np.rint(_estimate(counts)).astype(np.int64))


def iterate_registers(sketches: pa.Array | pa.ChunkedArray) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the registers of each sketch, as uint8[4096].

    A sparse sketch lists only registers that are not 0, as coupons: 64 * register + rank.

    Raises:
        ValueError: A sketch is damaged.
    """
    parts = _check_and_split(_to_array(sketches))
    for number, is_dense in enumerate(parts.is_dense.tolist()):
        if is_dense:
            yield parts.read_registers(np.array([number]))[0]
            continue
        _, coupons = parts.list_coupons(np.array([number]))
        registers = np.zeros(REGISTERS, np.uint8)
        registers[coupons >> np.uint32(_RANK_BITS)] = coupons & _RANK_MASK
        yield registers


def check_sketches(sketches: pa.Array) -> None:
    """Check the bytes of sketches.

    Raises:
        ValueError: A sketch is damaged.
    """
    _check_and_split(sketches)


def _estimate(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the estimated numbers of distinct values for histograms of ranks.

    The formula is algorithm 6 of Ertl, "New cardinality estimation algorithms for HyperLogLog sketches" (2017).

    Args:
        counts: int64[sketches, ranks]: the number of registers with each rank.
    """
    fractions = counts / REGISTERS
    total = REGISTERS * _sum_tau(1.0 - fractions[:, RANK_MAX])
    for rank in range(_HASH_BITS, 0, -1):
        total = 0.5 * (total + counts[:, rank])
    is_empty = counts[:, 0] == REGISTERS
    total += REGISTERS * _sum_sigma(np.where(is_empty, 0.0, fractions[:, 0]))
    with np.errstate(divide="ignore"):  # The total is 0 if all registers have the largest rank.
        estimates: npt.NDArray[np.float64] = REGISTERS**2 / (2 * np.log(2) * np.where(is_empty, 1.0, total))
    return np.where(is_empty, 0.0, np.minimum(estimates, _ESTIMATE_MAX))


def _sum_sigma(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the function sigma of Ertl's paper: x + sum of 2^(k-1) * x^(2^k) for k = 1, 2, …

    It corrects an estimate for the registers that no value has set. `x` is the fraction of these registers, and is
    below 1. The sum ends when a further term no longer changes it.
    """
    total, weight = x.copy(), 1.0
    while True:
        x = x * x
        previous, total = total, total + x * weight
        weight *= 2
        if (previous == total).all():
            return total


def _sum_tau(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return (1 - x - sum of 2^-k * (1 - x^(2^-k))^2 for k = 1, 2, …) / 3.

    It corrects an estimate for registers with the largest rank. The sum ends when a further term no longer changes it.
    """
    total, weight = 1.0 - x, 1.0
    while True:
        x = np.sqrt(x)
        weight /= 2
        previous, total = total, total - weight * (1.0 - x) ** 2
        if (previous == total).all():
            return total / 3


def _encode(groups: Groups, coupons: Coupons, count: int) -> pa.Array:
    """Return the sketches of groups, each in the shorter layout: some registers as a list, or a byte for each register.

    Args:
        groups: int64[coupons]: the group of each coupon.
        coupons: Registers with ranks, as 64 * register + rank. Of a register's ranks, the largest is kept.
        count: The number of groups.
    """
    keys = np.sort((groups.astype(np.uint64) << np.uint64(_COUPON_BITS)) | coupons)
    # The last coupon of a register has its largest rank.
    registers = keys >> np.uint64(_RANK_BITS)
    keys = keys[np.append(registers[1:] != registers[:-1], True)] if len(keys) else keys
    owners = (keys >> np.uint64(_COUPON_BITS)).astype(np.int64)
    coupons = (keys & np.uint64((1 << _COUPON_BITS) - 1)).astype(np.uint32)
    sizes = np.bincount(owners, minlength=count)
    is_dense = sizes > _SPARSE_MAX
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(np.where(is_dense, REGISTERS, 4 * sizes), out=starts[1:])
    data = np.zeros(int(starts[-1]), np.uint8)
    is_sparse = ~is_dense[owners]
    indexes_in_group = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    data.view("<u4")[starts[owners[is_sparse]] // 4 + indexes_in_group[is_sparse]] = coupons[is_sparse]
    dense_coupons = coupons[~is_sparse]
    data[starts[owners[~is_sparse]] + (dense_coupons >> np.uint32(_RANK_BITS))] = dense_coupons & _RANK_MASK
    return pa.Array.from_buffers(SKETCH, count, [None, pa.py_buffer(starts), pa.py_buffer(data)])


def _check_and_split(sketches: pa.Array) -> _Sketches:
    """Check sketches, and return their bytes. A null becomes a sketch without values.

    A sparse sketch has coupons of 4 bytes, in ascending order: 64 * register + rank. A dense sketch has one byte for
    each register.

    Raises:
        ValueError: A sketch is damaged.
    """
    column = sketches.fill_null(b"") if sketches.null_count else sketches
    if column.type != SKETCH:
        column = column.cast(SKETCH)
    if not len(column):
        return _Sketches(np.zeros(0, np.uint8), np.zeros(1, np.int64))
    starts = np.frombuffer(column.buffers()[1], np.int64, len(column) + 1, 8 * column.offset)
    buffer = column.buffers()[2]
    heap = np.frombuffer(buffer, np.uint8) if buffer is not None and buffer.size else np.zeros(0, np.uint8)
    parts = _Sketches(heap[starts[0] : starts[-1]].copy(), starts - starts[0])
    lengths = parts.lengths
    if ((lengths % _COUPON_BYTES != 0) | (lengths > REGISTERS)).any():
        raise ValueError("the length of a sketch is invalid")
    dense_indexes = np.flatnonzero(parts.is_dense)
    for start in range(0, len(dense_indexes), _SKETCHES_PER_STEP):
        if parts.read_registers(dense_indexes[start : start + _SKETCHES_PER_STEP]).max() > RANK_MAX:
            raise ValueError("a register of a sketch has an invalid rank")
    sketch_positions, coupons = parts.list_coupons(np.flatnonzero(~parts.is_dense))
    ranks, registers = coupons & _RANK_MASK, coupons >> np.uint32(_RANK_BITS)
    if ((ranks == 0) | (ranks > RANK_MAX) | (registers >= REGISTERS)).any():
        raise ValueError("a sketch lists an invalid register")
    is_same_sketch = sketch_positions[1:] == sketch_positions[:-1]
    if (is_same_sketch & (registers[1:] <= registers[:-1])).any():
        raise ValueError("the registers of a sketch are not in ascending order")
    return parts


def _to_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
