"""Decodes Avro rows into columns: runs a *program* over inflated blocks, without the GIL.

`avro_schema.py` compiles a writer's schema to a program: a tree of nodes, one for each value of the Avro schema. A leaf
that the caller requests names the column that its values are written to. All other values are skipped. Rows are written
directly into arrays. Repeated values of a row (counts and bounds of columns, split offsets, partition summaries) are
appended to *groups*, which are growing buffers. A group that holds maps by column id is sorted by column at the end, by
counting.

No byte is read beyond the data, and no loop or allocation is larger than the remaining bytes justify. A value that
takes no bytes (Avro's null, and a record of nulls) has no node. So the time of a program is linear in the bytes that it
reads, for any counts that the bytes claim.
"""

from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MIN, int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from seamark.formats.iceberg.manifests._avro cimport (
    BAD_BOOLEAN, BAD_ENUM, BAD_UNION, FINE, LEFT_OVER, NEGATIVE, NOT_32_BITS, NOT_64_BITS, NOT_UTF8, NULL_ELEMENT,
    OUT_OF_MEMORY, TOO_LONG, TOO_MANY_COLUMNS, TOO_MANY_ROWS, TRUNCATED, is_utf8, read_count, read_length, read_long,
)
from seamark.formats.iceberg.manifests._groups cimport (
    SCRATCH_MAX, Group, Slots, append_by_column, grow, grow_twice, rehash, row_width, scatter, slot_of, transpose,
)
from seamark.formats.iceberg.manifests._memory cimport Memory, give, take

import numpy as np

from seamark.formats.runtime.errors import Corrupt

MISSING = -(2**63)
"""Represents null in columns of int64, and each value of a column that the writer's schema does not have."""

cdef enum:
    OP_NULL, OP_BOOLEAN, OP_INT, OP_LONG, OP_FLOAT, OP_DOUBLE, OP_BYTES, OP_STRING, OP_FIXED, OP_ENUM
    OP_RECORD, OP_UNION, OP_ARRAY, OP_MAP, OP_COUNTS, OP_BOUNDS

OPS = {
    "null": OP_NULL, "boolean": OP_BOOLEAN, "int": OP_INT, "long": OP_LONG, "float": OP_FLOAT, "double": OP_DOUBLE,
    "bytes": OP_BYTES, "string": OP_STRING, "fixed": OP_FIXED, "enum": OP_ENUM, "record": OP_RECORD,
    "union": OP_UNION, "array": OP_ARRAY, "map": OP_MAP, "counts": OP_COUNTS, "bounds": OP_BOUNDS,
}

MESSAGES = {
    TRUNCATED: "ends in the middle of a value",
    NOT_64_BITS: "a number is longer than 64 bits",
    NOT_32_BITS: "a number does not fit the 32 bits of its type",
    NEGATIVE: "a length or count is negative",
    TOO_LONG: "a length or count is more than the bytes that follow can hold",
    BAD_UNION: "a union names a branch that its schema does not have",
    BAD_ENUM: "an enum names a symbol that its schema does not have",
    BAD_BOOLEAN: "a boolean is neither 0 nor 1",
    NOT_UTF8: "a string is not UTF-8",
    LEFT_OVER: "holds more bytes than its rows take",
    NULL_ELEMENT: "an element of a list is null",
    TOO_MANY_ROWS: "claims more rows than its bytes can hold",
    TOO_MANY_COLUMNS: "holds statistics of more columns than any table has",
}

cdef enum:
    DELETED = 2  # Iceberg spec, manifest entry's status
    ROW_RATIO_MAX = 64  # the most bytes of columns for each decoded byte

ctypedef struct Node:
    int32_t op
    int32_t slot  # the column or the group that gets the value; -1 when the value is skipped
    int64_t size  # fixed: its bytes; enum: its number of symbols; array and map: the fewest bytes of an element
    int32_t first  # its children are kids[first : first + count]
    int32_t count

ctypedef struct Column:
    int64_t* values  # a number, the bits of a double, or where a text begins; NULL in columns of counts
    int32_t* lengths  # the length of a text, or -1 for null; NULL in columns of numbers
    int64_t step  # 0 for a scratch column, which has only one row

