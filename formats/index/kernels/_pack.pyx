"""Packs the columns and spans of a decoded manifest (`packing.py`), all columns of the manifest in one call.

Jobs are added first (`Packer.longs`, `bounds`, `column`, …). Then `pack` runs all of them into one growing buffer,
without the GIL, so that several threads can pack at once. After that, `packed` and `entry` return the places of
columns.

A span is (start, length) of a single-value binary (Iceberg spec, appendix D); the length is -1 if there is no value. A
span with an impossible length or outside of the heap counts as absent, because a bound that cannot be read must not be
used.
"""

from libc.math cimport NAN
from libc.stdint cimport UINT64_MAX, int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset

from isal.isal_zlib import crc32

from seamark.formats.iceberg.manifests._memory cimport Memory, adopted, give, take
from seamark.formats.index.kernels._codes cimport (
    FAILED, FORM_FLOATS, FORM_STRINGS, MISSING, NONE, Output, Packed, pack_doubles, pack_longs, pack_spans,
    seamark_big_endian,
)

cdef enum:
    LONGS, DOUBLES, SPANS  # arrays of values
    # Spans of single-value binaries:
    NARROW  # little-endian integers of 1, 4 or 8 bytes
    WIDE  # of 1 or 8; a value of 4 bytes counts days: the column was promoted from date to timestamp
    FLOATS  # IEEE, of 4 or 8 bytes
    SHORT_DECIMALS  # big-endian two's complement, up to 18 digits
    DECIMALS
    NOTHING

SOURCES = {
    "spans": SPANS, "narrow": NARROW, "wide": WIDE, "floats": FLOATS, "short_decimals": SHORT_DECIMALS,
    "decimals": DECIMALS,
}

cdef enum:
    NO_ROWS, ALL_ROWS, SOME_ROWS  # `block.ColumnEntry`

ctypedef struct JobInput:  # the values of a column
    int source
    bint absent_low  # whether absent values get the least code; otherwise they get the greatest code
    int64_t rows
    int64_t count  # the number of values
    const int32_t* places  # the row of each value, ascending; NULL if there is one value for each row
    const int64_t* values  # numbers, bits of doubles, or starts of spans
    const int32_t* lengths
    const uint8_t* present  # NULL: MISSING or NaN is absent

ctypedef struct Job:
    JobInput job_input
    Packed packed

ctypedef struct Column:
    JobInput counts[4]  # values, nulls, nans, sizes
    JobInput lower
    JobInput upper
    int32_t record_count  # the job whose values the value counts of this column are likely to equal, or -1
    Packed packed[6]  # values, lower, upper, nulls, nans, sizes
    int known[4]  # for how many rows each fact is known; `classify_rows` lists the facts

ctypedef struct Scratch:
    int64_t rows
    uint8_t* memory
    int64_t* counts[4]
    int64_t* values
    int64_t* starts
    int32_t* lengths
    uint8_t* wide  # 16 bytes for each row

cdef void gather_longs(
    const JobInput* job_input, const uint8_t* heap, int64_t room, bint upper, int64_t* values
) noexcept nogil:
    """Read integers from their single-value binaries into `values`. `room` is the size of the heap. MISSING, the least
    long, means an absent value, so a bound of this value needs care. As a lower bound it excludes no row, like an
    absent bound. As an upper bound it is replaced by the next integer, which is a correct upper bound, too."""
    cdef int64_t i, start, wide
    cdef int32_t length, narrow
    for i in range(job_input.count):
        length = job_input.lengths[i]
        start = job_input.values[i]
        wide = MISSING
        if length >= 1 and start >= 0 and start <= room - length:
            if length == 8:
                memcpy(&wide, heap + start, 8)
                wide += wide == MISSING and upper
            elif length == 4 and job_input.source == NARROW:
                memcpy(&narrow, heap + start, 4)
                wide = narrow
            elif length == 1:
                wide = heap[start] != 0
        values[job_input.places[i] if job_input.places != NULL else i] = wide


