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
    NUMBERS = 128
    FEW = 12
    DEAR = 16
    SINGLES_MAX = 48

cdef struct Asked:
    const Words *starts
    const int *moves
    int slices
    const uint64_t *gone
    Py_ssize_t count
    uint64_t unit, least
    const uint64_t *firsts
    const uint64_t *packed
    const uint32_t *words
    const uint64_t *table
    uint64_t low, span
    uint8_t *marks
    int64_t looked
    int wanted
    uint32_t[SINGLES_MAX] singles


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
    cdef Asked[COLUMNS_MAX] asked
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
        asked[c].starts = &slices.starts[0]
        asked[c].moves = &slices.moves[0]
        asked[c].slices = slices.count
        asked[c].gone = NULL
        if gone is not None:
            bits = gone
            if bits.shape[0] != words:
                raise ValueError(f"{bits.shape[0]} words are not of {rows} rows")
            asked[c].gone = &bits[0]
        asked[c].low, asked[c].span, asked[c].table = low, span, NULL
        if table is not None:
            bits = table
            if bits.shape[0] == 0 or (asked[c].span + 63) >> 6 > <uint64_t>bits.shape[0]:
                raise ValueError(f"a table of {bits.shape[0]} words does not span {span} codes")
            asked[c].table = &bits[0]
        asked[c].marks = NULL
        asked[c].looked = 0
        asked[c].wanted = 0
        asked[c].count, asked[c].unit, asked[c].least = dictionary.count, dictionary.unit, dictionary.least
        asked[c].firsts, asked[c].packed, asked[c].words = dictionary.firsts, dictionary.packed, dictionary.words
    with nogil:
        for word in range(words):
            left = chosen[word] if chosen != NULL else <uint64_t>0xFFFFFFFFFFFFFFFF
            if word == words - 1 and rows & 63:
                left &= (<uint64_t>1 << (rows & 63)) - 1
            for c in range(n):
                if left and asked[c].gone != NULL:
                    left &= ~asked[c].gone[word]
                if left == 0:
                    break
                if not _filter(&asked[c], word, &left):
                    found = -1
                    left = 0
                    break
            if left:
                found = 1
            if found:
                break
        for c in range(n):
            free(asked[c].marks)
    if found < 0:
        raise ValueError("a row's rank is beyond the keys that there are")
    return found > 0


cdef bint _filter(Asked *one, Py_ssize_t word, uint64_t *rows) noexcept nogil:
    """Remove the rows without a requested key from `rows`, which are bits of one word. Returns False if a row has a
    rank beyond the dictionary."""
    cdef uint64_t left = rows[0], kept = 0, x, at
    cdef uint64_t[4] ranks
    cdef uint32_t rank, count = <uint32_t>one.count
    cdef int k, plane, group, top, planes = (one.slices + 7) // 8, many = seamark_count(left)
    one.looked += many
    if one.marks == NULL and one.looked * DEAR > count:
        one.marks = _marks(one)  # without memory for the marks, each key is looked up alone
        if one.marks != NULL:
            one.wanted = _singles(one)
    if one.marks != NULL and one.wanted <= SINGLES_MAX and many > FEW:
        for k in range(one.wanted):
            x = left
            rank = one.singles[k]
            for plane in range(one.slices):
                at = one.starts[plane][word if one.moves[plane] else 0]
                x &= at if rank >> plane & 1 else ~at
            kept |= x
        rows[0] = kept
        return True
    if many <= FEW:
        while left:
            group = seamark_lowest(left)
            left &= left - 1
            rank = seamark_rank(one.starts, one.moves, one.slices, word, group)
            if rank >= count:
                return False
            kept |= <uint64_t>_wanted(one, rank) << group
        rows[0] = kept
        return True
    for plane in range(4):
        ranks[plane] = 0
    for group in range(8):
        if not left >> (8 * group) & 0xFF:
            continue
        for plane in range(planes):
            x = 0
            top = one.slices - 8 * plane
            for k in range(8 if top > 8 else top):
                x |= (one.starts[8 * plane + k][word if one.moves[8 * plane + k] else 0] >> (8 * group) & 0xFF) << (8 * k)
            ranks[plane] = seamark_transposed(x)
        for k in range(8):
            if not left >> (8 * group + k) & 1:
                continue
            rank = ranks[0] >> (8 * k) & 0xFF
            for plane in range(1, planes):
                rank |= <uint32_t>(ranks[plane] >> (8 * k) & 0xFF) << (8 * plane)
            if rank >= count:
                return False
            kept |= <uint64_t>_wanted(one, rank) << (8 * group + k)
    rows[0] = kept
    return True