ctypedef struct State:
    const Node* nodes
    const int32_t* kids
    Column* columns
    Group* groups
    int32_t groups_count
    Slots slots
    const uint8_t* heap
    const uint8_t* at  # the next byte of the data
    const uint8_t* end
    int64_t row
    int error  # FINE, or the first error, and the node and the block in which it occurred
    int32_t node
    int64_t block


cdef inline int fail(State* state, int error, int32_t node) noexcept nogil:
    """Record an error at a node, and return -1."""
    if state.error == FINE:  # the innermost value that failed describes the error
        state.error = error
        state.node = node
    return -1


cdef inline void write_null(Column* column, int64_t row) noexcept nogil:
    if column.values != NULL:
        column.values[row * column.step] = INT64_MIN
    if column.lengths != NULL:
        column.lengths[row * column.step] = -1


cdef int run_map(State* state, int32_t index, bint bounds) noexcept nogil:
    """Read a map by column id in the layout that all known writers use: an array of records with a plain key and a
    plain value.

    Such maps are most of a manifest. So the variables that change with each entry are kept in locals.
    """
    cdef const Node* node = &state.nodes[index]
    cdef Group* group = &state.groups[node.slot]
    cdef const uint8_t* at = state.at
    cdef const uint8_t* end = state.end
    cdef int64_t count, key, value, used = group.used
    cdef int32_t slot = group.guess
    cdef int32_t length = 0
    cdef int error
    cdef bint first = True
    while True:
        error = read_count(&at, end, 2, &count)
        if error != FINE:
            return fail(state, error, index)
        if count == 0:
            break
        if count > group.room - used:  # `count` is at most half of the bytes that follow
            group.used = used
            if grow(group, max(2 * group.room, used + count + 1024)) < 0:
                return fail(state, OUT_OF_MEMORY, index)
        while count > 0:
            count -= 1
            error = read_long(&at, end, &key)
            if error == FINE:
                if bounds:
                    error = read_length(&at, end, &value)
                    if error == FINE:
                        length = <int32_t>value
                        value = at - state.heap
                        at += length
                else:
                    error = read_long(&at, end, &value)
            if error == FINE:
                error = slot_of(&state.slots, key, &slot)
            if error != FINE:
                return fail(state, error, index)
            group.slots[used] = slot
            group.values[1][used] = value
            if bounds:
                group.lengths[1][used] = length
            used += 1
            if first:
                group.guess = slot
                first = False
            slot += 1
    group.used = used
    state.at = at
    return 0


cdef int run_array(State* state, int32_t index) noexcept nogil:
    """Read an array into the group of its node, or skip it if the node has no group."""
    cdef const Node* node = &state.nodes[index]
    cdef int32_t item = state.kids[node.first] if node.count else -1
    cdef Group* group = &state.groups[node.slot] if node.slot >= 0 else NULL
    cdef Column* scratch = &state.columns[group.first] if group != NULL else NULL
    cdef int64_t count, before = group.used if group != NULL else 0
    cdef int32_t slot = group.guess if group != NULL else 0
    cdef int error, i
    if group != NULL:
        for i in range(group.width):
            write_null(&scratch[i], 0)
    while True:
        error = read_count(&state.at, state.end, node.size, &count)
        if error != FINE:
            return fail(state, error, index)
        if count == 0:
            break
        if item < 0:  # any number of elements that take no bytes
            continue
        while count > 0:
            count -= 1
            if run(state, item) < 0:
                return -1
            if group == NULL:
                continue
            if group.by_column:
                if scratch[0].values[0] == INT64_MIN:
                    return fail(state, NULL_ELEMENT, index)
                if (group.texts[1] and scratch[1].lengths[0] < 0) or scratch[1].values[0] == INT64_MIN:
                    continue  # a column whose value is null has no entry
                error = append_by_column(
                    &state.slots, group, scratch[0].values[0], scratch[1].values[0],
                    scratch[1].lengths[0] if group.texts[1] else 0, &slot,
                )
                if error != FINE:
                    return fail(state, error, index)
                continue
            if group.width == 1 and scratch[0].values[0] == INT64_MIN:
                return fail(state, NULL_ELEMENT, index)
            if group.used == group.room and grow_twice(group) < 0:
                return fail(state, OUT_OF_MEMORY, index)
            for i in range(group.width):
                group.values[i][group.used] = scratch[i].values[0]
                if group.texts[i]:
                    group.lengths[i][group.used] = scratch[i].lengths[0]
            group.used += 1
    if group != NULL and group.counts >= 0:
        state.columns[group.counts].lengths[state.row] = <int32_t>(group.used - before)
    return 0


