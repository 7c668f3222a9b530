"""From columns and spans of a decoded manifest to packed columns (`packing.py`); the loops run without the GIL.

A span is (start, length) of a single-value binary (Iceberg spec, appendix D), length -1 where there is none. What has
an impossible length is marked absent, since a bound that cannot be read is a bound that is not there.
"""

from libc.math cimport isnan
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

import numpy as np

cdef extern from *:
    """
    #include <stdint.h>
    static inline uint64_t seamark_big_endian(uint64_t word) {
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        return word;
    #else
        return __builtin_bswap64(word);
    #endif
    }
    """
    uint64_t seamark_big_endian(uint64_t word) nogil

cdef int64_t MISSING = INT64_MIN


def gather_longs(const uint8_t[::1] heap, const int64_t[::1] starts, const int32_t[::1] lengths, bint lower,
                 bint narrow_counts):
    """int64[rows] of little-endian integers of 1, 4 or 8 bytes, sign-extended (1 byte: a boolean); MISSING if absent.

    Without `narrow_counts` 4 bytes are absent: what a promoted date left in a column of timestamps counts days.
    The least long is MISSING itself. As a lower bound it says nothing; an upper bound is taken as one more, which is true.
    """
    cdef Py_ssize_t i, n = starts.shape[0]
    cdef int64_t start, room = heap.shape[0]
    cdef int32_t length, narrow
    cdef int64_t wide
    found = np.empty(n, dtype=np.int64)
    cdef int64_t[::1] values = found
    with nogil:
        for i in range(n):
            length = lengths[i]
            start = starts[i]
            values[i] = MISSING
            if length < 1 or start < 0 or start + length > room:
                continue
            if length == 8:
                memcpy(&wide, &heap[start], 8)
                values[i] = wide + (wide == MISSING and not lower)
            elif length == 4 and narrow_counts:
                memcpy(&narrow, &heap[start], 4)
                values[i] = narrow
            elif length == 1:
                values[i] = heap[start] != 0
    return found


def gather_doubles(const uint8_t[::1] heap, const int64_t[::1] starts, const int32_t[::1] lengths):
    """float64[rows] of IEEE floats of 4 or 8 bytes; NaN if absent."""
    cdef Py_ssize_t i, n = starts.shape[0]
    cdef int64_t start, room = heap.shape[0]
    cdef int32_t length
    cdef float narrow
    cdef double wide
    found = np.full(n, np.nan)
    cdef double[::1] values = found
    with nogil:
        for i in range(n):
            length = lengths[i]
            start = starts[i]
            if length < 1 or start < 0 or start + length > room:
                continue
            if length == 8:
                memcpy(&wide, &heap[start], 8)
                values[i] = wide
            elif length == 4:
                memcpy(&narrow, &heap[start], 4)
                values[i] = narrow
    return found


def gather_decimals(const uint8_t[::1] heap, const int64_t[::1] starts, const int32_t[::1] lengths):
    """(high int64[rows], low uint64[rows], present uint8[rows]) of big-endian two's complement integers.

    The halves make up 128 bits. More than 16 bytes are accepted when the extra ones only repeat the sign.
    """
    cdef Py_ssize_t i, n = starts.shape[0]
    cdef int64_t start, room = heap.shape[0]
    cdef int32_t length, k
    cdef uint8_t sign
    cdef uint64_t h, l
    cdef bint fits
    highs, lows, there = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.uint64), np.zeros(n, dtype=np.uint8)
    cdef int64_t[::1] high = highs
    cdef uint64_t[::1] low = lows
    cdef uint8_t[::1] present = there
    with nogil:
        for i in range(n):
            length = lengths[i]
            start = starts[i]
            if length < 1 or start < 0 or start + length > room:
                continue
            sign = 0xFF if heap[start] & 0x80 else 0
            fits = True
            while length > 16:
                if heap[start] != sign or (heap[start + 1] & 0x80) != (sign & 0x80):
                    fits = False
                    break
                start += 1
                length -= 1
            if not fits:
                continue
            h = <uint64_t>0xFFFFFFFFFFFFFFFF if sign else 0
            l = h
            for k in range(length):
                h = (h << 8) | (l >> 56)
                l = (l << 8) | heap[start + k]
            high[i] = <int64_t>h
            low[i] = l
            present[i] = 1
    return highs, lows, there