cdef void gather_doubles(const JobInput* job_input, const uint8_t* heap, int64_t room, double* values) noexcept nogil:
    """Read floats from their single-value binaries into `values`. NaN means an absent value. `room` is the size of the
    heap."""
    cdef int64_t i, start
    cdef int32_t length
    cdef float narrow
    cdef double wide
    for i in range(job_input.count):
        length = job_input.lengths[i]
        start = job_input.values[i]
        wide = NAN
        if length >= 1 and start >= 0 and start <= room - length:
            if length == 8:
                memcpy(&wide, heap + start, 8)
            elif length == 4:
                memcpy(&narrow, heap + start, 4)
                wide = narrow
        values[job_input.places[i] if job_input.places != NULL else i] = wide


cdef bint read_decimal(const uint8_t* at, int32_t length, int64_t* high, uint64_t* low) noexcept nogil:
    """Read a big-endian two's complement integer as 128 bits. Returns False if the integer does not fit. It fits if
    each byte before the last 16 bytes repeats the sign."""
    cdef uint8_t sign = 0xFF if at[0] & 0x80 else 0
    cdef uint64_t upper = UINT64_MAX if sign else 0
    cdef uint64_t lower = upper
    cdef int32_t k
    while length > 16:
        if at[0] != sign or (at[1] & 0x80) != (sign & 0x80):
            return False
        at += 1
        length -= 1
    for k in range(length):
        upper = (upper << 8) | (lower >> 56)
        lower = (lower << 8) | at[k]
    high[0] = <int64_t>upper
    low[0] = lower
    return True


cdef void gather_decimals(
    const JobInput* job_input, const uint8_t* heap, int64_t room, Scratch* scratch
) noexcept nogil:
    """Read decimals from their single-value binaries. SHORT_DECIMALS are written to `values`; a decimal that does not
    fit 64 bits breaks the rules of its type and counts as absent. Other decimals are written to `wide`, with their
    spans. Their sign bit is flipped, so that their bytes have the order of the numbers."""
    cdef int64_t i, row, start, high = 0
    cdef int32_t length
    cdef uint64_t low = 0, word
    cdef bint is_usable, short = job_input.source == SHORT_DECIMALS
    for i in range(job_input.count):
        row = job_input.places[i] if job_input.places != NULL else i
        length = job_input.lengths[i]
        start = job_input.values[i]
        is_usable = length >= 1 and start >= 0 and start <= room - length
        is_usable = is_usable and read_decimal(heap + start, length, &high, &low)
        if short:  # a number fits 64 bits if the upper half only repeats its sign
            scratch.values[row] = <int64_t>low if is_usable and high == <int64_t>low >> 63 else MISSING
            continue
        scratch.starts[row] = 16 * row
        scratch.lengths[row] = 16 if is_usable else -1
        if is_usable:
            word = seamark_big_endian(<uint64_t>high ^ (<uint64_t>1 << 63))
            memcpy(scratch.wide + 16 * row, &word, 8)
            word = seamark_big_endian(low)
            memcpy(scratch.wide + 16 * row + 8, &word, 8)


cdef bint are_spans_usable(const JobInput* job_input, int64_t room) noexcept nogil:
    """Return whether there is a span for each row, and each span that is not absent is within the heap."""
    cdef int64_t i
    cdef int64_t start
    cdef int32_t length
    cdef bint are_usable = job_input.places == NULL
    for i in range(job_input.count):
        start = job_input.values[i]
        length = job_input.lengths[i]
        are_usable &= length < 0 or (start >= 0 and start <= room - length)
    return are_usable


cdef void gather_spans(const JobInput* job_input, int64_t room, Scratch* scratch) noexcept nogil:
    """Copy the spans to their rows. A span outside of the heap becomes absent."""
    cdef int64_t i, row
    cdef bint is_usable
    for i in range(job_input.count):
        row = job_input.places[i] if job_input.places != NULL else i
        is_usable = job_input.values[i] >= 0 and job_input.values[i] <= room - job_input.lengths[i]
        scratch.starts[row] = job_input.values[i]
        scratch.lengths[row] = job_input.lengths[i] if is_usable else -1


cdef int pack_input(
    Output* out, const JobInput* job_input, const uint8_t* heap, int64_t room, Scratch* scratch, Packed* packed
) noexcept nogil:
    """Pack the values of a job, and set the place of the result. Returns FAILED when there is no memory."""
    packed.start = out.used
    cdef int failed = write_input(out, job_input, heap, room, scratch, packed)
    packed.end = out.used
    return failed


