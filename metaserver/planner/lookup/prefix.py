"""Partition prefixes: values of some partition fields, as a client specifies them.

A prefix has one of two formats:

- A path, as in the locations of data files: `day=2024-01-01/bucket=3`, with percent-encoded names and values. Years,
  months and hours are `2024`, `2024-01` and `2024-01-01-05`, bytes are base64, and `null` is null.
- A JSON object with values as in the server's answers: `{"day": "2024-01-01", "bucket": 3}`.

Fields may be in any order; all must match.

The name of a field may be from any partition spec of the table. In the other specs, the field with the same id is used,
so that a prefix also selects files of older specs. Files of a spec without one of the fields do not match.

A prefix selects exactly the files of its partitions. Pruning keeps blocks whose values it cannot compare. This module
compares the rows of these blocks one by one.

Caches keep the parsed fields of tables, some parsed prefixes, and for each view, the blocks of each value. Results are
not cached. A prefix that is not cached takes 10 µs longer than a cached prefix.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from seamark.cache.memory import MemoryCache
from seamark.cache.sizes import measure_object_bytes
from seamark.formats.iceberg.expressions.binding import Above, Below, Between, parse_literal
from seamark.formats.iceberg.expressions.expression import FALSE, Bound, Expression, Op, join_by_and
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.transforms import (
    UNITS_PER_DAY,
    canonicalize_transform,
    compute_result_type,
    get_transform_name,
)
from seamark.formats.iceberg.types.types import canonicalize_primitive, get_base_name
from seamark.formats.iceberg.types.values import Value, get_decimal_scale, parse_iso_date
from seamark.formats.index.packing import NONE, Form, Longs, encode_key
from seamark.formats.protocol.wire import decode_json
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.memoization import memoize
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.planner.pruning.file_pruning import narrow_by_partition
from seamark.metaserver.planner.view.selection import FileSelection
from seamark.metaserver.planner.view.view import SOME_FILES, TableView

TEXT_MAX = 10_000
"""The maximum number of characters of a prefix."""
_NULLS = ("null", "__HIVE_DEFAULT_PARTITION__")
_ORDINAL_PATTERNS = {
    "year": re.compile(r"([+-]?\d{1,6})"),
    "month": re.compile(r"([+-]?\d{1,6})-(\d\d)"),
    "hour": re.compile(r"([+-]?\d{1,6}-\d\d-\d\d)-(\d\d)"),
}


class _RawValue(NamedTuple):
    """An unparsed value of the request.

    Attributes:
        is_path: Whether the value is from a path, in the format of file locations.
    """

    value: object
    is_path: bool


@dataclass(frozen=True)
class Prefix:
    """A partition prefix.

    Attributes:
        by_spec: The condition on the partition values of each spec, by spec id. None for the empty prefix.
    """

    by_spec: Mapping[int, Expression] | None = None

    def find_whole_blocks(self, view: TableView) -> Longs | None:
        """Return the blocks whose files all match the partition prefix, such as `a=1/b=2`, if no other file matches.

        Usually, each manifest has one partition, so each block has one value of each partition field. A lookup of the
        value then suffices, without comparing every file.

        Returns:
            int64[n], ascending, or None if some but not all files of a block may match.
        """
        if self.by_spec is None:
            return np.flatnonzero(view.row_counts)
        matching_blocks: list[Longs] = []
        for spec_id, expression in self.by_spec.items():
            if expression == FALSE:
                continue
            blocks: Longs | None = None
            for predicate in _list_leaves(expression):
                numbers = _get_block_values(view, spec_id, predicate).find_uniform_blocks(predicate)
                if numbers is None:
                    return None
                blocks = numbers if blocks is None else np.intersect1d(blocks, numbers, assume_unique=True)
            if blocks is not None and len(blocks):
                matching_blocks.append(blocks)
        return (
            matching_blocks[0]
            if len(matching_blocks) == 1
            else np.sort(np.concatenate(matching_blocks))
            if matching_blocks
            else _NO_BLOCKS
        )

    def select(self, view: TableView) -> FileSelection:
        """Return the data files of the view in these partitions.

        Fast comparisons do not support some blocks, such as those with promoted dates. Their rows are compared one by
        one.
        """
        selection = FileSelection.select_all(view)
        if self.by_spec is None:
            return selection
        narrow_by_partition(selection, self.by_spec, lambda: False)
        for spec_id, expression in self.by_spec.items():
            predicates = _list_leaves(expression)
            for predicate in predicates:
                unknown = (selection.state != 0) & ~view.partition(predicate.column_id, predicate.kind).known
                for number in np.flatnonzero(unknown & (view.spec_ids == spec_id)).tolist() if unknown.any() else ():
                    block = view.blocks[number]
                    matches = [_row_matches(block, row, predicates) for row in range(block.rows)]
                    selection.keep(number, np.array(matches, dtype=np.bool_))
        return selection


class _BlockValues:
    """The value of a partition field in each block of one spec whose rows all have the same value.

    Attributes:
        complete: Whether the values of all blocks are known. They are not known for floats, and for types that need a
            conversion.
        has_mixed_nulls: Whether a block has both rows that are null and rows that are not.
    """

    def __init__(self, view: TableView, spec_id: int, field_id: int, kind: str) -> None:
        """Index the blocks of one spec by the value of a partition field, and list the blocks with several values."""
        column = view.partition(field_id, kind)
        numbers_of_spec = [
            number for number in np.flatnonzero(view.spec_ids == spec_id).tolist() if view.blocks[number].rows
        ]
        self.complete = bool(column.known[numbers_of_spec].all()) and all(
            side.form is not Form.FLOATS for side in column.sides
        )
        self.has_mixed_nulls = any(column.nulls[number] == SOME_FILES for number in numbers_of_spec)
        by_key: dict[_Key, list[int]] = {}
        mixed_blocks: list[int] = []
        for number in numbers_of_spec:
            packed_values = column.packed[number]
            if packed_values is None:
                by_key.setdefault(None, []).append(number)
            elif packed_values.width == 0 and packed_values.presence == NONE:
                by_key.setdefault(
                    packed_values.common if packed_values.form == Form.STRINGS else packed_values.base, []
                ).append(number)
            else:
                mixed_blocks.append(number)
        self._by_key = {key: np.array(numbers, dtype=np.int64) for key, numbers in by_key.items()}
        self._mixed_blocks = []
        for side in column.sides:
            numbers = [number for number in mixed_blocks if side.packed[number] is not None]
            if numbers:
                self._mixed_blocks.append((side.form, side.low[numbers], side.high[numbers]))
        self._forms = [side.form for side in column.sides]
        longs = sum(numbers.nbytes for numbers in self._by_key.values())
        self.size_bytes = longs + _KEY_BYTES * len(by_key) + sum(low.nbytes * 2 for _, low, _ in self._mixed_blocks)

    def find_uniform_blocks(self, predicate: Bound) -> Longs | None:
        """Return the blocks whose rows all have the value of the predicate, int64[n], ascending.

        A block stores the values of a partition field in one form, such as integers or texts. It is mixed if its rows
        have several values.

        Returns:
            None if a block may contain this value and other values, if the values of a block are unknown, or if the
            operator of the predicate is not `=` or IS NULL.
        """
        if not self.complete:  # The values of some block are not known.
            return None
        if predicate.op is Op.IS_NULL:
            return None if self.has_mixed_nulls else self._by_key.get(None, _NO_BLOCKS)
        if predicate.op is not Op.EQ:
            return None
        # A block with several values may contain the value if it is between the block's lowest and highest value.
        for form, low, high in self._mixed_blocks:
            key = encode_key(form, predicate.kind, predicate.values[0])
            position = np.uint64(int.from_bytes(key[:8].ljust(8, b"\0"), "big")) if isinstance(key, bytes) else key
            if ((low <= position) & (high >= position)).any():
                return None
        # Blocks may store the same value in different forms, so look up the key of each form.
        blocks = _NO_BLOCKS
        for form in self._forms:
            numbers = self._by_key.get(encode_key(form, predicate.kind, predicate.values[0]), _NO_BLOCKS)
            blocks = numbers if not len(blocks) else np.sort(np.concatenate([blocks, numbers]))
        return blocks


_KEY_BYTES = 250
"""The memory of one value: the key, its array without the block numbers, and the entry in a dict."""
_NO_BLOCKS: Longs = np.empty(0, dtype=np.int64)
_Key = int | float | bytes | None


class _BlockValuesCache:
    """The cached `_BlockValues` of a view, by spec, partition field and type.

    The number of cached fields is limited to the number of fields of the table's specs.
    """

    def __init__(self) -> None:
        self.by_field: dict[tuple[int, int, str], _BlockValues] = {}

    @property
    def size_bytes(self) -> int:
        return sum(values.size_bytes for values in list(self.by_field.values()))


def _get_block_values(view: TableView, spec_id: int, predicate: Bound) -> _BlockValues:
    """Return the values of a partition field by block, for the lookup of a predicate. They are cached with the view."""
    cached_values = view.derived.get(_BlockValuesCache) or view.derived.keep(_BlockValuesCache())
    key = (spec_id, predicate.column_id, predicate.kind)
    values = cached_values.by_field.get(key)
    if values is None:
        values = cached_values.by_field[key] = _BlockValues(view, *key)
    return values


EVERYTHING = Prefix()


def parse_prefix(text: str, metadata: TableMetadata, cache: PrefixCache | None = None) -> Prefix:
    """Parse a partition prefix: the values of some partition fields, as the path `a=1/b=2` or as JSON.

    Raises:
        BadRequest: The text is malformed, a field is unknown, or a value is invalid for its field.
    """
    return _read_prefix(text, _collect_table_fields(metadata)) if cache is None else cache.parse(text, metadata)


def _read_prefix(text: str, table: _TableFields) -> Prefix:
    """Parse a prefix with the partition fields of a table.

    Raises:
        BadRequest: The prefix is malformed, names an unknown field, or has an invalid value.
    """
    values = _parse_partition(text)
    if not values:
        return EVERYTHING
    fields = table.fields
    for name in values:
        if name not in fields:
            hint = (
                f"the table's partition fields are {', '.join(sorted(fields))}"
                if fields
                else "the table has no partition fields"
            )
            raise BadRequest(f"partition has the unknown field {name[:100]!r}; {hint}")
    return Prefix(_build_filters_by_spec(fields, values))


class _Field(NamedTuple):
    """A partition field in one spec.

    `kind` is None if no schema defines the type of its values. `base` is the type without its parameters.
    `parsed_kind` is the type as which the values in a request are parsed.
    """

    id: int
    name: str
    transform: str
    kind: str | None
    base: str
    parsed_kind: str


_Fields = Mapping[str, Mapping[int, _Field | None]]
"""A mapping from a field's name to its field in each spec, by spec id. The field is None if the spec lacks it."""


