"""Data and delete files as values, and their JSON.

Sources: Iceberg REST spec, schemas `ContentFile`, `DataFile`, `PositionDeleteFile`, `EqualityDeleteFile`; Iceberg spec,
"Data File Fields", "Delete Formats".

A client's values are written to manifests unchanged, and every engine uses them for pruning and deletes. Therefore a
file is accepted only if it is valid for the table. For example, a bound that cannot be decoded, or a deletion vector
without a data file, would give wrong answers to every reader. An error states the file and the field.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Annotated, Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types import values
from seamark.formats.iceberg.types.reading import Int32
from seamark.formats.iceberg.types.reserved import (
    DELETED_PATH,
    DELETED_POSITION,
    LAST_UPDATED_SEQUENCE_NUMBER,
    ROW_ID,
)
from seamark.formats.iceberg.types.schema import StructType, Type, describe_type, is_primitive
from seamark.formats.iceberg.types.transforms import VOID, canonicalize_transform, compute_values_type, is_known
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import Value
from seamark.formats.runtime.decoding import convert_values
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.repetitions import find_repeated

DATA, POSITION_DELETES, EQUALITY_DELETES = 0, 1, 2
UNKNOWN = "unknown"

_CONTENTS = {"data": DATA, "position-deletes": POSITION_DELETES, "equality-deletes": EQUALITY_DELETES}
_FORMATS = frozenset({"PARQUET", "AVRO", "ORC", "PUFFIN"})
_DELETES_MIN_FORMAT_VERSION = 2
_VECTORS_MIN_FORMAT_VERSION = 3
_METADATA_COLUMNS = {
    DELETED_PATH: "string",
    DELETED_POSITION: "long",
    ROW_ID: "long",
    LAST_UPDATED_SEQUENCE_NUMBER: "long",
}
"""The types of the reserved columns that a file can contain, by field id (spec: "Reserved Field IDs")."""
_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS = ("lower_bounds", "upper_bounds")
_BY_COLUMN = (*_COUNTS, *_BOUNDS)
_DATE_BYTES = 4
"""The size in bytes of the bound of a date. The bound of a timestamp is larger."""
_OPAQUE_TYPES = frozenset({"variant", "geometry", "geography"})
"""The types whose bounds are not single values."""


_SHOWN_VALUE_CHARACTERS_MAX = 100
_SHOWN_CHARACTERS_MAX = 1_000
"""The maximum number of characters of an error that repeats the client's input."""


