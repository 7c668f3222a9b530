"""Kernels of the bitmap index: ranks of values, slices of ranks, and predicates on slices. All loops run without the
GIL.

*Bits* are uint64[ceil(rows / 64)]: row r is bit r % 64 of word r // 64, and the other bits are zero. A *slice* i holds
bit i of every row's rank. Machines must be little-endian.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

import numpy as np

from seamark.formats.index.kernels._bits cimport seamark_count, seamark_length, seamark_lowest, seamark_rank, seamark_transposed

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    /* Loops over whole words are compiled twice, and the processor's own choice is bound when the library is loaded. */
    #if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
    #define SEAMARK_WIDE __attribute__((target_clones("avx2", "default")))
    #else
    #define SEAMARK_WIDE
    #endif

    #define SEAMARK_BLOCK 256

    /* Where the rank of each row is less than `cut`, for one block of rows. From the lowest slice upward: the result of
       the slices below counts only where this slice equals the cut. Slices below its lowest one bit do not count. */
    SEAMARK_WIDE
    static void seamark_less(const uint64_t **slices, int count, uint64_t cut, int words, uint64_t *out) {
        uint64_t less[SEAMARK_BLOCK];
        int first = __builtin_ctzll(cut);
        const uint64_t *bits = slices[first];
        for (int k = 0; k < words; k++) less[k] = ~bits[k];
        for (int i = first + 1; i < count; i++) {
            bits = slices[i];
            if (cut >> i & 1) for (int k = 0; k < words; k++) less[k] |= ~bits[k];
            else for (int k = 0; k < words; k++) less[k] &= ~bits[k];
        }
        for (int k = 0; k < words; k++) out[k] ^= less[k];
    }

    SEAMARK_WIDE
    static void seamark_equal(const uint64_t **slices, int count, uint64_t rank, int words, uint64_t *out) {
        uint64_t same[SEAMARK_BLOCK];
        for (int k = 0; k < words; k++) same[k] = ~(uint64_t)0;
        for (int i = 0; i < count; i++) {
            const uint64_t *bits = slices[i];
            if (rank >> i & 1) for (int k = 0; k < words; k++) same[k] &= bits[k];
            else for (int k = 0; k < words; k++) same[k] &= ~bits[k];
        }
        for (int k = 0; k < words; k++) out[k] ^= same[k];
    }

    SEAMARK_WIDE
    static uint64_t seamark_changes(const uint32_t *ranks, int64_t rows) {
        uint64_t changes = 0;
        for (int64_t i = 1; i < rows; i++) changes += ranks[i] != ranks[i - 1];
        return changes;
    }

    static inline uint64_t seamark_word(const uint8_t *at) { uint64_t word; memcpy(&word, at, 8); return word; }

    /* The first eight bytes as a number that sorts as they do, zeros behind the last. */
    static inline uint64_t seamark_prefix(const uint8_t *at, int64_t length) {
        uint64_t word = 0;
        if (length > 0) memcpy(&word, at, length < 8 ? length : 8);
        return __builtin_bswap64(word);
    }

    static inline uint64_t seamark_mixed(const uint8_t *at, int64_t length) {
        uint64_t h = (uint64_t)length * 0x9E3779B97F4A7C15u;
        for (; length >= 8; at += 8, length -= 8) {
            h = (h ^ seamark_word(at)) * 0xFF51AFD7ED558CCDu;
            h ^= h >> 32;
        }
        uint64_t rest = 0;
        if (length) memcpy(&rest, at, length);
        h = (h ^ rest) * 0xC4CEB9FE1A85EC53u;
        return h ^ (h >> 29);
    }
    """
    const int SEAMARK_BLOCK
    void seamark_less(const uint64_t **slices, int count, uint64_t cut, int words, uint64_t *out) nogil
    void seamark_equal(const uint64_t **slices, int count, uint64_t rank, int words, uint64_t *out) nogil
    uint64_t seamark_changes(const uint32_t *ranks, int64_t rows) nogil

    uint64_t seamark_prefix(const uint8_t *at, int64_t length) nogil
    uint64_t seamark_mixed(const uint8_t *at, int64_t length) nogil

