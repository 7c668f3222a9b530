from seamark.formats.index.kernels._bits cimport Words

cdef enum:
    SLICES_MAX = 32

cdef class Slices:
    cdef Words[SLICES_MAX] starts
    cdef int[SLICES_MAX] moves
    cdef readonly int count
    cdef readonly Py_ssize_t rows
    cdef Py_ssize_t words
    cdef list held
