"""Kernels over the packed columns of many blocks. They run without the GIL.

A selection is a state for each block (0: no row, 1: every row, 2: the rows whose byte in `mask` is 1), and one mask
over all rows of the view. Each kernel narrows a selection by one test of the lower or the upper side of a column. A
block whose summary decides the test is not read. If a block does not have the column, or a row does not have a value,
the block or row is kept.

`layout` is int64[blocks, 15] with absolute addresses:
    form (-1: nothing known), width, codes, presence (0: no value is absent), rows, first row in the mask, base,
    common prefix, its length, lengths, ends (0: no tails), tails, bytes of a length, sketch (0: no sketch), shift

A sketch has one byte for each row. For an integer the byte is `code >> shift`. For a float it is the place between the
least and the greatest value. For a string it is how many of 127 sorted codes are less than or equal to the string's
code. The sketch decides most rows. Codes are read only for rows whose byte equals the byte of the literal.

Blocks do not depend on each other. So several comparisons are done block by block (`narrow_all`, `collect_all`), with
one bit for each row. The rows of a block that remain after one comparison are still in the processor's cache for the
next comparison. Rows that a sketch does not decide are compared by their codes last, when the sketches of all
comparisons have left few rows.
"""

from cpython.bytes cimport PyBytes_AS_STRING
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

import numpy as np

