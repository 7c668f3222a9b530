"""The repeated values of all rows: growing buffers, sorted by column at the end.

An element takes at least a byte of the file, so the file bounds the buffers. Column ids are numbered as *slots* in the
order of their first occurrence, with one numbering for all maps of a file.
"""

from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint32_t
from libc.stdlib cimport realloc
from libc.string cimport memcmp

from seamark.formats.iceberg.manifests._avro cimport FINE, NOT_32_BITS, OUT_OF_MEMORY, TOO_MANY_COLUMNS
from seamark.formats.iceberg.manifests._memory cimport retake

cdef enum:
    COLUMNS_MAX = 1 << 17  # distinct column ids in one file
    PROBES_MAX = 256  # far more than ids that were not chosen to collide ever need in a table a quarter full
    SCRATCH_MAX = 4  # fields of a group's element

ctypedef struct Group:
    bint by_column  # a map by column id, else a list of elements
    int32_t first  # its scratch columns, as many as width: an element while it is read
    int32_t width
    int32_t counts  # the column that takes each row's number of elements; -1: none does
    bint texts[SCRATCH_MAX]  # the fields that have lengths
    int32_t guess  # the slot that the last row's first key had
    int64_t used
    int64_t room
    int64_t* starts  # where each row's elements begin
    int32_t* slots
    int64_t* values[SCRATCH_MAX]  # a map's keys are in slots, and its values in values[1]
    int32_t* lengths[SCRATCH_MAX]

ctypedef struct Slots:
    int32_t* ids  # column id by slot
    int32_t used
    int32_t room
    int32_t* table  # open addressing over slots, -1 where free
    uint32_t mask


cdef inline void* resized(void* array, Group* group, int64_t room, size_t width) noexcept nogil:
    return retake(array, group.used * width, group.room * width, room * width)


cdef inline int grow(Group* group, int64_t room) noexcept nogil:
    """Room for so many elements, more than before; 0, or -1 when there is no memory."""
    cdef void* moved
    cdef int i
    if group.by_column:
        moved = resized(group.slots, group, room, sizeof(int32_t))
        if moved == NULL:
            return -1
        group.slots = <int32_t*>moved
    for i in range(1 if group.by_column else 0, group.width):
        moved = resized(group.values[i], group, room, sizeof(int64_t))
        if moved == NULL:
            return -1
        group.values[i] = <int64_t*>moved
        if group.texts[i]:
            moved = resized(group.lengths[i], group, room, sizeof(int32_t))
            if moved == NULL:
                return -1
            group.lengths[i] = <int32_t*>moved
    group.room = room
    return 0


cdef inline int grow_twice(Group* group) noexcept nogil:
    return grow(group, 2 * group.room if group.room else 1024)


cdef inline uint32_t home(const Slots* slots, int32_t id) noexcept nogil:
    return (<uint32_t>id * 2654435769U >> 7) & slots.mask


cdef inline int rehash(Slots* slots) noexcept nogil:
    """Twice the slots, in a table that is a quarter full at most; 0, or -1 when there is no memory."""
    cdef int32_t room = 2 * slots.room if slots.room else 64
    cdef uint32_t at
    cdef int32_t i
    cdef int32_t* ids = <int32_t*>realloc(slots.ids, room * sizeof(int32_t))
    if ids == NULL:
        return -1
    slots.ids = ids
    cdef int32_t* table = <int32_t*>realloc(slots.table, 4 * <size_t>room * sizeof(int32_t))
    if table == NULL:
        return -1
    slots.table = table
    slots.mask = 4 * <uint32_t>room - 1
    slots.room = room
    for i in range(4 * room):
        table[i] = -1
    for i in range(slots.used):
        at = home(slots, ids[i])
        while table[at] >= 0:
            at = (at + 1) & slots.mask
        table[at] = i
    return 0


