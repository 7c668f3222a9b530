"""Packs one column at a time: an array of values, or spans of a heap, becomes codes in a growing buffer (`packing.py`).

An absent number is the least long, an absent double is NaN, and an absent span has the length -1. Each function records
in `Packed` where it wrote the arrays, and returns 0, or FAILED when there is no memory. If all values are absent it
writes nothing.
"""

from libc.math cimport INFINITY, NAN, isnan
from libc.stdint cimport INT64_MAX, INT64_MIN, UINT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from seamark.formats.iceberg.manifests._memory cimport retake

cdef extern from *:
    """
    #include <stdint.h>
    #define SEAMARK_MISSING INT64_MIN

    static inline uint64_t seamark_big_endian(uint64_t word) {
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        return word;
    #else
        return __builtin_bswap64(word);
    #endif
    }
    """
    int64_t MISSING "SEAMARK_MISSING"
    uint64_t seamark_big_endian(uint64_t word) nogil

cdef enum:
    NONE = -1
    FAILED = -2  # no memory

cdef enum:
    FORM_INTEGERS, FORM_FLOATS, FORM_STRINGS  # `packing.Form`

ctypedef struct Packed:
    bint there
    int form
    int width
    int lengths_width
    int64_t codes
    int64_t presence
    int64_t low  # the bits of a double, or the first 8 bytes of a string
    int64_t high
    int64_t base
    int64_t common_at
    int64_t common_size
    int64_t lengths
    int64_t ends
    int64_t tails
    int64_t start  # where the column's first array begins; `end` is where its last array ends
    int64_t end

ctypedef struct Output:
    uint8_t* data
    int64_t used
    int64_t room

ctypedef fused code_t:
    uint8_t
    uint16_t
    uint32_t
    uint64_t


cdef inline int64_t reserve(Output* out, int64_t size) noexcept nogil:
    """Reserve `size` bytes, and fill them with zeros up to a multiple of 8. Returns their offset, or FAILED when there
    is no memory."""
    cdef int64_t at = out.used, room
    cdef int64_t whole = (size + 7) & ~<int64_t>7
    cdef void* moved
    if at + whole > out.room:
        room = 2 * (at + whole)
        moved = retake(out.data, at, out.room, room)
        if moved == NULL:
            return FAILED
        out.data = <uint8_t*>moved
        out.room = room
    if whole > size:
        memset(out.data + at + whole - 8, 0, 8)
    out.used = at + whole
    return at


cdef inline int64_t reserve_presence(Output* out, int64_t rows) noexcept nogil:
    """Reserve a bit for each row, all zero. Returns as `reserve` does."""
    cdef int64_t at = reserve(out, (rows + 7) >> 3)
    if at >= 0:
        memset(out.data + at, 0, (rows + 7) >> 3)
    return at


cdef inline void write_codes(code_t* codes, const int64_t* values, int64_t n, uint64_t base) noexcept nogil:
    """Write the differences between the values and the base."""
    cdef int64_t i
    for i in range(n):
        codes[i] = <code_t>(<uint64_t>values[i] - base)


cdef inline void write_some_codes(
    code_t* codes, uint8_t* bits, const int64_t* values, const uint8_t* present, int64_t n, uint64_t base, code_t absent
) noexcept nogil:
    """Write the codes as `write_codes` does, and `absent` for absent values. The bits of the values that are not absent
    are set."""
    cdef int64_t i
    cdef bint is_present
    for i in range(n):
        is_present = present[i] != 0 if present != NULL else values[i] != MISSING
        codes[i] = <code_t>(<uint64_t>values[i] - base) if is_present else absent
        bits[i >> 3] |= <uint8_t>(is_present << (i & 7))