cdef uint32_t EMPTY = 0xFFFFFFFF
cdef enum:
    SAME = 256
    FEW = 16


# ---- ranks of codes ----

def extent(const uint64_t[::1] codes):
    """Return (least code, greatest code, whether the codes ascend) of at least one code."""
    cdef Py_ssize_t i, n = codes.shape[0]
    cdef uint64_t low = codes[0], high = codes[0]
    cdef bint ascending = True
    with nogil:
        for i in range(1, n):
            if codes[i] < codes[i - 1]:
                ascending = False
            if codes[i] < low:
                low = codes[i]
            if codes[i] > high:
                high = codes[i]
    return low, high, ascending


def rank_ascending(const uint64_t[::1] codes):
    """Return (distinct uint64[d] ascending, ranks uint32[n]) of at least one code. The codes must ascend."""
    cdef Py_ssize_t i, n = codes.shape[0]
    cdef uint32_t rank = 0
    found, which = np.empty(n, dtype=np.uint64), np.empty(n, dtype=np.uint32)
    cdef uint64_t[::1] distinct = found
    cdef uint32_t[::1] ranks = which
    with nogil:
        distinct[0] = codes[0]
        ranks[0] = 0
        for i in range(1, n):
            rank += codes[i] != codes[i - 1]
            distinct[rank] = codes[i]
            ranks[i] = rank
    return found[: rank + 1].copy(), which


def rank_span(const uint64_t[::1] codes, uint64_t low, uint64_t span):
    """Return the same as `rank_ascending` for codes in any order. The codes are from `low` to `low + span`, and a table
    has an entry for each number in between."""
    cdef Py_ssize_t i, n = codes.shape[0]
    cdef uint64_t at
    cdef uint32_t rank = 0
    which, place = np.empty(n, dtype=np.uint32), np.zeros(span + 1, dtype=np.uint32)
    cdef uint32_t[::1] ranks = which
    cdef uint32_t[::1] table = place
    with nogil:
        for i in range(n):
            table[codes[i] - low] = 1
    found = np.flatnonzero(place).astype(np.uint64) + np.uint64(low)
    with nogil:
        for at in range(span + 1):
            if table[at]:
                table[at] = rank
                rank += 1
        for i in range(n):
            ranks[i] = table[codes[i] - low]
    return found, which


def number_codes(const uint64_t[::1] codes, int bits):
    """Return (codes uint64[d] in the order of their first occurrence, number of each row's code uint32[n]). Returns
    None if there are more than 2^(bits - 1) distinct codes."""
    cdef Py_ssize_t i, n = codes.shape[0]
    cdef uint64_t mask = (<uint64_t>1 << bits) - 1, code, at, last = 0
    cdef uint32_t count = 0, number = EMPTY, most = <uint32_t>1 << (bits - 1)
    firsts, which = np.empty(most, dtype=np.uint64), np.empty(n, dtype=np.uint32)
    slots = np.full(mask + 1, EMPTY, dtype=np.uint32)
    cdef uint64_t[::1] seen = firsts
    cdef uint32_t[::1] numbers = which
    cdef uint32_t[::1] table = slots
    with nogil:
        for i in range(n):
            code = codes[i]
            if number == EMPTY or code != last:
                at = (code * <uint64_t>0x9E3779B97F4A7C15) >> (64 - bits)
                number = table[at]
                while number != EMPTY and seen[number] != code:
                    at = (at + 1) & mask
                    number = table[at]
                if number == EMPTY:
                    if count == most:
                        break
                    number = count
                    table[at] = count
                    seen[count] = code
                    count += 1
                last = code
            numbers[i] = number
        else:
            i = n
    return (firsts[:count].copy(), which) if i == n else None


cdef struct Numbered:
    uint64_t code
    uint64_t row


