"""Limits the size of rows before they are decoded."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import TooLarge
from seamark.metaserver.streams.incoming.arrow_expansion import estimate_expanded_bytes
from seamark.metaserver.streams.incoming.rows import count_leaves

DECODED_BYTES_MAX = 64 << 20
"""The maximum size of the decoded rows of one request. The log accepts no larger append."""
_VALUE_BYTES = 4
"""The minimum size of a value of most types in the log, including a null."""


def check_size(batches: Sequence[pa.RecordBatch], metadata: TableMetadata) -> int:
    """Check that the decoded rows have at most `DECODED_BYTES_MAX`, before they are decoded; return their size.

    Raises:
        TooLarge: The rows have more bytes.
        BadRequest: A column has a form whose size is not estimated.
    """
    check_columns(sum(batch.num_rows for batch in batches), metadata)
    size_bytes = 0
    for batch in batches:
        for field, column in zip(batch.schema, batch.columns, strict=True):
            size_bytes += estimate_expanded_bytes(column, field.name[:100])
            if size_bytes > DECODED_BYTES_MAX:
                raise TooLarge(
                    f"The decoded rows have more than {DECODED_BYTES_MAX:,} bytes; send them in several requests"
                )
    return size_bytes


def check_columns(rows: int, metadata: TableMetadata) -> None:
    """Check the size of the columns of a table for rows that may lack most of them.

    Raises:
        TooLarge: The columns have too many values.
    """
    columns = sum(count_leaves(field.type) for field in metadata.current_schema.fields)
    if rows * columns * _VALUE_BYTES > DECODED_BYTES_MAX:
        raise TooLarge(
            f"The body has {rows:,} rows for a table with {columns:,} columns; send at most "
            f"{DECODED_BYTES_MAX // (columns * _VALUE_BYTES):,} rows in a request"
        )
