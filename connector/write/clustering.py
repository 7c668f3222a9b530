"""Computes clustering keys of rows from attributes of the rows and of joined tables.

Each attribute value is replaced by its rank in a sample of the rows: the mean of the fraction of smaller values and the
fraction of smaller or equal values. Ranks divide a skewed attribute evenly, exist for any ordered type, and are equal
for equal values. The ranks of a row are the coordinates of a point. The key of this point on a space-filling curve
(`formats/services/curves.py`) is the sort key of the row.

    joins = {"customer": JoinedRows(customers, {"customer": "id"})}
    attributes = Attributes(by=["ordered", "customer.city"], joins=joins)
    clustering = Clustering.from_sample(attributes, sample, curve="hilbert")
    keys = clustering.keys(rows)

The keys of a batch are computed with Arrow and numpy. The objects can be pickled for tasks. A pickle contains the ranks
of the joined tables' rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.arrow.arrays import Longs, combine_to_array
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.names import Name
from seamark.connector.client.values import At
from seamark.connector.parquet.metrics import COLUMN_MODE, DEFAULT_MODE
from seamark.connector.read.scans import scan
from seamark.formats.iceberg.metadata.clustering import LINEAR
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.services.curves import Points, compute_curve_keys

RANK_BITS = 16
"""The number of bits of each rank: enough to distinguish more ranges than a table has files."""

_GROUP_CORRELATION_MIN = 0.99
"""The minimum correlation at which attributes are grouped.

At this correlation, if one column is constant, the spread of the other column is a seventh of its usual spread. In a
layer of a few hundred files, a column has about this range in each file.
"""
_CORRELATION_ROWS_MIN = 100
"""The minimum number of rows in a sample from which groups are derived.

