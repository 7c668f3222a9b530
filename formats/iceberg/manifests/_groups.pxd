"""Growing buffers for the repeated values of all rows, which are sorted by column at the end.

An element takes at least a byte of the file, so the size of the file bounds the buffers. Column ids are numbered as
*slots* in the order in which they first occur. All maps of a file share one numbering.
"""

from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint32_t
from libc.stdlib cimport realloc
from libc.string cimport memcmp

from seamark.formats.iceberg.manifests._avro cimport FINE, NOT_32_BITS, OUT_OF_MEMORY, TOO_MANY_COLUMNS
from seamark.formats.iceberg.manifests._memory cimport retake

cdef enum:
    COLUMNS_MAX = 1 << 17  # distinct column ids in one file
    PROBES_MAX = 256  # in a table that is a quarter full, no ids need so many probes unless they were chosen to collide
    SCRATCH_MAX = 4  # the most fields of a group's element

ctypedef struct Group:
    bint by_column  # whether the group is a map by column id; otherwise it is a list of elements
    int32_t first  # the first of its `width` scratch columns, which hold an element while it is read
    int32_t width
    int32_t counts  # the column that gets each row's number of elements, or -1 if no column does
    bint texts[SCRATCH_MAX]  # whether each field is a text, which has a length
    int32_t guess  # the slot of the first key of the last row
    int64_t used
    int64_t room
    int64_t* starts  # the place of each row's first element
    int32_t* slots
    int64_t* values[SCRATCH_MAX]  # a map has its keys in `slots`, and its values in values[1]
    int32_t* lengths[SCRATCH_MAX]

ctypedef struct Slots:
    int32_t* ids  # the column id of each slot
    int32_t used
    int32_t room
    int32_t* table  # a hash table of slots with open addressing; -1 marks a free place
    uint32_t mask


cdef inline void* resized(void* array, Group* group, int64_t room, size_t width) noexcept nogil:
    """Return an array of a group with room for `room` elements of `width` bytes, or NULL when there is no memory."""
    return retake(array, group.used * width, group.room * width, room * width)


cdef inline int grow(Group* group, int64_t room) noexcept nogil:
    """Make room for `room` elements, which is more than before. Returns 0, or -1 when there is no memory."""
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
    """Double the room of a group. Returns 0, or -1 when there is no memory."""
    return grow(group, 2 * group.room if group.room else 1024)


cdef inline uint32_t home(const Slots* slots, int32_t id) noexcept nogil:
    """Return the place of the table at which the search for an id begins."""
    return (<uint32_t>id * 2654435769U >> 7) & slots.mask


cdef inline int rehash(Slots* slots) noexcept nogil:
    """Double the number of slots, and build a table that is at most a quarter full. Returns 0, or -1 when there is no
    memory."""
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
    """Look up the slot of a column id. An id that has no slot yet gets a new slot."""
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
    """Look up the slot of a map's key. The slot that `slot` holds is tried first, because writers repeat the order of
    their columns."""
    if slot[0] < slots.used and slots.ids[slot[0]] == key:
        return FINE
    if not INT32_MIN <= key <= INT32_MAX:
        return NOT_32_BITS
    return find_slot(slots, <int32_t>key, slot)


cdef inline int append_by_column(
    Slots* slots, Group* group, int64_t key, int64_t value, int32_t length, int32_t* guess
) noexcept nogil:
    """Append one entry of a map by column id."""
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
    """Order the entries of a map, which are those of `live` rows, by column and then by row. The order is made by
    counting.

    The entries of the column with slot s are written to [begins[s], ends[s]) of `rows`, `values` and `lengths`.
    `lengths` is NULL when the values are numbers. `ends` has only zeros before the call. If one row names a column
    twice, the last value counts, as in a map.
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
    """Return how many columns each of `live` rows names, if all rows name the same columns in the same order, and each
    column once. Returns 0 otherwise. `met` has a zero for each slot."""
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
    """Do the work of `scatter` for rows that all name the same columns. The columns are written in the order in which a
    row names them. `lengths` is NULL when the values are numbers."""
    cdef int64_t first, last, column, row
    for first in range(0, live, 64):  # so many rows stay in the cache while the values of all columns are copied
        last = min(first + 64, live)
        for column in range(width):
            for row in range(first, last):
                values[column * live + row] = group.values[1][row * width + column]
            if lengths != NULL:
                for row in range(first, last):
                    lengths[column * live + row] = group.lengths[1][row * width + column]