def rank_sorting(const uint64_t[::1] codes, uint64_t low, uint64_t span):
    """Return the same as `rank_span`, by a radix sort of 8 bits in each pass, with as many passes as the span needs.
    The ends of 256 runs stay in the processor's cache; the ends of more runs would not."""
    cdef Py_ssize_t i, n = codes.shape[0]
    cdef int shift, bits = seamark_length(span)
    cdef int64_t total, count
    cdef int64_t[256] spots
    cdef uint32_t rank = 0
    found, which = np.empty(n, dtype=np.uint64), np.empty(n, dtype=np.uint32)
    cdef uint64_t[::1] distinct = found
    cdef uint32_t[::1] ranks = which
    cdef Numbered *both = <Numbered *>malloc(2 * n * sizeof(Numbered))
    cdef Numbered *source = both
    cdef Numbered *target = both + n
    cdef Numbered *kept
    if both == NULL:
        raise MemoryError
    with nogil:
        for i in range(n):
            source[i].code = codes[i] - low
            source[i].row = i
        shift = 0
        while shift < bits:
            memset(spots, 0, sizeof(spots))
            for i in range(n):
                spots[source[i].code >> shift & 0xFF] += 1
            total = 0
            for i in range(256):
                count = spots[i]
                spots[i] = total
                total += count
            for i in range(n):
                target[spots[source[i].code >> shift & 0xFF]] = source[i]
                spots[source[i].code >> shift & 0xFF] += 1
            kept, source = source, target
            target = kept
            shift += 8
        for i in range(n):
            if i and source[i].code != source[i - 1].code:
                rank += 1
            distinct[rank] = source[i].code + low
            ranks[source[i].row] = rank
        free(both)
    return found[: rank + 1].copy(), which


# ---- ranks of bytes ----

def number_bytes(const int64_t[::1] begins, const int64_t[::1] ends, const uint8_t[::1] heap):
    """Return (rows int64[d] that hold each distinct value first, number of each row's value uint32[n])."""
    cdef Py_ssize_t i, n = begins.shape[0]
    cdef uint64_t mask = 4095, at, mixed, size
    cdef int64_t length
    cdef uint32_t count = 0, number = EMPTY, other
    cdef const uint8_t *base = &heap[0] if heap.shape[0] else NULL
    cdef const uint8_t *value
    cdef uint32_t *table = NULL
    cdef uint32_t *grown
    cdef bint full = False
    firsts, which, hashes = np.empty(n, np.int64), np.empty(n, np.uint32), np.empty(n, np.uint64)
    cdef int64_t[::1] first = firsts
    cdef uint32_t[::1] numbers = which
    cdef uint64_t[::1] hashed = hashes
    with nogil:
        table = <uint32_t *>malloc((mask + 1) * sizeof(uint32_t))
        full = table == NULL
        if not full:
            memset(table, 0xFF, (mask + 1) * sizeof(uint32_t))
        for i in range(n if not full else 0):
            value = base + begins[i]
            length = ends[i] - begins[i]
            if number != EMPTY and _same(base, begins, ends, first[number], value, length):
                numbers[i] = number
                continue
            mixed = seamark_mixed(value, length)
            at = mixed & mask
            number = table[at]
            while number != EMPTY and not (
                hashed[number] == mixed and _same(base, begins, ends, first[number], value, length)
            ):
                at = (at + 1) & mask
                number = table[at]
            if number == EMPTY:
                number = count
                table[at] = count
                first[count] = i
                hashed[count] = mixed
                count += 1
                if count > mask // 2:
                    size = 2 * (mask + 1)
                    grown = <uint32_t *>malloc(size * sizeof(uint32_t))
                    if grown == NULL:
                        full = True
                        break
                    free(table)
                    table, mask = grown, size - 1
                    memset(table, 0xFF, size * sizeof(uint32_t))
                    for other in range(count):
                        at = hashed[other] & mask
                        while table[at] != EMPTY:
                            at = (at + 1) & mask
                        table[at] = other
            numbers[i] = number
        free(table)
    if full:
        raise MemoryError
    return firsts[:count].copy(), which


