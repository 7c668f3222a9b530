"""Index kinds, their keys and kernels, definitions, and the format of index files."""
