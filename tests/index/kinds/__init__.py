"""The kinds of index, and their kernels."""
