"""Writes rows of a block as text, directly from the packed columns: one call for a few hundred files of a response.

A row is a sequence of parts, which is the same for all rows of a call. Each part is a tuple that begins with its kind:

    (CONSTANT, bytes)
    (CHOICE, list of bytes)                one for each row, in the order of the rows
    (NUMBER, prefix, integers)             nothing if the number is absent
    (ITEMS, prefix, suffix, sizes, values, number of values)  sizes and values are integers; nothing for an empty list
    (TEXT, prefix, suffix, column)         as the inside of a JSON string; nothing if the text is absent
    (HEX, prefix, suffix, column)          as hexadecimal digits; nothing if the text is absent

`integers` is (width, codes, presence, base). The value of a row is the base plus the code of the row, or the base alone
if the width is 0. The values of all lists follow one another, so a list begins at the sum of the sizes of the lists
before it. `column` is (width, codes, presence, common bytes, lengths, bytes of a length, ends, tails). Its addresses
are absolute, and 0 for an array that the column does not have. `formats/index/packing.py` describes the arrays.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from libc.stdint cimport INT64_MIN, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

CONSTANT, CHOICE, NUMBER, ITEMS, TEXT, HEX = range(6)

cdef enum Kind:
    K_CONSTANT = 0
    K_CHOICE = 1
    K_NUMBER = 2
    K_ITEMS = 3
    K_TEXT = 4
    K_HEX = 5

cdef struct Integers:
    int width
    const uint8_t *codes
    const uint8_t *presence
    uint64_t base

cdef struct Part:
    Kind kind
    const char *prefix
    Py_ssize_t prefix_size
    const char *suffix
    Py_ssize_t suffix_size
    Integers numbers  # the numbers, or the sizes of the lists
    Integers values  # the values of the lists
    int64_t total  # the number of values of all lists
    int64_t passed_rows  # the lists of the first `passed_rows` rows have `passed_values` values
    int64_t passed_values
    int width  # this field and the next fields are the `column` of a text
    const uint8_t *codes
    const uint8_t *presence
    const uint8_t *common
    Py_ssize_t common_size
    const uint8_t *lengths
    int lengths_width
    const uint32_t *ends
    const uint8_t *tails

cdef const char *DIGITS = b"0123456789ABCDEF"
cdef bytes _ESCAPED_BYTES = bytes([code < 0x20 or code in (0x22, 0x5C) for code in range(256)])
"""1 for control characters, the quote and the backslash, which JSON escapes (RFC 8259, 7); 0 for other bytes."""
cdef const uint8_t *ESCAPED = <const uint8_t *>PyBytes_AS_STRING(_ESCAPED_BYTES)


cdef class _Output:
    """A buffer of text that grows. `size` bytes of its `room` bytes are written."""

    cdef char *data
    cdef Py_ssize_t size, room

    def __cinit__(self):
        self.room = 1 << 16
        self.size = 0
        self.data = <char *>PyMem_Malloc(self.room)
        if self.data == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.data)

    cdef int reserve(self, Py_ssize_t added_size) except -1:
        """Make room for further `added_size` bytes."""
        cdef char *larger_data
        cdef Py_ssize_t room = self.room
        if self.size + added_size <= room:
            return 0
        while room < self.size + added_size:
            room *= 2
        larger_data = <char *>PyMem_Realloc(self.data, room)
        if larger_data == NULL:
            raise MemoryError
        self.data = larger_data
        self.room = room
        return 0

    cdef int put(self, const char *data, Py_ssize_t size) except -1:
        self.reserve(size)
        memcpy(self.data + self.size, data, size)
        self.size += size
        return 0

    cdef int put_number(self, int64_t value) except -1:
        # An int64 has at most 19 digits. The digits are written in reverse order.
        cdef char digits[20]
        cdef int first = 20
        cdef uint64_t remaining = <uint64_t>value
        self.reserve(21)
        if value < 0:
            remaining = 0 - remaining
            self.data[self.size] = b"-"
            self.size += 1
        while True:
            first -= 1
            digits[first] = <char>(c"0" + remaining % 10)
            remaining //= 10
            if remaining == 0:
                break
        memcpy(self.data + self.size, &digits[first], 20 - first)
        self.size += 20 - first
        return 0

    cdef int put_json(self, const uint8_t *data, Py_ssize_t size) except -1:
        """Write a text as the inside of a JSON string."""
        cdef Py_ssize_t i
        cdef uint8_t byte
        cdef char *to
        # The longest escape, such as \u001F, has 6 bytes.
        self.reserve(6 * size)
        to = self.data + self.size
        for i in range(size):
            byte = data[i]
            if not ESCAPED[byte]:
                to[0] = <char>byte
                to += 1
                continue
            to[0] = b"\\"
            if byte >= 0x20:
                to[1] = <char>byte
                to += 2
                continue
            memcpy(to + 1, b"u00", 3)
            to[4] = DIGITS[byte >> 4]
            to[5] = DIGITS[byte & 15]
            to += 6
        self.size = to - self.data
        return 0

    cdef int put_hex(self, const uint8_t *data, Py_ssize_t size) except -1:
        cdef Py_ssize_t i
        cdef char *to
        self.reserve(2 * size)
        to = self.data + self.size
        for i in range(size):
            to[2 * i] = DIGITS[data[i] >> 4]
            to[2 * i + 1] = DIGITS[data[i] & 15]
        self.size += 2 * size
        return 0

    cdef int put_encoded(self, Kind kind, const uint8_t *data, Py_ssize_t size) except -1:
        """Write bytes as JSON for TEXT, and as digits for HEX."""
        return self.put_json(data, size) if kind == K_TEXT else self.put_hex(data, size)


cdef int _read_integers(tuple fields, Integers *integers) except -1:
    """Write a tuple `integers` of the caller to a struct."""
    width, codes, presence, base = fields
    integers.width = width
    integers.codes = <const uint8_t *><size_t>codes
    integers.presence = <const uint8_t *><size_t>presence
    integers.base = <uint64_t><int64_t>base
    return 0


cdef int _read_part(tuple fields, Part *part, Py_ssize_t row_count) except -1:
    """Write a part of the caller to a struct. The struct is valid while `fields` is alive."""
    part.kind = <Kind><int>fields[0]
    part.prefix_size = part.suffix_size = 0
    if part.kind == K_CHOICE:
        if len(fields[1]) != row_count:
            raise IndexError("a choice is needed for each row")
        return 0
    part.prefix = PyBytes_AS_STRING(fields[1])
    part.prefix_size = PyBytes_GET_SIZE(fields[1])
    if part.kind == K_NUMBER:
        _read_integers(fields[2], &part.numbers)
    if part.kind in (K_ITEMS, K_TEXT, K_HEX):
        part.suffix = PyBytes_AS_STRING(fields[2])
        part.suffix_size = PyBytes_GET_SIZE(fields[2])
    if part.kind == K_ITEMS:
        _read_integers(fields[3], &part.numbers)
        _read_integers(fields[4], &part.values)
        part.total = fields[5]
        part.passed_rows = part.passed_values = 0
    if part.kind in (K_TEXT, K_HEX):
        width, codes, presence, common, lengths, lengths_width, ends, tails = fields[3]
        part.width = width
        part.codes = <const uint8_t *><size_t>codes
        part.presence = <const uint8_t *><size_t>presence
        part.common = <const uint8_t *>PyBytes_AS_STRING(common)
        part.common_size = PyBytes_GET_SIZE(common)
        part.lengths = <const uint8_t *><size_t>lengths
        part.lengths_width = lengths_width
        part.ends = <const uint32_t *><size_t>ends
        part.tails = <const uint8_t *><size_t>tails
    return 0


cdef inline bint _is_present(const uint8_t *presence, int64_t row) noexcept nogil:
    return presence == NULL or (presence[row >> 3] >> (row & 7)) & 1


cdef inline int64_t _read_integer(const Integers *integers, int64_t row) noexcept nogil:
    """Return the integer of a row in which it is not absent."""
    cdef uint64_t code = 0
    if integers.width == 1:
        code = integers.codes[row]
    elif integers.width:
        memcpy(&code, integers.codes + row * integers.width, integers.width)
    return <int64_t>(integers.base + code)


cdef inline int64_t _read_size(const Integers *sizes, int64_t row) noexcept nogil:
    """Return the size of the list of one row, or 0 if the list is absent."""
    return max(0, _read_integer(sizes, row)) if _is_present(sizes.presence, row) else 0


cdef int64_t _sum_sizes(const Integers *sizes, int64_t first, int64_t end) noexcept nogil:
    """Return the sum of the sizes of the lists of the rows [first, end)."""
    cdef int64_t row, total = 0, base = <int64_t>sizes.base
    if sizes.presence == NULL and base >= 0 and sizes.width <= 1:
        if sizes.width:
            for row in range(first, end):
                total += sizes.codes[row]
        return total + base * (end - first)
    for row in range(first, end):
        total += _read_size(sizes, row)
    return total


cdef int _write_number(_Output output, Part *part, int64_t row) except -1:
    if not _is_present(part.numbers.presence, row):
        return 0
    output.put(part.prefix, part.prefix_size)
    return output.put_number(_read_integer(&part.numbers, row))


cdef int _write_text(_Output output, Part *part, int64_t row) except -1:
    """Write a TEXT or HEX part. A text is the common bytes, the bytes of its code, and its tail."""
    cdef uint64_t code = 0
    cdef uint32_t length = 0, end
    cdef uint8_t head[8]
    cdef int k
    if not _is_present(part.presence, row):
        return 0
    output.put(part.prefix, part.prefix_size)
    output.put_encoded(part.kind, part.common, part.common_size)
    if part.width:
        memcpy(&code, part.codes + row * part.width, part.width)
        memcpy(&length, part.lengths + row * part.lengths_width, part.lengths_width)
        for k in range(part.width):  # the first byte of the text is the highest byte of the code
            head[k] = <uint8_t>(code >> (8 * (part.width - 1 - k)))
        output.put_encoded(part.kind, head, min(length, <uint32_t>part.width))
        if length > <uint32_t>part.width:
            end = part.ends[row]
            length -= part.width
            output.put_encoded(part.kind, part.tails + end - length, length)
    output.put(part.suffix, part.suffix_size)
    return 0


cdef int _write_items(_Output output, Part *part, int64_t row) except -1:
    cdef int64_t position, first, size
    if row < part.passed_rows:  # the rows do not ascend, so add up the sizes from the first row again
        part.passed_rows = part.passed_values = 0
    first = part.passed_values + _sum_sizes(&part.numbers, part.passed_rows, row)
    part.passed_rows, part.passed_values = row, first
    size = _read_size(&part.numbers, row)
    if size == 0:
        return 0
    if first < 0 or size > part.total - first:
        raise ValueError("its lists have more values than the block contains")
    output.put(part.prefix, part.prefix_size)
    for position in range(first, first + size):
        if position > first:
            output.put(b",", 1)
        # The integer that represents an absent value is absent, too.
        if _is_present(part.values.presence, position):
            output.put_number(_read_integer(&part.values, position))
        else:
            output.put_number(INT64_MIN)
    output.put(part.suffix, part.suffix_size)
    return 0


def write(const int64_t[::1] rows, tuple parts, Py_ssize_t block_rows, bytes separator):
    """Return the text of each row, with `separator` between the texts. Lists cost the least if the rows ascend.

    Raises IndexError for a row that the block does not have, and ValueError if the lists of a part are longer than its
    values.
    """
    cdef Py_ssize_t i, p, count = len(parts)
    cdef int64_t row
    cdef bytes fragment
    cdef Part *part
    cdef _Output output = _Output()
    cdef Part *read_parts = <Part *>PyMem_Malloc(max(1, count) * sizeof(Part))
    if read_parts == NULL:
        raise MemoryError
    try:
        for p in range(count):
            _read_part(parts[p], &read_parts[p], rows.shape[0])
        for i in range(rows.shape[0]):
            row = rows[i]
            if row < 0 or row >= block_rows:
                raise IndexError(f"the block has {block_rows} rows, not row {row}")
            if i:
                output.put(PyBytes_AS_STRING(separator), PyBytes_GET_SIZE(separator))
            for p in range(count):
                part = &read_parts[p]
                if part.kind == K_CONSTANT:
                    output.put(part.prefix, part.prefix_size)
                elif part.kind == K_CHOICE:
                    fragment = (<list>(<tuple>parts[p])[1])[i]
                    output.put(PyBytes_AS_STRING(fragment), PyBytes_GET_SIZE(fragment))
                elif part.kind == K_NUMBER:
                    _write_number(output, part, row)
                elif part.kind == K_ITEMS:
                    _write_items(output, part, row)
                else:
                    _write_text(output, part, row)
        return PyBytes_FromStringAndSize(output.data, output.size)
    finally:
        PyMem_Free(read_parts)