class _TableFields(NamedTuple):
    """The partition fields of one version of a table, by name.

    The object references `specs` and `schemas`, because the cache is keyed by their identities.
    """

    specs: tuple[PartitionSpec, ...]
    schemas: tuple[Schema, ...]
    fields: _Fields


_CACHED_TEXT_MAX = 200
"""The maximum number of characters of a cached prefix."""


class PrefixCache:
    """A cache of parsed prefixes and partition fields, by table version, with at most `budget_bytes`.

    The cache shares specs and schemas with the metadata.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._cache: MemoryCache[tuple[int, int, int, str | None], tuple[_TableFields, Prefix]] = MemoryCache(
            budget_bytes, "partition-prefixes"
        )

    def parse(self, text: str, metadata: TableMetadata) -> Prefix:
        """Return the parsed prefix, from the cache if possible.

        Raises:
            BadRequest: The prefix is invalid.
        """
        # Comparing ids is fast. An entry references the objects, so no other objects can get these ids.
        version = (id(metadata.partition_specs), id(metadata.schemas), metadata.current_schema_id)
        fields_and_prefix = self._cache.get((*version, text))
        if fields_and_prefix is not None:
            return fields_and_prefix[1]
        # The fields of a table have a separate cache entry, whose text is None.
        fields_and_everything = self._cache.get((*version, None))
        if fields_and_everything is None:
            fields_and_everything = (_collect_table_fields(metadata), EVERYTHING)
            self._cache.put(
                (*version, None), fields_and_everything, measure_object_bytes(fields_and_everything[0].fields)
            )
        fields = fields_and_everything[0]
        prefix = _read_prefix(text, fields)
        if len(text) <= _CACHED_TEXT_MAX:
            self._cache.put((*version, text), (fields, prefix), measure_object_bytes(prefix))
        return prefix


def _collect_table_fields(metadata: TableMetadata) -> _TableFields:
    specs = metadata.partition_specs
    names = {field.name for spec in specs for field in spec.fields}
    fields = {name: {spec.spec_id: _find_field(metadata, spec, name) for spec in specs} for name in names}
    return _TableFields(specs, metadata.schemas, fields)


def _parse_partition(text: str) -> dict[str, _RawValue]:
    """Split a prefix into its unparsed values, by field name. A prefix is a JSON object or a path such as `day=1/b=2`.

    Raises:
        BadRequest: The text is too long, has no value for a name, or has a field twice.
    """
    if len(text) > TEXT_MAX:
        raise BadRequest(f"partition has {len(text)} characters; the limit is {TEXT_MAX} characters")
    if text.startswith("{"):
        items = decode_json(text.encode("utf-8", "surrogatepass"), "partition")
        return {name: _RawValue(value, is_path=False) for name, value in items.items()}
    values: dict[str, _RawValue] = {}
    for part in text.strip("/").split("/") if text.strip("/") else ():
        name, equals, value = part.partition("=")
        name = unquote(name) if "%" in name else name
        if not equals or not name:
            raise BadRequest(f"partition has {part[:100]!r}; expected name=value, as in day=2024-01-01/bucket=3")
        if name in values:
            raise BadRequest(f"partition has the field {name[:100]!r} twice; send each field once")
        # A plus sign in a path is a plus sign, and not a space.
        values[name] = _RawValue(unquote(value.replace("+", "%2B")), is_path=True)
    return values


def _build_filters_by_spec(fields: _Fields, values: dict[str, _RawValue]) -> dict[int, Expression]:
    """Build the condition on the partition values of each spec from the values in a partition prefix.

    If a spec lacks a field of the prefix, or if a value is invalid for its field in this spec, the condition of this
    spec is FALSE. A field may have different types in different specs, so a value need be valid in only one of them.

    Raises:
        BadRequest: A value is invalid for its field in all specs.
    """
    by_spec: dict[int, Expression] = {}
    problems: dict[str, str] = {}
    parsed_names: set[str] = set()
    for name, raw in values.items():
        for spec_id, field in fields[name].items():
            predicate: Expression = FALSE
            if field is not None:
                try:
                    predicate = _make_predicate(field, raw)
                    parsed_names.add(name)
                except ValueError as error:
                    problems[name] = str(error)
            by_spec[spec_id] = join_by_and(by_spec[spec_id], predicate) if spec_id in by_spec else predicate
    for name, problem in problems.items():
        if name not in parsed_names:
            raise BadRequest(f"partition field {name}: {problem}")
    return by_spec


def _find_field(metadata: TableMetadata, spec: PartitionSpec, name: str) -> _Field | None:
    """Return the spec's field with this name.

    If there is none, return the field whose id belongs to this name in another spec, because a partition field can be
    renamed and keeps its id. If there is no such field either, return None.
    """
    match = next((field for field in spec.fields if field.name == name), None)
    if match is None:
        ids = {field.field_id for other in metadata.partition_specs for field in other.fields if field.name == name}
        match = next((field for field in spec.fields if field.field_id in ids), None)
        if match is None:
            return None
    assert match.field_id is not None  # Metadata in storage always have field ids.
    kind = get_field_kind(metadata, match)
    base = get_base_name(kind or "")
    # A decimal may have one digit more than the column's type after `truncate`.
    parsed_kind = f"decimal(38, {get_decimal_scale(kind or '')})" if base == "decimal" else kind or ""
    return _Field(
        match.field_id,
        match.name,
        get_transform_name(canonicalize_transform(match.transform)),
        kind,
        base,
        parsed_kind,
    )


def get_field_kind(metadata: TableMetadata, field: PartitionField) -> str | None:
    """Return the current type of a partition field's values, or None if no schema defines it.

    It is also None for a field with several source columns. If the source column was dropped, its type is that of the
    newest schema with the column.
    """
    if len(field.sources) != 1:
        return None
    source = field.sources[0]
    column = metadata.current_schema.column(source)
    if column is None:
        newest_first = sorted(metadata.schemas, key=lambda schema: schema.id, reverse=True)
        column = next((candidate for schema in newest_first if (candidate := schema.column(source)) is not None), None)
    if column is None or not isinstance(column.type, str):
        return None
    return _find_result_type(field.transform, column.type)


@memoize(1024)
def _find_result_type(transform: str, kind: str) -> str:
    return compute_result_type(canonicalize_transform(transform), canonicalize_primitive(kind))


def _make_predicate(field: _Field, raw: _RawValue) -> Expression:
    """Return the predicate that a partition field has a value.

    Raises:
        ValueError: The value is invalid, or its type is unknown.
    """
    kind = field.kind
    if kind is None:
        raise ValueError("the type of its values is unknown, because no schema has its source column")
    if raw.value is None or (raw.is_path and raw.value in _NULLS):
        return Bound(Op.IS_NULL, field.id, field.name, kind, "identity", kind, ())
    value = _parse_value(field, raw)
    if value is None:  # The value is beyond the range of the type.
        return FALSE
    if isinstance(value, float) and math.isnan(value):
        return Bound(Op.IS_NAN, field.id, field.name, kind, "identity", kind, ())
    return Bound(Op.EQ, field.id, field.name, kind, "identity", kind, (value,))


def _parse_value(field: _Field, raw: _RawValue) -> Value | None:
    """Parse a value of the request. It has the format of values in JSON, or of values in the paths of files.

    For example, bytes are base64 in paths.

    Returns:
        The value, or None if no value of the field's type can be equal to the value of the request.

    Raises:
        ValueError: The value is invalid.
    """
    raw_value = raw.value
    if isinstance(raw_value, str):
        if field.transform in _ORDINAL_PATTERNS:
            return _parse_ordinal(field.transform, raw_value)
        if field.base in ("float", "double") and raw_value.lower().lstrip("+-") in _FLOATS:
            return float(raw_value)
        if raw.is_path and field.base in ("binary", "fixed"):
            try:
                return base64.b64decode(raw_value, validate=True)
            except binascii.Error:
                raise ValueError(f"{raw_value[:100]!r} is not base64, the format of bytes in paths") from None
    elif not isinstance(raw_value, bool | int | float):
        raise ValueError(f"{str(raw_value)[:100]!r} is not a value of type {field.kind}")
    try:
        literal = parse_literal(field.parsed_kind, raw_value)
    except BadRequest as error:
        raise ValueError(error.message) from None
    return None if isinstance(literal, _OUT_OF_RANGE) else literal


_OUT_OF_RANGE = (Above, Below, Between)
_FLOATS = ("nan", "infinity")


def _parse_ordinal(transform: str, text: str) -> int:
    """Parse a year, month or hour in Iceberg's format, and return its number since 1970 ("Partition Transforms").

    Raises:
        ValueError: The text does not have the format.
    """
    match = _ORDINAL_PATTERNS[transform].fullmatch(text)
    example = {"year": "2024", "month": "2024-01", "hour": "2024-01-01-05"}[transform]
    if match is None:
        raise ValueError(f"{text[:100]!r} is not a valid {transform}; write it like {example}")
    if transform == "year":
        return int(match[1]) - 1970
    if transform == "month":
        if not 1 <= int(match[2]) <= 12:
            raise ValueError(f"{text!r} is not a valid month; write it like {example}")
        return (int(match[1]) - 1970) * 12 + int(match[2]) - 1
    if int(match[2]) > 23:
        raise ValueError(f"{text!r} is not a valid hour; write it like {example}")
    return parse_iso_date(match[1]) * 24 + int(match[2])


def _list_leaves(expression: Expression) -> tuple[Bound, ...]:
    if isinstance(expression, Bound):
        return (expression,)
    children = getattr(expression, "children", (expression,))
    return tuple(child for child in children if isinstance(child, Bound))


def _row_matches(block: Block, row: int, predicates: tuple[Bound, ...]) -> bool:
    """Return whether one row matches all predicates, each of which is `=`, IS NULL or IS NAN.

    The comparison is in Python, because the compiled code supports neither dates that were promoted to timestamps nor
    fields that the block lacks.
    """
    partition_values = dict(zip(block.partition_fields, block.partition(row), strict=True))
    values: dict[int, tuple[str, Any]] = {
        field_id: (kind, value) for (field_id, kind), value in partition_values.items()
    }
    for predicate in predicates:
        kind, value = values.get(predicate.column_id, (predicate.kind, None))
        if predicate.op is Op.IS_NULL:
            matches = value is None
        elif predicate.op is Op.IS_NAN:
            matches = isinstance(value, float) and math.isnan(value)
        else:
            if kind == "date" and value is not None and predicate.kind in UNITS_PER_DAY:
                value *= UNITS_PER_DAY[predicate.kind]
            matches = value is not None and value == predicate.values[0]
        if not matches:
            return False
    return True