class ContentFile(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A data or delete file, with the values of its manifest entry.

    Column statistics are dictionaries by column id.
    """

    content: int
    """The content type: 0 for data, 1 for position deletes or a deletion vector, 2 for equality deletes."""
    file_path: str
    file_format: str
    """The format in upper case: PARQUET, AVRO, ORC or PUFFIN."""
    spec_id: int
    partition: tuple[Value | None, ...]
    """The partition values, in the order of the spec's fields. Their types are those of `list_partition_types`.

    Dates and times are integers (days, microseconds or nanoseconds), decimals are unscaled integers, and UUIDs are
    bytes.
    """
    record_count: int
    file_size_in_bytes: int
    column_sizes: dict[int, int] | None = None
    value_counts: dict[int, int] | None = None
    null_value_counts: dict[int, int] | None = None
    nan_value_counts: dict[int, int] | None = None
    lower_bounds: dict[int, bytes] | None = None
    """The lower bounds in single-value serialization (Iceberg spec, appendix D). The upper bounds have the same form.
    """
    upper_bounds: dict[int, bytes] | None = None
    key_metadata: bytes | None = None
    split_offsets: tuple[int, ...] | None = None
    equality_ids: tuple[int, ...] | None = None
    sort_order_id: int | None = None
    first_row_id: int | None = None
    referenced_data_file: str | None = None
    content_offset: int | None = None
    content_size_in_bytes: int | None = None

    @property
    def is_deletion_vector(self) -> bool:
        return self.file_format == "PUFFIN"


def list_partition_types(metadata: TableMetadata, spec: PartitionSpec) -> tuple[str, ...]:
    """Return the types of a spec's partition values (spec: "Partition Transforms", result type).

    A type is derived from the source column in the current schema. For a dropped column, its last type is used, so that
    old values stay distinct. If no schema has the column, the type is `unknown`, whose only value is null.

    The type of a field with several source columns is `string`.
    """
    return tuple(_find_partition_type(metadata, field) for field in spec.fields)


def _find_partition_type(metadata: TableMetadata, field: PartitionField) -> str:
    if len(field.sources) != 1:
        return "string"
    source = find_column_type(metadata, field.sources[0])
    return UNKNOWN if source is None else compute_values_type(field.transform, source)


def compute_decimal_size(kind: str) -> int:
    """Return the number of bytes of a decimal type in Avro (spec: appendix A).

    This size is sufficient for every unscaled value of the type. The transform `truncate` rounds down, so a truncated
    value can be less than the lowest value of the type. Such a value usually fits into the size, too.
    """
    greatest: int = 10 ** values.get_decimal_precision(kind) - 1
    return greatest.bit_length() // 8 + 1  # One more bit is the sign.


def find_column_type(metadata: TableMetadata, column_id: int) -> str | None:
    """Return the result of `find_declared_type` if it is a primitive type or variant, and otherwise None."""
    type_ = find_declared_type(metadata, column_id)
    return type_ if isinstance(type_, str) else None


def find_declared_type(metadata: TableMetadata, column_id: int) -> Type | None:
    """Return the type of a column by its id, or None for an unknown id.

    It is the type in the current schema, or otherwise in the last schema that has the column. If no schema has the
    column, it is the type of the reserved column with this id.
    """
    for schema in (metadata.current_schema, *reversed(metadata.schemas)):
        column = schema.column(column_id)
        if column is not None:
            return column.type
    return _METADATA_COLUMNS.get(column_id)


class DeclaredTypes:
    """The types of a table's columns by id, as a cache of `find_declared_type`.

    A manifest may state bounds of a million columns that no schema has. With the cache, each of them is one lookup.
    """

    def __init__(self, metadata: TableMetadata) -> None:
        self._metadata = metadata

    def __call__(self, column_id: int) -> Type | None:
        column = self._metadata.current_schema.column(column_id)
        return column.type if column is not None else self._types_in_any_schema.get(column_id)

    @cached_property
    def _types_in_any_schema(self) -> dict[int, Type]:
        types: dict[int, Type] = dict(_METADATA_COLUMNS)
        for schema in self._metadata.schemas:
            types |= {column_id: column.type for column_id, column in schema.index.by_id.items()}
        return types


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Counts(msgspec.Struct, frozen=True):
    keys: tuple[Int32, ...]
    values: tuple[Count, ...]


class _Bounds(msgspec.Struct, frozen=True):
    keys: tuple[Int32, ...]
    values: tuple[str, ...]


class _FileJson(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The JSON object of a content file. Unknown fields are ignored."""

    content: str
    file_path: Annotated[str, msgspec.Meta(min_length=1)]
    file_format: str
    spec_id: Int32
    partition: tuple[Any, ...] = ()
    record_count: Count
    file_size_in_bytes: Count
    column_sizes: _Counts | None = None
    value_counts: _Counts | None = None
    null_value_counts: _Counts | None = None
    nan_value_counts: _Counts | None = None
    lower_bounds: _Bounds | None = None
    upper_bounds: _Bounds | None = None
    key_metadata: str | None = None
    split_offsets: tuple[Count, ...] | None = None
    equality_ids: tuple[Int32, ...] | None = None
    sort_order_id: Int32 | None = None
    first_row_id: Count | None = None
    referenced_data_file: str | None = None
    content_offset: Count | None = None
    content_size_in_bytes: Count | None = None


def decode_content_file(json: object, metadata: TableMetadata) -> ContentFile:
    """Parse the REST spec's JSON of a file that is added to the table.

    Bounds are hex strings, as in Java's library and in Seamark's plans. Partition values are single values (appendix
    D).

    Raises:
        BadRequest: The file is invalid for the table. The message states the file and the field.
    """
    file_path = json.get("file-path") if isinstance(json, dict) else None
    with _add_path_to_errors(file_path if isinstance(file_path, str) and file_path else "without a file-path"):
        try:
            file_json = convert_values(json, _FileJson)
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None
        _check_text("file-path", file_json.file_path)
        file = _decode_file(file_json, metadata)
        _check_kind(file, metadata)
        _check_statistics(file, metadata)
        return file


@contextmanager
def _add_path_to_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.ValidationError, ValueError, BadRequest) as error:
        # The answer must be UTF-8 for every path.
        shown_path = path[:_SHOWN_CHARACTERS_MAX].encode(errors="backslashreplace").decode()
        raise BadRequest(f"Invalid content file {shown_path}: {str(error)[:_SHOWN_CHARACTERS_MAX]}") from None