cdef int pack_counts(Output* out, const int64_t* values, int64_t n, Packed* packed) noexcept nogil:
    """Pack n counts, and set the place of the result. Returns FAILED when there is no memory."""
    packed.start = out.used
    cdef int failed = pack_longs(out, values, NULL, n, True, packed)
    packed.end = out.used
    return failed


cdef int write_input(
    Output* out, const JobInput* job_input, const uint8_t* heap, int64_t room, Scratch* scratch, Packed* packed
) noexcept nogil:
    """Read the values of a job into `scratch` if they are not there already, and pack them."""
    cdef int64_t i
    cdef int64_t n = job_input.rows
    if job_input.source == NOTHING or n == 0:
        return 0
    if job_input.source == LONGS:
        return pack_longs(out, job_input.values, job_input.present, n, job_input.absent_low, packed)
    if job_input.source == DOUBLES:
        return pack_doubles(out, <const double*>job_input.values, job_input.present, n, job_input.absent_low, packed)
    if job_input.places != NULL:  # the rows without a place have no value
        for i in range(n):
            scratch.values[i] = MISSING
            scratch.lengths[i] = -1
            if job_input.source == FLOATS:
                (<double*>scratch.values)[i] = NAN
    if job_input.source == NARROW or job_input.source == WIDE:
        gather_longs(job_input, heap, room, not job_input.absent_low, scratch.values)
        return pack_longs(out, scratch.values, NULL, n, job_input.absent_low, packed)
    if job_input.source == FLOATS:
        gather_doubles(job_input, heap, room, <double*>scratch.values)
        return pack_doubles(out, <double*>scratch.values, NULL, n, job_input.absent_low, packed)
    if job_input.source == SHORT_DECIMALS:
        gather_decimals(job_input, heap, room, scratch)
        return pack_longs(out, scratch.values, NULL, n, job_input.absent_low, packed)
    if job_input.source == DECIMALS:
        gather_decimals(job_input, heap, room, scratch)
        return pack_spans(out, scratch.wide, scratch.starts, scratch.lengths, n, job_input.absent_low, packed)
    if are_spans_usable(job_input, room):
        return pack_spans(out, heap, job_input.values, job_input.lengths, n, job_input.absent_low, packed)
    gather_spans(job_input, room, scratch)
    return pack_spans(out, heap, scratch.starts, scratch.lengths, n, job_input.absent_low, packed)


cdef void expand_counts(const JobInput* job_input, int64_t* values) noexcept nogil:
    """Write one value for each row. A row without a value gets MISSING. A row with a negative value also
    gets MISSING, because no count is negative."""
    cdef int64_t i
    if job_input.places != NULL:
        for i in range(job_input.rows):
            values[i] = MISSING
        for i in range(job_input.count):
            values[job_input.places[i]] = job_input.values[i] if job_input.values[i] >= 0 else MISSING
    else:
        for i in range(job_input.count):
            values[i] = job_input.values[i] if job_input.values[i] >= 0 else MISSING


cdef int classify_count(int64_t count, int64_t rows) noexcept nogil:
    """Return whether a count is zero, all rows or only some rows."""
    return NO_ROWS if count == 0 else ALL_ROWS if count == rows else SOME_ROWS


cdef void classify_rows(
    const int64_t* values, const int64_t* nulls, const int64_t* nans, int64_t n, int* known
) noexcept nogil:
    """Count the rows that are known to hold only nulls, only NaNs, no null, and no NaN, and write NO_ROWS, ALL_ROWS or
    SOME_ROWS for each. An array that is NULL is unknown."""
    cdef int64_t i, nulls_only = 0, nans_only = 0, no_nulls = 0, no_nans = 0
    if nulls != NULL:
        for i in range(n):
            no_nulls += nulls[i] == 0
            if values != NULL:
                nulls_only += values[i] >= 0 and nulls[i] == values[i]
    if nans != NULL:
        for i in range(n):
            no_nans += nans[i] == 0
            if values != NULL:
                nans_only += values[i] >= 0 and nans[i] == values[i]
    known[0] = classify_count(nulls_only, n)
    known[1] = classify_count(nans_only, n)
    known[2] = classify_count(no_nulls, n)
    known[3] = classify_count(no_nans, n)


