"""Hand-made manifests: a separate Avro encoder, schemas of every form, and the values that fastavro reads from them.

The encoder shares no code with the decoder under test. It also writes forms that common writers never write: arrays and
maps in several blocks, with negative counts, and unions in any order.
"""

from __future__ import annotations

import datetime
import decimal
import io
import itertools
import json
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import fastavro
import pyarrow as pa

from seamark.formats.iceberg.manifests._manifest import MISSING
from seamark.formats.iceberg.manifests.manifest import DecodedManifest, PartitionFieldValues, Spans

SYNC = bytes(range(16))

Split = Callable[[int], list[int]]
"""Maps a list's length to the sizes of its blocks; a block with a negative size is written with its size in bytes."""


def encode_varint(value: int) -> bytes:
    """Return a long in Avro's encoding: the zigzag value in groups of seven bits, the lowest group first."""
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def add_length(data: bytes) -> bytes:
    return encode_varint(len(data)) + data


def put_in_one_block(length: int) -> list[int]:
    return [length] if length else []


def encode(schema: Any, value: Any, split: Split = put_in_one_block) -> bytes:
    """Return `value` in Avro's binary encoding.

    Unions use the first branch that fits. A tuple (branch, value) chooses a branch.
    """
    kind = schema if isinstance(schema, str) else "union" if isinstance(schema, list) else schema["type"]
    match kind:
        case "union":
            branch, inner = value if isinstance(value, tuple) else (_choose_branch(schema, value), value)
            return encode_varint(branch) + encode(schema[branch], inner, split)
        case "null":
            return b""
        case "boolean":
            return bytes([value])
        case "int" | "long":
            return encode_varint(value)
        case "enum":
            return encode_varint(schema["symbols"].index(value))
        case "float":
            return struct.pack("<f", value)
        case "double":
            return struct.pack("<d", value)
        case "bytes":
            return add_length(value)
        case "string":
            return add_length(value.encode())
        case "fixed":
            return bytes(value)
        case "record":
            return b"".join(encode(field["type"], value[field["name"]], split) for field in schema["fields"])
        case "array":
            return _encode_blocks([encode(schema["items"], item, split) for item in value], split)
        case "map":
            return _encode_blocks(
                [add_length(k.encode()) + encode(schema["values"], v, split) for k, v in value.items()], split
            )
        case _:
            return encode(kind, value, split)


def _choose_branch(schema: list[Any], value: Any) -> int:
    return next(index for index, branch in enumerate(schema) if (branch == "null") == (value is None))


def _encode_blocks(items: list[bytes], split: Split) -> bytes:
    out, remaining_items = b"", iter(items)
    for size in split(len(items)):
        data = b"".join(itertools.islice(remaining_items, abs(size)))
        out += encode_varint(size) + (encode_varint(len(data)) if size < 0 else b"") + data
    return out + encode_varint(0)


def compress(codec: str, data: bytes) -> bytes:
    match codec:
        case "deflate":
            packer = zlib.compressobj(wbits=-15)  # A negative window size writes no zlib header.
            return packer.compress(data) + packer.flush()
        case "snappy":
            return pa.Codec("snappy").compress(data, asbytes=True) + zlib.crc32(data).to_bytes(4, "big")
        case "zstandard":
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, "zstd") as stream:  # As in Java, the uncompressed size is not stored.
                stream.write(data)
            return sink.getvalue().to_pybytes()
        case _:
            return data


def build_container(
    schema: Any,
    blocks: list[list[bytes]],
    *,
    codec: str = "null",
    metadata: dict[str, str] | None = None,
    sync: bytes = SYNC,
) -> bytes:
    """Return an Avro object container file of rows that are already encoded."""
    entries = {"avro.schema": json.dumps(schema), "avro.codec": codec, **(metadata or {})}
    out = b"Obj\x01" + encode_varint(len(entries))
    out += (
        b"".join(add_length(key.encode()) + add_length(value.encode()) for key, value in entries.items())
        + encode_varint(0)
        + sync
    )
    for rows in blocks:
        out += encode_varint(len(rows)) + add_length(compress(codec, b"".join(rows))) + sync
    return out


# The parts of a manifest entry, with their ids in the specification
ENTRY = {"status": 0, "snapshot_id": 1, "sequence_number": 3, "file_sequence_number": 4, "data_file": 2}
MAPS = {
    "column_sizes": (108, 117, 118, "long"),
    "value_counts": (109, 119, 120, "long"),
    "null_value_counts": (110, 121, 122, "long"),
    "nan_value_counts": (137, 138, 139, "long"),
    "lower_bounds": (125, 126, 127, "bytes"),
    "upper_bounds": (128, 129, 130, "bytes"),
}
"""(field id, key id, value id, type of the values) of each map"""
LISTS = {"split_offsets": (132, "long", 133), "equality_ids": (135, "int", 136)}
"""(field id, type of the elements, element id) of each list"""
OPTIONAL = {
    "key_metadata": (131, "bytes"),
    "sort_order_id": (140, "int"),
    "first_row_id": (142, "long"),
    "referenced_data_file": (143, "string"),
    "content_offset": (144, "long"),
    "content_size_in_bytes": (145, "long"),
}
V3_ONLY = ("first_row_id", "referenced_data_file", "content_offset", "content_size_in_bytes")


