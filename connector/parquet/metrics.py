"""Collects the column metrics of a data file for its manifest entry: sizes, counts and bounds.

Readers prune files by the bounds, so all values must be within the bounds. Bounds come from the Parquet footer. The
footer has no bounds for long values, so their bounds are computed from the rows. Bounds exclude NaN, which is counted
separately. A zero is stored as -0.0 in a lower bound and as 0.0 in an upper bound, because engines compare zeros
differently. A truncated string is a valid lower bound. In a truncated upper bound, the last code point (for binary, the
last byte) is incremented, or the bound is omitted (Iceberg spec, "Manifests").

As in Iceberg's writers, the table properties `write.metadata.metrics.default` and
`write.metadata.metrics.column.<name>` select the metrics of columns. By default, the first 100 columns have metrics,
and the bounds of strings have 16 characters. Columns inside lists and maps have only sizes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seamark.connector.arrow.casting import UNKNOWN, make_file_name
from seamark.connector.arrow.partitions import get_column_at
from seamark.formats.iceberg.expressions.ranges import find_end_of_prefix
from seamark.formats.iceberg.metadata.properties import parse_int
from seamark.formats.iceberg.metadata.sort_order import SortOrder
from seamark.formats.iceberg.types.reserved import LAST_UPDATED_SEQUENCE_NUMBER, ROW_ID
from seamark.formats.iceberg.types.schema import Field, ListType, MapType, Schema, StructType, Type, is_primitive
from seamark.formats.iceberg.types.transforms import get_transform_name
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import FLOATS, encode_single_value

DEFAULT_MODE = "write.metadata.metrics.default"
COLUMN_MODE = "write.metadata.metrics.column."
INFERRED_MAX = "write.metadata.metrics.max-inferred-column-defaults"
INFERRED_COLUMNS_MAX_DEFAULT = 100
FOOTER_BYTES_MAX = 4096
"""The maximum length of strings and bytes for which Arrow writes bounds to the footer."""

_TRUNCATE = re.compile(r"truncate\((\d{1,9})\)")
_TRUNCATABLE = frozenset({"string", "binary", "fixed"})
_FLOATS_MAX = 500
"""The maximum number of float columns whose NaN are counted."""
_LINEAGE = frozenset({ROW_ID, LAST_UPDATED_SEQUENCE_NUMBER})
"""The columns of row lineage, which files contain in addition to the table's columns.

