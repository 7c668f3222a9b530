"""The cube: the rows of each data file, grouped by the dimensions, with partial aggregates (decision 51).

    bytes  0-7   magic                 bytes  8-11  version of this layout
    bytes 12-15  files                 bytes 16-23  bytes of the Arrow IPC file
    bytes 24-27  CRC-32 of the file    bytes 28-31  CRC-32 of bytes 0-27
    the Arrow IPC file: record batch n has the groups of data file n, packed (`packed_groups.py`)

All numbers are little-endian. The columns of an entry are the dimensions `d0`, `d1`, ... and the partial aggregates
`m0`, `m1`, ... in the order of `list_partials`; `m0` is the number of rows. A group may appear twice if its values
differ only in their bits, such as 0.0 and -0.0: an engine groups the entries again. The checksum covers all bytes, and
is compared when the blob is opened, because a changed bit would change an answer.

Every value is stored exactly. If an expression or a sum does not fit its type, ValueError is raised, and the file gets
no entry. The functions are pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from isal import isal_zlib

from seamark.formats.iceberg.expressions.arrow import to_row_type
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.index.keys.distinct_sketches import SKETCH, build_sketches, check_sketches, merge_sketches
from seamark.formats.index.keys.group_conditions import TIME_UNITS, get_dimension_kind
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import KeyRanges, Keys
from seamark.formats.index.keys.lookups import parse_lookup
from seamark.formats.index.keys.measures import (
    APPROX_DISTINCT,
    COUNT,
    MAX,
    MIN,
    PRECISION_MAX,
    SUM,
    ColumnOperand,
    Measure,
    NumberOperand,
    Operand,
    Partial,
    get_decimal_digits,
    list_partials,
)
from seamark.formats.index.keys.terms import Term
from seamark.formats.index.kinds.arrow_sizes import count_decoded_bytes, find_batches
from seamark.formats.index.kinds.kind import IndexKind, IndexParameter, Mask, UnknownVersion
from seamark.formats.index.kinds.packed_groups import (
    list_packed_names,
    make_packed_schema,
    pack_groups,
    read_groups_schema,
    unpack_groups,
)

Columns = Mapping[int, pa.ChunkedArray]
Attributes = Mapping[Term, pa.ChunkedArray]
"""The attributes of dimension tables for the rows of a data file, by the terms that are attributes.

They can be dictionary arrays, whose chunks have the same dictionary.
"""
_NO_ATTRIBUTES: Attributes = {}

ROWS_PER_GROUP_MIN = 20.0
_LONG_DIGITS, _WIDE_DIGITS, _WIDE_OPERAND_DIGITS = 19, 76, 75
"""The digits of a decimal for any integer, of the widest decimal of Arrow, and of an operand of a sum in it."""
SMALL_CUBE_MAX_GROUPS = 1000
"""The maximum number of groups of an entry that is kept even if it is not smaller than its rows."""
ENTRY_GROUPS_MAX = 1_000_000
"""The maximum number of groups of an entry."""
ENTRY_BYTES_MAX = 256 << 20
"""The maximum number of bytes of the groups of an entry when it is built."""
_DECODED_BYTES_MAX = 2 * ENTRY_BYTES_MAX
"""The maximum number of decompressed bytes of an entry. An entry with more is damaged.

