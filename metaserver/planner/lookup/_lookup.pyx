"""Reads a packed column for chosen rows of many blocks into one array, without the GIL and without an object for each
row.

Segments, int64[segments, 4], list the rows to read. Each segment is a stretch of rows of one block:

    number of the block, its first row, number of rows, start in `picks` (-1: the rows follow one another)

If a segment has a start, its rows are `picks[start : start + count]`. `layout` is int64[blocks, 15] as in
`formats/index/kernels/_scan.pyx`. If a block has another form than the function reads, its values are absent. The
outputs represent an absent integer as MISSING, the least int64.
"""

from libc.math cimport NAN
from libc.stdint cimport INT64_MIN, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from cpython.bytearray cimport PyByteArray_FromStringAndSize

import numpy as np

cdef extern from *:
    """
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    #error "packed columns are little-endian"
    #endif
    #define seamark_big_endian(code) __builtin_bswap64(code)
    #if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
    #define SEAMARK_CLONES __attribute__((target_clones("avx2", "default")))
    #else
    #define SEAMARK_CLONES
    #endif
    #include <stdint.h>

    /* Codes of rows that follow one another, in the shape that compilers turn into vectors. */
    #define SEAMARK_WIDEN(NAME, CODE, TO)                                                              \\
        SEAMARK_CLONES static void NAME(const CODE *codes, uint64_t base, TO *target, int64_t n) {         \\
            for (int64_t i = 0; i < n; i++) target[i] = (TO)(base + codes[i]);                             \\
        }
    #define SEAMARK_WIDENS(TO)                                 \\
        SEAMARK_WIDEN(seamark_u8_##TO, uint8_t, TO)            \\
        SEAMARK_WIDEN(seamark_u16_##TO, uint16_t, TO)          \\
        SEAMARK_WIDEN(seamark_u32_##TO, uint32_t, TO)          \\
        SEAMARK_WIDEN(seamark_u64_##TO, uint64_t, TO)          \\
        static void seamark_widen_##TO(int width, const void *codes, uint64_t base, int64_t first, TO *target, int64_t n) { \\
            if (width == 1) seamark_u8_##TO((const uint8_t *)codes + first, base, target, n);              \\
            else if (width == 2) seamark_u16_##TO((const uint16_t *)codes + first, base, target, n);       \\
            else if (width == 4) seamark_u32_##TO((const uint32_t *)codes + first, base, target, n);       \\
            else seamark_u64_##TO((const uint64_t *)codes + first, base, target, n);                       \\
        }
    SEAMARK_WIDENS(int64_t)
    SEAMARK_WIDENS(int32_t)
    """
    uint64_t seamark_big_endian(uint64_t code) nogil
    void seamark_widen_int64_t(int width, const void *codes, uint64_t base, int64_t first, int64_t *target, int64_t n) nogil
    void seamark_widen_int32_t(int width, const void *codes, uint64_t base, int64_t first, int32_t *target, int64_t n) nogil

cdef enum:  # the fields of a block in `layout`
    FORM = 0
    WIDTH = 1
    CODES = 2
    PRESENCE = 3
    ROWS = 4
    BASE = 6
    COMMON = 7
    COMMON_SIZE = 8
    LENGTHS = 9
    ENDS = 10
    TAILS = 11
    LENGTHS_WIDTH = 12

cdef enum:
    INTEGERS = 0
    FLOATS = 1
    STRINGS = 2

ctypedef fused Code:
    uint8_t
    uint16_t
    uint32_t
    uint64_t

ctypedef fused Real:
    float
    double


cdef int64_t _check_segments(
    const int64_t[:, ::1] layout, const int64_t[:, ::1] segments, const int64_t[::1] picks
) except -1:
    """Return the number of rows in the segments. Raises IndexError if a segment names a row that its block does not
    have."""
    cdef int64_t total = 0, s, i, number, first, count, start
    for s in range(segments.shape[0]):
        number, first, count, start = segments[s, 0], segments[s, 1], segments[s, 2], segments[s, 3]
        if number < 0 or number >= layout.shape[0] or count < 0:
            raise IndexError(f"there is no block {number}")
        total += count
        if layout[number, FORM] < 0:
            continue
        if start < 0:
            if first < 0 or first + count > layout[number, ROWS]:
                raise IndexError(f"block {number} does not have the rows {first} to {first + count}")
            continue
        if start + count > picks.shape[0]:
            raise IndexError("fewer rows are picked than the segments need")
        for i in range(start, start + count):
            if picks[i] < 0 or picks[i] >= layout[number, ROWS]:
                raise IndexError(f"block {number} does not have the row {picks[i]}")
    return total


