"""Memory that is only needed while a manifest is decoded and packed; `_memory.pyx` describes how it is reused."""

from libc.stdint cimport uint8_t

cdef void* take(size_t size) noexcept nogil
cdef void give(void* memory, size_t size) noexcept nogil
cdef void* retake(void* memory, size_t used, size_t size, size_t larger) noexcept nogil


cdef class Memory:
    cdef uint8_t* data
    cdef size_t taken
    cdef readonly size_t size
    cdef Py_ssize_t shape[1]


cdef Memory adopted(void* memory, size_t taken, size_t size)