The limit includes a reserve for Arrow's padding, which `nbytes` does not count.
"""
TIME_TYPES = frozenset({"date", "timestamp", "timestamptz"})
_DIMENSION_TYPES = TIME_TYPES | {
    "boolean", "int", "long", "float", "double", "decimal", "string", "binary", "fixed", "uuid", "time"
}  # fmt: skip
_MAGIC = b"SMKCUBE\n"
_LAYOUT_VERSION = 2
"""The version of the blob's layout, which is also the version of the blob's type."""
_HEAD = struct.Struct("<8sIIQI")
_HEAD_CHECKSUM = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _HEAD_CHECKSUM.size
_FLOAT_TOLERANCE = 1e-9
"""The maximum relative difference of two sums of floats in an audit. The order of the additions may differ."""
_LONG_MAX = (1 << 63) - 1
_ROW = "row"
"""The column with the number of each row. Names of dimensions and partial aggregates begin with "d" and "m"."""
_ARROW_FUNCTIONS = {"+": "add", "-": "subtract", "*": "multiply"}


class SumOverflow(ValueError):
    """The sum of a group does not fit its type."""


class CubeEntries:
    """An opened blob. It is immutable, and several threads can use it.

    Groups are decompressed when they are read, so an opened blob needs only the memory of its compressed bytes.
    """

    def __init__(self, blob: memoryview) -> None:
        if len(blob) < _HEAD_BYTES:
            raise ValueError(f"a cube cannot have only {len(blob)} bytes")
        if isal_zlib.crc32(blob[: _HEAD.size]) != _HEAD_CHECKSUM.unpack_from(blob, _HEAD.size)[0]:
            raise ValueError("the head of a cube does not match its checksum")
        magic, layout, self.files, length, self._checksum = _HEAD.unpack_from(blob)
        if magic != _MAGIC:
            raise ValueError(f"{magic!r} is not the start of a cube")
        if layout != _LAYOUT_VERSION:
            raise UnknownVersion(f"the cube has layout {layout}; this server reads layout {_LAYOUT_VERSION}")
        self._body = blob[_HEAD_BYTES:]
        if len(self._body) != length:
            raise ValueError(f"a cube has {len(self._body)} bytes instead of {length}")
        self._check_body()
        reader = self._open(None)
        self._packed_names: list[str] = reader.schema.names
        self.schema: pa.Schema = read_groups_schema(reader.schema)
        if reader.num_record_batches != self.files:
            raise ValueError(f"a cube has {reader.num_record_batches} entries instead of {self.files}")
        self._batches = find_batches(self._body)
        if len(self._batches) != self.files:
            raise ValueError(f"a cube lists {len(self._batches)} entries instead of {self.files}")

    def verify(self) -> None:
        """Check all bytes and all groups.

        Raises:
            ValueError: The blob is damaged.
        """
        self._check_body()
        for _ in self.read(range(self.files)):
            pass

    def _check_body(self) -> None:
        if isal_zlib.crc32(self._body) != self._checksum:
            raise ValueError("a cube does not match its checksum")

    def read(self, numbers: Iterable[int], columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the groups of some data files.

        The batches are validated, because Arrow does not check the offsets of an array.

        Args:
            numbers: The indexes of the data files.
            columns: The names of the columns, in the order of the schema, or None for all columns.

        Raises:
            ValueError: The blob is damaged.
        """
        reader = self._open(columns)
        schema = self.schema if columns is None else pa.schema([self.schema.field(name) for name in columns])
        try:
            for number in numbers:
                size = count_decoded_bytes(self._body, self._batches[number])
                if size > _DECODED_BYTES_MAX:
                    raise ValueError(
                        f"an entry of a cube has {size:,} bytes after decompression; the maximum is "
                        f"{_DECODED_BYTES_MAX:,}"
                    )
                packed = reader.get_batch(number)
                packed.validate(full=True)
                groups = unpack_groups(packed, schema, _DECODED_BYTES_MAX)
                for column in groups.columns:
                    if column.type == SKETCH:
                        check_sketches(column)
                yield groups
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"a cube cannot be read: {error}") from None

    def _open(self, columns: Sequence[str] | None) -> pa.ipc.RecordBatchFileReader:
        """Open the Arrow file for reading some columns, or all columns.

        Raises:
            ValueError: The file is damaged.
        """
        fields = None
        if columns is not None:
            fields = [self._packed_names.index(name) for name in list_packed_names(columns)]
        try:
            return pa.ipc.open_file(pa.py_buffer(self._body), options=pa.ipc.IpcReadOptions(included_fields=fields))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"a cube cannot be read: {error}") from None