def make_optional(schema: Any, *, null_last: bool = False) -> list[Any]:
    return [schema, "null"] if null_last else ["null", schema]


def build_map_schema(key_id: int, value_id: int, value: str, form: str = "plain") -> dict[str, Any]:
    """Return the schema of a map by column id.

    All known writers use the plain form, but readers must not depend on it.
    """
    key_field = {"name": "key", "type": "int", "field-id": key_id}
    value_field = {"name": "value", "type": value, "field-id": value_id}
    fields = {
        "plain": [key_field, value_field],
        "reversed": [value_field, key_field],
        "nullable": [key_field, value_field | {"type": ["null", value]}],
        "wider": [{"name": "more", "type": "string"}, key_field, value_field, {"name": "nothing", "type": "null"}],
        "long keys": [key_field | {"type": "long"}, value_field],
    }[form]
    item = {"type": "record", "name": f"k{key_id}_v{value_id}", "fields": fields}
    return {"type": "array", "logicalType": "map", "items": item}


def build_manifest_schema(
    version: int,
    partition: list[tuple[str, Any]],
    *,
    null_last: bool = False,
    ids: bool = True,
    prefix: str = "",
    map_form: str = "plain",
) -> dict[str, Any]:
    """Return a manifest entry's Avro schema.

    Args:
        version: The version of the table format.
        partition: The names and the Avro types of the partition fields.
        null_last: Whether null is the last branch of a union, not the first.
        ids: Whether the fields have Iceberg's field ids.
        prefix: The beginning of all field names. Readers must find fields by their ids and not by their names.
        map_form: A form of `build_map_schema`. Writers use "plain", but readers must accept all.
    """

    def build_field(name: str, field_id: int, schema: Any) -> dict[str, Any]:
        return {"name": prefix + name, "type": schema} | ({"field-id": field_id} if ids else {})

    def make_optional_here(schema: Any) -> list[Any]:
        return make_optional(schema, null_last=null_last)

    struct_fields = [build_field(name, 1000 + index, schema) for index, (name, schema) in enumerate(partition)]
    file = [] if version == 1 else [build_field("content", 134, "int")]
    file += [
        build_field("file_path", 100, "string"),
        build_field("file_format", 101, "string"),
        build_field("partition", 102, {"type": "record", "name": "r102", "fields": struct_fields}),
        build_field("record_count", 103, "long"),
        build_field("file_size_in_bytes", 104, "long"),
    ]
    if version == 1:
        file.append(build_field("block_size_in_bytes", 105, "long"))
    file += [
        build_field(name, map_id, make_optional_here(build_map_schema(key, value, kind, map_form)))
        for name, (map_id, key, value, kind) in MAPS.items()
    ]
    file += [
        build_field(name, list_id, make_optional_here({"type": "array", "items": kind, "element-id": element}))
        for name, (list_id, kind, element) in LISTS.items()
        if version > 1 or name != "equality_ids"
    ]
    file += [
        build_field(name, field_id, make_optional_here(kind))
        for name, (field_id, kind) in OPTIONAL.items()
        if version > 2 or name not in V3_ONLY
    ]
    entry_fields = [
        build_field("status", 0, "int"),
        build_field("snapshot_id", 1, "long" if version == 1 else make_optional_here("long")),
    ]
    if version > 1:
        entry_fields += [
            build_field("sequence_number", 3, make_optional_here("long")),
            build_field("file_sequence_number", 4, make_optional_here("long")),
        ]
    entry_fields.append(build_field("data_file", 2, {"type": "record", "name": "r2", "fields": file}))
    return {"type": "record", "name": "manifest_entry", "fields": entry_fields}


def read_by_fastavro(data: bytes, prefix: str = "") -> list[dict[str, Any]]:
    """Return the live entries as fastavro reads them, in the form of `to_plain_entries`."""
    reader = fastavro.reader(io.BytesIO(data))
    schema = json.loads(reader.metadata["avro.schema"])
    file_schema = next(field["type"] for field in schema["fields"] if field["name"] == f"{prefix}data_file")
    partition = next(field["type"] for field in file_schema["fields"] if field["name"] == f"{prefix}partition")
    return [
        _flatten_row(row, prefix, partition)
        for row in reader
        if row[f"{prefix}status"] != DELETED  # type: ignore[index, call-overload]
    ]


