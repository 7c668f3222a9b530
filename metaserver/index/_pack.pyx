"""From spans of a decoded manifest's heap to typed columns; every loop runs without the GIL.

A span is (start, length) of a single-value binary (Iceberg spec, appendix D). What has an impossible length is
marked absent and counted, since a bound that cannot be read is a bound that is not there.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy


def gather_longs(const uint8_t[::1] heap, const int64_t[::1] starts, const int32_t[::1] lengths,
                 int64_t[::1] values, uint8_t[::1] present):
    """Little-endian integers of 1, 4 or 8 bytes, sign-extended (1 byte: a boolean). Returns how many were refused."""
    cdef Py_ssize_t i, n = starts.shape[0]
    cdef int64_t refused = 0, start, room = heap.shape[0]
    cdef int32_t length, narrow
    cdef int64_t wide
    with nogil:
        for i in range(n):
            length = lengths[i]
            start = starts[i]
            values[i] = 0
            present[i] = 0
            if length < 0 or start < 0 or start + length > room:
                refused += length >= 0
                continue
            if length == 8:
                memcpy(&wide, &heap[start], 8)
                values[i] = wide
            elif length == 4:
                memcpy(&narrow, &heap[start], 4)
                values[i] = narrow
            elif length == 1:
                values[i] = heap[start] != 0
            else:
                refused += 1
                continue
            present[i] = 1
    return refused


def gather_doubles(const uint8_t[::1] heap, const int64_t[::1] starts, const int32_t[::1] lengths,
                   double[::1] values, uint8_t[::1] present):
    """IEEE floats of 4 or 8 bytes as doubles; NaN counts as absent. Returns how many were refused."""
    cdef Py_ssize_t i, n = starts.shape[0]
    cdef int64_t refused = 0, start, room = heap.shape[0]
    cdef int32_t length
    cdef float narrow
    cdef double wide
    with nogil:
        for i in range(n):
            length = lengths[i]
            start = starts[i]
            values[i] = 0
            present[i] = 0
            if length < 0 or start < 0 or start + length > room:
                refused += length >= 0
                continue
            if length == 8:
                memcpy(&wide, &heap[start], 8)
            elif length == 4:
                memcpy(&narrow, &heap[start], 4)
                wide = narrow
            else:
                refused += 1
                continue
            if wide == wide:
                values[i] = wide
                present[i] = 1
    return refused


def gather_decimals(const uint8_t[::1] heap, const int64_t[::1] starts, const int32_t[::1] lengths,
                    int64_t[::1] high, uint64_t[::1] low, uint8_t[::1] present):
    """Big-endian two's complement of 1 to 16 bytes, as the two halves of a 128-bit integer.

    Longer ones are accepted when the extra bytes only repeat the sign. Returns how many were refused.
    """
    cdef Py_ssize_t i, n = starts.shape[0]
    cdef int64_t refused = 0, start, room = heap.shape[0]
    cdef int32_t length, k
    cdef uint8_t sign, byte
    cdef uint64_t h, l
    cdef bint fits
    with nogil:
        for i in range(n):
            length = lengths[i]
            start = starts[i]
            high[i] = 0
            low[i] = 0
            present[i] = 0
            if length < 0:
                continue
            if length == 0 or start < 0 or start + length > room:
                refused += 1
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
                refused += 1
                continue
            h = <uint64_t>0xFFFFFFFFFFFFFFFF if sign else 0
            l = h
            for k in range(length):
                h = (h << 8) | (l >> 56)
                l = (l << 8) | heap[start + k]
            high[i] = <int64_t>h
            low[i] = l
            present[i] = 1
    return refused


def common_prefix(const uint8_t[::1] heap, const int64_t[::1] starts, const int32_t[::1] lengths):
    """(length of the prefix that all present spans share, index of a present span or -1)."""
    cdef Py_ssize_t i, first = -1, n = starts.shape[0]
    cdef int64_t shared = 0, k
    with nogil:
        for i in range(n):
            if lengths[i] < 0:
                continue
            if first < 0:
                first = i
                shared = lengths[i]
                continue
            if lengths[i] < shared:
                shared = lengths[i]
            k = 0
            while k < shared and heap[starts[i] + k] == heap[starts[first] + k]:
                k += 1
            shared = k
            if shared == 0:
                break
    return shared, first


def gather_prefixes(const uint8_t[::1] heap, const int64_t[::1] starts, const int32_t[::1] lengths,
                    int64_t skip, int width, uint64_t[::1] codes):
    """The first `width` bytes after `skip` of each present span, big-endian, zero-padded; absent ones stay as given."""
    cdef Py_ssize_t i, n = starts.shape[0]
    cdef int64_t k, length
    cdef uint64_t code
    with nogil:
        for i in range(n):
            if lengths[i] < 0:
                continue
            length = lengths[i] - skip
            code = 0
            for k in range(width):
                code = (code << 8) | (heap[starts[i] + skip + k] if k < length else 0)
            codes[i] = code


def gather_tails(const uint8_t[::1] heap, const int64_t[::1] starts, const int32_t[::1] lengths,
                 int64_t skip, const int64_t[::1] ends, uint8_t[::1] out):
    """Copies what follows the first `skip` bytes of each present span to where `ends` (cumulated lengths) says."""
    cdef Py_ssize_t i, n = starts.shape[0]
    cdef int64_t length
    with nogil:
        for i in range(n):
            length = lengths[i] - skip
            if length > 0:
                memcpy(&out[ends[i] - length], &heap[starts[i] + skip], length)
