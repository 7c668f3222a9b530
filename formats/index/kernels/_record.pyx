"""Kernels of the record index: they sort the rows of a file, merge runs into pages, and find hashes. They run without
the GIL.

An entry has 24 bytes: the high and the low half of the key's hash (uint64 each), the file and the position (uint32
each). A *run* is a series of entries in ascending order. A "flat" run is only the entries. Otherwise the run has pages
of 4,096 bytes:

    XXH64 of the bytes after it in the page, seeded by the page's number; number of entries (uint32); zeros (uint32);
    room for 170 entries

A page is not used before its checksum is verified. A file number is not used before it is compared with the number of
files.
"""

from libc.stdint cimport UINT32_MAX, UINT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memset

import numpy as np

from seamark.formats.index.kernels._xxh64 cimport xxh64

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    typedef struct { uint64_t hi, lo; uint32_t file, position; } SeamarkEntry;

    static inline int seamark_order(const SeamarkEntry *one, const SeamarkEntry *other) {
        if (one->hi != other->hi) return one->hi < other->hi ? -1 : 1;
        if (one->lo != other->lo) return one->lo < other->lo ? -1 : 1;
        if (one->file != other->file) return one->file < other->file ? -1 : 1;
        return one->position < other->position ? -1 : one->position > other->position;
    }
    static int seamark_compare(const void *one, const void *other) {
        return seamark_order((const SeamarkEntry *)one, (const SeamarkEntry *)other);
    }
    static inline int seamark_less(const SeamarkEntry *one, uint64_t hi, uint64_t lo) {
        return one->hi < hi || (one->hi == hi && one->lo < lo);
    }
    /* Where a uniform hash would be among n entries that begin at hash `first`, before others that begin at `next`. */
    static inline int64_t seamark_place(int64_t n, uint64_t first, uint64_t next, uint64_t hi) {
        /* Halved, so that processors can convert them as signed numbers, which is one instruction. */
        double part = (double)(int64_t)((hi - first) >> 1), whole = (double)(int64_t)((next - first) >> 1);
        int64_t i = next > first ? (int64_t)(part / (whole + 1.0) * (double)n) : n >> 1;
        return i < n ? i : n - 1;
    }
    /* The first of n entries that is not less than the hash; n where there is none. */
    static int64_t seamark_within(
        const SeamarkEntry *entries, int64_t n, uint64_t first, uint64_t next, uint64_t hi, uint64_t lo
    ) {
        int64_t i = seamark_place(n, first, next, hi);
        while (i < n && seamark_less(&entries[i], hi, lo)) i++;
        while (i > 0 && !seamark_less(&entries[i - 1], hi, lo)) i--;
        return i;
    }
    static inline int64_t seamark_guess(int64_t n, uint64_t hi) {
        return (int64_t)(((unsigned __int128)hi * (uint64_t)n) >> 64);
    }
    /* The first of n fences that is not less than `hi`: steps that double from where a uniform hash would be, then halves. */
    static int64_t seamark_fence(const uint64_t *fences, int64_t n, uint64_t hi) {
        int64_t low, high, step = 4, i = seamark_guess(n, hi);
        if (n == 0) return 0;
        if (fences[i] < hi) {
            low = i + 1;
            high = low + step;
            while (high < n && fences[high] < hi) { low = high + 1; step *= 2; high = low + step; }
            if (high > n) high = n;
        } else {
            high = i;
            low = high - step;
            while (low > 0 && fences[low - 1] >= hi) { high = low - 1; step *= 2; low = high - step; }
            if (low < 0) low = 0;
        }
        while (low < high) {
            int64_t middle = (low + high) >> 1;
            if (fences[middle] < hi) low = middle + 1; else high = middle;
        }
        return low;
    }
    """
    ctypedef struct Entry "SeamarkEntry":
        uint64_t hi
        uint64_t lo
        uint32_t file
        uint32_t position
    int seamark_compare(const void* one, const void* other) noexcept nogil
    int64_t seamark_place(int64_t n, uint64_t first, uint64_t next, uint64_t hi) noexcept nogil
    int64_t seamark_within(
        const Entry* entries, int64_t n, uint64_t first, uint64_t next, uint64_t hi, uint64_t lo
    ) noexcept nogil
    int64_t seamark_guess(int64_t n, uint64_t hi) noexcept nogil
    int64_t seamark_fence(const uint64_t* fences, int64_t n, uint64_t hi) noexcept nogil
    void prefetch "__builtin_prefetch"(const void* at) noexcept nogil

cdef uint32_t OF_NULL = 0xFFFFFFFF
cdef uint32_t OF_NAN = 0xFFFFFFFE
cdef uint32_t DROPPED = 0xFFFFFFFF

cdef enum:
    PAGE = 4096
    HEAD = 16  # the bytes of a page before its entries
    ENTRY = 24
    PER_PAGE = 170
    INSERTION_MAX = 24  # buckets of up to so many entries are sorted by insertion
    GROUP = 32  # the queries of a group, see `Pages.lookup`
    SORTED_MIN = 1024  # fewer queries are not sorted
    STRETCH = 1 << 17  # the queries of a stretch, see `Pages.lookup`
    BUCKETS = 2048
    BUCKET_SHIFT = 53  # the first 11 of 64 bits are the number of the bucket

PAGE_BYTES, ENTRIES_A_PAGE, ENTRY_BYTES, DROPPED_FILE = PAGE, PER_PAGE, ENTRY, DROPPED


def row_hash(parts):
    """Return (high, low): the hashes (seeds 0 and 1) of one row in the encoding of `_hash.hash_rows`. A part is a code,
    bytes, None for null, or a NaN. Raises ValueError for any other part."""
    cdef list encoded = []
    cdef uint32_t head
    cdef uint64_t code
    cdef bytes row
    for part in parts:
        if isinstance(part, bytes):
            if len(part) >= OF_NAN:
                raise ValueError(f"a key of {len(part)} bytes is too long")
            head = <uint32_t>len(part)
            encoded.append((<char*>&head)[:4])
            encoded.append(part)
        elif part is None or part != part:
            head = OF_NULL if part is None else OF_NAN
            encoded.append((<char*>&head)[:4])
        elif isinstance(part, int):
            head, code = 8, part
            encoded.append((<char*>&head)[:4])
            encoded.append((<char*>&code)[:8])
        else:
            raise ValueError(f"{part!r} is no part of a key: neither code, bytes, null nor NaN")
    row = b"".join(encoded)
    return xxh64(row, len(row), 0), xxh64(row, len(row), 1)


def sorted_run(const uint64_t[::1] hi, const uint64_t[::1] lo):
    """Sort the rows of one file into a flat run, uint8[24 * n]. The file number is 0, and the position of a row is its
    place in the arrays. Raises MemoryError when there is no memory."""
    cdef int64_t i, bucket, n = hi.shape[0], bits = 0, start, stop
    while bits < 20 and (n >> bits) > 8:
        bits += 1
    out = np.empty(n * ENTRY, dtype=np.uint8)
    if n == 0:
        return out
    cdef uint8_t[::1] view = out
    cdef Entry* entries = <Entry*>&view[0]
    cdef int64_t buckets = 1 << bits
    cdef int64_t* ends = <int64_t*>calloc(buckets + 1, sizeof(int64_t))
    if ends == NULL:
        raise MemoryError
    with nogil:
        for i in range(n):
            ends[seamark_guess(buckets, hi[i]) + 1] += 1
        for bucket in range(buckets):
            ends[bucket + 1] += ends[bucket]
        for i in range(n):  # moves the start of each bucket to its end
            bucket = seamark_guess(buckets, hi[i])
            stop = ends[bucket]
            ends[bucket] += 1
            entries[stop].hi = hi[i]
            entries[stop].lo = lo[i]
            entries[stop].file = 0
            entries[stop].position = <uint32_t>i
        start = 0
        for bucket in range(buckets):
            _sort(&entries[start], ends[bucket] - start)
            start = ends[bucket]
    free(ends)
    return out


cdef void _sort(Entry* entries, int64_t n) noexcept nogil:
    """Sort the entries of one bucket. The positions of equal hashes ascend before the sort. An insertion sort does not
    change their order, and the comparison for `qsort` compares the positions last."""
    cdef int64_t i, j
    cdef Entry one
    if n > INSERTION_MAX:
        qsort(entries, n, ENTRY, &seamark_compare)
        return
    for i in range(1, n):
        one = entries[i]
        j = i
        while j > 0 and (entries[j - 1].hi > one.hi or (entries[j - 1].hi == one.hi and entries[j - 1].lo > one.lo)):
            entries[j] = entries[j - 1]
            j -= 1
        entries[j] = one


ctypedef struct Cursor:
    const Entry* entry  # the next entry
    const Entry* end  # the end of the current page, or of a flat run
    const uint8_t* pages  # NULL for a flat run
    int64_t page  # the next page
    int64_t page_count
    const uint32_t* numbers  # the new file numbers, or DROPPED
    int64_t files
    uint32_t file  # the file of the next entry


cdef class Merger:
    """Merges runs into one run, page by page. Each of `runs` is (memory, number of pages or -1 for a flat run, uint32
    new number of each file)."""

    cdef list _alive  # the arrays that the cursors point into
    cdef Cursor* _cursors
    cdef int64_t* _heap  # the numbers of the runs with further entries, the run with the least entry first
    cdef int64_t _live  # the number of runs with further entries
    cdef int64_t _files

    def __cinit__(self, list runs, int64_t files):
        cdef const uint8_t[::1] memory
        cdef const uint32_t[::1] numbers
        cdef int64_t i, n = len(runs), pages
        cdef Cursor* cursor
        self._alive = []
        self._files = files
        self._cursors = <Cursor*>calloc(n + 1, sizeof(Cursor))
        self._heap = <int64_t*>malloc((n + 1) * sizeof(int64_t))
        if self._cursors == NULL or self._heap == NULL:
            raise MemoryError
        for i in range(n):
            memory, pages, numbers = runs[i]
            self._alive.append((memory, numbers))
            if memory.shape[0] != pages * PAGE if pages >= 0 else memory.shape[0] % ENTRY != 0:
                raise ValueError(f"{memory.shape[0]} bytes are not the run they should be")
            cursor = &self._cursors[i]
            cursor.files = numbers.shape[0]
            cursor.numbers = &numbers[0] if numbers.shape[0] else NULL
            if memory.shape[0] == 0:
                continue
            if pages >= 0:
                cursor.pages = &memory[0]
                cursor.page_count = pages
            else:
                cursor.entry = <const Entry*>&memory[0]
                cursor.end = cursor.entry + memory.shape[0] // ENTRY
        for i in range(n):
            if self._settle(&self._cursors[i]):
                self._heap[self._live] = i
                self._live += 1
        for i in range(self._live // 2 - 1, -1, -1):
            self._sift(i)

    def __dealloc__(self):
        free(self._cursors)
        free(self._heap)

    cdef bint _settle(self, Cursor* cursor) except -1 nogil:
        """Move the cursor to the next entry of a file that is not dropped. The cursor does not move if it is at such an
        entry. Returns False at the end of the run."""
        while True:
            if cursor.entry == cursor.end:
                if cursor.page == cursor.page_count:
                    return False
                _check_page(cursor.pages + cursor.page * PAGE, cursor.page)
                cursor.entry = <const Entry*>(cursor.pages + cursor.page * PAGE + HEAD)
                cursor.end = cursor.entry + _page_entries(cursor.pages + cursor.page * PAGE)
                cursor.page += 1
                continue
            if cursor.entry.file >= cursor.files:
                with gil:
                    raise ValueError(f"an entry is of file {cursor.entry.file}, of {cursor.files}")
            cursor.file = cursor.numbers[cursor.entry.file]
            if cursor.file != DROPPED:
                return True
            cursor.entry += 1

    cdef bint _before(self, int64_t one, int64_t other) noexcept nogil:
        """Return whether the next entry of the run `one` precedes the next entry of the run `other`. The runs are in
        the order of their files' new numbers, so the number of the run decides between equal hashes."""
        cdef const Entry* a = self._cursors[one].entry
        cdef const Entry* b = self._cursors[other].entry
        if a.hi != b.hi:
            return a.hi < b.hi
        if a.lo != b.lo:
            return a.lo < b.lo
        return one < other

    cdef void _sift(self, int64_t at) noexcept nogil:
        """Move the run at a place of the heap down to its place in the order."""
        cdef int64_t child, moved = self._heap[at]
        while True:
            child = 2 * at + 1
            if child >= self._live:
                break
            if child + 1 < self._live and self._before(self._heap[child + 1], self._heap[child]):
                child += 1
            if not self._before(self._heap[child], moved):
                break
            self._heap[at] = self._heap[child]
            at = child
        self._heap[at] = moved

    def fill(self, uint8_t[::1] pages, int64_t first_page, uint64_t[::1] fences, uint64_t[::1] counts):
        """Write the next pages, as many as `pages` has room for, and return how many were written. The number of
        entries of each file is added to `counts`.

        Raises ValueError if a page of a run is damaged.
        """
        cdef int64_t page = 0, n, room = min(pages.shape[0] // PAGE, fences.shape[0])
        if counts.shape[0] < self._files:
            raise ValueError(f"{counts.shape[0]} counts for {self._files} files")
        cdef uint8_t* at
        with nogil:
            while page < room and self._live > 0:
                at = &pages[page * PAGE]
                n = self._fill(<Entry*>(at + HEAD), counts)
                memset(at, 0, HEAD)
                memset(at + HEAD + n * ENTRY, 0, (PER_PAGE - n) * ENTRY)
                (<uint32_t*>(at + 8))[0] = <uint32_t>n
                (<uint64_t*>at)[0] = xxh64(at + 8, PAGE - 8, <uint64_t>(first_page + page))
                fences[page] = (<Entry*>(at + HEAD)).hi
                page += 1
        return page

    cdef int64_t _fill(self, Entry* out, uint64_t[::1] counts) except -1 nogil:
        """Write the next entries, at most a page, and return how many were written."""
        cdef int64_t n = 0
        cdef Cursor* cursor
        while n < PER_PAGE and self._live > 0:
            cursor = &self._cursors[self._heap[0]]
            out[n] = cursor.entry[0]
            out[n].file = cursor.file
            counts[cursor.file] += 1
            n += 1
            cursor.entry += 1
            if not self._settle(cursor):
                self._live -= 1
                self._heap[0] = self._heap[self._live]
                if self._live == 0:
                    break
            self._sift(0)
        return n


def stretches(const uint64_t[::1] fences, const uint64_t[::1] hi):
    """Return the stretches of pages that can have one of the hashes, as int64[n, 2]: the first page of the stretch, and
    the page after its last page. `hi` and the stretches ascend. Two stretches neither overlap nor touch."""
    cdef int64_t i, begin, end, n = 0, count = fences.shape[0]
    out = np.empty((hi.shape[0], 2), np.int64)
    cdef int64_t[:, ::1] span = out
    with nogil:
        for i in range(hi.shape[0] if count else 0):
            begin = end = seamark_fence(&fences[0], count, hi[i])
            while end < count and fences[end] == hi[i]:
                end += 1
            begin = begin - 1 if begin else 0
            if end == 0:
                continue
            if n and begin <= span[n - 1, 1]:
                span[n - 1, 1] = max(end, span[n - 1, 1])
            else:
                span[n, 0], span[n, 1] = begin, end
                n += 1
    return out[:n]


cdef inline int64_t _page_entries(const uint8_t* page) noexcept nogil:
    """Return how many entries a page has, as the page says."""
    return (<const uint32_t*>(page + 8))[0]


cdef inline const Entry* _first(const uint8_t* page) noexcept nogil:
    """Return the first entry of a page."""
    return <const Entry*>(page + HEAD)


cdef int _check_page(const uint8_t* page, int64_t number) except -1 nogil:
    """Raise ValueError if a page does not match its checksum, or cannot have as many entries as it says."""
    if (<const uint64_t*>page)[0] != xxh64(page + 8, PAGE - 8, <uint64_t>number):
        with gil:
            raise ValueError(f"page {number} does not match its checksum")
    if not 0 < _page_entries(page) <= PER_PAGE:
        with gil:
            raise ValueError(f"page {number} claims {_page_entries(page)} entries")
    return 0


ctypedef struct Match:
    int64_t count  # the number of entries with the query's hash
    int64_t place  # the place of the first entry: its page times the entries of a page, plus its place in the page
    uint32_t file
    uint32_t position


ctypedef struct Query:
    uint64_t hi
    uint64_t lo
    int64_t number


def _enlarge(array, int64_t room):
    """Return an array with `room` places that begins with the values of an array."""
    enlarged = np.empty(room, array.dtype)
    enlarged[: len(array)] = array
    return enlarged


cdef void _ascending(const uint64_t[::1] hi, const uint64_t[::1] lo, Query* queries) noexcept nogil:
    """Write the hashes to `queries` in almost ascending order. If there are too few for the order to save time, they
    stay in their order."""
    cdef int64_t i, bucket, before, count, at, n = hi.shape[0]
    cdef int64_t starts[BUCKETS]
    memset(starts, 0, sizeof(starts))
    if n >= SORTED_MIN:
        for i in range(n):
            starts[hi[i] >> BUCKET_SHIFT] += 1
        before = 0
        for bucket in range(BUCKETS):
            count = starts[bucket]
            starts[bucket] = before
            before += count
    for i in range(n):
        at = i
        if n >= SORTED_MIN:
            bucket = hi[i] >> BUCKET_SHIFT
            at = starts[bucket]
            starts[bucket] = at + 1
        queries[at].hi, queries[at].lo, queries[at].number = hi[i], lo[i], i


cdef class Pages:
    """Pages in ascending order, which are read in place: all pages of a run, or the pages that the caller has fetched.

    `pages` is uint8[4096 * n]. `fences`, uint64[n], has the first hash of each page. `numbers`, int64[n], has the
    number of each page in its run; it is empty if these are all pages. The checksum of a page is verified when the page
    is first read.
    """

    cdef const uint8_t[::1] _pages
    cdef const uint64_t[::1] _fences
    cdef const int64_t[::1] _numbers
    cdef uint8_t[::1] _read
    cdef int64_t _count
    cdef uint32_t _files
    cdef bint _all

    def __init__(self, const uint8_t[::1] pages, const uint64_t[::1] fences, const int64_t[::1] numbers, uint32_t files):
        self._count = fences.shape[0]
        self._all = numbers.shape[0] == 0
        if pages.shape[0] != self._count * PAGE or not (self._all or numbers.shape[0] == self._count):
            raise ValueError(f"{pages.shape[0]} bytes are not {self._count} pages")
        self._pages, self._fences, self._numbers, self._files = pages, fences, numbers, files
        self._read = np.zeros(self._count, dtype=np.uint8)

    cdef int64_t _entries(self, int64_t page) except -1 nogil:
        """Return how many entries a page has. The page's checksum is verified if that was not done before."""
        cdef const uint8_t* at
        if not self._read[page]:
            at = &self._pages[page * PAGE]
            _check_page(at, page if self._all else self._numbers[page])
            if _first(at).hi != self._fences[page]:
                with gil:
                    raise ValueError(f"page {page if self._all else self._numbers[page]} does not begin at its fence")
            self._read[page] = <uint8_t>_page_entries(at)
        return self._read[page]

    cdef inline const Entry* _entry(self, int64_t page, int64_t at) noexcept nogil:
        return _first(&self._pages[page * PAGE]) + at

    cdef inline uint64_t _end(self, int64_t page) noexcept nogil:
        """Return the first hash of the next page."""
        return self._fences[page + 1] if page + 1 < self._count else UINT64_MAX

    cdef int _next(self, int64_t* page, int64_t* at, uint64_t hi, uint64_t lo) except -1 nogil:
        """Return 1 if the entry at (page, at), or the first entry after that place, has this hash, and set (page, at)
        to its place. Otherwise return 0."""
        cdef const Entry* entry
        while page[0] < self._count:
            if at[0] < self._entries(page[0]):
                entry = self._entry(page[0], at[0])
                if entry.hi != hi or entry.lo != lo:
                    return 0
                if entry.file >= self._files:
                    with gil:
                        raise ValueError(f"an entry is of file {entry.file}, of {self._files}")
                return 1
            if self._end(page[0]) > hi:
                return 0
            page[0] += 1
            at[0] = 0
        return 0

    cdef int _find(self, int64_t fence, int64_t* page, int64_t* at, uint64_t hi, uint64_t lo) except -1 nogil:
        """Find the first entry with this hash in all pages, and return as `_next` does. `fence` is the place of the
        first fence that is not less than `hi`."""
        cdef int64_t n
        page[0] = fence - 1 if fence else 0
        if self._count == 0 or self._fences[page[0]] > hi:
            return 0
        while True:
            n = self._entries(page[0])
            at[0] = seamark_within(self._entry(page[0], 0), n, self._fences[page[0]], self._end(page[0]), hi, lo)
            if at[0] < n or page[0] + 1 == self._count or self._end(page[0]) > hi:
                return self._next(page, at, hi, lo)
            page[0] += 1

    cdef void _prefetch(self, int64_t fence, uint64_t hi) noexcept nogil:
        """Load the memory in which the entry of a hash probably is into the processor's cache."""
        cdef int64_t page = fence - 1 if fence else 0, at
        if self._fences[page] <= hi:
            at = seamark_place(PER_PAGE, self._fences[page], self._end(page), hi)
            prefetch(self._entry(page, max(at - 4, 0)))
            prefetch(self._entry(page, at))
            prefetch(self._entry(page, min(at + 4, PER_PAGE - 1)))

    def find(self, uint64_t hi, uint64_t lo):
        """Return [(file, position), …] of the entries with one hash. Raises ValueError if a page that is read is
        damaged."""
        cdef int64_t page, at
        cdef const Entry* entry
        found = []
        if self._count == 0:
            return found
        cdef int there = self._find(seamark_fence(&self._fences[0], self._count, hi), &page, &at, hi, lo)
        while there:
            entry = self._entry(page, at)
            found.append((entry.file, entry.position))
            at += 1
            there = self._next(&page, &at, hi, lo)
        return found

    def lookup(self, const uint64_t[::1] hi, const uint64_t[::1] lo):
        """Return (query int64[m], file int32[m], position int64[m]) in the order of queries, then of files and
        positions. Raises ValueError if a page that is read is damaged.

        The queries are processed in stretches. The hashes of a stretch are almost in order, so that neighbours share
        pages of the run and entries of the page table. A stretch is processed in groups. Each step is done for all
        queries of a group, so that it waits for memory once for the group and not once for each hash.
        """
        cdef int64_t i, stop, n = hi.shape[0] if self._count else 0, room = max(n, 1), out = 0, more
        if lo.shape[0] != hi.shape[0]:
            raise ValueError(f"{hi.shape[0]} high halves of hashes and {lo.shape[0]} low ones")
        queries, files, positions = np.empty(room, np.int64), np.empty(room, np.int32), np.empty(room, np.int64)
        scratch = np.empty(min(room, STRETCH) * (sizeof(Query) + sizeof(Match)), np.uint8)
        cdef uint8_t[::1] memory = scratch
        cdef Query* ascending = <Query*>&memory[0]
        cdef Match* match = <Match*>(ascending + min(room, STRETCH))
        i = 0
        while i < n:
            stop = min(i + STRETCH, n)
            with nogil:
                _ascending(hi[i:stop], lo[i:stop], ascending)
                more = self._locate(ascending, stop - i, match)
            if out + more > room:  # some keys have several rows
                room = max(2 * room, out + more)
                queries, files, positions = (_enlarge(array, room) for array in (queries, files, positions))
            self._emit(hi[i:stop], lo[i:stop], match, i, queries[out:], files[out:], positions[out:])
            out += more
            i = stop
        return queries[:out], files[:out], positions[:out]

    cdef int64_t _locate(self, const Query* queries, int64_t n, Match* match) except -1 nogil:
        """Find the matches of n queries. Returns how many matches there are."""
        cdef int64_t start, j, size, total = 0
        cdef int64_t fence[GROUP]
        cdef const Query* group
        start = 0
        while start < n:
            group, size = queries + start, min(<int64_t>GROUP, n - start)
            for j in range(size):
                prefetch(&self._fences[seamark_guess(self._count, group[j].hi)])
            for j in range(size):
                fence[j] = seamark_fence(&self._fences[0], self._count, group[j].hi)
                self._prefetch(fence[j], group[j].hi)
            for j in range(size):
                total += self._match(&group[j], fence[j], &match[group[j].number])
            start += size
        return total

    cdef int64_t _match(self, const Query* query, int64_t fence, Match* match) except -1 nogil:
        """Find the matches of one query. Returns how many matches there are."""
        cdef int64_t page, at
        cdef const Entry* entry
        match.count = 0
        if not self._find(fence, &page, &at, query.hi, query.lo):
            return 0
        entry = self._entry(page, at)
        match.place, match.file, match.position = page * PER_PAGE + at, entry.file, entry.position
        while True:
            match.count += 1
            at += 1
            if not self._next(&page, &at, query.hi, query.lo):
                return match.count

    cdef int _emit(
        self,
        const uint64_t[::1] hi,
        const uint64_t[::1] lo,
        const Match* match,
        int64_t first,
        int64_t[::1] query,
        int32_t[::1] file,
        int64_t[::1] position,
    ) except -1:
        """Write the matches of the queries in the order of the queries, whose numbers begin at `first`."""
        cdef int64_t i, page, at, out = 0
        with nogil:
            for i in range(hi.shape[0]):
                if match[i].count == 0:
                    continue
                query[out], file[out], position[out] = first + i, <int32_t>match[i].file, match[i].position
                out += 1
                if match[i].count == 1:
                    continue
                page, at = match[i].place // PER_PAGE, match[i].place % PER_PAGE + 1
                while self._next(&page, &at, hi[i], lo[i]):
                    query[out], file[out] = first + i, <int32_t>self._entry(page, at).file
                    position[out] = self._entry(page, at).position
                    out += 1
                    at += 1
        return 0

    def check(self, uint64_t[::1] counts):
        """Read every page, and verify its checksum, its fence and the order of its entries. The number of entries of
        each file is added to `counts`. Returns the number of all entries.

        Raises ValueError if a page is damaged, or its entries are out of order.
        """
        cdef int64_t page, at, n, total = 0
        cdef const Entry* entry
        cdef const Entry* before = NULL
        if counts.shape[0] < self._files:
            raise ValueError(f"{counts.shape[0]} counts for {self._files} files")
        with nogil:
            for page in range(self._count):
                n = self._entries(page)
                for at in range(n):
                    entry = self._entry(page, at)
                    if entry.file >= self._files or (before != NULL and seamark_compare(before, entry) >= 0):
                        with gil:
                            raise ValueError(f"entry {at} of page {page} is out of order or of file {entry.file}")
                    counts[entry.file] += 1
                    before = entry
                total += n
        return total
