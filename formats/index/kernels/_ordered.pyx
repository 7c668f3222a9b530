"""Compact ordered dictionaries that are searched in place. Ascending numbers are stored as packed differences. Of
ascending byte strings, only the part that differs from the previous value is stored. All loops run without the GIL. No
byte beyond a buffer is read, for any contents of the buffer.

n numbers are in blocks of 128, all little-endian:

    u64 unit           all differences are multiples of it (1 if there are no differences)
    u64 least          the least difference / unit
    u64[b] firsts      the first number of each block, b = ceil(n / 128)
    u64[2 * words[b]]  the words of each block. Difference k is between the numbers k and k + 1. The words have
                       difference / unit - least of each k, in the bits from k * width on
    u32[b + 1] words   where each block's words begin, in 16 bytes; the width of a block is how many it has, 0..64

n byte strings are in blocks of 16:

    u32[b + 1] spots   where each block begins in the bytes after this array, b = ceil(n / 16)
    blocks             for each value: number of bytes shared with the previous value (0 for the first of a block) and
                       number of bytes that follow (u16 each), then these bytes
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

import numpy as np

from seamark.formats.index.kernels._bits cimport seamark_length

cdef enum:
    NUMBERS = 128  # numbers in a block
    VALUES = 16  # byte strings in a block
    HEAD = 16  # bytes of `unit` and `least`
    LONGEST = 65535  # the greatest length of a byte string, which must fit u16


def pack_numbers(const uint64_t[::1] numbers):
    """Pack ascending numbers. Returns uint8[]."""
    cdef Py_ssize_t n = numbers.shape[0], blocks = (n + NUMBERS - 1) // NUMBERS, block, i, start, end
    cdef uint64_t unit = 0, least = 0xFFFFFFFFFFFFFFFF, difference, other, all_bits, code
    cdef uint32_t total = 0
    cdef int width, bit
    spots = np.zeros(blocks + 1, dtype=np.uint32)
    cdef uint32_t[::1] words = spots
    with nogil:
        for i in range(1, n):  # `unit` becomes the greatest common divisor of all differences (Euclid's algorithm)
            difference, other = numbers[i] - numbers[i - 1], unit
            if other == 1 or (other and difference % other == 0):
                continue
            while other:
                difference, other = other, difference % other
            unit = difference
        if unit == 0:
            unit = 1
        for i in range(1, n):
            difference = (numbers[i] - numbers[i - 1]) // unit
            if difference < least:
                least = difference
        if n < 2:
            least = 0
        for block in range(blocks):
            start, end = block * NUMBERS, min((block + 1) * NUMBERS, n)
            all_bits = 0
            for i in range(start + 1, end):
                all_bits |= (numbers[i] - numbers[i - 1]) // unit - least
            total += seamark_length(all_bits)  # the width: 128 differences of this width take so many times 16 bytes
            words[block + 1] = total
    firsts = np.ascontiguousarray(numbers[::NUMBERS])
    packed = np.zeros(2 * <Py_ssize_t>total, dtype=np.uint64)
    cdef uint64_t[::1] out = packed
    cdef Py_ssize_t base
    with nogil:
        for block in range(blocks):
            start, end = block * NUMBERS, min((block + 1) * NUMBERS, n)
            width = words[block + 1] - words[block]
            if width == 0:
                continue
            base = 2 * <Py_ssize_t>words[block]
            for i in range(start + 1, end):
                code = (numbers[i] - numbers[i - 1]) // unit - least
                bit = <int>(i - start - 1) * width
                out[base + (bit >> 6)] |= code << (bit & 63)
                if (bit & 63) + width > 64:
                    out[base + (bit >> 6) + 1] |= code >> (64 - (bit & 63))
    head = np.array([unit, least], dtype=np.uint64)
    return np.concatenate([part.view(np.uint8) for part in (head, firsts, packed, spots)])


cdef class Numbers:
    """`count` ascending numbers in a buffer that `pack_numbers` made. Raises ValueError if the lengths in the buffer do
    not fit it."""

    def __cinit__(self, const uint8_t[::1] memory, Py_ssize_t count):
        cdef Py_ssize_t room = memory.shape[0], block
        self.held = memory
        self.count = count
        self.blocks = (count + NUMBERS - 1) // NUMBERS
        if count < 0 or room < HEAD + 4 or <uint64_t>&memory[0] % 8 or room < HEAD + 12 * self.blocks + 4:
            raise ValueError("an ordered dictionary is cut short")
        cdef const uint8_t *start = &memory[0]
        memcpy(&self.unit, start, 8)
        memcpy(&self.least, start + 8, 8)
        self.firsts = <const uint64_t *>(start + HEAD)
        self.packed = self.firsts + self.blocks
        self.words = <const uint32_t *>(start + room - 4 * (self.blocks + 1))
        if (room - HEAD - 12 * self.blocks - 4) % 16 or self.words[0] != 0:
            raise ValueError("an ordered dictionary has an impossible length")
        for block in range(self.blocks):
            if self.words[block + 1] < self.words[block] or self.words[block + 1] - self.words[block] > 64:
                raise ValueError("an ordered dictionary has an impossible width")
        if 16 * <Py_ssize_t>self.words[self.blocks] != room - HEAD - 12 * self.blocks - 4:
            raise ValueError("an ordered dictionary has an impossible length")

    cdef uint64_t _step(self, Py_ssize_t base, int width, int k) noexcept nogil:
        """Return difference k of a block whose words begin at `base`."""
        if width == 0:
            return self.least * self.unit
        cdef int bit = k * width, within = bit & 63
        cdef uint64_t code = self.packed[base + (bit >> 6)] >> within
        if within + width > 64:
            code |= self.packed[base + (bit >> 6) + 1] << (64 - within)
        if width < 64:
            code &= (<uint64_t>1 << width) - 1
        return (code + self.least) * self.unit

    cdef Py_ssize_t _below(self, uint64_t bound, bint equal) noexcept nogil:
        """Return how many numbers are less than the bound, or equal to it if `equal`."""
        cdef Py_ssize_t low = 0, high = self.blocks, middle, base, k, block_numbers
        cdef uint64_t number
        cdef int width
        while low < high:
            middle = (low + high) >> 1
            if self.firsts[middle] < bound or (equal and self.firsts[middle] == bound):
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return 0
        low -= 1
        base, width = 2 * <Py_ssize_t>self.words[low], self.words[low + 1] - self.words[low]
        block_numbers = min(self.count - low * NUMBERS, NUMBERS)
        number = self.firsts[low]
        for k in range(block_numbers - 1):
            number += self._step(base, width, <int>k)
            if number > bound or (number == bound and not equal):
                return low * NUMBERS + k + 1
        return low * NUMBERS + block_numbers

    def below(self, const uint64_t[::1] bounds, bint equal):
        """Return how many numbers are less than each bound, as uint64[m]. If `equal`, numbers equal to the bound count,
        too."""
        cdef Py_ssize_t i, m = bounds.shape[0]
        found = np.empty(m, dtype=np.uint64)
        cdef uint64_t[::1] out = found
        with nogil:
            for i in range(m):
                out[i] = self._below(bounds[i], equal)
        return found

    cdef bint _has(self, uint64_t least, uint64_t most) noexcept nogil:
        """Return whether one of the numbers is in the range from `least` to `most`, both included."""
        cdef Py_ssize_t low = 0, high = self.blocks, middle, base, k
        cdef uint64_t number
        cdef int width
        while low < high:
            middle = (low + high) >> 1
            if self.firsts[middle] <= least:
                low = middle + 1
            else:
                high = middle
        if low < self.blocks and self.firsts[low] <= most:
            return True
        if low == 0:
            return False
        low -= 1
        number = self.firsts[low]
        base, width = 2 * <Py_ssize_t>self.words[low], self.words[low + 1] - self.words[low]
        for k in range(min(self.count - low * NUMBERS, NUMBERS) - 1):
            if number >= least:
                break
            number += self._step(base, width, <int>k)
        return least <= number <= most

    def all(self):
        """Return all numbers, as uint64[count]."""
        cdef Py_ssize_t block, i, base
        cdef int width
        cdef uint64_t number = 0
        found = np.empty(self.count, dtype=np.uint64)
        cdef uint64_t[::1] out = found
        with nogil:
            for block in range(self.blocks):
                base, width = 2 * <Py_ssize_t>self.words[block], self.words[block + 1] - self.words[block]
                number = self.firsts[block]
                out[block * NUMBERS] = number
                for i in range(min(self.count - block * NUMBERS, NUMBERS) - 1):
                    number += self._step(base, width, <int>i)
                    out[block * NUMBERS + i + 1] = number
        return found

    def edges(self):
        """Return (first number, last number). There must be at least one number."""
        first, last = self.at(np.array([0, self.count - 1], dtype=np.uint64)).tolist()
        return first, last

    def at(self, const uint64_t[::1] places):
        """Return the numbers at `places`, as uint64[m]. Raises ValueError for a place that is not below `count`."""
        cdef Py_ssize_t i, m = places.shape[0], block
        cdef int k
        cdef uint64_t number
        found = np.empty(m, dtype=np.uint64)
        cdef uint64_t[::1] out = found
        for i in range(m):
            if places[i] >= <uint64_t>self.count:
                raise ValueError(f"place {places[i]} is not among {self.count} numbers")
        with nogil:
            for i in range(m):
                block = places[i] // NUMBERS
                number = self.firsts[block]
                for k in range(<int>(places[i] % NUMBERS)):
                    number += self._step(2 * <Py_ssize_t>self.words[block], self.words[block + 1] - self.words[block], k)
                out[i] = number
        return found


def holding(list dictionaries, const uint64_t[::1] lows, const uint64_t[::1] highs):
    """Return, for each of the `Numbers`, whether it has a number in one of the ranges from lows[k] to highs[k], as
    uint8[n]. `lows` and `highs` ascend."""
    cdef Py_ssize_t i, k, n = len(dictionaries)
    cdef Numbers dictionary
    found = np.zeros(n, dtype=np.uint8)
    cdef uint8_t[::1] marks = found
    for i in range(n):
        dictionary = dictionaries[i]
        for k in range(lows.shape[0]):
            if dictionary._has(lows[k], highs[k]):
                marks[i] = 1
                break
    return found


def pack_strings(const int64_t[::1] starts, const uint8_t[::1] heap):
    """Pack ascending values of up to 65,535 bytes each. Returns uint8[]. Raises ValueError if the values take 4 GiB or
    more."""
    cdef Py_ssize_t n = starts.shape[0] - 1, blocks = (n + VALUES - 1) // VALUES, i
    cdef int64_t size = 4 * n + heap.shape[0], at = 0, length, previous_length = 0, shared
    cdef uint16_t[2] head
    spots = np.zeros(blocks + 1, dtype=np.uint32)
    cdef uint32_t[::1] spot = spots
    packed = np.empty(size, dtype=np.uint8)
    cdef uint8_t[::1] out = packed
    if size >= 1 << 32:
        raise ValueError(f"{n:,} distinct values of {heap.shape[0]:,} bytes are too many for one file's dictionary")
    with nogil:
        for i in range(n):
            length = starts[i + 1] - starts[i]
            shared = 0
            if i % VALUES == 0:
                spot[i // VALUES] = <uint32_t>at
            else:
                previous_length = starts[i] - starts[i - 1]
                while (
                    shared < length and shared < previous_length
                    and heap[starts[i] + shared] == heap[starts[i - 1] + shared]
                ):
                    shared += 1
            head[0], head[1] = <uint16_t>shared, <uint16_t>(length - shared)
            memcpy(&out[at], head, 4)
            at += 4
            if length > shared:
                memcpy(&out[at], &heap[starts[i] + shared], length - shared)
                at += length - shared
        spot[blocks] = <uint32_t>at
    return np.concatenate([spots.view(np.uint8), packed[:at]])


cdef class Strings:
    """`count` ascending values in a buffer that `pack_strings` made. Raises ValueError if the lengths in the buffer do
    not fit it."""

    cdef readonly Py_ssize_t count
    cdef Py_ssize_t blocks
    cdef int64_t room
    cdef const uint32_t *spots
    cdef const uint8_t *data
    cdef object held

    def __cinit__(self, const uint8_t[::1] memory, Py_ssize_t count):
        cdef Py_ssize_t block
        self.held = memory
        self.count = count
        self.blocks = (count + VALUES - 1) // VALUES
        if count < 0 or memory.shape[0] < 4 * (self.blocks + 1) or <uint64_t>&memory[0] % 4:
            raise ValueError("an ordered dictionary is cut short")
        self.spots = <const uint32_t *>&memory[0]
        self.data = &memory[0] + 4 * (self.blocks + 1)
        self.room = memory.shape[0] - 4 * (self.blocks + 1)
        if self.spots[0] != 0 or self.spots[self.blocks] != <uint64_t>self.room:
            raise ValueError("an ordered dictionary has an impossible length")
        for block in range(self.blocks):
            if self.spots[block + 1] < self.spots[block]:
                raise ValueError("an ordered dictionary has an impossible length")

    cdef int64_t _next(self, int64_t at, uint8_t *value, int64_t *length) noexcept nogil:
        """Replace `value`, the previous value, by the value at `at`. Returns where the next value begins, or -1 if the
        bytes are damaged."""
        cdef uint16_t[2] head
        if at + 4 > self.room:
            return -1
        memcpy(head, self.data + at, 4)
        at += 4
        if head[0] > length[0] or <int64_t>head[0] + head[1] > LONGEST or at + head[1] > self.room:
            return -1
        memcpy(value + head[0], self.data + at, head[1])
        length[0] = <int64_t>head[0] + head[1]
        return at + head[1]

    cdef int64_t _below(self, const uint8_t *bound, int64_t size, bint equal, uint8_t *value) noexcept nogil:
        """Return how many values are less than the bound, or equal to it if `equal`. Returns -1 if the bytes are
        damaged. `value` is memory for one value."""
        cdef int64_t low = 0, high = self.blocks, middle, length = 0, at, k
        while low < high:
            middle = (low + high) >> 1
            length = 0
            if self._next(self.spots[middle], value, &length) < 0:
                return -1
            if _before(value, length, bound, size, equal):
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return 0
        low -= 1
        at, length = self.spots[low], 0
        for k in range(min(self.count - low * VALUES, VALUES)):
            at = self._next(at, value, &length)
            if at < 0:
                return -1
            if not _before(value, length, bound, size, equal):
                return low * VALUES + k
        return min((low + 1) * VALUES, self.count)

    def below(self, list bounds, const uint8_t[::1] equal):
        """Return how many values are less than each of `bounds` (bytes), as uint64[m]. Values equal to bound i count,
        too, if equal[i] is not 0."""
        cdef Py_ssize_t i, m = len(bounds)
        cdef const uint8_t[::1] bound
        cdef uint8_t[LONGEST] value
        cdef int64_t below
        found = np.empty(m, dtype=np.uint64)
        cdef uint64_t[::1] out = found
        for i in range(m):
            bound = bounds[i]
            below = self._below(&bound[0] if bound.shape[0] else NULL, bound.shape[0], equal[i], value)
            if below < 0:
                raise ValueError("an ordered dictionary is damaged")
            out[i] = below
        return found

    def edges(self):
        """Return (first value, last value) as bytes. There must be at least one value."""
        cdef int64_t at = 0, length = 0
        cdef uint8_t[LONGEST] value
        cdef Py_ssize_t k
        if self._next(0, value, &length) < 0:
            raise ValueError("an ordered dictionary is damaged")
        first = <bytes>value[:length]
        at, length = self.spots[self.blocks - 1], 0
        for k in range(self.count - (self.blocks - 1) * VALUES):
            at = self._next(at, value, &length)
            if at < 0:
                raise ValueError("an ordered dictionary is damaged")
        return first, <bytes>value[:length]

    def all(self):
        """Return all values as (starts int64[count + 1], heap uint8[])."""
        cdef Py_ssize_t i, again  # the first pass measures the values, and the second pass copies them
        cdef int64_t at, length, total
        cdef uint8_t[LONGEST] value
        spots = np.zeros(self.count + 1, dtype=np.int64)
        heap = np.empty(0, dtype=np.uint8)
        cdef int64_t[::1] starts = spots
        cdef uint8_t[::1] out = heap
        cdef bint damaged = False
        for again in range(2):
            if again:
                heap = np.empty(spots[self.count], dtype=np.uint8)
                out = heap
            with nogil:
                at, length, total = 0, 0, 0
                for i in range(self.count):
                    if i % VALUES == 0:
                        at, length = self.spots[i // VALUES], 0
                    at = self._next(at, value, &length)
                    if at < 0:
                        damaged = True
                        break
                    if again and length:
                        memcpy(&out[total], value, length)
                    total += length
                    starts[i + 1] = total
            if damaged:
                raise ValueError("an ordered dictionary is damaged")
        return spots, heap


cdef inline bint _before(const uint8_t *value, int64_t length, const uint8_t *bound, int64_t size,
                         bint equal) noexcept nogil:
    """Return whether a value is less than a bound, or equal to it if `equal`."""
    cdef int64_t shorter_length = length if length < size else size
    cdef int comparison = memcmp(value, bound, shorter_length) if shorter_length else 0
    if comparison:
        return comparison < 0
    return length <= size if equal else length < size