cdef extern from *:
    """
    #include <math.h>
    #include <stdint.h>
    #include <string.h>
    #if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
    #define SEAMARK_CLONES __attribute__((target_clones("avx2", "default")))
    #else
    #define SEAMARK_CLONES
    #endif

    /* The loops that touch every row of a block, in the shape that compilers turn into vectors: 64 rows at a time, whose
       bytes of 0 and 1 are then added up as eight words. */
    #define SEAMARK_ROWS 64
    #define SEAMARK_AHEAD 1024
    static inline int64_t seamark_ones(const uint8_t *bytes) {
        uint64_t words[SEAMARK_ROWS / 8], sum = 0;
        memcpy(words, bytes, SEAMARK_ROWS);
        for (int i = 0; i < SEAMARK_ROWS / 8; i++) sum += words[i];
        return (int64_t)((sum * 0x0101010101010101ULL) >> 56);
    }
    /* 64 bytes of 0 and 1 as bits: bit i is byte i. */
    #ifdef __SSE2__
    #include <emmintrin.h>
    static inline uint64_t seamark_bits(const uint8_t *bytes) {
        uint64_t bits = 0;
        for (int i = 0; i < SEAMARK_ROWS; i += 16) {
            __m128i some = _mm_slli_epi16(_mm_loadu_si128((const __m128i *)(bytes + i)), 7);
            bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(some) << i;
        }
        return bits;
    }
    /* Of 64 bytes, those up to (`below`) or from `t` as bits, and those that equal it. */
    static inline uint64_t seamark_word(const uint8_t *bytes, uint8_t t, int below, uint64_t *ties) {
        __m128i all = _mm_set1_epi8((char)t);
        uint64_t bits = 0, equal = 0;
        for (int i = 0; i < SEAMARK_ROWS; i += 16) {
            __m128i some = _mm_loadu_si128((const __m128i *)(bytes + i));
            __m128i kept = _mm_cmpeq_epi8(below ? _mm_min_epu8(some, all) : _mm_max_epu8(some, all), some);
            bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(kept) << i;
            equal |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(some, all)) << i;
        }
        *ties = equal;
        return bits;
    }
    #else
    static inline uint64_t seamark_bits(const uint8_t *bytes) {
        uint64_t word, bits = 0;
        for (int i = 0; i < SEAMARK_ROWS; i += 8) {
            word = 0;
            for (int k = 0; k < 8; k++) word |= (uint64_t)bytes[i + k] << 8 * k;
            bits |= ((word * 0x0102040810204080ULL) >> 56) << i;
        }
        return bits;
    }
    static inline uint64_t seamark_word(const uint8_t *bytes, uint8_t t, int below, uint64_t *ties) {
        uint8_t kept[SEAMARK_ROWS], equal[SEAMARK_ROWS];
        for (int i = 0; i < SEAMARK_ROWS; i++) kept[i] = below ? bytes[i] <= t : bytes[i] >= t;
        for (int i = 0; i < SEAMARK_ROWS; i++) equal[i] = bytes[i] == t;
        *ties = seamark_bits(equal);
        return seamark_bits(kept);
    }
    #endif
    /* Sets the bits of all `n` rows, and clears the others of the last word. */
    static void seamark_set(uint64_t *bits, int64_t n) {
        for (; n >= SEAMARK_ROWS; n -= SEAMARK_ROWS) *bits++ = ~0ULL;
        if (n > 0) *bits = (1ULL << n) - 1;
    }
    /* The bits of a mask. */
    static void seamark_load(const uint8_t *mask, int64_t n, uint64_t *bits) {
        uint8_t rest[SEAMARK_ROWS] = {0};
        for (; n >= SEAMARK_ROWS; n -= SEAMARK_ROWS, mask += SEAMARK_ROWS) *bits++ = seamark_bits(mask);
        if (n > 0) *bits = seamark_bits(memcpy(rest, mask, n));
    }
    /* The mask of bits. */
    static void seamark_store(const uint64_t *bits, int64_t n, uint8_t *mask) {
        for (; n > 0; n -= SEAMARK_ROWS, bits++) {
            uint8_t bytes[SEAMARK_ROWS], *to = n < SEAMARK_ROWS ? bytes : mask;
            for (int i = 0; i < SEAMARK_ROWS; i += 8) {
                /* Each of eight bytes has its bit alone, and 0x80 or more after the sum if it was set. */
                uint64_t word = (*bits >> i & 0xFF) * 0x0101010101010101ULL & 0x8040201008040201ULL;
                word = (word + 0x7F7F7F7F7F7F7F7FULL) >> 7 & 0x0101010101010101ULL;
                memcpy(to + i, &word, 8);
            }
            if (n < SEAMARK_ROWS) memcpy(mask, bytes, n);
            mask += SEAMARK_ROWS;
        }
    }
    static int64_t seamark_count(const uint64_t *bits, int64_t words) {
        int64_t total = 0;
        for (int64_t w = 0; w < words; w++) total += __builtin_popcountll(bits[w]);
        return total;
    }
    /* Clears the bits of the rows whose byte is 0. Returns whether any is left. */
    static int seamark_and(const uint8_t *mask, int64_t n, uint64_t *bits) {
        uint64_t all = 0;
        uint8_t rest[SEAMARK_ROWS] = {0};
        for (; n >= SEAMARK_ROWS; n -= SEAMARK_ROWS, mask += SEAMARK_ROWS) all |= *bits++ &= seamark_bits(mask);
        if (n > 0) all |= *bits &= seamark_bits(memcpy(rest, mask, n));
        return all != 0;
    }
    /* Clears the bits of the rows whose byte is greater than `t` (`below`) or less. `ties`: the rows whose byte equals
       it, of those that are left. */
    static inline int seamark_narrow(const uint8_t *sketch, int64_t n, uint8_t t, int below, uint64_t *bits, uint64_t *ties) {
        uint64_t all = 0, equal;
        uint8_t rest[SEAMARK_ROWS] = {0};
        for (; n > 0; n -= SEAMARK_ROWS, sketch += SEAMARK_ROWS) {
            /* The processor itself fetches ahead only within a page. */
            if (n > SEAMARK_AHEAD) __builtin_prefetch(sketch + SEAMARK_AHEAD);
            *bits &= seamark_word(n < SEAMARK_ROWS ? memcpy(rest, sketch, n) : sketch, t, below, &equal);
            *ties++ = equal & *bits;
            all |= *bits++;
        }
        return all != 0;
    }
    static int seamark_narrow_to(const uint8_t *sketch, int64_t n, uint8_t t, int below, uint64_t *bits, uint64_t *ties) {
        return below ? seamark_narrow(sketch, n, t, 1, bits, ties) : seamark_narrow(sketch, n, t, 0, bits, ties);
    }
    static inline int64_t *seamark_list(uint64_t bits, int64_t name, int64_t *out) {
        for (; bits; bits &= bits - 1) *out++ = name + __builtin_ctzll(bits);
        return out;
    }
    /* Names of the rows whose bit is set into `out`; how many. */
    static int64_t seamark_names(const uint64_t *bits, int64_t words, int64_t name, int64_t *out) {
        int64_t *at = out;
        for (int64_t w = 0; w < words; w++) at = seamark_list(bits[w], name + SEAMARK_ROWS * w, at);
        return at - out;
    }
    #define SEAMARK_LOOP(NAME, T, V, KEEP)                                                                      \\
        SEAMARK_CLONES static int64_t NAME(const T *codes, uint8_t *mask, int64_t n, V v, int fresh) {          \\
            int64_t kept = 0;                                                                                   \\
            uint8_t keep[SEAMARK_ROWS];                                                                         \\
            for (; n >= SEAMARK_ROWS; n -= SEAMARK_ROWS, codes += SEAMARK_ROWS, mask += SEAMARK_ROWS) {         \\
                for (int i = 0; i < SEAMARK_ROWS; i++) keep[i] = (uint8_t)(KEEP);                               \\
                if (!fresh) for (int i = 0; i < SEAMARK_ROWS; i++) keep[i] &= mask[i];                          \\
                memcpy(mask, keep, SEAMARK_ROWS);                                                               \\
                kept += seamark_ones(keep);                                                                     \\
            }                                                                                                   \\
            for (int64_t i = 0; i < n; i++) {                                                                   \\
                mask[i] = (uint8_t)(KEEP) & (fresh ? 1 : mask[i]);                                              \\
                kept += mask[i];                                                                                \\
            }                                                                                                   \\
            return kept;                                                                                        \\
        }
    #define SEAMARK_OPS(SUFFIX, T)                                 \\
        SEAMARK_LOOP(seamark_le_##SUFFIX, T, T, codes[i] <= v)     \\
        SEAMARK_LOOP(seamark_lt_##SUFFIX, T, T, codes[i] < v)      \\
        SEAMARK_LOOP(seamark_ge_##SUFFIX, T, T, codes[i] >= v)     \\
        SEAMARK_LOOP(seamark_gt_##SUFFIX, T, T, codes[i] > v)
    SEAMARK_OPS(u8, uint8_t)
    SEAMARK_OPS(u16, uint16_t)
    SEAMARK_OPS(u32, uint32_t)
    SEAMARK_OPS(u64, uint64_t)
    /* NaN represents an absent value and is kept, so comparisons are negated. */
    #define SEAMARK_FLOAT_OPS(SUFFIX, T)                                       \\
        SEAMARK_LOOP(seamark_le_##SUFFIX, T, double, !((double)codes[i] > v))  \\
        SEAMARK_LOOP(seamark_lt_##SUFFIX, T, double, !((double)codes[i] >= v)) \\
        SEAMARK_LOOP(seamark_ge_##SUFFIX, T, double, !((double)codes[i] < v))  \\
        SEAMARK_LOOP(seamark_gt_##SUFFIX, T, double, !((double)codes[i] <= v))
    SEAMARK_FLOAT_OPS(f32, float)
    SEAMARK_FLOAT_OPS(f64, double)

    #define SEAMARK_CASE(SUFFIX, T, V)                                                     \\
        switch (op) {                                                                      \\
        case 0: return seamark_le_##SUFFIX((const T *)codes, mask, n, (V)v, fresh);        \\
        case 1: return seamark_lt_##SUFFIX((const T *)codes, mask, n, (V)v, fresh);        \\
        case 2: return seamark_ge_##SUFFIX((const T *)codes, mask, n, (V)v, fresh);        \\
        default: return seamark_gt_##SUFFIX((const T *)codes, mask, n, (V)v, fresh);       \\
        }
    static int64_t seamark_codes(int width, int op, const void *codes, uint8_t *mask, int64_t n, uint64_t v, int fresh) {
        if (width == 1) { SEAMARK_CASE(u8, uint8_t, uint8_t) }
        if (width == 2) { SEAMARK_CASE(u16, uint16_t, uint16_t) }
        if (width == 4) { SEAMARK_CASE(u32, uint32_t, uint32_t) }
        SEAMARK_CASE(u64, uint64_t, uint64_t)
    }
    static int64_t seamark_floats(int width, int op, const void *codes, uint8_t *mask, int64_t n, double v, int fresh) {
        if (width == 4) { SEAMARK_CASE(f32, float, double) }
        SEAMARK_CASE(f64, double, double)
    }
    static inline uint64_t seamark_code(int width, const void *codes, int64_t i) {
        return width == 4 ? ((const uint32_t *)codes)[i] : ((const uint64_t *)codes)[i];
    }
    #define SEAMARK_CLEAR(PASSES)                                                                           \\
        for (int k = 0; k < found; k++)                                                                     \\
            if (!(PASSES)) bits[rows[k] / SEAMARK_ROWS] &= ~(1ULL << rows[k] % SEAMARK_ROWS)
    /* The next rows of `ties` whose bits are set. Their codes are fetched together: each is elsewhere in memory. */
    static int seamark_next(const uint64_t *bits, const uint64_t *ties, int64_t words, const void *codes, int width,
                            int64_t *word, int64_t *rows) {
        int found = 0;
        for (; *word < words && found <= SEAMARK_ROWS; ++*word) {
            for (uint64_t left = bits[*word] & ties[*word]; left; left &= left - 1) {
                rows[found] = SEAMARK_ROWS * *word + __builtin_ctzll(left);
                __builtin_prefetch((const char *)codes + width * rows[found++]);
            }
        }
        return found;
    }
    /* Clears the bits of the rows of `ties` whose codes are greater than `v` (`below`) or less. */
    static void seamark_check_codes(int width, int below, const void *codes, uint64_t v, const uint64_t *ties,
                                    uint64_t *bits, int64_t words) {
        int64_t rows[2 * SEAMARK_ROWS], word = 0;
        int found;
        while ((found = seamark_next(bits, ties, words, codes, width, &word, rows)) != 0) {
            if (below) { SEAMARK_CLEAR(seamark_code(width, codes, rows[k]) <= v); }
            else { SEAMARK_CLEAR(seamark_code(width, codes, rows[k]) >= v); }
        }
    }
    /* The byte of a float in a sketch: it grows with the float, because a rounded difference and a rounded product do. */
    static inline uint8_t seamark_byte(double value, double low, double scale) {
        double at = (value - low) * scale;
        return at >= 255 ? 255 : at > 0 ? (uint8_t)at : 0;
    }
    static inline double seamark_float(int width, const void *codes, int64_t i) {
        return width == 4 ? (double)((const float *)codes)[i] : ((const double *)codes)[i];
    }
    /* The byte of a literal, in a sketch that follows the two doubles that its bytes were made with. */
    static uint8_t seamark_literal(const uint8_t *sketch, double v) {
        return seamark_byte(v, ((const double *)sketch)[-2], ((const double *)sketch)[-1]);
    }
    /* Clears the bits of the rows of `ties` that do not pass. None of them is NaN. */
    static void seamark_check_floats(int width, int op, const void *codes, double v, const uint64_t *ties, uint64_t *bits,
                                     int64_t words) {
        int64_t rows[2 * SEAMARK_ROWS], word = 0;
        int found;
        while ((found = seamark_next(bits, ties, words, codes, width, &word, rows)) != 0) {
            if (op == 0) { SEAMARK_CLEAR(seamark_float(width, codes, rows[k]) <= v); }
            else if (op == 1) { SEAMARK_CLEAR(seamark_float(width, codes, rows[k]) < v); }
            else if (op == 2) { SEAMARK_CLEAR(seamark_float(width, codes, rows[k]) >= v); }
            else { SEAMARK_CLEAR(seamark_float(width, codes, rows[k]) > v); }
        }
    }
    /* Returns 0 if there can be no sketch: a value is not finite, or all are equal. */
    static int seamark_make_float_sketch(int width, const void *codes, int64_t n, uint8_t *sketch) {
        double low = INFINITY, high = -INFINITY, scale;
        for (int64_t i = 0; i < n; i++) {
            double value = seamark_float(width, codes, i);
            if (!isfinite(value)) return 0;
            if (value < low) low = value;
            if (value > high) high = value;
        }
        scale = 256 / (high - low);
        if (n == 0 || !(high > low) || !isfinite(high - low) || !isfinite(scale)) return 0;
        ((double *)sketch)[-2] = low;
        ((double *)sketch)[-1] = scale;
        for (int64_t i = 0; i < n; i++) sketch[i] = seamark_byte(seamark_float(width, codes, i), low, scale);
        return 1;
    }
    /* How many of the codes that precede a sketch of strings are less than a code or equal. */
    #define SEAMARK_BOUNDS 127
    static inline int seamark_next_bucket(const uint64_t *bounds, uint64_t code, int at, int step) {
        return at + (step & -(int)(bounds[at + step - 1] <= code));
    }
    static uint8_t seamark_code_literal(const uint8_t *sketch, uint64_t code) {
        const uint64_t *bounds = (const uint64_t *)sketch - SEAMARK_BOUNDS;
        int at = 0;
        for (int step = (SEAMARK_BOUNDS + 1) / 2; step; step >>= 1) at = seamark_next_bucket(bounds, code, at, step);
        return (uint8_t)at;
    }
    /* 64 codes at a time, because each step of a search waits for the previous step. */
    static void seamark_make_string_sketch(int width, const void *codes, int64_t n, uint8_t *sketch) {
        const uint64_t *bounds = (const uint64_t *)sketch - SEAMARK_BOUNDS;
        for (int64_t first = 0; first < n; first += SEAMARK_ROWS) {
            int rows = n - first < SEAMARK_ROWS ? (int)(n - first) : SEAMARK_ROWS, at[SEAMARK_ROWS] = {0};
            uint64_t some[SEAMARK_ROWS];
            for (int i = 0; i < rows; i++) some[i] = seamark_code(width, codes, first + i);
            for (int step = (SEAMARK_BOUNDS + 1) / 2; step; step >>= 1)
                for (int i = 0; i < rows; i++) at[i] = seamark_next_bucket(bounds, some[i], at[i], step);
            for (int i = 0; i < rows; i++) sketch[first + i] = (uint8_t)at[i];
        }
    }
    #define SEAMARK_MAKE_SKETCH(NAME, T)                                                                 \\
        SEAMARK_CLONES static int NAME(const T *codes, int64_t n, uint8_t *sketch) {                     \\
            T all = 0;                                                                                   \\
            int shift = 0;                                                                               \\
            for (int64_t i = 0; i < n; i++) all |= codes[i];                                             \\
            while (all >> shift > 0xFF) shift++;                                                         \\
            for (int64_t i = 0; i < n; i++) sketch[i] = (uint8_t)(codes[i] >> shift);                    \\
            return shift;                                                                                \\
        }
    SEAMARK_MAKE_SKETCH(seamark_make_sketch_u32, uint32_t)
    SEAMARK_MAKE_SKETCH(seamark_make_sketch_u64, uint64_t)
    SEAMARK_CLONES static int64_t seamark_sum(const uint8_t *mask, int64_t n) {
        int64_t total = 0;
        for (; n >= SEAMARK_ROWS; n -= SEAMARK_ROWS, mask += SEAMARK_ROWS) total += seamark_ones(mask);
        for (int64_t i = 0; i < n; i++) total += mask[i];
        return total;
    }
    /* Names of the rows whose byte is 1 into `out`; how many. Bits that are set are looked up: a branch for each row
       would be guessed wrong as often as not. */
    static int64_t seamark_collect(const uint8_t *mask, int64_t n, int64_t name, int64_t *out) {
        int64_t *at = out;
        for (; n >= SEAMARK_ROWS; n -= SEAMARK_ROWS, mask += SEAMARK_ROWS, name += SEAMARK_ROWS)
            at = seamark_list(seamark_bits(mask), name, at);
        for (int64_t i = 0; i < n; i++) if (mask[i]) *at++ = name + i;
        return at - out;
    }
    #define SEAMARK_TIES(NAME, T)                                                     \\
        SEAMARK_CLONES static int NAME(const T *codes, int64_t n, T v) {              \\
            uint32_t found = 0;                                                       \\
            for (int64_t i = 0; i < n; i++) found |= codes[i] == v;                   \\
            return found != 0;                                                        \\
        }
    SEAMARK_TIES(seamark_ties_u8, uint8_t)
    SEAMARK_TIES(seamark_ties_u16, uint16_t)
    SEAMARK_TIES(seamark_ties_u32, uint32_t)
    SEAMARK_TIES(seamark_ties_u64, uint64_t)
    static int seamark_ties(int width, const void *codes, int64_t n, uint64_t v) {
        if (width == 1) return seamark_ties_u8((const uint8_t *)codes, n, (uint8_t)v);
        if (width == 2) return seamark_ties_u16((const uint16_t *)codes, n, (uint16_t)v);
        if (width == 4) return seamark_ties_u32((const uint32_t *)codes, n, (uint32_t)v);
        return seamark_ties_u64((const uint64_t *)codes, n, v);
    }
    """
    int64_t seamark_codes(int width, int op, const void *codes, uint8_t *mask, int64_t n, uint64_t v, int fresh) nogil
    int64_t seamark_floats(int width, int op, const void *codes, uint8_t *mask, int64_t n, double v, int fresh) nogil
    void seamark_set(uint64_t *bits, int64_t n) nogil
    void seamark_load(const uint8_t *mask, int64_t n, uint64_t *bits) nogil
    void seamark_store(const uint64_t *bits, int64_t n, uint8_t *mask) nogil
    int64_t seamark_count(const uint64_t *bits, int64_t words) nogil
    int seamark_and(const uint8_t *mask, int64_t n, uint64_t *bits) nogil
    int seamark_narrow_to(const uint8_t *sketch, int64_t n, uint8_t t, int below, uint64_t *bits, uint64_t *ties) nogil
    int64_t seamark_names(const uint64_t *bits, int64_t words, int64_t name, int64_t *out) nogil
    void seamark_check_codes(int width, int below, const void *codes, uint64_t v, const uint64_t *ties, uint64_t *bits,
                             int64_t words) nogil
    void seamark_check_floats(int width, int op, const void *codes, double v, const uint64_t *ties, uint64_t *bits,
                              int64_t words) nogil
    int seamark_next(const uint64_t *bits, const uint64_t *ties, int64_t words, const void *codes, int width, int64_t *word,
                     int64_t *rows) nogil
    uint8_t seamark_literal(const uint8_t *sketch, double v) nogil
    uint8_t seamark_code_literal(const uint8_t *sketch, uint64_t code) nogil
    void seamark_make_string_sketch(int width, const void *codes, int64_t n, uint8_t *sketch) nogil
    int seamark_make_sketch_u32(const uint32_t *codes, int64_t n, uint8_t *sketch) nogil
    int seamark_make_sketch_u64(const uint64_t *codes, int64_t n, uint8_t *sketch) nogil
    int seamark_make_float_sketch(int width, const void *codes, int64_t n, uint8_t *sketch) nogil
    int seamark_ties(int width, const void *codes, int64_t n, uint64_t v) nogil
    int64_t seamark_sum(const uint8_t *mask, int64_t n) nogil
    int64_t seamark_collect(const uint8_t *mask, int64_t n, int64_t name, int64_t *out) nogil

