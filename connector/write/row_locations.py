"""Locates the rows with the keys of a batch, by a record index or by reading the key columns of data files.

The module finds every live row that has one of the keys. A record index locates the rows in the files that it covers. A
file is read if the index does not cover it, or if the index cannot decide whether a row of the file is deleted. Without
a record index, the files in the server's plan for the keys are read. The plan prunes files by the partitions (including
buckets) of every spec, statistics, bloom filters and bitmaps.

Keys are compared as in SQL, so -0.0 equals 0.0, except that NaN equals NaN. No key contains a null. Keys are compared
by 128-bit hashes (`seamark.formats.index.keys.hashing`). Record indexes distinguish the two zeros, so a key with a zero
is looked up with both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.arrow.arrays import Longs
from seamark.connector.arrow.casting import Unwritable, build_arrow_schema
from seamark.connector.arrow.partitions import apply_transform
from seamark.connector.client.errors import Refused, ServerFailed, Unavailable
from seamark.connector.client.names import Name
from seamark.connector.client.values import At
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable, PlanSource, ScanTask, plan
from seamark.formats.iceberg.expressions.arrow_filters import to_literals
from seamark.formats.iceberg.expressions.expression import Bound, Expression, Op, join_by_and, join_by_or
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.iceberg.types.transforms import (
    IDENTITY,
    canonicalize_transform,
    get_transform_name,
    get_transform_width,
)
from seamark.formats.iceberg.types.values import FLOATS, Value
from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.delete_files import merge_zeros
from seamark.formats.index.keys.hashing import Hashes, hash_halves
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.runtime.errors import TooLarge
from seamark.formats.runtime.repetitions import find_repeated

LOOKUP, SCAN = "lookup", "scan"
STRATEGIES = (LOOKUP, SCAN)
VALUES_MAX = 10_000
"""The maximum number of keys in the filter of a plan without a record index. For more keys, the filter has ranges.