cdef int pack_bounds(
    Output* out, Column* column, const uint8_t* heap, int64_t room, Scratch* scratch
) noexcept nogil:
    """Pack the lower and the upper bounds of one column."""
    if pack_input(out, &column.lower, heap, room, scratch, &column.packed[1]) < 0:
        return FAILED
    return pack_input(out, &column.upper, heap, room, scratch, &column.packed[2])


cdef int pack_column(Output* out, Column* column, const Job* jobs, Scratch* scratch) noexcept nogil:
    """Pack the counts of one column."""
    cdef const Job* record_count = &jobs[column.record_count] if column.record_count >= 0 else NULL
    cdef int64_t* counts[4]  # values, nulls, nans, sizes; NULL if the manifest has no such counts
    cdef int64_t n = scratch.rows
    cdef int k, place
    cdef bint equals_record_count
    for k in range(4):
        counts[k] = NULL
        if column.counts[k].source != NOTHING:
            counts[k] = scratch.counts[k]
            expand_counts(&column.counts[k], counts[k])
    classify_rows(counts[0], counts[1], counts[2], n, column.known)
    for k in range(4):
        if counts[k] == NULL:
            continue
        equals_record_count = (
            k == 0 and record_count != NULL and memcmp(counts[0], record_count.job_input.values, n * 8) == 0
        )
        place = k + 2 if k else 0  # in `packed`, the bounds are between the values and the other counts
        if equals_record_count:  # as for each column that is not inside a list or map
            column.packed[0] = record_count.packed
        elif pack_counts(out, counts[k], n, &column.packed[place]) < 0:
            return FAILED
    return 0


cdef int pack_all(
    Output* out, Job* jobs, int32_t jobs_used, Column* columns, int32_t columns_used, const uint8_t* heap, int64_t room,
    Scratch* scratch
) noexcept nogil:
    """Pack all jobs, and then all columns. Returns FAILED when there is no memory."""
    cdef int32_t i
    for i in range(jobs_used):
        if pack_input(out, &jobs[i].job_input, heap, room, scratch, &jobs[i].packed) < 0:
            return FAILED
    # Bounds are stored next to each other, because plans read bounds and rarely read counts. The operating system
    # maps the neighbours of each page that is read.
    for i in range(columns_used):
        if pack_bounds(out, &columns[i], heap, room, scratch) < 0:
            return FAILED
    for i in range(columns_used):
        if pack_column(out, &columns[i], jobs, scratch) < 0:
            return FAILED
    return 0


