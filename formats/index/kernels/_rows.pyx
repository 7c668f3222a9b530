"""Checks whether a file has a row with a requested key in each of several columns. The loops run without the GIL.

Rows are checked 64 at a time, column by column, while any of the 64 rows remains. The search ends at the first row that
remains after all columns. If many rows of a column remain, the whole dictionary is compared with the requested keys
once. Otherwise the key of each row is looked up.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from seamark.formats.index.kernels._bitmap cimport Slices
from seamark.formats.index.kernels._bits cimport Words, seamark_count, seamark_lowest, seamark_rank, seamark_transposed
from seamark.formats.index.kernels._ordered cimport Numbers

cdef enum:
    COLUMNS_MAX = 32
    NUMBERS = 128  # the numbers in a block of a dictionary (`_ordered.pyx`)
    FEW_ROWS = 12  # up to so many rows of a word are looked up one at a time
    MARKED_DIVISOR = 16  # the whole dictionary is compared when more rows than a 16th of its keys were looked up
    SINGLES_MAX = 48  # up to so many requested ranks are compared with the slices, for all rows of a word at once

cdef struct RequestedColumn:
    const Words *starts  # the slices of the ranks (`_bitmap.pyx`)
    const int *moves  # 0 for a slice with one word for all rows
    int slices
    const uint64_t *gone  # bits of the rows without a key, or NULL
    Py_ssize_t count  # the number of keys in the dictionary; the next five fields are the dictionary's
    uint64_t unit, least
    const uint64_t *firsts
    const uint64_t *packed
    const uint32_t *words
    const uint64_t *table  # bits of the requested codes, from `low` on, or NULL if all codes in the span are requested
    uint64_t low, span
    uint8_t *marks  # 1 for each rank whose key is requested, or NULL while the dictionary has not been compared
    int64_t looked_up  # the number of rows that were looked up
    int requested_ranks  # the number of requested ranks, at most SINGLES_MAX + 1
    uint32_t[SINGLES_MAX] singles  # the requested ranks, if there are at most SINGLES_MAX


def any_row(list columns, Py_ssize_t rows, among):
    """Return whether one of the file's `rows` rows has a requested key in every column. If `among` (Bits) is not None,
    only its rows count.

    A column is (dictionary, slices, gone, table, low, span). `gone` are Bits of the rows that have no key, or None.
    `table` is a table of the requested codes that `table_of` made, or None if all codes in the span are requested.
    `low` is the least requested code, and `span` the number of codes from the least to the greatest requested code, at
    least 1. Raises ValueError if the parts of a column do not fit one another.
    """
    cdef int n = len(columns), c
    cdef Py_ssize_t words = (rows + 63) // 64, word
    cdef const uint64_t[::1] bits
    cdef Numbers dictionary
    cdef Slices slices
    cdef RequestedColumn[COLUMNS_MAX] requested
    cdef const uint64_t *chosen = NULL
    cdef uint64_t left
    cdef int found = 0
    if n > COLUMNS_MAX:
        raise ValueError(f"{n} columns are too many")
    if rows == 0:
        return False
    if among is not None:
        bits = among
        if bits.shape[0] != words:
            raise ValueError(f"{bits.shape[0]} words are not of {rows} rows")
        chosen = &bits[0]
    for c in range(n):
        dictionary, slices, gone, table, low, span = columns[c]
        if slices.rows != rows or dictionary.count > (<Py_ssize_t>1 << slices.count):
            raise ValueError(f"slices of {slices.rows} rows are not of {rows} rows and {dictionary.count} keys")
        requested[c].starts = &slices.starts[0]
        requested[c].moves = &slices.moves[0]
        requested[c].slices = slices.count
        requested[c].gone = NULL
        if gone is not None:
            bits = gone
            if bits.shape[0] != words:
                raise ValueError(f"{bits.shape[0]} words are not of {rows} rows")
            requested[c].gone = &bits[0]
        requested[c].low, requested[c].span, requested[c].table = low, span, NULL
        if table is not None:
            bits = table
            if bits.shape[0] == 0 or (requested[c].span + 63) >> 6 > <uint64_t>bits.shape[0]:
                raise ValueError(f"a table of {bits.shape[0]} words does not span {span} codes")
            requested[c].table = &bits[0]
        requested[c].marks = NULL
        requested[c].looked_up = 0
        requested[c].requested_ranks = 0
        requested[c].count, requested[c].unit, requested[c].least = dictionary.count, dictionary.unit, dictionary.least
        requested[c].firsts, requested[c].packed = dictionary.firsts, dictionary.packed
        requested[c].words = dictionary.words
    with nogil:
        for word in range(words):
            left = chosen[word] if chosen != NULL else <uint64_t>0xFFFFFFFFFFFFFFFF
            if word == words - 1 and rows & 63:
                left &= (<uint64_t>1 << (rows & 63)) - 1
            for c in range(n):
                if left and requested[c].gone != NULL:
                    left &= ~requested[c].gone[word]
                if left == 0:
                    break
                if not _filter(&requested[c], word, &left):
                    found = -1
                    left = 0
                    break
            if left:
                found = 1
            if found:
                break
        for c in range(n):
            free(requested[c].marks)
    if found < 0:
        raise ValueError("a row's rank is beyond the keys that there are")
    return found > 0


cdef bint _filter(RequestedColumn *column, Py_ssize_t word, uint64_t *rows) noexcept nogil:
    """Remove the rows without a requested key from `rows`, which are bits of one word. Returns False if a row has a
    rank beyond the dictionary."""
    cdef uint64_t left = rows[0], kept = 0, x, at
    cdef uint64_t[4] ranks
    cdef uint32_t rank, count = <uint32_t>column.count
    cdef int k, plane, group, top, planes = (column.slices + 7) // 8, many = seamark_count(left)
    column.looked_up += many
    if column.marks == NULL and column.looked_up * MARKED_DIVISOR > count:
        column.marks = _mark_ranks(column)  # without memory for the marks, each key is looked up alone
        if column.marks != NULL:
            column.requested_ranks = _list_singles(column)
    if column.marks != NULL and column.requested_ranks <= SINGLES_MAX and many > FEW_ROWS:
        for k in range(column.requested_ranks):
            x = left
            rank = column.singles[k]
            for plane in range(column.slices):
                at = column.starts[plane][word if column.moves[plane] else 0]
                x &= at if rank >> plane & 1 else ~at
            kept |= x
        rows[0] = kept
        return True
    if many <= FEW_ROWS:
        while left:
            group = seamark_lowest(left)
            left &= left - 1
            rank = seamark_rank(column.starts, column.moves, column.slices, word, group)
            if rank >= count:
                return False
            kept |= <uint64_t>_is_rank_requested(column, rank) << group
        rows[0] = kept
        return True
    for plane in range(4):
        ranks[plane] = 0
    # The ranks of eight rows are assembled at once. Plane p has the bits from 8 * p on of each of these ranks.
    for group in range(8):
        if not left >> (8 * group) & 0xFF:
            continue
        for plane in range(planes):
            x = 0
            top = column.slices - 8 * plane
            for k in range(8 if top > 8 else top):
                at = column.starts[8 * plane + k][word if column.moves[8 * plane + k] else 0]
                x |= (at >> (8 * group) & 0xFF) << (8 * k)
            ranks[plane] = seamark_transposed(x)
        for k in range(8):
            if not left >> (8 * group + k) & 1:
                continue
            rank = ranks[0] >> (8 * k) & 0xFF
            for plane in range(1, planes):
                rank |= <uint32_t>(ranks[plane] >> (8 * k) & 0xFF) << (8 * plane)
            if rank >= count:
                return False
            kept |= <uint64_t>_is_rank_requested(column, rank) << (8 * group + k)
    rows[0] = kept
    return True


cdef int _list_singles(RequestedColumn *column) noexcept nogil:
    """List the requested ranks in `singles`, which are then compared one by one, slice by slice. Returns how many ranks
    are requested, or SINGLES_MAX + 1 if there are too many for `singles`."""
    cdef Py_ssize_t rank
    cdef int wanted = 0
    for rank in range(column.count):
        if column.marks[rank]:
            if wanted == SINGLES_MAX:
                return SINGLES_MAX + 1
            column.singles[wanted] = <uint32_t>rank
            wanted += 1
    return wanted


cdef inline bint _is_rank_requested(const RequestedColumn *column, uint32_t rank) noexcept nogil:
    """Return whether the key of a rank is requested."""
    if column.marks != NULL:
        return column.marks[rank]
    return _is_code_requested(column, _find_key(column, rank) - column.low)


cdef inline bint _is_code_requested(const RequestedColumn *column, uint64_t at) noexcept nogil:
    """Return whether the code `low + at` is requested."""
    return at < column.span and (column.table == NULL or column.table[at >> 6] >> (at & 63) & 1)


cdef inline uint64_t _unpack_number(const uint64_t *packed, int width, int k) noexcept nogil:
    """Return the k-th number of numbers with `width` bits each, 1 to 63."""
    cdef int bit = k * width, within = bit & 63
    cdef uint64_t code = packed[bit >> 6] >> within
    if within + width > 64:
        code |= packed[(bit >> 6) + 1] << (64 - within)
    return code & ((<uint64_t>1 << width) - 1)


cdef uint64_t _find_key(const RequestedColumn *column, uint32_t rank) noexcept nogil:
    """Return the key of a rank below `count`; `_ordered.pyx` describes the layout."""
    cdef Py_ssize_t block = rank // NUMBERS
    cdef int k, within = rank % NUMBERS
    cdef int width = column.words[block + 1] - column.words[block]
    cdef const uint64_t *packed = column.packed + 2 * <Py_ssize_t>column.words[block]
    cdef uint64_t steps = 0
    if width == 64:
        for k in range(within):
            steps += packed[k]
    elif width:
        for k in range(within):
            steps += _unpack_number(packed, width, k)
    return column.firsts[block] + (steps + column.least * <uint64_t>within) * column.unit


cdef uint8_t *_mark_ranks(const RequestedColumn *column) noexcept nogil:
    """Return an array with 1 for each rank whose key is requested, or NULL when there is no memory."""
    cdef Py_ssize_t block, i, there
    cdef int width
    cdef const uint64_t *packed
    cdef uint64_t at
    cdef uint8_t *marks = <uint8_t *>malloc(column.count + 1)
    cdef uint8_t *out
    if marks == NULL:
        return NULL
    for block in range((column.count + NUMBERS - 1) // NUMBERS):
        width = column.words[block + 1] - column.words[block]
        packed = column.packed + 2 * <Py_ssize_t>column.words[block]
        there = column.count - block * NUMBERS
        there = NUMBERS if there > NUMBERS else there
        out = marks + block * NUMBERS
        at = column.firsts[block] - column.low
        out[0] = _is_code_requested(column, at)
        for i in range(there - 1):
            if width == 64:
                at += (packed[i] + column.least) * column.unit
            elif width:
                at += (_unpack_number(packed, width, <int>i) + column.least) * column.unit
            else:
                at += column.least * column.unit
            out[i + 1] = _is_code_requested(column, at)
    return marks