def _decode_file(file_json: _FileJson, metadata: TableMetadata) -> ContentFile:
    """Convert the parsed JSON of a file to a ContentFile.

    Empty lists become None, which means the same. The sort order of position deletes is dropped, because the spec fixes
    their order.

    Raises:
        ValueError: A field is invalid. The message begins with the name of the field.
    """
    content = _CONTENTS.get(file_json.content.lower().replace("_", "-"))
    if content is None:
        raise ValueError(f"content: {file_json.content!r} is not one of {', '.join(_CONTENTS)}")
    file_format = file_json.file_format.upper()
    if file_format not in _FORMATS:
        raise ValueError(f"file-format: {file_json.file_format!r} is not one of {', '.join(sorted(_FORMATS)).lower()}")
    return ContentFile(
        content=content,
        file_path=file_json.file_path,
        file_format=file_format,
        spec_id=file_json.spec_id,
        partition=_parse_partition(file_json, metadata),
        record_count=file_json.record_count,
        file_size_in_bytes=file_json.file_size_in_bytes,
        column_sizes=_decode_counts("column-sizes", file_json.column_sizes),
        value_counts=_decode_counts("value-counts", file_json.value_counts),
        null_value_counts=_decode_counts("null-value-counts", file_json.null_value_counts),
        nan_value_counts=_decode_counts("nan-value-counts", file_json.nan_value_counts),
        lower_bounds=_parse_bounds("lower-bounds", file_json.lower_bounds),
        upper_bounds=_parse_bounds("upper-bounds", file_json.upper_bounds),
        key_metadata=None if file_json.key_metadata is None else _decode_hex("key-metadata", file_json.key_metadata),
        split_offsets=file_json.split_offsets or None,
        equality_ids=file_json.equality_ids or None,
        sort_order_id=file_json.sort_order_id if content != POSITION_DELETES else None,
        first_row_id=file_json.first_row_id,
        referenced_data_file=file_json.referenced_data_file,
        content_offset=file_json.content_offset,
        content_size_in_bytes=file_json.content_size_in_bytes,
    )


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: the text has a lone surrogate, which UTF-8 cannot encode") from None


def _decode_hex(name: str, text: str) -> bytes:
    try:
        return binascii.unhexlify(text)
    except ValueError:
        raise ValueError(f"{name}: {text[:_SHOWN_VALUE_CHARACTERS_MAX]!r} is not hexadecimal") from None


def _parse_partition(file_json: _FileJson, metadata: TableMetadata) -> tuple[Value | None, ...]:
    spec = metadata.spec(file_json.spec_id)
    if spec is None:
        spec_ids = ", ".join(str(spec.spec_id) for spec in metadata.partition_specs)
        raise ValueError(f"spec-id: the table has no partition spec {file_json.spec_id}; its specs are {spec_ids}")
    if len(file_json.partition) != len(spec.fields):
        raise ValueError(
            f"partition: the file has {len(file_json.partition)} values, "
            f"but spec {spec.spec_id} has {len(spec.fields)} fields"
        )
    types = list_partition_types(metadata, spec)
    return tuple(map(_parse_partition_value, spec.fields, types, file_json.partition))


def _parse_partition_value(field: PartitionField, kind: str, json: object) -> Value | None:
    transform = canonicalize_transform(field.transform)
    if not is_known(transform) or len(field.sources) != 1:
        raise ValueError(f"spec-id: the unknown transform {field.transform} of field {field.name} cannot be written")
    if json is None:
        return None
    if transform == VOID or kind == UNKNOWN:
        raise ValueError(f"partition: field {field.name} can only be null, but is {json!r}")
    try:
        value = values.decode_json(kind, json)
        assert value is not None
        data = values.encode_single_value(kind, value)
        if get_base_name(kind) == "decimal" and len(data) > compute_decimal_size(kind):
            raise ValueError(f"the unscaled value {value!r} has more digits than {kind}")
    except ValueError as error:
        raise ValueError(f"partition: field {field.name}: {error}") from None
    return value