def count_rows(const int64_t[:, ::1] segments):
    """Return the number of rows in the segments."""
    cdef int64_t s, total = 0
    for s in range(segments.shape[0]):
        total += segments[s, 2]
    return total


ctypedef fused Integer:
    int32_t
    int64_t


cdef void _read_picked_integers(
    const Code *codes, uint64_t base, Integer *output, int64_t count, const int64_t *picks
) noexcept nogil:
    """Write the integers of the rows in `picks`."""
    cdef int64_t i
    for i in range(count):
        output[i] = <Integer>(base + codes[picks[i]])


cdef void _read_reals(
    const Real *codes, double *output, int64_t first, int64_t count, const int64_t *picks
) noexcept nogil:
    """Write the floats of `count` rows: the rows in `picks`, or the rows from `first` on if `picks` is NULL."""
    cdef int64_t i
    if picks == NULL:
        for i in range(count):
            output[i] = codes[first + i]
    else:
        for i in range(count):
            output[i] = codes[picks[i]]


cdef inline bint _is_present(const uint8_t *presence, int64_t row) noexcept nogil:
    return (presence[row >> 3] >> (row & 7)) & 1


cdef void _decode_segment(
    const int64_t *column, int64_t first, int64_t count, const int64_t *rows, Integer *target
) noexcept nogil:
    """Decode the integers of one segment. Absent values decode to undefined integers."""
    cdef int width = <int>column[WIDTH]
    cdef uint64_t base = <uint64_t>column[BASE]
    cdef const void *codes = <const void *><size_t>column[CODES]
    cdef int64_t i
    if width == 0:
        for i in range(count):
            target[i] = <Integer>base
    elif rows == NULL:
        if Integer is int64_t:
            seamark_widen_int64_t(width, codes, base, first, target, count)
        else:
            seamark_widen_int32_t(width, codes, base, first, target, count)
    elif width == 1:
        _read_picked_integers(<const uint8_t *>codes, base, target, count, rows)
    elif width == 2:
        _read_picked_integers(<const uint16_t *>codes, base, target, count, rows)
    elif width == 4:
        _read_picked_integers(<const uint32_t *>codes, base, target, count, rows)
    else:
        _read_picked_integers(<const uint64_t *>codes, base, target, count, rows)


cdef void _read_segments(
    const int64_t[:, ::1] layout, const int64_t[:, ::1] segments, const int64_t[::1] picks, int64_t *target
) noexcept nogil:
    """Write the integers of all segments to `target`, and MISSING for absent values."""
    cdef int64_t s, i, first, count
    cdef const int64_t *rows
    cdef const int64_t *column
    cdef const uint8_t *presence
    for s in range(segments.shape[0]):
        column, first, count = &layout[segments[s, 0], 0], segments[s, 1], segments[s, 2]
        if count == 0:
            continue
        rows = NULL if segments[s, 3] < 0 else &picks[segments[s, 3]]
        if column[FORM] != INTEGERS:
            for i in range(count):
                target[i] = INT64_MIN
        else:
            _decode_segment(column, first, count, rows, target)
            presence = <const uint8_t *><size_t>column[PRESENCE]
            if presence != NULL:
                for i in range(count):
                    if not _is_present(presence, first + i if rows == NULL else rows[i]):
                        target[i] = INT64_MIN
        target += count


def read_longs(layouts, const int64_t[:, ::1] segments, const int64_t[::1] picks):
    """Return, for each of the layouts, the integers of the rows as int64[rows]. Absent values are MISSING."""
    cdef const int64_t[:, ::1] layout
    cdef int64_t[::1] output
    cdef int64_t total
    result = []
    for column_layout in layouts:
        layout = column_layout
        total = _check_segments(layout, segments, picks)
        values = np.empty(total, dtype=np.int64)
        if total:
            output = values
            with nogil:
                _read_segments(layout, segments, picks, &output[0])
        result.append(values)
    return result


