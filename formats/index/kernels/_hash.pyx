"""XXH64 of many keys, rows or files at once (`hashing.py`). The loops run without the GIL."""

from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport UINT32_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

import numpy as np

from seamark.formats.index.kernels._xxh64 cimport P1, P2, P3, P5, finished, rotated, with_word, xxh64, xxh64_word

cdef enum:
    FINE, OUT_OF_MEMORY, OUT_OF_BOUNDS, TOO_LONG

cdef uint32_t OF_NULL = UINT32_MAX
cdef uint32_t OF_NAN = UINT32_MAX - 1

cdef struct Column:
    const uint64_t* codes  # the keys, or NULL if the keys are bytes
    const int64_t* starts  # the bytes of row i are starts[i] to starts[i + 1] of the heap
    const uint8_t* heap
    int64_t room  # the size of the heap
    const uint64_t* valid  # bits of the rows that are not null, or NULL if no row is null
    const uint64_t* nan  # bits of the rows that are NaN, or NULL if no row is NaN


def hash_bytes(const uint8_t[::1] data, uint64_t seed):
    """Return the hash of one buffer."""
    cdef uint64_t found
    cdef const uint8_t* start = &data[0] if data.shape[0] else NULL
    with nogil:
        found = xxh64(start, data.shape[0], seed)
    return found


def hash_word(uint64_t word, uint64_t seed):
    """Return the hash of the 8 bytes of a number, little-endian."""
    return xxh64_word(word, seed)


def hash_codes(const uint64_t[::1] codes, uint64_t seed):
    """Return the hash of each code's 8 bytes, as uint64[rows]."""
    cdef Py_ssize_t i, n = codes.shape[0]
    found = np.empty(n, dtype=np.uint64)
    cdef uint64_t[::1] out = found
    with nogil:
        for i in range(n):
            out[i] = xxh64_word(codes[i], seed)
    return found


def hash_spans(const uint8_t[::1] heap, const int64_t[::1] starts, uint64_t seed):
    """Return the hash of each row's bytes, which are starts[row] to starts[row + 1] of the heap, as uint64[rows].
    Raises ValueError if a row's bytes are outside of the heap."""
    cdef Py_ssize_t i, n = starts.shape[0] - 1
    cdef int64_t room = heap.shape[0]
    cdef const uint8_t* data = &heap[0] if room else NULL
    cdef bint inside = True
    found = np.empty(n, dtype=np.uint64)
    cdef uint64_t[::1] out = found
    with nogil:
        for i in range(n):
            if not 0 <= starts[i] <= starts[i + 1] <= room:
                inside = False
                break
            out[i] = xxh64(data + starts[i], starts[i + 1] - starts[i], seed)
    if not inside:
        raise ValueError(f"row {i} of the keys does not lie within their bytes")
    return found


def hash_rows(list columns, Py_ssize_t rows, uint64_t seed):
    """Return the hashes of composite keys, as uint64[rows]. Each column is (codes | None, starts | None, heap | None,
    valid | None, nan | None).

    The caller ensures that each array has a place for every row. Raises ValueError if the bytes of a key are outside of
    their heap, or if their length does not fit 32 bits.
    """
    cdef Py_ssize_t i = 0, c, count = len(columns)
    cdef int problem = FINE
    cdef Column* column_parts = <Column*>malloc(max(count, 1) * sizeof(Column))
    cdef Column* first
    cdef uint8_t* row = NULL
    cdef size_t room = 0, used
    if column_parts == NULL:
        raise MemoryError
    found = np.empty(rows, dtype=np.uint64)
    cdef uint64_t[::1] out = found
    try:
        for c, (codes, starts, heap, valid, nan) in enumerate(columns):
            column_parts[c] = Column(
                find_words(codes), find_longs(starts), find_bytes(heap), 0 if heap is None else len(heap),
                find_words(valid), find_words(nan),
            )
        first = &column_parts[0]
        if count == 1 and first.codes != NULL and first.valid == NULL and first.nan == NULL:
            with nogil:
                for i in range(rows):
                    out[i] = hash_row_of_code(first.codes[i], seed)
            return found
        with nogil:
            for i in range(rows):
                used = 0
                for c in range(count):
                    problem = append_part(&column_parts[c], i, &row, &room, &used)
                    if problem != FINE:
                        break
                if problem != FINE:
                    break
                out[i] = xxh64(row, used, seed)
    finally:
        free(row)
        free(column_parts)
    if problem == OUT_OF_MEMORY:
        raise MemoryError
    if problem != FINE:
        reason = "is too long" if problem == TOO_LONG else "does not lie within its column's bytes"
        raise ValueError(f"a key of row {i} {reason}")
    return found