cdef inline int pack_longs(
    Output* out, const int64_t* values, const uint8_t* present, int64_t n, bint absent_low, Packed* packed
) noexcept nogil:
    """Pack integers as codes over a base. If all are absent, the column is not written. Returns 0 or FAILED."""
    cdef int64_t i, there = 0, low = INT64_MAX, high = INT64_MIN, value
    cdef uint64_t least = UINT64_MAX, code, span, absent, base
    cdef bint full
    if present == NULL:
        for i in range(n):
            value = values[i]
            there += value != MISSING
            code = <uint64_t>value - <uint64_t>(MISSING + 1)  # in the order of the values, with the absent value last
            least = code if code < least else least
            high = value if value > high else high
        low = <int64_t>(least + <uint64_t>(MISSING + 1))
    else:
        for i in range(n):
            if present[i]:
                there += 1
                low = values[i] if values[i] < low else low
                high = values[i] if values[i] > high else high
    if there == 0:
        return 0
    full = there == n
    packed.there = True
    packed.form = FORM_INTEGERS
    if full and low == high:
        packed.low = packed.high = packed.base = low
        return 0
    # One code is reserved for absent values. If the range leaves no code free, absent values share one with a value.
    # A test then keeps more rows than it must, but never loses one.
    packed.base = low - 1 if not full and absent_low and low > INT64_MIN else low
    base = <uint64_t>packed.base
    span = <uint64_t>high - base
    if not full and not absent_low and span < UINT64_MAX:
        span += 1
    packed.width = 1 if span < 0x100 else 2 if span < 0x10000 else 4 if span < 1ULL << 32 else 8
    packed.low = low if full or not absent_low else MISSING
    packed.high = high if full or absent_low else INT64_MAX
    packed.codes = reserve(out, n * packed.width)
    if packed.codes < 0:
        return FAILED
    if not full:
        packed.presence = reserve_presence(out, n)
        if packed.presence < 0:
            return FAILED
    cdef void* codes = out.data + packed.codes
    cdef uint8_t* bits = out.data + packed.presence
    absent = 0 if absent_low else UINT64_MAX
    if full:
        if packed.width == 1:
            write_codes(<uint8_t*>codes, values, n, base)
        elif packed.width == 2:
            write_codes(<uint16_t*>codes, values, n, base)
        elif packed.width == 4:
            write_codes(<uint32_t*>codes, values, n, base)
        else:
            write_codes(<uint64_t*>codes, values, n, base)
    elif packed.width == 1:
        write_some_codes(<uint8_t*>codes, bits, values, present, n, base, <uint8_t>absent)
    elif packed.width == 2:
        write_some_codes(<uint16_t*>codes, bits, values, present, n, base, <uint16_t>absent)
    elif packed.width == 4:
        write_some_codes(<uint32_t*>codes, bits, values, present, n, base, <uint32_t>absent)
    else:
        write_some_codes(<uint64_t*>codes, bits, values, present, n, base, absent)
    return 0


cdef inline int pack_doubles(
    Output* out, const double* values, const uint8_t* present, int64_t n, bint absent_low, Packed* packed
) noexcept nogil:
    """Pack floats without a change. With `present`, NaN is a value like any other, but does not count for the
    bounds."""
    cdef int64_t i, there = 0
    cdef double low = INFINITY, high = -INFINITY, value, nothing = NAN
    cdef bint exact = True, full
    cdef float narrow
    for i in range(n):
        value = values[i]
        if (not present[i]) if present != NULL else isnan(value):
            continue
        there += 1
        if isnan(value):
            continue
        exact = exact and <double><float>value == value
        low = value if value < low else low
        high = value if value > high else high
    if there == 0:
        return 0
    full = there == n
    packed.there = True
    packed.form = FORM_FLOATS
    packed.width = 4 if exact else 8
    packed.codes = reserve(out, n * packed.width)
    if packed.codes < 0:
        return FAILED
    if not full:
        packed.presence = reserve_presence(out, n)
        if packed.presence < 0:
            return FAILED
        if absent_low:
            low = -INFINITY
        else:
            high = INFINITY
    memcpy(&packed.low, &low, 8)
    memcpy(&packed.high, &high, 8)
    cdef uint8_t* codes = out.data + packed.codes
    cdef uint8_t* bits = out.data + packed.presence
    for i in range(n):
        value = values[i]
        if (not present[i]) if present != NULL else isnan(value):
            value = nothing
        elif not full:
            bits[i >> 3] |= <uint8_t>(1 << (i & 7))
        if exact:
            narrow = <float>value
            memcpy(codes + i * 4, &narrow, 4)
        else:
            memcpy(codes + i * 8, &value, 8)
    return 0


cdef inline uint64_t prefix(const uint8_t* common, int64_t size, uint64_t code, int width) noexcept nogil:
    """Return the first 8 bytes of a value, big-endian: the common prefix, then the code, then zeros."""
    cdef uint64_t word = 0
    cdef int i
    for i in range(8):
        word <<= 8
        if i < size:
            word |= common[i]
        elif i - size < width:
            word |= (code >> (8 * (width - 1 - (i - size)))) & 0xFF
    return word


