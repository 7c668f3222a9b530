"""Limits the size of rows before they are decoded."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import TooLarge
from seamark.metaserver.streams.incoming.arrow_expansion import estimate_expanded_bytes
from seamark.metaserver.streams.incoming.rows import count_leaves

DECODED_BYTES_MAX = 64 << 20
"""The maximum size of the decoded rows of one request, which is the maximum size of an append to the log."""
_VALUE_BYTES = 4
"""The minimum size of a value of most types in the log, including a null."""


def check_size(batches: Sequence[pa.RecordBatch], metadata: TableMetadata) -> int:
    """Return the approximate size of the decoded rows, after checking that it is at most `DECODED_BYTES_MAX`.

    Raises:
        TooLarge: The decoded rows would be larger.
        BadRequest: The size of a column cannot be estimated, for example because its list views repeat an element.
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
    """Check that the rows do not have too many values, including nulls in columns that the rows lack.

    A short row of a wide table becomes many nulls, so the size of the body does not limit the memory.

    Raises:
        TooLarge: The rows have too many values.
    """
    columns = sum(count_leaves(field.type) for field in metadata.current_schema.fields)
    if rows * columns * _VALUE_BYTES > DECODED_BYTES_MAX:
        raise TooLarge(
            f"The body has {rows:,} rows for a table with {columns:,} columns; send at most "
            f"{DECODED_BYTES_MAX // (columns * _VALUE_BYTES):,} rows in a request"
        )