They have metrics by default, and are not included in the limit of columns.
"""
_ORDER_PRESERVING = frozenset({"identity", "truncate", "year", "month", "day", "hour"})


class LeafColumn(NamedTuple):
    """A leaf column of a Parquet file.

    Attributes:
        positions: The indexes of the fields on its path through structs.
        repeated: Whether the column is inside a list or map.
    """

    id: int
    kind: str
    positions: tuple[int, ...]
    repeated: bool
    path: str
    """The path in Parquet, such as `st.a` or `tags.list.element`."""


class Mode(NamedTuple):
    """The metrics to collect for a column.

    Attributes:
        length: The length to which bounds of strings and binaries are truncated, or None if they are not truncated.
    """

    counts: bool
    bounds: bool
    length: int | None


_NONE, _COUNTS, _FULL = Mode(False, False, None), Mode(True, False, None), Mode(True, True, None)
_BOUND_LENGTH_DEFAULT = 16
_TRUNCATED = Mode(True, True, _BOUND_LENGTH_DEFAULT)


def list_leaves(schema: Schema) -> list[LeafColumn]:
    """Return the leaf columns in the order of a Parquet file."""
    return list(_list_leaves(schema.fields, (), False, ""))


def _list_leaves(
    fields: tuple[Field, ...], positions: tuple[int, ...], repeated: bool, path: str
) -> Iterator[LeafColumn]:
    written_fields = [field for field in fields if field.type != UNKNOWN]
    for position, field in enumerate(written_fields):
        yield from _list_leaves_within(
            field.id, field.type, (*positions, position), repeated, path + make_file_name(field.name)
        )


def _list_leaves_within(
    field_id: int, kind: Type, positions: tuple[int, ...], repeated: bool, path: str
) -> Iterator[LeafColumn]:
    """Yield the leaf columns of a field.

    Inside a list or map, `positions` is empty, because the indexes of struct fields cannot select single elements.
    """
    if isinstance(kind, StructType):
        yield from _list_leaves(kind.fields, positions, repeated, f"{path}.")
    elif isinstance(kind, ListType):
        yield from _list_leaves_within(kind.element_id, kind.element, (), True, f"{path}.list.element")
    elif isinstance(kind, MapType):
        yield from _list_leaves_within(kind.key_id, kind.key, (), True, f"{path}.key_value.key")
        yield from _list_leaves_within(kind.value_id, kind.value, (), True, f"{path}.key_value.value")
    else:
        yield LeafColumn(field_id, kind, positions, repeated, path)


def list_modes(schema: Schema, properties: Mapping[str, str], order: SortOrder) -> dict[int, Mode]:
    """Return which metrics are collected for each column (`Mode`), by column id.

    For a column without an entry, neither counts nor bounds are collected.

    Raises:
        InvalidRequest: The property for the limit of columns is not a number.
    """
    default = properties.get(DEFAULT_MODE)
    columns = schema.index.by_id
    if default is not None:
        fallback = _parse_mode(default, _TRUNCATED)
        modes = dict.fromkeys(columns, fallback)
    else:
        limit = parse_int(properties, INFERRED_MAX, INFERRED_COLUMNS_MAX_DEFAULT)
        all_columns = len(columns.keys() - _LINEAGE) <= limit
        fallback = _TRUNCATED if all_columns else _NONE
        modes = dict.fromkeys(columns if all_columns else _select_first_columns(schema, limit), _TRUNCATED)
    for field in order.fields:
        if get_transform_name(field.transform) in _ORDER_PRESERVING:
            modes |= dict.fromkeys(field.sources, fallback if fallback.bounds else _TRUNCATED)
    for name, text in properties.items():
        column = schema.find_column_by_name(name.removeprefix(COLUMN_MODE)) if name.startswith(COLUMN_MODE) else None
        if column is not None:
            modes[column.id] = _parse_mode(text, fallback)
    return modes


def _parse_mode(text: str, fallback: Mode) -> Mode:
    """Return the mode in the value of a property, or the fallback if the value is invalid, as in Iceberg's writers."""
    normalized_text = text.strip().lower()
    if (match := _TRUNCATE.fullmatch(normalized_text)) and int(match[1]):
        return Mode(counts=True, bounds=True, length=int(match[1]))
    return {"none": _NONE, "counts": _COUNTS, "full": _FULL}.get(normalized_text, fallback)


def _select_first_columns(schema: Schema, limit: int) -> list[int]:
    """Return the ids of the first `limit` primitive columns, without the columns of row lineage.

    The primitive columns of a struct precede the columns inside its nested columns.
    """
    ids: list[int] = []

    def add_primitive_columns(fields: list[tuple[int, Type]]) -> None:
        ids.extend([column_id for column_id, kind in fields if isinstance(kind, str)][: max(0, limit - len(ids))])
        for _, kind in fields:
            if len(ids) >= limit:
                return
            if isinstance(kind, StructType):
                add_primitive_columns([(field.id, field.type) for field in kind.fields])
            elif isinstance(kind, ListType):
                add_primitive_columns([(kind.element_id, kind.element)])
            elif isinstance(kind, MapType):
                add_primitive_columns([(kind.key_id, kind.key), (kind.value_id, kind.value)])

    add_primitive_columns([(field.id, field.type) for field in schema.fields if field.id not in _LINEAGE])
    return ids