cdef int skip_map(State* state, int32_t index) noexcept nogil:
    """Skip an Avro map, whose keys are strings. No value that a caller requests is such a map."""
    cdef const Node* node = &state.nodes[index]
    cdef int64_t count, length
    cdef int error
    while True:
        error = read_count(&state.at, state.end, node.size, &count)
        if error != FINE:
            return fail(state, error, index)
        if count == 0:
            return 0
        while count > 0:
            count -= 1
            error = read_length(&state.at, state.end, &length)
            if error != FINE:
                return fail(state, error, index)
            state.at += length
            if node.count and run(state, state.kids[node.first]) < 0:
                return -1


cdef int run(State* state, int32_t index) noexcept nogil:
    """Read one value of the node at `index`. Returns 0, or -1 with the state's error set. The depth of the schema
    bounds the recursion."""
    cdef const Node* node = &state.nodes[index]
    cdef Column* column = NULL
    cdef int64_t value = 0
    cdef int32_t i
    cdef float single
    cdef double number
    cdef int error
    cdef int op = node.op
    if op == OP_RECORD:
        for i in range(node.first, node.first + node.count):
            if run(state, state.kids[i]) < 0:
                return -1
        return 0
    if op == OP_UNION:
        error = read_long(&state.at, state.end, &value)
        if error != FINE:
            return fail(state, error, index)
        if not 0 <= value < node.count:
            return fail(state, BAD_UNION, index)
        return run(state, state.kids[node.first + value])
    if op == OP_NULL:  # in a union: its kids are the columns that the other branch would have written
        for i in range(node.first, node.first + node.count):
            write_null(&state.columns[state.kids[i]], state.row)
        return 0
    if op == OP_COUNTS:
        return run_map(state, index, False)
    if op == OP_BOUNDS:
        return run_map(state, index, True)
    if op == OP_ARRAY:
        return run_array(state, index)
    if op == OP_MAP:
        return skip_map(state, index)

    if node.slot >= 0:
        column = &state.columns[node.slot]
    if op == OP_LONG or op == OP_INT or op == OP_ENUM:
        error = read_long(&state.at, state.end, &value)
        if error != FINE:
            return fail(state, error, index)
        if op == OP_INT and not INT32_MIN <= value <= INT32_MAX:
            return fail(state, NOT_32_BITS, index)
        if op == OP_ENUM and not 0 <= value < node.size:
            return fail(state, BAD_ENUM, index)
        if column != NULL:
            column.values[state.row * column.step] = value
            if column.lengths != NULL:
                column.lengths[state.row * column.step] = 1
        return 0
    if op == OP_STRING or op == OP_BYTES:
        error = read_length(&state.at, state.end, &value)
        if error != FINE:
            return fail(state, error, index)
        if column != NULL:
            if op == OP_STRING and not is_utf8(state.at, value):
                return fail(state, NOT_UTF8, index)
            column.values[state.row * column.step] = state.at - state.heap
            column.lengths[state.row * column.step] = <int32_t>value
        state.at += value
        return 0
    if state.end - state.at < node.size:  # all other types have a fixed width
        return fail(state, TRUNCATED, index)
    if op == OP_BOOLEAN:
        if state.at[0] > 1:
            return fail(state, BAD_BOOLEAN, index)
        if column != NULL:
            column.values[state.row * column.step] = state.at[0]
            if column.lengths != NULL:
                column.lengths[state.row * column.step] = 1
    elif column != NULL:
        if op == OP_FIXED:
            column.values[state.row * column.step] = state.at - state.heap
            column.lengths[state.row * column.step] = <int32_t>node.size
        else:
            if op == OP_FLOAT:
                memcpy(&single, state.at, 4)
                number = single
            else:
                memcpy(&number, state.at, 8)
            memcpy(&column.values[state.row * column.step], &number, 8)
            column.lengths[state.row * column.step] = 1
    state.at += node.size
    return 0


