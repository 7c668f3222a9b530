"""The rows of a batch that count: one for each key, the latest of those that have it.

Later is what has the greater value in the precombine column: null before all others, NaN after all numbers, both zeros
alike, strings by their bytes. Of rows that are equally late the last given counts.
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

from seamark.connector.arrow.casting import Unwritable, arrow_schema, conform
from seamark.connector.write.row_locations import BatchKeys, hashes_of, key_fields
from seamark.metaserver.iceberg.expressions.arrow import plain_type
from seamark.metaserver.iceberg.types.schema import Field, Schema
from seamark.metaserver.index.keys.arrow_keys import keys_of
from seamark.metaserver.index.keys.delete_files import merge_zeros
from seamark.metaserver.index.keys.keys import has_codes, mask_of

Mask = npt.NDArray[np.bool_]
Longs = npt.NDArray[np.int64]

_NAN = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class Batch:
    """Row k is that of key k."""

    rows: pa.Table
    keys: BatchKeys
    precombine: Field | None
    partial: bool
    """Whether other columns are to be taken from what is stored."""


def batch_of(
    given: Sequence[pa.RecordBatch],
    schema: Schema,
    keys: Sequence[str],
    precombine: str | None = None,
    columns: Sequence[str] | None = None,
) -> Batch:
    """Of the columns that the rows have, or of the keys, `columns` and `precombine`. Unwritable for rows without a key,
    or that the table cannot have."""
    fields = key_fields(schema, keys)
    by_name = {one.name: one for one in schema.fields}
    needed = list(dict.fromkeys([*keys, *(columns or ()), *([precombine] if precombine is not None else [])]))
    _check_named("the table has", needed, by_name)
    for batch in given:
        had = batch.schema.names
        _check_named("the rows have", needed, had)
        _check_named("the table has", had, by_name)
        if several := [one for one in (had if columns is None else needed) if had.count(one) > 1]:
            raise Unwritable(f"the rows have {had.count(several[0])} columns {several[0]}; give each once")
        if columns is None and set(had) != set(given[0].schema.names):
            raise Unwritable("some of the rows have other columns than the first; give each the same")
    table = _table(
        given if columns is None else [batch.select(needed) for batch in given], [by_name[one] for one in needed]
    )
    found = [column_of(table, one) for one in fields]
    refuse_nulls(fields, found)
    combining = None if precombine is None else by_name[precombine]
    rank = Rank.of(None if combining is None else column_of(table, combining), combining, table.num_rows)
    kept = pa.array(latest(hashes_of(fields, found), rank))
    return Batch(table.take(kept), BatchKeys(fields, [one.take(kept) for one in found]), combining, columns is not None)


def refuse_nulls(fields: Sequence[Field], columns: Sequence[pa.Array]) -> None:
    """Unwritable where a column of a key has one."""
    for field, column in zip(fields, columns, strict=True):
        if column.null_count:
            raise Unwritable(f"column {field.name} is null in {column.null_count:,} of the rows; a key has no nulls")


def _check_named(what: str, names: Iterable[str], among: Collection[str]) -> None:
    if lacking := [one for one in names if one not in among]:
        raise Unwritable(f"{what} no column {lacking[0]}; only {', '.join(among)[:500]}")


def _table(given: Sequence[pa.RecordBatch], fields: Sequence[Field]) -> pa.Table:
    """Of the rows; of these columns where there are none."""
    if not given:
        return pa.schema([(one.name, plain_type(one.type)) for one in fields]).empty_table()
    try:
        return pa.concat_tables([pa.Table.from_batches([one]) for one in given], promote_options="permissive")
    except pa.ArrowException as error:
        raise Unwritable(f"the batches of rows do not fit each other: {error}") from None


def column_of(table: pa.Table, field: Field) -> pa.Array:
    """One column with the type that it has in data files. Unwritable where it cannot have it."""
    part = Schema((msgspec.structs.replace(field, required=False),), 0)
    arrow = arrow_schema(part)
    # of one batch at least, as arrays of no chunk have no type of their own
    batches = table.select([field.name]).to_batches() or [pa.RecordBatch.from_pylist([], arrow)]
    return pa.concat_arrays([conform(one.rename_columns([field.name]), part, arrow).column(0) for one in batches])


@dataclass(frozen=True)
class Rank:
    """Which of two rows is later: bool[rows], null is not; then uint64[rows]. Compared among rows of one ranking."""

    valid: Mask
    number: npt.NDArray[np.uint64]

    @staticmethod
    def of(column: pa.Array | None, field: Field | None, rows: int) -> Rank:
        """Of a column as `column_of` makes it; without one all are equally late."""
        if column is None or field is None:
            return Rank(np.ones(rows, dtype=np.bool_), np.zeros(rows, dtype=np.uint64))
        kind = field.type
        if not isinstance(kind, str):
            raise Unwritable(f"column {field.name} is of no primitive type; rows are not combined by it")
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        if has_codes(kind):
            keys = keys_of(column, kind)
            keys = (merge_zeros([keys]) or [keys])[0]
            assert keys.codes is not None
            codes = keys.codes if keys.nan is None else np.where(mask_of(keys.nan, keys.rows), _NAN, keys.codes)
            return Rank(valid, codes)
        storage = column.storage if isinstance(column, pa.ExtensionArray) else column
        number = pc.rank(storage, tiebreaker="dense").to_numpy(zero_copy_only=False).astype(np.uint64)
        return Rank(valid, np.where(valid, number, np.uint64(0)))

    def take(self, rows: Longs | slice) -> Rank:
        return Rank(self.valid[rows], self.number[rows])

    def is_before(self, other: Rank) -> Mask:
        found: Mask = (other.valid & ~self.valid) | ((self.valid == other.valid) & (self.number < other.number))
        return found


def latest(groups: Sequence[npt.NDArray[Any]], rank: Rank) -> Longs:
    """The number of the latest row of each group, ascending; the rows of a group are equal in all of the arrays."""
    if not len(rank.number):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((np.arange(len(rank.number)), rank.number, rank.valid, *groups))
    last = np.ones(len(order), dtype=np.bool_)
    last[:-1] = np.logical_or.reduce([one[order[1:]] != one[order[:-1]] for one in groups])
    return np.sort(order[last])