def find_float_columns(schema: Schema) -> list[str]:
    """Return the names of the float columns whose NaN counts are requested from the server.

    They are the first `_FLOATS_MAX` float columns outside lists and maps. Further columns get no NaN counts. The NaN
    counts of copied row groups come from the manifest, because pages are not decoded.
    """
    columns = schema.index.by_id
    floats = [leaf for leaf in list_leaves(schema) if get_base_name(leaf.kind) in FLOATS and not leaf.repeated]
    return [columns[leaf.id].name for leaf in floats[:_FLOATS_MAX]]


class Metrics:
    """Collects the metrics of one file.

    `add` is called with each row group before it is written, and then `collect` with the footer.
    """

    def __init__(self, leaves: list[LeafColumn], modes: Mapping[int, Mode]) -> None:
        self._leaves = leaves
        self._modes = {
            leaf.id: _NONE if leaf.repeated or not is_primitive(leaf.kind) else modes.get(leaf.id, _NONE)
            for leaf in leaves
        }
        self._nans: dict[tuple[int, int], int] = {}
        """The NaN counts, by row group and column id."""
        self._long_values: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        """The pairs (min, max) by row group and column id, for columns whose values are too long for the footer."""
        self._groups = 0

    def add_copied(self, nans: Mapping[int, int]) -> None:
        """Add a row group that is copied. Its values are not decoded, so its bounds come only from the footer.

        Footers have no bounds of long values, so columns with long values in the row group have no bounds.

        Args:
            nans: The known NaN counts by column id.
        """
        self._nans |= {(self._groups, column_id): count for column_id, count in nans.items()}
        self._groups += 1

    def add(self, rows: pa.Table) -> None:
        """Add a row group that is encoded.

        NaN counts are computed, because footers do not have them. Bounds are computed for columns with long values,
        because the writer leaves these bounds out of the footer.

        Args:
            rows: A row group with the file's Arrow schema.
        """
        for leaf in self._leaves:
            mode, name = self._modes[leaf.id], get_base_name(leaf.kind)
            if mode.counts and name in FLOATS:
                nans = pc.sum(pc.is_nan(get_column_at(rows, leaf.positions))).as_py()
                self._nans[self._groups, leaf.id] = nans or 0
            elif mode.bounds and name in ("string", "binary"):
                column = get_column_at(rows, leaf.positions)
                if (pc.max(pc.binary_length(column)).as_py() or 0) > FOOTER_BYTES_MAX:
                    min_max = pc.min_max(column.cast(pa.large_binary()))
                    self._long_values[self._groups, leaf.id] = (min_max["min"].as_py(), min_max["max"].as_py())
        self._groups += 1

    def collect(self, footer: pq.FileMetaData, *, secret: Collection[int] = ()) -> dict[str, Any]:
        """Return the metrics, such as `column-sizes`, in the form of a ContentFile of the REST specification.

        Args:
            secret: The ids of encrypted columns. They have no metrics, because manifests are not encrypted.
        """
        sizes = {leaf.id: 0 for leaf in self._leaves if leaf.id not in secret}
        values: dict[int, int] = {}
        nulls: dict[int, int] = {}
        nans: dict[int, int] = {}
        lower: dict[int, bytes] = {}
        upper: dict[int, bytes] = {}
        for position, leaf in enumerate(self._leaves):
            if leaf.id in secret:
                continue
            chunks = [footer.row_group(group).column(position) for group in range(footer.num_row_groups)]
            sizes[leaf.id] = sum(chunk.total_compressed_size for chunk in chunks)
            mode = self._modes[leaf.id]
            if not mode.counts:
                continue
            values[leaf.id] = sum(chunk.num_values for chunk in chunks)
            if all(chunk.is_stats_set and chunk.statistics.has_null_count for chunk in chunks):
                nulls[leaf.id] = sum(chunk.statistics.null_count for chunk in chunks)
            if get_base_name(leaf.kind) in FLOATS:
                nan_counts = [self._nans.get((group, leaf.id)) for group in range(len(chunks))]
                if None not in nan_counts:
                    nans[leaf.id] = sum(filter(None, nan_counts))
            has_bounds = mode.bounds and leaf.id in nulls
            if has_bounds and (min_max := self._read_min_max(leaf, chunks)) is not None:
                minimum, maximum = min_max
                lower[leaf.id] = encode_single_value(leaf.kind, compute_lower_bound(leaf.kind, minimum, mode.length))
                upper_value = compute_upper_bound(leaf.kind, maximum, mode.length)
                if upper_value is not None:
                    upper[leaf.id] = encode_single_value(leaf.kind, upper_value)
        return {
            "column-sizes": _to_counts_map(sizes),
            "value-counts": _to_counts_map(values),
            "null-value-counts": _to_counts_map(nulls),
            **({"nan-value-counts": _to_counts_map(nans)} if nans else {}),
            "lower-bounds": _to_bounds_map(lower),
            "upper-bounds": _to_bounds_map(upper),
        }

    def _read_min_max(self, leaf: LeafColumn, chunks: list[Any]) -> tuple[Any, Any] | None:
        """Return the minimum and maximum of a column, or None if it has no values or they are unknown.

        They are unknown if a row group has values other than null and NaN, but no bounds, or if a bound is invalid.
        """
        values: list[Any] = []
        for group, chunk in enumerate(chunks):
            statistics = chunk.statistics
            if (group, leaf.id) in self._long_values:
                values.extend(_decode_bound(leaf.kind, value) for value in self._long_values[group, leaf.id])
            elif statistics.has_min_max:
                values.extend(_decode_bound(leaf.kind, value) for value in (statistics.min_raw, statistics.max_raw))
            elif chunk.num_values > statistics.null_count + self._nans.get((group, leaf.id), 0):
                return None
        # The bounds of a copied row group may be invalid: parquet-java writes NaN, and text may be invalid UTF-8.
        if any(value is None or value != value for value in values):
            return None
        return (min(values), max(values)) if values else None