cdef int64_t _mark_present(
    const int64_t *column, int64_t first, int64_t count, const int64_t *rows, uint8_t *bits, int64_t done
) noexcept nogil:
    """Set the bits of the values of one segment that are not absent, and return the number of absent values.

    The bit of the first value is number `done` of `bits`. This bit and all later bits must be zero.
    """
    cdef const uint8_t *presence = <const uint8_t *><size_t>column[PRESENCE]
    cdef int64_t i, bit, absent = 0
    for i in range(count):
        if presence == NULL or _is_present(presence, first + i if rows == NULL else rows[i]):
            bit = done + i
            bits[bit >> 3] |= 1 << (bit & 7)
        else:
            absent += 1
    return absent


def are_all_present(const int64_t[:, ::1] layout, const int64_t[:, ::1] segments):
    """Return whether each of the rows has an integer. If so, Arrow needs no bitmap for the rows."""
    cdef int64_t s
    cdef const int64_t *column
    for s in range(segments.shape[0]):
        if segments[s, 0] < 0 or segments[s, 0] >= layout.shape[0]:
            raise IndexError(f"there is no block {segments[s, 0]}")
        column = &layout[segments[s, 0], 0]
        if column[FORM] != INTEGERS or column[PRESENCE] or column[BASE] == INT64_MIN:
            return False
    return True


