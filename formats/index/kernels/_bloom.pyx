"""Loops of Bloom filters: distinct hashes, filters, slices, probes, merges. `bloom.py` describes the layout.

A group of files is described by one row of an int64 table, see `Group`. The loops run without the GIL.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

import numpy as np

from seamark.formats.index.kernels._bits cimport seamark_lowest
from seamark.formats.index.kernels._xxh64 cimport xxh64

cdef enum:
    SUM = 4  # the size of a page's checksum
    BUCKET_BITS_MAX = 9
    BUCKET_KEYS = 2048  # the hash table of so many keys fits a processor's cache

cdef struct Group:  # a row of the tables that are called geometry
    int64_t filter_bits   # bits of each file's filter, which is also the number of rows of the group
    int64_t files
    int64_t stride        # bits from one row of a page to the next
    int64_t page_shift    # a full page has 2^page_shift rows
    int64_t page          # bytes of a full page, without its checksum
    int64_t offset        # offset of the group's first page in the blob
    int64_t first_page    # number of the group's first page among all pages of the blob
    int64_t first_member  # place of the group's first file in the list of all files


def distinct(const uint64_t[::1] hashes):
    """Return each hash once, as uint64[n]. Their order depends only on the order of `hashes`.

    The hashes are partitioned by their first bits into buckets that fit a processor's cache. Each bucket is then put
    into a hash table with open addressing.
    """
    cdef Py_ssize_t n = hashes.shape[0], i, b, at, kept = 0
    cdef int bits = 0
    while bits < BUCKET_BITS_MAX and (n >> bits) > BUCKET_KEYS:
        bits += 1
    cdef Py_ssize_t buckets = 1 << bits, largest = 0
    cdef uint64_t slots = 4, mask, word, spot
    cdef uint64_t* table
    cdef bint has_zero
    distinct_hashes, ends = np.empty(n, dtype=np.uint64), np.zeros(buckets + 1, dtype=np.int64)
    cdef uint64_t[::1] out = distinct_hashes
    cdef int64_t[::1] end = ends
    with nogil:
        for i in range(n):
            end[bucket_of(hashes[i], bits) + 1] += 1
        for b in range(buckets):
            largest = max(largest, end[b + 1])
            end[b + 1] += end[b]
        for i in range(n):
            b = bucket_of(hashes[i], bits)
            out[end[b]] = hashes[i]
            end[b] += 1
        while slots < <uint64_t>(2 * largest):
            slots *= 2
    table = <uint64_t*>malloc(slots * sizeof(uint64_t))
    if table == NULL:
        raise MemoryError
    with nogil:
        mask = slots - 1
        i = 0
        for b in range(buckets):
            # end[b] is the end of bucket b. A slot with zero is free, so a flag represents the hash zero.
            memset(table, 0, slots * sizeof(uint64_t))
            has_zero = False
            while i < end[b]:
                word = out[i]
                i += 1
                if word == 0:
                    if has_zero:
                        continue
                    has_zero = True
                else:
                    spot = (word * 0x9E3779B97F4A7C15ULL) >> 20 & mask
                    while table[spot] != 0 and table[spot] != word:
                        spot = (spot + 1) & mask
                    if table[spot] == word:
                        continue
                    table[spot] = word
                out[kept] = word
                kept += 1
    free(table)
    return distinct_hashes[:kept]


cdef inline Py_ssize_t bucket_of(uint64_t hash_, int bits) noexcept nogil:
    """Return the first `bits` bits of a hash as a number."""
    return <Py_ssize_t>(hash_ >> 32 >> (32 - bits))


cdef inline uint64_t position(uint64_t hash_, int i, uint64_t filter_bits) noexcept nogil:
    """Return the i-th bit of a hash in a filter. The two halves of the hash are combined by double hashing, and a
    multiplication and a shift map the result to the filter."""
    cdef uint32_t step = <uint32_t>hash_ | 1
    cdef uint32_t mixed = <uint32_t>(hash_ >> 32) + <uint32_t>i * step
    return (<uint64_t>mixed * filter_bits) >> 32


def fill(const uint64_t[::1] hashes, int64_t filter_bits, int hash_count):
    """Return the filter of one file that holds keys with these hashes, as uint64[filter_bits / 64]."""
    cdef Py_ssize_t i, n = hashes.shape[0]
    cdef int k
    cdef uint64_t spot
    filter_ = np.zeros(filter_bits // 64, dtype=np.uint64)
    cdef uint64_t[::1] words = filter_
    with nogil:
        for i in range(n):
            for k in range(hash_count):
                spot = position(hashes[i], k, filter_bits)
                words[spot >> 6] |= 1ULL << (spot & 63)
    return filter_


cdef inline uint64_t full_word(const uint8_t* data, int64_t bit) noexcept nogil:
    """Return the 64 bits from `bit` on. All of them must be within `data`."""
    cdef uint64_t word
    cdef int shift = bit & 7
    memcpy(&word, data + (bit >> 3), 8)
    if shift:
        word = (word >> shift) | (<uint64_t>data[(bit >> 3) + 8] << (64 - shift))
    return word


cdef inline uint64_t some_bits(const uint8_t* data, int64_t bit, int count, int64_t room) noexcept nogil:
    """Return the `count` bits (0 to 64) from `bit` on. No byte of `data` at `room` or beyond is read."""
    cdef uint64_t word = 0
    cdef int shift = bit & 7
    cdef int64_t first = bit >> 3
    if count == 0:
        return 0
    if first + 8 <= room:
        memcpy(&word, data + first, 8)
    else:
        memcpy(&word, data + first, room - first)
    word >>= shift
    if shift + count > 64:
        word |= <uint64_t>data[first + 8] << (64 - shift)
    return word if count == 64 else word & ((1ULL << count) - 1)


cdef inline void add_bits(uint8_t* data, int64_t bit, uint64_t word, int count) noexcept nogil:
    """Set those of the `count` bits from `bit` on that are set in `word`. The function may write the byte of the first
    bit and the 7 bytes after it."""
    cdef uint64_t there
    cdef int shift = bit & 7
    data += bit >> 3
    memcpy(&there, data, 8)
    there |= word << shift
    memcpy(data, &there, 8)
    if shift + count > 64:
        data[8] |= <uint8_t>(word >> (64 - shift))


cdef inline int64_t row_bit(const Group* group, int64_t row) noexcept nogil:
    """Return where a row begins, in bits from the start of the group's first page."""
    cdef int64_t page = row >> group.page_shift
    return page * (group.page + SUM) * 8 + (row - (page << group.page_shift)) * group.stride