def _decode_bound(kind: str, raw: Any) -> Any:
    """Return the Python value of a bound in the footer, or None if the bound is not a valid value of the type."""
    name = get_base_name(kind)
    if name == "decimal" and isinstance(raw, bytes):
        return int.from_bytes(raw, "big", signed=True)
    if name == "string" and isinstance(raw, bytes):
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return None
    return raw


def compute_lower_bound(kind: str, value: Any, length: int | None) -> Any:
    """Return a lower bound of a column whose minimum is `value`.

    Args:
        kind: The Iceberg type of the column.
        value: The minimum. For the float 0.0, the bound is -0.0, because a footer does not distinguish the two zeros.
        length: The maximum length in code points or bytes, or None if the bound is not truncated.
    """
    name = get_base_name(kind)
    if name in FLOATS and value == 0:
        return -0.0
    return value[:length] if name in _TRUNCATABLE else value


def compute_upper_bound(kind: str, value: Any, length: int | None) -> Any:
    """Return an upper bound of a column whose maximum is `value`, or None if there is none of at most this length.

    A truncated maximum would be too small, so the bound is the end of all values that begin with its prefix. For a zero
    of a float column, the bound is 0.0, because a footer does not distinguish the two zeros.
    """
    name = get_base_name(kind)
    if name in FLOATS and value == 0:
        return 0.0
    if name not in _TRUNCATABLE or length is None or len(value) <= length:
        return value
    return find_end_of_prefix(value[:length])


def _to_counts_map(by_id: Mapping[int, int]) -> dict[str, list[int]]:
    return {"keys": list(by_id), "values": list(by_id.values())}


def _to_bounds_map(by_id: Mapping[int, bytes]) -> dict[str, list[Any]]:
    return {"keys": list(by_id), "values": [bound.hex().upper() for bound in by_id.values()]}