class CubeKind(IndexKind[pa.RecordBatch, CubeEntries]):
    """The index kind of cubes."""

    name = "cube"
    version = _LAYOUT_VERSION
    columns_max = 16
    parameters = (
        IndexParameter(
            "shrink",
            f"the minimum number of rows for each group, in data files with more than {SMALL_CUBE_MAX_GROUPS:,} groups",
            ROWS_PER_GROUP_MIN,
            1,
            1_000_000,
        ),
    )
    aggregates = True
    takes_attributes = True

    def supports_type(self, type_name: str) -> bool:
        return get_base_name(type_name) in _DIMENSION_TYPES

    def find_term_problem(self, term: Term) -> str | None:
        if (
            parse_lookup(term.transform) is not None
            or term.transform == IDENTITY
            or (term.transform in TIME_UNITS and get_base_name(term.source) in TIME_TYPES)
        ):
            return None
        units = ", ".join(TIME_UNITS)
        return f"{term.text} is not a dimension of a cube: use a column, or {units} of a date or a timestamp"

    def build(self, columns: Sequence[Keys], parameters: Mapping[str, float]) -> pa.RecordBatch:
        raise ValueError("a cube is built from values, not from keys")

    def build_entry_with_aggregates(
        self,
        terms: Sequence[Term],
        measures: Sequence[Measure],
        columns: Columns,
        parameters: Mapping[str, float],
        attributes: Attributes = _NO_ATTRIBUTES,
    ) -> pa.RecordBatch:
        """Return the sorted groups of the rows of a data file.

        Raises:
            ValueError: There are too many groups, or a value is invalid. The parameter `shrink` is the minimum number
                of rows for each group.
        """
        entry = group_rows(terms, measures, columns, attributes)
        if entry.num_rows > ENTRY_GROUPS_MAX or entry.nbytes > ENTRY_BYTES_MAX:
            raise ValueError(
                f"the cube of one data file is too large: it has {entry.num_rows:,} groups with {entry.nbytes:,} "
                f"bytes; the maximum is {ENTRY_GROUPS_MAX:,} groups and {ENTRY_BYTES_MAX:,} bytes"
            )
        rows = len(next(iter(columns.values())))
        if entry.num_rows > SMALL_CUBE_MAX_GROUPS and entry.num_rows * parameters["shrink"] > rows:
            raise ValueError(explain_too_many_groups(entry.num_rows, rows, parameters["shrink"]))
        # Sort only now, because sorting takes longer than grouping, and each build tries a refused file again.
        entry = _sort_groups(entry)
        entry.validate(full=True)  # A data file can contain text that is not UTF-8, which `read` refuses.
        return entry

    def encode(self, entries: Sequence[pa.RecordBatch]) -> list[bytes | memoryview]:
        return _encode_blob(entries[0].schema, entries)

    def merge(self, parts: Sequence[tuple[CubeEntries, Mask]]) -> list[bytes | memoryview]:
        schema = parts[0][0].schema
        if any(index.schema != schema for index, _ in parts):
            raise ValueError("cubes with different columns cannot be merged")
        return _encode_blob(
            schema, (batch for index, keep in parts for batch in index.read(np.flatnonzero(keep).tolist()))
        )

    def open(self, blob: memoryview) -> CubeEntries:
        return CubeEntries(blob)

    def supports(self, predicate: object) -> bool:
        return False

    def query(self, ranges: Sequence[KeyRanges]) -> None:
        return None

    def make_keys_query(self, keys: KeySet) -> None:
        return None

    def check_rows(self, index: CubeEntries, rows: int) -> str | None:
        cube_rows = sum(pc.sum(batch.column("m0")).as_py() or 0 for batch in index.read(range(index.files), ["m0"]))
        return None if cube_rows == rows else f"the cube counts {cube_rows:,} rows, but its data files have {rows:,}"

    def compare_aggregates(self, index: CubeEntries, number: int, expected_groups: pa.RecordBatch) -> Iterator[str]:
        (stored_groups,) = index.read([number])
        if stored_groups.schema != expected_groups.schema or stored_groups.num_rows != expected_groups.num_rows:
            yield f"the cube has {stored_groups.num_rows:,} groups, but the data file has {expected_groups.num_rows:,}"
            return
        # Entries of earlier versions have the groups in the order in which they appear in the file.
        stored_groups, expected_groups = _sort_groups(stored_groups), _sort_groups(expected_groups)
        for name, left, right in zip(
            stored_groups.schema.names, stored_groups.columns, expected_groups.columns, strict=True
        ):
            if not _are_equal(left, right):
                yield f"the column {name} of the cube differs from the rows"