cdef inline int find_slot(Slots* slots, int32_t id, int32_t* out) noexcept nogil:
    """The slot of a column id, a new slot when it is met first."""
    cdef uint32_t at
    cdef int probes
    if slots.used == slots.room and rehash(slots) < 0:
        return OUT_OF_MEMORY
    at = home(slots, id)
    for probes in range(PROBES_MAX):
        if slots.table[at] < 0:
            break
        if slots.ids[slots.table[at]] == id:
            out[0] = slots.table[at]
            return FINE
        at = (at + 1) & slots.mask
    else:
        return TOO_MANY_COLUMNS
    if slots.used == COLUMNS_MAX:
        return TOO_MANY_COLUMNS
    slots.table[at] = slots.used
    slots.ids[slots.used] = id
    out[0] = slots.used
    slots.used += 1
    return FINE


cdef inline int slot_of(Slots* slots, int64_t key, int32_t* slot) noexcept nogil:
    """The slot of a map's key. `slot` is tried first: writers repeat the order of their columns."""
    if slot[0] < slots.used and slots.ids[slot[0]] == key:
        return FINE
    if not INT32_MIN <= key <= INT32_MAX:
        return NOT_32_BITS
    return find_slot(slots, <int32_t>key, slot)


cdef inline int append_by_column(
    Slots* slots, Group* group, int64_t key, int64_t value, int32_t length, int32_t* guess
) noexcept nogil:
    """One entry of a map by column id."""
    cdef int error = slot_of(slots, key, guess)
    if error != FINE:
        return error
    if group.used == group.room and grow_twice(group) < 0:
        return OUT_OF_MEMORY
    group.slots[group.used] = guess[0]
    group.values[1][group.used] = value
    if group.texts[1]:
        group.lengths[1][group.used] = length
    group.used += 1
    guess[0] += 1
    return FINE


cdef inline void scatter(
    Group* group, int64_t live, int32_t slots, int64_t* begins, int64_t* ends,
    int32_t* rows, int64_t* values, int32_t* lengths,
) noexcept nogil:
    """Order a map's entries of `live` rows by column, and by row within one, by counting.

    Column s gets [begins[s], ends[s]) of `rows`, `values` and `lengths` (NULL when the values are numbers). `ends` is
    zeroed before. A column that one row names twice keeps the last value, as a map would.
    """
    cdef int64_t i, row, end, to, total = 0
    cdef int32_t slot
    for i in range(group.used):
        ends[group.slots[i]] += 1
    for slot in range(slots):
        begins[slot] = total
        total += ends[slot]
        ends[slot] = begins[slot]
    for row in range(live):
        end = group.starts[row + 1] if row + 1 < live else group.used
        for i in range(group.starts[row], end):
            slot = group.slots[i]
            to = ends[slot]
            if to > begins[slot] and rows[to - 1] == row:
                to -= 1
            rows[to] = <int32_t>row
            values[to] = group.values[1][i]
            if lengths != NULL:
                lengths[to] = group.lengths[1][i]
            ends[slot] = to + 1


cdef inline int64_t row_width(const Group* group, int64_t live, int64_t* met) noexcept nogil:
    """How many columns each of `live` rows names, when all name the same columns, each once, in one order; else 0.
    `met` has a zero for each slot."""
    cdef int64_t width, i
    if live == 0 or group.used % live:
        return 0
    width = group.used // live
    for i in range(live):
        if group.starts[i] != i * width or memcmp(group.slots, group.slots + i * width, width * sizeof(int32_t)):
            return 0
    for i in range(width):
        if met[group.slots[i]]:
            return 0
        met[group.slots[i]] = 1
    return width


cdef inline void transpose(
    const Group* group, int64_t live, int64_t width, int64_t* values, int32_t* lengths
) noexcept nogil:
    """As `scatter` where each row names the same columns: by the order of their columns in a row. `lengths` is NULL
    when the values are numbers."""
    cdef int64_t first, last, column, row
    for first in range(0, live, 64):  # so many rows as stay in the cache while all columns are taken from them
        last = min(first + 64, live)
        for column in range(width):
            for row in range(first, last):
                values[column * live + row] = group.values[1][row * width + column]
            if lengths != NULL:
                for row in range(first, last):
                    lengths[column * live + row] = group.lengths[1][row * width + column]