cdef enum:
    LE = 0
    LT = 1
    GE = 2
    GT = 3

cdef enum:
    LAYOUT = 15  # the fields of a block in `layout`

cdef enum:  # the places of the fields
    FORM = 0
    WIDTH = 1
    CODES = 2
    PRESENCE = 3
    ROWS = 4
    FIRST = 5
    BASE = 6
    COMMON = 7
    COMMON_SIZE = 8
    LENGTHS = 9
    ENDS = 10
    TAILS = 11
    LENGTHS_WIDTH = 12
    SKETCH = 13
    SHIFT = 14


cdef inline void settle(uint8_t *state, int64_t kept, int64_t rows) noexcept nogil:
    """Set the state of a block, of whose rows `kept` remain."""
    state[0] = 0 if kept == 0 else 1 if kept == rows else 2


cdef inline bint has_value(int64_t presence, int64_t row) noexcept nogil:
    """Return whether a row has a value. `presence` is the address of the bits, or 0 if no value is absent."""
    return presence == 0 or (<const uint8_t *>presence)[row >> 3] >> (row & 7) & 1


cdef inline int decide(int op, bint low_above, bint high_below, bint low_equal, bint high_equal) noexcept nogil:
    """Compare the summary [low, high] of a block with the literal. Returns 0 if no row passes, 1 if all rows pass, and
    2 if the rows must be read."""
    if op == LE:
        return 0 if low_above else 1 if (high_below or high_equal) else 2
    if op == LT:
        return 0 if (low_above or low_equal) else 1 if high_below else 2
    if op == GE:
        return 0 if high_below else 1 if (low_above or low_equal) else 2
    return 0 if (high_below or high_equal) else 1 if low_above else 2


