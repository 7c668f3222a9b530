"""Types of numpy's arrays, and columns of Arrow as one array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Longs = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def single_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column that may be in chunks as one array."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1 and column.chunk(0).offset == 0:  # the next call copies also one chunk
        return column.chunk(0)
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