cdef inline int64_t page_bytes(const Group* group, int64_t page) noexcept nogil:
    """Return the bytes of a page without its checksum. The last page may have fewer rows than the others."""
    cdef int64_t rows = min(1 << group.page_shift, group.filter_bits - (page << group.page_shift))
    return (rows * group.stride + 7) >> 3


cdef inline int64_t pages_of(const Group* group) noexcept nogil:
    """Return how many pages a group has."""
    return (group.filter_bits + (1 << group.page_shift) - 1) >> group.page_shift


cdef inline int64_t extent(const Group* group) noexcept nogil:
    """Return the bytes of all pages of the group with their checksums."""
    cdef int64_t last = pages_of(group) - 1
    return last * (group.page + SUM) + page_bytes(group, last) + SUM


cdef inline uint32_t page_sum(const uint8_t* page, int64_t size, int64_t offset) noexcept nogil:
    """Return the checksum of a page. Its seed is the page's offset in the blob, so that the checksum does not match at
    another place of the blob."""
    return <uint32_t>xxh64(page, size, offset)


cdef inline bint is_sound(const uint8_t* page, int64_t size, int64_t offset) noexcept nogil:
    """Return whether a page of `size` bytes matches the checksum after it."""
    cdef uint32_t stored_sum
    memcpy(&stored_sum, page + size, SUM)
    return stored_sum == page_sum(page, size, offset)


cdef void transpose(uint64_t* words) noexcept nogil:
    """Transpose 64 × 64 bits: bit j of word i becomes bit i of word j (Hacker's Delight, 7-3)."""
    cdef uint64_t mask = 0x00000000FFFFFFFFULL, moved
    cdef int width = 32, i
    while width:
        i = 0
        while i < 64:
            moved = ((words[i] >> width) ^ words[i + width]) & mask
            words[i] ^= moved << width
            words[i + width] ^= moved
            i = (i + width + 1) & ~width
        width >>= 1
        mask ^= mask << width