def _flatten_row(row: Any, prefix: str, partition: dict[str, Any]) -> dict[str, Any]:
    file = row[f"{prefix}data_file"]
    values: dict[str, Any] = {name: row.get(prefix + name) for name in ENTRY if name != "data_file"}
    for name in ("content", "file_path", "file_format", "record_count", "file_size_in_bytes", *OPTIONAL, *LISTS):
        values[name] = file.get(prefix + name)
    for name in MAPS:
        items = file.get(prefix + name) or []
        values[name] = {item["key"]: item["value"] for item in items if item["value"] is not None}
    values["partition"] = [
        (1000 + index, to_raw_value(file[f"{prefix}partition"][field["name"]]))
        for index, field in enumerate(partition["fields"])
    ]
    return values


EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MICROSECOND = datetime.timedelta(microseconds=1)


def to_raw_value(value: Any) -> Any:
    """Return the stored value of a logical type that fastavro has converted. Floats become their bits."""
    match value:
        case datetime.datetime():
            return (value.replace(tzinfo=datetime.UTC) - EPOCH) // MICROSECOND
        case datetime.date():
            return (value - EPOCH.date()).days
        case datetime.time():
            return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond
        case decimal.Decimal():
            return ("decimal", int(value.scaleb(DECIMAL_SCALE)))
        case uuid.UUID():
            return value.bytes
        case float():
            return struct.pack("<d", value)
        case str():
            return value.encode()
        case _:
            return value


DECIMAL_SCALE = 2
DELETED = 2
"""The status of a deleted entry."""


def to_plain_entries(manifest: DecodedManifest) -> list[dict[str, Any]]:
    """Return the entries of a decoded manifest, row by row, as plain values."""
    rows: list[dict[str, Any]] = [{name: {} for name in MAPS} for _ in range(manifest.rows)]
    for name, column in manifest.longs.items():
        for row, value in zip(rows, column.tolist(), strict=True):
            row[name] = None if value == MISSING else value
    for name, spans in manifest.texts.items():
        for row, text in zip(rows, list_texts(spans, manifest), strict=True):
            row[name] = text if name == "key_metadata" or text is None else text.decode()
    for name, (counts, values) in manifest.lists.items():
        value_iterator = iter(values.tolist())
        for row, count in zip(rows, counts.tolist(), strict=True):
            row[name] = None if count < 0 else list(itertools.islice(value_iterator, count))
        assert next(value_iterator, None) is None
    for name, values_by_column in manifest.counts.items():
        for column_id, (row_indexes, values) in values_by_column.items():
            assert row_indexes.size
            assert (row_indexes[1:] > row_indexes[:-1]).all()
            for row_index, value in zip(row_indexes.tolist(), values.tolist(), strict=True):
                rows[row_index][name][column_id] = value
    for name, bounds in manifest.bounds.items():
        for column_id, (row_indexes, starts, lengths) in bounds.items():
            assert row_indexes.size
            assert (row_indexes[1:] > row_indexes[:-1]).all()
            for row_index, value in zip(
                row_indexes.tolist(), list_texts(Spans(starts, lengths), manifest), strict=True
            ):
                rows[row_index][name][column_id] = value
    columns = [list(iterate_partition_values(field, manifest)) for field in manifest.partition]
    for row_index, row in enumerate(rows):
        row["partition"] = [
            (field.field_id, column[row_index]) for field, column in zip(manifest.partition, columns, strict=True)
        ]
    return rows


def list_texts(spans: Spans, manifest: DecodedManifest) -> list[bytes | None]:
    """Return the texts of the spans, which must lie within the heap, the bytes of all texts. A length of -1 is None."""
    texts: list[bytes | None] = []
    for start, length in zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True):
        assert length < 0 or 0 <= start <= len(manifest.heap) - length
        texts.append(None if length < 0 else manifest.heap[start : start + length].tobytes())
    return texts


def iterate_partition_values(field: PartitionFieldValues, manifest: DecodedManifest) -> Iterator[Any]:
    if field.spans is not None:
        for value in list_texts(field.spans, manifest):
            if value is not None and field.logical == "decimal":
                yield ("decimal", int.from_bytes(value, "big", signed=True))
            elif value is not None and field.logical == "uuid" and field.type == "string":
                yield uuid.UUID(value.decode()).bytes
            else:
                yield value
    elif field.doubles is not None:
        assert field.valid is not None
        for number, is_valid in zip(field.doubles.tolist(), field.valid.tolist(), strict=True):
            yield struct.pack("<d", number) if is_valid else None
    else:
        assert field.longs is not None
        for number in field.longs.tolist():
            yield None if number == MISSING else bool(number) if field.type == "boolean" else number
