"""Reads string columns as dictionary codes if few of the rows are used.

To read a string column, most of the time is spent on copying the strings. If the column is read as codes, unused rows
are removed first, and only the strings of used rows are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

_USED_ROWS_MAX_FRACTION = 0.25
"""The maximum fraction of used rows for which a column is read as codes."""
_PLAIN_VALUE_MIN_BYTES = 4
"""The minimum size of a value in a page without a dictionary: the bytes of the string's length."""
_TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def should_read_codes(used_mask: npt.NDArray[np.bool_]) -> bool:
    """Return whether the strings of a row group should be read as dictionary codes, which is faster for few used rows.

    Args:
        used_mask: The used rows of the row group, as bool[rows].
    """
    return bool(np.count_nonzero(used_mask) <= _USED_ROWS_MAX_FRACTION * len(used_mask))


def select_coded_columns(file: pq.ParquetFile, number: int, names: Iterable[str]) -> list[str]:
    """Return the top-level string columns whose values in a row group are mostly stored with a dictionary.

    If they are not, pyarrow has to create the dictionary.

    Args:
        file: The file.
        number: The index of the row group.
        names: The columns from which to select.
    """
    schema, group = file.schema_arrow, file.metadata.row_group(number)
    # A name with a dot may also be the path of a field in a struct.
    flat_names = [name for name in names if "." not in name and schema.get_field_index(name) >= 0]
    coded_names = {name for name in flat_names if schema.field(name).type in _TYPES}
    column_names = []
    for leaf_number in range(group.num_columns) if coded_names else ():
        chunk = group.column(leaf_number)
        if (
            chunk.path_in_schema in coded_names
            and file.metadata.schema.column(leaf_number).max_repetition_level == 0
            and chunk.has_dictionary_page
            and chunk.total_uncompressed_size < _PLAIN_VALUE_MIN_BYTES * chunk.num_values
        ):
            column_names.append(chunk.path_in_schema)
    return column_names


def decode_strings(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with dictionary codes replaced by strings or binary values, in the types of the file's schema.

    A column that has another type in the schema does not change.
    """
    if not any(pa.types.is_dictionary(kind) for kind in batch.schema.types):
        return batch
    columns: Sequence[pa.Array] = [
        column.dictionary_decode().cast(schema.field(name).type)
        if pa.types.is_dictionary(column.type) and schema.field(name).type in _TYPES
        else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, list(batch.schema.names))