cdef int run_rows(
    State* state, int32_t root, int32_t status, const int64_t* edges, const int64_t* counts, int64_t blocks
) noexcept nogil:
    """Read all rows of all blocks. A row whose column `status` is DELETED is overwritten by the next row. Returns 0, or
    -1 with the state's error set."""
    cdef int64_t block, i
    cdef int32_t g
    for block in range(blocks):
        state.block = block
        state.at = state.heap + edges[block]
        state.end = state.heap + edges[block + 1]
        for i in range(counts[block]):
            for g in range(state.groups_count):
                state.groups[g].starts[state.row] = state.groups[g].used
            if run(state, root) < 0:
                return -1
            if status >= 0 and state.columns[status].values[state.row] == DELETED:
                for g in range(state.groups_count):
                    state.groups[g].used = state.groups[g].starts[state.row]
            else:
                state.row += 1
        if state.at != state.end:
            return fail(state, LEFT_OVER, root)
    return 0


cdef class Program:
    """An Avro schema compiled to a program. It is immutable, so any number of threads can run it at once.

    nodes    (op, slot, size, children) each; children precede their parents, and the last node is the row
    names    for each node the name of its field, for messages
    columns  "long", "text" or "count" each; the kinds of scratch columns begin with "scratch "
    groups   (whether by column id, first scratch column, width, column of counts or -1) each
    status   the column in which DELETED drops the row, or -1 if there is no such column
    least    the fewest bytes that a row takes, at least 1
    """

    cdef Node* nodes
    cdef int32_t* kids
    cdef readonly tuple names, columns, groups
    cdef readonly int32_t status
    cdef readonly int64_t least
    cdef int64_t width  # how many bytes a row of all columns takes
    cdef int64_t* expected  # for each group, how many elements 1,024 rows had in the last run
    cdef int32_t root

    def __cinit__(self, list nodes, names, columns, groups, int32_t status, int64_t least):
        cdef int32_t i, kid, used = 0
        if least < 1:
            raise ValueError("a row takes at least a byte")
        self.nodes = <Node*>calloc(len(nodes), sizeof(Node))
        self.kids = <int32_t*>calloc(sum(len(node[3]) for node in nodes) + 1, sizeof(int32_t))
        self.expected = <int64_t*>calloc(len(groups) + 1, sizeof(int64_t))
        if self.nodes == NULL or self.kids == NULL or self.expected == NULL:
            raise MemoryError
        for i, (op, slot, size, children) in enumerate(nodes):
            self.nodes[i].op = OPS[op]
            self.nodes[i].slot = slot
            self.nodes[i].size = size
            self.nodes[i].first = used
            self.nodes[i].count = len(children)
            for kid in children:
                self.kids[used] = kid
                used += 1
        self.root = len(nodes) - 1
        self.names = tuple(names)
        self.columns = tuple(columns)
        self.groups = tuple(groups)
        self.status = status
        self.least = least
        self.width = 12 * len(self.columns) + 8 * len(self.groups)

    def __dealloc__(self):
        free(self.nodes)
        free(self.kids)
        free(self.expected)


cdef object array_of(Memory memory, int64_t offset, object dtype, int64_t count):
    """Return a numpy array over the bytes of `memory` from `offset` on. The array keeps the memory alive."""
    return np.frombuffer(memory, dtype, count, offset) if count else np.empty(0, dtype)