cdef class Packer:
    """Packs columns of `rows` rows, whose spans are in `heap`. The arrays that a caller passes must not change before
    `pack`.

    The methods return numbers. After `pack`, `packed` and `entry` take such a number and return the place of the
    column. Jobs are written in the order in which they were added, and columns after them.
    """

    cdef const uint8_t[::1] heap
    cdef int64_t rows
    cdef list arrays
    cdef Job* jobs
    cdef int32_t jobs_used, jobs_room
    cdef Column* columns
    cdef int32_t columns_used, columns_room
    cdef Output out
    cdef Memory packed_arrays

    def __cinit__(self, const uint8_t[::1] heap, int64_t rows):
        self.heap = heap
        self.rows = rows
        self.arrays = []

    def __dealloc__(self):
        free(self.jobs)
        free(self.columns)
        give(self.out.data, self.out.room)

    cdef int32_t add_job(self, JobInput job_input) except -1:
        """Add a job, and return its number."""
        cdef void* moved
        cdef int32_t room
        if self.jobs_used == self.jobs_room:
            room = 2 * self.jobs_room + 32
            moved = realloc(self.jobs, room * sizeof(Job))
            if moved == NULL:
                raise MemoryError
            self.jobs = <Job*>moved
            self.jobs_room = room
        self.jobs[self.jobs_used].job_input = job_input
        clear_packed(&self.jobs[self.jobs_used].packed)
        self.jobs_used += 1
        return self.jobs_used - 1

    def longs(self, const int64_t[::1] values, const uint8_t[::1] present=None, *, bint absent_low):
        """Add a job for integers. Without `present`, MISSING means an absent value. With `absent_low`, absent values
        get the least code, otherwise the greatest code."""
        cdef JobInput job_input = self.make_input(LONGS, absent_low, values, None)
        job_input.rows = job_input.count
        if present is not None:
            job_input.present = self.keep_presence(present, job_input.count)
        return self.add_job(job_input)

    def doubles(self, const double[::1] values, const uint8_t[::1] present=None, *, bint absent_low):
        """Add a job for floats. `present` distinguishes a NaN that is a value from an absent value. Without `present`,
        every NaN means an absent value."""
        cdef JobInput job_input
        memset(&job_input, 0, sizeof(JobInput))
        job_input.source = DOUBLES
        job_input.absent_low = absent_low
        job_input.rows = job_input.count = values.shape[0]
        if job_input.count:
            job_input.values = <const int64_t*>&values[0]
        self.arrays.append(values)
        if present is not None:
            job_input.present = self.keep_presence(present, job_input.count)
        return self.add_job(job_input)

    def bounds(self, int source, const int64_t[::1] starts, const int32_t[::1] lengths, *, bint absent_low):
        """Add a job for single-value binaries, one for each row. `source` is one of SOURCES."""
        cdef JobInput job_input = self.make_input(source, absent_low, starts, lengths)
        job_input.rows = job_input.count
        if job_input.rows != self.rows:
            raise ValueError("bounds are one for each row")
        return self.add_job(job_input)

    def column(self, int source, counts, lower, upper, int32_t record_count=-1):
        """Add the statistics of one column. `counts` has (rows, values) for each of value_counts, null_value_counts,
        nan_value_counts and column_sizes. `lower` and `upper` are (rows, starts, lengths). Each of them is None if the
        manifest has no such statistics; the rows ascend.

        If the value counts equal the values of the job `record_count`, they share its place. A negative `source` says
        that the bounds have no order; then the bounds are not packed.
        """
        cdef void* moved
        cdef int32_t room
        cdef int k
        if self.columns_used == self.columns_room:
            room = 2 * self.columns_room + 32
            moved = realloc(self.columns, room * sizeof(Column))
            if moved == NULL:
                raise MemoryError
            self.columns = <Column*>moved
            self.columns_room = room
        cdef Column* column = &self.columns[self.columns_used]
        memset(column, 0, sizeof(Column))
        if record_count >= self.jobs_used or (
            record_count >= 0 and self.jobs[record_count].job_input.rows != self.rows
        ):
            raise ValueError("no such job of as many rows")
        column.record_count = record_count
        for k in range(6):
            clear_packed(&column.packed[k])
        for k in range(4):
            column.counts[k] = self.make_placed_input(LONGS, True, counts[k])
        column.lower = self.make_placed_input(source, True, lower)
        column.upper = self.make_placed_input(source, False, upper)
        self.columns_used += 1
        return self.columns_used - 1

    cdef const uint8_t* keep_presence(self, const uint8_t[::1] present, int64_t count) except? NULL:
        """Keep the array until `pack`, and return its address."""
        if present.shape[0] != count:
            raise ValueError("presence is one for each value")
        self.arrays.append(present)
        return &present[0] if count else NULL

    cdef JobInput make_input(
        self, int source, bint absent_low, const int64_t[::1] values, const int32_t[::1] lengths
    ) except *:
        """Return the input of a job with one value for each row, and keep the arrays until `pack`."""
        cdef JobInput job_input
        memset(&job_input, 0, sizeof(JobInput))
        job_input.source = source
        job_input.absent_low = absent_low
        job_input.rows = self.rows
        job_input.count = values.shape[0]
        self.arrays.append(values)
        if job_input.count:
            job_input.values = &values[0]
        if lengths is not None:
            if lengths.shape[0] != job_input.count:
                raise ValueError("spans have a start and a length each")
            self.arrays.append(lengths)
            if job_input.count:
                job_input.lengths = &lengths[0]
        return job_input

    cdef JobInput make_placed_input(self, int source, bint absent_low, arrays) except *:
        """Return the input of a job from (rows, values) or (rows, starts, lengths), or from None if there are no
        statistics. The rows ascend."""
        cdef JobInput job_input
        cdef const int32_t[::1] places
        if arrays is None or source < 0:
            memset(&job_input, 0, sizeof(JobInput))
            job_input.source = NOTHING
            return job_input
        job_input = self.make_input(source, absent_low, arrays[1], arrays[2] if len(arrays) > 2 else None)
        places = arrays[0]
        if places.shape[0] != job_input.count or job_input.count > self.rows:
            raise ValueError("each value has a row of its own")
        if job_input.count == 0:
            job_input.source = NOTHING
        elif job_input.count < self.rows:
            if places[0] < 0 or places[job_input.count - 1] >= self.rows:
                raise ValueError("a row is beyond the others")
            self.arrays.append(places)
            job_input.places = &places[0]
        return job_input

    def pack(self):
        """Pack all jobs and columns, and return them in the layout of a block. The method can be called only once.
        Raises MemoryError when there is no memory."""
        cdef Scratch scratch
        cdef int64_t n = self.rows
        cdef int k, failed
        cdef const uint8_t* heap = &self.heap[0] if self.heap.shape[0] else NULL
        cdef int64_t room = self.heap.shape[0]
        # Four arrays of counts, an array each for values, starts and lengths, and 16 bytes in each row for a decimal.
        if self.packed_arrays is not None:
            raise ValueError("packed already")
        cdef Memory memory = Memory(n * (6 * sizeof(int64_t) + 16 + sizeof(int32_t)))
        scratch.rows = n
        scratch.memory = memory.data
        for k in range(4):
            scratch.counts[k] = <int64_t*>memory.data + k * n
        scratch.values = <int64_t*>memory.data + 4 * n
        scratch.starts = <int64_t*>memory.data + 5 * n
        scratch.wide = memory.data + 6 * n * sizeof(int64_t)
        scratch.lengths = <int32_t*>(scratch.wide + 16 * n)
        self.out.room = 512 * n + 4096
        self.out.data = <uint8_t*>take(self.out.room)
        if self.out.data == NULL:
            raise MemoryError
        with nogil:
            failed = pack_all(
                &self.out, self.jobs, self.jobs_used, self.columns, self.columns_used, heap, room, &scratch
            )
        if failed:
            raise MemoryError
        self.arrays.clear()
        self.packed_arrays = adopted(self.out.data, self.out.room, self.out.used)
        self.out.data = NULL
        return self.packed_arrays

    cdef object describe(self, const Packed* packed):
        """Return the fields of `packing.Packed`, or None if all values are absent."""
        cdef double low, high
        cdef object lowest = packed.low, highest = packed.high, common = b""
        if not packed.there:
            return None
        if packed.form == FORM_FLOATS:
            memcpy(&low, &packed.low, 8)
            memcpy(&high, &packed.high, 8)
            lowest, highest = low, high
        elif packed.form == FORM_STRINGS:
            lowest, highest = <uint64_t>packed.low, <uint64_t>packed.high
            common = self.packed_arrays.data[packed.common_at:packed.common_at + packed.common_size]
        return (
            packed.form, packed.width, packed.codes, packed.presence, lowest, highest, packed.base, common,
            packed.common_at, packed.lengths, packed.lengths_width, packed.ends, packed.tails, packed.start,
            packed.end - packed.start, crc32(memoryview(self.packed_arrays)[packed.start:packed.end]),
        )

    def packed(self, int32_t job):
        """Return the fields of `packing.Packed` for one job, or None if all its values are absent."""
        if not 0 <= job < self.jobs_used:
            raise IndexError(job)
        return self.describe(&self.jobs[job].packed)

    def entry(self, int32_t number):
        """Return the fields of `block.ColumnEntry` after its type: the bounds, the counts, and for how many rows each
        of the four facts in `classify_rows` is known."""
        if not 0 <= number < self.columns_used:
            raise IndexError(number)
        cdef Column* column = &self.columns[number]
        cdef Packed* packed = column.packed
        return (
            self.describe(&packed[1]), self.describe(&packed[2]),
            (
                self.describe(&packed[0]), self.describe(&packed[3]), self.describe(&packed[4]),
                self.describe(&packed[5]),
            ),
            column.known[0], column.known[1], column.known[2], column.known[3],
        )


cdef void clear_packed(Packed* packed) noexcept:
    memset(packed, 0, sizeof(Packed))
    packed.codes = packed.presence = packed.common_at = packed.lengths = packed.ends = packed.tails = NONE