def _decode_counts(name: str, counts: _Counts | None) -> dict[int, int] | None:
    return None if counts is None else dict(_pair_columns(name, counts.keys, counts.values)) or None


def _parse_bounds(name: str, bounds: _Bounds | None) -> dict[int, bytes] | None:
    if bounds is None:
        return None
    pairs = _pair_columns(name, bounds.keys, bounds.values)
    return {column: _decode_hex(f"{name} of column {column}", text) for column, text in pairs} or None


def _pair_columns(name: str, keys: Sequence[int], values: Sequence[Any]) -> Iterable[tuple[int, Any]]:
    """Yield each column id with its value.

    Args:
        name: The name of the field, for errors.
        keys: The column ids.
        values: The values, in the order of the column ids.

    Raises:
        ValueError: The ids are not distinct, or their number differs from the number of values.
    """
    if len(keys) != len(values):
        raise ValueError(f"{name}: the file has {len(keys)} keys, but {len(values)} values")
    if len(set(keys)) != len(keys):
        raise ValueError(f"{name}: a column is present twice")
    return zip(keys, values, strict=True)


def _check_kind(file: ContentFile, metadata: TableMetadata) -> None:
    """Check the fields that each kind of file requires or forbids.

    The kinds are data files, equality deletes, position deletes and deletion vectors (spec: "Data File Fields", "Delete
    Formats", "Deletion Vectors").

    Raises:
        ValueError: A required field is missing, or a forbidden field is present. The message begins with its name.
    """
    version = metadata.format_version
    if file.content != DATA and version < _DELETES_MIN_FORMAT_VERSION:
        raise ValueError(f"content: a table of format version {version} has no delete files")
    if file.content != EQUALITY_DELETES and file.equality_ids is not None:
        raise ValueError("equality-ids: only equality deletes have them")
    if file.content != DATA and file.first_row_id is not None:
        raise ValueError("first-row-id: only data files have one")
    if file.is_deletion_vector and file.content != POSITION_DELETES:
        raise ValueError("file-format: a puffin file can only be a deletion vector, whose content is position-deletes")
    if not file.is_deletion_vector:
        for name in ("content_offset", "content_size_in_bytes"):
            if getattr(file, name) is not None:
                raise ValueError(f"{name.replace('_', '-')}: only deletion vectors (puffin) have one")
    if file.content == DATA and file.referenced_data_file is not None:
        raise ValueError("referenced-data-file: only position deletes have one")
    if file.content == EQUALITY_DELETES:
        _check_equality_ids(file, metadata)
    elif file.is_deletion_vector:
        _check_vector(file, version)
    elif file.content == POSITION_DELETES and version >= _VECTORS_MIN_FORMAT_VERSION:
        raise ValueError(
            f"file-format: a table of format version {version} accepts no new position delete files, "
            "only deletion vectors (puffin)"
        )


def _check_equality_ids(file: ContentFile, metadata: TableMetadata) -> None:
    if file.equality_ids is None:
        raise ValueError("equality-ids: equality deletes need them")
    if (repeated_id := find_repeated(file.equality_ids)) is not None:
        raise ValueError(f"equality-ids: column {repeated_id} is present twice")
    for column_id in file.equality_ids:
        column = metadata.current_schema.column(column_id)
        if column is None:
            raise ValueError(f"equality-ids: the table's schema has no column {column_id}")
        if not is_primitive(column.type):
            raise ValueError(f"equality-ids: column {column_id} ({column.name}) is not of a primitive type")
        if not all(isinstance(parent.type, StructType) for parent in metadata.current_schema.list_ancestors(column)):
            raise ValueError(
                f"equality-ids: column {column_id} ({column.name}) is inside a list or map: a row has many values"
            )