def sketch(int64_t codes, int width, int64_t rows):
    """Make a sketch of `rows` codes of 4 or 8 bytes, which begin at the address `codes`. Returns (bytes[rows], shift).
    Returns None if more than a 64th of the rows have the same byte, as when one code is much greater than all others.
    Reading the codes is then faster than reading the sketch."""
    made = np.empty(rows, dtype=np.uint8)
    cdef uint8_t[::1] out = made
    cdef int shift = 0
    cdef int64_t[256] times
    cdef int64_t i, most = 0
    with nogil:
        if rows:
            if width == 4:
                shift = seamark_make_sketch_u32(<const uint32_t *>codes, rows, &out[0])
            else:
                shift = seamark_make_sketch_u64(<const uint64_t *>codes, rows, &out[0])
        memset(times, 0, sizeof(times))
        for i in range(rows):
            times[out[i]] += 1
        for i in range(256):
            most = max(most, times[i])
    return None if 64 * most > rows else (made, shift)


def sketch_floats(int64_t codes, int width, int64_t rows):
    """Make a sketch of floats without NaN. Returns bytes[16 + rows], or None as `sketch` does. The first 16 bytes are
    two doubles: the least value and the scale."""
    made = np.empty(16 + rows, dtype=np.uint8)
    cdef uint8_t[::1] out = made
    cdef int64_t[256] times
    cdef int64_t i, most = 0
    cdef bint found
    with nogil:
        found = seamark_make_float_sketch(width, <const void *>codes, rows, &out[0] + 16)
        if found:
            memset(times, 0, sizeof(times))
            for i in range(rows):
                times[out[16 + i]] += 1
            for i in range(256):
                most = max(most, times[i])
    return made if found and 64 * most <= rows else None


