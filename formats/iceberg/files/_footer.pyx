"""Walks Parquet's Thrift structures (compact protocol) without building objects, and changes numbers in their bytes.

A footer can describe thousands of column chunks. It is patched: only offsets and lengths get new bytes, and all other
bytes are copied, including fields of later Parquet versions. The bytes are untrusted. So each read is checked to be
within the data, the depth of nested structures is bounded, and invalid bytes raise ValueError.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

cdef enum:  # types of the compact protocol
    TRUE = 1
    FALSE = 2
    I8 = 3
    I16 = 4
    I32 = 5
    I64 = 6
    DOUBLE = 7
    BINARY = 8
    LIST = 9
    SET = 10
    MAP = 11
    STRUCT = 12

cdef enum:
    DEPTH_MAX = 64
    VARINT_MAX = 10  # bytes of a 64-bit number

# The columns of the table of chunks: first START and END of the chunk, then (value, begin, end) of each field below. A
# field that the chunk does not have has -1 as its begin.
cdef enum:
    # In the order of the bytes. These fields can be patched:
    FILE_OFFSET
    PATH
    PLAIN_BYTES
    PACKED_BYTES
    DATA_PAGE
    INDEX_PAGE
    DICTIONARY_PAGE
    BLOOM
    BLOOM_LENGTH
    OFFSET_INDEX
    OFFSET_INDEX_LENGTH
    COLUMN_INDEX
    COLUMN_INDEX_LENGTH
    PATCHED
    # These fields are only read:
    TYPE = PATCHED
    CODEC
    VALUES
    FILE_PATH
    ENCRYPTED
    FIELDS

WIDTH = 2 + 3 * FIELDS
PATCHED_FIELDS = PATCHED
NAMES = (
    "file_offset", "path", "plain_bytes", "packed_bytes", "data_page", "index_page", "dictionary_page", "bloom",
    "bloom_length", "offset_index", "offset_index_length", "column_index", "column_index_length", "type", "codec",
    "values", "file_path", "encrypted",
)

cdef struct Cursor:
    const uint8_t* data
    Py_ssize_t size
    Py_ssize_t at
    const char* error


cdef inline int fail(Cursor* c, const char* reason) noexcept nogil:
    """Record the reason of a failure, and return -1."""
    c.error = reason
    return -1


cdef inline int varint(Cursor* c, uint64_t* value) noexcept nogil:
    """Read an unsigned number (LEB128). Returns 0, or -1 on an error."""
    cdef uint64_t total = 0
    cdef int shift = 0
    cdef uint8_t byte
    while True:
        if c.at >= c.size:
            return fail(c, b"it ends within a number")
        byte = c.data[c.at]
        c.at += 1
        total |= (<uint64_t>(byte & 0x7F)) << shift
        if byte < 0x80:
            value[0] = total
            return 0
        shift += 7
        if shift > 63:
            return fail(c, b"a number is longer than 64 bits")


cdef inline int number(Cursor* c, int64_t* value) noexcept nogil:
    """Read a signed number (zigzag). Returns 0, or -1 on an error."""
    cdef uint64_t raw
    if varint(c, &raw) < 0:
        return -1
    value[0] = <int64_t>(raw >> 1) ^ -<int64_t>(raw & 1)
    return 0


cdef inline int header(Cursor* c, int64_t* field, int* kind) noexcept nogil:
    """Read the header of a field. Returns 1 for a field, 0 at the end of a structure, and -1 on an error."""
    cdef uint8_t byte
    if c.at >= c.size:
        return fail(c, b"it ends within a structure")
    byte = c.data[c.at]
    c.at += 1
    if byte == 0:
        return 0
    kind[0] = byte & 15
    if byte >> 4:
        field[0] += byte >> 4
    elif number(c, field) < 0:
        return -1
    if field[0] < -32768 or field[0] > 32767:
        return fail(c, b"a field id exceeds 16 bits")
    return 1


cdef int list_header(Cursor* c, Py_ssize_t* count, int* kind) noexcept nogil:
    """Read the number and the type of a list's items. Returns 0, or -1 on an error."""
    cdef uint64_t size
    if c.at >= c.size:
        return fail(c, b"it ends before a list")
    size = c.data[c.at] >> 4
    kind[0] = c.data[c.at] & 15
    c.at += 1
    if size == 15 and varint(c, &size) < 0:
        return -1
    if size > <uint64_t>(c.size - c.at):  # each item takes at least a byte
        return fail(c, b"a list is longer than the data")
    count[0] = <Py_ssize_t>size
    return 0