cdef inline uint64_t hash_row_of_code(uint64_t code, uint64_t seed) noexcept nogil:
    """Return the XXH64 of the 12 bytes that `append_part` writes for a code: its length, which is 8, and the code."""
    cdef uint64_t state = with_word(seed + P5 + 12, 8 | code << 32)
    return finished(rotated(state ^ ((code >> 32) * P1), 23) * P2 + P3)


cdef int append_part(const Column* column, Py_ssize_t i, uint8_t** row, size_t* room, size_t* used) noexcept nogil:
    """Append a column's part of row i to `row`: its length (u32) and its bytes. Returns FINE or the error."""
    cdef const uint8_t* data = NULL
    cdef uint64_t size = 0
    cdef uint32_t length
    cdef uint8_t* grown
    if column.valid != NULL and not (column.valid[i >> 6] >> (i & 63)) & 1:
        length = OF_NULL
    elif column.nan != NULL and (column.nan[i >> 6] >> (i & 63)) & 1:
        length = OF_NAN
    else:
        if column.codes != NULL:
            data, size = <const uint8_t*>&column.codes[i], 8
        elif not 0 <= column.starts[i] <= column.starts[i + 1] <= column.room:
            return OUT_OF_BOUNDS
        else:
            data, size = column.heap + column.starts[i], column.starts[i + 1] - column.starts[i]
        if size >= OF_NAN:
            return TOO_LONG
        length = <uint32_t>size
    if used[0] + 4 + size > room[0]:
        room[0] = 2 * (used[0] + 4 + size) + 64
        grown = <uint8_t*>realloc(row[0], room[0])
        if grown == NULL:
            return OUT_OF_MEMORY
        row[0] = grown
    memcpy(row[0] + used[0], &length, 4)
    if size:
        memcpy(row[0] + used[0] + 4, data, size)
    used[0] += 4 + size
    return FINE


cdef const uint64_t* find_words(const uint64_t[::1] array) except? NULL:
    """Return the address of an array, or NULL for None and for an empty array."""
    return NULL if array is None or not array.shape[0] else &array[0]


cdef const int64_t* find_longs(const int64_t[::1] array) except? NULL:
    """Return the address of an array, or NULL for None and for an empty array."""
    return NULL if array is None or not array.shape[0] else &array[0]


cdef const uint8_t* find_bytes(const uint8_t[::1] array) except? NULL:
    """Return the address of an array, or NULL for None and for an empty array."""
    return NULL if array is None or not array.shape[0] else &array[0]


def hash_files(list paths, const uint64_t[::1] sizes, const uint64_t[::1] records):
    """Return two hashes (seeds 0 and 1) for each file, as uint64[files, 2]. The hashed bytes are the file's path in
    UTF-8, its size and its record count."""
    cdef Py_ssize_t i, length, n = len(paths)
    cdef const char* text
    cdef uint8_t* line = NULL
    cdef uint8_t* grown
    cdef Py_ssize_t room = 0
    cdef int seed
    if sizes.shape[0] != n or records.shape[0] != n:
        raise ValueError(f"{n} paths have {sizes.shape[0]} sizes and {records.shape[0]} record counts")
    found = np.empty((n, 2), dtype=np.uint64)
    cdef uint64_t[:, ::1] out = found
    try:
        for i in range(n):
            text = PyUnicode_AsUTF8AndSize(paths[i], &length)
            if length + 16 > room:
                room = 2 * (length + 16)
                grown = <uint8_t*>realloc(line, room)
                if grown == NULL:
                    raise MemoryError
                line = grown
            memcpy(line, text, length)
            memcpy(line + length, &sizes[i], 8)
            memcpy(line + length + 8, &records[i], 8)
            for seed in range(2):
                out[i, seed] = xxh64(line, length + 16, seed)
    finally:
        free(line)
    return found
