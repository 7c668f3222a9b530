"""Defines types of numpy arrays, and joins the chunks of Arrow columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Longs = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def combine_to_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array. Its chunks are joined.

    For some types, `combine_chunks` still returns a chunked array, whose chunks are then concatenated.
    """
    if isinstance(column, pa.Array):
        return column
    # `combine_chunks` would copy even a single chunk.
    if column.num_chunks == 1 and column.chunk(0).offset == 0:
        return column.chunk(0)
    result = column.combine_chunks()
    return result if isinstance(result, pa.Array) else pa.concat_arrays(result.chunks)
