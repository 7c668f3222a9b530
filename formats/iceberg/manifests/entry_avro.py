"""Avro encoding of manifests and manifest lists: schemas, rows and the container.

The schemas are those of Iceberg's Java library for each format version (spec: "Manifests", "Manifest Lists", appendix A
"Avro"). Readers use `field-id`, but some, such as PyIceberg, also require the order of branches, `element-id` and
names. One table of fields defines both the schema and the encoding of rows.

There are two reasons not to use fastavro. It takes a quarter of a millisecond for an entry of 16 columns, five times as
long as this module, and a change that removes one file rewrites thousands of entries. And it needs further packages for
the codecs of the container (Avro 1.12 specification, "Object Container Files").
"""

from __future__ import annotations

import hashlib
import importlib
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from struct import Struct
from typing import Any, NamedTuple

import msgspec
from isal import isal_zlib

from seamark.formats.iceberg.manifests.content_file import UNKNOWN, compute_decimal_size
from seamark.formats.iceberg.metadata import properties as props
from seamark.formats.iceberg.metadata.partition import PartitionField
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import (
    INT_MAX,
    INT_MIN,
    get_decimal_precision,
    get_decimal_scale,
    get_fixed_length,
)
from seamark.formats.runtime.errors import BadRequest

AVRO_COMPRESSION = "write.avro.compression-codec"
AVRO_COMPRESSION_LEVEL = "write.avro.compression-level"
ROWS_PER_BLOCK = 200
"""The number of rows in a block, which has about 100 kB before compression."""

Json = dict[str, Any]

_NOT_IN_AVRO_NAMES = re.compile(r"[^A-Za-z0-9_]")


def convert_to_avro_name(name: str) -> str:
    """Convert a name to Avro's alphabet, as Java's library does: `1 a` becomes `_1_x20a`.

    Java keeps letters of all scripts, which other libraries reject. This function converts them too.
    """
    # Java's characters are units of 16 bits.
    units = name.encode("utf-16-be", "surrogatepass")
    text = "".join(chr(int.from_bytes(units[i : i + 2], "big")) for i in range(0, len(units), 2))
    avro_text = _NOT_IN_AVRO_NAMES.sub(lambda match: f"_x{ord(match[0]):X}", text)
    return f"_{avro_text}" if avro_text[0].isdigit() else avro_text


Write = Callable[[Any], bytes]
"""A function that encodes a value in Avro's binary encoding (Avro 1.12 specification, "Binary Encoding").

If the value has no encoding, it raises ValueError.
"""


class AvroField(NamedTuple):
    """A field of a record: its schema and its encoder.

    Attributes:
        name: The name of the field.
        id: The field id.
        type: The Avro type.
        write: The encoder of a value.
        optional: Whether the value can be null.
        since: The first format version that has the field.
        until: The last format version that has the field.
        get: The function that reads the field's value from a row. If it is None, the value is the attribute `name`.
    """

    name: str
    id: int
    type: object
    write: Write
    optional: bool = True
    since: int = 1
    until: int = 3
    get: Callable[[Any], Any] | None = None

    @property
    def schema(self) -> Json:
        if self.optional:
            return {"name": self.name, "type": ["null", self.type], "default": None, "field-id": self.id}
        return {"name": self.name, "type": self.type, "field-id": self.id}


_CACHED_VARINTS = 1 << 14
_LONG_BITS = 64


def encode_varint(value: int) -> bytes:
    """Encode an int or long as a zig-zag varint: seven bits per byte, and the sign in the lowest bit.

    Small numbers are in a table, and numbers of three and four bytes are encoded without a loop, because a manifest has
    many of them.

    Raises:
        ValueError: The value does not fit into 64 bits.
    """
    bits = (value << 1) ^ (value >> 63)
    if 0 <= bits < _CACHED_VARINTS:
        return _VARINTS[bits]
    if not 0 <= bits < 1 << _LONG_BITS:
        raise ValueError(f"{value} does not fit into 64 bits")
    if bits < 1 << 21:
        return bytes((bits & 0x7F | 0x80, bits >> 7 & 0x7F | 0x80, bits >> 14))
    if bits < 1 << 28:
        return bytes((bits & 0x7F | 0x80, bits >> 7 & 0x7F | 0x80, bits >> 14 & 0x7F | 0x80, bits >> 21))
    return _encode_long_varint(bits)


