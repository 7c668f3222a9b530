"""Defines types of numpy arrays, and converts Arrow columns to single arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Longs = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def combine_to_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column, which may have chunks, as one array."""
    if isinstance(column, pa.Array):
        return column
    # The next call would copy even a single chunk.
    if column.num_chunks == 1 and column.chunk(0).offset == 0:
        return column.chunk(0)
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