The server needs about 15 ms for a thousand keys. It prunes files by bounds, bitmaps, and bloom filters with a low error
rate.
"""
FEW_VALUES_MAX = 500
"""The maximum number of keys in the filter of a plan with a record index, and in the filter of row groups."""
_VALUES_BYTES_MAX = 4 << 20
"""The maximum size of keys for which the filter may have up to `VALUES_MAX` values."""
RANGES_MAX = 32
"""The maximum number of ranges of a column in the filter of a plan."""
_CODE_BYTES = 8
"""The number of bytes of a string from which its distance to other strings is computed."""
_LOOKUP_KEYS_MAX = 1_000_000


class RowSource(PlanSource, Protocol):
    """Plans scans and looks up keys. A client implements it. The server also implements it, for rows of streams."""

    def lookup(self, table: Name, keys: pa.Table, *, index: str, at: At) -> KeyAnswer: ...


class KeyAnswer(Protocol):
    """The rows that a record index returns for keys. `LookupAnswer` implements it."""

    @property
    def rows(self) -> pa.Table: ...
    @property
    def uncovered_files(self) -> int:
        """The number of data files that no file of the index describes, so that their rows are not searched."""

    @property
    def uncovered(self) -> tuple[str, ...]:
        """The paths of the first of these files."""

    @property
    def undecided(self) -> int:
        """The number of returned rows of which it is unknown whether they are deleted."""


class BatchKeys:
    """The distinct keys of a batch, without nulls. Key k is row k of each column."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[pa.Array]) -> None:
        self.fields = tuple(fields)
        self.columns = [_to_storage(column) for column in columns]
        self.count = len(self.columns[0])
        high, low = self._hash_columns(self.columns)
        self._order = np.lexsort((low, high))
        self._high, self._low = high[self._order], low[self._order]
        _, runs = np.unique(self._high, return_counts=True)
        self._longest_run = int(runs.max(initial=1))

    def _hash_columns(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> tuple[Hashes, Hashes]:
        return hash_key_columns(self.fields, columns)

    def match(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> Longs:
        """Return the index of the key of each row, as int64[rows]. It is -1 if the row has none of the keys.

        Args:
            columns: The key columns, in the order of `fields`.
        """
        # The keys are sorted by the high halves of their hashes. The low halves confirm a match.
        high, low = self._hash_columns(columns)
        ordinals = np.full(len(high), -1, dtype=np.int64)
        if self.count:
            start = np.searchsorted(self._high, high)
            # More than one step is needed only if several hashes have equal high halves.
            for step in range(self._longest_run):
                slots = np.minimum(start + step, self.count - 1)
                is_equal = (self._high[slots] == high) & (self._low[slots] == low)
                ordinals[is_equal] = self._order[slots[is_equal]]
        return ordinals

    def filter_expression(
        self, values_max: int, specs: Sequence[PartitionSpec] = (), ranges_max: int = RANGES_MAX
    ) -> Expression:
        """Return a filter that matches every row with one of the keys, and possibly other rows.

        If the number of values of a column is at most `values_max` divided by the number of columns, the filter lists
        the values. Otherwise it has at most `ranges_max` ranges, and the buckets of the column in each of the specs.
        """
        conjuncts: list[Expression] = []
        values_per_column = values_max // len(self.fields)
        for field, extent in zip(self.fields, self._extents, strict=True):
            values, kind = extent.values, str(field.type)
            if values is not None and len(values) <= values_per_column:
                conjuncts.append(_bind(field, Op.EQ if len(values) == 1 else Op.IN, values))
                continue
            if extent.ranges:
                lows, highs = zip(*extent.ranges, strict=True)
                conjuncts.append(
                    join_by_or(*(_build_range(field, *ends) for ends in _join_ranges(lows, highs, ranges_max)))
                )
            conjuncts.extend(_build_bucket_predicates(specs, field, kind, extent.distinct))
        return join_by_and(*conjuncts)

    @cached_property
    def _extents(self) -> list[_Extent]:
        return [
            _Extent.from_column(str(field.type), column)
            for field, column in zip(self.fields, self.columns, strict=True)
        ]


@dataclass(frozen=True)
class _Extent:
    """The distinct values of a key column, and their ranges."""

    distinct: pa.Array
    values: list[Any] | None
    """The values in ascending order.

    None if there are no values, more than `VALUES_MAX` values, or a value that is not finite.
    """
    ranges: list[tuple[Any, Any]]
    """Ranges (low, high) that together contain all values.

    Both ends are inclusive. Empty if there are no values, or if a value is not finite.
    """

    @staticmethod
    def from_column(kind: str, column: pa.Array) -> _Extent:
        distinct = pc.unique(column)
        values = _sort_values(kind, to_literals(distinct, kind))
        if values is None:
            return _Extent(distinct, None, [])
        ranges = _join_ranges(values, values, RANGES_MAX)
        return _Extent(distinct, values if len(values) <= VALUES_MAX else None, ranges)


def hash_key_columns(fields: Sequence[Field], columns: Sequence[pa.Array | pa.ChunkedArray]) -> tuple[Hashes, Hashes]:
    """Return the high and the low halves of the hash of each row's key, each as uint64[rows].

    The values -0.0 and 0.0 have the same hash.
    """
    keys = [convert_to_keys(column, str(field.type)) for field, column in zip(fields, columns, strict=True)]
    return hash_halves(merge_zeros(keys) or keys)


def add_both_zeros(fields: Sequence[Field], columns: Sequence[pa.Array]) -> tuple[list[pa.Array], Longs]:
    """Return the key columns with a row for each combination of signs of the zeros in a key.

    An index has different entries for 0.0 and -0.0, but a key with one of them also means the other.

    Returns:
        The columns, and the index of each row's key, as int64[rows].
    """
    key_columns, ordinals = list(columns), np.arange(len(columns[0]), dtype=np.int64)
    for place, field in enumerate(fields):
        if str(field.type) not in FLOATS:
            continue
        column = key_columns[place]
        rows = np.flatnonzero(pc.equal(column, pa.scalar(0.0, column.type)).to_numpy(zero_copy_only=False))
        if not len(rows):
            continue
        negated_columns = [column_with_zeros.take(pa.array(rows)) for column_with_zeros in key_columns]
        negated_columns[place] = pc.negate(negated_columns[place])
        key_columns = [
            pa.concat_arrays([values, added_values])
            for values, added_values in zip(key_columns, negated_columns, strict=True)
        ]
        ordinals = np.concatenate([ordinals, ordinals[rows]])
    return key_columns, ordinals


def _to_storage(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _bind(field: Field, op: Op, values: Iterable[Value]) -> Bound:
    kind = str(field.type)
    return Bound(op, field.id, field.name, kind, IDENTITY, kind, tuple(values))


def _build_range(field: Field, low: Value, high: Value) -> Expression:
    if low == high:
        return _bind(field, Op.EQ, (low,))
    return join_by_and(_bind(field, Op.GT_EQ, (low,)), _bind(field, Op.LT_EQ, (high,)))


def _sort_values(kind: str, values: Iterable[Value | None]) -> list[Any] | None:
    """Return the distinct values without null in ascending order.

    Return None if there are no values, or if a value is infinite or NaN.
    """
    distinct: list[Any] = list(dict.fromkeys(value for value in values if value is not None))
    if not distinct or (kind in FLOATS and not all(map(math.isfinite, distinct))):
        return None
    return sorted(distinct)


def _join_ranges(lows: Sequence[Any], highs: Sequence[Any], ranges_max: int) -> list[tuple[Any, Any]]:
    """Join ascending ranges into at most `ranges_max` ranges.

    The widest gaps between ranges are kept. The widths are approximate, because they are computed as floats.
    """
    start = _measure_common_prefix(lows[0], highs[-1])
    low_floats = _to_floats(lows, start)
    high_floats = low_floats if highs is lows else _to_floats(highs, start)
    gaps = low_floats[1:] - high_floats[:-1]
    cuts = np.sort(np.argsort(-gaps, kind="stable")[: ranges_max - 1] + 1).tolist()
    return [(lows[start_index], highs[end_index - 1]) for start_index, end_index in pairwise([0, *cuts, len(lows)])]


def _measure_common_prefix(low: Any, high: Any) -> int:
    """Return the length in bytes of the common prefix of two strings or bytes, or 0 for other types."""
    if not isinstance(low, str | bytes):
        return 0
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(_encode(low), _encode(high), strict=False)))


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _to_floats(values: Sequence[Any], start: int) -> npt.NDArray[np.float64]:
    """Return values as numbers from which their distances are computed.

    For strings and bytes, the number consists of 8 bytes, beginning with byte `start`.
    """
    if not isinstance(values[0], str | bytes):
        return np.asarray(values, dtype=np.float64)
    end = start + _CODE_BYTES
    codes = [value[start:end] for value in (map(str.encode, values) if isinstance(values[0], str) else values)]
    return np.array(codes, dtype=f"S{_CODE_BYTES}").view(f">u{_CODE_BYTES}").astype(np.float64)


def _build_bucket_predicates(
    specs: Iterable[PartitionSpec], field: Field, kind: str, column: pa.Array
) -> Iterator[Expression]:
    """Yield a predicate for each bucket transform of the column in the specs.

    A predicate is left out if the values are in all buckets.
    """
    transforms = {
        canonicalize_transform(partition_field.transform)
        for spec in specs
        for partition_field in spec.fields
        if partition_field.sources == (field.id,)
    }
    for transform in sorted(transform for transform in transforms if get_transform_name(transform) == "bucket"):
        buckets = sorted(apply_transform(transform, kind, column).values)
        if len(buckets) < get_transform_width(transform):
            op = Op.EQ if len(buckets) == 1 else Op.IN
            yield Bound(op, field.id, field.name, kind, transform, "int", tuple(buckets))


def choose_key_names(schema: Schema, key: Sequence[str] | None, rows: Sequence[str]) -> list[str]:
    """Return the names of the key columns.

    They are `key` if it is set, otherwise the table's identifier fields or, if the table has none, the only column of
    the rows.

    Args:
        rows: The column names of the rows.

    Raises:
        Unwritable: The key cannot be determined, or the rows do not have each key column exactly once.
    """
    if key is not None:
        names = list(key)
    elif schema.identifier_field_ids:
        ids = {field.id: field.name for field in schema.fields}
        names = [ids[column_id] for column_id in schema.identifier_field_ids if column_id in ids]
        if len(names) < len(schema.identifier_field_ids):
            raise Unwritable("identifier fields of the table are inside structs; name the key columns: key=[…]")
    elif len(rows) == 1:
        names = list(rows)
    else:
        raise Unwritable(
            f"the rows have the columns {', '.join(rows)[:500]}, and the table has no identifier fields; name the "
            "key columns: key=[…]"
        )
    for name in names:
        if (occurrences := list(rows).count(name)) != 1:
            columns_text = "no column" if not occurrences else f"{occurrences} columns"
            raise Unwritable(
                f"the rows have {columns_text} {name}, which is a key column; they have {', '.join(rows)[:500]}"
            )
    return names


def find_key_fields(schema: Schema, names: Sequence[str]) -> list[Field]:
    """Return the fields of the key columns.

    Raises:
        Unwritable: A column cannot be a key column.
    """
    by_name = {field.name: field for field in schema.fields}
    if not names:
        raise Unwritable("the key has no columns; name at least one column")
    if (repeated_name := find_repeated(names)) is not None:
        raise Unwritable(f"the key has the column {repeated_name} twice; name each column once")
    for name in names:
        if name not in by_name:
            raise Unwritable(f"the table has no key column {name}; it has {', '.join(by_name)}")
        if not isinstance(by_name[name].type, str):
            raise Unwritable(f"column {name} has no primitive type and cannot be a key column")
    fields = [by_name[name] for name in names]
    build_arrow_schema(Schema(tuple(fields), schema.id))  # Refuses types that cannot be written.
    return fields


@dataclass(frozen=True)
class MatchedRows:
    """The rows of one data file that have one of the keys and are not deleted.

    Attributes:
        task: The data file and its deletes.
        positions: The ascending positions of the rows, as int64[rows].
        keys: The indexes of the keys of the rows, as int64[rows].
    """

    task: ScanTask
    positions: Longs
    keys: Longs

    @property
    def is_whole(self) -> bool:
        """Whether the file has no other rows."""
        return len(self.positions) == self.task.records

    def select(self, is_chosen: npt.NDArray[np.bool_]) -> MatchedRows:
        """Return the rows whose keys are chosen.

        Args:
            is_chosen: Whether each key is chosen, as bool[keys].
        """
        rows = is_chosen[self.keys]
        return MatchedRows(self.task, self.positions[rows], self.keys[rows])


@dataclass(frozen=True)
class LocatedKeys:
    """The rows that have one of the keys, by data file.

    Attributes:
        read: The paths of the files that were read to locate rows.
    """

    files: tuple[MatchedRows, ...]
    read: frozenset[str]


def locate(
    client: RowSource, table: OpenTable, keys: BatchKeys, strategy: str | None = None, *, rows_max: int | None = None
) -> LocatedKeys:
    """Locate every live row of the table's snapshot that has one of the keys.

    Args:
        client: The client that plans scans and looks up keys.
        table: The table at the snapshot.
        keys: The keys.
        strategy: `lookup` or `scan`. The default is `lookup` if a record index on the key columns exists, and otherwise
            `scan`.
        rows_max: The maximum number of rows, or None for no limit.

    Raises:
        TooLarge: More than `rows_max` rows have one of the keys. The remaining files are not read.
        Unwritable: The strategy is `lookup`, and there is no record index on the key columns.
        Unreadable: A file cannot be read. The error has its path.
    """
    if table.snapshot_id is None or not keys.count:
        return LocatedKeys((), frozenset())
    index = find_record_index(table.metadata, keys.fields)
    if strategy == LOOKUP and index is None:
        key_text = ", ".join(field.name for field in keys.fields)
        raise Unwritable(f"there is no record index on the key {key_text}; create one, or locate rows by {SCAN}")
    keys_bytes = sum(column.nbytes for column in keys.columns)
    uses_index = index is not None and strategy != SCAN
    # A long filter costs the server time. With an index, it need not be exact, because the index locates the rows.
    values_max = FEW_VALUES_MAX if uses_index or keys_bytes > _VALUES_BYTES_MAX else VALUES_MAX
    key_filter = keys.filter_expression(values_max, table.metadata.partition_specs)
    tasks = {task.path: task for task in plan(client, table, key_filter)}
    answer = None if index is None or strategy == SCAN else _look_up(client, table, keys, index)
    matched_files = []
    if answer is not None:
        if missing := answer.rows.keys() - tasks.keys() - answer.undecided_paths:
            raise ServerFailed(
                f"{min(missing)} has rows of the keys in the index {answer.index}, but is not in the plan for them"
            )
        matched_files = [
            MatchedRows(tasks[path], *rows) for path, rows in answer.rows.items() if path not in answer.undecided_paths
        ]
    count = sum(len(rows.positions) for rows in matched_files)
    _check_count(count, rows_max)
    tasks_to_read = [task for path, task in tasks.items() if answer is None or path in answer.undecided_paths]
    for task, positions, ordinals in scan_files(table, keys, tasks_to_read, count, rows_max):
        matched_files.append(MatchedRows(task, positions, ordinals))
    return LocatedKeys(tuple(matched_files), frozenset(task.path for task in tasks_to_read))


def find_record_index(metadata: TableMetadata, fields: Sequence[Field]) -> IndexDefinition | None:
    """Return the enabled record index on exactly these columns, in any order, or None."""
    key_terms = sorted((field.id, IDENTITY) for field in fields)
    for definition in read_definitions(metadata).enabled:
        if (
            KINDS[definition.kind].answers_keys
            and sorted((term.column_id, term.transform) for term in definition.terms) == key_terms
        ):
            return definition
    return None


def select_indexed_fields(metadata: TableMetadata, fields: Sequence[Field]) -> list[Field] | None:
    """Return the largest subset of these fields that is the key of an enabled record index, or None."""
    by_id = {field.id: field for field in fields}
    longest: list[Field] = []
    for definition in read_definitions(metadata).enabled:
        terms = definition.terms
        if KINDS[definition.kind].answers_keys and all(
            term.transform == IDENTITY and term.column_id in by_id for term in terms
        ):
            longest = max(longest, [by_id[term.column_id] for term in terms], key=len)
    return longest or None


@dataclass(frozen=True)
class _IndexAnswer:
    """The result of a lookup in a record index.

    Attributes:
        index: The name of the index.
        rows: The positions of the rows and the indexes of their keys, by file, each as int64[rows].
        undecided_paths: The paths of the files for which the result is incomplete.
    """

    index: str
    rows: dict[str, tuple[Longs, Longs]]
    undecided_paths: frozenset[str]


def _look_up(client: RowSource, table: OpenTable, keys: BatchKeys, index: IndexDefinition) -> _IndexAnswer | None:
    """Look up the keys in the index.

    Return None if the server does not list all uncovered files (files without entries in the index), or if it refuses
    or fails a request. The caller must then read all files of the plan. A file is also read if the server could not
    decide whether one of its rows has the key.
    """
    tables: list[pa.Table] = []
    undecided_paths: set[str] = set()
    by_id = {field.id: ordinal for ordinal, field in enumerate(keys.fields)}
    columns, ordinals = add_both_zeros(keys.fields, keys.columns)
    for start in range(0, len(ordinals), _LOOKUP_KEYS_MAX):
        lookup_columns = {
            term.text: columns[by_id[term.column_id]].slice(start, _LOOKUP_KEYS_MAX) for term in index.terms
        }
        try:
            answer = client.lookup(
                table.name, pa.table(lookup_columns), index=index.name, at=At(snapshot_id=table.snapshot_id)
            )
        except (Refused, ServerFailed, Unavailable):
            return None
        if answer.uncovered_files > len(answer.uncovered):
            return None
        undecided_paths.update(answer.uncovered)
        rows = answer.rows
        if answer.undecided:
            undecided_paths.update(rows.filter(rows["undecided"])["file_path"].to_pylist())
        tables.append(rows.select(["key", "file_path", "position"]).set_column(0, "key", pc.add(rows["key"], start)))
    # The dictionary stores each path once. The repeated paths may exceed the capacity of a string array.
    rows = pa.concat_tables(tables).unify_dictionaries()
    path_column = rows["file_path"].combine_chunks()
    positions, key_ordinals = rows["position"].to_numpy(), ordinals[rows["key"].to_numpy()]
    return _IndexAnswer(
        index.name, dict(_group_by_file(path_column, positions, key_ordinals)), frozenset(undecided_paths)
    )


def _group_by_file(
    files: pa.DictionaryArray, positions: Longs, ordinals: Longs
) -> Iterator[tuple[str, tuple[Longs, Longs]]]:
    codes = files.indices.to_numpy(zero_copy_only=False)
    order = np.lexsort((positions, codes))
    ends = np.searchsorted(codes[order], np.arange(len(files.dictionary) + 1))
    for code, path in enumerate(files.dictionary.to_pylist()):
        file_rows = order[ends[code] : ends[code + 1]]
        if len(file_rows):
            yield path, (positions[file_rows], ordinals[file_rows])


def _check_count(count: int, rows_max: int | None) -> None:
    """Check the number of located rows.

    Raises:
        TooLarge: There are more than `rows_max`.
    """
    if rows_max is not None and count > rows_max:
        raise TooLarge(f"The keys have more than {rows_max:,} rows, which is the limit. Send fewer keys")


def scan_files(
    table: OpenTable, keys: BatchKeys, tasks: Iterable[ScanTask], count: int = 0, rows_max: int | None = None
) -> Iterator[tuple[ScanTask, Longs, Longs]]:
    """Read the key columns of files, and yield the rows that have one of the keys.

    Args:
        table: The table.
        keys: The keys.
        tasks: The files.
        count: The number of rows that have already been located.
        rows_max: The maximum number of rows including `count`, or None for no limit.

    Yields:
        The task of a file with such rows, their positions, and the indexes of their keys, each as int64[rows].

    Raises:
        TooLarge: There are more than `rows_max` rows.
        Unreadable: A file cannot be read.
    """
    names = [field.name for field in keys.fields]
    # Keys are compared by hash. The filter only prunes row groups by statistics, but is evaluated on each row, so it
    # must be short.
    key_filter = keys.filter_expression(FEW_VALUES_MAX, ranges_max=1)
    reader = TaskReader(plan_read(table, names, key_filter, positions=True), table.storage, keys=table.keys)
    for task in tasks:
        positions, ordinals = [], []
        for batch in reader.read(task):
            batch_ordinals = keys.match([batch.column(place) for place in range(len(names))])
            hits = np.flatnonzero(batch_ordinals >= 0)
            if len(hits):
                count += len(hits)
                _check_count(count, rows_max)
                ordinals.append(batch_ordinals[hits])
                positions.append(batch.column(len(names)).to_numpy()[hits])
        if positions:
            yield task, np.concatenate(positions), np.concatenate(ordinals)
