"""Column metrics of a data file, as manifests hold them: sizes, counts, and bounds by which readers leave files out.

The rule kept: a bound is never within the values. Bounds come from the Parquet footer where it is exact; it has none
for values that are too long for it, so those are taken from the rows. NaN is in no bound and counted; a zero is -0.0 as
a lower bound and 0.0 as an upper one, since engines compare them either way. A string cut short is a lower bound as it
is; an upper one has its last code point (of bytes, its last byte) raised, or there is none (Iceberg spec, "Manifests").

Which columns have metrics is told by the table's properties as Iceberg's writers read them: `write.metadata.metrics.
default`, `….column.<name>`, and by default the first 100 columns, with strings cut to 16. What is inside a list or a
map has sizes only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seamark.connector.arrow.casting import UNKNOWN, file_name_of
from seamark.metaserver.iceberg.expressions.ranges import after_prefix
from seamark.metaserver.iceberg.metadata.properties import as_int
from seamark.metaserver.iceberg.metadata.sort_order import SortOrder
from seamark.metaserver.iceberg.types.reserved import LAST_UPDATED_SEQUENCE_NUMBER, ROW_ID
from seamark.metaserver.iceberg.types.schema import Field, ListType, MapType, Schema, StructType, Type, is_primitive
from seamark.metaserver.iceberg.types.transforms import name_of
from seamark.metaserver.iceberg.types.types import base_name
from seamark.metaserver.iceberg.types.values import FLOATS, encode

DEFAULT_MODE = "write.metadata.metrics.default"
COLUMN_MODE = "write.metadata.metrics.column."
INFERRED_MAX = "write.metadata.metrics.max-inferred-column-defaults"
INFERRED_MAX_DEFAULT = 100
FOOTER_BYTES_MAX = 4096
"""Longer strings and bytes have no bounds in the footers that Arrow writes."""

_TRUNCATE = re.compile(r"truncate\((\d{1,9})\)")
_CUT = frozenset({"string", "binary", "fixed"})
_LINEAGE = frozenset({ROW_ID, LAST_UPDATED_SEQUENCE_NUMBER})
"""In files, beside the table's columns: measured by default, and not among the first."""
_ORDER_PRESERVING = frozenset({"identity", "truncate", "year", "month", "day", "hour"})


class LeafColumn(NamedTuple):
    """A column of the Parquet file. `places` leads to it through structs; `repeated`: it is inside a list or a map."""

    id: int
    kind: str
    places: tuple[int, ...]
    repeated: bool
    path: str
    """As Parquet spells it: `st.a`, `tags.list.element`."""


class Mode(NamedTuple):
    """What is kept of a column. `length`: of strings and bytes; None for all of them."""

    counts: bool
    bounds: bool
    length: int | None


_NONE, _COUNTS, _FULL, _DEFAULT = Mode(False, False, None), Mode(True, False, None), Mode(True, True, None), 16
_TRUNCATED = Mode(True, True, _DEFAULT)


def leaves_of(schema: Schema) -> list[LeafColumn]:
    """In the order of the columns of a Parquet file."""
    return list(_leaves(schema.fields, (), False, ""))


def _leaves(fields: tuple[Field, ...], places: tuple[int, ...], repeated: bool, path: str) -> Iterator[LeafColumn]:
    written = [field for field in fields if field.type != UNKNOWN]
    for place, field in enumerate(written):
        yield from _leaves_within(field.id, field.type, (*places, place), repeated, path + file_name_of(field.name))


def _leaves_within(
    field_id: int, kind: Type, places: tuple[int, ...], repeated: bool, path: str
) -> Iterator[LeafColumn]:
    if isinstance(kind, StructType):
        yield from _leaves(kind.fields, places, repeated, f"{path}.")
    elif isinstance(kind, ListType):
        yield from _leaves_within(kind.element_id, kind.element, (), True, f"{path}.list.element")
    elif isinstance(kind, MapType):
        yield from _leaves_within(kind.key_id, kind.key, (), True, f"{path}.key_value.key")
        yield from _leaves_within(kind.value_id, kind.value, (), True, f"{path}.key_value.value")
    else:
        yield LeafColumn(field_id, kind, places, repeated, path)