cdef int _singles(Asked *one) noexcept nogil:
    """List the requested ranks in `singles`, which are then compared one by one, slice by slice. Returns how many ranks
    are requested, or SINGLES_MAX + 1 if there are too many for `singles`."""
    cdef Py_ssize_t rank
    cdef int wanted = 0
    for rank in range(one.count):
        if one.marks[rank]:
            if wanted == SINGLES_MAX:
                return SINGLES_MAX + 1
            one.singles[wanted] = <uint32_t>rank
            wanted += 1
    return wanted


cdef inline bint _wanted(const Asked *one, uint32_t rank) noexcept nogil:
    cdef uint64_t at
    if one.marks != NULL:
        return one.marks[rank]
    return _is_wanted(one, _number(one, rank) - one.low)


cdef inline bint _is_wanted(const Asked *one, uint64_t at) noexcept nogil:
    return at < one.span and (one.table == NULL or one.table[at >> 6] >> (at & 63) & 1)


cdef inline uint64_t _code(const uint64_t *packed, int width, int k) noexcept nogil:
    """Return the k-th number of numbers with `width` bits each, 1 to 63."""
    cdef int bit = k * width, within = bit & 63
    cdef uint64_t code = packed[bit >> 6] >> within
    if within + width > 64:
        code |= packed[(bit >> 6) + 1] << (64 - within)
    return code & ((<uint64_t>1 << width) - 1)


cdef uint64_t _number(const Asked *one, uint32_t rank) noexcept nogil:
    """Return the key of a rank below `count`; `_ordered.pyx` describes the layout."""
    cdef Py_ssize_t block = rank // NUMBERS
    cdef int k, within = rank % NUMBERS
    cdef int width = one.words[block + 1] - one.words[block]
    cdef const uint64_t *packed = one.packed + 2 * <Py_ssize_t>one.words[block]
    cdef uint64_t steps = 0
    if width == 64:
        for k in range(within):
            steps += packed[k]
    elif width:
        for k in range(within):
            steps += _code(packed, width, k)
    return one.firsts[block] + (steps + one.least * <uint64_t>within) * one.unit


cdef uint8_t *_marks(const Asked *one) noexcept nogil:
    """Return an array with 1 for each rank whose key is requested, or NULL when there is no memory."""
    cdef Py_ssize_t block, i, there
    cdef int width
    cdef const uint64_t *packed
    cdef uint64_t at
    cdef uint8_t *marks = <uint8_t *>malloc(one.count + 1)
    cdef uint8_t *out
    if marks == NULL:
        return NULL
    for block in range((one.count + NUMBERS - 1) // NUMBERS):
        width = one.words[block + 1] - one.words[block]
        packed = one.packed + 2 * <Py_ssize_t>one.words[block]
        there = one.count - block * NUMBERS
        there = NUMBERS if there > NUMBERS else there
        out = marks + block * NUMBERS
        at = one.firsts[block] - one.low
        out[0] = _is_wanted(one, at)
        for i in range(there - 1):
            if width == 64:
                at += (packed[i] + one.least) * one.unit
            elif width:
                at += (_code(packed, width, <int>i) + one.least) * one.unit
            else:
                at += one.least * one.unit
            out[i + 1] = _is_wanted(one, at)
    return marks