def _sort_groups(entry: pa.RecordBatch) -> pa.RecordBatch:
    """Sort groups by their dimensions, so that equal values are neighbours and compress well.

    Floats are sorted by their bits, so that the order of groups with 0.0 and -0.0 is always the same.
    """
    keys = {}
    for name, column in zip(entry.schema.names, entry.columns, strict=True):
        if name.startswith("d"):  # The dimensions are d0, d1 …, and the partial aggregates m0, m1 ….
            bits_type = {pa.float32(): pa.int32(), pa.float64(): pa.int64()}.get(column.type)
            keys[name] = _rank_texts(column) if bits_type is None else column.view(bits_type)
    if not keys or entry.num_rows < 2:
        return entry
    order = pc.sort_indices(pa.table(keys), sort_keys=[(name, "ascending") for name in keys])
    return entry.take(order)


def _rank_texts(column: pa.Array) -> pa.Array:
    """Return the ranks of texts among the distinct texts, because numbers are sorted faster than texts.

    Other columns, and columns of only nulls, do not change.
    """
    if not pa.types.is_string(column.type):
        return column
    dictionary_array = column.dictionary_encode()
    return (
        pc.rank(dictionary_array.dictionary).take(dictionary_array.indices)
        if len(dictionary_array.dictionary)
        else column
    )


def explain_too_many_groups(groups: int, rows: int, rows_per_group_min: float) -> str:
    """Return a message that explains why a cube with this number of groups is too large to be useful.

    `rows_per_group_min` is the parameter `shrink` of the index.
    """
    return (
        f"a cube of {groups:,} groups for {rows:,} rows has {rows / max(1, groups):.1f} rows for each group; "
        f"the minimum is {rows_per_group_min:g} (shrink)"
    )


def group_rows(
    terms: Sequence[Term], measures: Sequence[Measure], columns: Columns, attributes: Attributes = _NO_ATTRIBUTES
) -> pa.RecordBatch:
    """Group the rows of a data file, and return a row for each group.

    Its columns are the dimensions d0, d1 …, and the partial aggregates m0, m1 …. Attributes with a dictionary are
    grouped by their codes, and the codes of the groups are then replaced by values.

    Args:
        terms: The dimensions.
        measures: The measures.
        columns: The columns of the dimensions and measures by field id. All have the same number of rows.
        attributes: The attributes of dimension tables for these rows.

    Raises:
        ValueError: A value cannot be stored exactly.
    """
    rows = len(next(iter(columns.values())))
    keys: dict[str, pa.ChunkedArray] = {}
    dictionaries: dict[str, pa.Array] = {}
    for index, term in enumerate(terms):
        name = f"d{index}"
        if parse_lookup(term.transform) is None:
            keys[name] = _truncate_values(term, columns[term.column_id])
        elif pa.types.is_dictionary(attributes[term].type) and attributes[term].num_chunks:
            chunks = attributes[term].chunks
            keys[name] = pa.chunked_array([chunk.indices for chunk in chunks])
            dictionaries[name] = chunks[0].dictionary.cast(get_dimension_type(term))
        else:
            keys[name] = attributes[term].cast(get_dimension_type(term))
    values = dict[str, _Values]()
    for index, partial in enumerate(list_partials(measures)):
        if partial.operand is None:  # Count rows as values that are not null.
            column = pa.chunked_array([pa.repeat(pa.scalar(value=True), rows)])
        else:
            column = _evaluate_operand(partial.operand, columns)
        values[f"m{index}"] = _Values(partial.function, column, get_partial_type(partial))
    groups = _aggregate_groups(keys, values)
    for name, dictionary in dictionaries.items():
        column_index = groups.schema.get_field_index(name)
        codes = groups[name].combine_chunks()
        groups = groups.set_column(column_index, name, dictionary.take(codes))
    groups = groups.combine_chunks()
    return groups.to_batches()[0] if groups.num_rows else pa.RecordBatch.from_pylist([], groups.schema)


def combine_groups(groups: pa.Table, functions: Mapping[str, str]) -> pa.Table:
    """Combine the groups of several data files.

    Args:
        groups: Dimensions and partial aggregates, as in `CubeEntries`. Without dimensions, the result has one row.
        functions: The function of each column with partial aggregates, by name. The other columns are dimensions.

    Raises:
        SumOverflow: A sum does not fit its type.
    """
    keys = {name: groups[name] for name in groups.column_names if name not in functions}
    values = {
        name: _Values(SUM if function == COUNT else function, groups[name], groups[name].type)
        for name, function in functions.items()
    }
    return _aggregate_groups(keys, values)


class _Values(NamedTuple):
    """Values to aggregate, and the type of the result."""

    function: str
    column: pa.ChunkedArray
    result: pa.DataType