def modes_of(schema: Schema, properties: Mapping[str, str], order: SortOrder) -> dict[int, Mode]:
    """By column id; columns that are not named are of no interest. BadRequest for a limit that is no number."""
    given = properties.get(DEFAULT_MODE)
    columns = schema.index.by_id
    if given is not None:
        otherwise = _mode(given, _TRUNCATED)
        found = dict.fromkeys(columns, otherwise)
    else:
        limit = as_int(properties, INFERRED_MAX, INFERRED_MAX_DEFAULT)
        everywhere = len(columns.keys() - _LINEAGE) <= limit
        otherwise = _TRUNCATED if everywhere else _NONE
        found = dict.fromkeys(columns if everywhere else _first(schema, limit), _TRUNCATED)
    for field in order.fields:
        if name_of(field.transform) in _ORDER_PRESERVING:
            found |= dict.fromkeys(field.sources, otherwise if otherwise.bounds else _TRUNCATED)
    for name, text in properties.items():
        column = schema.column_named(name.removeprefix(COLUMN_MODE)) if name.startswith(COLUMN_MODE) else None
        if column is not None:
            found[column.id] = _mode(text, otherwise)
    return found


def _mode(text: str, otherwise: Mode) -> Mode:
    """What makes no sense is as if it were not said, as in Iceberg's writers."""
    plain = text.strip().lower()
    if (match := _TRUNCATE.fullmatch(plain)) and int(match[1]):
        return Mode(True, True, int(match[1]))
    return {"none": _NONE, "counts": _COUNTS, "full": _FULL}.get(plain, otherwise)


def _first(schema: Schema, limit: int) -> list[int]:
    """Ids of the first columns, those of a struct before those inside its structs, lists and maps."""
    found: list[int] = []

    def walk(fields: list[tuple[int, Type]]) -> None:
        found.extend([one for one, kind in fields if isinstance(kind, str)][: max(0, limit - len(found))])
        for _, kind in fields:
            if len(found) >= limit:
                return
            if isinstance(kind, StructType):
                walk([(field.id, field.type) for field in kind.fields])
            elif isinstance(kind, ListType):
                walk([(kind.element_id, kind.element)])
            elif isinstance(kind, MapType):
                walk([(kind.key_id, kind.key), (kind.value_id, kind.value)])

    walk([(field.id, field.type) for field in schema.fields if field.id not in _LINEAGE])
    return found