def write_integers(
    const int64_t[:, ::1] layout, const int64_t[:, ::1] segments, const int64_t[::1] picks,
    uint8_t[::1] values, int width, uint8_t[::1] bits,
):
    """Write the integers in Arrow's layout: `values` gets `width` bytes (4 or 8) for each row, and `bits` its validity
    bitmap. `bits` must be zeros; it is empty if no value is absent.

    Returns the number of absent values, whose bytes in `values` are undefined. Raises ValueError if the sizes of the
    buffers do not fit the rows.
    """
    cdef int64_t total = _check_segments(layout, segments, picks), s, i, first, count, done = 0, absent = 0
    cdef bint needs_bits = bits.shape[0] > 0
    cdef const int64_t *rows
    cdef const int64_t *column
    if width not in (4, 8) or values.shape[0] != total * width or (needs_bits and bits.shape[0] < (total + 7) // 8):
        raise ValueError("the buffers are not of the size that the rows need")
    if total == 0:
        return 0
    with nogil:
        for s in range(segments.shape[0]):
            column, first, count = &layout[segments[s, 0], 0], segments[s, 1], segments[s, 2]
            if count == 0:
                continue
            rows = NULL if segments[s, 3] < 0 else &picks[segments[s, 3]]
            if column[FORM] != INTEGERS:
                memset(&values[done * width], 0, count * width)
                absent += count
            else:
                if width == 8:
                    _decode_segment(column, first, count, rows, <int64_t *>&values[done * 8])
                else:
                    _decode_segment(column, first, count, rows, <int32_t *>&values[done * 4])
                if needs_bits:
                    absent += _mark_present(column, first, count, rows, &bits[0], done)
            done += count
    return absent


def allocate_buffer(Py_ssize_t size):
    """Return a bytearray that is not initialised. The functions here write all its bytes before a caller sees it."""
    return PyByteArray_FromStringAndSize(NULL, size)


def list_entry_ids(const int64_t[:, ::1] extents, const int64_t[:, ::1] segments, const int64_t[::1] picks):
    """Return int64[rows]: the entry id of each row in the view. `extents` is a layout whose bases are the entry ids of
    the blocks' first rows."""
    cdef int64_t total = _check_segments(extents, segments, picks)
    result = np.empty(total, dtype=np.int64)
    cdef int64_t[::1] output = result
    cdef int64_t s, i, first, count, start, done = 0
    with nogil:
        for s in range(segments.shape[0]):
            first, count, start = segments[s, 1], segments[s, 2], segments[s, 3]
            if start < 0:
                first += extents[segments[s, 0], BASE]
                for i in range(count):
                    output[done + i] = first + i
            else:
                first = extents[segments[s, 0], BASE]
                for i in range(count):
                    output[done + i] = first + picks[start + i]
            done += count
    return result


def read_doubles(const int64_t[:, ::1] layout, const int64_t[:, ::1] segments, const int64_t[::1] picks):
    """Return float64[rows] with NaN for absent values."""
    cdef int64_t total = _check_segments(layout, segments, picks)
    result = np.empty(total, dtype=np.float64)
    cdef double[::1] output = result
    cdef int64_t s, i, number, first, count, done = 0
    cdef const int64_t *rows
    cdef double *target
    cdef const void *codes
    if total == 0:
        return result
    with nogil:
        for s in range(segments.shape[0]):
            number, first, count = segments[s, 0], segments[s, 1], segments[s, 2]
            if count == 0:
                continue
            rows = NULL if segments[s, 3] < 0 else &picks[segments[s, 3]]
            target = &output[done]
            done += count
            codes = <const void *><size_t>layout[number, CODES]
            if layout[number, FORM] != FLOATS:
                for i in range(count):
                    target[i] = NAN
            elif layout[number, WIDTH] == 4:
                _read_reals(<const float *>codes, target, first, count, rows)
            else:
                _read_reals(<const double *>codes, target, first, count, rows)
    return result


cdef inline int64_t _measure_string(const int64_t *column, int64_t row) noexcept nogil:
    """Return the length of one string, or -1 if it is absent."""
    cdef uint32_t own_size = 0
    if column[FORM] != STRINGS:
        return -1
    if column[PRESENCE] and not _is_present(<const uint8_t *><size_t>column[PRESENCE], row):
        return -1
    if column[WIDTH]:
        memcpy(&own_size, <const uint8_t *><size_t>column[LENGTHS] + row * column[LENGTHS_WIDTH], column[LENGTHS_WIDTH])
    return column[COMMON_SIZE] + own_size


cdef inline void _copy_string(const int64_t *column, int64_t row, int64_t size, uint8_t *target) noexcept nogil:
    """Copy a string of `size` bytes to `target`. Up to seven bytes after the string are written, too, and the next string
    overwrites them."""
    cdef int64_t width = column[WIDTH], own_size = size - column[COMMON_SIZE]
    cdef uint64_t code = 0
    cdef uint32_t end
    memcpy(target, <const uint8_t *><size_t>column[COMMON], column[COMMON_SIZE])
    if own_size == 0:
        return
    target += column[COMMON_SIZE]
    if width == 8:
        memcpy(&code, <const uint8_t *><size_t>column[CODES] + row * 8, 8)
    else:
        memcpy(&code, <const uint8_t *><size_t>column[CODES] + row * width, width)
        code <<= 8 * (8 - width)
    code = seamark_big_endian(code)
    memcpy(target, &code, 8)
    if own_size > width:
        end = (<const uint32_t *><size_t>column[ENDS])[row]
        memcpy(target + width, <const uint8_t *><size_t>column[TAILS] + end - (own_size - width), own_size - width)


def read_strings(const int64_t[:, ::1] layout, const int64_t[:, ::1] segments, const int64_t[::1] picks):
    """Return (ends int64[rows + 1] with a leading 0, bytes uint8[], present uint8[rows]). An absent string has no
    bytes."""
    cdef int64_t total = _check_segments(layout, segments, picks)
    offsets = np.zeros(total + 1, dtype=np.int64)
    valid = np.empty(total, dtype=np.uint8)
    cdef int64_t[::1] ends = offsets  # `offsets` and `valid` as memory views
    cdef uint8_t[::1] present = valid
    cdef uint8_t[::1] data
    cdef int64_t s, i, row, first, count, size, done = 0
    cdef const int64_t *rows
    cdef const int64_t *column
    with nogil:
        for s in range(segments.shape[0]):
            column = &layout[segments[s, 0], 0]
            first, count = segments[s, 1], segments[s, 2]
            rows = NULL if segments[s, 3] < 0 or count == 0 else &picks[segments[s, 3]]
            for i in range(count):
                size = _measure_string(column, first + i if rows == NULL else rows[i])
                present[done] = size >= 0
                ends[done + 1] = ends[done] + (size if size > 0 else 0)
                done += 1
    # `_copy_string` writes up to seven bytes after the last string.
    text = np.empty(ends[total] + 8, dtype=np.uint8)
    if ends[total] == 0:
        return offsets, text[:0], valid
    data = text
    done = 0
    with nogil:
        for s in range(segments.shape[0]):
            column = &layout[segments[s, 0], 0]
            first, count = segments[s, 1], segments[s, 2]
            rows = NULL if segments[s, 3] < 0 or count == 0 else &picks[segments[s, 3]]
            for i in range(count):
                row = first + i if rows == NULL else rows[i]
                size = ends[done + 1] - ends[done]
                if size:
                    _copy_string(column, row, size, &data[ends[done]])
                done += 1
    return offsets, text[: offsets[total]], valid