def _aggregate_groups(keys: Mapping[str, pa.ChunkedArray], values: Mapping[str, _Values]) -> pa.Table:
    """Return one row for each group, with the columns of `keys` and `values`.

    Raises:
        SumOverflow: A sum does not fit its type.
    """
    inputs, aggregates = dict(keys), list[tuple[str, str]]()
    has_sketches = False
    for name, (function, column, _) in values.items():
        if function == APPROX_DISTINCT:
            has_sketches = True
            continue
        if function == SUM:
            column = _widen_sum(column)
        elif function in (MIN, MAX) and pa.types.is_floating(column.type):
            inputs[f"{name}_nan"] = is_nan = pc.is_nan(column)
            aggregates.append((f"{name}_nan", "any"))
            column = pc.if_else(is_nan, pa.scalar(None, column.type), column)
        inputs[name] = column
        aggregates.append((name, function))
    if has_sketches and keys:
        inputs[_ROW] = pa.chunked_array([pa.array(np.arange(_count_rows(values)))])
        aggregates.append((_ROW, "list"))
    grouped = pa.table(inputs).group_by(list(keys), use_threads=False).aggregate(aggregates)
    results = {name: grouped[name] for name in keys}
    groups, count = np.zeros(_count_rows(values) if has_sketches else 0, np.int64), 1
    if has_sketches and keys:
        groups, count = _number_groups(grouped[f"{_ROW}_list"]), grouped.num_rows
    for name, (function, column, kind) in values.items():
        if function == APPROX_DISTINCT:
            combine = merge_sketches if column.type == SKETCH else build_sketches
            results[name] = pa.chunked_array([combine(column, groups, count)])
            continue
        result = grouped[f"{name}_{function}"]
        if f"{name}_nan_any" in grouped.column_names:  # The result is NaN only if all values are NaN.
            is_nan = pc.and_(pc.is_null(result), pc.fill_null(grouped[f"{name}_nan_any"], fill_value=False))
            result = pc.if_else(is_nan, pa.scalar(float("nan"), result.type), result)
        try:
            results[name] = result.cast(kind)
        except pa.ArrowInvalid as error:
            raise SumOverflow(str(error)) from None
    return pa.table(results)


def _count_rows(values: Mapping[str, _Values]) -> int:
    return len(next(iter(values.values())).column)


