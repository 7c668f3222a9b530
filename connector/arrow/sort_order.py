"""Sorts rows by a table's sort order (Iceberg spec, "Sorting"). Arrow would sort nulls and NaN differently.

Floats are ordered as in the spec: -NaN < -Infinity < … < -0.0 < 0.0 < … < Infinity < NaN. Strings and bytes are
compared as unsigned bytes. The sort order defines whether nulls are first or last. The sort is stable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.arrow.partitions import PartitionTerm, apply_transform, build_term, get_column_at
from seamark.formats.iceberg.metadata.sort_order import SortOrder
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.transforms import IDENTITY, VOID
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.keys import has_codes, unpack_bits

_NAN = np.uint64(2**64 - 1)
"""The rank of NaN, which is larger than the rank of each other float."""


@dataclass(frozen=True)
class _Field:
    """A field of a sort order, with the term to compute its values."""

    term: PartitionTerm
    descending: bool
    nulls_first: bool


class Ordering:
    """Sorts rows from `casting.conform` by one sort order.

    Raises:
        Unwritable: The order cannot be applied to the schema.
    """

    def __init__(self, order: SortOrder, schema: Schema) -> None:
        self.order_id = order.order_id
        self._fields = [
            _Field(
                build_term(field.transform, field.sources, schema, f"Sort field {field.describe()}"),
                field.direction == "desc",
                field.null_order == "nulls-first",
            )
            for field in order.fields
            if field.transform != VOID
        ]

    def sort(self, rows: pa.Table) -> pa.Table:
        keys: list[npt.NDArray[np.uint64]] = []
        for field in self._fields:
            keys.extend(_build_sort_keys(field, rows))
        if not keys or rows.num_rows < 2:
            return rows
        order = np.lexsort(keys[::-1])
        if (order[1:] > order[:-1]).all():
            return rows
        return rows.take(pa.array(order))


def _build_sort_keys(field: _Field, rows: pa.Table) -> list[npt.NDArray[np.uint64]]:
    """Return the sort keys of a field, uint64[rows] each. The most significant key is first.

    With nulls, the first key separates the nulls from the values. It is 0 for the rows that come first.
    """
    ranks, valid = _rank_values(field.term, rows)
    ranks = ~ranks if field.descending else ranks
    if valid is None:
        return [ranks]
    return [(valid if field.nulls_first else ~valid).astype(np.uint64), np.where(valid, ranks, np.uint64(0))]


def _rank_values(term: PartitionTerm, rows: pa.Table) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_] | None]:
    """Return the rank of each value as uint64[rows], and whether it is not null as bool[rows].

    The second result is None if there are no nulls. A larger value has a larger rank. The rank of a null has no
    meaning. A type whose values have integer codes in their order needs no sort for its ranks.
    """
    column = get_column_at(rows, term.positions)
    if term.transform != IDENTITY:
        distinct = apply_transform(term.transform, term.kind, column)
        sorted_values = sorted((value, code) for code, value in enumerate(distinct.values) if value is not None)
        ranks = np.zeros(len(distinct.values), dtype=np.uint64)
        ranks[[code for _, code in sorted_values]] = np.arange(len(sorted_values), dtype=np.uint64)
        has_value = np.array([value is not None for value in distinct.values], dtype=np.bool_)
        return ranks[distinct.codes], None if has_value.all() else has_value[distinct.codes]
    if has_codes(term.kind):
        keys = convert_to_keys(column, term.kind)
        assert keys.codes is not None
        codes = keys.codes if keys.nan is None else np.where(unpack_bits(keys.nan, keys.rows), _NAN, keys.codes)
        return codes, None if keys.valid is None else unpack_bits(keys.valid, keys.rows)
    storage = _to_storage(column)
    ranks = pc.rank(storage, tiebreaker="dense").to_numpy(zero_copy_only=False).astype(np.uint64)
    return ranks, storage.is_valid().to_numpy(zero_copy_only=False) if storage.null_count else None


def _to_storage(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