def _encode_long_varint(bits: int) -> bytes:
    buffer = bytearray()
    while bits > 0x7F:
        buffer.append(bits & 0x7F | 0x80)
        bits >>= 7
    buffer.append(bits)
    return bytes(buffer)


_VARINTS = tuple(map(_encode_long_varint, range(_CACHED_VARINTS)))
"""The precomputed encodings of 0 to 16,383: nearly all keys and lengths, and most counts."""


def frame_bytes(data: bytes) -> bytes:
    """Return the length of the bytes, and then the bytes."""
    return encode_varint(len(data)) + data


def _encode_text(value: str) -> bytes:
    return frame_bytes(value.encode())


def _encode_boolean(value: bool) -> bytes:
    return b"\x01" if value else b"\x00"


def _encode_int(value: int) -> bytes:
    if not INT_MIN <= value <= INT_MAX:
        raise ValueError(f"{value} does not fit into 32 bits")
    return encode_varint(value)


def _encode_numbers(values: Sequence[int]) -> bytes:
    return b"".join((encode_varint(len(values)), *map(encode_varint, values), b"\x00")) if values else b"\x00"


# These two functions do most of the work. Calling `encode_varint` for the precomputed values would double their time.
def _encode_counts(by_column: Mapping[int, int]) -> bytes:
    if not by_column:
        return b"\x00"
    parts, cached_varints = [encode_varint(len(by_column))], _VARINTS
    for column, count in by_column.items():
        parts.append(cached_varints[2 * column] if 0 <= column < _CACHED_VARINTS // 2 else _encode_int(column))
        parts.append(cached_varints[2 * count] if 0 <= count < _CACHED_VARINTS // 2 else encode_varint(count))
    parts.append(b"\x00")
    return b"".join(parts)


def _encode_bounds(by_column: Mapping[int, bytes]) -> bytes:
    if not by_column:
        return b"\x00"
    parts, cached_varints = [encode_varint(len(by_column))], _VARINTS
    for column, bound in by_column.items():
        parts.append(cached_varints[2 * column] if 0 <= column < _CACHED_VARINTS // 2 else _encode_int(column))
        size = len(bound)
        parts.append(cached_varints[2 * size] if size < _CACHED_VARINTS // 2 else encode_varint(size))
        parts.append(bound)
    parts.append(b"\x00")
    return b"".join(parts)


def _make_map_field(name: str, field_id: int, key_id: int, value: str) -> AvroField:
    """Return the field of a map by column id.

    The keys are not strings, so Avro represents the map as an array of pairs (spec: appendix A).

    Args:
        name: The name of the field.
        field_id: The field id of the map.
        key_id: The field id of the keys. The field id of the values is the next number, as in the spec.
        value: The Avro type of the values: "long" for counts, or "bytes" for bounds.
    """
    write = _encode_counts if value == "long" else _encode_bounds
    pair = [
        # Only the schemas of these fields are used. `write` encodes the complete map.
        AvroField("key", key_id, "int", _encode_int, False),
        AvroField("value", key_id + 1, value, encode_varint, False),
    ]
    item = {"type": "record", "name": f"k{key_id}_v{key_id + 1}", "fields": [field.schema for field in pair]}
    return AvroField(name, field_id, {"type": "array", "logicalType": "map", "items": item}, write)


def _make_list_type(element_id: int, kind: object) -> Json:
    return {"type": "array", "items": kind, "element-id": element_id}


_NULL_BRANCH, _VALUE_BRANCH = b"\x00", b"\x02"
"""The encoded number of the branch of a union of null and a type: 0 for null, and 1 for a value."""
PARTITION = "partition"
_FILE_FIELDS = (
    AvroField("content", 134, "int", encode_varint, False, since=2),
    AvroField("file_path", 100, "string", _encode_text, False),
    AvroField("file_format", 101, "string", _encode_text, False),
    AvroField(PARTITION, 102, None, encode_varint, False),  # The partition spec determines the type and the encoder.
    AvroField("record_count", 103, "long", encode_varint, False),
    AvroField("file_size_in_bytes", 104, "long", encode_varint, False),
    # Version 1 requires the field, although it has no meaning. Like Java's writers, write 64 MiB.
    AvroField("block_size_in_bytes", 105, "long", encode_varint, False, until=1, get=lambda _: 64 << 20),
    _make_map_field("column_sizes", 108, 117, "long"),
    _make_map_field("value_counts", 109, 119, "long"),
    _make_map_field("null_value_counts", 110, 121, "long"),
    _make_map_field("nan_value_counts", 137, 138, "long"),
    _make_map_field("lower_bounds", 125, 126, "bytes"),
    _make_map_field("upper_bounds", 128, 129, "bytes"),
    AvroField("key_metadata", 131, "bytes", frame_bytes),
    AvroField("split_offsets", 132, _make_list_type(133, "long"), _encode_numbers),
    AvroField("equality_ids", 135, _make_list_type(136, "int"), _encode_numbers, since=2),
    AvroField("sort_order_id", 140, "int", _encode_int),
    AvroField("first_row_id", 142, "long", encode_varint, since=3),
    AvroField("referenced_data_file", 143, "string", _encode_text, since=2),
    AvroField("content_offset", 144, "long", encode_varint, since=3),
    AvroField("content_size_in_bytes", 145, "long", encode_varint, since=3),
)

_TYPES_AND_ENCODERS: dict[str, tuple[object, Write]] = {
    UNKNOWN: ("null", lambda _: b""),
    "boolean": ("boolean", _encode_boolean),
    "int": ("int", _encode_int),
    "long": ("long", encode_varint),
    "float": ("float", Struct("<f").pack),
    "double": ("double", Struct("<d").pack),
    "string": ("string", _encode_text),
    "binary": ("bytes", frame_bytes),
    "date": ({"type": "int", "logicalType": "date"}, _encode_int),
    "time": ({"type": "long", "logicalType": "time-micros"}, encode_varint),
    "timestamp": ({"type": "long", "logicalType": "timestamp-micros", "adjust-to-utc": False}, encode_varint),
    "timestamptz": ({"type": "long", "logicalType": "timestamp-micros", "adjust-to-utc": True}, encode_varint),
    "timestamp_ns": ({"type": "long", "logicalType": "timestamp-nanos", "adjust-to-utc": False}, encode_varint),
    "timestamptz_ns": ({"type": "long", "logicalType": "timestamp-nanos", "adjust-to-utc": True}, encode_varint),
}


def _make_fixed_writer(size: int) -> Write:
    """Return the encoder of values of a fixed type of `size` bytes."""

    def write(value: bytes) -> bytes:
        if len(value) != size:
            raise ValueError(f"{len(value)} bytes are not a value of type fixed[{size}]")
        return value

    return write


def _make_unscaled_writer(size: int) -> Write:
    """Return the encoder of unscaled decimals of `size` bytes."""

    def write(value: int) -> bytes:
        try:
            return value.to_bytes(size, "big", signed=True)
        except OverflowError:
            raise ValueError(f"{value} does not fit into an unscaled decimal of {size} bytes") from None

    return write


def _make_partition_type(kind: str, field_id: int) -> tuple[object, Write]:
    """Return the Avro type of a partition value, and its encoder.

    The name of a fixed type contains the field's id, because Avro requires unique names, and PyIceberg rejects
    references.
    """
    match get_base_name(kind):
        case "uuid":
            return {
                "type": "fixed",
                "name": f"uuid_fixed_{field_id}",
                "size": 16,
                "logicalType": "uuid",
            }, _make_fixed_writer(16)
        case "fixed":
            length = get_fixed_length(kind)
            return {"type": "fixed", "name": f"fixed_{length}_{field_id}", "size": length}, _make_fixed_writer(length)
        case "decimal":
            precision, scale, size = get_decimal_precision(kind), get_decimal_scale(kind), compute_decimal_size(kind)
            name = f"decimal_{precision}_{scale}_{field_id}"
            fixed_type = {"type": "fixed", "name": name, "size": size, "logicalType": "decimal"}
            return {**fixed_type, "precision": precision, "scale": scale}, _make_unscaled_writer(size)
        case name:
            return _TYPES_AND_ENCODERS[name]


def _make_partition_record(fields: Sequence[PartitionField], types: Sequence[str]) -> tuple[Json, Write]:
    """Return the Avro record of the partition values, and its encoder.

    Names are converted to Avro's alphabet. If two fields then have the same name, the second gets its id as a suffix.
    The original name is stored as well. A value of type null takes no bytes, so it has no encoder.
    """
    schemas: dict[str, Json] = {}
    writers: list[Write | None] = []
    for field, kind in zip(fields, types, strict=True):
        field_id = field.field_id or 0
        avro, write = _make_partition_type(kind, field_id)
        name = convert_to_avro_name(field.name)
        avro_field = AvroField(f"{name}_{field_id}" if name in schemas else name, field_id, avro, write)
        schema = avro_field.schema
        if avro == "null":  # A union must not contain null twice.
            schema["type"] = "null"
        schemas[avro_field.name] = (
            schema if avro_field.name == field.name else {**schema, "iceberg-field-name": field.name}
        )
        writers.append(None if avro == "null" else write)

    def write_all(values: Sequence[Any]) -> bytes:
        parts = []
        for value, write in zip(values, writers, strict=True):
            if write is not None:
                parts.append(_NULL_BRANCH if value is None else _VALUE_BRANCH + write(value))
        return b"".join(parts)

    return {"type": "record", "name": "r102", "fields": list(schemas.values())}, write_all


def _make_record(name: str, fields: Iterable[AvroField], format_version: int) -> tuple[Json, Write]:
    """Return the schema of a record, and its encoder for objects that have the fields as attributes.

    Only the fields of the format version are included. An optional field is a union of null and a type, so the number
    of the branch precedes its value.
    """
    version_fields = [field for field in fields if field.since <= format_version <= field.until]
    writers = [(field.get or attrgetter(field.name), field.write, field.optional) for field in version_fields]

    def write_all(row: object) -> bytes:
        parts = []
        for get, write, optional in writers:
            value = get(row)
            if not optional:
                parts.append(write(value))
            elif value is None:
                parts.append(_NULL_BRANCH)
            else:
                parts += _VALUE_BRANCH, write(value)
        return b"".join(parts)

    return {"type": "record", "name": name, "fields": [field.schema for field in version_fields]}, write_all


def build_entry_record(
    format_version: int, fields: Sequence[PartitionField], types: Sequence[str]
) -> tuple[Json, Write]:
    """Return the schema and the encoder of `ManifestEntry`, for a partition spec with these fields and types.

    The names and ids of the records and fields are those of the spec ("Manifests").
    """
    partition, write_partition = _make_partition_record(fields, types)
    file, write_file = _make_record(
        "r2",
        [
            field._replace(type=partition, write=write_partition) if field.name == PARTITION else field
            for field in _FILE_FIELDS
        ],
        format_version,
    )
    return _make_record(
        "manifest_entry",
        [
            AvroField("status", 0, "int", encode_varint, False),
            AvroField("snapshot_id", 1, "long", encode_varint, optional=format_version > 1),
            AvroField("sequence_number", 3, "long", encode_varint, since=2),
            AvroField("file_sequence_number", 4, "long", encode_varint, since=2),
            AvroField("data_file", 2, file, write_file, False, get=attrgetter("file")),
        ],
        format_version,
    )


def build_manifest_file_record(format_version: int) -> tuple[Json, Write]:
    """Return the schema and the encoder of `ManifestFile`."""
    summary, write_summary = _make_record(
        "r508",
        [
            # Null means that there may be nulls.
            AvroField("contains_null", 509, "boolean", lambda value: _encode_boolean(value is not False), False),
            AvroField("contains_nan", 518, "boolean", _encode_boolean),
            AvroField("lower_bound", 510, "bytes", frame_bytes, get=attrgetter("lower")),
            AvroField("upper_bound", 511, "bytes", frame_bytes, get=attrgetter("upper")),
        ],
        format_version,
    )

    def write_summaries(summaries: Sequence[object]) -> bytes:
        return (
            b"".join((encode_varint(len(summaries)), *map(write_summary, summaries), b"\x00")) if summaries else b"\x00"
        )

    is_optional = format_version == 1
    return _make_record(
        "manifest_file",
        [
            AvroField("manifest_path", 500, "string", _encode_text, False),
            AvroField("manifest_length", 501, "long", encode_varint, False),
            AvroField("partition_spec_id", 502, "int", _encode_int, False),
            AvroField("content", 517, "int", encode_varint, False, since=2),
            AvroField("sequence_number", 515, "long", encode_varint, False, since=2),
            AvroField("min_sequence_number", 516, "long", encode_varint, False, since=2),
            AvroField("added_snapshot_id", 503, "long", encode_varint, False),
            AvroField("added_files_count", 504, "int", _encode_int, is_optional),
            AvroField("existing_files_count", 505, "int", _encode_int, is_optional),
            AvroField("deleted_files_count", 506, "int", _encode_int, is_optional),
            AvroField("added_rows_count", 512, "long", encode_varint, is_optional),
            AvroField("existing_rows_count", 513, "long", encode_varint, is_optional),
            AvroField("deleted_rows_count", 514, "long", encode_varint, is_optional),
            AvroField("partitions", 507, _make_list_type(508, summary), write_summaries),
            AvroField("key_metadata", 519, "bytes", frame_bytes),
            AvroField("first_row_id", 520, "long", encode_varint, since=3),
        ],
        format_version,
    )


_ISAL_LEVEL = 1
_RAW_DEFLATE_BITS = -15
"""The parameter of zlib for deflate without a header and a checksum."""
Codec = tuple[str, Callable[[bytes], bytes]]
"""The codec's name in Avro, and the function that compresses a block."""


def get_codec(properties: Mapping[str, str]) -> Codec:
    """Return the codec in the table's properties. The default is gzip, which Avro calls deflate.

    Raises:
        BadRequest: A property is invalid. The message names it.
    """
    name = properties.get(AVRO_COMPRESSION, "gzip").lower()
    level = props.parse_int(properties, AVRO_COMPRESSION_LEVEL, -1) if AVRO_COMPRESSION_LEVEL in properties else None
    make_codec = _CODECS.get(name)
    if make_codec is None:
        raise BadRequest(
            f"Property {AVRO_COMPRESSION} is {name!r}: set it to one of gzip, zstd, snappy and uncompressed"
        )
    low, high = _LEVELS.get(name, (-(2**31), 2**31))  # Other codecs ignore the level.
    if level is not None and not low <= level <= high:
        raise BadRequest(f"Property {AVRO_COMPRESSION_LEVEL} is {level}: set it to {low} to {high} for {name}")
    return make_codec(level)


def _make_deflate_codec(level: int | None) -> Codec:
    """Return the name and the function of the deflate codec.

    Without a level, the function uses the library ISA-L, which takes a tenth of the time of zlib's default level. Avro
    requires raw deflate, without the header of zlib.
    """

    def pack(block: bytes) -> bytes:
        if level is None:
            packer: Any = isal_zlib.compressobj(_ISAL_LEVEL, wbits=_RAW_DEFLATE_BITS)
        else:
            packer = zlib.compressobj(level, wbits=_RAW_DEFLATE_BITS)
        compressed: bytes = packer.compress(block) + packer.flush()
        return compressed

    return "deflate", pack


# pyarrow is imported on first use, because the import takes a tenth of a second and 40 MB in each process.
def _make_zstandard_codec(level: int | None) -> Codec:
    codec = importlib.import_module("pyarrow").Codec("zstd", compression_level=1 if level is None else level)
    return "zstandard", lambda block: codec.compress(block, asbytes=True)


def _make_snappy_codec(_: int | None) -> Codec:
    codec = importlib.import_module("pyarrow").Codec("snappy")
    # The block is in Snappy's format, followed by the CRC-32 of the input.
    return "snappy", lambda block: codec.compress(block, asbytes=True) + zlib.crc32(block).to_bytes(4, "big")


_CODECS: dict[str, Callable[[int | None], Codec]] = {
    "gzip": _make_deflate_codec,
    "deflate": _make_deflate_codec,
    "zstd": _make_zstandard_codec,
    "zstandard": _make_zstandard_codec,
    "snappy": _make_snappy_codec,
    "uncompressed": lambda _: ("null", lambda block: block),
    "null": lambda _: ("null", lambda block: block),
}
_LEVELS = dict.fromkeys(("gzip", "deflate"), (-1, 9)) | dict.fromkeys(("zstd", "zstandard"), (1, 22))


def write_container(schema: Json, rows: Iterable[bytes], header: Mapping[str, str], codec: Codec) -> bytes:
    """Return a complete Avro file with encoded rows.

    Equal rows give equal bytes, because the sync marker between blocks is derived from the header.

    Args:
        schema: The Avro schema of the rows.
        rows: The encoded rows.
        header: The entries of the header, in addition to the schema and the codec.
        codec: The name of the codec, and the function that compresses a block.
    """
    name, pack = codec
    entries = {**header, "avro.schema": msgspec.json.encode(schema).decode(), "avro.codec": name}
    pairs = (_encode_text(key) + _encode_text(value) for key, value in entries.items())
    head = b"".join((b"Obj\x01", encode_varint(len(entries)), *pairs, b"\x00"))
    sync = hashlib.blake2b(head, digest_size=16).digest()
    parts = [head, sync]
    remaining_rows = iter(rows)
    while block := list(islice(remaining_rows, ROWS_PER_BLOCK)):
        parts += encode_varint(len(block)), frame_bytes(pack(b"".join(block))), sync
    return b"".join(parts)