def _number_groups(rows: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return the number of each row's group, from the rows of each group.

    Args:
        rows: A list for each group, with the indexes of its rows.
    """
    lists = rows.combine_chunks()
    counts = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    numbers = np.zeros(int(counts.sum()), np.int64)
    numbers[lists.flatten().to_numpy()] = np.repeat(np.arange(len(counts)), counts)
    return numbers


def _widen_sum(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the values in a type in which Arrow adds them without an overflow.

    A sum of n decimals can have as many more digits as n has. Up to PRECISION_MAX digits, the type stays.
    """
    kind = values.type
    if pa.types.is_floating(kind):
        return values.cast(pa.float64())
    if pa.types.is_integer(kind):
        return values if _sums_fit_64_bits(values) else values.cast(pa.decimal128(_LONG_DIGITS, 0))
    sum_digits_max = kind.precision + len(str(len(values)))
    return values if sum_digits_max <= PRECISION_MAX else values.cast(pa.decimal256(_WIDE_DIGITS, kind.scale))


def _sums_fit_64_bits(values: pa.ChunkedArray) -> bool:
    """Return whether the sum of any subset of these integers certainly fits into 64 bits."""
    limits = pc.min_max(values).as_py()
    largest = max(abs(limits["min"] or 0), abs(limits["max"] or 0))
    return bool(largest * len(values) <= _LONG_MAX)


def get_partial_type(partial: Partial) -> pa.DataType:
    """Return the Arrow type of a partial aggregate, an aggregate of the rows of one group in one data file.

    Sums have the widest type of floats or decimals, because they are later added to the sums of other files.
    """
    if partial.function == COUNT or partial.operand is None:
        return pa.int64()
    if partial.function == APPROX_DISTINCT:
        return SKETCH
    kind = partial.operand.kind
    if partial.function != SUM:
        return to_row_type(kind)
    name = get_base_name(kind)
    _, scale = (0, 0) if name in ("float", "double") else get_decimal_digits(kind)
    return pa.float64() if name in ("float", "double") else pa.decimal128(PRECISION_MAX, scale)


def build_entry_schema(terms: Sequence[Term], measures: Sequence[Measure]) -> pa.Schema:
    """Return the schema of the groups of a cube: the dimensions d0, d1, …, and the partial aggregates m0, m1, …"""
    fields = [(f"d{number}", get_dimension_type(term)) for number, term in enumerate(terms)]
    fields += [(f"m{number}", get_partial_type(partial)) for number, partial in enumerate(list_partials(measures))]
    return pa.schema(fields)


def get_dimension_type(term: Term) -> pa.DataType:
    """Return the Arrow type of a dimension. A truncated time keeps the type of its column."""
    return to_row_type(get_dimension_kind(term))


def _truncate_values(term: Term, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the values of a dimension. A time is truncated to its unit, such as a day, and keeps its type."""
    values = column.cast(to_row_type(term.source))
    if term.transform == IDENTITY:
        return values
    kind = values.type
    local_times = values.cast(pa.timestamp("us")) if pa.types.is_timestamp(kind) else values
    return pc.floor_temporal(local_times, unit=term.transform).cast(kind)


def _evaluate_operand(operand: Operand, columns: Columns) -> pa.ChunkedArray:
    """Evaluate an operand on columns.

    Integers are computed in the result's type, in which Arrow reports an overflow. Decimals are computed with up to 76
    digits, and the exact result is then cast to at most 38 digits.

    Raises:
        ValueError: A value does not fit the type.
    """
    match operand:
        case ColumnOperand():
            return columns[operand.column_id].cast(to_row_type(operand.kind))
        case NumberOperand():
            rows = len(next(iter(columns.values())))
            scalar = pa.scalar(operand.text).cast(to_row_type(operand.kind))
            return pa.chunked_array([pa.repeat(scalar, rows)])
    operands = (operand.left, operand.right)
    values = [_evaluate_operand(side, columns) for side in operands]
    result = to_row_type(operand.kind)
    if pa.types.is_integer(result):
        return pc.call_function(f"{_ARROW_FUNCTIONS[operand.sign]}_checked", [column.cast(result) for column in values])
    _, scale = get_decimal_digits(operand.kind)
    digits = [
        get_decimal_digits(side.kind) if operand.sign == "*" else (_WIDE_OPERAND_DIGITS, scale) for side in operands
    ]
    wide_columns = [_widen_decimals(column, *precision) for column, precision in zip(values, digits, strict=True)]
    # If a value has more digits than the engines' type, the cast fails.
    return pc.call_function(_ARROW_FUNCTIONS[operand.sign], wide_columns).cast(pa.decimal128(PRECISION_MAX, scale))


def _widen_decimals(values: pa.ChunkedArray, precision: int, scale: int) -> pa.ChunkedArray:
    """Return integers or decimals as decimals of up to 76 digits, whose sums and products are exact."""
    if pa.types.is_integer(values.type):
        values = values.cast(pa.decimal128(_LONG_DIGITS, 0))
    return values.cast(pa.decimal256(precision, scale))


def _encode_blob(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> list[bytes | memoryview]:
    """Encode a blob from the groups of its data files, in order."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    files = 0
    with pa.ipc.new_file(sink, make_packed_schema(schema), options=options) as writer:
        for batch in batches:
            writer.write_batch(pack_groups(batch))
            files += 1
    body = memoryview(sink.getvalue())
    head = _HEAD.pack(_MAGIC, _LAYOUT_VERSION, files, len(body), isal_zlib.crc32(body))
    return [head + _HEAD_CHECKSUM.pack(isal_zlib.crc32(head)), body]


def _are_equal(left: pa.Array, right: pa.Array) -> bool:
    """Return whether two columns have the same values. Floats may differ by `_FLOAT_TOLERANCE`."""
    if not pa.types.is_floating(left.type):
        return bool(left.equals(right))
    left_numbers, right_numbers = (array.to_numpy(zero_copy_only=False) for array in (left, right))
    has_same_nulls = pc.is_null(left).equals(pc.is_null(right))
    return has_same_nulls and bool(
        np.allclose(left_numbers, right_numbers, rtol=_FLOAT_TOLERANCE, atol=0.0, equal_nan=True)
    )


CUBE = CubeKind()