cdef int skip(Cursor* c, int kind, int depth) noexcept nogil:
    """Skip a value. Returns 0, or -1 on an error."""
    cdef uint64_t raw
    cdef int64_t field = 0
    cdef Py_ssize_t count, i
    cdef int inner = 0, status
    if depth > DEPTH_MAX:
        return fail(c, b"structures are too deep")
    if kind == TRUE or kind == FALSE:
        return 0
    if kind == I16 or kind == I32 or kind == I64:
        return varint(c, &raw)
    if kind == I8 or kind == DOUBLE:
        raw = 1 if kind == I8 else 8
    elif kind == BINARY:
        if varint(c, &raw) < 0:
            return -1
    elif kind == LIST or kind == SET:
        if list_header(c, &count, &inner) < 0:
            return -1
        if inner == TRUE or inner == FALSE or inner == I8:
            raw = <uint64_t>count
        else:
            for i in range(count):
                if skip(c, inner, depth + 1) < 0:
                    return -1
            return 0
    elif kind == STRUCT:
        while True:
            status = header(c, &field, &inner)
            if status <= 0:
                return status
            if skip(c, inner, depth + 1) < 0:
                return -1
    else:
        return fail(c, b"a type is unknown")
    if raw > <uint64_t>(c.size - c.at):
        return fail(c, b"a value exceeds the data")
    c.at += <Py_ssize_t>raw
    return 0


cdef Cursor cursor_of(const uint8_t[::1] data, Py_ssize_t at) except *:
    """Return a cursor at an offset of the data. Raises ValueError if the offset is outside of the data."""
    cdef Cursor c
    if at < 0 or at >= data.shape[0]:
        raise ValueError(f"there is no Thrift structure at {at} of {data.shape[0]} bytes")
    c.data = &data[0]
    c.size = data.shape[0]
    c.at = at
    c.error = NULL
    return c


cdef object make_error(Cursor* c):
    """Return the error of a cursor."""
    reason = (<bytes>c.error).decode() if c.error != NULL else "it is no Thrift structure"
    return ValueError(f"invalid Thrift structure at {c.at}: {reason}")


cdef bint next_field(Cursor* c, int64_t* field, int* kind) except -1:
    """Read the header of the next field. Returns False at the end of the structure. Raises ValueError for invalid
    bytes."""
    cdef int status = header(c, field, kind)
    if status < 0:
        raise make_error(c)
    return status


cdef int step_over(Cursor* c, int kind, int depth) except -1:
    """Skip a value of the type `kind`. Raises ValueError for invalid bytes."""
    if skip(c, kind, depth) < 0:
        raise make_error(c)
    return 0


cdef int64_t read_number(Cursor* c) except? -1:
    """Read a number. Raises ValueError for invalid bytes."""
    cdef int64_t value = 0
    if number(c, &value) < 0:
        raise make_error(c)
    return value


cdef Py_ssize_t structures(Cursor* c, str what) except -1:
    """Read the header of a list of structures, and return how many structures it has. Raises ValueError if the list has
    items of another type."""
    cdef Py_ssize_t count, at = c.at
    cdef int kind = 0
    if list_header(c, &count, &kind) < 0:
        raise make_error(c)
    if count and kind != STRUCT:
        raise ValueError(f"the list at {at} has items of type {kind}, not {what}")
    return count


def spans(const uint8_t[::1] data, Py_ssize_t at):
    """Return the fields of the structure at `at` as (id, type, begin of the value, end of the value), and the end of
    the structure."""
    cdef Cursor c = cursor_of(data, at)
    cdef int64_t field = 0
    cdef int kind = 0
    cdef Py_ssize_t begin
    found = []
    while next_field(&c, &field, &kind):
        begin = c.at
        step_over(&c, kind, 1)
        found.append((field, kind, begin, c.at))
    return found, c.at