def sketch_strings(int64_t codes, int width, int64_t rows, const uint64_t[::1] bounds):
    """Make a sketch of the codes of strings. Returns bytes[8 * 127 + rows], which begin with `bounds`, 127 codes in
    order. Returns None if more than a 32nd of the rows have the same byte, as when many strings are equal."""
    if bounds.shape[0] != BOUNDS:
        raise ValueError("a sketch of strings needs 127 bounds")
    made = np.empty(8 * BOUNDS + rows, dtype=np.uint8)
    cdef uint8_t[::1] out = made
    cdef uint8_t *sketch = &out[0] + 8 * BOUNDS
    cdef int64_t[256] times
    cdef int64_t i, most = 0
    with nogil:
        memcpy(&out[0], &bounds[0], 8 * BOUNDS)
        seamark_make_string_sketch(width, <const void *>codes, rows, sketch)
        memset(times, 0, sizeof(times))
        for i in range(rows):
            times[sketch[i]] += 1
        for i in range(256):
            most = max(most, times[i])
    return made if 32 * most <= rows else None


cdef struct Comparison:
    const int64_t *layout
    const int64_t *lows
    const int64_t *highs
    const double *low_reals
    const double *high_reals
    const uint64_t *low_heads
    const uint64_t *high_heads
    int op
    int form
    int64_t literal
    double real
    const uint8_t *text  # `size` bytes; `head` is the first eight of them
    int64_t size
    uint64_t head
    # These fields change with each block: whether the rows in `ties` must be compared by their codes, and with which
    # code.
    bint undecided
    uint64_t code
    uint64_t *ties


cdef enum:
    COMPARISONS = 16
    BOUNDS = 127

cdef enum:
    INTEGERS = 0
    FLOATS = 1
    STRINGS = 2


cdef int take(comparisons, Comparison *into, Py_ssize_t blocks) except -1:
    """Read comparisons, which are tuples (layout, low, high, op, literal) with an int, float or bytes as the literal.
    There can be at most 16. `into` is valid while the tuples are alive."""
    cdef const int64_t[:, ::1] layout
    cdef const int64_t[::1] longs
    cdef const double[::1] doubles
    cdef const uint64_t[::1] heads
    cdef int count = 0
    for sides, low, high, op, literal in comparisons:
        if count == COMPARISONS:
            raise ValueError("more than 16 comparisons at once")
        layout = sides
        if layout.shape[0] != blocks or len(low) != blocks or len(high) != blocks:
            raise ValueError("a comparison is of another view")
        into[count].layout = &layout[0, 0]
        into[count].op = op
        if isinstance(literal, bytes):
            into[count].form = STRINGS
            into[count].text = <const uint8_t *>PyBytes_AS_STRING(literal)
            into[count].size = len(literal)
            into[count].head = prefix_of(into[count].text, into[count].size, 8)
            heads = low
            into[count].low_heads = &heads[0]
            heads = high
            into[count].high_heads = &heads[0]
        elif isinstance(literal, float):
            into[count].form = FLOATS
            into[count].real = literal
            doubles = low
            into[count].low_reals = &doubles[0]
            doubles = high
            into[count].high_reals = &doubles[0]
        else:
            into[count].form = INTEGERS
            into[count].literal = literal
            longs = low
            into[count].lows = &longs[0]
            longs = high
            into[count].highs = &longs[0]
        count += 1
    return count


cdef inline bint compare_longs(Comparison *one, Py_ssize_t b, uint64_t *bits, uint8_t *bytes) noexcept nogil:
    """Clear the bits of the rows of a block that do not pass. Returns whether at least one row remains."""
    cdef const int64_t *column = one.layout + LAYOUT * b
    cdef int64_t low = one.lows[b], high = one.highs[b], literal = one.literal
    cdef int op = one.op, width = column[WIDTH], verdict
    cdef uint64_t code, most
    if column[FORM] < 0:
        return True
    verdict = decide(op, low > literal, high < literal, low == literal, high == literal)
    if verdict != 2:
        return verdict
    most = (<uint64_t>0xFFFFFFFFFFFFFFFF) >> (64 - 8 * width)
    if literal < column[BASE]:
        # Only a summary with an open end leaves this case undecided. No value of the block is less than the literal,
        # and rows without a value are kept.
        if op >= GE:
            return True
        code = 0
    else:
        code = <uint64_t>literal - <uint64_t>column[BASE]
        if code > most:
            if op < GE:
                return True
            code = most
    if op == LT:
        if code == 0 and column[PRESENCE] == 0:
            return False
        code = code - 1 if code > 0 else 0
    elif op == GT:
        if code == most and column[PRESENCE] == 0:
            return False
        code = code + 1 if code < most else most
    if width == 1:
        return seamark_narrow_to(<const uint8_t *>column[CODES], column[ROWS], code, op < GE, bits, one.ties)
    if column[SKETCH] and code >> column[SHIFT] <= 0xFF:
        one.undecided = True
        one.code = code
        return seamark_narrow_to(<const uint8_t *>column[SKETCH], column[ROWS], code >> column[SHIFT], op < GE, bits,
                                 one.ties)
    seamark_codes(width, LE if op < GE else GE, <const void *>column[CODES], bytes, column[ROWS], code, True)
    return seamark_and(bytes, column[ROWS], bits)


cdef inline bint compare_doubles(Comparison *one, Py_ssize_t b, uint64_t *bits, uint8_t *bytes) noexcept nogil:
    """Do the work of `compare_longs` for doubles."""
    cdef const int64_t *column = one.layout + LAYOUT * b
    cdef double low = one.low_reals[b], high = one.high_reals[b], literal = one.real
    cdef int verdict
    if column[FORM] < 0:
        return True
    verdict = decide(one.op, low > literal, high < literal, low == literal, high == literal)
    if verdict == 1:
        return True
    if verdict == 0 and column[PRESENCE] == 0:
        return False
    if column[SKETCH] and literal == literal:
        one.undecided = True
        return seamark_narrow_to(<const uint8_t *>column[SKETCH], column[ROWS],
                                 seamark_literal(<const uint8_t *>column[SKETCH], literal), one.op < GE, bits, one.ties)
    seamark_floats(column[WIDTH], one.op, <const void *>column[CODES], bytes, column[ROWS], literal, True)
    return seamark_and(bytes, column[ROWS], bits)


