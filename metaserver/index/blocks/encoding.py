"""Encoder of a decoded manifest as a block. `block.py` describes the layout."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from seamark.formats.iceberg.manifests.manifest import DecodedManifest, PartitionFieldValues
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.reserved import DELETED_PATH, DELETED_POSITION
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.transforms import compute_result_type
from seamark.formats.iceberg.types.types import canonicalize_primitive, get_base_name
from seamark.formats.index.kernels._bounds import ORDERS, unusable_bounds
from seamark.formats.index.kernels._pack import SOURCES, Packer
from seamark.formats.index.packing import (
    ALIGNMENT_BYTES,
    MISSING,
    Form,
    Longs,
    Packed,
    PackedColumn,
    get_form,
    get_packer_type_code,
)
from seamark.formats.runtime.decoding import convert_json, convert_values
from seamark.formats.runtime.errors import BadRequest, Corrupt
from seamark.metaserver.index.blocks.block import COUNTS, HEAD, MAGIC

_DELETE_COLUMNS = {DELETED_PATH: "string", DELETED_POSITION: "long"}
"""The types of the columns of position delete files, which schemas do not contain (Iceberg, "Reserved Field IDs")."""

_Bounds: TypeAlias = tuple[npt.NDArray[np.int32], Longs, npt.NDArray[np.int32]]
_NO_ROWS = np.zeros(0, dtype=np.int32)
_NO_BOUNDS: _Bounds = (_NO_ROWS, np.zeros(0, dtype=np.int64), _NO_ROWS)
_ORDERS_BY_TYPE = {"string": "texts", "binary": "bytes", "fixed": "bytes", "float": "reals", "double": "reals"}
_ORDERS_BY_TYPE |= {"decimal": "numerals", "uuid": "unordered"}
"""The order of the bounds of a type. All other types have the order of integers."""


def encode_block(manifest: DecodedManifest) -> list[bytes | memoryview]:
    """Return the block's memory, as pieces to concatenate.

    Raises:
        Corrupt: The manifest's header is invalid.
    """
    schema, spec = _get_schema(manifest), _get_spec(manifest)
    # Each method of the packer adds a job, which packs one column, and returns the number of the job. `pack` runs all
    # jobs. With `absent_low`, absent values get the lowest code of the column.
    packer = Packer(manifest.heap, manifest.rows)
    longs = {name: packer.longs(values, absent_low=True) for name, values in manifest.longs.items()}
    texts = {
        # The texts are spans of bytes in `manifest.heap`.
        name: packer.bounds(SOURCES["spans"], spans.starts, spans.lengths, absent_low=True)
        for name, spans in manifest.texts.items()
    }
    lists = {name: _add_list(packer, *columns) for name, columns in manifest.lists.items()}
    partition = [_add_partition(packer, values, schema, spec) for values in manifest.partition]
    columns, has_unusable_bounds = _add_columns(packer, manifest, schema, longs["record_count"])
    arrays = packer.pack()
    # The tuples have the values in the order of the fields of `_Directory` and of its parts.
    directory = (
        manifest.location,
        manifest.rows,
        1 if manifest.metadata.get("content") == "deletes" else 0,
        spec.spec_id,
        _collect_present(packer, longs),
        _collect_present(packer, texts),
        {
            name: (packer.packed(counts), packer.packed(values), len(manifest.lists[name][1]))
            for name, (counts, values) in lists.items()
        },
        tuple((field_id, kind, packer.packed(number)) for field_id, kind, number in partition),
        tuple((column_id, kind, *packer.entry(number)) for column_id, kind, number in columns),
        _may_have_dots(packer.packed(texts["file_path"]), arrays, manifest.rows),
        has_unusable_bounds,
    )
    encoded_directory = msgspec.msgpack.encode(directory)
    # The head has the length and the checksum of the directory. It is padded so that the arrays are aligned.
    head = HEAD.pack(MAGIC, len(encoded_directory), isal_zlib.crc32(encoded_directory)) + encoded_directory
    return [head + b"\0" * (-len(head) % ALIGNMENT_BYTES), memoryview(arrays)]


def _may_have_dots(packed_fields: tuple[Any, ...] | None, arrays: Any, rows: int) -> bool:
    """Return whether a text of a packed column may contain two consecutive dots.

    Args:
        packed_fields: The fields of `Packed`, which say where the arrays of the column are. None if no row has a value.
        arrays: The arrays of the block.
        rows: The number of rows.
    """
    if packed_fields is None:
        return False
    return PackedColumn(np.frombuffer(arrays, dtype=np.uint8), Packed(*packed_fields), rows).may_have_dots()


def _collect_present(packer: Packer, numbers: dict[str, int]) -> dict[str, object]:
    """Return the packed columns that have values, by name.

    Args:
        packer: The packer, which has run its jobs.
        numbers: The number of the packer's job for each name. A job packs one column.
    """
    columns = {name: packer.packed(number) for name, number in numbers.items()}
    return {name: packed_column for name, packed_column in columns.items() if packed_column is not None}


def _add_list(packer: Packer, counts: npt.NDArray[np.int32], values: Longs) -> tuple[int, int]:
    """Add the lists of all rows to the packer. It packs the lengths and the values as two columns.

    Args:
        packer: The packer.
        counts: The length of each row's list, or a negative number for a row without a list.
        values: The values of all lists, one list after the other.

    Returns:
        The numbers by which the packer later returns the packed lengths and the packed values.
    """
    # With `absent_low`, a missing list gets the lowest code of the column.
    long_counts = np.where(counts < 0, MISSING, counts.astype(np.int64))
    return packer.longs(long_counts, absent_low=True), packer.longs(values, absent_low=True)


def _get_schema(manifest: DecodedManifest) -> Schema:
    """Return the schema in the header of a manifest. Raise Corrupt if there is no valid schema."""
    try:
        return _parse_schema(manifest.metadata["schema"])
    except (KeyError, ValueError, BadRequest, msgspec.DecodeError) as error:
        raise Corrupt(f"The schema in the header of manifest {manifest.location} cannot be read: {error}") from None


@lru_cache(maxsize=16)
def _parse_schema(text: str) -> Schema:
    """Parse a schema. The result is cached, because the manifests of a snapshot have few different schemas."""
    schema = convert_json(_normalize_schema(text), Schema)
    _ = schema.index  # Build the index before the schema is shared.
    return schema


def _normalize_schema(text: str) -> bytes:
    """Return the JSON of a schema with the field `type`, which old writers omitted."""
    value = json.loads(text)
    if isinstance(value, dict):
        value.setdefault("type", "struct")
    return msgspec.json.encode(value)


def _get_spec(manifest: DecodedManifest) -> PartitionSpec:
    """Return the partition spec in the header of a manifest.

    Raises:
        Corrupt: The header contains no valid spec.
    """
    try:
        fields = convert_json(manifest.metadata["partition-spec"], Any)
        if isinstance(fields, dict):
            fields = fields["fields"]
        spec_id = int(manifest.metadata.get("partition-spec-id", "0"))
        return convert_values({"spec-id": spec_id, "fields": fields}, PartitionSpec)
    except (KeyError, ValueError, TypeError, msgspec.ValidationError) as error:
        raise Corrupt(
            f"The partition spec in the header of manifest {manifest.location} cannot be read: {error}"
        ) from None


def _add_partition(
    packer: Packer, values: PartitionFieldValues, schema: Schema, spec: PartitionSpec
) -> tuple[int, str, int]:
    """Add the values of a partition field to the packer.

    Return the id of the field, its type, and the number by which the packer later returns the packed values.

    The type follows from the transform and its source column. If the source is unknown, or if the stored values do not
    fit this type, it follows from the Avro type of the values.
    """
    field = next((field for field in spec.fields if field.field_id == values.field_id), None)
    kind = None
    if field is not None and len(field.sources) == 1:
        source = schema.column(field.sources[0])
        primitive = None if source is None else _canonicalize_primitive(source.type)
        if primitive is not None:
            kind = compute_result_type(field.transform, primitive)
    if kind is None or not _can_stored_type_represent(values, kind):
        kind = _convert_avro_kind(values)
    return values.field_id, kind, _add_values(packer, values, kind)


def _can_stored_type_represent(values: PartitionFieldValues, kind: str) -> bool:
    """Return whether the stored Avro values can be values of the Iceberg type `kind`.

    Decimals are stored as bytes, so they are in `values.spans`, as strings are.
    """
    form = get_form(kind)
    if values.doubles is not None:
        return form is Form.FLOATS
    if values.spans is not None:
        return form is Form.STRINGS or kind.startswith("decimal")
    if form is not Form.INTEGERS or kind.startswith("decimal"):
        return False
    # An Avro int is no timestamp. If a date was promoted to a timestamp, the partition values of older files are days.
    return values.type != "int" or kind in ("int", "long", "date")


def _convert_avro_kind(values: PartitionFieldValues) -> str:
    """Return the Iceberg type of an Avro type (spec, appendix A), for fields whose source is in no schema."""
    if values.type == "int" and values.logical == "date":
        return "date"
    return {"boolean": "boolean", "int": "int", "long": "long", "float": "float", "double": "double"}.get(
        values.type, "string" if values.type == "string" else "binary"
    )


def _add_values(packer: Packer, values: PartitionFieldValues, kind: str) -> int:
    """Add the values of a partition field to the packer. Return the number under which they are packed.

    The caller uses this number to get the packed values from the packer.

    With `absent_low`, an absent value gets the lowest code of the column.
    """
    if values.longs is not None:
        return packer.longs(values.longs, values.valid, absent_low=True)
    if values.doubles is not None:
        return packer.doubles(values.doubles, values.valid, absent_low=True)
    assert values.spans is not None
    return packer.bounds(get_packer_type_code(kind), values.spans.starts, values.spans.lengths, absent_low=True)


def _add_columns(
    packer: Packer, manifest: DecodedManifest, schema: Schema, record_count: int
) -> tuple[list[tuple[int, str, int]], bool]:
    """Add the columns with statistics.

    Returns:
        Two values: the id and the type of each column, with the number by which the packer later returns the packed
        column; and whether unusable bounds were omitted.
    """
    counts = [manifest.counts.get(name, {}) for name in COUNTS]
    lower, upper = manifest.bounds.get("lower_bounds", {}), manifest.bounds.get("upper_bounds", {})
    columns, has_unusable_bounds = [], False
    for column_id in sorted(set().union(*counts, lower, upper)):
        kind = _get_column_kind(schema, column_id)
        if kind is not None:
            values, nulls, nans, sizes = (counts_by_id.get(column_id) for counts_by_id in counts)
            column_counts = (values, nulls, nans, sizes)
            low_bounds, high_bounds = lower.get(column_id), upper.get(column_id)
            usable_bounds = _drop_unusable_bounds(manifest, kind, low_bounds, high_bounds)
            has_unusable_bounds |= usable_bounds is not None
            low_bounds, high_bounds = usable_bounds or (low_bounds, high_bounds)
            number = packer.column(get_packer_type_code(kind), column_counts, low_bounds, high_bounds, record_count)
            columns.append((column_id, kind, number))
    return columns, has_unusable_bounds


def _drop_unusable_bounds(
    manifest: DecodedManifest, kind: str, lower: _Bounds | None, upper: _Bounds | None
) -> tuple[_Bounds | None, _Bounds | None] | None:
    """Return the bounds of a column without unusable bounds, or None if all bounds are usable.

    Unusable bounds are strings that are not UTF-8, and lower bounds above upper bounds. Some engines wrote such
    bounds (`iceberg/manifests/repaired_metrics.py`).
    """
    order = ORDERS[_ORDERS_BY_TYPE.get(get_base_name(kind), "integers")]
    # The marks are 1 for unusable bounds. The bounds of a side are three arrays: rows, starts and lengths in the heap.
    marks_of_sides = unusable_bounds(manifest.heap, order, *(lower or _NO_BOUNDS), *(upper or _NO_BOUNDS))
    if marks_of_sides is None:
        return None
    sides = zip((lower, upper), marks_of_sides, strict=True)
    usable_lower, usable_upper = (
        None if side is None else tuple(part[marks == 0] for part in side) for side, marks in sides
    )
    return usable_lower, usable_upper


def _get_column_kind(schema: Schema, column_id: int) -> str | None:
    """Return the column's type, or None if the statistics of the column cannot be read.

    The reserved columns of delete files have a fixed type. The statistics of other columns that the schema lacks cannot
    be read, because their type is not known.
    """
    column = schema.column(column_id)
    if column is None:
        return _DELETE_COLUMNS.get(column_id)
    return _canonicalize_primitive(column.type)


def _canonicalize_primitive(type_name: object) -> str | None:
    """Return the canonical name of a primitive type, or None for any other type."""
    if not isinstance(type_name, str):
        return None
    try:
        return canonicalize_primitive(type_name)
    except BadRequest:
        return None  # The type belongs to a later format version, so its order is unknown.