class Metrics:
    """Of one file. `add` is given each row group before it is written, `of` the footer in the end."""

    def __init__(self, leaves: list[LeafColumn], modes: Mapping[int, Mode]) -> None:
        self._leaves = leaves
        self._modes = {
            leaf.id: _NONE if leaf.repeated or not is_primitive(leaf.kind) else modes.get(leaf.id, _NONE)
            for leaf in leaves
        }
        self._nans: dict[tuple[int, int], int] = {}
        """By row group and column id."""
        self._long: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        """Least and greatest value of a row group whose footer has none."""
        self._groups = 0

    def add(self, rows: pa.Table) -> None:
        """A row group, as a table of the file's Arrow schema."""
        for leaf in self._leaves:
            mode, name = self._modes[leaf.id], base_name(leaf.kind)
            if mode.counts and name in FLOATS:
                nans = pc.sum(pc.is_nan(_column(rows, leaf))).as_py()
                self._nans[self._groups, leaf.id] = nans or 0
            elif mode.bounds and name in ("string", "binary"):
                column = _column(rows, leaf)
                if (pc.max(pc.binary_length(column)).as_py() or 0) > FOOTER_BYTES_MAX:
                    found = pc.min_max(column.cast(pa.large_binary()))
                    self._long[self._groups, leaf.id] = (found["min"].as_py(), found["max"].as_py())
        self._groups += 1

    def of(self, footer: pq.FileMetaData) -> dict[str, Any]:
        """`column-sizes`, `value-counts`, …, as in a ContentFile of the REST standard; those that are there."""
        sizes = dict.fromkeys((leaf.id for leaf in self._leaves), 0)
        values: dict[int, int] = {}
        nulls: dict[int, int] = {}
        nans: dict[int, int] = {}
        lower: dict[int, bytes] = {}
        upper: dict[int, bytes] = {}
        for place, leaf in enumerate(self._leaves):
            chunks = [footer.row_group(group).column(place) for group in range(footer.num_row_groups)]
            sizes[leaf.id] = sum(chunk.total_compressed_size for chunk in chunks)
            mode = self._modes[leaf.id]
            if not mode.counts:
                continue
            values[leaf.id] = sum(chunk.num_values for chunk in chunks)
            if all(chunk.is_stats_set and chunk.statistics.has_null_count for chunk in chunks):
                nulls[leaf.id] = sum(chunk.statistics.null_count for chunk in chunks)
            if base_name(leaf.kind) in FLOATS:
                nans[leaf.id] = sum(self._nans[group, leaf.id] for group in range(len(chunks)))
            if mode.bounds and leaf.id in nulls and (ends := self._ends(leaf, chunks)) is not None:
                lower[leaf.id] = encode(leaf.kind, lower_bound(leaf.kind, ends[0], mode.length))
                most = upper_bound(leaf.kind, ends[1], mode.length)
                if most is not None:
                    upper[leaf.id] = encode(leaf.kind, most)
        return {
            "column-sizes": _counts(sizes),
            "value-counts": _counts(values),
            "null-value-counts": _counts(nulls),
            **({"nan-value-counts": _counts(nans)} if nans else {}),
            "lower-bounds": _bounds(lower),
            "upper-bounds": _bounds(upper),
        }

    def _ends(self, leaf: LeafColumn, chunks: list[Any]) -> tuple[Any, Any] | None:
        """Least and greatest value; None where there is none, or it is not known."""
        found: list[Any] = []
        for group, chunk in enumerate(chunks):
            said = chunk.statistics
            if (group, leaf.id) in self._long:
                found.extend(_value(leaf.kind, end) for end in self._long[group, leaf.id])
            elif said.has_min_max:
                found.extend(_value(leaf.kind, end) for end in (said.min_raw, said.max_raw))
            elif chunk.num_values > said.null_count + self._nans.get((group, leaf.id), 0):
                return None
        return (min(found), max(found)) if found else None


def _column(rows: pa.Table, leaf: LeafColumn) -> pa.ChunkedArray:
    """Null where a struct that it is in is null."""
    column = rows.column(leaf.places[0])
    return pc.struct_field(column, list(leaf.places[1:])) if len(leaf.places) > 1 else column


def _value(kind: str, raw: Any) -> Any:
    """In the form of `expressions.py`, of a value as it stands in a footer."""
    name = base_name(kind)
    if name == "decimal" and isinstance(raw, bytes):
        return int.from_bytes(raw, "big", signed=True)
    return raw.decode() if name == "string" and isinstance(raw, bytes) else raw


def lower_bound(kind: str, value: Any, length: int | None) -> Any:
    """Not above any value of which `value` is the least. `length` is in code points, or bytes; None for all of them."""
    name = base_name(kind)
    if name in FLOATS and value == 0:
        return -0.0
    return value[:length] if name in _CUT else value


def upper_bound(kind: str, value: Any, length: int | None) -> Any:
    """Not below any value of which `value` is the greatest; None where no value so short is."""
    name = base_name(kind)
    if name in FLOATS and value == 0:
        return 0.0
    if name not in _CUT or length is None or len(value) <= length:
        return value
    return after_prefix(value[:length])


def _counts(found: Mapping[int, int]) -> dict[str, list[int]]:
    return {"keys": list(found), "values": list(found.values())}


def _bounds(found: Mapping[int, bytes]) -> dict[str, list[Any]]:
    return {"keys": list(found), "values": [one.hex().upper() for one in found.values()]}