cdef inline bint _same(const uint8_t *base, const int64_t[::1] begins, const int64_t[::1] ends, int64_t row,
                       const uint8_t *value, int64_t length) noexcept nogil:
    """Return whether the value of a row equals `value`."""
    return ends[row] - begins[row] == length and (length == 0 or memcmp(base + begins[row], value, length) == 0)


cdef struct Entry:
    uint64_t prefix
    uint32_t number


cdef inline bint _before(const Entry *one, const Entry *other, const uint8_t *base, const int64_t *begins,
                         const int64_t *ends) noexcept nogil:
    """Return whether a value is less than another value. The prefixes of the values are compared first."""
    if one.prefix != other.prefix:
        return one.prefix < other.prefix
    cdef int64_t length = ends[one.number] - begins[one.number]
    cdef int64_t other_length = ends[other.number] - begins[other.number]
    cdef int64_t shorter_length = length if length < other_length else other_length
    cdef int comparison = 0
    if shorter_length:
        comparison = memcmp(base + begins[one.number], base + begins[other.number], shorter_length)
    return comparison < 0 or (comparison == 0 and length < other_length)


def order_bytes(const int64_t[::1] begins, const int64_t[::1] ends, const uint8_t[::1] heap):
    """Return uint32[d]: the places of the distinct values in ascending order of the values. The function is a merge
    sort on the 8 bytes after the prefix that all values share."""
    cdef Py_ssize_t i, d = begins.shape[0]
    found = np.arange(d, dtype=np.uint32)
    if d < 2:
        return found
    cdef uint32_t[::1] order = found
    cdef const uint8_t *base = &heap[0] if heap.shape[0] else NULL
    cdef const int64_t *begin = &begins[0]
    cdef const int64_t *end = &ends[0]
    cdef int64_t shared = ends[0] - begins[0], k, left, middle, right, one, other, out, width = 1
    cdef Entry *entries = <Entry *>malloc(2 * d * sizeof(Entry))
    cdef Entry *source = entries
    cdef Entry *target = entries + d
    cdef Entry *kept
    if entries == NULL:
        raise MemoryError
    with nogil:
        for i in range(1, d):
            if end[i] - begin[i] < shared:
                shared = end[i] - begin[i]
            k = 0
            while k < shared and base[begin[i] + k] == base[begin[0] + k]:
                k += 1
            shared = k
        for i in range(d):
            source[i].prefix = seamark_prefix(base + begin[i] + shared, end[i] - begin[i] - shared)
            source[i].number = <uint32_t>i
        while width < d:
            left = 0
            while left < d:
                middle = left + width if left + width < d else d
                right = middle + width if middle + width < d else d
                one, other, out = left, middle, left
                while one < middle and other < right:
                    if _before(&source[other], &source[one], base, begin, end):
                        target[out] = source[other]
                        other += 1
                    else:
                        target[out] = source[one]
                        one += 1
                    out += 1
                memcpy(&target[out], &source[one], (middle - one) * sizeof(Entry))
                out += middle - one
                memcpy(&target[out], &source[other], (right - other) * sizeof(Entry))
                left = right
            kept, source = source, target
            target = kept
            width *= 2
        for i in range(d):
            order[i] = source[i].number
        free(entries)
    return found


def gather_bytes(const int64_t[::1] begins, const int64_t[::1] ends, const uint8_t[::1] heap):
    """Return the values one after the other, as (starts int64[d + 1], heap uint8[])."""
    cdef Py_ssize_t i, d = begins.shape[0]
    spots = np.zeros(d + 1, dtype=np.int64)
    np.cumsum(np.subtract(ends, begins), out=spots[1:])
    cdef const int64_t[::1] starts = spots
    together = np.empty(spots[d], dtype=np.uint8)
    cdef uint8_t[::1] out = together
    with nogil:
        for i in range(d):
            if ends[i] > begins[i]:
                memcpy(&out[starts[i]], &heap[begins[i]], ends[i] - begins[i])
    return spots, together


