"""XXH64 (xxHash specification 0.1.1, "XXH64 algorithm description"): a 64-bit hash of bytes, the same on every machine.

Words are little-endian, like all arrays of an index. The machine must be little-endian, too.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <stdint.h>
    #define SEAMARK_XXH_1 0x9E3779B185EBCA87ULL
    #define SEAMARK_XXH_2 0xC2B2AE3D27D4EB4FULL
    #define SEAMARK_XXH_3 0x165667B19E3779F9ULL
    #define SEAMARK_XXH_4 0x85EBCA77C2B2AE63ULL
    #define SEAMARK_XXH_5 0x27D4EB2F165667C5ULL
    """
    const uint64_t P1 "SEAMARK_XXH_1"
    const uint64_t P2 "SEAMARK_XXH_2"
    const uint64_t P3 "SEAMARK_XXH_3"
    const uint64_t P4 "SEAMARK_XXH_4"
    const uint64_t P5 "SEAMARK_XXH_5"


cdef inline uint64_t rotated(uint64_t word, int bits) noexcept nogil:
    """Return the word, rotated to the left."""
    return (word << bits) | (word >> (64 - bits))


cdef inline uint64_t one_round(uint64_t lane, uint64_t word) noexcept nogil:
    """Add a word to one of the four lanes."""
    return rotated(lane + word * P2, 31) * P1


cdef inline uint64_t with_lane(uint64_t state, uint64_t lane) noexcept nogil:
    """Merge a lane into the state."""
    return (state ^ one_round(0, lane)) * P1 + P4


cdef inline uint64_t with_word(uint64_t state, uint64_t word) noexcept nogil:
    """Add one of the last words to the state."""
    return rotated(state ^ one_round(0, word), 27) * P1 + P4


cdef inline uint64_t finished(uint64_t state) noexcept nogil:
    """Do the final mix."""
    state = (state ^ (state >> 33)) * P2
    state = (state ^ (state >> 29)) * P3
    return state ^ (state >> 32)


cdef inline uint64_t xxh64_word(uint64_t word, uint64_t seed) noexcept nogil:
    """Return the hash of the 8 bytes of one word."""
    return finished(with_word(seed + P5 + 8, word))


cdef inline uint64_t xxh64(const uint8_t* data, size_t size, uint64_t seed) noexcept nogil:
    """Return the hash of `size` bytes. `data` may be NULL if `size` is 0."""
    cdef const uint8_t* at = data
    cdef size_t left = size
    cdef uint64_t state, a, b, c, d
    cdef uint64_t words[4]
    cdef uint32_t half
    if left >= 32:
        a, b, c, d = seed + P1 + P2, seed + P2, seed, seed - P1
        while left >= 32:
            memcpy(words, at, 32)
            a, b = one_round(a, words[0]), one_round(b, words[1])
            c, d = one_round(c, words[2]), one_round(d, words[3])
            at += 32
            left -= 32
        state = rotated(a, 1) + rotated(b, 7) + rotated(c, 12) + rotated(d, 18)
        state = with_lane(with_lane(with_lane(with_lane(state, a), b), c), d)
    else:
        state = seed + P5
    state += size
    while left >= 8:
        memcpy(words, at, 8)
        state = with_word(state, words[0])
        at += 8
        left -= 8
    if left >= 4:
        memcpy(&half, at, 4)
        state = rotated(state ^ (half * P1), 23) * P2 + P3
        at += 4
        left -= 4
    while left:
        state = rotated(state ^ (at[0] * P5), 11) * P1
        at += 1
        left -= 1
    return finished(state)