def slice_filters(list filters, const int64_t[::1] geometry, int64_t first, uint8_t[::1] out):
    """Set the rows of a group from 64 · first on. `filters` has, for each file, the words of its filter from the word
    `first` on, as uint64[words].

    `out` has the group's pages and 8 spare bytes. The rows to be set must be zero.
    """
    cdef const Group* group = <const Group*>&geometry[0]
    cdef int64_t n = group.files, words = len(filters[0]), file, word, part
    cdef int count, i
    cdef uint64_t tile[64]
    cdef const uint64_t[::1] held
    cdef const uint64_t** columns = <const uint64_t**>malloc(n * sizeof(uint64_t*))
    if columns == NULL:
        raise MemoryError
    try:
        if len(filters) != n or (first + words) * 64 > group.filter_bits or out.shape[0] < extent(group) + 8:
            raise ValueError(f"{len(filters)} filters of {words} words from {first} on are not of a group of {n} files")
        for file in range(n):
            held = filters[file]
            if held.shape[0] != words:
                raise ValueError(f"one filter has {held.shape[0]} words and another {words}")
            columns[file] = &held[0]
        with nogil:
            if n == 1:
                # the rows of the page are the bits of the filter, and a page has a multiple of 64 rows
                for word in range(words):
                    add_bits(&out[0], row_bit(group, (first + word) * 64), columns[0][word], 64)
            else:
                # a tile is 64 files and a cache line of each filter: the bytes that are read and written stay in the
                # cache
                for part in range(0, words, 8):
                    for file in range(0, n, 64):
                        count = <int>min(64, n - file)
                        for word in range(part, min(words, part + 8)):
                            for i in range(count):
                                tile[i] = columns[file + i][word]
                            memset(&tile[count], 0, (64 - count) * sizeof(uint64_t))
                            transpose(tile)
                            for i in range(64):
                                add_bits(&out[0], row_bit(group, (first + word) * 64 + i) + file, tile[i], count)
    finally:
        free(columns)


def unslice(const uint8_t[::1] blob, const int64_t[::1] geometry, int64_t first, uint64_t[:, ::1] filters):
    """Undo `slice_filters`: fill uint64[files, words] with the words of each file's filter from the word `first` on.

    The checksum of each page that begins among these rows is checked. So a caller that goes through all rows in order
    uses no page that was not checked. Returns -1, or the offset of a damaged page.
    """
    cdef const Group* group = <const Group*>&geometry[0]
    cdef int64_t words = filters.shape[1], part, file, word, row, start = -1, room = blob.shape[0]
    cdef int64_t base = group.offset * 8, mask = (1 << group.page_shift) - 1
    cdef int count, i
    cdef uint64_t tile[64]
    if filters.shape[0] != group.files or (first + words) * 64 > group.filter_bits or group.offset + extent(group) > room:
        raise ValueError(f"{filters.shape[0]} filters of {words} words from {first} on are not of this group")
    with nogil:
        for row in range(first * 64, (first + words) * 64):
            if row & mask == 0:
                start = group.offset + (row >> group.page_shift) * (group.page + SUM)
                if not is_sound(&blob[start], page_bytes(group, row >> group.page_shift), start):
                    break
        else:
            start = -1
        if start < 0:
            for part in range(0, words, 8):
                for file in range(0, group.files, 64):
                    count = <int>min(64, group.files - file)
                    for word in range(part, min(words, part + 8)):
                        row = (first + word) * 64
                        if group.files == 1:
                            filters[0, word] = some_bits(&blob[0], base + row_bit(group, row), 64, room)
                            continue
                        for i in range(64):
                            tile[i] = some_bits(&blob[0], base + row_bit(group, row + i) + file, count, room)
                        transpose(tile)
                        for i in range(count):
                            filters[file + i, word] = tile[i]
    return start


def seal(const int64_t[::1] geometry, uint8_t[::1] out):
    """Write the checksum of each page of a group."""
    cdef const Group* group = <const Group*>&geometry[0]
    cdef int64_t page, start, size
    cdef uint32_t found
    with nogil:
        for page in range(pages_of(group)):
            start, size = page * (group.page + SUM), page_bytes(group, page)
            found = page_sum(&out[start], size, group.offset + start)
            memcpy(&out[start + size], &found, SUM)


def damaged(const uint8_t[::1] blob, const int64_t[::1] geometry):
    """Return the offset of the group's first page that does not match its checksum, or -1 if all pages match."""
    cdef const Group* group = <const Group*>&geometry[0]
    cdef int64_t page, start
    with nogil:
        for page in range(pages_of(group)):
            start = group.offset + page * (group.page + SUM)
            if not is_sound(&blob[start], page_bytes(group, page), start):
                break
        else:
            start = -1
    return start