def items(const uint8_t[::1] data, Py_ssize_t at):
    """Return where each structure of the list at `at` begins, and, as the last number, where the last structure
    ends."""
    cdef Cursor c = cursor_of(data, at)
    cdef Py_ssize_t count = structures(&c, "structures"), i
    begins = []
    for i in range(count):
        begins.append(c.at)
        step_over(&c, STRUCT, 1)
    begins.append(c.at)
    return begins


cdef inline void write_field(int64_t* row, int field, int64_t value, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
    """Write a value, and the range of its bytes, into the columns that the table has for `field`."""
    row[2 + 3 * field] = value
    row[3 + 3 * field] = begin
    row[4 + 3 * field] = end


cdef int take(Cursor* c, int64_t* row, int field, int kind) noexcept nogil:
    """Read a number, and write it into the columns that the table has for `field`."""
    cdef int64_t value = 0
    cdef Py_ssize_t begin = c.at
    if kind != I32 and kind != I64 and kind != I16:
        return fail(c, b"an offset or size is not a number")
    if number(c, &value) < 0:
        return -1
    if row[3 + 3 * field] >= 0:
        return fail(c, b"a field is repeated")
    write_field(row, field, value, begin, c.at)
    return 0


cdef inline int check_items(Cursor* c, int kind, int items) noexcept nogil:
    """Return -1 if the list at the cursor has items of another type than `items`, and 0 otherwise. A reader that knows
    the schema ignores the type that a list states. It would then read the bytes after the list as other fields than
    this module does."""
    if kind == LIST and c.at < c.size and (c.data[c.at] >> 4) != 0 and (c.data[c.at] & 15) != items:
        return fail(c, b"a list has items of another type")
    return 0


cdef int skip_lists(Cursor* c, int items, int depth) noexcept nogil:
    """Skip a structure. Each list in it must have items of the type `items`."""
    cdef int64_t field = 0
    cdef int kind = 0, status
    while True:
        status = header(c, &field, &kind)
        if status <= 0:
            return status
        if check_items(c, kind, items) < 0 or skip(c, kind, depth) < 0:
            return -1


cdef int read_metadata(Cursor* c, int64_t* row) noexcept nogil:
    """Read a ColumnMetaData structure into the row of its chunk."""
    cdef int64_t field = 0
    cdef int kind = 0, status, column
    cdef Py_ssize_t begin
    while True:
        status = header(c, &field, &kind)
        if status <= 0:
            return status
        column = -1
        if field == 1:
            column = TYPE
        elif field == 4:
            column = CODEC
        elif field == 5:
            column = VALUES
        elif field == 6:
            column = PLAIN_BYTES
        elif field == 7:
            column = PACKED_BYTES
        elif field == 9:
            column = DATA_PAGE
        elif field == 10:
            column = INDEX_PAGE
        elif field == 11:
            column = DICTIONARY_PAGE
        elif field == 14:
            column = BLOOM
        elif field == 15:
            column = BLOOM_LENGTH
        if column >= 0:
            if take(c, row, column, kind) < 0:
                return -1
            continue
        begin = c.at
        if kind == STRUCT and (field == 16 or field == 17):  # SizeStatistics, GeospatialStatistics
            if skip_lists(c, I64 if field == 16 else I32, 4) < 0:
                return -1
            continue
        if field == 2 or field == 3 or field == 8 or field == 13:
            # The encodings, the path, the key-value pairs, and the statistics of encodings.
            if check_items(c, kind, I32 if field == 2 else BINARY if field == 3 else STRUCT) < 0:
                return -1
        if skip(c, kind, 3) < 0:
            return -1
        if field == 3:
            if row[3 + 3 * PATH] >= 0:
                return fail(c, b"a field is repeated")
            write_field(row, PATH, 0, begin, c.at)


cdef int read_crypto(Cursor* c) noexcept nogil:
    """Skip a ColumnCryptoMetaData structure."""
    cdef int64_t field = 0
    cdef int kind = 0, status
    while True:
        status = header(c, &field, &kind)
        if status <= 0:
            return status
        if kind == STRUCT:
            if skip_lists(c, BINARY, 4) < 0:
                return -1
        elif skip(c, kind, 3) < 0:
            return -1


cdef int read_chunk(Cursor* c, int64_t* row) noexcept nogil:
    """Read a ColumnChunk structure into its row of the table."""
    cdef int64_t field = 0
    cdef int kind = 0, status, column
    cdef Py_ssize_t begin
    cdef int i
    cdef int64_t last = 0
    row[0] = c.at
    for i in range(FIELDS):
        write_field(row, i, -1, -1, -1)
    while True:
        status = header(c, &field, &kind)
        if status < 0:
            return -1
        if status == 0:
            break
        column = -1
        if field == 2:
            column = FILE_OFFSET
        elif field == 4:
            column = OFFSET_INDEX
        elif field == 5:
            column = OFFSET_INDEX_LENGTH
        elif field == 6:
            column = COLUMN_INDEX
        elif field == 7:
            column = COLUMN_INDEX_LENGTH
        if column >= 0:
            if take(c, row, column, kind) < 0:
                return -1
            continue
        begin = c.at
        if field == 3 and kind == STRUCT:
            if read_metadata(c, row) < 0:
                return -1
            continue
        if field == 8 and kind == STRUCT:  # this structure has the column's path if the column has its own key
            if read_crypto(c) < 0:
                return -1
        elif skip(c, kind, 2) < 0:
            return -1
        if field == 1:
            write_field(row, FILE_PATH, 1, begin, c.at)
        elif field == 8 or field == 9:
            write_field(row, ENCRYPTED, 1, begin, c.at)
    row[1] = c.at
    for i in range(PATCHED):
        if row[3 + 3 * i] >= 0:
            if row[3 + 3 * i] < last:
                return fail(c, b"the fields of a column chunk are not in ascending order")
            last = row[4 + 3 * i]
    return 0


def locate_chunks(const uint8_t[::1] data, Py_ssize_t at, int64_t[:, ::1] table):
    """Fill the table, int64[n, WIDTH], with the column chunks of the list at `at`. Raises ValueError if the list does
    not have n column chunks."""
    cdef Cursor c = cursor_of(data, at)
    cdef Py_ssize_t count, i
    if table.shape[1] != WIDTH:
        raise ValueError(f"the table has {table.shape[1]} columns, not {WIDTH}")
    count = structures(&c, "column chunks")
    if count != table.shape[0]:
        raise ValueError(f"a row group has {count} columns and the schema {table.shape[0]}")
    for i in range(count):
        if read_chunk(&c, &table[i, 0]) < 0:
            raise make_error(&c)


cdef inline Py_ssize_t put(uint8_t* out, int64_t value) noexcept nogil:
    """Write a signed number as `number` reads it, and return how many bytes it takes."""
    cdef uint64_t raw = (<uint64_t>value << 1) ^ <uint64_t>(value >> 63)
    cdef Py_ssize_t n = 0
    while raw >= 0x80:
        out[n] = <uint8_t>(raw & 0x7F) | 0x80
        raw >>= 7
        n += 1
    out[n] = <uint8_t>raw
    return n + 1


def patch_chunks(const uint8_t[::1] data, const int64_t[:, ::1] table, const int64_t[:, ::1] values, paths):
    """Return the bytes of each chunk of the table with other numbers.

    `values`, int64[n, PATCHED_FIELDS], has the new numbers. A field that the chunk does not have is not added. `paths`
    is a list with the new encoded path of each chunk, or None for a chunk that keeps its path.
    """
    cdef Py_ssize_t i, at, n, begin, size
    cdef int field
    cdef const uint8_t* source = &data[0]
    cdef uint8_t* out
    cdef const uint8_t[::1] path
    result = []
    if table.shape[1] != WIDTH or values.shape[1] != PATCHED or values.shape[0] != table.shape[0]:
        raise ValueError("the tables have another shape")
    if len(paths) != table.shape[0]:
        raise ValueError("there is not one path for each chunk")
    for i in range(table.shape[0]):
        given = paths[i]
        size = table[i, 1] - table[i, 0] + PATCHED * VARINT_MAX + (len(given) if given is not None else 0)
        if table[i, 0] < 0 or table[i, 1] > data.shape[0] or size <= 0:
            raise ValueError("a chunk is outside of the data")
        out = <uint8_t*>malloc(size)
        if out == NULL:
            raise MemoryError
        try:
            at, n = table[i, 0], 0
            for field in range(PATCHED):
                begin = table[i, 3 + 3 * field]
                if begin < 0 or (field == PATH and given is None):
                    continue
                if begin < at or table[i, 4 + 3 * field] < begin or table[i, 4 + 3 * field] > table[i, 1]:
                    raise ValueError("a field is outside of its chunk")
                memcpy(out + n, source + at, begin - at)
                n += begin - at
                if field == PATH:
                    path = given
                    memcpy(out + n, &path[0], path.shape[0])
                    n += path.shape[0]
                else:
                    n += put(out + n, values[i, field])
                at = table[i, 4 + 3 * field]
            memcpy(out + n, source + at, table[i, 1] - at)
            n += table[i, 1] - at
            result.append(PyBytes_FromStringAndSize(<char*>out, n))
        finally:
            free(out)
    return result


def shift_pages(const uint8_t[::1] data, int64_t begin, int64_t end, int64_t by):
    """Return the OffsetIndex in `data` with `by` added to all page offsets. Raises ValueError if `data` is no
    OffsetIndex, or if a page is outside of the chunk's bytes [begin, end)."""
    cdef Cursor c = cursor_of(data, 0)
    cdef int64_t field = 0, inner_field, offset, packed
    cdef int kind = 0, inner = 0
    cdef Py_ssize_t i, at = 0
    parts = []
    cdef uint8_t encoded[VARINT_MAX]
    while next_field(&c, &field, &kind):
        if field != 1 or kind != LIST:
            step_over(&c, kind, 1)
            continue
        for i in range(structures(&c, "pages")):
            inner_field, offset, packed = 0, -1, -1
            while next_field(&c, &inner_field, &inner):
                if inner_field == 1 and inner == I64:
                    parts.append(bytes(data[at : c.at]))
                    offset = read_number(&c)
                    if offset < begin or offset >= end:
                        raise ValueError(f"an offset index has a page at {offset}, outside of its column chunk")
                    parts.append(PyBytes_FromStringAndSize(<char*>encoded, put(encoded, offset + by)))
                    at = c.at
                elif inner_field == 2 and inner == I32:
                    packed = read_number(&c)
                else:
                    step_over(&c, inner, 3)
            if offset < 0 or packed < 0 or packed > end - offset:
                raise ValueError(f"an offset index has a page of {packed} bytes at {offset}, outside of its chunk")
    parts.append(bytes(data[at : c.at]))
    return b"".join(parts)


def move_pages(const uint8_t[::1] data, const int64_t[:, ::1] pages):
    """Return the OffsetIndex in `data` with other offsets and sizes of its pages.

    `pages`, int64[n, 3], has the old offset, the new offset and the new size of each page of the chunk, in ascending
    order. Raises ValueError if `data` is no OffsetIndex, or if `pages` lacks a page of it.
    """
    cdef Cursor c = cursor_of(data, 0)
    cdef int64_t field = 0, inner_field, offset
    cdef int kind = 0, inner = 0
    cdef Py_ssize_t i, at = 0, page = 0
    parts = []
    cdef uint8_t encoded[VARINT_MAX]
    if pages.shape[1] != 3:
        raise ValueError("the table of pages has another shape")
    while next_field(&c, &field, &kind):
        if field != 1 or kind != LIST:
            step_over(&c, kind, 1)
            continue
        for i in range(structures(&c, "pages")):
            inner_field, offset = 0, -1
            while next_field(&c, &inner_field, &inner):
                if inner_field == 1 and inner == I64:
                    parts.append(bytes(data[at : c.at]))
                    offset = read_number(&c)
                    while page < pages.shape[0] and pages[page, 0] < offset:
                        page += 1
                    if page == pages.shape[0] or pages[page, 0] != offset:
                        raise ValueError(f"an offset index has a page at {offset}, where its column chunk has none")
                    parts.append(PyBytes_FromStringAndSize(<char*>encoded, put(encoded, pages[page, 1])))
                    at = c.at
                elif inner_field == 2 and inner == I32:
                    if offset < 0:
                        raise ValueError("an offset index has a page without an offset")
                    parts.append(bytes(data[at : c.at]))
                    read_number(&c)
                    parts.append(PyBytes_FromStringAndSize(<char*>encoded, put(encoded, pages[page, 2])))
                    at = c.at
                else:
                    step_over(&c, inner, 3)
    parts.append(bytes(data[at : c.at]))
    return b"".join(parts)


def page_details(const uint8_t[::1] data):
    """Read the header of a page. Returns (end of the page header, page type, bytes in the file, number of values, CRC
    or None, bytes of levels). The levels are the repetition and definition levels that precede the values of a data
    page of version 2."""
    cdef Cursor c = cursor_of(data, 0)
    cdef int64_t field = 0, inner_field, value
    cdef int64_t kind_of_page = -1, packed = -1, values = 0, levels = 0
    cdef int kind = 0, inner = 0
    crc = None
    while next_field(&c, &field, &kind):
        if kind == I32 and field == 1:
            kind_of_page = read_number(&c)
        elif kind == I32 and field == 3:
            packed = read_number(&c)
        elif kind == I32 and field == 4:
            crc = read_number(&c)
        elif kind == STRUCT and (field == 5 or field == 8):
            inner_field = 0
            while next_field(&c, &inner_field, &inner):
                if inner == I32 and (inner_field == 1 or (field == 8 and (inner_field == 5 or inner_field == 6))):
                    value = read_number(&c)
                    if value < 0:
                        raise ValueError("a page header has a negative size")
                    if inner_field == 1:
                        values = value
                    else:
                        levels += value
                else:
                    step_over(&c, inner, 2)
        else:
            step_over(&c, kind, 1)
    if kind_of_page < 0 or packed < 0 or levels > packed:
        raise ValueError("a page header lacks a size")
    return c.at, kind_of_page, packed, values, crc, levels


def resized_header(const uint8_t[::1] data, int64_t packed, int64_t crc):
    """Return the page header in `data` with `packed` as the size of its page in the file. If the header has a CRC,
    `crc` replaces it."""
    cdef Cursor c = cursor_of(data, 0)
    cdef int64_t field = 0
    cdef int kind = 0
    cdef Py_ssize_t at = 0
    cdef uint8_t encoded[VARINT_MAX]
    parts = []
    while next_field(&c, &field, &kind):
        if kind == I32 and (field == 3 or field == 4):
            parts.append(bytes(data[at : c.at]))
            read_number(&c)
            parts.append(PyBytes_FromStringAndSize(<char*>encoded, put(encoded, packed if field == 3 else crc)))
            at = c.at
        else:
            step_over(&c, kind, 1)
    parts.append(bytes(data[at : c.at]))
    return b"".join(parts)


def page_at(const uint8_t[::1] data, Py_ssize_t at):
    """Return (end of the page header at `at`, page type, inflated bytes, bytes in the file, number of values)."""
    cdef Cursor c = cursor_of(data, at)
    cdef int64_t field = 0, inner_field
    cdef int64_t kind_of_page = -1, plain = -1, packed = -1, values = 0
    cdef int kind = 0, inner = 0
    while next_field(&c, &field, &kind):
        if kind == I32 and field == 1:
            kind_of_page = read_number(&c)
        elif kind == I32 and field == 2:
            plain = read_number(&c)
        elif kind == I32 and field == 3:
            packed = read_number(&c)
        elif kind == STRUCT and (field == 5 or field == 8):
            inner_field = 0
            while next_field(&c, &inner_field, &inner):
                if inner_field == 1 and inner == I32:
                    values = read_number(&c)
                else:
                    step_over(&c, inner, 2)
        else:
            step_over(&c, kind, 1)
    if kind_of_page < 0 or plain < 0 or packed < 0 or values < 0:
        raise ValueError(f"the page header at {at} lacks a size")
    return c.at, kind_of_page, plain, packed, values