In fewer rows, a correlation may be accidental.
"""
_FILE_BYTES_MAX = 2**31 - 1
"""The maximum value of the property for the file size."""
_BOUND_CHARACTERS, _BOUND_CHARACTERS_MAX, _QUANTILES = 16, 256, 200
"""The default and the maximum number of characters in the bounds of a string, and the number of compared quantiles."""


@dataclass(frozen=True)
class JoinedRows:
    """The rows of a joined table, and the join condition.

    If several rows of the joined table have the same key, the first row is joined.

    Attributes:
        on: The column of the joined table, by the column that refers to it. The referring columns belong either to the
            clustered rows, or to a table that is joined earlier (`customer.nation_key`).
    """

    rows: pa.Table
    on: Mapping[str, str]


@dataclass(frozen=True)
class JoinedTable:
    """The name of a joined table, and the join condition.

    Attributes:
        on: The column of the joined table, by the column that refers to it. A referring column may belong to a table
            that is joined earlier, for example `customer.nation_id`.
    """

    table: Name
    on: Mapping[str, str]


def read_joined_tables(
    client: SeamarkClient, by: Sequence[str], joins: Mapping[str, JoinedTable], *, rows_max: int | None = None
) -> dict[str, JoinedRows]:
    """Read the columns of joined tables that `by` and the join conditions need, from the current snapshots.

    `by` lists the sort columns. A column of a joined table has the name of the join before it, such as `customer.name`.

    If the joined tables change later, the clustered files contain the same rows, but are sorted by the old values of
    the joined tables.

    Raises:
        InvalidRequest: A table has more than `rows_max` rows.
    """
    column_names = [*by, *(column for join in joins.values() for column in join.on)]
    rows_by_name = {}
    for name, join in joins.items():
        join_columns = [text.removeprefix(f"{name}.") for text in column_names if text.startswith(f"{name}.")]
        columns = list(dict.fromkeys([*join.on.values(), *join_columns]))
        rows = scan(
            client, join.table, columns, at=At(ref=MAIN), limit=None if rows_max is None else rows_max + 1
        ).to_arrow()
        if rows_max is not None and rows.num_rows > rows_max:
            raise InvalidRequest(f"{join.table} has more than {rows_max:,} rows; use the Spark job `cluster`")
        rows_by_name[name] = JoinedRows(rows, join.on)
    return rows_by_name


class KeyMatcher:
    """Finds rows by their keys. Instances can be pickled."""

    def __init__(self, keys: Sequence[pa.Array]) -> None:
        self._kinds = [_choose_key_type(key.type) for key in keys]
        self._sets = [pc.unique(key.cast(kind)) for key, kind in zip(keys, self._kinds, strict=True)]
        self._prefixes: list[pa.Array] = []
        """The numbers of the distinct tuples of the first two columns, of the first three columns, and so on."""
        self._keys = pa.array(self._encode_tuples(keys))

    def find_rows(self, columns: Sequence[pa.Array]) -> Longs:
        """Return the position of the first row with the key of each row of `columns`, as int64[rows].

        The position is -1 if no row has the key, or if the key contains a null.
        """
        tuple_codes = self._encode_tuples(columns)
        return np.where(tuple_codes < 0, -1, _find_positions(pa.array(tuple_codes), self._keys))

    def _encode_tuples(self, columns: Sequence[pa.Array]) -> Longs:
        """Return a number that identifies the tuple of values of each row, as int64[rows].

        The number is -1 if a value is null, or does not occur in the keys. Otherwise, the positions of the values among
        the distinct keys of their columns are the digits of the number. Before a further column is added, the number is
        replaced by its position among the numbers of the keys, because the product of all counts may exceed 64 bits.
        """
        total = np.zeros(len(columns[0]), dtype=np.int64)
        for number, (column, kind, values) in enumerate(zip(columns, self._kinds, self._sets, strict=True)):
            if number > 1:
                if len(self._prefixes) < number - 1:  # The constructor encodes the keys themselves.
                    self._prefixes.append(pc.unique(pa.array(total)))
                total = np.where(total < 0, -1, _find_positions(pa.array(total), self._prefixes[number - 2]))
            codes = _find_positions(column.cast(kind), values)
            total = np.where((total < 0) | (codes < 0), -1, total * len(values) + codes)
        return total


def _find_positions(values: pa.Array, value_set: pa.Array) -> Longs:
    """Return the first position of each value in `value_set`, or -1 for nulls and other values, as int64[values]."""
    positions = pc.fill_null(pc.index_in(values, value_set=value_set, skip_nulls=True), -1)
    return np.asarray(positions.to_numpy(zero_copy_only=False), dtype=np.int64)


def _choose_key_type(kind: pa.DataType) -> pa.DataType:
    """Return the type in which keys are compared. For all integer types, it is int64."""
    return pa.int64() if pa.types.is_integer(kind) else kind


class Attributes:
    """The attributes by which rows are clustered: columns, or `name.column` for a column of a table of `joins`."""

    def __init__(self, by: Sequence[str], joins: Mapping[str, JoinedRows], schema: pa.Schema) -> None:
        """Resolve the attributes.

        Args:
            by: The names of the attributes: columns, or `name.column` for a column of a joined table.
            joins: The rows of the joined tables, by name.
            schema: The schema of the clustered rows.

        Raises:
            InvalidRequest: A column is unknown or has a nested type, or the join keys have different types.
        """
        if not by:
            raise InvalidRequest("Name at least one attribute by which the rows are clustered")
        self._tables = {name: joined_rows.rows.combine_chunks() for name, joined_rows in joins.items()}
        self._lookups: dict[str, tuple[tuple[str, ...], KeyMatcher]] = {}
        """The referring columns of the clustered rows and the matcher of their keys, by joined table."""
        self._merged_names: dict[str, str] = {}
        """The tables whose columns were appended to another table: the name of this other table, by their own name.

        This happens if the clustered rows refer to the other table, and the other table refers to the appended table.
        """
        for name, joined_rows in joins.items():
            self._add_join(name, joined_rows, schema)
        self.by = tuple(self._resolve_attribute(text, schema) for text in by)
        """The attributes: pairs of the name of a joined table ("" for the clustered rows) and the name of a column."""

    @property
    def columns(self) -> list[str]:
        """The columns of the clustered rows that are needed to compute keys."""
        own_columns = [column for table_name, column in self.by if table_name == ""]  # "": the clustered rows
        joined_names = {table_name for table_name, _ in self.by} - {""}
        key_columns = [column for table_name in joined_names for column in self._lookups[table_name][0]]
        return list(dict.fromkeys([*own_columns, *key_columns]))

    def find_rows(self, name: str, batch: pa.RecordBatch | pa.Table) -> Longs:
        """Return the position of the row of a table that is joined with each row of the batch, as int64[rows].

        The position is -1 if no row is joined.
        """
        columns, lookup = self._lookups[name]
        return lookup.find_rows([combine_to_array(batch[column]) for column in columns])

    def table_values(self, name: str, column: str) -> pa.Array:
        return combine_to_array(self._tables[name][column])

    def _add_join(self, name: str, join: JoinedRows, schema: pa.Schema) -> None:
        """Add a joined table. If the clustered rows do not refer to it, append its columns to the referring table.

        Raises:
            InvalidRequest: The join has no columns, columns of several tables, an unknown column, or keys of different
                types.
        """
        table = self._tables[name]
        if not join.on:
            raise InvalidRequest(f"{name!r} is joined on no columns; set `on`")
        for column in join.on.values():
            _check_column(column, table.schema, f"{name}.{column}")
        lookup = KeyMatcher([combine_to_array(table[column]) for column in join.on.values()])
        sources = [self._resolve_column(text, schema) for text in join.on]
        tables = {source for source, _ in sources}
        if len(tables) > 1:
            raise InvalidRequest(
                f"The join {name!r} has columns of several tables: {', '.join(join.on)}; use columns of one table"
            )
        source, columns = tables.pop(), tuple(column for _, column in sources)
        kinds = schema if not source else self._tables[source].schema
        for column, target in zip(columns, join.on.values(), strict=True):
            source_type, target_type = (
                _choose_key_type(kinds.field(column).type),
                _choose_key_type(table.schema.field(target).type),
            )
            if source_type != target_type:
                raise InvalidRequest(
                    f"{column} has the type {source_type} and {name}.{target} has {target_type}; "
                    "their values are never equal"
                )
        if not source:
            self._lookups[name] = columns, lookup
            return
        self._merged_names[name] = source
        rows = lookup.find_rows([combine_to_array(self._tables[source][column]) for column in columns])
        joined_table = table.take(pa.array(rows, mask=rows < 0))
        for column in table.column_names:
            self._tables[source] = self._tables[source].append_column(f"{name}.{column}", joined_table[column])

    def _resolve_attribute(self, text: str, schema: pa.Schema) -> tuple[str, str]:
        name, column = self._resolve_column(text, schema)
        kind = (schema if not name else self._tables[name].schema).field(column).type
        if pa.types.is_nested(kind):
            raise InvalidRequest(f"Rows cannot be clustered by {text!r}, because its type is {kind}")
        return name, column

    def _resolve_column(self, text: str, schema: pa.Schema) -> tuple[str, str]:
        """Return the names of the table and the column to which `text` refers, such as `customer.name`.

        The table is "" for columns of the clustered rows.

        Raises:
            InvalidRequest: There is no such column.
        """
        name, dot, column = text.partition(".")
        if text in schema.names or not dot or name not in self._tables:
            _check_column(text, schema, text)
            return "", text
        _check_column(column, self._tables[name].schema, text)
        # The table may have been joined into another table, whose columns have its name as a prefix.
        while name in self._merged_names:
            name, column = self._merged_names[name], f"{name}.{column}"
        return name, column


def _check_column(column: str, schema: pa.Schema, text: str) -> None:
    if schema.names.count(column) != 1:
        raise InvalidRequest(f"There is no column {text!r}; the columns are {', '.join(schema.names)[:500]}")


@dataclass(frozen=True)
class Ranks:
    """Computes the ranks of one attribute's values in a sample.

    Attributes:
        values: The distinct values of the sample in ascending order.
        rows_below: The number of sample rows with smaller values or null, for each value, and then the number of all
            rows, as int64[values + 1].
    """

    values: npt.NDArray[np.generic] | npt.NDArray[np.object_]
    rows_below: Longs

    @staticmethod
    def from_sample(sample: pa.Array) -> Ranks:
        non_null_values = sample.drop_null()
        values, counts = np.unique(_to_comparable(non_null_values), return_counts=True)
        return Ranks(values, np.concatenate([[0], np.cumsum(counts)]) + sample.null_count)

    def rank_values(self, column: pa.Array) -> npt.NDArray[np.uint64]:
        """Return the ranks of a column's values, as uint64[rows]. Each rank is less than 2**RANK_BITS.

        The rank of a value is the fraction of the sample rows below the value, scaled to RANK_BITS bits. Rows with the
        same value count half. A null has the rank of the nulls, which sort first.
        """
        dictionary_array = column.dictionary_encode()
        low, high = self._count_smaller(dictionary_array.dictionary)
        nulls = int(self.rows_below[0])
        middles = np.append(self.rows_below[low] + self.rows_below[high], nulls)
        ranks = (middles << RANK_BITS) // max(1, 2 * int(self.rows_below[-1]))
        codes = pc.fill_null(dictionary_array.indices, len(low)).to_numpy(zero_copy_only=False)
        row_ranks: npt.NDArray[np.uint64] = np.minimum(ranks, (1 << RANK_BITS) - 1)[codes].astype(np.uint64)
        return row_ranks

    def _count_smaller(self, distinct: pa.Array) -> tuple[Longs, Longs]:
        """Return the numbers of sample values that are smaller, and smaller or equal, for each distinct value."""
        if self.values.dtype != np.dtype(object):
            numbers = _to_comparable(distinct)
            return np.searchsorted(self.values, numbers, "left"), np.searchsorted(self.values, numbers, "right")
        # In ascending order, each search compares almost the same objects as the previous search. The CPU has cached
        # these objects, so the searches take a third of the time.
        order = np.arange(len(distinct))
        if pa.types.is_string(distinct.type) or pa.types.is_binary(distinct.type):
            order = pc.sort_indices(distinct).to_numpy().astype(np.int64)
        objects = _to_comparable(distinct.take(pa.array(order)))
        places = np.searchsorted(self.values, objects, "left")
        low, high = np.empty_like(places), np.empty_like(places)
        low[order] = high[order] = places
        inside = np.flatnonzero(places < len(self.values))
        high[order[inside]] += self.values[places[inside]] == objects[inside]
        return low, high


def _to_comparable(values: pa.Array) -> npt.NDArray[np.generic]:
    """Return values, which contain no nulls, as an array that numpy can sort. NaN sorts last.

    Dates and times become integers. Values of fixed-size binary and extension types, such as UUIDs, become bytes or
    strings.
    """
    kind = values.type
    if pa.types.is_temporal(kind):
        values = values.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    elif pa.types.is_fixed_size_binary(kind) or isinstance(kind, pa.BaseExtensionType):
        return np.array(
            [str(value) if not isinstance(value, bytes) else value for value in values.to_pylist()], dtype=object
        )
    if pa.types.is_integer(values.type) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        numbers: npt.NDArray[np.generic] = values.to_numpy(zero_copy_only=False)
        return numbers
    objects = np.empty(len(values), dtype=object)
    objects[:] = values.to_pylist()
    return objects


@dataclass(frozen=True)
class Clustering:
    """Computes clustering keys. Instances can be pickled."""

    curve: str
    attributes: Attributes
    own_ranks: Mapping[int, Ranks] = field(default_factory=dict)
    """The ranks of attributes of the clustered rows, by the index of the attribute."""
    joined_ranks: Mapping[int, npt.NDArray[np.uint64]] = field(default_factory=dict)
    """The ranks of the joined table's rows, by the index of the attribute. The last rank is for a missing row."""

    @staticmethod
    def from_sample(attributes: Attributes, sample: pa.Table, curve: str) -> Clustering:
        """Compute the ranks from a sample of the rows.

        Args:
            sample: Some of the clustered rows, with at least the columns `attributes.columns`.
        """
        ranks_by_attribute: dict[int, Ranks] = {}
        joined_ranks: dict[int, npt.NDArray[np.uint64]] = {}
        for number, (name, column) in enumerate(attributes.by):
            if not name:
                ranks_by_attribute[number] = Ranks.from_sample(combine_to_array(sample[column]))
                continue
            values = attributes.table_values(name, column)
            table_rows = attributes.find_rows(name, sample)
            ranks = Ranks.from_sample(values.take(pa.array(table_rows, mask=table_rows < 0)))
            null = pa.nulls(1, values.type)
            # The index -1 selects the rank of null.
            joined_ranks[number] = ranks.rank_values(pa.concat_arrays([values, null]))
        clustering = Clustering(curve, attributes, ranks_by_attribute, joined_ranks)
        if curve == LINEAR:
            return clustering
        return replace(clustering, groups=_group_attributes(clustering.compute_points(sample)))

    groups: tuple[tuple[int, ...], ...] = ()
    """The indexes of attributes in groups that have almost the same order, such as an order date and a ship date.

    The first attributes of the groups are the dimensions of the curve. The other attributes order rows with the same
    point. If the tuple is empty, each attribute is its own group.
    """

    def compute_keys(self, rows: pa.RecordBatch | pa.Table) -> npt.NDArray[np.uint8]:
        """Return the clustering keys, as uint8[rows, bytes]. They are compared as bytes.

        Attributes with correlated ranks form a group, and its first attribute represents the group. A key consists of:

        - Leading bits of the ranks of these first attributes. A group of g attributes has log2(g) bits more here than a
          group with one attribute.
        - The position on the curve of the remaining bits of these ranks.
        - The ranks of the other attributes.

        If the first bits of the keys contain b bits of an attribute, a query with a range of the attribute opens about
        2**-b of the files. The leading bits minimize the sum of these fractions over all attributes.
        """
        points = self.compute_points(rows)
        if len(self.groups) in (0, points.shape[1]):
            return compute_curve_keys(points, RANK_BITS, self.curve)
        smallest_group = min(map(len, self.groups))
        extra_bits = [(len(group) // smallest_group).bit_length() - 1 for group in self.groups]
        leading_bits = np.zeros(len(points), dtype=np.uint64)
        remaining_ranks = np.empty((len(points), len(self.groups)), dtype=np.uint64)
        for number, (group, bits) in enumerate(zip(self.groups, extra_bits, strict=True)):
            ranks = points[:, group[0]]
            leading_bits = (leading_bits << np.uint64(bits)) | (ranks >> np.uint64(RANK_BITS - bits))
            remaining_ranks[:, number] = (ranks << np.uint64(bits)) & np.uint64((1 << RANK_BITS) - 1)
        other_ranks = points[:, [ordinal for group in self.groups for ordinal in group[1:]]]
        # The leading bits are stored in one byte. More than 8 bits occur only with many groups of attributes, and only
        # the lowest 8 bits are then stored.
        parts = [leading_bits.astype(np.uint8)[:, None], compute_curve_keys(remaining_ranks, RANK_BITS, self.curve)]
        return np.concatenate(
            [*parts, other_ranks.astype(">u2", order="C").view(np.uint8).reshape(len(points), -1)], axis=1
        )

    def compute_points(self, rows: pa.RecordBatch | pa.Table) -> Points:
        """Return the ranks of rows, as uint64[rows, attributes].

        The attributes are in the order of `attributes.by`, which has the pairs (joined table, column). The table is ""
        for a column of `rows` itself.
        """
        rows_by_table: dict[str, Longs] = {}
        points: Points = np.empty((rows.num_rows, len(self.attributes.by)), dtype=np.uint64)
        for number, (table_name, column) in enumerate(self.attributes.by):
            if not table_name:
                points[:, number] = self.own_ranks[number].rank_values(combine_to_array(rows[column]))
                continue
            if table_name not in rows_by_table:
                rows_by_table[table_name] = self.attributes.find_rows(table_name, rows)
            points[:, number] = self.joined_ranks[number][rows_by_table[table_name]]
        return points


def _group_attributes(points: Points) -> tuple[tuple[int, ...], ...]:
    """Group the attributes whose ranks in a sample are correlated.

    An attribute joins the first group with whose first attribute it has a correlation of at least
    `_GROUP_CORRELATION_MIN`. The sign of a correlation is ignored. If the sample is too small, each attribute is a
    separate group.
    """
    if len(points) < _CORRELATION_ROWS_MIN:
        return tuple((number,) for number in range(points.shape[1]))
    centered_points = points.astype(np.float64) - points.mean(axis=0)
    norms = np.sqrt((centered_points**2).sum(axis=0))
    is_related = np.abs(centered_points.T @ centered_points) >= _GROUP_CORRELATION_MIN * np.outer(norms, norms)
    groups: list[list[int]] = []
    for number in range(points.shape[1]):
        # An attribute with one rank in all rows has the norm 0 and no correlation, so it forms its own group.
        group = next((group for group in groups if norms[number] and is_related[group[0], number]), None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return tuple(map(tuple, groups))


def generate_layer_name() -> str:
    """Return a unique name for a new layer: the set of files that a clustering job writes together."""
    return uuid.uuid4().hex[:12]


def derive_layer_properties(properties: Mapping[str, str], sample: pa.Table, columns: Sequence[str]) -> dict[str, str]:
    """Return the table properties with which a clustering job writes its files.

    The files that a job writes together are called a layer. The file size is unlimited, because files of a layer end
    after a number of rows. The bounds of `columns` are long enough to distinguish files. By default, the bounds of a
    string have its first 16 characters. If all values begin with the same 16 characters, as URLs do, these bounds would
    be equal in all files. The table's own settings for a column take precedence. If the default mode of the table
    does not truncate bounds, no mode changes.

    Args:
        sample: Some rows of the layer.
    """
    layer_properties = {**properties, TARGET_FILE_BYTES: str(_FILE_BYTES_MAX)}
    default = properties.get(DEFAULT_MODE, "truncate").strip().lower()
    for name in columns if default.startswith("truncate") else ():
        if pa.types.is_string(sample[name].type) and f"{COLUMN_MODE}{name}" not in properties:
            length = _measure_distinct_length(sample[name])
            if length > _BOUND_CHARACTERS:
                layer_properties[f"{COLUMN_MODE}{name}"] = f"truncate({length})"
    return layer_properties


def _measure_distinct_length(column: pa.ChunkedArray) -> int:
    """Return the length of bounds, in characters, that distinguishes most of `_QUANTILES` quantiles of the column.

    If neighboring quantiles share at least as many characters as a bound has by default, the bounds have the default
    number of characters after the shared prefix.
    """
    values = sorted(set(column.drop_null().to_pylist()))
    quantiles = values[:: max(1, len(values) // _QUANTILES)]
    shared = max((_measure_common_prefix(*pair) for pair in pairwise(quantiles)), default=0)
    return min(_BOUND_CHARACTERS_MAX, shared + _BOUND_CHARACTERS) if shared >= _BOUND_CHARACTERS else _BOUND_CHARACTERS


def _measure_common_prefix(first: str, second: str) -> int:
    differing_places = (place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    return next(differing_places, min(len(first), len(second)))


def choose_range_bounds(keys: npt.NDArray[np.bytes_], parts: int) -> npt.NDArray[np.bytes_]:
    """Return boundaries that divide the keys into parts of about equal size, as bytes[parts - 1], possibly repeated."""
    sorted_keys = np.sort(keys)
    positions = [len(sorted_keys) * number // parts for number in range(1, parts)]
    return sorted_keys[positions] if len(sorted_keys) else sorted_keys