# ---- slices ----

def changes(const uint32_t[::1] ranks):
    """Return how many rows have another rank than the row before them."""
    cdef uint64_t found = 0
    with nogil:
        if ranks.shape[0]:
            found = seamark_changes(&ranks[0], ranks.shape[0])
    return found


def slice_ranks(const uint32_t[::1] ranks, int count):
    """Return uint64[count, ceil(n / 64)]: slice i has bit i of each row's rank."""
    cdef Py_ssize_t n = ranks.shape[0], words = (n + 63) // 64, group, whole = n // 8
    cdef int plane, k, planes = (count + 7) // 8
    cdef uint64_t x
    cdef uint32_t[8] rest
    cdef const uint32_t *eight
    slices = np.zeros((count, words), dtype=np.uint64)
    cdef uint8_t[:, ::1] out = slices.view(np.uint8)
    with nogil:
        for group in range((n + 7) // 8):
            eight = &ranks[group * 8]
            if group == whole:
                memset(rest, 0, sizeof(rest))
                memcpy(rest, eight, (n - whole * 8) * sizeof(uint32_t))
                eight = rest
            for plane in range(planes):
                x = 0
                for k in range(8):
                    x |= <uint64_t>(eight[k] >> (8 * plane) & 0xFF) << (8 * k)
                x = seamark_transposed(x)
                for k in range(8 if count - 8 * plane > 8 else count - 8 * plane):
                    out[8 * plane + k, group] = <uint8_t>(x >> (8 * k))
    return slices


def split_ranks(const uint32_t[::1] ranks, int count):
    """Return uint64[count, ceil(n / 64)]: for each rank below `count`, the Bits of the rows that have this rank."""
    cdef Py_ssize_t i, n = ranks.shape[0]
    rows = np.zeros((count, (n + 63) // 64), dtype=np.uint64)
    cdef uint64_t[:, ::1] out = rows
    with nogil:
        for i in range(n):
            out[ranks[i], i >> 6] |= <uint64_t>1 << (i & 63)
    return rows


cdef uint64_t[SAME] NONE
cdef uint64_t[SAME] EVERY
memset(NONE, 0, sizeof(NONE))
memset(EVERY, 0xFF, sizeof(EVERY))

SLICES_BYTES = 16 * SLICES_MAX
"""The size of a `Slices` in bytes, without the slices themselves."""


cdef class Slices:
    """Slices of ranks in memory, from the lowest bit on. A slice is uint64[words], or a bool if all its bits are the
    same."""

    def __cinit__(self, list slices, Py_ssize_t rows):
        cdef const uint64_t[::1] view
        cdef int i
        if len(slices) > SLICES_MAX:
            raise ValueError(f"{len(slices)} slices are too many")
        self.count = len(slices)
        self.rows = rows
        self.words = (rows + 63) // 64
        self.held = slices
        for i in range(self.count):
            self.moves[i] = not isinstance(slices[i], bool)
            if not self.moves[i]:
                self.starts[i] = &EVERY[0] if slices[i] else &NONE[0]
                continue
            view = slices[i]
            if view.shape[0] != self.words:
                raise ValueError(f"a slice of {view.shape[0]} words cannot be of {rows} rows")
            self.starts[i] = &view[0] if self.words else &NONE[0]

    def where(self, const uint64_t[::1] cuts, const uint64_t[::1] points, bint every):
        """Return Bits of the rows with a matching rank. A rank matches if it is one of `points`, or if it is less than
        an odd number of `cuts`; if `every`, than an even number. Cuts are above 0, and cuts and points are below
        2^slices. No point may match by the cuts, too.

        So the range [a, b) is given as the cuts a and b. Every slice is read only once, in blocks that stay in the
        processor's cache while each bound is compared (O'Neil and Quass, "Improved Query Performance with Variant
        Indexes", 1997, algorithm 4.3).
        """
        cdef Py_ssize_t start = 0, i
        cdef int words, k
        cdef Words[SLICES_MAX] here
        found = np.full(self.words, 0xFFFFFFFFFFFFFFFF if every else 0, dtype=np.uint64)
        cdef uint64_t[::1] out = found
        with nogil:
            while start < self.words:
                words = SEAMARK_BLOCK if self.words - start > SEAMARK_BLOCK else <int>(self.words - start)
                for k in range(self.count):
                    here[k] = self.starts[k] + (start if self.moves[k] else 0)
                for i in range(cuts.shape[0]):
                    seamark_less(here, self.count, cuts[i], words, &out[start])
                for i in range(points.shape[0]):
                    seamark_equal(here, self.count, points[i], words, &out[start])
                start += words
            if self.rows & 63:
                out[self.words - 1] &= (<uint64_t>1 << (self.rows & 63)) - 1
        return found

    def where_listed(self, const uint64_t[::1] begins, const uint64_t[::1] ends):
        """Return Bits of the rows whose rank is in one of the ranges [begin, end). Each row's rank is assembled once,
        and looked up in a table."""
        cdef Py_ssize_t word, byte, i
        cdef int k, plane, planes = (self.count + 7) // 8, group, top
        cdef uint64_t x, bits, last = <uint64_t>1 << self.count
        cdef uint64_t[4] ranks
        cdef uint32_t rank
        listed = np.zeros(last, dtype=np.uint8)
        cdef uint8_t[::1] table = listed
        for i in range(begins.shape[0]):
            if begins[i] > ends[i] or ends[i] > last:
                raise ValueError(f"ranks up to {ends[i]} do not fit into {self.count} slices")
            memset(&table[begins[i]], 1, ends[i] - begins[i])
        found = np.empty(self.words, dtype=np.uint64)
        cdef uint64_t[::1] out = found
        with nogil:
            memset(ranks, 0, sizeof(ranks))
            for word in range(self.words):
                bits = 0
                for group in range(8):
                    for plane in range(planes):
                        x = 0
                        top = self.count - 8 * plane
                        for k in range(8 if top > 8 else top):
                            byte = (word if self.moves[8 * plane + k] else 0) * 8 + group
                            x |= <uint64_t>(<const uint8_t *>self.starts[8 * plane + k])[byte] << (8 * k)
                        ranks[plane] = seamark_transposed(x)
                    for k in range(8):
                        rank = ranks[0] >> (8 * k) & 0xFF
                        for plane in range(1, planes):
                            rank |= <uint32_t>(ranks[plane] >> (8 * k) & 0xFF) << (8 * plane)
                        bits |= <uint64_t>(table[rank] & 1) << (8 * group + k)
                out[word] = bits
            if self.rows & 63:
                out[self.words - 1] &= (<uint64_t>1 << (self.rows & 63)) - 1
        return found

    def where_marked(self, const uint8_t[::1] marks, const uint64_t[::1] among):
        """Return Bits of the rows in `among` whose rank has a 1 in `marks`. Raises ValueError if a rank is beyond
        `marks`.

        If a word of `among` has few rows, only the ranks of these rows are assembled.
        """
        cdef Py_ssize_t word, byte
        cdef int k, plane, planes = (self.count + 7) // 8, group, top
        cdef uint64_t x, bits, asked
        cdef uint64_t[4] ranks
        cdef uint32_t rank
        cdef uint64_t most = marks.shape[0]
        cdef bint beyond = False
        if among.shape[0] != self.words:
            raise ValueError(f"{among.shape[0]} words are not of {self.rows} rows")
        found = np.zeros(self.words, dtype=np.uint64)
        cdef uint64_t[::1] out = found
        with nogil:
            memset(ranks, 0, sizeof(ranks))
            for word in range(self.words):
                asked = among[word]
                if asked == 0:
                    continue
                bits = 0
                if seamark_count(asked) <= FEW:
                    while asked:
                        group = seamark_lowest(asked)
                        asked &= asked - 1
                        rank = seamark_rank(self.starts, self.moves, self.count, word, group)
                        if rank >= most:
                            beyond = True
                        else:
                            bits |= <uint64_t>(marks[rank] & 1) << group
                    out[word] = bits
                    continue
                for group in range(8):
                    if not asked >> (8 * group) & 0xFF:
                        continue
                    for plane in range(planes):
                        x = 0
                        top = self.count - 8 * plane
                        for k in range(8 if top > 8 else top):
                            byte = (word if self.moves[8 * plane + k] else 0) * 8 + group
                            x |= <uint64_t>(<const uint8_t *>self.starts[8 * plane + k])[byte] << (8 * k)
                        ranks[plane] = seamark_transposed(x)
                    for k in range(8):
                        if not asked >> (8 * group + k) & 1:
                            continue
                        rank = ranks[0] >> (8 * k) & 0xFF
                        for plane in range(1, planes):
                            rank |= <uint32_t>(ranks[plane] >> (8 * k) & 0xFF) << (8 * plane)
                        if rank >= most:
                            beyond = True
                        else:
                            bits |= <uint64_t>(marks[rank] & 1) << (8 * group + k)
                out[word] = bits
        if beyond:
            raise ValueError(f"a row's rank is beyond the {most} that there are")
        return found


# ---- codes that lie close together ----

def table_of(const uint64_t[::1] codes, uint64_t low, uint64_t span):
    """Return a table as uint64[]: bit i is set if low + i is one of the codes. All codes are in [low, low + span)."""
    cdef Py_ssize_t i
    cdef uint64_t at
    table = np.zeros((span + 63) >> 6, dtype=np.uint64)
    cdef uint64_t[::1] out = table
    with nogil:
        for i in range(codes.shape[0]):
            at = codes[i] - low
            if at < span:
                out[at >> 6] |= <uint64_t>1 << (at & 63)
    return table


def marks_of(const uint64_t[::1] codes, const uint64_t[::1] table, uint64_t low, uint64_t span):
    """Return uint8[n]: 1 for each code whose bit is set in a table that `table_of` made. Raises ValueError if the table
    has fewer than `span` bits."""
    cdef Py_ssize_t i
    cdef uint64_t at
    if (span + 63) >> 6 > <uint64_t>table.shape[0]:
        raise ValueError(f"a table of {table.shape[0]} words does not span {span} codes")
    found = np.zeros(codes.shape[0], dtype=np.uint8)
    cdef uint8_t[::1] out = found
    with nogil:
        for i in range(codes.shape[0]):
            at = codes[i] - low
            if at < span:
                out[i] = table[at >> 6] >> (at & 63) & 1
    return found


# ---- bits ----

def positions(const uint64_t[::1] bits, int64_t count):
    """Return the rows whose bit is set, ascending, as int64[count]. `count` is the number of set bits."""
    cdef Py_ssize_t i
    cdef int64_t at = 0
    cdef uint64_t word
    found = np.empty(count, dtype=np.int64)
    cdef int64_t[::1] out = found
    with nogil:
        for i in range(bits.shape[0]):
            word = bits[i]
            while word and at < count:
                out[at] = (i << 6) + seamark_lowest(word)
                at += 1
                word &= word - 1
    return found


def bits_at(const uint32_t[::1] rows, Py_ssize_t total):
    """Return Bits of `total` rows in which `rows` are set. Raises ValueError if a row is not below `total`."""
    cdef Py_ssize_t i
    cdef bint beyond = False
    found = np.zeros((total + 63) // 64, dtype=np.uint64)
    cdef uint64_t[::1] out = found
    with nogil:
        for i in range(rows.shape[0]):
            if rows[i] >= total:
                beyond = True
                break
            out[rows[i] >> 6] |= <uint64_t>1 << (rows[i] & 63)
    if beyond:
        raise ValueError(f"a bitmap names rows beyond the {total} that there are")
    return found


def roaring_of(const uint64_t[::1] bits, const int64_t[::1] counts):
    """Return Bits in the portable serialisation of Roaring bitmaps (RoaringFormatSpec, without runs), as bytes.
    `counts` has the number of set bits of each 1,024 words."""
    cdef Py_ssize_t chunk, chunks = counts.shape[0], i, end
    cdef uint32_t filled = 0, at, cookie = 12346
    cdef uint64_t word
    cdef uint16_t low
    cdef uint16_t[2] key
    cdef int64_t size = 8
    for chunk in range(chunks):
        if counts[chunk]:
            filled += 1
            size += 8 + (2 * counts[chunk] if counts[chunk] <= 4096 else 8192)
    made = np.zeros(size, dtype=np.uint8)
    cdef uint8_t[::1] out = made
    cdef int64_t head = 8
    with nogil:
        memcpy(&out[0], &cookie, 4)
        memcpy(&out[4], &filled, 4)
        at = 8 + 8 * filled
        for chunk in range(chunks):
            if counts[chunk] == 0:
                continue
            key[0], key[1] = <uint16_t>chunk, <uint16_t>(counts[chunk] - 1)
            memcpy(&out[head], key, 4)
            memcpy(&out[8 + 4 * filled + (head - 8)], &at, 4)
            head += 4
            end = (chunk + 1) * 1024 if (chunk + 1) * 1024 < bits.shape[0] else bits.shape[0]
            if counts[chunk] > 4096:
                memcpy(&out[at], &bits[chunk * 1024], (end - chunk * 1024) * 8)
                at += 8192
                continue
            for i in range(chunk * 1024, end):
                word = bits[i]
                while word:
                    low = <uint16_t>(((i - chunk * 1024) << 6) + seamark_lowest(word))
                    memcpy(&out[at], &low, 2)
                    at += 2
                    word &= word - 1
    return made.tobytes()


# ---- which files ----

def fill_matrix(uint64_t[:, ::1] matrix, const uint32_t[::1] ranks, const uint32_t[::1] files):
    """Set the bit of each file in the matrix row of its rank. Files and ranks must be within the matrix."""
    cdef Py_ssize_t i
    with nogil:
        for i in range(ranks.shape[0]):
            matrix[ranks[i], files[i] >> 6] |= <uint64_t>1 << (files[i] & 63)


def mark_rows(const uint64_t[:, ::1] matrix, const uint64_t[::1] begins, const uint64_t[::1] ends):
    """Return the union of the matrix rows in all ranges [begin, end), as uint64[words]. The ranges must be within the
    matrix."""
    cdef Py_ssize_t k, words = matrix.shape[1], i
    cdef uint64_t at
    found = np.zeros(words, dtype=np.uint64)
    cdef uint64_t[::1] out = found
    with nogil:
        for i in range(begins.shape[0]):
            for at in range(begins[i], ends[i]):
                for k in range(words):
                    out[k] |= matrix[at, k]
    return found


ctypedef fused Number:
    const uint8_t
    const uint16_t
    const uint32_t


def mark_listed(Number[::1] files, const uint64_t[::1] begins, const uint64_t[::1] ends, uint8_t[::1] marks):
    """Set `marks` for the files that `files` lists in all ranges [begin, end). Raises ValueError if a file has no place
    in `marks`."""
    cdef Py_ssize_t i
    cdef uint64_t at
    cdef bint beyond = False
    with nogil:
        for i in range(begins.shape[0]):
            if begins[i] > ends[i] or ends[i] > <uint64_t>files.shape[0]:
                beyond = True
                break
            for at in range(begins[i], ends[i]):
                if files[at] >= <uint64_t>marks.shape[0]:
                    beyond = True
                    break
                marks[files[at]] = 1
    if beyond:
        raise ValueError("the files of a value are beyond those that there are")
