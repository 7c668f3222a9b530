"""MurmurHash3 of many values at once. The 128-bit x64 variant is the hash of DataSketches (`theta.py`), and the 32-bit
x86 variant is the hash of Iceberg's bucket transform (spec, appendix B)."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

import numpy as np

cdef extern from *:
    """
    #include <stdint.h>
    #define SEAMARK_MURMUR_1 0x87C37B91114253D5ULL
    #define SEAMARK_MURMUR_2 0x4CF5AD432745937FULL
    """
    const uint64_t C1 "SEAMARK_MURMUR_1"
    const uint64_t C2 "SEAMARK_MURMUR_2"


ctypedef uint64_t (*Hash)(const uint8_t* data, int64_t size, uint64_t seed) noexcept nogil


cdef inline uint64_t rotated(uint64_t word, int bits) noexcept nogil:
    """Return the word, rotated to the left."""
    return (word << bits) | (word >> (64 - bits))


cdef inline uint64_t finished(uint64_t word) noexcept nogil:
    """Do the final mix of the 128-bit variant (`fmix64`)."""
    word = (word ^ (word >> 33)) * <uint64_t>0xFF51AFD7ED558CCD
    word = (word ^ (word >> 33)) * <uint64_t>0xC4CEB9FE1A85EC53
    return word ^ (word >> 33)


cdef uint64_t hash_128_first_half(const uint8_t* data, int64_t size, uint64_t seed) noexcept nogil:
    """Return the first 64 bits of the 128-bit hash."""
    cdef uint64_t h1 = seed, h2 = seed, k1, k2
    cdef uint64_t[2] words
    cdef int64_t at = 0
    while size - at >= 16:
        memcpy(words, data + at, 16)
        h1 ^= rotated(words[0] * C1, 31) * C2
        h1 = (rotated(h1, 27) + h2) * 5 + 0x52DCE729
        h2 ^= rotated(words[1] * C2, 33) * C1
        h2 = (rotated(h2, 31) + h1) * 5 + 0x38495AB5
        at += 16
    if at < size:
        words[0] = 0
        words[1] = 0
        memcpy(words, data + at, size - at)
        h2 ^= rotated(words[1] * C2, 33) * C1
        h1 ^= rotated(words[0] * C1, 31) * C2
    h1 ^= <uint64_t>size
    h2 ^= <uint64_t>size
    h1 += h2
    h2 += h1
    return finished(h1) + finished(h2)


cdef inline uint32_t scrambled(uint32_t block) noexcept nogil:
    """Mix a block of 4 bytes, as the 32-bit variant does before it adds the block to its state."""
    block *= <uint32_t>0xCC9E2D51
    return ((block << 15) | (block >> 17)) * <uint32_t>0x1B873593


cdef uint64_t hash_32(const uint8_t* data, int64_t size, uint64_t seed) noexcept nogil:
    """Return the 32-bit hash."""
    cdef uint32_t state = <uint32_t>seed, block
    cdef int64_t at = 0
    while size - at >= 4:
        memcpy(&block, data + at, 4)
        state ^= scrambled(block)
        state = ((state << 13) | (state >> 19)) * 5 + <uint32_t>0xE6546B64
        at += 4
    if at < size:
        block = 0
        memcpy(&block, data + at, size - at)
        state ^= scrambled(block)
    state ^= <uint32_t>size
    state = (state ^ (state >> 16)) * <uint32_t>0x85EBCA6B
    state = (state ^ (state >> 13)) * <uint32_t>0xC2B2AE35
    return state ^ (state >> 16)


def hash_spans(const uint8_t[::1] heap, const int64_t[::1] starts, uint64_t seed, int bits):
    """Return the hash of each row's bytes, which are starts[row] to starts[row + 1] of the heap, as uint64[rows].
    `bits` is 32, or 64 for the first half of the 128-bit hash. Raises ValueError if a row's bytes are outside of the
    heap."""
    cdef Py_ssize_t i, n = starts.shape[0] - 1
    cdef int64_t room = heap.shape[0]
    cdef const uint8_t* data = &heap[0] if room else NULL
    cdef Hash hashed = hash_32 if bits == 32 else hash_128_first_half
    cdef bint inside = True
    found = np.empty(n, dtype=np.uint64)
    cdef uint64_t[::1] out = found
    with nogil:
        for i in range(n):
            if starts[i] < 0 or starts[i + 1] < starts[i] or starts[i + 1] > room:
                inside = False
                break
            out[i] = hashed(data + starts[i], starts[i + 1] - starts[i], seed)
    if not inside:
        raise ValueError("a row's bytes are outside of the heap")
    return found


def hash_fixed(const uint8_t[::1] heap, int64_t width, uint64_t seed, int bits):
    """Return the hashes of rows of `width` bytes each, as `hash_spans` does, as uint64[rows]."""
    if width < 1 or heap.shape[0] % width:
        raise ValueError("the heap has no whole number of rows")
    cdef Py_ssize_t i, n = heap.shape[0] // width
    cdef const uint8_t* data = &heap[0] if n else NULL
    cdef Hash hashed = hash_32 if bits == 32 else hash_128_first_half
    found = np.empty(n, dtype=np.uint64)
    cdef uint64_t[::1] out = found
    with nogil:
        for i in range(n):
            out[i] = hashed(data + i * width, width, seed)
    return found