cdef class Run:
    """The memory of one run of a program. Memory that no numpy array uses is freed at the end of the run."""

    cdef State state
    cdef int64_t scratch[64]
    cdef int64_t rows_max
    cdef list arrays

    def __cinit__(self, Program program, int64_t rows, int64_t elements_max):
        """Allocate memory for at most `rows` rows, and at most `elements_max` elements in each group."""
        cdef State* state = &self.state
        cdef int i, k, used = 0
        state.nodes = program.nodes
        state.kids = program.kids
        state.columns = <Column*>calloc(len(program.columns) + 1, sizeof(Column))
        state.groups = <Group*>calloc(len(program.groups) + 1, sizeof(Group))
        if state.columns == NULL or state.groups == NULL or rehash(&state.slots) < 0:
            raise MemoryError
        self.rows_max = rows
        self.arrays = []
        cdef int64_t numbers = 0, texts = len(program.columns) * rows * sizeof(int64_t)
        cdef Memory memory = Memory(len(program.columns) * rows * (sizeof(int64_t) + sizeof(int32_t)))
        for i, kind in enumerate(program.columns):
            if kind.startswith("scratch "):
                if used + 2 > 64:
                    raise ValueError("too many scratch columns")
                state.columns[i].values = &self.scratch[used]
                if kind == "scratch text":
                    state.columns[i].lengths = <int32_t*>&self.scratch[used + 1]
                used += 2
                self.arrays.append((None, None))
                continue
            state.columns[i].step = 1
            number = text = None
            if kind != "count":
                number = array_of(memory, numbers, np.int64, rows)
                state.columns[i].values = <int64_t*>(memory.data + numbers)
                numbers += rows * sizeof(int64_t)
            if kind != "long":
                text = array_of(memory, texts, np.int32, rows)
                state.columns[i].lengths = <int32_t*>(memory.data + texts)
                texts += rows * sizeof(int32_t)
            self.arrays.append((number, text))
        for i, (by_column, first, width, counts) in enumerate(program.groups):
            state.groups[i].by_column = by_column
            state.groups[i].first = first
            state.groups[i].width = width
            state.groups[i].counts = counts
            for k in range(width):
                state.groups[i].texts[k] = program.columns[first + k].endswith("text")
            state.groups_count = i + 1
            state.groups[i].starts = <int64_t*>take((rows + 1) * sizeof(int64_t))
            if state.groups[i].starts == NULL:
                raise MemoryError
            room = min(elements_max, rows * program.expected[i] // 1024 + 64)
            if program.expected[i] and grow(&state.groups[i], room) < 0:
                raise MemoryError

    def __dealloc__(self):
        cdef int i, k
        cdef Group* group
        for i in range(self.state.groups_count):
            group = &self.state.groups[i]
            give(group.starts, (self.rows_max + 1) * sizeof(int64_t))
            give(group.slots, group.room * sizeof(int32_t))
            for k in range(SCRATCH_MAX):
                give(group.values[k], group.room * sizeof(int64_t))
                give(group.lengths[k], group.room * sizeof(int32_t))
        free(self.state.columns)
        free(self.state.groups)
        free(self.state.slots.ids)
        free(self.state.slots.table)

    cdef dict by_column(self, Group* group):
        """Return the entries of a group as {column id: (rows, values)}, or as {column id: (rows, starts, lengths)} for
        bounds. The arrays of all columns are slices of one array each."""
        cdef bint bounds = group.texts[1]
        cdef int32_t slots = self.state.slots.used
        cdef int32_t slot
        cdef int64_t begin, end, i, width, used = group.used, live = self.state.row
        if used == 0:
            return {}
        cdef Memory memory = Memory(used * (sizeof(int64_t) + 2 * sizeof(int32_t)))
        cdef int64_t* numbers = <int64_t*>memory.data
        cdef int32_t* places = <int32_t*>(numbers + used)
        cdef int32_t* sizes = places + used if bounds else NULL
        values, rows = array_of(memory, 0, np.int64, used), array_of(memory, used * 8, np.int32, used)
        lengths = array_of(memory, used * 12, np.int32, used) if bounds else None
        cdef Memory edges = Memory(2 * slots * sizeof(int64_t))
        cdef int64_t* begins = <int64_t*>edges.data
        cdef int64_t* ends = begins + slots
        cdef dict found = {}
        with nogil:
            memset(ends, 0, slots * sizeof(int64_t))
            width = row_width(group, live, ends)
            if width:
                transpose(group, live, width, numbers, sizes)
                for i in range(live):
                    places[i] = <int32_t>i
            else:
                memset(ends, 0, slots * sizeof(int64_t))
                scatter(group, live, slots, begins, ends, places, numbers, sizes)
        if width:
            rows = rows[:live]
            for i in range(width):
                part = slice(i * live, (i + 1) * live)
                found[self.state.slots.ids[group.slots[i]]] = (
                    (rows, values[part], lengths[part]) if bounds else (rows, values[part])
                )
            return found
        for slot in range(slots):
            begin, end = begins[slot], ends[slot]
            if begin < end:
                part = slice(begin, end)
                found[self.state.slots.ids[slot]] = (
                    (rows[part], values[part], lengths[part]) if bounds else (rows[part], values[part])
                )
        return found

    cdef list elements(self, Group* group):
        """Return the elements of a group as (values, lengths) for each field of the elements."""
        cdef list found = []
        cdef int64_t[::1] values
        cdef int32_t[::1] lengths
        cdef int i
        for i in range(group.width):
            number = np.empty(group.used, np.int64)
            text = np.empty(group.used if group.texts[i] else 0, np.int32)
            if group.used:
                values = number
                memcpy(&values[0], group.values[i], group.used * sizeof(int64_t))
                if group.texts[i]:
                    lengths = text
                    memcpy(&lengths[0], group.lengths[i], group.used * sizeof(int32_t))
            found.append((number, text))
        return found


def execute(
    Program program,
    const uint8_t[::1] heap,
    const int64_t[::1] edges,
    const int64_t[::1] counts,
    str location,
):
    """Decode the rows of all blocks: block i is heap[edges[i]:edges[i + 1]] and claims counts[i] rows.

    Returns (number of rows, columns, groups). `columns` has (int64 values | None, int32 lengths | None) for each
    column. `groups` has a dict for each group by column id, and the arrays of the elements' fields for each other
    group. Raises Corrupt, which names `location`.
    """
    cdef int64_t blocks = counts.shape[0], rows = 0, i
    if heap.shape[0] > INT32_MAX:
        raise ValueError("the heap is larger than 2 GiB")
    if edges.shape[0] != blocks + 1 or edges[0] != 0 or edges[blocks] != heap.shape[0]:
        raise ValueError("the edges of the blocks do not cover the heap")
    for i in range(blocks):
        if edges[i] > edges[i + 1] or counts[i] < 0:
            raise ValueError("a block has a negative size or row count")
        if counts[i] > (edges[i + 1] - edges[i]) // program.least:
            raise Corrupt(f"{location}: block {i} {MESSAGES[TOO_MANY_ROWS]}: {counts[i]} in {edges[i + 1] - edges[i]}")
        rows += counts[i]
    # Each column takes at least a byte of its row, unless a record of many columns is null. No real row has such a
    # record.
    if rows * program.width > ROW_RATIO_MAX * heap.shape[0]:
        raise Corrupt(f"{location}: {MESSAGES[TOO_MANY_ROWS]}: {rows} in {heap.shape[0]}")
    cdef Run machine = Run(program, rows, heap.shape[0])  # each element takes at least a byte
    cdef State* state = &machine.state
    cdef int failed = 0
    if blocks:
        if heap.shape[0]:
            state.heap = &heap[0]
        with nogil:
            failed = run_rows(state, program.root, program.status, &edges[0], &counts[0], blocks)
    if failed:
        if state.error == OUT_OF_MEMORY:
            raise MemoryError(f"{location}: no memory to decode it")
        raise Corrupt(
            f"{location}: block {state.block}, at byte {state.at - (state.heap + edges[state.block])}, "
            f"{program.names[state.node]}: {MESSAGES[state.error]}"
        )
    for i in range(state.groups_count):
        program.expected[i] = min(INT32_MAX, state.groups[i].used) * 1024 // max(1, state.row)
    columns = [
        (None if values is None else values[: state.row], None if lengths is None else lengths[: state.row])
        for values, lengths in machine.arrays
    ]
    groups = [
        machine.by_column(&state.groups[i])
        if state.groups[i].by_column
        else machine.elements(&state.groups[i])
        for i in range(state.groups_count)
    ]
    return state.row, columns, groups