cdef bint compare_strings(Comparison *one, Py_ssize_t b, int64_t words, uint64_t *bits, uint8_t *bytes) noexcept nogil:
    """Do the work of `compare_longs` for strings."""
    cdef const int64_t *column = one.layout + LAYOUT * b
    cdef int64_t shared = column[COMMON_SIZE], row
    cdef int order, op = one.op
    cdef uint64_t code
    cdef bint some = False
    if column[FORM] < 0:
        return True
    if one.low_heads[b] > one.head:
        return op >= GE
    if one.high_heads[b] < one.head:
        return op < GE
    order = beside_common(column, one.text, one.size)
    if order != 0 or column[WIDTH] == 0:
        if order == 0:
            order = compare(column, 0, 0, one.text + shared, one.size - shared)
        if passes(op, order):
            return True
        if column[PRESENCE]:
            for row in range(column[ROWS]):
                if has_value(column[PRESENCE], row):
                    bits[row >> 6] &= ~(<uint64_t>1 << (row & 63))
                elif bits[row >> 6] >> (row & 63) & 1:
                    some = True
        return some
    code = prefix_of(one.text + shared, one.size - shared, column[WIDTH])
    one.code = code
    if column[SKETCH]:
        one.undecided = True
        return seamark_narrow_to(<const uint8_t *>column[SKETCH], column[ROWS],
                                 seamark_code_literal(<const uint8_t *>column[SKETCH], code), op < GE, bits, one.ties)
    # Codes are compared first, for all rows at once. Then the rows whose code equals the literal's are compared. Most
    # blocks have no such row.
    seamark_codes(column[WIDTH], LE if op < GE else GE, <const void *>column[CODES], bytes, column[ROWS], code, True)
    some = seamark_and(bytes, column[ROWS], bits)
    if some and seamark_ties(column[WIDTH], <const void *>column[CODES], column[ROWS], code):
        one.undecided = True
        memcpy(one.ties, bits, words * sizeof(uint64_t))
    return some


cdef void check_strings(const Comparison *one, const int64_t *column, uint64_t *bits, int64_t words) noexcept nogil:
    """Clear the bits of the rows of `one.ties` that do not pass."""
    cdef int64_t[128] rows
    cdef int64_t row, word = 0, shared = column[COMMON_SIZE]
    cdef int k, found, width = column[WIDTH]
    cdef uint64_t code
    cdef bint keep
    while True:
        found = seamark_next(bits, one.ties, words, <const void *>column[CODES], width, &word, rows)
        if found == 0:
            return
        for k in range(found):
            row = rows[k]
            code = load(<const uint8_t *>column[CODES], width, row)
            if code != one.code:
                keep = (code < one.code) == (one.op < GE)
            else:
                keep = not has_value(column[PRESENCE], row) or passes(
                    one.op, compare(column, row, code, one.text + shared, one.size - shared))
            if not keep:
                bits[row >> 6] &= ~(<uint64_t>1 << (row & 63))


cdef int64_t compare_block(Comparison *each, int count, Py_ssize_t b, int64_t words, uint64_t *bits, uint64_t *ties,
                           uint8_t *bytes) noexcept nogil:
    """Clear the bits of the rows of a block that do not pass all comparisons. Returns how many rows remain. `ties`,
    [count * words], and `bytes`, [64 * words], are overwritten."""
    cdef const int64_t *column
    cdef bint some
    cdef int k
    for k in range(count):
        each[k].undecided = False
        each[k].ties = ties + k * words
        if each[k].form == INTEGERS:
            some = compare_longs(&each[k], b, bits, bytes)
        elif each[k].form == FLOATS:
            some = compare_doubles(&each[k], b, bits, bytes)
        else:
            some = compare_strings(&each[k], b, words, bits, bytes)
        if not some:
            return 0
    for k in range(count):
        if each[k].undecided:
            column = each[k].layout + LAYOUT * b
            if each[k].form == STRINGS:
                check_strings(&each[k], column, bits, words)
            elif each[k].form == FLOATS:
                seamark_check_floats(column[WIDTH], each[k].op, <const void *>column[CODES], each[k].real, each[k].ties,
                                     bits, words)
            else:
                seamark_check_codes(column[WIDTH], each[k].op < GE, <const void *>column[CODES], each[k].code,
                                    each[k].ties, bits, words)
    return seamark_count(bits, words)


cdef uint64_t *scratch_for(int count, int64_t largest) except NULL:
    """Allocate memory for `compare_block`: bits, ties and bytes for blocks of at most `largest` rows. The caller frees
    it."""
    cdef uint64_t *scratch = <uint64_t *>PyMem_Malloc((count + 9) * words_of(largest) * sizeof(uint64_t) + 1)
    if scratch == NULL:
        raise MemoryError()
    return scratch


cdef inline int64_t words_of(int64_t rows) noexcept nogil:
    """Return how many words of 64 bits a bit for each row takes."""
    return (rows + 63) // 64


cdef inline bint excludes(const Comparison *one, Py_ssize_t b) noexcept nogil:
    """Return whether the summary shows that no row of the block passes."""
    cdef const int64_t *column = one.layout + LAYOUT * b
    cdef double low, high
    if column[FORM] < 0:
        return False
    if one.form == STRINGS:
        return one.low_heads[b] > one.head if one.op < GE else one.high_heads[b] < one.head
    if one.form == FLOATS:
        low = one.low_reals[b]
        high = one.high_reals[b]
        return column[PRESENCE] == 0 and decide(one.op, low > one.real, high < one.real, low == one.real,
                                                high == one.real) == 0
    return decide(one.op, one.lows[b] > one.literal, one.highs[b] < one.literal, one.lows[b] == one.literal,
                  one.highs[b] == one.literal) == 0


def narrow_all(comparisons, const int64_t[:, ::1] extents, uint8_t[::1] state, uint8_t[::1] mask):
    """Narrow a selection to the rows that pass all comparisons, of which there are at most 16. A comparison is (layout,
    low, high, op, literal). `op` is 0 for <=, 1 for <, 2 for >=, and 3 for >. The literal is a float for doubles, and
    bytes for strings."""
    cdef Py_ssize_t b, n = state.shape[0]
    cdef Comparison[COMPARISONS] each
    cdef int count
    cdef int64_t rows, words, kept, largest = 0
    cdef uint8_t *first = &mask[0] if mask.shape[0] else NULL
    cdef uint64_t *bits
    if n == 0:
        return
    count = take(comparisons, each, n)
    for b in range(n):
        largest = max(largest, extents[b, ROWS])
    bits = scratch_for(count, largest)
    with nogil:
        for b in range(n):
            rows = extents[b, ROWS]
            if state[b] == 0 or rows == 0:
                continue
            words = words_of(rows)
            if state[b] == 1:
                seamark_set(bits, rows)
            else:
                seamark_load(first + extents[b, FIRST], rows, bits)
            kept = compare_block(each, count, b, words, bits, bits + words, <uint8_t *>(bits + (1 + count) * words))
            if 0 < kept < rows:
                seamark_store(bits, rows, first + extents[b, FIRST])
            settle(&state[b], kept, rows)
    PyMem_Free(bits)