cdef struct Source:
    const uint8_t* data
    const int64_t* spans  # three numbers for each span: offset in the blob, length, offset in `data`; spans ascend
    Py_ssize_t count


cdef inline const uint8_t* at_offset(const Source* source, int64_t offset, int64_t size) noexcept nogil:
    """Return where the source has `size` bytes of the blob from `offset` on, or NULL if it does not have all of
    them."""
    cdef Py_ssize_t low = 0, high = source.count, middle
    cdef const int64_t* span
    while low < high:
        middle = (low + high) >> 1
        if source.spans[3 * middle] <= offset:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return NULL
    span = source.spans + 3 * (low - 1)
    return source.data + span[2] + (offset - span[0]) if offset + size <= span[0] + span[1] else NULL


def probe(const uint8_t[::1] data, const int64_t[:, ::1] spans, const int64_t[:, ::1] geometry,
          const int32_t[::1] members, uint8_t[::1] checked, const uint64_t[::1] hashes, int hash_count,
          uint8_t[::1] out):
    """Set out[file] to 1 for each file that may hold a key with one of the hashes.

    `spans`, int64[n, 3], lists which bytes of the blob `data` has, and where. `checked`, uint8[pages], is set to 1 for
    each page whose checksum matched, so that the page is not checked again. If `checked` is empty, a page is checked
    each time. Returns -1, or the offset of a page that is damaged or not in `data`; then `out` is incomplete.
    """
    cdef Source source
    source.count = spans.shape[0]
    source.data = &data[0] if data.shape[0] else NULL
    source.spans = &spans[0, 0] if source.count else NULL
    cdef uint8_t* seen = &checked[0] if checked.shape[0] else NULL
    cdef const Group* group
    cdef Py_ssize_t g, q
    cdef int64_t widest = 0, bad = -1
    for g in range(geometry.shape[0]):
        widest = max(widest, geometry[g, 1])
    cdef uint64_t* hits = <uint64_t*>malloc((widest + 64) // 64 * sizeof(uint64_t))
    if hits == NULL:
        raise MemoryError
    with nogil:
        for g in range(geometry.shape[0]):
            group = <const Group*>&geometry[g, 0]
            for q in range(hashes.shape[0]):
                bad = and_rows(&source, group, seen, hashes[q], hash_count, hits)
                if bad >= 0:
                    break
                mark(hits, group, &members[group.first_member], &out[0])
            if bad >= 0:
                break
    free(hits)
    return bad


cdef int64_t and_rows(const Source* source, const Group* group, uint8_t* checked, uint64_t hash_, int hash_count,
                      uint64_t* hits) noexcept nogil:
    """Write to `hits` the files of the group whose filters have all bits of the hash. Returns -1, or the offset of a
    page that is damaged or not in the source."""
    cdef int64_t row, page, start, size, bit, word, words = group.files >> 6
    cdef uint64_t filter_bits_of_word
    cdef const uint8_t* data
    cdef const uint8_t* aligned
    cdef int i, last_files = group.files & 63  # the files of the last word
    for i in range(hash_count):
        row = position(hash_, i, group.filter_bits)
        page = row >> group.page_shift
        start, size = group.offset + page * (group.page + SUM), page_bytes(group, page)
        data = at_offset(source, start, size + SUM)
        if data == NULL:
            return start
        if checked == NULL or not checked[group.first_page + page]:
            if not is_sound(data, size, start):
                return start
            if checked != NULL:
                checked[group.first_page + page] = 1
        bit = (row - (page << group.page_shift)) * group.stride
        if i == 0:
            memset(hits, 0xFF, (words + 1) * sizeof(uint64_t))
        if bit & 7 == 0:
            aligned = data + (bit >> 3)
            for word in range(words):
                memcpy(&filter_bits_of_word, aligned + 8 * word, 8)
                hits[word] &= filter_bits_of_word
        else:
            for word in range(words):
                hits[word] &= full_word(data, bit + 64 * word)
        hits[words] &= some_bits(data, bit + 64 * words, last_files, size)
    return -1


cdef inline void mark(const uint64_t* hits, const Group* group, const int32_t* members, uint8_t* out) noexcept nogil:
    """Set out[members[i]] to 1 for each set bit i of `hits`."""
    cdef int64_t word
    cdef uint64_t left
    for word in range((group.files >> 6) + 1):
        left = hits[word]
        while left:
            out[members[word * 64 + seamark_lowest(left)]] = 1
            left &= left - 1