def scatter(const int32_t[::1] rows, const int64_t[::1] values, Py_ssize_t count):
    """int64[count] with `values` at `rows`, MISSING elsewhere and where a value is negative."""
    cdef Py_ssize_t i, n = rows.shape[0]
    found = np.full(count, MISSING, dtype=np.int64)
    cdef int64_t[::1] out = found
    with nogil:
        for i in range(n):
            if values[i] >= 0:
                out[rows[i]] = values[i]
    return found


def same(const int64_t[::1] one, const int64_t[::1] other):
    """Whether two arrays are equal."""
    cdef Py_ssize_t n = one.shape[0]
    return n == other.shape[0] and (n == 0 or memcmp(&one[0], &other[0], n * sizeof(int64_t)) == 0)


def relate(const int64_t[::1] values, const int64_t[::1] nulls, const int64_t[::1] nans):
    """How many rows are known to hold (nulls only, NaNs only, no null, no NaN), by their counts; -1 or less is unknown."""
    cdef Py_ssize_t i, n = values.shape[0]
    cdef int64_t nulls_only = 0, nans_only = 0, no_nulls = 0, no_nans = 0
    with nogil:
        for i in range(n):
            nulls_only += values[i] >= 0 and nulls[i] == values[i]
            nans_only += values[i] >= 0 and nans[i] == values[i]
            no_nulls += nulls[i] == 0
            no_nans += nans[i] == 0
    return nulls_only, nans_only, no_nulls, no_nans



