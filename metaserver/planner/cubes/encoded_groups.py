"""Selection of the groups of a cube that meet a condition, from columns that store each distinct value once.

The dimensions of a cube have few distinct values: an entry with 100,000 groups has some hundred cities. So a condition
on one dimension is evaluated for its distinct values, and the groups are selected by their codes. The parts of a
conjunction are applied one after the other. The most selective part is applied first, so few groups remain for the
other parts. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.formats.iceberg.expressions.arrow_filters import evaluate_filter
from seamark.formats.iceberg.expressions.expression import TRUE, And, Expression, collect_predicates
from seamark.formats.index.keys.group_conditions import get_group_column_name

_DISTINCT_VALUES_MAX = 1 << 16
"""The maximum number of distinct values of an encoded column, so that a code has at most two bytes."""
_ENCODED_GROUPS_MIN = 256
"""The minimum number of groups for which columns are encoded."""

_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _EncodedColumn:
    """An encoded column of groups.

    Attributes:
        values: The distinct values. Null is one of them if the column has nulls.
        codes: uint8[groups] or uint16[groups]: the position in `values` of each group's value.
    """

    values: pa.Array
    codes: npt.NDArray[np.unsignedinteger]

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes) + self.codes.nbytes

    def take(self, rows: _Rows | None) -> pa.Array:
        """Return the values of the groups with these numbers, or of all groups if `rows` is None."""
        return self.values.take(pa.array(self.codes if rows is None else self.codes[rows]))


class EncodedGroups:
    """The groups of one entry or segment, with encoded dimensions. An instance is immutable.

    Attributes:
        schema: The columns of the groups.
        rows: The number of groups.
        nbytes: The memory of the groups in bytes.
    """

    def __init__(self, groups: pa.Table) -> None:
        """Encode the dimensions of groups.

        Args:
            groups: Columns of the cube's entries. Names of dimensions begin with "d".
        """
        self.schema: pa.Schema = groups.schema
        self.rows: int = groups.num_rows
        self._columns: dict[str, _EncodedColumn | pa.Array] = {}
        for name in groups.column_names:
            array = _to_array(groups[name])
            self._columns[name] = (_encode_column(array) if name.startswith("d") else None) or array
        self.nbytes = sum(int(column.nbytes) for column in self._columns.values())

    def select(self, condition: Expression, names: Sequence[str]) -> pa.Table:
        """Return the groups that meet a condition on groups (`group_conditions.py`).

        Args:
            condition: The condition. Its column ids are the numbers of the groups' columns.
            names: The names of the columns to return.

        Raises:
            ValueError: A predicate cannot be evaluated.
        """
        rows = self._find_rows(condition)
        columns = [self._take_rows(self._columns[name], rows) for name in names]
        return pa.table(columns, schema=pa.schema([self.schema.field(name) for name in names]))

    def _find_rows(self, condition: Expression) -> _Rows | None:
        """Return the numbers of the groups that meet a condition, or None for all groups.

        A part of the condition on one encoded column is evaluated once for each distinct value. The part that keeps
        the fewest values comes first, so that later parts look at few groups. Other parts come last.
        """
        if condition == TRUE or not self.rows:
            return None
        encoded_conditions: list[tuple[float, npt.NDArray[np.bool_], _EncodedColumn]] = []
        unencoded_parts: list[Expression] = []
        for part in condition.children if isinstance(condition, And) else (condition,):
            ids = {predicate.column_id for predicate in collect_predicates(part)}
            column = self._columns[get_group_column_name(min(ids))] if len(ids) == 1 else None
            if not isinstance(column, _EncodedColumn):
                unencoded_parts.append(part)
                continue
            matches = evaluate_filter(part, {min(ids): column.values}, len(column.values))
            if not matches.any():
                return np.zeros(0, np.int64)
            if not matches.all():
                encoded_conditions.append((float(matches.mean()), matches, column))
        rows: _Rows | None = None
        for _, matches, column in sorted(encoded_conditions, key=lambda match: match[0]):
            if rows is None:
                rows = np.flatnonzero(matches.take(column.codes))
            else:
                rows = rows[matches.take(column.codes[rows])]
        for part in unencoded_parts:
            ids = {predicate.column_id for predicate in collect_predicates(part)}
            columns = {
                column_id: self._take_rows(self._columns[get_group_column_name(column_id)], rows) for column_id in ids
            }
            is_selected = evaluate_filter(part, columns, self.rows if rows is None else len(rows))
            rows = np.flatnonzero(is_selected) if rows is None else rows[is_selected]
        return rows

    @staticmethod
    def _take_rows(column: _EncodedColumn | pa.Array, rows: _Rows | None) -> pa.Array:
        if isinstance(column, _EncodedColumn):
            return column.take(rows)
        return column if rows is None else column.take(pa.array(rows))


def _encode_column(array: pa.Array) -> _EncodedColumn | None:
    """Return an encoded column, which stores each distinct value once, or None if its values should not be encoded.

    Floats are not encoded, because the encoding would replace -0.0 by 0.0 or the reverse, and different NaNs by one.
    """
    if len(array) < _ENCODED_GROUPS_MIN or pa.types.is_floating(array.type):
        return None
    dictionary_array = pc.dictionary_encode(array, null_encoding="encode")
    distinct_values = len(dictionary_array.dictionary)
    # An encoding with few groups for each value saves neither memory nor time.
    if distinct_values > _DISTINCT_VALUES_MAX or 2 * distinct_values > len(array):
        return None
    codes = dictionary_array.indices.to_numpy(zero_copy_only=False)
    return _EncodedColumn(
        dictionary_array.dictionary, codes.astype(np.uint8 if distinct_values <= 1 << 8 else np.uint16)
    )


def _to_array(column: pa.ChunkedArray) -> pa.Array:
    joined_column = column.combine_chunks()
    return joined_column if isinstance(joined_column, pa.Array) else pa.concat_arrays(joined_column.chunks)