def collect_all(comparisons, const int64_t[:, ::1] extents, const uint8_t[::1] state, const uint8_t[::1] mask=None):
    """Return the result of `narrow_all` and then `collect`, but do not change the selection. Without a mask no block
    may have state 2."""
    cdef Py_ssize_t b, n = state.shape[0]
    cdef Comparison[COMPARISONS] each
    cdef int k, count
    cdef int64_t rows, words, name, i, kept, at = 0, total = 0, largest = 0, held = 0
    cdef const uint8_t *first = &mask[0] if mask is not None and mask.shape[0] else NULL
    cdef uint64_t *scratch
    cdef uint64_t *left
    cdef uint64_t *bits
    cdef int64_t[::1] out
    if n == 0:
        return np.empty(0, dtype=np.int64)
    count = take(comparisons, each, n)
    states = np.array(state)
    cdef uint8_t[::1] remaining = states
    with nogil:
        for b in range(n):
            for k in range(count):
                if remaining[b] == 0 or excludes(&each[k], b):
                    remaining[b] = 0
                    break
            if remaining[b]:
                held += words_of(extents[b, ROWS])
                largest = max(largest, extents[b, ROWS])
    if held == 0:
        return np.empty(0, dtype=np.int64)
    scratch = scratch_for(count, largest)
    left = <uint64_t *>PyMem_Malloc(held * sizeof(uint64_t))
    if left == NULL:
        PyMem_Free(scratch)
        raise MemoryError()
    try:
        with nogil:
            bits = left
            for b in range(n):
                if remaining[b] == 0:
                    continue
                rows = extents[b, ROWS]
                words = words_of(rows)
                if remaining[b] == 1:
                    seamark_set(bits, rows)
                else:
                    seamark_load(first + extents[b, FIRST], rows, bits)
                kept = compare_block(each, count, b, words, bits, scratch, <uint8_t *>(scratch + count * words))
                settle(&remaining[b], kept, rows)
                total += kept
                if remaining[b] == 2:
                    bits += words
        found = np.empty(total, dtype=np.int64)
        out = found
        with nogil:
            bits = left
            for b in range(n):
                rows = extents[b, ROWS]
                name = extents[b, BASE]
                if remaining[b] == 1:
                    for i in range(rows):
                        out[at + i] = name + i
                    at += rows
                elif remaining[b] == 2:
                    at += seamark_names(bits, words_of(rows), name, &out[at])
                    bits += words_of(rows)
    finally:
        PyMem_Free(left)
        PyMem_Free(scratch)
    return found


cdef inline uint64_t load(const uint8_t *codes, int width, int64_t row) noexcept nogil:
    """Return the code of a row."""
    cdef uint64_t value = 0
    if width:  # if all values of the block are equal, there are no codes and no address
        memcpy(&value, codes + row * width, width)
    return value


cdef inline uint64_t prefix_of(const uint8_t *text, int64_t size, int width) noexcept nogil:
    """Return the first `width` bytes of a text as a number with the order of the texts. A short text ends in zeros."""
    cdef uint64_t code = 0
    cdef int k
    for k in range(width):
        code = (code << 8) | (text[k] if k < size else 0)
    return code


cdef int beside_common(const int64_t *column, const uint8_t *text, int64_t size) noexcept nogil:
    """Compare the common prefix of a block with the text. Returns -1 if every value is less than the text, 1 if every
    value is greater, and 0 if the text begins with the common prefix."""
    cdef int64_t shared = column[COMMON_SIZE]
    cdef int order = memcmp(<const void *>column[COMMON], text, min(shared, size)) if shared > 0 and size > 0 else 0
    if order:
        return -1 if order < 0 else 1
    return 1 if size < shared else 0


cdef int compare(const int64_t *column, int64_t row, uint64_t code, const uint8_t *text, int64_t size) noexcept nogil:
    """Compare the value of a row with `text`, both without the common prefix. `code` is the first bytes of `text`.
    Returns -1, 0 or 1 for a value that is less, equal or greater."""
    cdef int width = column[WIDTH], order
    cdef uint64_t mine
    cdef int64_t length, own, other
    if width == 0:
        return -1 if size > 0 else 0
    mine = load(<const uint8_t *>column[CODES], width, row)
    if mine != code:
        return -1 if mine < code else 1
    length = <int64_t>load(<const uint8_t *>column[LENGTHS], column[LENGTHS_WIDTH], row)
    own = length - width if length > width else 0
    other = size - width if size > width else 0
    if own > 0 and other > 0:
        order = memcmp(<const uint8_t *>column[TAILS] + (<const uint32_t *>column[ENDS])[row] - own,
                       text + width, min(own, other))
        if order:
            return -1 if order < 0 else 1
    return 0 if length == size else -1 if length < size else 1


cdef inline bint passes(int op, int order) noexcept nogil:
    """Return whether a value passes a comparison. `order` is below, at or above zero, as `compare` returns it."""
    if op == LE:
        return order <= 0
    if op == LT:
        return order < 0
    if op == GE:
        return order >= 0
    return order > 0


def narrow_uuids(const int64_t[:, ::1] layout, const uint64_t[::1] low, const uint64_t[::1] high,
                 uint8_t[::1] state, uint8_t[::1] mask, int op, const uint8_t[::1] literal):
    """Narrow a selection by the comparison of UUIDs with a literal. Some writers order UUIDs as strings, others as two
    signed longs. A row is removed only if it fails in both orders."""
    cdef Py_ssize_t b, n = layout.shape[0]
    cdef const uint8_t *text = &literal[0] if literal.shape[0] else NULL
    cdef int64_t size = literal.shape[0]
    cdef uint64_t head = prefix_of(text, size, 8)
    with nogil:
        for b in range(n):
            if state[b] == 0 or layout[b, FORM] < 0:
                continue
            if (low[b] ^ head) >> 63 or (high[b] ^ head) >> 63:
                pass
            elif low[b] > head:
                if op < GE:
                    state[b] = 0
                continue
            elif high[b] < head:
                if op >= GE:
                    state[b] = 0
                continue
            narrow_block(&layout[b, 0], &state[b], &mask[layout[b, FIRST]], op, text, size)


cdef bint differ_by_sign(const int64_t *column, int64_t row, const uint8_t *text, int64_t size) noexcept nogil:
    """Return whether the order of a UUID and the text may be reversed when their halves are signed."""
    cdef uint64_t head
    cdef int64_t shared = column[COMMON_SIZE]
    cdef int width = column[WIDTH]
    if size != 16:
        return True
    if shared >= 8:
        # The upper halves are equal, or they differ within the prefix that all values share. In the prefix only the
        # first bit is a sign.
        return memcmp(<const void *>column[COMMON], text, 8) == 0 or ((<const uint8_t *>column[COMMON])[0] ^ text[0]) >> 7
    if shared > 0:
        if ((<const uint8_t *>column[COMMON])[0] ^ text[0]) >> 7:
            return True
        if memcmp(<const void *>column[COMMON], text, shared):
            return False
        head = load(<const uint8_t *>column[CODES], width, row)
        return head >> (8 * shared) == prefix_of(text + shared, size - shared, 8) >> (8 * shared)
    head = load(<const uint8_t *>column[CODES], width, row)
    return (head ^ prefix_of(text, size, 8)) >> 63 or head == prefix_of(text, size, 8)