def pack_longs(const int64_t[::1] values, const uint8_t[::1] present, bint absent_low):
    """(width, base, low, high, codes uint8[rows * width] or None, presence uint8[…] or None); None when all are absent.

    `present` may be empty: then MISSING is absent. `low` and `high` are of what is there.
    """
    cdef Py_ssize_t i, n = values.shape[0], there = 0
    cdef int64_t low = INT64_MAX, high = INT64_MIN, value, base
    cdef uint64_t span, code, absent
    cdef int width
    cdef bint given = present.shape[0] > 0
    with nogil:
        for i in range(n):
            value = values[i]
            if not present[i] if given else value == MISSING:
                continue
            there += 1
            if value < low:
                low = value
            if value > high:
                high = value
    if there == 0:
        return None
    cdef bint full = there == n
    if full and low == high:
        return 0, low, low, high, None, None
    # One code is kept free for absent values, unless the range leaves none: then it is shared, which only keeps more.
    base = low - 1 if not full and absent_low and low > INT64_MIN else low
    span = <uint64_t>high - <uint64_t>base
    if not full and not absent_low and span < 0xFFFFFFFFFFFFFFFF:
        span += 1
    width = 1 if span < 0x100 else 2 if span < 0x10000 else 4 if span < 0x100000000 else 8
    absent = 0 if absent_low else <uint64_t>0xFFFFFFFFFFFFFFFF
    packed = np.empty(n * width, dtype=np.uint8)
    presence = None if full else np.zeros((n + 7) // 8, dtype=np.uint8)
    cdef uint8_t[::1] out = packed
    cdef uint8_t[::1] bits = packed if full else presence
    with nogil:
        for i in range(n):
            if not present[i] if given else values[i] == MISSING:
                code = absent
            else:
                code = <uint64_t>values[i] - <uint64_t>base
                if not full:
                    bits[i >> 3] |= <uint8_t>(1 << (i & 7))
            memcpy(&out[i * width], &code, width)
    return width, base, low, high, packed, presence


def pack_doubles(const double[::1] values, const uint8_t[::1] present, bint absent_low):
    """(width, low, high, codes, presence or None) as `pack_longs`; `present` may be empty: then NaN is absent.

    With `present`, NaN is a value like any other, left out of `low` and `high` (which are NaN when all are).
    """
    cdef Py_ssize_t i, n = values.shape[0], there = 0
    cdef double low = float("inf"), high = float("-inf"), value
    cdef bint exact = True, given = present.shape[0] > 0
    cdef float narrow
    with nogil:
        for i in range(n):
            value = values[i]
            if (given and not present[i]) or (not given and isnan(value)):
                continue
            there += 1
            if isnan(value):
                continue
            narrow = <float>value
            exact = exact and <double>narrow == value
            if value < low:
                low = value
            if value > high:
                high = value
    if there == 0:
        return None
    cdef bint full = there == n
    cdef int width = 4 if exact else 8
    packed = np.empty(n * width, dtype=np.uint8)
    presence = None if full else np.zeros((n + 7) // 8, dtype=np.uint8)
    cdef uint8_t[::1] out = packed
    cdef uint8_t[::1] bits = packed if full else presence
    cdef double nothing = float("nan")
    with nogil:
        for i in range(n):
            value = values[i]
            if (given and not present[i]) or (not given and isnan(value)):
                value = nothing
            elif not full:
                bits[i >> 3] |= <uint8_t>(1 << (i & 7))
            if width == 4:
                narrow = <float>value
                memcpy(&out[i * 4], &narrow, 4)
            else:
                memcpy(&out[i * 8], &value, 8)
    return width, low, high, packed, presence


def pack_spans(const uint8_t[::1] heap, const int64_t[::1] starts, const int32_t[::1] lengths, bint absent_low):
    """(width, common bytes, least code, greatest code, codes, presence, lengths, bytes a length, ends, tails).

    Arrays are uint8 or None where there is nothing to store; None in all when every span is absent, or when the tails
    pass 4 GiB.
    """
    cdef Py_ssize_t i, n = starts.shape[0], first = -1, there = 0
    cdef int64_t shared = 0, k, rest, longest = 0, total = 0, at = 0, start, tail
    cdef uint64_t code, least = 0xFFFFFFFFFFFFFFFF, most = 0, absent
    cdef uint32_t end
    cdef int width, size
    with nogil:
        for i in range(n):
            if lengths[i] < 0:
                continue
            there += 1
            if first < 0:
                first = i
                shared = lengths[i]
                continue
            if lengths[i] < shared:
                shared = lengths[i]
            if shared == 0 or memcmp(&heap[starts[i]], &heap[starts[first]], shared) == 0:
                continue
            k = 0
            while heap[starts[i] + k] == heap[starts[first] + k]:
                k += 1
            shared = k
        for i in range(n):
            rest = lengths[i] - shared
            if lengths[i] >= 0 and rest > longest:
                longest = rest
    if there == 0:
        return None
    cdef bint full = there == n
    width = 0 if longest == 0 and full else 1 if longest <= 1 else 2 if longest == 2 else 4 if longest <= 4 else 8
    common = bytes(heap[starts[first]:starts[first] + shared])
    if width == 0:
        return 0, common, 0, 0, None, None, None, 0, None, None
    with nogil:
        for i in range(n):
            if lengths[i] - shared > width:
                total += lengths[i] - shared - width
    if total >= 0x100000000:
        return None
    size = 1 if longest < 0x100 else 2 if longest < 0x10000 else 4
    absent = 0 if absent_low else <uint64_t>0xFFFFFFFFFFFFFFFF
    packed, sizes = np.empty(n * width, dtype=np.uint8), np.empty(n * size, dtype=np.uint8)
    presence = None if full else np.zeros((n + 7) // 8, dtype=np.uint8)
    ends = np.empty(n, dtype=np.uint32) if total else None
    tails = np.empty(total, dtype=np.uint8) if total else None
    cdef uint8_t[::1] out = packed
    cdef uint8_t[::1] out_sizes = sizes
    cdef uint8_t[::1] bits = packed if full else presence
    cdef uint32_t[::1] out_ends = ends if total else np.empty(0, dtype=np.uint32)
    cdef uint8_t[::1] out_tails = tails if total else packed
    with nogil:
        for i in range(n):
            rest = 0
            code = absent
            if lengths[i] >= 0:
                rest = lengths[i] - shared
                start = starts[i] + shared
                if width == 8 and rest >= 8:
                    memcpy(&code, &heap[start], 8)
                    code = seamark_big_endian(code)
                else:
                    code = 0
                    for k in range(width):
                        code = (code << 8) | (heap[start + k] if k < rest else 0)
                if code < least:
                    least = code
                if code > most:
                    most = code
                if not full:
                    bits[i >> 3] |= <uint8_t>(1 << (i & 7))
                tail = rest - width
                if tail > 0:
                    memcpy(&out_tails[at], &heap[start + width], tail)
                    at += tail
            memcpy(&out[i * width], &code, width)
            memcpy(&out_sizes[i * size], &rest, size)
            if total:
                out_ends[i] = <uint32_t>at
    return width, common, least, most, packed, presence, sizes, size, ends, tails