cdef inline void write_spans(
    code_t* codes, uint8_t* sizes, int sizes_width, uint8_t* bits, uint32_t* ends, uint8_t* tails,
    const uint8_t* heap, const int64_t* starts, const int32_t* lengths, int64_t n, int64_t shared, uint64_t absent,
    uint64_t* least, uint64_t* most,
) noexcept nogil:
    """Write the codes, lengths and tails of all spans. `bits` is NULL when no span is absent. `ends` is NULL when no
    value is longer than its code."""
    cdef int64_t i, k, rest, at = 0, tail
    cdef uint64_t code
    cdef int width = sizeof(code_t)
    cdef const uint8_t* start
    for i in range(n):
        rest = 0
        code = absent
        if lengths[i] >= 0:
            rest = lengths[i] - shared
            start = heap + starts[i] + shared
            if code_t is uint64_t and rest >= 8:
                memcpy(&code, start, 8)
                code = seamark_big_endian(code)
            else:
                code = 0
                for k in range(width):
                    code = (code << 8) | (start[k] if k < rest else 0)
            least[0] = code if code < least[0] else least[0]
            most[0] = code if code > most[0] else most[0]
            if bits != NULL:
                bits[i >> 3] |= <uint8_t>(1 << (i & 7))
            tail = rest - width
            if tail > 0:
                memcpy(tails + at, start + width, tail)
                at += tail
        codes[i] = <code_t>code
        if sizes_width == 1:
            sizes[i] = <uint8_t>rest
        else:
            memcpy(sizes + i * sizes_width, &rest, sizes_width)
        if ends != NULL:
            ends[i] = <uint32_t>at


cdef inline int pack_spans(
    Output* out, const uint8_t* heap, const int64_t* starts, const int32_t* lengths, int64_t n, bint absent_low,
    Packed* packed
) noexcept nogil:
    """Pack the bytes of each span that follow the prefix common to all: a code, a length and a tail. The column is not
    written if all spans are absent, or if the tails take 4 GiB or more."""
    cdef int64_t i, k, first = -1, there = 0, shared = 0, rest, longest = 0, total = 0
    cdef uint64_t least = UINT64_MAX, most = 0, absent = 0 if absent_low else UINT64_MAX
    cdef const uint8_t* one = heap
    cdef const uint8_t* other
    cdef bint full
    for i in range(n):
        if lengths[i] < 0:
            continue
        there += 1
        if lengths[i] > longest:
            longest = lengths[i]
        if first < 0:
            first = i
            shared = lengths[i]
            one = heap + starts[i]
            continue
        if lengths[i] < shared:
            shared = lengths[i]
        other = heap + starts[i]
        if shared == 0 or memcmp(other, one, shared) == 0:
            continue
        k = 0
        while other[k] == one[k]:
            k += 1
        shared = k
    if there == 0:
        return 0
    longest -= shared
    full = there == n
    cdef int width = 1 if longest <= 1 else 2 if longest == 2 else 4 if longest <= 4 else 8
    if longest == 0 and full:
        width = 0
    else:
        for i in range(n):
            rest = lengths[i] - shared - width
            total += rest if rest > 0 else 0
    if total >= 1ULL << 32:
        return 0
    packed.there = True
    packed.form = FORM_STRINGS
    packed.width = width
    packed.common_size = shared
    if width:
        packed.codes = reserve(out, n * width)
        if packed.codes < 0:
            return FAILED
        if not full:
            packed.presence = reserve_presence(out, n)
            if packed.presence < 0:
                return FAILED
    packed.common_at = reserve(out, shared)
    if packed.common_at < 0:
        return FAILED
    if shared:
        memcpy(out.data + packed.common_at, one, shared)
    if width == 0:
        packed.low = packed.high = <int64_t>prefix(one, shared, 0, 0)
        return 0
    packed.lengths_width = 1 if longest < 0x100 else 2 if longest < 0x10000 else 4
    packed.lengths = reserve(out, n * packed.lengths_width)
    if packed.lengths < 0:
        return FAILED
    if total:
        packed.ends = reserve(out, n * sizeof(uint32_t))
        packed.tails = reserve(out, total) if packed.ends >= 0 else FAILED
        if packed.tails < 0:
            return FAILED
    cdef void* codes = out.data + packed.codes
    cdef uint8_t* sizes = out.data + packed.lengths
    cdef uint8_t* bits = out.data + packed.presence if not full else NULL
    cdef uint32_t* ends = <uint32_t*>(out.data + packed.ends) if total else NULL
    cdef uint8_t* tails = out.data + packed.tails
    if width == 1:
        write_spans(
            <uint8_t*>codes, sizes, packed.lengths_width, bits, ends, tails, heap, starts, lengths, n, shared, absent,
            &least, &most,
        )
    elif width == 2:
        write_spans(
            <uint16_t*>codes, sizes, packed.lengths_width, bits, ends, tails, heap, starts, lengths, n, shared, absent,
            &least, &most,
        )
    elif width == 4:
        write_spans(
            <uint32_t*>codes, sizes, packed.lengths_width, bits, ends, tails, heap, starts, lengths, n, shared, absent,
            &least, &most,
        )
    else:
        write_spans(
            <uint64_t*>codes, sizes, packed.lengths_width, bits, ends, tails, heap, starts, lengths, n, shared, absent,
            &least, &most,
        )
    packed.low = <int64_t>prefix(one, shared, least, width) if full or not absent_low else 0
    packed.high = <int64_t>prefix(one, shared, most, width) if full or absent_low else -1
    return 0
