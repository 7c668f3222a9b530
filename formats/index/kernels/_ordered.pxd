cimport cython
from libc.stdint cimport uint32_t, uint64_t

@cython.final
cdef class Numbers:
    cdef readonly Py_ssize_t count
    cdef Py_ssize_t blocks
    cdef uint64_t unit, least
    cdef const uint64_t *firsts
    cdef const uint64_t *packed
    cdef const uint32_t *words
    cdef object held

    cdef uint64_t _step(self, Py_ssize_t base, int width, int k) noexcept nogil
    cdef Py_ssize_t _below(self, uint64_t bound, bint equal) noexcept nogil
    cdef bint _has(self, uint64_t least, uint64_t most) noexcept nogil
