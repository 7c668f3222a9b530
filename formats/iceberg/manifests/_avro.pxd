"""Reads Avro's binary encoding (Avro 1.12 specification, "Binary Encoding") within bounds: the values that need more
than a copy.

Each function returns FINE, or the number of the error. It moves the cursor only past bytes that it has read.
"""

from libc.stdint cimport INT64_MIN, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    FINE, TRUNCATED, NOT_64_BITS, NOT_32_BITS, NEGATIVE, TOO_LONG, BAD_UNION, BAD_ENUM, BAD_BOOLEAN, NOT_UTF8
    LEFT_OVER, NULL_ELEMENT, TOO_MANY_ROWS, TOO_MANY_COLUMNS, OUT_OF_MEMORY


cdef inline int read_long(const uint8_t** at, const uint8_t* end, int64_t* out) noexcept nogil:
    """Read a number, which is encoded as a zig-zag varint. Returns FINE or an error."""
    cdef const uint8_t* p = at[0]
    cdef uint64_t value = 0
    cdef uint8_t byte
    cdef int shift = 0
    if p < end and p[0] < 0x80:  # most numbers take one byte
        at[0] = p + 1
        out[0] = <int64_t>(p[0] >> 1) ^ -<int64_t>(p[0] & 1)
        return FINE
    while p < end:
        byte = p[0]
        p += 1
        value |= <uint64_t>(byte & 0x7F) << shift
        if byte < 0x80:
            if shift == 63 and byte > 1:
                return NOT_64_BITS
            at[0] = p
            out[0] = <int64_t>(value >> 1) ^ -<int64_t>(value & 1)
            return FINE
        shift += 7
        if shift > 63:
            return NOT_64_BITS
    return TRUNCATED


cdef inline int read_length(const uint8_t** at, const uint8_t* end, int64_t* out) noexcept nogil:
    """Read the length of a value. Returns an error if fewer bytes than that follow."""
    cdef int error = read_long(at, end, out)
    if error != FINE:
        return error
    if out[0] < 0:
        return NEGATIVE
    if out[0] > end - at[0]:
        return TOO_LONG
    return FINE


cdef inline int read_count(const uint8_t** at, const uint8_t* end, int64_t least, int64_t* out) noexcept nogil:
    """Read how many elements the next block of an array or map has; 0 ends the array or map. An element takes at least
    `least` bytes."""
    cdef int64_t size
    cdef int error = read_long(at, end, out)
    if error != FINE:
        return error
    if out[0] < 0:  # then the block's size follows, which only readers that skip the block need
        if out[0] == INT64_MIN:
            return TOO_LONG
        out[0] = -out[0]
        error = read_length(at, end, &size)
        if error != FINE:
            return error
    if least > 0 and out[0] > (end - at[0]) // least:
        return TOO_LONG
    return FINE


cdef inline bint is_utf8(const uint8_t* p, int64_t size) noexcept nogil:
    """Return whether the bytes are well-formed UTF-8 (Unicode 16, table 3-7): no overlong forms, no surrogates, nothing
    past U+10FFFF."""
    cdef const uint8_t* end = p + size
    cdef uint64_t word
    cdef uint8_t lead, low, high
    cdef int more
    while p < end:
        if end - p >= 8:
            memcpy(&word, p, 8)
            if not word & 0x8080808080808080ULL:
                p += 8
                continue
        lead = p[0]
        p += 1
        if lead < 0x80:
            continue
        low, high = 0x80, 0xBF
        if 0xC2 <= lead <= 0xDF:
            more = 1
        elif 0xE0 <= lead <= 0xEF:
            more = 2
            if lead == 0xE0:
                low = 0xA0
            elif lead == 0xED:
                high = 0x9F
        elif 0xF0 <= lead <= 0xF4:
            more = 3
            if lead == 0xF0:
                low = 0x90
            elif lead == 0xF4:
                high = 0x8F
        else:
            return False
        if end - p < more or not low <= p[0] <= high:
            return False
        p += 1
        while more > 1:
            if p[0] & 0xC0 != 0x80:
                return False
            p += 1
            more -= 1
    return True