def _check_vector(file: ContentFile, version: int) -> None:
    if version < _VECTORS_MIN_FORMAT_VERSION:
        raise ValueError(f"file-format: a table of format version {version} has no deletion vectors (puffin)")
    for name in ("referenced_data_file", "content_offset", "content_size_in_bytes"):
        if getattr(file, name) in (None, ""):
            raise ValueError(f"{name.replace('_', '-')}: a deletion vector requires it")
    if (file.content_offset or 0) + (file.content_size_in_bytes or 0) > file.file_size_in_bytes:
        raise ValueError("content-size-in-bytes: the deletion vector ends beyond the end of its file")


def _check_statistics(file: ContentFile, metadata: TableMetadata) -> None:
    """Check the split offsets, and the counts and bounds of columns.

    A column must be in a schema of the table. It is first searched in the current schema, which is faster.

    Raises:
        ValueError: An offset, a column, a count or a bound is invalid. The message begins with the name of the field.
    """
    if file.referenced_data_file is not None:
        _check_text("referenced-data-file", file.referenced_data_file)
    offsets = file.split_offsets or ()
    if list(offsets) != sorted(set(offsets)):
        raise ValueError("split-offsets: the offsets are not in ascending order")
    if offsets and offsets[-1] >= max(1, file.file_size_in_bytes):
        raise ValueError(
            f"split-offsets: the offset {offsets[-1]:,} is not within the file of {file.file_size_in_bytes:,} bytes"
        )
    kinds: dict[int, Type] = {}
    current = metadata.current_schema.index.by_id
    for name in _BY_COLUMN:
        for column in getattr(file, name) or ():
            if column not in kinds:
                current_type = current.get(column)
                kind = find_declared_type(metadata, column) if current_type is None else current_type.type
                if kind is None:
                    raise ValueError(f"{name.replace('_', '-')}: no schema of the table has a column {column}")
                kinds[column] = kind
    _check_counts(file)
    _check_bounds(file, kinds)


def _check_counts(file: ContentFile) -> None:
    value_counts = file.value_counts or {}
    for name, counts in (("null-value-counts", file.null_value_counts), ("nan-value-counts", file.nan_value_counts)):
        for column, count in (counts or {}).items():
            if count > value_counts.get(column, count):
                raise ValueError(f"{name}: column {column} has {count}, but only {value_counts[column]} values")


def _check_bounds(file: ContentFile, kinds: Mapping[int, Type]) -> None:
    lower_bounds = _decode_bounds("lower-bounds", file.lower_bounds, kinds)
    upper_bounds = _decode_bounds("upper-bounds", file.upper_bounds, kinds)
    for column, (kind, lower_bound) in lower_bounds.items():
        # Java's writers order UUIDs as two signed halves, so their lower bound can have the greater bytes.
        if column in upper_bounds and kind != "uuid" and lower_bound > upper_bounds[column][1]:
            raise ValueError(f"lower-bounds: the bound of column {column} is above its upper bound")


def _decode_bounds(name: str, bounds: dict[int, bytes] | None, kinds: Mapping[int, Type]) -> dict[int, tuple[str, Any]]:
    """Return the type and the value of each comparable bound, by column id.

    Args:
        name: The name of the field, for errors.
        bounds: The encoded bounds by column id, or None if there are none.
        kinds: The types of the columns by id. Bounds of opaque types, whose order is not defined, are left out.

    Raises:
        ValueError: A column is nested, or the bytes of a bound are not a value of its type.
    """
    typed_bounds = {}
    for column, data in (bounds or {}).items():
        kind = kinds[column]
        if not isinstance(kind, str):
            raise ValueError(f"{name}: column {column} is a {describe_type(kind)}, which has no bounds")
        if get_base_name(kind) in _OPAQUE_TYPES:
            continue
        try:
            if len(data) == _DATE_BYTES and kind in ("timestamp", "timestamp_ns"):
                # The file is older than the promotion of its column from date. A date can be outside the range of the
                # new type.
                value = values.promote_value("date", kind, values.decode_bound("date", data))
            else:
                value = values.decode_bound(kind, data)
        except ValueError as error:
            raise ValueError(f"{name}: column {column}: {error}") from None
        typed_bounds[column] = kind, value
    return typed_bounds
