"""Bits of words of 64 rows each, and the rank that the slices of ranks (`_bitmap.pyx`) hold for one row.

The ranks of eight rows at once are assembled in the functions that look them up. One shared function for it took a
quarter more time.
"""

from libc.stdint cimport uint32_t, uint64_t

ctypedef const uint64_t *Words

cdef extern from *:
    """
    #include <stdint.h>
    static inline int seamark_lowest(uint64_t word) { return __builtin_ctzll(word); }
    static inline int seamark_count(uint64_t word) { return __builtin_popcountll(word); }
    static inline int seamark_length(uint64_t word) { return word ? 64 - __builtin_clzll(word) : 0; }

    /* Eight bytes as a matrix of bits, transposed: bit j of byte i goes to bit i of byte j. */
    static inline uint64_t seamark_transposed(uint64_t x) {
        uint64_t t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAu;
        x ^= t ^ (t << 7);
        t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCu;
        x ^= t ^ (t << 14);
        t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0u;
        return x ^ t ^ (t << 28);
    }

    /* Of one row. A slice that does not move has one word for all. */
    static inline uint32_t seamark_rank(const uint64_t *const *starts, const int *moves, int slices, int64_t word, int bit) {
        uint32_t rank = 0;
        for (int i = 0; i < slices; i++) rank |= (uint32_t)(starts[i][moves[i] ? word : 0] >> bit & 1) << i;
        return rank;
    }
    """
    int seamark_lowest(uint64_t word) nogil
    int seamark_count(uint64_t word) nogil
    int seamark_length(uint64_t word) nogil
    uint64_t seamark_transposed(uint64_t x) nogil
    uint32_t seamark_rank(const Words *starts, const int *moves, int slices, Py_ssize_t word, int bit) nogil