cdef void narrow_block(const int64_t *column, uint8_t *state, uint8_t *mask, int op,
                       const uint8_t *text, int64_t size) noexcept nogil:
    """Narrow the selection in one block by the comparison of UUIDs with a literal, as `narrow_uuids` describes."""
    cdef int64_t rows = column[ROWS], shared = column[COMMON_SIZE], kept = 0, row
    cdef int order = beside_common(column, text, size)
    cdef uint64_t code = 0
    cdef uint8_t keep
    cdef bint fresh = state[0] == 1
    if order != 0 or column[WIDTH] == 0:
        if order == 0:
            order = compare(column, 0, 0, text + shared, size - shared)
        if passes(op, order) or differ_by_sign(column, 0, text, size):
            return
        if column[PRESENCE] == 0:
            state[0] = 0
            return
        for row in range(rows):
            keep = not has_value(column[PRESENCE], row)
            mask[row] = keep if fresh else mask[row] & keep
            kept += mask[row]
        settle(state, kept, rows)
        return
    code = prefix_of(text + shared, size - shared, column[WIDTH])
    for row in range(rows):
        if not fresh and mask[row] == 0:
            continue
        keep = (passes(op, compare(column, row, code, text + shared, size - shared))
                or not has_value(column[PRESENCE], row) or differ_by_sign(column, row, text, size))
        mask[row] = keep
        kept += keep
    settle(state, kept, rows)


cdef inline bint any_between(const int64_t[::1] literals, int64_t low, int64_t high) noexcept nogil:
    """Return whether one of the sorted literals is within [low, high]."""
    cdef int64_t left = 0, right = literals.shape[0], middle
    while left < right:
        middle = (left + right) >> 1
        if literals[middle] < low:
            left = middle + 1
        else:
            right = middle
    return left < literals.shape[0] and literals[left] <= high


def narrow_longs_in(const int64_t[:, ::1] lower, const int64_t[:, ::1] upper, const int64_t[::1] least,
                    const int64_t[::1] most, uint8_t[::1] state, uint8_t[::1] mask, const int64_t[::1] literals):
    """Narrow a selection to the rows with a literal between their lower and upper bound. `literals` are sorted. `least`
    and `most` are the summaries of the blocks."""
    cdef Py_ssize_t b, n = lower.shape[0]
    cdef int64_t rows, row, kept, first, lo, hi
    cdef uint8_t keep
    cdef bint fresh
    with nogil:
        for b in range(n):
            if state[b] == 0 or lower[b, FORM] < 0 or upper[b, FORM] < 0:
                continue
            if not any_between(literals, least[b], most[b]):
                state[b] = 0
                continue
            rows = lower[b, ROWS]
            first = lower[b, FIRST]
            fresh = state[b] == 1
            kept = 0
            for row in range(rows):
                if not fresh and mask[first + row] == 0:
                    continue
                lo = INT64_MIN
                hi = INT64_MAX
                if has_value(lower[b, PRESENCE], row):
                    lo = <int64_t>(<uint64_t>lower[b, BASE] + load(<const uint8_t *>lower[b, CODES], lower[b, WIDTH], row))
                if has_value(upper[b, PRESENCE], row):
                    hi = <int64_t>(<uint64_t>upper[b, BASE] + load(<const uint8_t *>upper[b, CODES], upper[b, WIDTH], row))
                keep = any_between(literals, lo, hi)
                mask[first + row] = keep
                kept += keep
            settle(&state[b], kept, rows)


def merge(const int64_t[:, ::1] layout, uint8_t[::1] state, uint8_t[::1] mask,
          const uint8_t[::1] other_state, const uint8_t[::1] other_mask):
    """Add the rows of the other selection to the first selection. Only the number of rows and the first row are read
    from `layout`."""
    cdef Py_ssize_t b, n = layout.shape[0]
    cdef int64_t i, first, rows
    with nogil:
        for b in range(n):
            if state[b] == 1 or other_state[b] == 0:
                continue
            if other_state[b] == 1:
                state[b] = 1
                continue
            first = layout[b, FIRST]
            rows = layout[b, ROWS]
            if state[b] == 0:
                memcpy(&mask[first], &other_mask[first], rows)
                state[b] = 2
            else:
                for i in range(first, first + rows):
                    mask[i] |= other_mask[i]


def intersect(const int64_t[:, ::1] layout, uint8_t[::1] state, uint8_t[::1] mask, const uint8_t[::1] kept):
    """Narrow a selection to the rows whose byte in `kept` is 1. Only the number of rows and the first row are read from
    `layout`."""
    cdef Py_ssize_t b, n = layout.shape[0]
    cdef int64_t i, first, rows
    cdef uint8_t some, every
    with nogil:
        for b in range(n):
            if state[b] == 0:
                continue
            first = layout[b, FIRST]
            rows = layout[b, ROWS]
            some = 0
            every = 1
            if state[b] == 1:
                for i in range(first, first + rows):
                    some |= kept[i]
                    every &= kept[i]
                if every:
                    continue
                memcpy(&mask[first], &kept[first], rows)
            else:
                for i in range(first, first + rows):
                    mask[i] &= kept[i]
                    some |= mask[i]
            state[b] = 2 if some else 0


def count(const int64_t[:, ::1] layout, const uint8_t[::1] state, const uint8_t[::1] mask):
    """Return how many rows are selected."""
    cdef Py_ssize_t b, n = layout.shape[0]
    cdef int64_t total = 0
    with nogil:
        for b in range(n):
            if state[b] == 1:
                total += layout[b, ROWS]
            elif state[b] == 2:
                total += seamark_sum(&mask[layout[b, FIRST]], layout[b, ROWS])
    return total


def collect(const int64_t[:, ::1] layout, const uint8_t[::1] state, const uint8_t[::1] mask):
    """Return the numbers of the selected rows in order, as int64[selected]. The numbers of a block's rows begin at the
    block's base."""
    cdef Py_ssize_t b, n = layout.shape[0]
    cdef int64_t i, name, rows, at = 0, total = count(layout, state, mask)
    if total == 0:
        return np.empty(0, dtype=np.int64)
    found = np.empty(total, dtype=np.int64)
    cdef int64_t[::1] out = found
    cdef int64_t *names = &out[0]  # a block without a selected row may come after the last number
    with nogil:
        for b in range(n):
            rows = layout[b, ROWS]
            name = layout[b, BASE]
            if state[b] == 1:
                for i in range(rows):
                    names[at + i] = name + i
                at += rows
            elif state[b] == 2:
                at += seamark_collect(&mask[layout[b, FIRST]], rows, name, names + at)
    return found
