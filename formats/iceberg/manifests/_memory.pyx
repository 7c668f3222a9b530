"""A pool of memory for the decoding and packing of manifests, which reuses freed memory.

A manifest of a thousand entries takes some megabytes for a few milliseconds. Memory from malloc would have new pages
each time, which the kernel creates in a third of the time that it takes to fill them. The pool keeps up to KEPT_MAX
freed bytes. Larger pieces are on huge pages if the kernel has them, which costs one page fault instead of 512.

The contents of memory from the pool are arbitrary, so its owner writes before it reads. Under the address sanitizer the
pool keeps no memory, so that the sanitizer sees every access past the end of a piece.
"""

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <stdlib.h>
    #include <sys/mman.h>

    #define SEAMARK_HUGE ((size_t)2 << 20)

    #if defined(__SANITIZE_ADDRESS__)
    #define SEAMARK_RECYCLES 0
    #else
    #define SEAMARK_RECYCLES 1
    #endif

    static void* seamark_fresh(size_t size) {
        if (!SEAMARK_RECYCLES || size < SEAMARK_HUGE || size > PTRDIFF_MAX)
            return malloc(size ? size : 1);
        size = (size + SEAMARK_HUGE - 1) / SEAMARK_HUGE * SEAMARK_HUGE;
        void* memory = aligned_alloc(SEAMARK_HUGE, size);
    #ifdef MADV_HUGEPAGE
        if (memory)
            madvise(memory, size, MADV_HUGEPAGE); /* where this advice is not taken, pages are small */
    #endif
        return memory;
    }

    static char seamark_busy;

    static inline void seamark_lock(void) { /* for a few instructions */
        while (__atomic_test_and_set(&seamark_busy, __ATOMIC_ACQUIRE))
            ;
    }

    static inline void seamark_unlock(void) {
        __atomic_clear(&seamark_busy, __ATOMIC_RELEASE);
    }
    """
    bint SEAMARK_RECYCLES
    void* seamark_fresh(size_t size) nogil
    void seamark_lock() nogil
    void seamark_unlock() nogil

cdef enum:
    CLASS_FIRST = 15  # 32 KiB; malloc itself keeps smaller pieces
    CLASSES = 8  # up to 4 MiB
    EACH_MAX = 64
    KEPT_MAX = 32 << 20

cdef void* kept[CLASSES][EACH_MAX]
cdef int counts[CLASSES]
cdef size_t kept_bytes = 0


cdef int class_of(size_t size) noexcept nogil:
    """Return the size class of `size` bytes: the smallest power of two that is at least `size`, counted from
    CLASS_FIRST. Returns -1 for sizes that the pool does not keep."""
    cdef int number = 0
    if not SEAMARK_RECYCLES or size <= <size_t>1 << (CLASS_FIRST - 1):
        return -1
    while number < CLASSES:
        if size <= <size_t>1 << (CLASS_FIRST + number):
            return number
        number += 1
    return -1


cdef void* take(size_t size) noexcept nogil:
    """Return at least `size` bytes, aligned to 16, or NULL when there is no memory."""
    global kept_bytes
    cdef int number = class_of(size)
    cdef void* memory = NULL
    if number < 0:
        return seamark_fresh(size)
    seamark_lock()
    if counts[number] > 0:
        counts[number] -= 1
        memory = kept[number][counts[number]]
        kept_bytes -= <size_t>1 << (CLASS_FIRST + number)
    seamark_unlock()
    return memory if memory != NULL else seamark_fresh(<size_t>1 << (CLASS_FIRST + number))


cdef void give(void* memory, size_t size) noexcept nogil:
    """Give back memory that `take(size)` returned. NULL is ignored."""
    global kept_bytes
    cdef int number = class_of(size)
    cdef size_t room
    if memory == NULL:
        return
    if number >= 0:
        room = <size_t>1 << (CLASS_FIRST + number)
        seamark_lock()
        if counts[number] < EACH_MAX and kept_bytes + room <= KEPT_MAX:
            kept[number][counts[number]] = memory
            counts[number] += 1
            kept_bytes += room
            memory = NULL
        seamark_unlock()
    free(memory)


cdef void* retake(void* memory, size_t used, size_t size, size_t larger) noexcept nogil:
    """Replace memory that `take(size)` returned by `take(larger)`, and copy its first `used` bytes. Returns NULL when
    there is no memory; then `memory` is still valid."""
    cdef void* moved = take(larger)
    if moved != NULL:
        if used:
            memcpy(moved, memory, used)
        give(memory, size)
    return moved


cdef class Memory:
    """A writable buffer of `size` bytes, which is freed with the last view of it. Raises MemoryError when there is no
    memory."""

    def __cinit__(self, size_t size):
        self.size = self.taken = size
        self.data = <uint8_t*>take(size)
        if self.data == NULL:
            raise MemoryError(f"no memory for {size} bytes")

    def __dealloc__(self):
        give(self.data, self.taken)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        self.shape[0] = <Py_ssize_t>self.size
        buffer.buf = self.data
        buffer.obj = self
        buffer.len = self.shape[0]
        buffer.itemsize = 1
        buffer.readonly = 0
        buffer.ndim = 1
        buffer.format = "B"
        buffer.shape = self.shape
        buffer.strides = &buffer.itemsize
        buffer.suboffsets = NULL
        buffer.internal = NULL


cdef Memory adopted(void* memory, size_t taken, size_t size):
    """Return a Memory of the first `size` bytes of `memory`, which `take(taken)` returned. The Memory frees it, so the
    caller must not."""
    cdef Memory found = Memory(0)
    give(found.data, 0)
    found.data = <uint8_t*>memory
    found.taken = taken
    found.size = size
    return found
