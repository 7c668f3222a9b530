"""Deduplicates a batch: selects the latest row of each key.

The latest row has the largest value in the precombine column. Null is smaller than all values, NaN is larger than all
numbers, -0.0 equals 0.0, and strings are compared by their bytes. If several rows have the largest value, the last of
them in the batch is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.arrow.arrays import Longs, Mask
from seamark.connector.arrow.casting import Unwritable, build_arrow_schema, conform
from seamark.connector.write.row_locations import BatchKeys, find_key_fields, hash_key_columns
from seamark.formats.iceberg.expressions.arrow import to_row_type
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.delete_files import merge_zeros
from seamark.formats.index.keys.keys import has_codes, unpack_bits
from seamark.formats.runtime.repetitions import find_repeated

_NAN = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class KeyedBatch:
    """Rows with distinct keys. Row k has the key with index k in `keys`."""

    rows: pa.Table
    keys: BatchKeys
    precombine: Field | None
    """The column by which the latest of several rows with the same key is selected, or None."""
    partial: bool
    """Whether stored rows keep their values in the columns that the batch does not have."""


def find_latest_rows(
    batches: Sequence[pa.RecordBatch],
    schema: Schema,
    keys: Sequence[str],
    precombine: str | None = None,
    columns: Sequence[str] | None = None,
) -> KeyedBatch:
    """Return the latest row of each key.

    The result has all columns of the rows or, with `columns`, only these columns, the keys and `precombine`.

    Raises:
        Unwritable: A key is null, or the rows do not fit the table.
    """
    fields = find_key_fields(schema, keys)
    by_name = {field.name: field for field in schema.fields}
    needed_columns = list(dict.fromkeys([*keys, *(columns or ()), *([precombine] if precombine is not None else [])]))
    needed_names = set(needed_columns)
    _check_columns("the table has", needed_columns, by_name)
    for batch in batches:
        names = batch.schema.names
        _check_columns("the rows have", needed_columns, names)
        _check_columns("the table has", names, by_name)
        read_names = names if columns is None else [name for name in names if name in needed_names]
        if (repeated_name := find_repeated(read_names)) is not None:
            raise Unwritable(
                f"the rows have {names.count(repeated_name)} columns {repeated_name}; each name must occur once"
            )
        if columns is None and set(names) != set(batches[0].schema.names):
            name = min(set(names) ^ set(batches[0].schema.names))
            raise Unwritable(f"only some of the rows have the column {name}; all rows must have the same columns")
    table = _concatenate(
        batches if columns is None else [batch.select(needed_columns) for batch in batches],
        [by_name[column] for column in needed_columns],
    )
    key_columns = [read_column(table, field) for field in fields]
    check_no_nulls(fields, key_columns)
    precombine_field = None if precombine is None else by_name[precombine]
    rank = Rank.from_column(
        None if precombine_field is None else read_column(table, precombine_field), precombine_field, table.num_rows
    )
    latest_rows = pa.array(select_latest(hash_key_columns(fields, key_columns), rank))
    return KeyedBatch(
        table.take(latest_rows),
        BatchKeys(fields, [column.take(latest_rows) for column in key_columns]),
        precombine_field,
        columns is not None,
    )


def check_no_nulls(fields: Sequence[Field], columns: Sequence[pa.Array]) -> None:
    """Check that no key column contains a null.

    Raises:
        Unwritable: A key column contains a null.
    """
    for field, column in zip(fields, columns, strict=True):
        if column.null_count:
            raise Unwritable(
                f"column {field.name} is null in {column.null_count:,} of the rows; a key must not have nulls"
            )


def _check_columns(subject: str, names: Iterable[str], column_names: Collection[str]) -> None:
    if missing_columns := [name for name in names if name not in column_names]:
        raise Unwritable(f"{subject} no column {missing_columns[0]}; only {', '.join(column_names)[:500]}")


def _concatenate(batches: Sequence[pa.RecordBatch], fields: Sequence[Field]) -> pa.Table:
    """Return the rows as a table. Without rows, return an empty table with these columns."""
    if not batches:
        return pa.schema([(field.name, to_row_type(field.type)) for field in fields]).empty_table()
    try:
        return pa.concat_tables([pa.Table.from_batches([batch]) for batch in batches], promote_options="permissive")
    except pa.ArrowException as error:
        raise Unwritable(f"the batches of rows have different schemas: {error}") from None


def read_column(table: pa.Table, field: Field) -> pa.Array:
    """Return a column with the type that it has in data files.

    Raises:
        Unwritable: The column cannot be cast.
    """
    schema = Schema((msgspec.structs.replace(field, required=False),), 0)
    arrow = build_arrow_schema(schema)
    # The table has at least one batch. A concatenation of no arrays would have no type.
    batches = table.select([field.name]).to_batches() or [pa.RecordBatch.from_pylist([], arrow)]
    return pa.concat_arrays([conform(batch.rename_columns([field.name]), schema, arrow).column(0) for batch in batches])


@dataclass(frozen=True)
class Rank:
    """The order of rows. Only rows that were ranked together can be compared.

    Attributes:
        valid: Whether the value is not null, as bool[rows]. Nulls are before all values.
        number: The order of the values that are not null, as uint64[rows].
    """

    valid: Mask
    number: npt.NDArray[np.uint64]

    @staticmethod
    def from_column(column: pa.Array | None, field: Field | None, rows: int) -> Rank:
        """Return the ranks of the values of a column from `read_column`.

        Without a column, all rows have equal ranks.

        Raises:
            Unwritable: The column is a struct, a list or a map.
        """
        if column is None or field is None:
            return Rank(np.ones(rows, dtype=np.bool_), np.zeros(rows, dtype=np.uint64))
        kind = field.type
        if not isinstance(kind, str):
            raise Unwritable(f"column {field.name} has no primitive type and cannot be the precombine column")
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        # Types with codes are compared by 64-bit numbers. Both zeros have one code, and NaN is later than all values.
        if has_codes(kind):
            keys = convert_to_keys(column, kind)
            keys = (merge_zeros([keys]) or [keys])[0]
            assert keys.codes is not None
            codes = keys.codes if keys.nan is None else np.where(unpack_bits(keys.nan, keys.rows), _NAN, keys.codes)
            return Rank(valid, codes)
        storage = column.storage if isinstance(column, pa.ExtensionArray) else column
        number = pc.rank(storage, tiebreaker="dense").to_numpy(zero_copy_only=False).astype(np.uint64)
        return Rank(valid, np.where(valid, number, np.uint64(0)))

    def take(self, rows: Longs | slice) -> Rank:
        return Rank(self.valid[rows], self.number[rows])

    def is_before(self, other: Rank) -> Mask:
        is_lower: Mask = (other.valid & ~self.valid) | ((self.valid == other.valid) & (self.number < other.number))
        return is_lower


def select_latest(groups: Sequence[npt.NDArray[Any]], rank: Rank) -> Longs:
    """Return the ascending positions of the latest rows of all groups, as int64[groups].

    Rows that have equal values in all arrays of `groups` form a group. Of rows with equal ranks, the last row is the
    latest.
    """
    if not len(rank.number):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((np.arange(len(rank.number)), rank.number, rank.valid, *groups))
    is_last = np.ones(len(order), dtype=np.bool_)
    is_last[:-1] = np.logical_or.reduce([group[order[1:]] != group[order[:-1]] for group in groups])
    return np.sort(order[is_last])
