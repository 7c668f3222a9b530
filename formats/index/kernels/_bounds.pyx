"""Finds bounds in a decoded manifest that no reader may use to leave out a file: texts that are not UTF-8, and lower
bounds above their upper bounds.

A span is (start, length) of a single-value binary in the heap (Iceberg spec, appendix D). This module does not report a
span with an impossible length or outside of the heap, because packing counts it as absent.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy

import numpy as np

cdef enum:
    TEXTS  # UTF-8, ordered by bytes
    BYTES
    INTEGERS  # little-endian, of 4 or 8 bytes
    REALS  # IEEE, of 4 or 8 bytes
    NUMERALS  # decimals: big-endian two's complement
    UNORDERED  # UUIDs, which writers order in two ways

ORDERS = {
    "texts": TEXTS, "bytes": BYTES, "integers": INTEGERS, "reals": REALS, "numerals": NUMERALS, "unordered": UNORDERED,
}


cdef bint is_utf8(const uint8_t* at, int64_t length) noexcept nogil:
    """Return whether the bytes are UTF-8 without surrogates, overlong forms, and numbers above 0x10FFFF (RFC 3629)."""
    cdef int64_t i = 0
    cdef uint64_t word
    cdef uint8_t first, second
    cdef int more, k  # `more`: the number of bytes after the first byte of a character
    while i < length:
        if length - i >= 8:
            memcpy(&word, at + i, 8)
            if not word & <uint64_t>0x8080808080808080:
                i += 8
                continue
        first = at[i]
        if first < 0x80:
            i += 1
            continue
        if first < 0xC2 or first > 0xF4:
            return False
        more = 1 if first < 0xE0 else 2 if first < 0xF0 else 3
        if i + more >= length:
            return False
        second = at[i + 1]
        if (first == 0xE0 and second < 0xA0) or (first == 0xED and second > 0x9F):
            return False
        if (first == 0xF0 and second < 0x90) or (first == 0xF4 and second > 0x8F):
            return False
        for k in range(1, more + 1):
            if at[i + k] & 0xC0 != 0x80:
                return False
        i += more + 1
    return True


cdef int compare_numerals(const uint8_t* one, int64_t length, const uint8_t* other, int64_t other_length) noexcept nogil:
    """Compare two decimals. Returns a number below zero if the first is less, and above zero if it is greater."""
    cdef int64_t k, size = length if length > other_length else other_length
    cdef uint8_t sign = 0xFF if one[0] & 0x80 else 0, other_sign = 0xFF if other[0] & 0x80 else 0
    cdef uint8_t left, right
    if sign != other_sign:
        return -1 if sign else 1
    for k in range(size):
        left = one[k - (size - length)] if k >= size - length else sign
        right = other[k - (size - other_length)] if k >= size - other_length else other_sign
        if left != right:
            return -1 if left < right else 1
    return 0


cdef bint is_above(
    int order, const uint8_t* low, int64_t low_length, const uint8_t* high, int64_t high_length
) noexcept nogil:
    """Return whether a lower bound is above its upper bound. Returns False for bounds that cannot be compared."""
    cdef int64_t shorter_length = low_length if low_length < high_length else high_length
    cdef int64_t low_long, high_long
    cdef int32_t low_int, high_int
    cdef double low_double, high_double
    cdef float low_float, high_float
    cdef int comparison
    if order == TEXTS or order == BYTES:
        comparison = memcmp(low, high, shorter_length)
        return comparison > 0 or (comparison == 0 and low_length > high_length)
    if low_length < 1 or high_length < 1:
        return False
    if order == NUMERALS:
        return compare_numerals(low, low_length, high, high_length) > 0
    if low_length != high_length:  # one of the bounds was written before the type was promoted
        return False
    if order == INTEGERS and low_length == 8:
        memcpy(&low_long, low, 8)
        memcpy(&high_long, high, 8)
        return low_long > high_long
    if order == INTEGERS and low_length == 4:
        memcpy(&low_int, low, 4)
        memcpy(&high_int, high, 4)
        return low_int > high_int
    if order == REALS and low_length == 8:
        memcpy(&low_double, low, 8)
        memcpy(&high_double, high, 8)
        return low_double > high_double
    if order == REALS and low_length == 4:
        memcpy(&low_float, low, 4)
        memcpy(&high_float, high, 4)
        return low_float > high_float
    return False


cdef inline bint is_inside(int64_t start, int64_t length, int64_t heap_bytes) noexcept nogil:
    """Return whether a span with a possible length is inside of the heap."""
    return length >= 0 and start >= 0 and start <= heap_bytes - length


def unusable_bounds(
    const uint8_t[::1] heap not None,
    int order,
    const int32_t[::1] low_rows not None,
    const int64_t[::1] low_starts not None,
    const int32_t[::1] low_lengths not None,
    const int32_t[::1] high_rows not None,
    const int64_t[::1] high_starts not None,
    const int32_t[::1] high_lengths not None,
):
    """Find the lower and upper bounds of one column that cannot be used.

    `low_rows` and `high_rows` ascend. Returns a pair of uint8 arrays, with 1 for each bound that cannot be used, or
    None if all bounds can be used.
    """
    cdef int64_t heap_bytes = heap.shape[0], n = low_rows.shape[0], m = high_rows.shape[0], i = 0, j = 0
    cdef bint has_unusable = False
    marks = np.zeros(n + m, dtype=np.uint8)
    cdef uint8_t[::1] marked = marks  # the lower bounds, and after them the upper bounds
    cdef const uint8_t* memory = &heap[0] if heap_bytes else NULL
    if not heap_bytes or not (n + m):
        return None
    with nogil:
        if order == TEXTS:
            for i in range(n):
                if is_inside(low_starts[i], low_lengths[i], heap_bytes):
                    if not is_utf8(memory + low_starts[i], low_lengths[i]):
                        marked[i] = 1
                        has_unusable = True
            for j in range(m):
                if is_inside(high_starts[j], high_lengths[j], heap_bytes):
                    if not is_utf8(memory + high_starts[j], high_lengths[j]):
                        marked[n + j] = 1
                        has_unusable = True
        i = 0
        j = 0
        while i < n and j < m and order != UNORDERED:
            if low_rows[i] < high_rows[j]:
                i += 1
            elif low_rows[i] > high_rows[j]:
                j += 1
            else:
                if (
                    is_inside(low_starts[i], low_lengths[i], heap_bytes)
                    and is_inside(high_starts[j], high_lengths[j], heap_bytes)
                    and is_above(
                        order, memory + low_starts[i], low_lengths[i], memory + high_starts[j], high_lengths[j]
                    )
                ):
                    marked[i] = 1
                    marked[n + j] = 1
                    has_unusable = True
                i += 1
                j += 1
    return (marks[:n], marks[n:]) if has_unusable else None
